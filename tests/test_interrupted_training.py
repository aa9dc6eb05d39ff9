"""Training goes on after Ctrl-C, wherever it strikes: what a step changes is as before, as after it, or reported torn.

The long version, at every line of a step: python -m pytest -m slow -n 2 tests/test_interrupted_training.py
"""

from __future__ import annotations

import copy
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from interrupting import interrupted_at, time_limit
from torch import nn

import zinf_fx
from zinf_fx import optim
from zinf_fx.errors import OptimizerError
from zinf_fx.runtime.execute.executor import EXECUTOR

State = list[torch.Tensor]

# Steps after which training begins again: gradients get too small to tell a wrong sum from another order of adding.
_STEPS = 100


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let PyTorch use one thread: those of several processes would wait for each other at each operator of models this
    small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Training:
    """A model that is interrupted, and a plain one that says what a step makes of it."""

    def __init__(self, store: Path, *, width: int = 64, layers: int = 2, in_backward: bool = False, **fields: object):
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.plain = nn.Sequential(*(nn.Linear(width, width, bias=not number) for number in range(layers)))
        self.model = zinf_fx.offload(copy.deepcopy(self.plain), store=store, **fields)
        self.call = torch.compile(self.model, backend="zinf")
        self.parameters = list(self.model.parameters())
        self.in_backward = in_backward
        self.tolerance = 1e-4 if "tile" in fields else 0.0  # tiles add in another order
        self.optimizer = optim.AdamW(self.parameters, lr=1e-2, step_in_backward=in_backward)
        self.reference = torch.optim.AdamW(self.plain.parameters(), lr=1e-2, fused=True)
        self.x = torch.randn(4, width)
        self.tiers = self.parameters[0].stored.tiers
        self.outcomes: dict[str, int] = {}
        for _ in range(3):  # compiles, and learns the order of the graphs
            self.whole_step()
        self.optimizer.zero_grad()
        self.allocated = self._at_rest()
        for _ in range(3):
            self.plain_step()
        assert as_expected(self._found(), self._expected(), self.tolerance)
        self._repair()
        self._begin = copy.deepcopy((self.plain.state_dict(), self.reference.state_dict()))

    def loss(self) -> torch.Tensor:
        return self.call(self.x).square().mean()

    def whole_step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def plain_step(self) -> None:
        self.plain(self.x).square().mean().backward()
        self.reference.step()
        self.reference.zero_grad()

    def interrupt(self, number: int, call: Callable[[], object], sent: signal.Signals = signal.SIGINT) -> bool:
        """Interrupt `call`, which steps, at its `number`-th line. Whether it has so many; all is in order then."""
        came, lines = interrupted_at(number, call, sent)
        self.check(came, f"line {number}")
        return lines == number

    def check(self, came: bool, when: str) -> None:
        """After a step that may have been interrupted: what it came to, and that all is in order."""
        assert torch.is_grad_enabled(), when
        try:
            self.optimizer.state_dict()
        except OptimizerError as error:
            if "call step()" in str(error):
                self.optimizer.step()  # which backward began
        self.optimizer.zero_grad()
        outcome = "before"
        if self.optimizer.torn is not None:
            self._repair()
            outcome = "torn"
        elif not as_expected(actual := self._found(), self._expected()):
            self.plain_step()
            outcome, expected = "after", self._expected()
            assert as_expected(actual, expected, self.tolerance), f"{when}: neither as before nor as after the step"
            for tensor, other in zip(actual, expected, strict=True):
                other.copy_(tensor)
        assert came or outcome == "after", f"{when}: no step, and no interrupt"
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if outcome == "after" and self.outcomes["after"] % _STEPS == 0:
            self.plain.load_state_dict(self._begin[0])
            self.reference.load_state_dict(self._begin[1])
            self._repair()
        assert self._at_rest() == self.allocated, f"{when}: bytes of the arena are lost"

    def _at_rest(self) -> int:
        EXECUTOR.reset()
        self.optimizer.finish()
        self.tiers.drain()
        if getattr(self, "allocated", None) != self.tiers.host.in_use:
            gc.collect()
        return self.tiers.host.in_use

    def _expected(self) -> State:
        states = self.reference.state
        return [t for p in self.plain.parameters() for t in (p.detach(), *_elementwise(states[p]), states[p]["step"])]

    def _found(self) -> State:
        states = self.optimizer.state
        stored = [t for p in self.parameters for t in (p.detach(), *_elementwise(states[p]), states[p]["step"])]
        return [torch.clone(tensor) for tensor in stored]

    def _repair(self) -> None:
        self.optimizer.load_state_dict(self.reference.state_dict())
        with torch.no_grad():
            for stored, plain in zip(self.parameters, self.plain.parameters(), strict=True):
                stored.copy_(plain)


