"""A closed-loop load on OpenVINO GenAI's continuous batching, in process.

Needs `pip install openvino-genai orjson attrs`, in an environment of its own if you like; bench/peers.py starts it.
The prompts and the figures are those of bench/serve.py.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import openvino_genai
from answers import Answer, Arrival, summarise
from load import add_arguments, load_of, num_requests
from report import arguments, look, quiet, repeats, spread_of, write


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
        self.load = load_of(args, model="openvino", timeout=600, extra_body={}, api_key=None)
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
    parser = arguments(__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    add_arguments(parser)
    args = parser.parse_args()
    server = Server(str(args.gguf), args)
    results = []
    for concurrency in args.concurrency:
        requests = num_requests(args, concurrency)
        server.closed_loop(f"warm {concurrency}", concurrency=concurrency, requests=max(2, concurrency))
        runs = []
        for repeat in repeats(args):
            before = look()
            answers = server.closed_loop(f"{concurrency} {repeat}", concurrency=concurrency, requests=requests)
            runs.append({**summarise(answers), **before})
        results.append({"concurrency": concurrency, **spread_of(runs), "repeats": runs})
    write(args, results, idle=quiet(run for result in results for run in result["repeats"]))


if __name__ == "__main__":
    main()
