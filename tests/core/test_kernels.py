"""The kernels are built once, found again, and done without where they cannot be had."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from trio_llm.core import kernels
from trio_llm.core.attention import Options, SequenceSpan, attention
from trio_llm.core.kernels import Kernels, load
from trio_llm.core.page_attention import LayerSpec, PageBackend


@pytest.fixture
def page_backend() -> PageBackend:
    return PageBackend(load() or pytest.skip("there is no C++ compiler here"), 4)


def test_without_a_compiler_there_are_none_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert load.__wrapped__() is None
    assert "no C++ compiler" in caplog.text


@pytest.mark.parametrize("compiler", ["no-such-compiler-here", "false"])
def test_a_compiler_that_fails_is_no_compiler(
    compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.WARNING):
        assert load.__wrapped__() is None
    assert "cannot be built" in caplog.text


def test_what_was_built_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if load() is None:
        pytest.skip("there is no C++ compiler here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = (*kernels.FLAGS, "-O0")
    assert load.__wrapped__(flags) is not None
    (library,) = (tmp_path / "trio_llm").iterdir()
    made = library.stat().st_mtime_ns
    assert load.__wrapped__(flags) is not None
    assert [(path, path.stat().st_mtime_ns) for path in (tmp_path / "trio_llm").iterdir()] == [(library, made)]


# -- attention

SPEC = LayerSpec(num_kv_heads=2, key_dim=8, value_dim=12, sliding_window=None)
SHAPES = [(4, 8, 12), (16, 32, 80), (64, 6, 16), (80, 10, 32), (2, 4, 6), (6, 2, 5)]
"""Tokens of a block, dim of keys and of values: for vectors of 16, 4, 2 and 1 lanes."""


def attend_in_steps(
    backend: PageBackend,
    numbers: tuple[torch.Tensor, ...],
    chunks: list[int],
    options: Options,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """One sequence of all tokens, computed chunk by chunk, in blocks that lie apart."""
    query, key, value = numbers
    num_blocks = 2 * -(-sum(chunks) // backend.block_size) + 1
    (layer,) = backend.allocate([LayerSpec(key.shape[1], key.shape[3], value.shape[3], None)], num_blocks, dtype)
    for pages in backend._pages:
        pages.fill_(float("nan"))  # as memory that was never written may be
    table = list(range(1, num_blocks, 2))
    out = []
    start = 0
    for length in chunks:
        part = slice(start, start + length)
        backend.begin_step([SequenceSpan(start, length, table)])
        out.append(layer.attend(None, query[:, :, part], key[:, :, part], value[:, :, part], options))
        start += length
    return torch.cat(out, dim=1)


OPTIONS = [
    Options(),
    Options(scaling=0.7),
    Options(sliding_window=5),
    Options(sliding_window=1),
    Options(softcap=2.0),
    Options(sinks=torch.tensor([0.5, -3.0, 9.0, 0.0, 1.0, 2.0])),
    Options(sliding_window=7, softcap=3.0, sinks=torch.zeros(6)),
]


def random_numbers(length: int, key_dim: int, value_dim: int) -> tuple[torch.Tensor, ...]:
    """Query, key and value of a sequence, three heads to a pair of these."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, key_dim), (2, key_dim), (2, value_dim))
    return tuple(torch.randn(1, heads, length, dim, generator=generator) for heads, dim in shapes)


def seen(length: int, options: Options) -> torch.Tensor:
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    return mask & ~mask.tril(-options.sliding_window) if options.sliding_window else mask


CHUNKS = ([1] * 70, [3] * 23 + [1], [64, 6], [11, 1, 1, 50, 7])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("block_size", "key_dim", "value_dim"), SHAPES)
def test_attention_over_pages_is_attention(block_size: int, key_dim: int, value_dim: int, options: Options) -> None:
    backend = PageBackend(load() or pytest.skip("there is no C++ compiler here"), block_size)
    numbers = random_numbers(70, key_dim, value_dim)
    whole = attend_in_steps(backend, numbers, [70], options)
    expected = attention(*numbers, seen(70, options), causal=False, options=options)
    torch.testing.assert_close(whole, expected.transpose(1, 2), rtol=1e-5, atol=2e-6)
    for chunks in CHUNKS:
        assert torch.equal(attend_in_steps(backend, numbers, chunks, options), whole), "chunks change no bit"


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("block_size", "key_dim", "value_dim"), SHAPES[:-1])
def test_attention_in_bfloat16_is_attention_of_rounded_numbers(
    block_size: int, key_dim: int, value_dim: int, options: Options
) -> None:
    backend = PageBackend(load() or pytest.skip("there is no C++ compiler here"), block_size)
    query, key, value = random_numbers(70, key_dim, value_dim)
    whole = attend_in_steps(backend, (query, key, value), [70], options, torch.bfloat16)
    scaling = key_dim**-0.5 if options.scaling is None else options.scaling
    rounded = [numbers.bfloat16().double() for numbers in (query * scaling, key, value)]
    exact = Options(scaling=1.0, sliding_window=options.sliding_window, softcap=options.softcap, sinks=options.sinks)
    mask = seen(70, options)
    expected, size = (
        attention(*rounded[:2], of, mask, causal=False, options=exact).transpose(1, 2)
        for of in (rounded[2], rounded[2].abs())
    )
    # each weight may be off by half of its last place, 2^-8 of it, and by that of a sum in float32
    assert ((whole - expected).abs() <= (2**-8 + 1e-5) * size + 1e-6).all()
    for chunks in CHUNKS:
        assert torch.equal(attend_in_steps(backend, (query, key, value), chunks, options, torch.bfloat16), whole), (
            "chunks change no bit"
        )


