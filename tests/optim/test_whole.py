"""Optimizers that update whole parameters do bitwise what their classes do in memory, on every tier."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from gate import slow
from transformers.optimization import Adafactor as TransformersAdafactor

import zinf_fx
from zinf_fx import optim
from zinf_fx.errors import OptimizerError
from zinf_fx.optim.arithmetic import step_without_hooks
from zinf_fx.optim.layouts import non_elementwise_layout
from zinf_fx.optim.slices import OpenNonElementwise
from zinf_fx.runtime.gradients.accumulate import accumulate


class Lion(torch.optim.Optimizer):
    """Updates element by element."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(average.lerp(p.grad, 1 - first).sign_(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - second)
        return loss


class Lamb(torch.optim.Optimizer):
    """Scales the update by the norms of a whole parameter and of its update; `.data` is assigned, as older classes
    do."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, first=torch.zeros_like(p), second=torch.zeros_like(p), name="lamb")
                state["step"] += 1
                state["first"].lerp_(p.grad, 0.1)
                state["second"] = state["second"] * 0.99 + 0.01 * p.grad**2
                update = state["first"] / (state["second"].sqrt() + 1e-6)
                ratio = p.norm() / update.norm().clamp(min=1e-6)
                p.data = p.data - group["lr"] * ratio * update


class LateState(torch.optim.Optimizer):
    """Its state has one row more at every step."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    past = self.state[p].get("past", p.new_zeros(0, p.numel()))
                    self.state[p]["past"] = past = torch.cat([past, p.grad.reshape(1, -1)])
                    p.sub_(group["lr"] * past.mean(0).view_as(p) * p.norm())


MATRICES = ((129, 257), (64, 300), (3, 7), (40, 40))
SHAPES = (*MATRICES, (), (5,), (20011,), (2, 3, 40))
CASES = {
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}, SHAPES),
    "Adafactor-foreach": (torch.optim.Adafactor, {"foreach": True, "maximize": True}, SHAPES),
    "transformers Adafactor": (TransformersAdafactor, {"warmup_init": False}, SHAPES),
    "transformers Adafactor-momentum": (
        TransformersAdafactor,
        {"lr": 1e-2, "relative_step": False, "scale_parameter": False, "beta1": 0.9},
        SHAPES,
    ),
    "Muon": (torch.optim.Muon, {"lr": 0.02, "weight_decay": 0.1}, MATRICES),
    "Lion": (Lion, {}, SHAPES),
    "Lamb": (Lamb, {}, SHAPES),
    "LateState": (LateState, {}, SHAPES[-3:]),
    "AdamW-loop": (torch.optim.AdamW, {"fused": False, "lr": torch.tensor(1e-2)}, SHAPES),
    "SGD-foreach": (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "lr": 0.1}, SHAPES),
}
# What a class computes doesn't depend on where its states are: two of them are everywhere.
PLACED = [
    *((case, "nvme") for case in CASES),
    *(("Adafactor", placement) for placement in ("device", "host")),
    *(slow("Lamb", placement) for placement in ("device", "host")),
]


def streamed(kind: type[torch.optim.Optimizer]) -> type[optim.Streamed]:
    if kind.__module__.startswith("torch.optim"):
        return getattr(optim, kind.__name__)
    return type(kind.__name__, (optim.Streamed, kind), {})


def full(value: object) -> object:
    return value.full_tensor() if isinstance(value, zinf_fx.StoredTensor) else value


def assert_same_states(mine: dict, theirs: dict) -> None:
    assert mine.keys() >= {name for name, value in theirs.items() if value is not None}
    assert mine.keys() - theirs.keys() <= {"master"}
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(full(mine[name]), value), name
        elif value is not None:
            assert mine[name] == value, name


