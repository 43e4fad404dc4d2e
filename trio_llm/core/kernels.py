"""The compiled part: builds `kernels.cpp` at first use, loads it, and gives its functions Python types.

One compiler call of a few seconds, whose result is kept in the cache directory under a hash of
source, flags, compiler and CPU.  Where there is no compiler everything runs on torch alone:
each of these functions has a counterpart there, and tests compare the two.

Threads are those of torch's own OpenMP runtime: the library is linked without one and finds
that of torch when it is loaded, so two runtimes never fight for the cores.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trio_llm.models.catalogue import cache_directory

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-fopenmp",
)  # fmt: skip
TILE = 16
"""Outputs of a linear layer that are packed side by side."""
GROUP = 64
"""Inputs that share a scale."""


class Linear(Structure):
    """A packed layer: every `step`-th tile from `tiles` on."""

    _fields_ = (
        ("tiles", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("step", c_int64),
        ("in_floats", c_int64),
    )


class Pages(Structure):
    """One layer's KV memory, in words of one float32 or two bfloat16.

    Keys (block, head, words of key_dim, block_size), values (block, head, words of block_size, value_dim).
    """

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("num_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("block_size", c_int64),
        ("numbers_per_word", c_int64),
    )


class Spans(Structure):
    """The sequences of a step; the arrays are int64, one entry a sequence but for `blocks`, the block tables in a row."""

    _fields_ = (
        ("count", c_int64),
        ("num_tokens", c_int64),
        ("offsets", c_void_p),
        ("lengths", c_void_p),
        ("starts", c_void_p),
        ("tables", c_void_p),
        ("blocks", c_void_p),
    )


class Heads(Structure):
    """Where the numbers of (token, head) begin; strides in numbers."""

    _fields_ = (("data", c_void_p), ("token_stride", c_int64), ("head_stride", c_int64))


class Attention(Structure):
    """How scores are made; 0 and null stand for none."""

    _fields_ = (
        ("num_heads", c_int64),
        ("scaling", c_float),
        ("softcap", c_float),
        ("window", c_int64),
        ("sinks", c_void_p),
    )


class Decoder(Structure):
    """A decoder layer; what it points to must outlive it."""

    _fields_ = (
        ("norm_weights", c_void_p),
        ("next_norm_weights", c_void_p),
        ("eps", c_float),
        ("next_eps", c_float),
        ("projections", Linear),
        ("output", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("head_eps", c_float),
        ("rotary_dim", c_int64),
        ("attention", Attention),
        ("pages", Pages),
    )


class Model(Structure):
    """A model that is embeddings, decoder layers, a norm and a head; what it points to must outlive it.

    Cosines and sines are (positions, rotary_dim).
    """

    _fields_ = (
        ("embeddings", c_void_p),
        ("layers", POINTER(Decoder)),
        ("num_layers", c_int64),
        ("rotary_dim", c_int64),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("norm_weights", c_void_p),
        ("eps", c_float),
        ("head", Linear),
    )


def tile_bytes(inputs: int, dtype: torch.dtype) -> int:
    """Of a packed tile: in int8 a float32 scale and 64 bytes for each group of inputs and each output."""
    return TILE * (4 * inputs if dtype is torch.float32 else -(-inputs // GROUP) * (4 + GROUP))


class Kernels:
    """The functions of `kernels.cpp`.  All tensors are float32 on the CPU unless something else is said."""

    def __init__(self, library: ctypes.CDLL) -> None:
        def function(name: str, *types: type) -> ctypes._CFuncPtr:  # type: ignore[name-defined]
            found = getattr(library, f"trio_llm_{name}")
            found.argtypes = types
            found.restype = None
            return found

        self.vector_bytes: int = c_int64.in_dll(library, "trio_llm_vector_bytes").value
        """Of the vectors that the CPU computes with."""
        self._pack = function("pack", c_void_p, POINTER(Linear))
        self._linear = function("linear", POINTER(Linear), c_void_p, c_int64, c_int64, c_void_p, c_int)
        self._best = function("best", c_void_p, c_int64, c_int64, c_void_p, c_int)
        self._draw = function("draw", c_void_p, c_int64, c_int64, *[c_void_p] * 6, c_int)
        self._attend = function(
            "attend",
            POINTER(Pages),
            POINTER(Spans),
            POINTER(Heads),
            POINTER(Heads),
            POINTER(Heads),
            POINTER(Attention),
            c_void_p,
            c_int,
        )
        self._decoders = function(
            "decoders", POINTER(Decoder), c_int64, POINTER(Spans), c_void_p, c_void_p, c_void_p, c_void_p, c_int
        )
        self._forward = function(
            "forward", POINTER(Model), POINTER(Spans), c_void_p, c_void_p, c_int64, c_void_p, c_int
        )

    def pack(self, weight: Tensor, dtype: torch.dtype, packed: Tensor, *, first: int = 0, step: int = 1) -> Linear:
        """Put a weight (outputs, inputs) into every `step`-th tile from `first` on.

        Args:
            dtype: int8 or float32.
            packed: (tiles, `tile_bytes(inputs, dtype)`), uint8, contiguous; it must outlive what is returned.
        """
        outputs, inputs = weight.shape
        whole = weight.float().contiguous()
        layer = Linear(packed[first].data_ptr(), None, inputs, outputs, step, dtype is torch.float32)
        self._pack(whole.data_ptr(), byref(layer))
        return layer

    def best(self, logits: Tensor) -> list[int]:
        """The place of the largest logit of each row (rows, vocab), contiguous; -1 where it is not finite or one is
        not a number."""
        tokens = array("q", bytes(8 * len(logits)))
        address, _ = tokens.buffer_info()
        self._best(logits.data_ptr(), logits.shape[-1], len(logits), address, torch.get_num_threads())
        return tokens.tolist()

    def draw(
        self,
        logits: Tensor,
        rows: Sequence[int],
        keys: Sequence[tuple[int, int]],
        temperatures: Sequence[float],
        top_ps: Sequence[float],
        min_ps: Sequence[float],
    ) -> list[int]:
        """The winners of the race that core/sampler.py describes, for some rows of logits (any, vocab), contiguous.

        Args:
            keys: noise keys.
            top_ps: 1 for none.
            min_ps: 0 for none.
        """
        places = array("q", rows)
        floats = [array("f", values) for values in (temperatures, top_ps, min_ps)]
        words = array("i", [word for key in keys for word in key])
        tokens = array("q", bytes(8 * len(places)))
        arrays: list[array[Any]] = [places, *floats, words, tokens]
        addresses = [numbers.buffer_info()[0] for numbers in arrays]
        self._draw(logits.data_ptr(), logits.shape[-1], len(places), *addresses, torch.get_num_threads())
        return tokens.tolist()

    def linear(self, layer: Linear, rows: Tensor) -> Tensor:
        """(count, inputs) -> (count, outputs); rows contiguous."""
        out = torch.empty((rows.shape[0], layer.outputs), dtype=torch.float32, device="cpu")
        self._linear(
            byref(layer), rows.data_ptr(), layer.inputs, rows.shape[0], out.data_ptr(), torch.get_num_threads()
        )
        return out

    def attend(
        self, pages: Pages, spans: Spans, query: Tensor, key: Tensor, value: Tensor, how: Attention, out: Tensor
    ) -> None:
        """Write the keys and values of a step's tokens to their pages, then attend.

        Args:
            query, key, value: (heads, tokens, dim) in any order of the first two.
            out: (1, tokens, heads, value_dim), contiguous.
        """
        _pad(out, spans)
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        self._attend(
            byref(pages),
            byref(spans),
            byref(_heads(query)),
            byref(_heads(key)),
            byref(_heads(value)),
            byref(how),
            out.data_ptr(),
            torch.get_num_threads(),
        )

    def decoders(
        self, layers: ctypes.Array[Decoder], spans: Spans, x: Tensor, cosines: Tensor, sines: Tensor
    ) -> Tensor:
        """Decoder layers, one after the other.

        Args:
            x: (1, tokens, width), contiguous.
            cosines, sines: (1, tokens, rotary_dim), contiguous.
        """
        out = torch.empty_like(x)
        _pad(out, spans)
        self._decoders(
            layers,
            len(layers),
            byref(spans),
            x.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def forward(self, model: Model, spans: Spans, token_ids: Sequence[int], wanted: Sequence[int]) -> Tensor:
        """The logits (len(wanted), vocab) of some of a step's tokens.

        Args:
            token_ids: of all spans; each has an embedding.
            wanted: indices into them.
        """
        if len(token_ids) != spans.num_tokens or not 0 <= min(wanted) <= max(wanted) < len(token_ids):
            raise ValueError(f"{len(token_ids)} token ids for the {spans.num_tokens} tokens of a step")
        numbers = array("q", [*token_ids, *wanted])
        address, _ = numbers.buffer_info()
        out = torch.empty((len(wanted), model.head.outputs), dtype=torch.float32, device="cpu")
        self._forward(
            byref(model),
            byref(spans),
            address,
            address + 8 * len(token_ids),
            len(wanted),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


def _pad(out: Tensor, spans: Spans) -> None:
    """Zero the rows after the step's tokens, with which a step may be filled up."""
    num_rows = out.shape[1]
    if num_rows > spans.num_tokens:
        out[:, spans.num_tokens :] = 0
    elif num_rows < spans.num_tokens:  # out of bounds is no error in C++
        raise ValueError(f"{num_rows} rows for the {spans.num_tokens} tokens of a step")


