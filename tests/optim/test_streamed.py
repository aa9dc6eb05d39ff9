"""Every class is bitwise plain torch.optim's, on every tier."""

from __future__ import annotations

import gc

import pytest
import torch
from gate import slow
from injecting import Fault, inject
from torch.optim.optimizer import register_optimizer_step_pre_hook

import zinf_fx
from zinf_fx import optim
from zinf_fx.errors import OptimizerError, StoreError
from zinf_fx.optim import layouts
from zinf_fx.runtime.gradients.accumulate import accumulate
from zinf_fx.runtime.tensor.storage import new_storages

FUSED = {"fused": True}
# The class's name, its options, and those that the plain class needs besides for the same arithmetic.
OPTIMIZERS = {
    "AdamW": ("AdamW", {"lr": 1e-2}, FUSED),
    "AdamW-amsgrad": ("AdamW", {"amsgrad": True, "maximize": True, "weight_decay": 0.3}, FUSED),
    "AdamW-tensor-lr": ("AdamW", {"lr": torch.tensor(1e-2)}, FUSED),
    "AdamW-foreach": ("AdamW", {"foreach": True}, {}),
    "AdamW-loop": ("AdamW", {"fused": False}, {}),
    "Adam": ("Adam", {"weight_decay": 0.1, "betas": (0.8, 0.9)}, FUSED),
    "SGD": ("SGD", {"lr": 0.1, "weight_decay": 0.1}, FUSED),
    "SGD-momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, FUSED),
    "Adagrad": ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5}, FUSED),
    "RMSprop": ("RMSprop", {"momentum": 0.9, "centered": True}, {}),
    "NAdam": ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}, {}),
    "RAdam": ("RAdam", {"lr": 1e-2}, {}),
    "Adadelta": ("Adadelta", {}, {}),
    "Adamax": ("Adamax", {}, {}),
    "ASGD": ("ASGD", {"lambd": 0.1, "t0": 1.0}, {}),
    "Rprop": ("Rprop", {}, {}),
}


# What a class computes doesn't depend on where its states are: one that is fused and one that isn't are everywhere.
PLACED = [
    *((case, "nvme") for case in OPTIMIZERS),
    *(("AdamW", placement) for placement in ("device", "host")),
    *(slow("RMSprop", placement) for placement in ("device", "host")),
]


# In fp32, test_twenty_steps trains with each of them.
@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("case", "placement"), PLACED)
def test_bitwise_equal_to_torch(twins, case: str, placement: str, dtype: torch.dtype):
    name, options, plain_only = OPTIMIZERS[case]
    pair = twins(placement, dtype)
    optimizer = getattr(optim, name)(pair.stored, **options)
    reference = getattr(torch.optim, name)(pair.masters, **options, **plain_only)
    pair.train(optimizer, reference)
    for stored, master in zip(pair.stored, pair.masters, strict=True):
        mine, theirs = optimizer.state[stored], reference.state[master]
        assert set(mine) - {"master"} == set(theirs) and ("master" in mine) == (dtype == torch.bfloat16)
        for state, value in theirs.items():
            assert torch.equal(_full(mine[state]), value), state
            assert isinstance(mine[state], zinf_fx.StoredTensor) == (state not in ("step", "mu_product", "eta", "mu"))
        if "master" in mine:
            assert torch.equal(_full(mine["master"]), master)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("chunk", "placement"),
    [
        *((chunk, "nvme") for chunk in ("64KiB", "100KiB", "1MiB", "32MiB")),
        ("100KiB", "infinity-nvme"),
        ("100KiB", "zero-offload"),
    ],
)
def test_any_chunk_size(twins, chunk: str, dtype: torch.dtype, placement: str):
    pair = twins(placement, dtype, chunk=chunk)
    pair.train(optim.AdamW(pair.stored), torch.optim.AdamW(pair.masters, fused=True))