@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("case", "placement"), PLACED)
def test_streamed_is_bitwise_equal_to_memory(twins, case: str, placement: str, dtype: torch.dtype):
    kind, options, shapes = CASES[case]
    pair = twins(placement, dtype, shapes)
    mine, theirs = streamed(kind)(pair.stored, **options), kind(pair.masters, **copy.deepcopy(options))
    pair.train(mine, theirs, steps=4)
    for stored, master in zip(pair.stored, pair.masters, strict=True):
        assert_same_states(mine.state[stored], theirs.state[master])
        for name, value in mine.state[stored].items():
            large = isinstance(value, torch.Tensor) and value.nbytes >= 4096
            assert not large or isinstance(value, zinf_fx.StoredTensor), name
            if isinstance(value, zinf_fx.StoredTensor):
                assert value.stored.tier == stored.stored.placement.optimizer


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("case", "placement"), PLACED)
def test_plain_is_bitwise_equal_to_memory(twins, case: str, placement: str, dtype: torch.dtype):
    kind, options, shapes = CASES[case]
    pair = twins(placement, dtype, shapes)
    plain = [value.clone() for value in pair.plain]
    mine, theirs = kind(pair.stored, **options), kind(plain, **copy.deepcopy(options))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in (mine, theirs) if options.get("lr")]
    for step in range(4):
        pair.give_gradients(skip=(1,) if step == 2 else ())
        for stored, value in zip(pair.stored, plain, strict=True):
            value.grad = None if stored.grad is None else stored.grad.clone()
        gradients = [stored.grad for stored in pair.stored]
        torch.nn.utils.clip_grad_norm_(pair.stored, 1.0)
        torch.nn.utils.clip_grad_norm_(plain, 1.0)
        for optimizer in (mine, theirs):
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        assert all(stored.grad is gradient for stored, gradient in zip(pair.stored, gradients, strict=True))
        for index, (stored, value) in enumerate(zip(pair.stored, plain, strict=True)):
            assert torch.equal(stored.full_tensor(), value), (step, index)
    for stored, value in zip(pair.stored, plain, strict=True):
        assert_same_states(mine.state[stored], theirs.state[value])


class Estimating(torch.optim.SGD):
    """Keeps a sum over all gradients in its group, and steps as far as that says."""

    def step(self, closure=None):
        for group in self.param_groups:
            sums = [p.grad.abs().sum().item() for p in group["params"] if p.grad is not None]
            group["total"] = group.get("total", 0.0) + sum(sums)
        super().step(closure)


class EstimatingAlone(torch.optim.SGD):
    """Keeps it on itself."""

    total = 0.0

    def step(self, closure=None):
        self.total += sum(p.grad.abs().sum().item() for p in self.param_groups[0]["params"])
        super().step(closure)


class EstimatingInPlace(torch.optim.SGD):
    """Keeps it in a list that stays the same object."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        self.totals = [0.0]

    def step(self, closure=None):
        self.totals[0] += sum(p.grad.abs().sum().item() for p in self.param_groups[0]["params"])
        super().step(closure)


class CountingParameters(torch.optim.SGD):
    """Counts the parameters that it steps."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + len(group["params"])
        super().step(closure)


class Global(torch.optim.SGD):
    """Has a state of no parameter."""

    def step(self, closure=None):
        self.state["calls"] = {"count": len(self.state)}
        super().step(closure)


class Clipping(torch.optim.SGD):
    """Depends on the norm over all parameters."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        super().step(closure)


class Collecting(torch.optim.SGD):
    """Has a list of tensors for each parameter."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("past", []).append(p.norm() * p)
            p.mul_(p.norm())


REFUSED = {
    "LBFGS": (torch.optim.LBFGS, "a step over one parameter failed"),
    "SparseAdam": (torch.optim.SparseAdam, "a step over one parameter failed"),
    "Muon": (torch.optim.Muon, "a step over one parameter failed.*2D"),
    "a sum in the group": (Estimating, r"keeps state that depends on all parameters \(total\)"),
    "a sum of its own": (EstimatingAlone, r"keeps state that depends on all parameters \(total\)"),
    "a sum in a list": (EstimatingInPlace, r"keeps state that depends on all parameters \(totals\)"),
    "a count of parameters": (CountingParameters, r"keeps state that depends on all parameters \(count\)"),
    "a state of no parameter": (Global, r"its state 'calls' is of no parameter"),
    "all parameters": (Clipping, "depends on other parameters"),
    "collections": (Collecting, "'past' is a collection of tensors"),
}