def as_expected(actual: State, expected: State, tolerance: float = 0.0) -> bool:
    return all(torch.allclose(a, b, rtol=0, atol=tolerance) for a, b in zip(actual, expected, strict=True))


def _elementwise(state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return state["exp_avg"], state["exp_avg_sq"]


def test_an_interrupt_in_a_step(tmp_path: Path):
    """It strikes at some lines of `step()` alone, over one layer."""
    training = Training(tmp_path, layers=1, width=8, placement="nvme")
    number, going = 1, True
    while going:
        training.loss().backward()
        going = training.interrupt(number, training.optimizer.step)
        number += 71
    assert number > 1000 and training.outcomes.keys() == {"before", "after"}


def test_a_time_limit_in_a_step(tmp_path: Path):
    """A handler of another signal raises another error, at some lines of forward, backward and `step()`."""
    training = Training(tmp_path, layers=1, width=8, placement="nvme")
    number, going = 1, True
    with time_limit():
        while going:
            going = training.interrupt(number, training.whole_step, signal.SIGALRM)
            number += 173
    assert number > 2000 and training.outcomes.keys() == {"before", "after"}


def test_an_interrupt_in_a_plain_step(tmp_path: Path):
    """It strikes at some lines of the `step()` of an optimizer of PyTorch that is streamed: it is whole, or didn't
    begin."""
    torch.manual_seed(0)
    plain = nn.Linear(8, 8)
    model = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement="nvme")
    optimizer, reference = (torch.optim.RMSprop(net.parameters(), lr=1e-2) for net in (model, plain))
    x, number, going, outcomes = torch.randn(4, 8), 1, True, {True: 0, False: 0}
    while going:
        for net in (model, plain):
            net(x).square().mean().backward()
        came, lines = interrupted_at(number, optimizer.step)
        optimizer.zero_grad()
        changed = not torch.equal(model.weight.full_tensor(), plain.weight)
        if changed:
            reference.step()
        reference.zero_grad()
        for stored, parameter in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(stored.full_tensor(), parameter), f"line {number}"
        assert came or changed
        outcomes[changed] += 1
        going = lines == number
        number += 89
    assert number > 500 and outcomes[True] and outcomes[False]


CASES = {
    "nvme": {"placement": "nvme"},
    "host": {"placement": "host"},
    "tiles": {"placement": "nvme", "tile": "8KiB", "host_memory": "4MiB"},
    "in-backward": {"placement": "nvme", "in_backward": True},
    "tiles-in-backward": {"placement": "host", "in_backward": True, "tile": "8KiB"},
}


def interrupt_lines(store: Path, case: str, first: int, stride: int) -> None:
    """Step with a Ctrl-C at a line of each, from the `first` on every `stride`-th, to the last of a step."""
    training = Training(store, **CASES[case])
    number, going = first, True
    while going:
        going = training.interrupt(number, training.whole_step)
        number += stride
    print(f"{case}: {number} lines, every {stride}: {training.outcomes}")
    assert number > 1000 and training.outcomes["before"] and training.outcomes["after"]
    assert "torn" not in training.outcomes or "in-backward" in case


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", [1, 2], ids=["odd", "even"])
@pytest.mark.parametrize("case", CASES)
def test_interrupts_line_by_line(tmp_path: Path, case: str, first: int):
    """They strike at every line of forward, backward, `step()` and `zero_grad()` of two layers."""
    interrupt_lines(tmp_path, case, first, 2)


