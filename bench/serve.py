"""A load on any OpenAI-compatible server: `python bench/serve.py --url http://127.0.0.1:8000`.

Closed loop: each of `--concurrency` clients sends a streaming chat completion, reads it to its end
and sends the next, until `--requests` were answered.  Open loop: requests come at random at a
`--rate`, whether those before them were answered or not, as the public's do.  Either is
repeated, and medians are reported with their lowest and highest value.  docs/benchmarks.md says
what the columns mean.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
import orjson
import trio
from http_client import Client, Connect, EventParser, ProtocolError

# about one token each in most vocabularies
WORDS = (
    "river stone light garden winter paper music silver morning bridge window ocean forest letter market engine summer "
    "shadow mirror castle island needle pocket ladder candle thunder village harbor mountain kitchen blanket teacher "
    "doctor farmer sailor painter soldier captain brother sister mother father child friend stranger king queen road "
    "house table chair clock horse tiger eagle snake rabbit spider honey bread butter apple orange lemon sugar coffee "
    "water fire earth wind rain snow cloud storm star moon sun sky field grass tree flower leaf root seed fruit gold "
    "iron glass wood cloth leather cotton silk rope wheel boat train plane rocket map book pen story song dance dream"
).split()
INSTRUCTION = "\n\nWrite a long story in which all of these words appear, one after the other."


@attrs.frozen
class Load:
    """What to ask for."""

    model: str
    prompt_tokens: int
    max_tokens: int
    seed: int
    shared_prefix: bool
    timeout: float
    extra_body: Mapping[str, Any]
    api_key: str | None

    def prompt(self, run: str, index: int) -> str:
        """A text of about `prompt_tokens` tokens, the same in every process for the same arguments.

        No two begin alike, so a server's prefix cache helps only if `shared_prefix` is set:
        then the first three quarters are the same in all.
        """
        count = max(1, self.prompt_tokens - len(INSTRUCTION.split()))
        shared = count * 3 // 4 if self.shared_prefix else 0
        words = random.Random(f"{self.seed}").choices(WORDS, k=shared)
        words += random.Random(f"{self.seed} {run} {index}").choices(WORDS, k=count - shared)
        return " ".join(words) + INSTRUCTION

    def body(self, run: str, index: int) -> bytes:
        """The JSON of one request."""
        return orjson.dumps(
            {
                "model": self.model,
                "messages": [{"role": "user", "content": self.prompt(run, index)}],
                "max_tokens": self.max_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self.extra_body,
            }
        )

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        return headers | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})


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


async def ask(client: Client, path: str, load: Load, run: str, index: int) -> Answer:
    """Send one request and read its answer to the end.  Failures are in the answer, none is raised."""
    answer = Answer(trio.current_time())
    with trio.move_on_after(load.timeout) as scope:
        try:
            head = await client.request("POST", f"{path}/chat/completions", load.headers, load.body(run, index))
            if head.status == 200:
                parser = EventParser()
                while piece := await client.receive_body():
                    for event in parser.feed(piece):
                        answer.take(event, client.received_at)
            else:
                text = b""
                while piece := await client.receive_body():
                    text += piece
                answer.failure = f"HTTP {head.status}: {text[:200].decode(errors='replace')}"
        except (OSError, trio.BrokenResourceError, ProtocolError) as error:
            answer.failure = f"{type(error).__name__}: {error}"
    answer.ended = trio.current_time()
    if scope.cancelled_caught:
        answer.failure = f"no end within {load.timeout:g} s"
    elif answer.failure is None and answer.finish_reason is None:
        answer.failure = "the stream ended without a finish_reason"
    elif answer.failure is None and not answer.arrivals:
        answer.failure = "the answer holds no text"
    if answer.failure is not None:
        await client.aclose()
    return answer


async def closed_loop(
    connect: Connect, host: str, path: str, load: Load, run: str, *, concurrency: int, requests: int
) -> list[Answer]:
    """`requests` answers by `concurrency` clients, each of which asks again when it was answered."""
    answers: list[Answer] = []
    indices = iter(range(requests))

    async def one_client() -> None:
        client = Client(connect, host)
        try:
            for index in indices:
                answer = await ask(client, path, load, run, index)
                answers.append(answer)
        finally:
            await client.aclose()

    async with trio.open_nursery() as nursery:
        for _ in range(concurrency):
            nursery.start_soon(one_client)
    return answers


async def open_loop(
    connect: Connect, host: str, path: str, load: Load, run: str, *, rate: float, requests: int
) -> list[Answer]:
    """`requests` answers to requests that arrive as a Poisson process of `rate` a second, seeded."""
    answers: list[Answer] = []
    arrivals = random.Random(f"{load.seed} {run}")

    async def one_request(index: int) -> None:
        client = Client(connect, host)
        try:
            answers.append(await ask(client, path, load, run, index))
        finally:
            await client.aclose()

    async with trio.open_nursery() as nursery:
        due = trio.current_time()
        for index in range(requests):
            await trio.sleep_until(due)
            nursery.start_soon(one_request, index)
            due += arrivals.expovariate(rate)
    return answers


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


def machine() -> dict[str, Any]:
    """What this machine is; the versions are those beside this program, not the server's."""
    cpu = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    versions = {"python": platform.python_version()}
    for name in ("trio-llm", "trio", "torch", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "system": platform.platform(), "versions": versions}


