"""What came of it: streamed answers as their reader saw them, and the figures of many."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import orjson
from http_client import EventParser
from report import spread


@attrs.define
class Arrival:
    """The text that one read from the connection brought."""

    time: float
    chunks: int = 0
    characters: int = 0


@attrs.define
class Answer:
    """One streamed answer as it was seen; `failure` says why it does not count."""

    started: float
    ended: float = 0.0
    arrivals: list[Arrival] = attrs.Factory(list)
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    failure: str | None = None
    pieces: list[tuple[float, bytes]] | None = None
    """The stream as it came, with the times; None if there is nothing to read."""

    def read(self) -> None:
        """Read the stream, which is left until the run is over: a client takes as little as it can of the machine."""
        if self.pieces is None:
            return
        parser = EventParser()
        for time, piece in self.pieces:
            for event in parser.feed(piece):
                self.take(event, time)
        self.pieces = None
        if self.failure is None and self.finish_reason is None:
            self.failure = "the stream ended without a finish_reason"
        elif self.failure is None and not self.arrivals:
            self.failure = "the answer holds no text"

    def take(self, event: bytes, now: float) -> None:
        """Note one event of the stream."""
        if event == b"[DONE]":
            return
        try:
            chunk = orjson.loads(event)
        except ValueError:
            self.failure = "an event is not JSON"
            return
        if not isinstance(chunk, dict) or chunk.get("error") is not None:
            self.failure = f"an error in the stream: {str(chunk)[:200]}"
            return
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text = delta.get("content") or delta.get("reasoning_content") or ""
            if text:
                if not self.arrivals or self.arrivals[-1].time != now:
                    self.arrivals.append(Arrival(now))
                self.arrivals[-1].chunks += 1
                self.arrivals[-1].characters += len(text)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    @property
    def num_chunks(self) -> int:
        """Chunks that held text."""
        return sum(arrival.chunks for arrival in self.arrivals)

    @property
    def tokens(self) -> int:
        """Output tokens: the server's own count, else one a chunk."""
        return self.num_chunks if self.usage is None else int(self.usage["completion_tokens"])

    def token_gaps(self) -> Iterator[tuple[float, float]]:
        """(seconds a token, tokens) of each arrival but the first.

        Where chunks are fewer than tokens (some were joined), an arrival has tokens in
        proportion to its characters; the last token may be an end token without a text.
        """
        by_chunks = self.num_chunks >= self.tokens - 1
        characters = sum(arrival.characters for arrival in self.arrivals)
        for before, arrival in zip(self.arrivals, self.arrivals[1:], strict=False):
            share = arrival.chunks if by_chunks else self.tokens * arrival.characters / characters
            tokens = max(1.0, share)
            yield (arrival.time - before.time) / tokens, tokens


def percentile(samples: Iterable[tuple[float, float]], fraction: float) -> float:
    """The smallest value that at least `fraction` of the weight of (value, weight) lies at or below."""
    ordered = sorted(samples)
    wanted = fraction * sum(weight for _, weight in ordered)
    reached = 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= wanted - 1e-9:
            return value
    return 0.0


def summarise(answers: Sequence[Answer]) -> dict[str, float]:
    """The figures of one run; only answers without a failure count."""
    good = [answer for answer in answers if answer.failure is None]
    wall = max(answer.ended for answer in answers) - min(answer.started for answer in answers)
    first = [(answer.arrivals[0].time - answer.started, 1.0) for answer in good]
    gaps = [gap for answer in good for gap in answer.token_gaps()]
    tokens = sum(answer.tokens for answer in good)
    return {
        "output_tokens_per_s": tokens / wall,
        "requests_per_s": len(good) / wall,
        "ttft_p50_ms": 1e3 * percentile(first, 0.5),
        "ttft_p99_ms": 1e3 * percentile(first, 0.99),
        "itl_p50_ms": 1e3 * percentile(gaps, 0.5),
        "itl_p99_ms": 1e3 * percentile(gaps, 0.99),
        "prompt_tokens": statistics.fmean([(answer.usage or {}).get("prompt_tokens", 0) for answer in good] or [0]),
        "output_tokens": tokens / max(1, len(good)),
        "tokens_per_arrival": tokens / max(1, sum(len(answer.arrivals) for answer in good)),
        "requests": len(answers),
        "errors": len(answers) - len(good),
        "counted_by_chunks": sum(answer.usage is None for answer in good),
        "wall_s": wall,
    }


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The results as a Markdown table: medians over the repeats, with [low-high] of the tokens a second."""
    unit = "rate" if "rate" in results[0] else "concurrency"
    lines = [
        f"| {'requests/s come' if unit == 'rate' else 'clients'} | output tokens/s | requests/s | TTFT p50 ms | TTFT p99 ms | ITL p50 ms | ITL p99 ms | errors |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in results:
        cells = [
            f"{row[unit]:g}",
            spread([repeat["output_tokens_per_s"] for repeat in row["repeats"]]),
            f"{row['requests_per_s']['median']:.2f}",
            *(f"{row[f'{name}_{at}_ms']['median']:.1f}" for name in ("ttft", "itl") for at in ("p50", "p99")),
            f"{sum(repeat['errors'] for repeat in row['repeats'])}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