@pytest.mark.parametrize("gradients", ["device", "host", "nvme"])
def test_gradients_of_eager_backward(tmp_path, gradients: str):
    placement = {"parameters": "nvme", "gradients": gradients, "optimizer": "nvme"}
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 301), torch.nn.GELU(), torch.nn.Linear(301, 2))
    model[0].bias.requires_grad_(False)
    plain = torch.nn.Sequential(torch.nn.Linear(33, 301), torch.nn.GELU(), torch.nn.Linear(301, 2))
    plain.load_state_dict(model.state_dict())
    plain[0].bias.requires_grad_(False)
    zinf_fx.offload(model, store=tmp_path, placement=placement, chunk="64KiB")
    pairs = [(model, optim.AdamW(model.parameters())), (plain, torch.optim.AdamW(plain.parameters(), fused=True))]
    for step in range(3):
        x = torch.randn(4, 33)
        losses = []
        for net, optimizer in pairs:
            for micro in (x, 2 * x):
                loss = net(micro).square().mean()
                loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        assert losses[0] == losses[1]
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs)
        assert mine.grad is None or not mine.grad.full_tensor().any()
    frozen = model[0].bias
    assert frozen not in pairs[0][1].state


def test_groups_schedulers_and_parameters_without_gradients(twins):
    pair = twins(dtype=torch.bfloat16)

    def make(kind, parameters):
        groups = [{"params": parameters[:3], "lr": 3e-2, "weight_decay": 0.0}, {"params": parameters[3:], "eps": 1e-4}]
        optimizer = kind(groups, lr=1e-2, fused=True)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)

    (mine, my_schedule), (theirs, their_schedule) = (
        make(optim.AdamW, pair.stored),
        make(torch.optim.AdamW, pair.masters),
    )
    for step in range(6):
        pair.give_gradients(skip=((), (0, 4), (), (1, 5), tuple(range(7)), ())[step])
        for optimizer, schedule in ((mine, my_schedule), (theirs, their_schedule)):
            optimizer.step()
            schedule.step()
        pair.check()
    assert mine.state[pair.stored[0]]["step"].item() == 4


@pytest.mark.parametrize("placement", ["device", "host", "nvme"])
def test_momentum_that_is_zero_for_a_while_is_kept(twins, placement: str):
    pair = twins(placement, shapes=((30, 40), (50, 60)))
    both = (optim.SGD, pair.stored), (torch.optim.SGD, pair.masters)
    sides = [optimizer_class(side, momentum=0.9, fused=True) for optimizer_class, side in both]
    for momentum in (0.9, 0.0, 0.9, 0.9):
        pair.give_stored_gradients() if placement == "nvme" else pair.give_gradients()
        for optimizer in sides:
            optimizer.param_groups[0]["momentum"] = momentum
            optimizer.step()
        pair.check()


