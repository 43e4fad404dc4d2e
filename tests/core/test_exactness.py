"""docs/exactness.md, row by row: which ways of computing a token give the same bits, and which the same but for rounding.

Logits are noted by the tokens before them, so whatever computes a context again is compared with all that did before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from trio_llm.config import EngineSettings
from trio_llm.core import exactness
from trio_llm.core.build import build_core
from trio_llm.core.engine_core import EngineCore
from trio_llm.core.exactness import ROW_MULTIPLE, batch_dependence
from trio_llm.core.kernels import load
from trio_llm.core.model import PagedModel
from trio_llm.core.page_attention import PageBackend
from trio_llm.core.request import Request
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.core.speculation import Speculation
from trio_llm.core.step import Row, SamplingTask
from trio_llm.core.step_costs import StepCosts
from trio_llm.core.torch_executor import TorchExecutor
from trio_llm.models.loader import LoadedModel

from .helpers import FakeDrafter, make_request, run
from .tiny_models import PROMPTS, build, core_of, paged

NUM_TOKENS = 8
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
"""How far two ways may be apart, relative to the largest logit, where the bits are not promised."""


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Notes:
    """The logits after each context, from any number of engines."""

    def __init__(self) -> None:
        self.logits: dict[tuple[int, ...], Tensor] = {}
        self.num_compared = 0
        self.num_equal = 0
        self.worst = 0.0

    def add(self, context: tuple[int, ...], logits: Tensor) -> None:
        known = self.logits.setdefault(context, logits)
        if known is not logits:
            self.num_compared += 1
            self.num_equal += torch.equal(known, logits)
            self.worst = max(self.worst, float((known - logits).abs().max() / known.abs().max()))

    def watch(self, core: EngineCore) -> None:
        """Note all that the core's executor computes from now on."""
        executor = core.executor
        assert isinstance(executor, TorchExecutor)
        tokens: dict[int, list[int]] = {}
        admit, forward = executor.admit, executor._forward

        def noting_admit(sequence_id: int, task: SamplingTask) -> None:
            tokens[sequence_id] = list(task.prompt_token_ids)
            admit(sequence_id, task)

        def noting_forward(rows: Sequence[Row]) -> Tensor:
            logits = forward(rows)
            offset = 0
            for row in rows:
                context = tokens[row.sequence_id]
                # a chunk is followed by what is known of the prompt, drafts by what comes in their place
                end = None if row.sample else row.start + len(row.token_ids)
                context[row.start : end] = row.token_ids
                if row.sample:
                    for draft in range(row.num_drafts + 1):
                        length = len(context) - row.num_drafts + draft
                        self.add(tuple(context[:length]), logits[offset + draft].clone())
                    offset += row.num_drafts + 1
            return logits

        executor.admit = noting_admit  # type: ignore[method-assign]
        executor._forward = noting_forward  # type: ignore[method-assign]


def built(
    architecture: str,
    *,
    dtype: torch.dtype = torch.float32,
    deterministic: bool = False,
    compiled_kernels: bool = True,
    quantization: Literal["none", "int8"] = "none",
) -> EngineCore:
    """As an engine gets it."""
    loaded = LoadedModel(
        name="tiny",
        model=build(architecture).to(dtype),
        tokenizer=None,  # type: ignore[arg-type]
        defaults=SamplingParams(),
        eos_token_ids=frozenset(),
        load_seconds=0.0,
        max_model_len=256,
    )
    settings = EngineSettings(
        max_num_seqs=8,
        block_size=4,
        max_model_len=64,
        deterministic=deterministic,
        compiled_kernels=compiled_kernels,
        quantization=quantization,
    )
    return build_core(loaded, settings)


def requests() -> list[Request]:
    seeded = {"temperature": 0.9, "seed": 3, "n": 2}
    return [
        make_request(str(i), prompt, max_tokens=NUM_TOKENS, **(seeded if i % 2 else {}))
        for i, prompt in enumerate(PROMPTS)
    ]


def play(notes: Notes, core: EngineCore, these: Sequence[Request]) -> EngineCore:
    notes.watch(core)
    run(core, these)
    return core


def play_alone(notes: Notes, model: PagedModel) -> None:
    for request in requests():
        play(notes, core_of(model, enable_prefix_caching=False), [request])


# -- the ways to compute a text; each gives how many tokens went which way


def among_neighbours(notes: Notes, model: PagedModel) -> int:
    core = play(notes, core_of(model, enable_prefix_caching=False), requests())
    return core.statistics().num_steps < 4 * NUM_TOKENS


def in_chunks(notes: Notes, model: PagedModel) -> int:
    core = core_of(model, enable_prefix_caching=False, max_num_seqs=4, max_num_batched_tokens=7)
    return play(notes, core, requests()).statistics().num_steps > NUM_TOKENS + 4


def from_the_cache(notes: Notes, model: PagedModel) -> int:
    core = core_of(model)
    play(notes, core, requests())
    run(core, requests())
    return core.statistics().num_cache_hits


