"""What happens in one seed: the engine's limits, and for each request what it asks and how it is left."""

from __future__ import annotations

from random import Random

import attrs

from trio_llm.config import EngineSettings
from trio_llm.core.executor import ExecutorInfo
from trio_llm.core.sampling_params import SamplingParams

from .model import LETTERS, VOCAB_SIZE, Form, Poison

NUM_REQUESTS = 210
NUM_LATE = 16
"""Requests that come when the engine drains or is dead."""
NUM_LAST = 24
"""Requests that come shortly before."""
MAX_MODEL_LEN = 48

DOORS = {
    "read to the end": 90,
    "deadline": 9,
    "cancelled": 9,
    "cancelled before it is let in": 7,
    "abort": 24,
    "abort by id": 24,
    "abort twice": 24,
    "abort before it is let in": 7,
    "abort when just let in": 8,
    "left early": 9,
    "an exception in the block": 9,
    "stalled": 8,
}
"""How readers mean to leave, and how often."""
POISONS = [
    "row raises",
    "row runs out of memory",
    "row is not finite",
    "processor raises",
    "admit raises",
    "tokenizer raises",
]


class Prompt(list[int]):
    """Token ids that take `delay` ticks to make."""

    delay = 0


@attrs.define(eq=False)
class Script:
    """One request, as it is meant to go."""

    number: int
    arrival: int
    prompt: Prompt
    params: SamplingParams
    priority: int
    cache_salt: str
    door: str
    delay: int
    """Ticks from the arrival until somebody ends it, for doors that others open."""
    num_reads: int
    """Deltas until the reader leaves or stalls, for doors that it opens itself."""
    pace: int
    """Ticks between two reads."""
    drains: bool
    """Whether it reads all that is there at once."""
    poison: Poison | None
    form: Form | None
    request_id: str


@attrs.frozen
class Traffic:
    info: ExecutorInfo
    settings: EngineSettings
    scripts: list[Script]
    fault_rate: float
    drain_at: int
    end: str
    """"finish": drain until all have ended; "close": end those in flight; "die": the executor breaks."""
    turn_ticks: list[int]
    delivery_ticks: list[int]


def make_traffic(random: Random) -> Traffic:
    block_size = random.choice([1, 3, 4])
    max_num_seqs = random.choice([2, 3, 5, 8, 8])
    settings = EngineSettings(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + random.choice([1, 2, 8, 32]),
        max_num_queued_reqs=random.choice([8, 12, 20]),
        max_num_queued_tokens=random.choice([80, 120, 200]),
        credit_window=random.choice([1, 2, 3, 8]),
        stream_interval=random.choice([0.0, 0.0, 3.0, 10.0]),
        stall_timeout=25.0,
        step_timeout=1000.0,
        enable_prefix_caching=random.random() < 0.8,
        speculative_method=random.choice(["off", "ngram", "draft_model", "draft_model"]),
        speculative_model="simulated",
        num_speculative_tokens=random.choice([2, 8]),
    )
    # from hardly more than one request to hardly any preemption
    num_blocks = -(-random.choice([48, 56, 72, 120]) // block_size)
    info = ExecutorInfo(
        num_blocks=num_blocks, block_size=block_size, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN
    )
    prefixes = [random.choices(LETTERS, k=random.randrange(4, 25)) for _ in range(4)]
    gap = random.uniform(8, 16) / min(max_num_seqs, num_blocks * block_size / 25)
    time = 0.0
    scripts = []
    for number in range(NUM_REQUESTS + NUM_LATE):
        # bursts, then silence
        time += 0 if random.random() < 0.4 else random.expovariate(1 / gap) / 0.6
        scripts.append(_script(random, number, int(time), prefixes, settings.credit_window))
    drain_at = scripts[NUM_REQUESTS].arrival
    for script in scripts[NUM_REQUESTS - NUM_LAST : NUM_REQUESTS]:
        # many are in flight when it ends
        script.arrival = max(script.arrival, drain_at - random.randrange(1, 6))
    return Traffic(
        info=info,
        settings=settings,
        scripts=scripts,
        fault_rate=random.choice([0.01, 0.05, 0.15]),
        drain_at=drain_at,
        end=random.choice(["finish", "close", "die"]),
        turn_ticks=random.choice([[1], [1], [0, 1, 1, 4]]),
        delivery_ticks=random.choice([[0], [0, 0, 1], [0, 1, 3]]),
    )


def _script(random: Random, number: int, arrival: int, prefixes: list[list[int]], window: int) -> Script:
    door = random.choices(list(DOORS), list(DOORS.values()))[0]
    prefix = random.choice(prefixes) if random.random() < 0.7 else []
    prompt = Prompt(prefix[: random.randrange(len(prefix) + 1)] + random.choices(LETTERS, k=random.randrange(1, 8)))
    if "before it is let in" in door or random.random() < 0.1:
        prompt.delay = random.randrange(1, 4)
    n = random.choices([1, 2, 3, 4], [85, 8, 4, 3])[0]
    max_tokens = random.choice([1, 4, 8, 8, 12, 16, 20])
    if random.random() < 0.03:
        max_tokens = MAX_MODEL_LEN  # can never fit
    poison = None
    if door == "read to the end" and random.random() < 0.5:
        poison = Poison(random.choice(POISONS), random.choice([0, 0, 1, 3]), random.randrange(n))
    stop = tuple(
        "".join(map(chr, random.choices(LETTERS, k=random.randrange(1, 3)))) for _ in range(random.choice([0, 0, 1, 2]))
    )
    stop_token_ids = tuple(random.choices(LETTERS, k=random.choice([0, 0, 1])))
    if door == "stalled":
        stop, stop_token_ids, max_tokens = (), (), window + 4
    form = None
    if door != "stalled" and random.random() < 0.16:
        form = Form(random.randrange(8), refused=random.random() < 0.3)
    delay = random.choice([0, 2, 4, 6, 8, 12, 16])
    if door in {"abort", "abort by id", "abort twice"}:
        delay, max_tokens = max(delay, 4), max(max_tokens, 12)
    return Script(
        number=number,
        arrival=arrival,
        prompt=prompt,
        params=SamplingParams(
            n=n,
            max_tokens=max_tokens,
            seed=number + (random.getrandbits(16) << 10),
            stop=stop,
            stop_token_ids=stop_token_ids,
            structured_output=None if form is None else form.structure,
            ignore_eos=door == "stalled" or random.random() < 0.1,
        ),
        priority=random.choice([0, 0, 0, -1, 1]),
        cache_salt=random.choice(["", "", "", "salt"]),
        door=door,
        delay=delay,
        num_reads=random.choice([0, 1, 1, 2, 3]),
        pace=random.choice([0, 0, 0, 0, 1, 5]),
        drains=random.random() < 0.2,
        poison=poison,
        form=form,
        # now and then an id that may still be in use
        request_id=f"r{number - 1 if random.random() < 0.06 else number}",
    )