@pytest.mark.parametrize("placement", ["device", "host", "nvme"])
@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD, optim.Muon])
def test_what_a_schedule_changes_at_every_step_is_tried_once(twins, monkeypatch, kind: type, placement: str):
    """The learning rate, momentum or betas, and weight decay. What was worked out for the first step serves on."""
    tried = []
    for name in ("probe", "non_elementwise_layout"):
        function = getattr(layouts, name)
        monkeypatch.setattr(layouts, name, lambda *args, of=function: (tried.append(of), of(*args))[1])
    pair = twins(placement, shapes=((30, 40), (50, 60)))
    more = {"momentum": 0.9} if kind is optim.SGD else {}
    if kind is not optim.Muon:
        more |= {"fused": True}
    sides = [
        optimizer_class(side, **more)
        for optimizer_class, side in ((kind, pair.stored), (kind._arithmetic, pair.masters))
    ]
    schedules = [torch.optim.lr_scheduler.OneCycleLR(side, max_lr=0.1, total_steps=9) for side in sides]
    seen = []
    for step in range(5):
        pair.give_stored_gradients() if placement == "nvme" else pair.give_gradients()
        for optimizer, schedule in zip(sides, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.param_groups[0]["weight_decay"] = 0.01 * (step + 1)
        pair.check()
        seen.append((len(tried), sides[0]._in_place._groups.get(0)))
    assert seen[2] == seen[3] == seen[4]
    sides[0].param_groups[0]["weight_decay"] = 0.0  # which may mean that a class leaves something out
    pair.give_gradients()
    sides[0].step()
    assert len(tried) > seen[4][0]


def test_a_parameter_joins_later(twins):
    pair = twins()
    mine = optim.SGD(pair.stored[:4], lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(pair.masters[:4], lr=0.1, momentum=0.9, fused=True)
    for _ in range(2):
        pair.give_gradients()
        mine.step()
        theirs.step()
    mine.add_param_group({"params": pair.stored[4:], "momentum": 0.5})
    theirs.add_param_group({"params": pair.masters[4:], "momentum": 0.5})
    pair.train(mine, theirs)


def test_a_parameter_that_gets_its_first_gradient_later_shares_chunks_with_none(twins):
    pair = twins(shapes=((10,), (20,), (30,)))
    optimizer = optim.SGD(pair.stored, lr=0.1, momentum=0.9)
    # Plain fused SGD can't mix parameters with and without a momentum buffer: one optimizer for each.
    references = [torch.optim.SGD([m], lr=0.1, momentum=0.9, fused=True) for m in pair.masters]
    for skip in ((1,), (), (0,), ()):
        pair.give_gradients(skip)
        optimizer.step()
        for reference in references:
            reference.step()
        pair.check()


def test_ordinary_parameters_are_stepped_as_by_torch(twins):
    pair = twins(shapes=((100,), (50,)))
    ordinary = torch.nn.Parameter(torch.randn(33, dtype=torch.bfloat16))
    twin = torch.nn.Parameter(ordinary.detach().clone())
    mine = optim.AdamW([pair.stored[0], ordinary, pair.stored[1]])
    theirs = torch.optim.AdamW([pair.masters[0], twin, pair.masters[1]], fused=True)
    for _ in range(3):
        ordinary.grad = torch.randn(33, dtype=torch.bfloat16)
        twin.grad = ordinary.grad.clone()
        pair.train(mine, theirs, steps=1)
        assert torch.equal(ordinary, twin)
    assert mine.state[ordinary]["exp_avg"].dtype == torch.bfloat16


def test_tied_weights_are_updated_once(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50, bias=False))
    model[1].weight = model[0].weight
    value = model[0].weight.detach().clone()
    zinf_fx.offload(model, store=tmp_path, placement="nvme")
    optimizer = optim.AdamW(model.parameters())
    assert len(optimizer.param_groups[0]["params"]) == 1
    model(torch.arange(5)).square().mean().backward()
    reference = torch.nn.Parameter(value)
    reference.grad = model[0].weight.grad.full_tensor()
    torch.optim.AdamW([reference], fused=True).step()
    optimizer.step()
    assert torch.equal(model[1].weight.full_tensor(), reference)


def test_what_others_write_to_a_low_precision_parameter_is_taken_over(twins):
    pair = twins(dtype=torch.bfloat16, shapes=((9000,),))
    optimizer = optim.AdamW(pair.stored)
    reference = torch.optim.AdamW(pair.masters, fused=True)
    pair.train(optimizer, reference)
    with torch.no_grad():
        pair.stored[0][5000:6000] = 3.0
        pair.masters[0][5000:6000] = 3.0
    pair.train(optimizer, reference)


def test_parameters_stored_after_the_optimizer_was_made_and_used(tmp_path):
    torch.manual_seed(0)
    model, plain = torch.nn.Linear(70, 80), torch.nn.Linear(70, 80)
    plain.load_state_dict(model.state_dict())
    optimizer = optim.AdamW(model.parameters())
    reference = torch.optim.AdamW(plain.parameters(), fused=True)
    for step in range(4):
        if step == 2:
            zinf_fx.offload(model, store=tmp_path, placement="nvme")
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            theirs.grad = torch.randn(theirs.shape)
            mine.grad = theirs.grad.clone()
        optimizer.step()
        reference.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs)
        assert isinstance(optimizer.state[mine]["exp_avg"], zinf_fx.StoredTensor)


def test_closure_and_hooks_run_once(twins):
    pair = twins()
    pair.give_gradients()
    optimizer = optim.AdamW(pair.stored)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    everywhere = register_optimizer_step_pre_hook(lambda o, *_: seen.append(type(o).__name__))
    torch.optim.AdamW([torch.zeros(1)])  # its construction wraps the plain class's step with hooks

    def closure() -> float:
        assert torch.is_grad_enabled()
        return 1.5

    try:
        assert optimizer.step(closure) == 1.5
    finally:
        everywhere.remove()
    assert seen == ["AdamW", "before", "after"]
    assert optimizer.step_seconds > 0