def preempted(notes: Notes, model: PagedModel) -> int:
    core = core_of(model, num_blocks=20, max_num_batched_tokens=11)
    return play(notes, core, requests()).statistics().num_preemptions


def drafted(notes: Notes, model: PagedModel) -> int:
    core = core_of(model)
    # the last tokens once more: mostly wrong, which is as good here
    drafter = FakeDrafter(lambda sequence, count: sequence.token_ids[-3:][:count])
    drafter.prior = (0.9,)
    core.speculation = Speculation(drafter, max_tokens=3, vocab_size=160, costs=StepCosts(((1, 1.0), (100, 1.0))))
    return play(notes, core, requests()).statistics().num_draft_tokens


Way = Callable[[Notes, PagedModel], int]
WAYS: list[Way] = [among_neighbours, in_chunks, from_the_cache, preempted, drafted]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
architectures = pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "mixtral"])


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "mixtral", "gpt2"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_deterministic_gives_the_same_bits_in_every_way(architecture: str, num_threads: int) -> None:
    notes = Notes()
    with threads(num_threads):
        core = built(architecture, deterministic=True)
        assert core.executor.info.batch_exact
        play_alone(notes, core.executor._model)
        num_contexts = len(notes.logits)
        # threads that wait for each other on a busy machine take very long: all ways with one, the main ones with two
        for way in WAYS if num_threads == 1 else [among_neighbours, drafted]:
            before = notes.num_compared
            assert way(notes, core.executor._model), f"{way.__name__} did not happen"
            assert notes.num_compared > before + num_contexts / 2
            assert notes.num_equal == notes.num_compared, f"{way.__name__}: apart by {notes.worst:.2g}"


KERNELS = load()
HAS_WIDE_VECTORS = KERNELS is not None and KERNELS.vector_bytes == 64


@pytest.mark.skipif(KERNELS is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3"])
@pytest.mark.parametrize(
    ("quantization", "num_threads", "deterministic"),
    [("int8", 1, False), ("int8", 2, False), ("int8", 1, True), ("none", 1, False), ("none", 2, False)],
)
def test_packed_layers_give_the_same_bits_in_every_way(
    architecture: str, quantization: Literal["none", "int8"], num_threads: int, deterministic: bool
) -> None:
    if quantization == "none":
        if not HAS_WIDE_VECTORS:
            pytest.skip("float32 layers are packed for AVX-512 only")
        if architecture == "gemma3_text":
            pytest.skip("torch computes what is between its layers, and its GELU goes by the place in a batch")
    notes = Notes()
    with threads(num_threads):
        core = built(architecture, quantization=quantization, deterministic=deterministic)
        model = core.executor._model
        assert isinstance(model.backend, PageBackend)
        assert core.executor.info.batch_exact
        play_alone(notes, model)
        for way in WAYS:
            before = notes.num_compared
            assert way(notes, model), f"{way.__name__} did not happen"
            assert notes.num_compared > before
            assert notes.num_equal == notes.num_compared, f"{way.__name__}: apart by {notes.worst:.2g}"


@ways
@architectures
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_every_way_is_the_same_but_for_rounding(dtype: torch.dtype, architecture: str, way: Way) -> None:
    core = built(architecture, dtype=dtype, compiled_kernels=False)
    notes = Notes()
    play_alone(notes, core.executor._model)
    assert way(notes, core.executor._model), "it did not happen"
    assert notes.num_compared > 0
    assert notes.worst <= ROUNDING[dtype]
    if way is among_neighbours and core.executor.info.batch_exact:
        assert notes.num_equal == notes.num_compared, f"not what the engine says: apart by {notes.worst:.2g}"


@architectures
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_the_same_again_gives_the_same_bits(dtype: torch.dtype, architecture: str) -> None:
    model = built(architecture, dtype=dtype).executor._model
    notes = Notes()
    for _ in range(2):
        for prompt in PROMPTS:
            core = core_of(model, enable_prefix_caching=False)
            play(notes, core, [make_request("a", prompt, max_tokens=NUM_TOKENS, temperature=0.9)])
    assert notes.num_equal == notes.num_compared == len(notes.logits)


@architectures
def test_the_deterministic_mode_computes_what_the_other_does(architecture: str) -> None:
    notes = Notes()
    for deterministic in (False, True):
        play_alone(notes, built(architecture, deterministic=deterministic).executor._model)
    assert notes.num_compared > 0
    assert notes.worst <= ROUNDING[torch.float32]


def test_what_the_deterministic_mode_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are padded to a multiple of sixteen, and each token of a prompt attends by itself."""
    counts = []
    for deterministic in (False, True):
        model = built("llama", deterministic=deterministic, compiled_kernels=False).executor._model
        rows: list[int] = []
        model.model.lm_head.register_forward_hook(lambda module, args, out, rows=rows: rows.append(args[0].shape[1]))
        model.model.model.layers[0].mlp.down_proj.register_forward_hook(
            lambda module, args, out, rows=rows: rows.append(args[0].shape[1])
        )
        run(core_of(model), [make_request("a", list(range(20)), max_tokens=2)])
        counts.append((rows, len(model.backend.spans)))
        play(Notes(), core_of(model), [make_request("b", list(range(30, 49)), max_tokens=1)])
        counts[-1] = (rows[:4], len(model.backend.spans))
    assert counts == [([20, 1, 1, 1], 1), ([32, 16, 16, 16], 19)]


def test_float32_on_this_machine_is_what_the_table_says() -> None:
    """A row alone takes another path through a matrix product than sixteen do; that is why there is a mode."""
    reason = batch_dependence(paged(build("llama")), num_blocks=64, max_rows=64)
    assert not built("llama", compiled_kernels=False).executor.info.batch_exact
    if HAS_WIDE_VECTORS:
        assert built("llama").executor.info.batch_exact
    assert reason is not None and "computes 1 rows differently" in reason


# -- the probe sees what depends on the batch


class RowByRow(nn.Module):
    """Exact, however slow: each row's sums are made by themselves."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, self.in_features)
        out = torch.stack([(self.weight * row).sum(-1) for row in flat])
        return (out if self.bias is None else out + self.bias).view(*rows.shape[:-1], -1)


class ByTheCount(RowByRow):
    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) * (1 + 1e-6 * (rows.numel() // self.in_features == 37))


class ByThePlace(RowByRow):
    def forward(self, rows: Tensor) -> Tensor:
        out = super().forward(rows)
        out.view(-1, self.out_features)[-1] *= 1 + 1e-6
        return out


class ByTheLargest(RowByRow):
    """As a quantised product that has one scale for all rows."""

    def forward(self, rows: Tensor) -> Tensor:
        scale = rows.abs().max() / 127
        return super().forward((rows / scale).round() * scale)


class ManyOtherwise(RowByRow):
    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) * (1 + 1e-6 * (rows.numel() // self.in_features > 64))


def exact_model() -> PagedModel:
    """A model of exact layers, with widths that fill vectors, so that elementwise operations have no rest either."""
    model = paged(build("llama", intermediate_size=64), block_size=4)
    replace(model.model, RowByRow)
    return model


def replace(model: nn.Module, kind: Callable[[nn.Linear], nn.Module], only: str = "") -> None:
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear | RowByRow) and name.endswith(only):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, kind(module))


def dependence(model: PagedModel, num_blocks: int = 64, max_rows: int = 80) -> str | None:
    return batch_dependence(model, num_blocks=num_blocks, max_rows=max_rows)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 64])
