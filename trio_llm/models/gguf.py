"""GGUF files: the header by mmap, the tensors one at a time.

A header holds the whole vocabulary, so it is read with `struct` straight from the
map: a file of 49k tokens opens in a twentieth of a second.  Nothing in it is
believed before it is checked against the size of the file, so a damaged or hostile
file ends in ModelLoadError and never in a crash or a huge allocation.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from trio_llm.errors import ModelLoadError
from trio_llm.models.ggml_types import GGML_TYPES, GGMLType

if TYPE_CHECKING:
    import torch

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32 = _SCALARS[4]
_U64 = _SCALARS[10]
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20


@attrs.frozen
class TensorInfo:
    """Where one tensor lies in the file."""

    shape: tuple[int, ...]
    """In torch's order: the last dimension is contiguous."""
    type: GGMLType
    start: int
    """Bytes from the start of the file."""
    num_bytes: int


class GGUFFile:
    """An open GGUF file.  Use it as a context manager, or call `close()`.

    Args:
        path: the file.

    Raises:
        ModelLoadError: it cannot be read, is no GGUF file, or is damaged.
    """

    path: Path
    metadata: Mapping[str, Any]
    """Every key of the header; arrays are lists."""
    tensors: Mapping[str, TensorInfo]

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: mmap refuses an empty file
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        try:
            self.metadata, self.tensors = _Header(self._map).read()
        except _Damaged as error:
            self.close()
            raise ModelLoadError(f"{path} is not a usable GGUF file: {error}") from None

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The values of one tensor, as `dtype`, on the CPU.

        Raises:
            KeyError: the file has no such tensor.
        """
        import torch

        from trio_llm.models.dequantize import dequantize

        info = self.tensors[name]
        with memoryview(self._map) as view:
            # a copy, because torch has no read-only tensors and the map is read-only
            raw = torch.frombuffer(bytearray(view[info.start : info.start + info.num_bytes]), dtype=torch.uint8)
        return dequantize(raw, info.type, dtype).reshape(info.shape)

    def close(self) -> None:
        self._map.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Damaged(Exception):
    """What is wrong with the file; GGUFFile adds the path."""


class _Header:
    """A cursor over the map that never reads past its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.size = len(data)
        self.position = 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self.data[:4] != b"GGUF":
            raise _Damaged("it does not begin with the bytes GGUF")
        self.position = 4
        version = self.scalar(_U32)
        if version not in _VERSIONS:
            raise _Damaged(f"format version {version} is not one of {', '.join(map(str, _VERSIONS))}")
        # the smallest tensor entry and the smallest metadata entry bound what may follow
        num_tensors = self.count("tensors", smallest=8 + 4 + 4 + 8)
        num_keys = self.count("metadata keys", smallest=8 + 4 + 1)

        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            if key in metadata:
                raise _Damaged(f"metadata key {key!r} appears twice")
            metadata[key] = self.value(self.scalar(_U32))
        if not isinstance(metadata.get("general.architecture"), str):
            raise _Damaged("general.architecture is missing")

        entries = [self.tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT:
            raise _Damaged(f"general.alignment is {alignment!r}")
        data_start = -(-self.position // alignment) * alignment

        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise _Damaged(f"tensor {name!r} appears twice")
            num_bytes = prod(shape) // kind.block_size * kind.bytes_per_block
            if offset % alignment or data_start + offset + num_bytes > self.size:
                raise _Damaged(f"tensor {name!r} lies beyond the end of the file, which is cut short")
            tensors[name] = TensorInfo(shape, kind, data_start + offset, num_bytes)
        return metadata, tensors

    def take(self, num_bytes: int) -> int:
        """Step over `num_bytes`; the position they start at."""
        start = self.position
        if num_bytes > self.size - start:
            raise _Damaged("the header runs past the end of the file, which is cut short")
        self.position = start + num_bytes
        return start

    def scalar(self, kind: struct.Struct) -> Any:
        return kind.unpack_from(self.data, self.take(kind.size))[0]

    def count(self, what: str, *, smallest: int) -> int:
        """A number of things that follow, each of at least `smallest` bytes."""
        number = int(self.scalar(_U64))
        if number * smallest > self.size - self.position:
            raise _Damaged(f"it claims {number} {what}, more than the file can hold")
        return number

    def string(self) -> str:
        length = self.scalar(_U64)
        start = self.take(length)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError:
            raise _Damaged(f"the text at byte {start} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise _Damaged(f"unknown metadata type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind = self.scalar(_U32)
        if kind == _STRING:
            return [self.string() for _ in range(self.count("strings", smallest=8))]
        if kind not in _SCALARS:  # arrays of arrays included: nothing writes them
            raise _Damaged(f"unknown type {kind} of an array")
        item = _SCALARS[kind]
        length = self.count("array items", smallest=item.size)
        start = self.take(length * item.size)
        return [x for (x,) in item.iter_unpack(self.data[start : self.position])]

    def tensor_entry(self) -> tuple[str, tuple[int, ...], GGMLType, int]:
        name = self.string()
        num_dimensions = self.scalar(_U32)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise _Damaged(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(self.scalar(_U64) for _ in range(num_dimensions))[::-1]
        if not all(shape):
            raise _Damaged(f"tensor {name!r} is empty: its shape is {shape}")
        type_id = self.scalar(_U32)
        kind = GGML_TYPES.get(type_id)
        if kind is None:
            known = ", ".join(known_type.name for known_type in GGML_TYPES.values())
            raise _Damaged(f"tensor {name!r} has quantisation type {type_id}; only {known} can be read")
        if shape[-1] % kind.block_size:
            raise _Damaged(f"rows of {shape[-1]} values of tensor {name!r} do not fit blocks of {kind.block_size}")
        return name, shape, kind, self.scalar(_U64)