def test_step_inside_a_compiled_function_stays_outside_the_graph(twins):
    pair = twins()
    mine, theirs = optim.AdamW(pair.stored), torch.optim.AdamW(pair.masters, fused=True)
    step = torch.compile(lambda: mine.step(), backend="eager")
    for _ in range(2):
        pair.give_gradients()
        step()
        theirs.step()
        pair.check()


def test_grad_scaler(twins):
    pair = twins()
    store = pair.stored[0].stored.tiers.store
    sides = []
    for kind, parameters in ((optim.AdamW, pair.stored), (torch.optim.AdamW, pair.masters)):
        sides.append((kind(parameters, fused=True), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)))
    for step in range(5):
        pair.give_gradients()
        if step == 2:
            pair.stored[4].grad[3] = torch.inf
            pair.masters[4].grad[3] = torch.inf
        for optimizer, scaler in sides:
            scaler.scale(torch.ones(()))
            if step == 3:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
            before = store.counters().bytes_written
            scaler.step(optimizer)
            assert step != 2 or store.counters().bytes_written == before
            scaler.update()
        pair.check()
    assert sides[0][1].get_scale() == sides[1][1].get_scale()


def test_autograd_notices_the_update(twins):
    pair = twins(shapes=((8, 8),))
    (parameter,) = pair.stored
    optimizer = optim.SGD(pair.stored, lr=0.1)
    stale = (torch.randn(8, requires_grad=True) @ parameter).square().sum()
    pair.give_gradients()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


@pytest.mark.parametrize("delay", [slow(0.0), 0.01])
def test_buffers_are_bounded_and_given_back(twins, delay):
    pair = twins(shapes=((400_000,), *[(100,)] * 200, (400_000,)))
    optimizer = optim.AdamW(pair.stored)
    inject(pair.stored[0].stored.tiers.store, Fault("completion", operation="write", count=10**6, delay=delay))
    arena = pair.stored[0].stored.tiers.host
    allocated = []
    allocate = arena.allocate
    arena.allocate = lambda nbytes: (allocated.append(arena.in_use), allocate(nbytes))[1]
    for _ in range(2):
        for parameter in pair.stored:
            parameter.grad = zinf_fx.StoredTensor.of(
                new_storages([parameter.stored], "nvme")[0], parameter.shape, "cpu"
            )
            parameter.grad.zero_()
        pair.stored[0].stored.tiers.drain()
        allocated.clear()
        optimizer.step()
        optimizer.finish()
        assert arena.in_use == 0
        assert 0 < max(allocated) <= 3 * 4 * (64 << 10)  # three chunks of parameter, gradient and two states


def test_a_small_arena_makes_smaller_chunks(twins):
    pair = twins("infinity-nvme", torch.bfloat16, chunk="32MiB", host_memory="2MiB", shapes=((150_001,), (40_000,)))
    pair.train(optim.AdamW(pair.stored), torch.optim.AdamW(pair.masters, fused=True))


def test_space_is_reserved_at_construction(twins, monkeypatch):
    pair = twins(shapes=((1000,),) * 4)
    store = pair.stored[0].stored.tiers.store
    used = store.in_use
    optimizer = optim.AdamW(pair.stored[:2])
    assert store.in_use == used + 2 * 2 * 4096 and not optimizer.state

    allocate, calls = store.allocate, []

    def full(nbytes: int):
        calls.append(nbytes)
        if len(calls) > 1:  # the first state of all parameters has its space
            raise StoreError("allocate", store.path, "full")
        return allocate(nbytes)

    monkeypatch.setattr(store, "allocate", full)
    with pytest.raises(StoreError, match="full"):
        optimizer.add_param_group({"params": pair.stored[2:]})
    gc.collect()
    assert store.in_use == used + 2 * 2 * 4096 and len(optimizer.param_groups) == 1
    calls.clear()
    with pytest.raises(StoreError, match="full"):
        optim.AdamW(pair.stored)


def test_a_subclass_of_an_optimizer_from_elsewhere(twins):
    class SignDescent(torch.optim.Optimizer):
        def __init__(self, params, lr=0.1):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                        momentum.lerp_(p.grad, 0.1)
                        p.sub_(momentum.sign(), alpha=group["lr"])

    class Streaming(optim.Streamed, SignDescent):
        pass

    pair = twins()
    pair.train(Streaming(pair.stored), SignDescent(pair.masters))


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_options_that_make_no_sense(twins, option: str):
    pair = twins(shapes=((4,),))
    with pytest.raises(OptimizerError, match=f"{option}=True can't be honoured"):
        optim.Adam(pair.stored, fused=False, **{option: True})
    optimizer = optim.Adam(pair.stored)
    optimizer.param_groups[0][option] = True
    pair.give_gradients()
    with pytest.raises(OptimizerError, match=f"{option}=True can't be honoured"):
        optimizer.step()


