"""Classes of other libraries keep counters in their groups, and flags and tables on themselves."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable

import pytest
import torch
from gate import slow
from torch.optim import Optimizer

import zinf_fx
from zinf_fx import optim
from zinf_fx.errors import OptimizerError


def scaled_descent(optimizer: Optimizer, scale: Callable[[dict], float]) -> None:
    """Momentum, times what a group's counters say."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = optimizer.state[parameter]
            if not state:
                state["average"] = torch.zeros_like(parameter)
            state["average"].lerp_(parameter.grad, 0.1)
            parameter.add_(state["average"], alpha=-group["lr"] * scale(group))


class CountsInGroup(Optimizer):
    """A counter in each group, before the update, which some of pytorch_optimizer's classes don't have at first."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        scaled_descent(self, lambda group: 1 / (1 - 0.9 ** group["step"]))


class SumsInGroup(Optimizer):
    """It has schedulefree's form: counters that move after the update, a training mode, a copy of the parameter."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0, "lr_max": -1.0, "train_mode": False})

    def train(self):
        self._turn(True, 0.1)

    def eval(self):
        self._turn(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def _turn(self, mode, weight):
        for group in self.param_groups:
            for parameter in group["params"] if group["train_mode"] != mode else ():
                if "z" in self.state[parameter]:
                    parameter.lerp_(end=self.state[parameter]["z"].to(parameter.device), weight=weight)
            group["train_mode"] = mode

    @torch.no_grad()
    def step(self, closure=None):
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("Please insert .train() and .eval() calls")
        for group in self.param_groups:
            group["lr_max"] = max(group["lr"], group["lr_max"])
            weight = (group["k"] + 1) * group["lr_max"] ** 2
            group["weight_sum"] += weight
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if "z" not in state:
                        state["z"] = torch.clone(parameter)
                    parameter.lerp_(state["z"], weight / group["weight_sum"])
                    state["z"].sub_(parameter.grad, alpha=group["lr"])
            group["k"] += 1


class FlagsAndTables(Optimizer):
    """It has bitsandbytes' form: a flag set at the first step, a table changed in place, and states of 8 bits."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.initialized, self.table = False, {"levels": torch.linspace(-1, 1, 256)}

    @torch.no_grad()
    def step(self, closure=None):
        if not self.initialized:
            self.initialized = True
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, self.state[parameter], group["lr"])

    def _update(self, parameter, state, lr):
        levels = self.table["levels"] = self.table["levels"].to(parameter.device)
        if not state:
            state["codes"] = torch.full_like(parameter, 128, dtype=torch.uint8)
            state["top"] = torch.zeros((), device=parameter.device)
            state["table"] = levels
        average = levels[state["codes"].long()] * state["top"]
        average.lerp_(parameter.grad, 0.1)
        state["top"].copy_(average.abs().max() if average.numel() else 0)
        state["codes"].copy_((average / state["top"].clamp(min=1e-12) * 127.5 + 127.5).round())
        parameter.add_(average, alpha=-lr)


class CountsInTensors(Optimizer):
    """Its learning rate and its counter are tensors, the counter moves in place, and another lr is refused."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def add_param_group(self, group):
        super().add_param_group(group)
        added = self.param_groups[-1]
        added["lr"], added["step"] = torch.as_tensor(added["lr"]), torch.tensor(0.0)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not isinstance(group["lr"], torch.Tensor):
                raise RuntimeError("lr was changed to a non-Tensor object")
            group["step"] += 1
        scaled_descent(self, lambda group: 1 / (1 - 0.9 ** group["step"].item()))


class CountsOnItself(Optimizer):
    """Has a counter of its own, and a list that grows; only while there is something to step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.calls, self.scales = 0, []

    @torch.no_grad()
    def step(self, closure=None):
        if any(parameter.grad is not None for group in self.param_groups for parameter in group["params"]):
            self.calls += 1
            self.scales.append(math.sqrt(self.calls))
        scaled_descent(self, lambda group: 1 / self.scales[-1])


KINDS = [CountsInGroup, SumsInGroup, FlagsAndTables, CountsInTensors, CountsOnItself]
SHAPES = ((129, 257), (), (5,), (20011,), (64, 64))
HOW = ["plain", "streamed", "in background", "in backward"]


def made(kind: type[Optimizer], parameters: list, how: str) -> Optimizer:
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.05}]
    if how == "plain":
        return kind(groups)
    return type("Streaming", (optim.Streamed, kind), {})(groups, overlap=how == "in background")


def trains(*optimizers: Optimizer) -> None:
    for optimizer in optimizers:
        getattr(optimizer, "train", lambda: None)()


def beside(optimizer: Optimizer) -> list[object]:
    """Return what an optimizer has besides parameters and states."""
    own = {"initialized", "table", "calls", "scales"}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return [*groups, {k: v for k, v in vars(optimizer).items() if k in own}]


def assert_equal(mine: Optimizer, theirs: Optimizer) -> None:
    torch.testing.assert_close(beside(mine), beside(theirs), rtol=0, atol=0)


@pytest.mark.parametrize("how", ["plain", "streamed", "in background"])
@pytest.mark.parametrize("placement", ["nvme", slow("host")])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_memory(twins, kind: type[Optimizer], placement: str, how: str):
    pair = twins(placement, shapes=SHAPES)
    mine, theirs = made(kind, pair.stored, how), made(kind, pair.masters, "plain")
    trains(mine, theirs)
    for step in range(4):
        pair.give_stored_gradients() if how == "in background" else pair.give_gradients(skip=(1,) if step < 2 else ())
        mine.step()
        theirs.step()
        pair.check()
        assert_equal(mine, theirs)
    for optimizer in (mine, theirs):
        getattr(optimizer, "eval", lambda: None)()
    pair.check()


@pytest.mark.parametrize("kind", KINDS)
def test_updated_in_backward(tmp_path, kind: type[Optimizer]):
    if kind is FlagsAndTables:
        pytest.skip("it updates whole parameters after backward alone")
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 60))
    model = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement="nvme")
    streaming = type("Streaming", (optim.Streamed, kind), {})
    mine, theirs = streaming(model.parameters(), step_in_backward=True), kind(plain.parameters())
    trains(mine, theirs)
    for _ in range(4):
        for net, optimizer in ((model, mine), (plain, theirs)):
            net(torch.ones(3, 40)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for stored, value in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(stored.full_tensor(), value)
    assert_equal(mine, theirs)


@pytest.mark.parametrize("how", ["plain", "streamed"])
@pytest.mark.parametrize("kind", KINDS)
def test_beside_ordinary_parameters(twins, kind: type[Optimizer], how: str):
    """What isn't stored is stepped by the class's own code, which moves the counters, too."""
    pair = twins("nvme", shapes=((40, 50), (7,)))
    ordinary = [torch.nn.Parameter(torch.ones(9)) for _ in range(2)]
    mine = made(kind, [*pair.stored, ordinary[0]], how)
    theirs = made(kind, [*pair.masters, ordinary[1]], "plain")
    trains(mine, theirs)
    for _ in range(4):
        pair.give_gradients()
        for parameter in ordinary:
            parameter.grad = torch.full((9,), 0.5)
        mine.step()
        theirs.step()
        pair.check()
        assert torch.equal(*ordinary)
        assert_equal(mine, theirs)


@pytest.mark.parametrize("how", ["plain", "streamed"])
@pytest.mark.parametrize("kind", [CountsInGroup, SumsInGroup, CountsInTensors])
def test_counters_are_saved_and_loaded(twins, kind: type[Optimizer], how: str):
    pair = twins("nvme", shapes=SHAPES)
    mine, theirs = made(kind, pair.stored, how), made(kind, pair.masters, "plain")
    trains(mine, theirs)
    for _ in range(2):
        pair.give_gradients()
        mine.step()
        theirs.step()
    saved = io.BytesIO()
    torch.save(mine.state_dict(), saved)
    saved.seek(0)
    again = made(kind, pair.stored, how)
    again.load_state_dict(torch.load(saved))
    for _ in range(2):
        pair.give_gradients()
        again.step()
        theirs.step()
        pair.check()
        assert_equal(again, theirs)


@pytest.mark.parametrize("how", ["plain", "streamed"])
def test_a_class_that_is_not_in_its_training_mode_says_so(twins, how: str):
    pair = twins("nvme", shapes=SHAPES)
    optimizer = made(SumsInGroup, pair.stored, how)
    pair.give_gradients()
    with pytest.raises(OptimizerError, match=r"Please insert \.train\(\)"):
        optimizer.step()
    pair.check()
    trains(optimizer)
    optimizer.step()


def test_a_step_that_changes_nothing_moves_no_counter(twins):
    """A GradScaler found infinities, or the step was refused."""
    pair = twins("nvme", shapes=SHAPES)
    optimizer = made(CountsInGroup, pair.stored, "streamed")
    pair.give_gradients()
    optimizer.step()
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    del optimizer.found_inf
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(OptimizerError, match="can't step with the options"):
        optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]


def test_a_counter_that_moves_is_no_other_option(twins, monkeypatch):
    """What the class keeps is tried once, not at each step."""
    tried = []
    probe = optim.layouts.probe
    monkeypatch.setattr(optim.layouts, "probe", lambda *args: (tried.append(args), probe(*args))[1])
    pair = twins("nvme", shapes=SHAPES)
    for how in ("plain", "streamed"):
        optimizer = made(CountsInGroup, pair.stored, how)
        seen = []
        for _ in range(5):
            pair.give_gradients()
            optimizer.step()
            seen.append(len(tried))
        assert seen[1] == seen[4]


def test_a_state_of_several_tensors_is_refused(twins):
    class Coded(torch.Tensor):
        pass

    class Wrapping(CountsInGroup):
        @torch.no_grad()
        def step(self, closure=None):
            super().step()
            for parameter, state in self.state.items():
                if parameter.numel() % 256 == 0:
                    state["average"] = state["average"].as_subclass(Coded)

    pair = twins("nvme", shapes=SHAPES)
    with pytest.raises(OptimizerError, match=r"'average' is a Coded.*state_dtype='8bit'"):
        made(Wrapping, pair.stored, "streamed")
