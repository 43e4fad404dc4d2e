"""How much memory there is, and how many blocks that makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trio_llm.config import EngineSettings
from trio_llm.core import memory
from trio_llm.core.attention import LayerSpec, bytes_per_block
from trio_llm.core.memory import available_memory, num_kv_blocks
from trio_llm.core.model import num_probe_blocks
from trio_llm.errors import ConfigurationError

MIB = 2**20
V2 = {"limit": "sys/fs/cgroup/memory.max", "used": "sys/fs/cgroup/memory.current"}
V1 = {"limit": "sys/fs/cgroup/memory/memory.limit_in_bytes", "used": "sys/fs/cgroup/memory/memory.usage_in_bytes"}


def machine(root: Path, *, available: int | None = 1000 * MIB, files: dict[str, object] | None = None) -> Path:
    """A fake root of a file system."""
    contents: dict[str, object] = dict(files or {})
    if available is not None:
        contents["proc/meminfo"] = (
            f"MemTotal:       99999999 kB\nMemFree:            1234 kB\nMemAvailable:   {available // 1024} kB\nBuffers: 1 kB\n"
        )
    for name, content in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def test_without_a_cgroup_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path)) == 1000 * MIB


@pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])
def test_a_cgroups_limit_less_what_it_uses(tmp_path: Path, version: dict[str, str]) -> None:
    files = {version["limit"]: 300 * MIB, version["used"]: 100 * MIB}
    assert available_memory(machine(tmp_path, files=files)) == 200 * MIB


@pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])
def test_a_cgroup_that_uses_more_than_its_limit_leaves_nothing(tmp_path: Path, version: dict[str, str]) -> None:
    files = {version["limit"]: 300 * MIB, version["used"]: 301 * MIB}
    assert available_memory(machine(tmp_path, files=files)) == 0


@pytest.mark.parametrize(
    "files",
    [
        {V2["limit"]: "max", V2["used"]: 5 * MIB},
        {V1["limit"]: 9223372036854771712, V1["used"]: 5 * MIB},
        {V2["limit"]: 5 * MIB},
        {V2["limit"]: "", V2["used"]: ""},
    ],
    ids=["v2 max", "v1 unlimited", "no usage", "empty"],
)
def test_a_cgroup_without_a_limit_changes_nothing(tmp_path: Path, files: dict[str, object]) -> None:
    assert available_memory(machine(tmp_path, files=files)) == 1000 * MIB


def test_a_limit_above_the_machine_is_no_gain(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, files={V2["limit"]: 10**15, V2["used"]: 0})) == 1000 * MIB


@pytest.mark.parametrize("files", [{}, {"proc/meminfo": "MemTotal: 5 kB"}], ids=["no /proc", "old kernel"])
def test_an_unknown_machine_gets_a_modest_guess(tmp_path: Path, files: dict[str, object]) -> None:
    assert 0 < available_memory(machine(tmp_path, available=None, files=files)) <= 8 * 2**30


def test_the_limit_of_the_processs_own_cgroup_counts(tmp_path: Path) -> None:
    """As under systemd, or in a container that sees the host's hierarchy: no file at the root says it."""
    files = {
        "proc/self/cgroup": "0::/system.slice/trio-llm.service",
        "sys/fs/cgroup/system.slice/trio-llm.service/memory.max": 300 * MIB,
        "sys/fs/cgroup/system.slice/trio-llm.service/memory.current": 100 * MIB,
    }
    assert available_memory(machine(tmp_path, files=files)) == 200 * MIB


SPECS = [LayerSpec(2, 8, 8, None), LayerSpec(2, 8, 8, 9)]


def blocks(device: str = "cpu", block_size: int = 4, max_model_len: int = 40, **settings: int) -> int:
    return num_kv_blocks(
        bytes_per_block(SPECS, block_size, torch.float32),
        block_size=block_size,
        device=torch.device(device),
        settings=EngineSettings(**settings),
        max_model_len=max_model_len,
    )


def test_a_block_counts_keys_and_values_of_all_layers() -> None:
    assert bytes_per_block(SPECS, 4, torch.float32) == 4 * 4 * 2 * (2 * 16)
    assert bytes_per_block(SPECS, 4, torch.bfloat16) == 4 * 2 * 2 * (2 * 16)


def test_no_more_blocks_than_can_be_needed() -> None:
    assert blocks(max_num_seqs=3) == 3 * 10
    assert blocks(max_num_seqs=3, max_model_len=41) == 3 * 11


def test_no_more_blocks_than_half_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 10 * 1024 * 2 + 5)
    assert blocks() == 10


def test_kv_cache_memory_is_taken_at_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 0)
    assert blocks(kv_cache_memory=7 * 1024) == 7
    assert blocks(kv_cache_memory=8 * 1024 - 1) == 7


@pytest.mark.parametrize("amount", [0, 1, 2 * 1024, -1])
def test_too_little_kv_memory_is_refused_by_name(amount: int) -> None:
    with pytest.raises(ConfigurationError) as caught:
        blocks(kv_cache_memory=amount)
    assert caught.value.field == "kv_cache_memory"


def test_too_little_available_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1024)
    with pytest.raises(ConfigurationError):
        blocks()


def test_an_engine_for_one_short_sequence_is_no_fault_of_memory() -> None:
    """What can be needed is less than the probe's pages; there is room for both."""
    assert blocks(max_num_seqs=1, max_model_len=8) >= num_probe_blocks(4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_seqs", -1),
        ("max_num_batched_tokens", 0),
        ("max_num_batched_tokens", 64),
        ("credit_window", 0),
        ("max_model_len", 0),
        ("max_model_len", -4),
        ("block_size", 0),
        ("block_size", -16),
        ("kv_cache_memory", -1),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(ConfigurationError) as caught:
        EngineSettings(**{field: value})
    assert caught.value.field in {field, "max_num_batched_tokens"}
    assert field in caught.value.message