def test_bad_arguments(twins):
    pair = twins(shapes=((4, 4),))
    (parameter,) = pair.stored
    for params, options, error, message in [
        (pair.stored, {"lr": -1.0}, ValueError, "Invalid learning rate"),
        (pair.stored, {"learning_rate": 1.0}, TypeError, "learning_rate"),
        ([], {}, ValueError, "empty parameter list"),
        (parameter, {}, TypeError, "iterable"),
        ([parameter.detach()[0]], {}, OptimizerError, "view of a stored tensor"),
    ]:
        with pytest.raises(error, match=message):
            optim.AdamW(params, **options)
    with pytest.raises(TypeError, match=r"name a torch\.optim class"):
        type("Nothing", (optim.Streamed,), {})
    optimizer = optim.AdamW(pair.stored)
    parameter.grad = torch.eye(4).to_sparse()
    with pytest.raises(OptimizerError, match="only dense gradients"):
        optimizer.step()


def _full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, zinf_fx.StoredTensor) else value


def test_a_model_that_is_converted_after_its_optimizer_was_made(tmp_path, steps_in):
    model = torch.nn.Linear(300, 70)
    masters = [p.detach().clone() for p in model.parameters()]
    zinf_fx.offload(model, store=tmp_path, placement="nvme", chunk="64KiB")
    optimizer, reference = optim.AdamW(model.parameters()), torch.optim.AdamW(masters, fused=True)
    dtypes = (torch.float32, torch.bfloat16, torch.bfloat16, torch.float32)
    for dtype in steps_in(dtypes, model, masters, optimizer, reference):
        for parameter in model.parameters():
            assert ("master" in optimizer.state[parameter]) == (dtype == torch.bfloat16)
    optimizer.zero_grad()
    model.to(torch.float64)
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape, dtype=torch.float64)
    with pytest.raises(OptimizerError, match="make a new optimizer after converting"):
        optimizer.step()


@pytest.mark.parametrize("parameter_too", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_gathered_reads_and_sets_masters_moments_and_gradients(twins, overlap: bool, parameter_too: bool):
    pair = twins(dtype=torch.bfloat16)
    optimizer = optim.AdamW(pair.stored, overlap=overlap)
    reference = torch.optim.AdamW(pair.masters, fused=True)
    pair.train(optimizer, reference)
    pair.give_gradients()
    for parameter in pair.stored:  # where backward leaves them
        value, parameter.grad = parameter.grad, None
        accumulate([parameter], [value])
    for stored, master in zip(pair.stored, pair.masters, strict=True):
        mine, theirs = optimizer.state[stored], reference.state[master]
        with zinf_fx.gathered([mine["master"], mine["exp_avg"], stored.grad], modify=True) as values:
            for value, expected in zip(values, (master, theirs["exp_avg"], master.grad), strict=True):
                assert not isinstance(value, zinf_fx.StoredTensor) and torch.equal(value, expected.to(value.dtype))
                value.mul_(-0.5)  # exact in any dtype
                expected.mul_(-0.5)
        if parameter_too:
            with torch.no_grad():
                stored.copy_(master)
    optimizer.step()
    reference.step()
    pair.check()


def test_buffers_do_not_grow_with_the_model(twins):
    peaks = []
    for matrices in (4, 32):
        pair = twins(shapes=((256, 256), (256,)) * matrices, dtype=torch.bfloat16)
        optimizer = optim.AdamW(pair.stored, overlap=False)
        for parameter in pair.stored:
            accumulate([parameter], [torch.ones(parameter.shape, dtype=parameter.dtype)])
        tiers = pair.stored[0].stored.tiers
        tiers.drain()
        tiers.host.restart_peak()
        optimizer.step()
        peaks.append(tiers.host.peak)
    three_chunks = (2 * 16 + 14 + 4) * (64 << 10) // 4
    assert peaks[0] == peaks[1] <= three_chunks