@pytest.mark.parametrize(("kind", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_streamed_is_refused_at_construction(twins, kind: type, reason: str):
    pair = twins(shapes=((5, 6), (7,)))
    with pytest.raises(OptimizerError, match=f"(?s){reason}.*placement='device'"):
        type("Streaming", (optim.Streamed, kind), {})(pair.stored)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Clipping, Collecting, Estimating, EstimatingInPlace])
def test_a_plain_one_is_refused_before_it_has_changed_anything(twins, kind: type):
    pair = twins(shapes=((5, 6), (7,)))
    optimizer = kind(pair.stored)
    pair.give_gradients()
    called = []
    with pytest.raises(OptimizerError, match="can't step over stored parameters"):
        optimizer.step(lambda: called.append(True))
    pair.check()
    assert not called and not optimizer.state


def test_on_the_device_every_plain_optimizer_runs(twins):
    pair = twins("device", shapes=((5, 6), (7,)))
    plain = [value.clone().requires_grad_() for value in pair.plain]
    target = [torch.randn(value.shape) for value in plain]
    optimizers = [torch.optim.LBFGS(side, lr=0.1, max_iter=3) for side in (pair.stored, plain)]
    for optimizer in optimizers:

        def closure(optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            parameters = optimizer.param_groups[0]["params"]
            loss = sum((p - t).square().sum() for p, t in zip(parameters, target, strict=True))
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    for stored, value in zip(pair.stored, plain, strict=True):
        assert torch.equal(stored.full_tensor(), value)


def test_each_shape_of_a_model_is_tried_once(twins, monkeypatch):
    tried = []

    def counted(*arguments: object) -> object:
        tried.append(arguments)
        return non_elementwise_layout(*arguments)

    monkeypatch.setattr("zinf_fx.optim.layouts.non_elementwise_layout", counted)
    pair = twins(shapes=[(3 + number, 4) for number in range(70)])
    optimizer = optim.Adafactor(pair.stored)
    for _ in range(2):
        pair.give_gradients()
        optimizer.step()
    assert len(tried) == 70


class Listing(Lamb):
    """Looks at values in a way that tensors without any don't have."""

    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["first_value"] = p.flatten().tolist()[0]


class Searching(Lamb):
    """Ends when a value that it reads is smaller."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad.clamp_(-0.5, 0.5)
            while p.grad.norm() > 1e-3:
                p.grad.mul_(0.5)
        super().step(closure)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        *((kind, "meta") for kind in (torch.optim.Adafactor, torch.optim.Muon, Lamb)),
        (Listing, "cpu"),
        slow(Searching, "cpu"),
    ],
)
def test_what_a_class_keeps_is_found_without_memory_where_that_can_be(twins, monkeypatch, kind: type, place: str):
    """And else not before it is known that a whole parameter fits."""
    stepped = []

    def noted(optimizer: torch.optim.Optimizer) -> None:
        stepped.extend((p.device.type, p.numel()) for p in optimizer.param_groups[0]["params"])
        step_without_hooks(optimizer)

    monkeypatch.setattr("zinf_fx.optim.layouts.step_without_hooks", noted)
    streamed(kind)(twins(shapes=((600, 601),)).stored)
    assert {device for device, count in stepped if count == 600 * 601} == {"meta", place}
    if kind is not torch.optim.Adafactor:  # which keeps little
        stepped.clear()
        with pytest.raises(OptimizerError, match=r"is updated whole, which takes .* give it more"):
            streamed(kind)(twins(shapes=((900, 1000),), host_memory="4MiB").stored)
        assert {device for device, count in stepped if count == 900 * 1000} == {"meta"}


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, optim.RMSprop], ids=["plain", "streamed"])
def test_an_optimizer_that_its_hooks_hold_goes_when_nobody_else_does(twins, kind: type):
    pair = twins()
    optimizer = kind(pair.stored)
    for register in (optimizer.register_step_pre_hook, optimizer.register_state_dict_pre_hook):
        register(lambda *_, held=optimizer: None)
    pair.give_gradients()
    optimizer.step()
    reference = weakref.ref(optimizer)
    del optimizer, register
    gc.collect()
    assert reference() is None


def test_options_that_are_for_elements_and_too_little_memory_are_refused(twins):
    pair = twins(shapes=((600, 600),), host_memory="4MiB")
    with pytest.raises(OptimizerError, match="leave state_dtype out"):
        optim.Muon(pair.stored, state_dtype=torch.bfloat16)
    optim.Muon(pair.stored)
    with pytest.raises(OptimizerError, match=r"is updated whole, which takes .* give it more"):
        streamed(Lamb)(pair.stored)


def give_stored_gradients(pair) -> None:
    """Give gradients as backward leaves them."""
    pair.give_gradients()
    for stored in pair.stored:
        gradient, stored.grad = stored.grad, None
        accumulate([stored], [gradient])


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_in_the_background(twins, overlap: bool):
    pair = twins("infinity-nvme", shapes=(*MATRICES, (100, 4000)), dtype=torch.bfloat16)
    mine = optim.Muon(pair.stored, lr=0.02, overlap=overlap)
    theirs = torch.optim.Muon(pair.masters, lr=0.02)
    for _ in range(4):
        give_stored_gradients(pair)
        mine.step()
        theirs.step()
        pair.check()
    mine.zero_grad()
    mine.finish()
    assert pair.stored[0].stored.tiers.host.in_use == 0


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, Lamb])
def test_updated_in_backward(tmp_path, kind: type):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(33, 70), torch.nn.GELU(), torch.nn.Linear(70, 5))
    model = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement="infinity-nvme")
    compiled = torch.compile(model, backend="zinf")
    mine = streamed(kind)(model.parameters(), step_in_backward=True)
    theirs = kind(plain.parameters())
    for _ in range(4):
        x = torch.randn(6, 33)
        for call, optimizer in ((compiled, mine), (plain, theirs)):
            call(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for stored, value in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(stored.full_tensor(), value)


@pytest.mark.parametrize("plain", [False, True], ids=["streamed", "plain"])
@pytest.mark.parametrize("kind", [torch.optim.Adafactor, Lamb])
def test_states_are_saved_and_loaded_as_those_of_the_plain_class(twins, tmp_path, kind: type, plain: bool):
    pair = twins(shapes=SHAPES[:-1])
    make = kind if plain else streamed(kind)
    mine, theirs = make(pair.stored), kind(pair.masters)
    pair.train(mine, theirs, steps=2)
    torch.save(mine.state_dict(), tmp_path / "mine.pt")
    saved, expected = torch.load(tmp_path / "mine.pt"), theirs.state_dict()
    for number, states in expected["state"].items():
        assert_same_states(saved["state"][number], states)
        assert not any(isinstance(value, zinf_fx.StoredTensor) for value in saved["state"][number].values())
    mine, theirs = make(pair.stored), kind(pair.masters)
    mine.load_state_dict(copy.deepcopy(expected))
    theirs.load_state_dict(copy.deepcopy(saved))
    pair.train(mine, theirs, steps=2)


def test_a_state_of_another_model_or_class_is_refused(twins):
    pair = twins(shapes=((40, 50),))
    optimizer = optim.Adafactor(pair.stored)
    pair.train(optimizer, torch.optim.Adafactor(pair.masters), steps=1)
    saved = optimizer.state_dict()
    other = copy.deepcopy(saved)
    other["state"][0]["row_var"] = torch.zeros(50, 1)
    with pytest.raises(OptimizerError, match="'row_var' to load has shape"):
        optimizer.load_state_dict(other)
    del saved["state"][0]["col_var"]
    with pytest.raises(OptimizerError, match="lacks col_var"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("plain", [False, True], ids=["streamed", "plain"])
def test_a_torn_step_is_refused_until_a_state_is_loaded(twins, monkeypatch, plain: bool, placement: str):
    pair = twins(placement, shapes=((200, 300), (100, 300)))
    make = Lamb if plain else streamed(Lamb)
    optimizer, reference = make(pair.stored), Lamb(pair.masters)
    pair.train(optimizer, reference, steps=1)
    saved = {k: copy.deepcopy(v) for k, v in reference.state_dict().items()}
    arena = pair.stored[0].stored.tiers.host
    pair.give_gradients()
    in_use, count, store = arena.in_use, 0, OpenNonElementwise.store

    def failing(part: OpenNonElementwise, unscaled: bool) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise RuntimeError("lightning")
        store(part, unscaled)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="lightning"):
        patch.setattr(OpenNonElementwise, "store", failing)
        optimizer.step()
    assert arena.in_use <= in_use and all(stored.grad is not None for stored in pair.stored)
    with pytest.raises(OptimizerError, match=r"was interrupted \(RuntimeError: lightning\): 1 .* updated, 1 .*in part"):
        optimizer.step()
    with torch.no_grad():
        for stored, value in zip(pair.stored, pair.plain, strict=True):
            stored.copy_(value)
    optimizer.load_state_dict(saved)
    pair.train(optimizer, reference)


def test_a_plain_one_beside_ordinary_parameters_with_a_closure_and_hooks(twins):
    pair = twins(shapes=((50, 60), (70,)))
    beside = [torch.nn.Parameter(torch.ones(9)) for _ in range(2)]
    plain = [value.clone() for value in pair.plain]
    optimizers = [Lion([*pair.stored, beside[0]]), Lion([*plain, beside[1]])]
    for optimizer in optimizers:  # scales the gradients, as clipping by hand would
        optimizer.register_step_pre_hook(
            lambda o, *_: [p.grad.mul_(0.5) for p in o.param_groups[0]["params"] if p.grad is not None] and None
        )
    for _ in range(3):
        pair.give_gradients()
        for stored, value in zip(pair.stored, plain, strict=True):
            value.grad = stored.grad.clone()
        for ordinary in beside:
            ordinary.grad = torch.linspace(-1, 1, 9)
        assert [optimizer.step(lambda: 2.5) for optimizer in optimizers] == [2.5, 2.5]
        for stored, value in zip([*pair.stored, beside[0]], [*plain, beside[1]], strict=True):
            assert torch.equal(full(stored), value)


@pytest.mark.parametrize("make", [streamed(Lamb), Lamb], ids=["streamed", "plain"])
def test_grad_scaler(twins, make: type):
    pair = twins(shapes=((50, 60), (70,)))
    sides = [(make(pair.stored), pair.stored), (Lamb(pair.masters), pair.masters)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in sides]
    for step in range(4):
        pair.give_gradients()
        if step == 2:
            pair.stored[1].grad[3] = pair.masters[1].grad[3] = torch.inf
        for (optimizer, parameters), scaler in zip(sides, scalers, strict=True):
            scaler.scale(torch.ones(()))
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(optimizer)
            scaler.update()
        pair.check()
    assert scalers[0].get_scale() == scalers[1].get_scale()


def test_an_error_between_stored_and_ordinary_parameters_tears_the_step(twins):
    class Raising(Lion):
        def step(self, closure=None):
            if any(type(p) is torch.nn.Parameter and p.grad is not None for p in self.param_groups[0]["params"]):
                raise RuntimeError("lightning")
            return super().step(closure)

    pair = twins(shapes=((50, 60),))
    ordinary = torch.nn.Parameter(torch.ones(9))
    optimizer = Raising([*pair.stored, ordinary])
    pair.give_gradients()
    ordinary.grad = torch.ones(9)
    with pytest.raises(RuntimeError, match="lightning"):
        optimizer.step()
    pair.give_gradients()
    with pytest.raises(OptimizerError, match=r"while ordinary parameters were stepped\): 1 \(a parameter of shape"):
        optimizer.step()
    assert pair.stored[0].grad is not None
    ordinary.grad = None
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
