"""How much memory there is for keys and values."""

from __future__ import annotations

from pathlib import Path

import torch

from trio_llm.config import EngineSettings
from trio_llm.core.model import num_probe_blocks
from trio_llm.errors import ConfigurationError

CPU_SHARE = 0.5
CUDA_SHARE = 0.8
"""Of the memory that is free once the weights are loaded."""


def num_kv_blocks(
    block_bytes: int, *, block_size: int, device: torch.device, settings: EngineSettings, max_model_len: int,
) -> int:  # fmt: skip
    """Blocks to allocate: what `kv_cache_memory` says, else as many as a full batch of full
    sequences could use, but not more than a share of the memory that is available.

    Args:
        block_bytes: of a block in all layers.

    Raises:
        ConfigurationError: not even a few blocks fit.
    """
    minimum = num_probe_blocks(block_size)
    if settings.kv_cache_memory is not None:
        count = settings.kv_cache_memory // block_bytes
    else:
        needed = max(minimum, settings.max_num_seqs * -(-max_model_len // block_size))
        count = min(int(_share(device) // block_bytes), needed)
    if count < minimum:
        raise ConfigurationError(
            f"the KV memory holds {count} blocks of {block_bytes} bytes, at least {minimum} are needed",
            field="kv_cache_memory",
        )
    return count


def _share(device: torch.device) -> float:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free * CUDA_SHARE
    return available_memory() * CPU_SHARE


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process may still take: the machine's, or those of the tightest of its cgroups."""
    candidates = [_meminfo(root / "proc/meminfo")]
    for group in _cgroups(root):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            try:
                free = int((group / limit).read_text()) - int((group / used).read_text())
            except (OSError, ValueError):  # no such file, or "max"
                continue
            candidates.append(free + _inactive_file(group))
    return max(0, min(candidates))


def _cgroups(root: Path) -> list[Path]:
    """The directories of the process's memory cgroups, v2 and v1, with those above them."""
    found = {root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory"}
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in {"", "memory"}:
            group = root / "sys/fs/cgroup" / controllers / path.strip("/")
            found |= {group, *(parent for parent in group.parents if parent.is_relative_to(root / "sys/fs/cgroup"))}
    return sorted(found)


def _inactive_file(group: Path) -> int:
    """Page cache that the kernel gives back before anything else, such as the file of a model just loaded."""
    try:
        fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0


def _meminfo(path: Path) -> int:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 * 2**30  # not Linux: a modest guess that --kv-cache-memory overrides