def interrupt_after(begins: threading.Event, seconds: float) -> None:
    """Interrupt this process, so long after `begins` is set."""
    begins.wait()
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_at_random(store: Path, case: str, seconds: float, seed: int) -> None:
    """Step with a Ctrl-C at a random moment of each, in PyTorch's code and in ours."""
    training, at_random = Training(store, **CASES[case]), random.Random(seed)
    begun = time.perf_counter()
    training.whole_step()
    usual = time.perf_counter() - begun
    training.check(False, "uninterrupted")
    number = 0
    while time.perf_counter() < begun + seconds:
        number += 1
        begins = threading.Event()
        ctrl_c = threading.Thread(target=interrupt_after, args=(begins, at_random.uniform(0, 1.5 * usual)))
        ctrl_c.start()
        came = False
        try:
            begins.set()
            training.whole_step()
        except KeyboardInterrupt:
            came = True
        try:
            ctrl_c.join()
            if not came:
                time.sleep(0.2)  # one that a finalizer held back comes a little later
        except KeyboardInterrupt:
            ctrl_c.join()
        training.check(came, f"interrupt {number}")
    print(number, training.outcomes)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return a copy of the package whose engine is built with the compiler's sanitizers, and the environment to run it
    in."""
    root = tmp_path_factory.mktemp("sanitized")
    source = Path(zinf_fx.__file__).parents[1]
    shutil.copytree(source / "zinf_fx", root / "zinf_fx", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(source / name, root)
    options = "-g -O1 -fsanitize=address,undefined -fno-omit-frame-pointer"
    built = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=root,
        env={**os.environ, "CFLAGS": options, "LDFLAGS": options},
        capture_output=True,
        text=True,
    )
    # C++'s library beside the sanitizer's, which looks for its exceptions when it is loaded.
    names = ("libasan.so", "libstdc++.so")
    commands = (["cc", f"-print-file-name={name}"] for name in names)
    libraries = [subprocess.run(command, capture_output=True, text=True).stdout.strip() for command in commands]
    if not all(Path(library).is_absolute() for library in libraries):
        pytest.skip("the compiler's sanitizer library is not installed")
    assert built.returncode == 0, built.stderr
    return root, {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}


def run_apart(root: Path, extra: dict[str, str], store: Path, call: str) -> None:
    """Run a function of this module in a process of its own, with the package in `root`."""
    program = (
        f"from {__name__} import *; import zinf_fx; assert zinf_fx.__file__.startswith({str(root)!r}); "
        f"torch.set_num_threads(1); {call}"
    )
    path = os.pathsep.join([str(root), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program],
        env={**os.environ, **extra, "PYTHONPATH": path},
        cwd=store,
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert "AddressSanitizer" not in done.stderr and "runtime error" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("build", ["plain", "sanitized"])
def test_interrupts_at_random(tmp_path: Path, request: pytest.FixtureRequest, build: str, case: str):
    root, extra = Path(zinf_fx.__file__).parents[1], {}
    if build == "sanitized":
        root, extra = request.getfixturevalue("sanitized")
    run_apart(root, extra, tmp_path, f"interrupt_at_random(Path({str(tmp_path)!r}), {case!r}, 30, 1)")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
def test_interrupts_line_by_line_with_sanitizers(tmp_path: Path, sanitized: tuple[Path, dict[str, str]], case: str):
    run_apart(*sanitized, tmp_path, f"interrupt_lines(Path({str(tmp_path)!r}), {case!r}, 1, 1)")