async def measure(connect: Connect, host: str, path: str, load: Load, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs of all concurrencies, or of all rates, each after its own warm-up.

    Raises:
        SystemExit: an answer of a warm-up failed; measuring makes no sense then.
    """
    results = []
    for level in args.rate or args.concurrency:
        concurrency = 8 if args.rate else level
        warm = await closed_loop(
            connect, host, path, load, f"warm {level}", concurrency=concurrency, requests=max(2, concurrency)
        )
        if failed := [answer.failure for answer in warm if answer.failure is not None]:
            raise SystemExit(f"warm-up failed: {failed[0]}")
        repeats = []
        for repeat in range(args.repeats):
            load_average, cpu_before = os.getloadavg()[0], sum(os.times()[:2])
            run, requests = f"{level} {repeat}", max(concurrency, args.requests or max(8, 4 * concurrency))
            if args.rate:
                answers = await open_loop(connect, host, path, load, run, rate=level, requests=requests)
            else:
                answers = await closed_loop(connect, host, path, load, run, concurrency=concurrency, requests=requests)
            summary = summarise(answers)
            summary["client_cpu_share"] = (sum(os.times()[:2]) - cpu_before) / summary["wall_s"]
            summary["load_average_before"] = load_average
            repeats.append(summary)
            for failure in sorted({answer.failure for answer in answers if answer.failure is not None}):
                print(f"error at {level}: {failure}", file=sys.stderr)
        results.append({"rate" if args.rate else "concurrency": level, **spread_of(repeats), "repeats": repeats})
    return results


def spread_of(repeats: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Of each figure of several runs the median, the lowest and the highest."""
    columns = {name: [repeat[name] for repeat in repeats] for name in repeats[0]}
    return {
        name: {"median": statistics.median(values), "low": min(values), "high": max(values)}
        for name, values in columns.items()
    }


def busiest(results: Sequence[Mapping[str, Any]]) -> float:
    """The highest load average before a run: above the number of running programs something else ran."""
    return max(float(result["load_average_before"]["high"]) for result in results)


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The results as a Markdown table: medians over the repeats, with [low-high] of the tokens a second."""
    unit = "rate" if "rate" in results[0] else "concurrency"
    lines = [
        f"| {'requests/s come' if unit == 'rate' else 'clients'} | output tokens/s | requests/s | TTFT p50 ms | TTFT p99 ms | ITL p50 ms | ITL p99 ms | errors |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in results:
        speed = row["output_tokens_per_s"]
        cells = [
            f"{row[unit]:g}",
            f"{speed['median']:.1f} [{speed['low']:.1f}-{speed['high']:.1f}]",
            f"{row['requests_per_s']['median']:.2f}",
            *(f"{row[f'{name}_{at}_ms']['median']:.1f}" for name in ("ttft", "itl") for at in ("p50", "p99")),
            f"{sum(repeat['errors'] for repeat in row['repeats'])}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server, without /v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rate", type=float, nargs="+", help="open loop, in place of --concurrency: requests a second")
    parser.add_argument("--requests", type=int, default=0, help="of one run; default: 4 a client, at least 8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=110, help="roughly, without the chat template")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shared-prefix", action="store_true", help="three quarters of all prompts are the same")
    parser.add_argument("--extra-body", type=orjson.loads, default={}, help="a JSON object, added to each request")
    parser.add_argument("--api-key")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one answer")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--label", default="", help="what is measured, for the JSON")
    return parser.parse_args(argv)


async def run(args: argparse.Namespace) -> int:
    """Measure, print and write; the exit status is 1 if any request failed."""
    url = urlsplit(args.url)
    secure = url.scheme == "https"
    port = url.port or (443 if secure else 80)

    async def connect() -> trio.abc.Stream:
        assert url.hostname is not None
        if secure:
            return await trio.open_ssl_over_tcp_stream(url.hostname, port, https_compatible=True)
        return await trio.open_tcp_stream(url.hostname, port)

    names = ("model", "prompt_tokens", "max_tokens", "seed", "shared_prefix", "timeout", "extra_body", "api_key")
    load = Load(**{name: getattr(args, name) for name in names})
    facts = machine()
    results = await measure(connect, url.netloc, f"{url.path.rstrip('/')}/v1", load, args)

    print(table(results))
    print(f"\n{facts['cpu']}, {facts['cores']} cores, {facts['system']}")
    print(f"load average before a run at most {busiest(results):.2f}; client's share of one core at most ", end="")
    print(f"{max(result['client_cpu_share']['high'] for result in results):.2f}")
    print(f"prompts of {results[0]['prompt_tokens']['median']:.0f} tokens, median of {args.repeats} runs [low-high]")
    if any(result["counted_by_chunks"]["high"] for result in results):
        print("some answers came without usage: their tokens are counted as chunks of text")
    if args.json is not None:
        settings = {name: value for name, value in vars(args).items() if name not in ("api_key", "json")}
        document = {"settings": settings, "machine": facts, "results": results}
        await trio.Path(args.json).write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    return int(any(result["errors"]["high"] for result in results))


if __name__ == "__main__":
    raise SystemExit(trio.run(run, parse(None)))
