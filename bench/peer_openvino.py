"""A closed-loop load on OpenVINO GenAI's continuous batching, in process.

Needs `pip install openvino-genai orjson trio attrs`, in an environment of its own if you like; bench/peers.py starts it.
The prompts and the figures are those of bench/serve.py.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import openvino_genai
import orjson
from serve import Answer, Arrival, Load, spread_of, summarise


class Server:
    """A pipeline and the requests that are in it."""

    def __init__(self, path: str, args: argparse.Namespace) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2  # GB
        scheduler.max_num_batched_tokens = 512
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = False
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU")
        self.tokenizer = self.pipeline.get_tokenizer()
        self.config = openvino_genai.GenerationConfig()
        self.config.max_new_tokens = args.max_tokens
        self.config.do_sample = False
        self.config.ignore_eos = True
        self.load = Load(
            model="openvino",
            prompt_tokens=args.prompt_tokens,
            max_tokens=args.max_tokens,
            seed=args.seed,
            shared_prefix=False,
            timeout=600,
            extra_body={},
            api_key=None,
        )
        self.num_requests = 0

    def closed_loop(self, run: str, *, concurrency: int, requests: int) -> list[Answer]:
        """`requests` answers, `concurrency` of them in the pipeline at any time."""
        answers: list[Answer] = []
        running: list[tuple[Answer, Any]] = []
        indices = iter(range(requests))
        while True:
            while len(running) < concurrency and (index := next(indices, None)) is not None:
                answer = Answer(time.perf_counter())
                messages = [{"role": "user", "content": self.load.prompt(run, index)}]
                text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
                tokens = self.tokenizer.encode(text, add_special_tokens=False).input_ids
                answer.usage = {"prompt_tokens": tokens.shape[1], "completion_tokens": 0}
                running.append((answer, self.pipeline.add_request(self.num_requests, tokens, self.config)))
                self.num_requests += 1
            if not running:
                return answers
            self.pipeline.step()
            now = time.perf_counter()
            for answer, handle in list(running):
                count = 0
                while handle.can_read():
                    count += sum(len(output.generated_ids) for output in handle.read().values())
                if count:
                    assert answer.usage is not None
                    completed = answer.usage["completion_tokens"] + count
                    answer.usage = {**answer.usage, "completion_tokens": completed}
                    answer.arrivals.append(Arrival(now, count, count))
                    if completed >= self.load.max_tokens:
                        answer.ended, answer.finish_reason = now, "length"
                        answers.append(answer)
                        running.remove((answer, handle))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=110)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    server = Server(args.gguf, args)
    results = []
    for concurrency in args.concurrency:
        requests = max(concurrency, args.requests or max(8, 4 * concurrency))
        server.closed_loop(f"warm {concurrency}", concurrency=concurrency, requests=max(2, concurrency))
        repeats = []
        for repeat in range(args.repeats):
            load_average = os.getloadavg()[0]
            answers = server.closed_loop(f"{concurrency} {repeat}", concurrency=concurrency, requests=requests)
            repeats.append({**summarise(answers), "load_average_before": load_average})
        results.append({"concurrency": concurrency, **spread_of(repeats), "repeats": repeats})
    args.json.write_bytes(orjson.dumps({"results": results}, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    main()
