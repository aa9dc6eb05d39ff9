"""Training runs under a memory limit that the kernel enforces: who exceeds it is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

MIB = 1 << 20
ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))  # of version 1, and of 2
LIMITS = ("memory.limit_in_bytes", "memory.max")
PEAKS = ("memory.max_usage_in_bytes", "memory.peak")


@pytest.fixture
def group() -> Iterator[Path]:
    """Make a control group of its own, without a limit yet."""
    for root in ROOTS:
        path = root / f"zinf_fx_test_{os.getpid()}"
        try:
            path.mkdir()
        except OSError:
            continue
        if any((path / name).exists() for name in LIMITS):
            yield path
            path.rmdir()
            return
        path.rmdir()
    pytest.skip("no control group can be made here: that takes root, and a writable /sys/fs/cgroup")


def limit(group: Path, nbytes: int) -> None:
    """From now on, the group's processes have so much memory, and no swap."""
    (name,) = (name for name in LIMITS if (group / name).exists())
    (group / name).write_text(str(nbytes))
    for swap, value in (("memory.memsw.limit_in_bytes", nbytes), ("memory.swap.max", 0)):
        with suppress(OSError):
            (group / swap).write_text(str(value))


def peak(group: Path) -> int:
    """Return the most bytes that the group's processes had."""
    return next(int((group / name).read_text()) for name in PEAKS if (group / name).exists())


PROGRAM = """
import sys, torch, zinf_fx
from torch import nn
store, procs, tile = sys.argv[1:]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4096, 24576), nn.Linear(24576, 4096)
    def forward(self, x):
        return (x + self.down(self.up(x).relu())).square().mean()

options = dict(store=store, placement="nvme", device_memory="64MiB", chunk="2MiB")
options["tile"] = None if tile == "none" else tile
model = zinf_fx.offload(Model(), **options)
open(procs, "w").write("0")  # from here on, what is allocated counts against the limit
compiled, optimizer = torch.compile(model, backend="zinf"), zinf_fx.optim.AdamW(model.parameters(), lr=1e-5)
x, losses = torch.randn(8, 4096), []
for _ in range(3):
    loss = compiled(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[0] > losses[1] > losses[2], losses
print("trained")
"""


def run(group: Path, store: Path, tile: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(store), str(group / "cgroup.procs"), tile]
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


@pytest.mark.slow
def test_a_layer_larger_than_the_limit_trains_in_tiles(group: Path, tmp_path: Path) -> None:
    """Each of two layers has 384 MiB; compiler, activations and buffers together get less."""
    limit(group, 288 * MIB)
    done = run(group, tmp_path, "auto")
    assert done.stdout == "trained\n", f"status {done.returncode}: {done.stderr[-3000:]}"
    assert peak(group) <= 288 * MIB


@pytest.mark.slow
def test_untiled_it_is_refused_when_it_is_planned(group: Path, tmp_path: Path) -> None:
    done = run(group, tmp_path, "none")
    assert done.returncode == 1 and "BudgetError" in done.stderr and 'tile="auto"' in done.stderr, done.stderr[-3000:]


VARIANT = Path(__file__).parents[1] / "benchmarks" / "train_step_variant.py"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_gpt_of_303_million_parameters_trains_in_1536_mib(group: Path, tmp_path: Path) -> None:
    """Its states have 4.2 GB; interpreter, PyTorch and compiler count too."""
    request = {
        "variant": "zinf",
        "device": "cpu",
        "model": {"layers": 24, "hidden": 1024, "heads": 16, "context": 512},
        **{"batch": 4, "dtype": "bfloat16", "warmup": 0, "steps": 2, "clip": None, "seed": 0, "optimizer": {}},
        "offloading": {"placement": "nvme", "activations": "recompute", "chunk": "8MiB", "store": str(tmp_path)},
    }
    limit(group, 1536 * MIB)
    command = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} {VARIANT} '{json.dumps(request)}'"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr[-3000:]}"
    assert peak(group) <= 1536 * MIB


EXAMPLE = Path(__file__).parents[1] / "examples" / "bigger_than_memory.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_finds_the_limit_and_trains_twice_as_much_below_it(group: Path, tmp_path: Path) -> None:
    limit(group, 1024 * MIB)
    command = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} {EXAMPLE} --store {tmp_path}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr[-3000:]}"
    assert f"memory limit 1.0 GiB ({group}" in done.stdout and "2.0 GiB of states" in done.stdout
    assert peak(group) <= 1024 * MIB


MAPPINGS = """
import resource, sys, torch, zinf_fx, zinf_fx.errors
store = sys.argv[1]
for kind, counted in (resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize"):
    taken = int(next(line for line in open("/proc/self/status") if line.startswith(counted)).split()[1]) << 10
    resource.setrlimit(kind, (taken + (1 << 30), resource.RLIM_INFINITY))
    try:
        zinf_fx.offload(torch.nn.Linear(4, 4), store=store, placement="nvme", host_memory="2GiB")
    except zinf_fx.errors.StoreError as error:
        print(error)
    model = zinf_fx.offload(torch.nn.Linear(64, 64), store=store, placement="nvme")
    model(torch.ones(2, 64)).sum().backward()
    zinf_fx.optim.AdamW(model.parameters()).step()
    print(model.weight.stored.tiers.host.capacity >> 20)
    resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    del model
"""


def test_a_limit_of_what_the_process_maps(tmp_path: Path) -> None:
    """A budget that doesn't fit is refused, and says why; where none is given, half of what is left is reserved."""
    done = subprocess.run([sys.executable, "-c", MAPPINGS, tmp_path], capture_output=True, text=True)
    assert not done.returncode and "Exception ignored" not in done.stderr, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 4, said
    for refusal, capacity in (said[:2], said[2:]):
        assert "lower host_memory, or raise the process's limit (ulimit -v, -d)" in refusal
        assert 256 < int(capacity) <= 512
