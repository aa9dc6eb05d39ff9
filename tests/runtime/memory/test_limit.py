"""What memory a process may take, of the machine's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zinf_fx
from zinf_fx.frontend import auto_placement
from zinf_fx.runtime.memory.process import MemoryLimit, memory_limit
from zinf_fx.runtime.tensor import tiers


def in_group(tmp_path: Path, lines: str, **limits: str) -> MemoryLimit:
    groups, mount = tmp_path / "proc/self/cgroup", tmp_path / "sys/fs/cgroup"
    groups.parent.mkdir(parents=True)
    groups.write_text(lines)
    for name, text in limits.items():
        file = mount / name.replace("__", "/")
        file = file.with_name({"limit": "memory.limit_in_bytes", "max": "memory.max"}[file.name])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return memory_limit(tmp_path)


def test_version_2_and_the_groups_around(tmp_path: Path) -> None:
    limit = in_group(tmp_path, "0::/job/step\n", job__step__max="max", job__max="5000000", max="9000000")
    assert limit == MemoryLimit(5_000_000, str(tmp_path / "sys/fs/cgroup" / "job" / "memory.max"))


def test_version_1(tmp_path: Path) -> None:
    lines = "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n"
    limit = in_group(tmp_path, lines, memory__job__limit="4000000", memory__limit=str(1 << 62))
    assert limit == MemoryLimit(4_000_000, str(tmp_path / "sys/fs/cgroup" / "memory" / "job" / "memory.limit_in_bytes"))


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    limit = in_group(tmp_path, "4:memory:/docker/0123\n", memory__limit="3000000")
    assert limit.nbytes == 3_000_000


@pytest.mark.parametrize("lines", ["0::/\n", "", "4:memory:/\n"])
def test_without_limits_it_is_the_machines(tmp_path: Path, lines: str) -> None:
    limit = in_group(tmp_path, lines, max="max", memory__limit=str(1 << 62))
    assert limit.source == "the machine's memory" and limit.nbytes > (256 << 20)


def test_without_control_groups(tmp_path: Path) -> None:
    assert memory_limit(tmp_path).source == "the machine's memory"


def test_what_plans_and_what_allocates_keep_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes the machine's memory in a container is killed."""
    limit = MemoryLimit(6 << 20, "/sys/fs/cgroup/job/memory.max")
    blocks = []
    monkeypatch.setattr(tiers, "memory_limit", lambda: limit)
    monkeypatch.setattr(auto_placement, "memory_limit", lambda: limit)
    monkeypatch.setattr(tiers, "hold_little", lambda: blocks.append(True))
    model = zinf_fx.offload(torch.nn.Linear(512, 1024), store=tmp_path)
    storage = model.weight.stored
    assert storage.placement.optimizer == "nvme"
    assert storage.tiers.host.capacity == limit.nbytes and blocks


def test_a_budget_of_a_later_model_in_the_same_store_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = []
    monkeypatch.setattr(tiers, "memory_limit", lambda: MemoryLimit(1 << 30, "the machine's memory", by_group=False))
    monkeypatch.setattr(tiers, "hold_little", lambda: blocks.append(True))
    layer, other = (torch.nn.Linear(8, 8) for _ in range(2))
    zinf_fx.offload(layer, store=tmp_path, placement="nvme")
    assert not blocks
    zinf_fx.offload(other, store=tmp_path, placement="nvme", device_memory="1GiB")
    assert blocks and layer.weight.stored.tiers is other.weight.stored.tiers