def test_a_nan_stays_with_its_sequence_and_is_not_rounded_to_a_number(page_backend: PageBackend) -> None:
    numbers = random_numbers(9, 8, 12)
    numbers[1][0, 0, 3, 1] = float("nan")
    for dtype in (torch.float32, torch.bfloat16):
        out = attend_in_steps(page_backend, numbers, [9], Options(), dtype)
        assert out[0, :3].isfinite().all()
        assert out[0, 3:, :3].isnan().all() and out[0, 3:, 3:].isfinite().all(), "heads that share the key"


def test_a_sequence_does_not_see_its_neighbours(page_backend: PageBackend) -> None:
    generator = torch.Generator().manual_seed(1)
    (layer,) = page_backend.allocate([SPEC], 64, torch.float32)
    lengths = [1, 9, 4, 30, 2]
    numbers = [
        tuple(torch.randn(1, heads, length, dim, generator=generator) for heads, dim in ((6, 8), (2, 8), (2, 12)))
        for length in lengths
    ]
    tables = [list(range(10 * index, 10 * index + 10)) for index in range(len(lengths))]
    alone = []
    for part, length, table in zip(numbers, lengths, tables, strict=True):
        page_backend.begin_step([SequenceSpan(0, length, table)])
        alone.append(layer.attend(None, *part, Options()))
    page_backend.begin_step([SequenceSpan(0, length, table) for length, table in zip(lengths, tables, strict=True)])
    packed = [torch.cat([part[kind] for part in numbers], dim=2) for kind in range(3)]
    assert torch.equal(layer.attend(None, *packed, Options()), torch.cat(alone, dim=1))


def test_numbers_may_lie_in_any_order(page_backend: PageBackend) -> None:
    generator = torch.Generator().manual_seed(2)
    (layer,) = page_backend.allocate([SPEC], 8, torch.float32)
    page_backend.begin_step([SequenceSpan(0, 9, [3, 1, 2])])
    plain = [torch.randn(1, heads, 9, dim, generator=generator) for heads, dim in ((6, 8), (2, 8), (2, 12))]
    expected = layer.attend(None, *plain, Options())
    turned = [numbers.transpose(1, 2).contiguous().transpose(1, 2) for numbers in plain]
    assert torch.equal(layer.attend(None, *turned, Options()), expected)
    strided = [numbers.transpose(2, 3).contiguous().transpose(2, 3) for numbers in plain]
    assert torch.equal(layer.attend(None, *strided, Options()), expected)


def test_other_types_are_refused(page_backend: PageBackend) -> None:
    with pytest.raises(TypeError, match="float16"):
        page_backend.allocate([SPEC], 4, torch.float16)


@pytest.mark.parametrize(("block_size", "key_dim", "value_dim"), [(3, 8, 12), (4, 7, 12), (4, 8, 11)])
def test_odd_shapes_are_refused_in_bfloat16(
    page_backend: PageBackend, block_size: int, key_dim: int, value_dim: int
) -> None:
    page_backend.block_size = block_size
    with pytest.raises(ValueError, match="even"):
        page_backend.allocate([LayerSpec(2, key_dim, value_dim, None)], 4, torch.bfloat16)


def test_a_step_may_be_filled_up_but_not_cut(page_backend: PageBackend) -> None:
    (layer,) = page_backend.allocate([SPEC], 8, torch.float32)
    page_backend.begin_step([SequenceSpan(0, 9, [3, 1, 2])])
    numbers = [torch.ones(1, heads, 12, dim) for heads, dim in ((6, 8), (2, 8), (2, 12))]
    out = layer.attend(None, *numbers, Options())
    assert (out[:, :9] == 1).all()
    assert (out[:, 9:] == 0).all(), "what fills the step up attends to nothing"
    with pytest.raises(ValueError, match="8 rows for the 9 tokens"):
        layer.attend(None, *(x[:, :, :8] for x in numbers), Options())


# -- the largest logit


@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 1023, 1024, 1025, 2049, 5000])
def test_the_largest_logit_is_found_wherever_it_is(kernels: Kernels, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    places = sorted({0, size // 3, size - 1})
    rows = torch.randn((len(places), size), generator=generator)
    rows[range(len(places)), places] = 9.0
    assert kernels.best(rows) == places
    rows[:, -1] = 9.0
    assert kernels.best(rows) == places, "of equals it is the first"
    for bad in (float("nan"), float("inf")):
        for place in places:
            others = rows.clone()
            others[1 % len(rows), place] = bad
            expected = [*places]
            expected[1 % len(rows)] = -1
            assert kernels.best(others) == expected, "one row says nothing of its neighbours"
    rows[:] = float("-inf")
    assert kernels.best(rows) == [-1] * len(places)


def test_many_rows_are_shared_among_threads(kernels: Kernels) -> None:
    rows = torch.randn((40, 3000), generator=torch.Generator().manual_seed(0))
    assert kernels.best(rows) == rows.argmax(-1).tolist()