def test_the_probe_says_nothing_of_what_is_exact(num_blocks: int) -> None:
    assert dependence(exact_model(), num_blocks) is None


@pytest.mark.parametrize(
    ("kind", "count"), [(ByTheCount, "37"), (ByThePlace, "64"), (ByTheLargest, "1"), (ManyOtherwise, "80")]
)
@pytest.mark.parametrize("layer", ["layers.1.mlp.up_proj", "lm_head"])
def test_the_probe_sees_one_layer_that_is_not(kind: type[RowByRow], count: str, layer: str) -> None:
    model = exact_model()
    replace(model.model, kind, layer)
    found = dependence(model)
    if kind is ManyOtherwise and layer == "lm_head":
        assert found is None, "so many logits are never made"
    else:
        assert found is not None and f"{kind.__name__} " in found and layer in found and f"{count} rows" in found


def test_layers_that_are_large_are_tried_with_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "LARGE", 1)
    model = exact_model()
    replace(model.model, ByTheCount, "down_proj")
    assert dependence(model) is None
    replace(model.model, ByTheLargest, "down_proj")
    assert dependence(model) is not None


def test_the_probe_sees_what_is_no_layer_of_its_own() -> None:
    model = exact_model()
    norm = model.model.model.norm
    forward = norm.forward
    norm.forward = lambda hidden: forward(hidden) * (1 + 1e-6 * (hidden.shape[1] > 1))
    found = dependence(model)
    assert found == "the model computes 2 tokens differently than one"


def test_the_probe_sees_neighbours_of_a_prompt() -> None:
    model = exact_model()
    norm = model.model.model.norm
    forward = norm.forward
    norm.forward = lambda hidden: forward(hidden) * (1 + 1e-6 * (hidden.shape[1] == 5))
    assert dependence(model, num_blocks=4) == "the model computes a token beside a prompt differently than alone"


def test_the_probe_of_padded_rows_tries_no_others() -> None:
    model = exact_model()
    replace(model.model, ByTheCount, "down_proj")
    model.row_multiple = ROW_MULTIPLE
    assert dependence(model) is None


def test_padding_leaves_the_pages_of_nobody_changed() -> None:
    model = built("llama", deterministic=True, compiled_kernels=False).executor._model
    for pages in model.backend._pages:
        pages.fill_(7.0)
    run(core_of(model, num_blocks=8), [make_request("a", [1, 2, 3], max_tokens=3)])
    for pages in model.backend._pages:
        assert (pages.flatten(0, 1) != 7.0).flatten(1).any(-1).sum() == 3 + 2, "a token is written once"
