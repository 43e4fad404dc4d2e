"""How much memory there is for keys and values."""

from __future__ import annotations

from pathlib import Path

import torch

from trio_llm.config import EngineSettings
from trio_llm.core.attention import LayerSpec, bytes_per_block
from trio_llm.errors import ConfigurationError

CPU_SHARE = 0.5
CUDA_SHARE = 0.8
"""Of the memory that is free once the weights are loaded."""


def num_kv_blocks(
    specs: list[LayerSpec], *, block_size: int, dtype: torch.dtype, device: torch.device, settings: EngineSettings,
    max_model_len: int,
) -> int:  # fmt: skip
    """Blocks to allocate: what `kv_cache_memory` says, else as many as a full batch of full
    sequences could use, but not more than a share of the memory that is available.

    Raises:
        ConfigurationError: not even a few blocks fit.
    """
    size = bytes_per_block(specs, block_size, dtype)
    if settings.kv_cache_memory is not None:
        count = settings.kv_cache_memory // size
    else:
        needed = settings.max_num_seqs * -(-max_model_len // block_size)
        count = min(int(_share(device) // size), needed)
    minimum = 4  # the parity probe's
    if count < minimum:
        raise ConfigurationError(
            f"the KV memory holds {count} blocks of {size} bytes, at least {minimum} are needed",
            field="kv_cache_memory",
        )
    return count


def _share(device: torch.device) -> float:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free * CUDA_SHARE
    return available_memory() * CPU_SHARE


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process may still take: the machine's, or its cgroup's where that is less."""
    candidates = [_meminfo(root / "proc/meminfo")]
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            candidates.append(int((root / limit).read_text()) - int((root / used).read_text()))
        except (OSError, ValueError):  # no such cgroup, or "max"
            continue
    return max(0, min(candidates))


def _meminfo(path: Path) -> int:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 * 2**30  # not Linux: a modest guess that --kv-cache-memory overrides
