"""What is asked: prompts that are the same in every process and for every server."""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from typing import Any

import attrs
import orjson

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say how much is asked, of whatever is measured."""
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="clients")
    parser.add_argument("--requests", type=int, default=0, help="of one run; default: 4 a client, at least 8")
    parser.add_argument("--prompt-tokens", type=int, default=110, help="roughly, without the chat template")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shared-prefix", action="store_true", help="three quarters of all prompts are the same")


def load_of(args: argparse.Namespace, **others: Any) -> Load:
    """The load that such arguments ask for."""
    names = ("prompt_tokens", "max_tokens", "seed", "shared_prefix")
    return Load(**{name: getattr(args, name) for name in names}, **others)


def num_requests(args: argparse.Namespace, concurrency: int) -> int:
    """Requests of one run of so many clients."""
    return max(concurrency, args.requests or max(8, 4 * concurrency))