def _heads(numbers: Tensor) -> Heads:
    return Heads(numbers.data_ptr(), numbers.stride(1), numbers.stride(0))


@functools.cache
def load(flags: tuple[str, ...] = FLAGS) -> Kernels | None:
    """The compiled functions; None where they cannot be built or loaded, which is logged once."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++", "clang++")), None)
    if compiler is None:
        logger.warning("no C++ compiler was found: int8 layers and the quick attention are not available")
        return None
    try:
        path = _build([*shlex.split(compiler)], flags)
        _share_openmp()
        return Kernels(ctypes.CDLL(str(path)))
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().partition("\n")[0]
    except OSError as error:
        reason = str(error)
    logger.warning("the kernels cannot be built, torch does their work more slowly: %s", reason)
    return None


def _build(compiler: list[str], flags: tuple[str, ...]) -> Path:
    """Compile unless that was done before; gives the library."""
    version = subprocess.run([*compiler, "--version"], check=True, capture_output=True, text=True).stdout
    what = (SOURCE.read_text(encoding="utf-8"), *flags, *compiler, version, _cpu())
    digest = hashlib.blake2b("\0".join(what).encode(), digest_size=12).hexdigest()
    target = cache_directory() / f"kernels-{digest}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as directory:
            compiled, linked = Path(directory, "kernels.o"), Path(directory, "kernels.so")
            for command in (
                [*compiler, *flags, "-c", str(SOURCE), "-o", str(compiled)],
                # without -fopenmp: its functions are found in torch's runtime
                [*compiler, "-shared", str(compiled), "-o", str(linked)],
            ):
                subprocess.run(command, check=True, capture_output=True, text=True)
            linked.replace(target)
    return target


def _cpu() -> str:
    """What tells CPUs apart for which the compiler would make different code."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}))


def _share_openmp() -> None:
    """Make the symbols of torch's OpenMP runtime visible to libraries that are loaded later."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    ctypes.CDLL(str(bundled[0]) if bundled else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
