"""Every way to compute a text gives transformers' own text: alone, batched, chunked, preempted."""

from __future__ import annotations

import pytest

from trio_llm.config import EngineSettings
from trio_llm.core.attention import SdpaBackend
from trio_llm.models.loader import load_model

from .helpers import is_idle, make_request, run
from .tiny_models import ARCHITECTURES, BACKENDS, PROMPTS, Comparison, build, core_of, greedy, paged, references

NUM_TOKENS = 64
comparison = Comparison()


def requests(prompts=PROMPTS):
    return [make_request(str(index), prompt, max_tokens=NUM_TOKENS) for index, prompt in enumerate(prompts)]


def compare(core, expected, prompts=PROMPTS, counts=comparison) -> None:
    outputs, _ = run(core, requests(prompts))
    for index, reference in enumerate(expected):
        counts.compare(outputs[str(index), 0], reference)
    assert is_idle(core)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_is_transformers_own_however_it_is_computed(architecture: str, backend: str) -> None:
    expected = references(architecture)
    # a random model may repeat itself; it must not do nothing else
    assert len({token for reference in expected for token in reference.token_ids}) > 8

    wide = paged(build(architecture), block_size=16, backend=backend)
    wide.probe()
    for prompt, reference in zip(PROMPTS, expected, strict=True):
        compare(core_of(wide), [reference], [prompt])
    compare(core_of(wide), expected)
    compare(core_of(wide, max_num_seqs=4, max_num_batched_tokens=7), expected)

    narrow = paged(build(architecture), block_size=4, backend=backend)
    narrow.probe()
    compare(core_of(narrow, max_num_seqs=2, max_num_batched_tokens=3), expected)
    preempting = core_of(narrow, num_blocks=30, max_num_batched_tokens=11)
    compare(preempting, expected)
    assert preempting.statistics().num_preemptions > 0
    comparison.check()


@pytest.mark.parametrize("architecture", ["mistral", "gemma3_text", "gpt_oss"])
def test_the_comparison_would_see_a_window_that_is_one_too_wide(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = paged(build(architecture), block_size=4, backend="torch")
    right = SdpaBackend.reaches
    monkeypatch.setattr(SdpaBackend, "reaches", lambda self, window: right(self, window and window + 1))
    with pytest.raises(AssertionError, match="differs"):
        compare(core_of(narrow), references(architecture), counts=Comparison())


def test_the_comparison_would_see_a_forgotten_token(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = paged(build("llama"), block_size=4, backend="torch")
    right = SdpaBackend._slots
    assert isinstance(narrow.backend, SdpaBackend)
    for pages in narrow.backend._pages:
        pages.zero_()  # what was never written may hold a NaN, which would fail the request and not differ

    def forget(self, span):
        slots = right(self, span)
        return slots.where(slots % 16 != 9, 0)

    monkeypatch.setattr(SdpaBackend, "_slots", forget)
    with pytest.raises(AssertionError, match="differs"):
        compare(core_of(narrow), references("llama"), counts=Comparison())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 2, 5, 64])
def test_any_block_size_and_prompts_that_end_on_its_border(block_size: int, backend: str) -> None:
    model = build("gemma3_text")
    prompts = [[9, 8, 7, 6, 5] * 4, [3] * (2 * block_size), [4] * (2 * block_size + 1), [5] * max(1, block_size - 1)]
    expected = [greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    counts = Comparison()
    num_blocks = 800 // block_size
    paged_model = paged(model, block_size=block_size, num_blocks=max(4, num_blocks), backend=backend)
    for budget in (9, 512):
        core = core_of(paged_model, num_blocks=num_blocks, max_num_batched_tokens=budget)
        compare(core, expected, prompts, counts)
    counts.check()


def test_a_sequence_that_ends_or_is_finished_does_not_disturb_its_neighbours() -> None:
    expected = references("qwen3")
    core = core_of(paged(build("qwen3"), block_size=4), num_blocks=40, max_num_batched_tokens=13)
    outputs: dict[str, list[int]] = {str(index): [] for index in range(4)}
    for request in requests():
        core.add(request)
    for number in range(400):
        if not core.has_work():
            break
        if number % 5 == 2:  # newcomers that are cut off at any point
            core.add(make_request(f"gone{number}", [number % 160] * (number % 11 + 1), n=2, max_tokens=30))
        if number % 7 == 3:
            core.finish(f"gone{number - number % 5 + 2}")
            core.finish(f"gone{number - number % 5 - 3}", 1)
        for output in core.step():
            if output.request_id in outputs:
                outputs[output.request_id] += output.token_ids
        core.check()
    counts = Comparison()
    for index, reference in enumerate(expected):
        counts.compare(outputs[str(index)], reference)
    counts.check()


def test_two_cores_that_step_in_turns_do_not_disturb_each_other() -> None:
    names = ["gemma3_text", "gpt2", "gpt2"]
    cores = [
        core_of(paged(build(name), block_size=block_size), num_blocks=num_blocks, max_num_batched_tokens=budget)
        for name, block_size, num_blocks, budget in zip(names, (4, 4, 16), (30, 64, 8), (9, 11, 512), strict=True)
    ]
    outputs: list[dict[str, list[int]]] = [{str(index): [] for index in range(4)} for _ in cores]
    for core in cores:
        for request in requests():
            core.add(request)
    while any(core.has_work() for core in cores):
        for core, tokens in zip(cores, outputs, strict=True):
            for output in core.step():
                tokens[output.request_id] += output.token_ids
            core.check()
    counts = Comparison()
    for name, tokens in zip(names, outputs, strict=True):
        for index, reference in enumerate(references(name)):
            counts.compare(tokens[str(index)], reference)
    counts.check()


# -- the real model


@pytest.mark.parametrize("backend", BACKENDS)
def test_smollm2_gives_transformers_own_text_however_it_is_computed(backend: str) -> None:
    loaded = load_model("smollm2", settings=EngineSettings(device="cpu"))
    texts = [
        "The capital of France is",
        "def fibonacci(n):\n",
        "Once upon a time, in a small village by the sea, there",
    ]
    prompts = [loaded.tokenizer(text)["input_ids"] for text in texts]
    # batched in one call, transformers would pad; one by one is its plainest form
    expected = [greedy(loaded.model, prompt, NUM_TOKENS) for prompt in prompts]
    counts = Comparison()
    model = paged(loaded.model, block_size=16, backend=backend)
    model.probe()
    compare(core_of(model), expected[:1], prompts[:1], counts)
    compare(core_of(model), expected, prompts, counts)
    compare(core_of(model, max_num_seqs=3, max_num_batched_tokens=4), expected, prompts, counts)
    preempting = core_of(model, num_blocks=12)
    compare(preempting, expected, prompts, counts)
    assert preempting.statistics().num_preemptions > 0
    counts.check()
