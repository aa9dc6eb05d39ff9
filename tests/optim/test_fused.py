"""Plain torch.optim classes with fused=True do over stored parameters bitwise what they do in memory."""

from __future__ import annotations

import copy

import pytest
import torch
from gate import slow
from injecting import Fault, clear_faults, inject

import zinf_fx
from zinf_fx.errors import OptimizerError, StoreError
from zinf_fx.optim.plain import sgd_updates
from zinf_fx.runtime.gradients.accumulate import accumulate

STEPS = 5
CASES = {
    "AdamW": ("AdamW", {"lr": 1e-2, "weight_decay": 0.3}),
    "AdamW-tensor-lr": ("AdamW", {"lr": torch.tensor(1e-2), "amsgrad": True, "maximize": True}),
    "Adam": ("Adam", {"weight_decay": 0.1, "betas": (0.8, 0.9)}),
    "Adam-tensor-lr": ("Adam", {"lr": torch.tensor(1e-2)}),
    "SGD": ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
    "SGD-momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD-tensor-lr": ("SGD", {"lr": torch.tensor(0.1), "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    "Adagrad": ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    "Adagrad-tensor-lr": ("Adagrad", {"lr": torch.tensor(0.1), "weight_decay": 0.1}),
}
SHAPES = ((129, 257), (), (0,), (5,), (20011,), (3, 7), (4096,))


class Pair:
    """Holds stored parameters and ordinary ones of the same values."""

    def __init__(self, store, placement: object, dtype: torch.dtype = torch.float32, shapes=SHAPES, **fields) -> None:
        self.random = torch.Generator().manual_seed(7)
        values = [torch.randn(shape, generator=self.random).to(dtype) for shape in shapes]
        self.stored = torch.nn.ParameterList(torch.nn.Parameter(v.clone()) for v in values)
        self.plain = torch.nn.ParameterList(torch.nn.Parameter(v) for v in values)
        zinf_fx.offload(self.stored, store=store, placement=placement, **{"chunk": "64KiB", **fields})

    def give_gradients(self, scale: float = 1.0) -> None:
        """Give stored gradients to stored parameters, as backward does."""
        for stored, plain in zip(self.stored, self.plain, strict=True):
            plain.grad = (scale * torch.randn(plain.shape, generator=self.random)).to(plain.dtype)
            stored.grad = None
            accumulate([stored], [plain.grad])

    def sides(self, name: str, **options: object):
        """Return (parameters, fused optimizer) in the store and in memory."""
        kind = getattr(torch.optim, name)  # a scheduler writes to a learning rate that is a tensor: no sharing
        return [
            (list(side), kind(side.parameters(), fused=True, **copy.deepcopy(options)))
            for side in (self.stored, self.plain)
        ]

    def check(self) -> None:
        for index, (stored, plain) in enumerate(zip(self.stored, self.plain, strict=True)):
            assert torch.equal(_full(stored), plain), f"parameter {index} of shape {tuple(plain.shape)} differs"


# What a class computes doesn't depend on where its states are: two of them are everywhere.
PLACED = [
    *((case, "nvme") for case in CASES),
    *(("AdamW", placement) for placement in ("device", "host", "zero-offload", "infinity-nvme")),
    *(("SGD-momentum", placement) for placement in ("device", "host")),
]


@pytest.mark.parametrize(
    ("case", "placement", "dtype"),
    [
        *((case, placement, dtype) for case, placement in PLACED for dtype in (torch.float32, torch.bfloat16)),
        *(slow(case, "nvme", dtype) for case in CASES for dtype in (torch.float16, torch.float64)),
    ],
)
def test_bitwise_equal_to_memory(tmp_path, case: str, placement: str, dtype: torch.dtype):
    name, options = CASES[case]
    if name == "SGD" and not sgd_updates(dtype):
        pytest.skip("PyTorch's fused SGD changes nothing here")
    pair = Pair(tmp_path, placement, dtype)
    sides = pair.sides(name, **options)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7) for _, optimizer in sides]
    for _ in range(STEPS):
        pair.give_gradients()
        for (parameters, optimizer), schedule in zip(sides, schedules, strict=True):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
        pair.check()
    tier = pair.stored[0].stored.placement.optimizer
    for stored, plain in zip(pair.stored, pair.plain, strict=True):
        mine, theirs = sides[0][1].state[stored], sides[1][1].state[plain]
        assert set(mine) == set(theirs)
        for state, value in theirs.items():
            assert state == "step" or mine[state].stored.tier == tier, state
            assert mine[state].dtype == value.dtype and torch.equal(_full(mine[state]), value), state


def test_an_sgd_that_would_train_nothing_is_refused(tmp_path):
    if sgd_updates(torch.bfloat16):
        pytest.skip("PyTorch's fused SGD works here")
    pair = Pair(tmp_path, "nvme", torch.bfloat16)
    (_, mine), (_, theirs) = pair.sides("SGD", lr=0.1)
    pair.give_gradients()
    before = pair.plain[-1].detach().clone()
    theirs.step()
    assert torch.equal(pair.plain[-1], before)
    with pytest.raises(OptimizerError, match=r"use zinf_fx\.optim\.SGD"):
        mine.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "placement"),
    [*((name, "nvme") for name in ("AdamW", "Adam", "SGD", "Adagrad")), ("AdamW", "device"), ("AdamW", "host")],
)
def test_grad_scaler_through_an_overflow(tmp_path, name: str, placement: str, dtype: torch.dtype):
    if name == "SGD" and not sgd_updates(dtype):
        pytest.skip("PyTorch's fused SGD changes nothing here")
    pair = Pair(tmp_path, placement, dtype)
    sides = pair.sides(name, lr=0.05)
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in sides]
    for step in range(STEPS):
        pair.give_gradients(64.0)
        if step in (2, STEPS - 1):
            pair.plain[4].grad[3] = torch.inf
            pair.stored[4].grad[3] = torch.inf
        for (parameters, optimizer), scaler in zip(sides, scalers, strict=True):
            scaler.scale(torch.ones(()))
            if step == 3:  # otherwise the fused operation unscales
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(optimizer)
            scaler.update()
        pair.check()
        for stored, plain in zip(pair.stored, pair.plain, strict=True):
            assert torch.equal(_full(stored.grad), plain.grad)
    assert scalers[0].get_scale() == scalers[1].get_scale() != 64.0
    for _ in range(2):  # without the scaler
        pair.give_gradients()
        for _, optimizer in sides:
            optimizer.step()
        pair.check()


def test_a_skipped_step_moves_nothing(tmp_path):
    pair = Pair(tmp_path, "nvme")
    _, optimizer = pair.sides("AdamW")[0]
    pair.give_gradients()
    optimizer.step()
    store = pair.stored[0].stored.tiers.store
    before = store.counters()
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert store.counters() == before


def test_gradients_assigned_from_memory_and_stored_parameters_beside_ordinary_ones(tmp_path):
    pair = Pair(tmp_path, "nvme", shapes=((30_000,), (50, 60)))
    ordinary = [torch.nn.Parameter(torch.linspace(0, 1, 33)) for _ in range(2)]
    sides = pair.sides("SGD", lr=0.1, momentum=0.9)
    for (parameters, optimizer), extra in zip(sides, ordinary, strict=True):
        parameters.append(extra)
        optimizer.param_groups[0]["params"].append(extra)
    for _ in range(STEPS):
        gradients = [torch.randn(p.shape) for p in sides[0][0]]
        for parameters, optimizer in sides:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        pair.check()
        assert torch.equal(*ordinary)
    momentum = sides[0][1].state[pair.stored[0]]["momentum_buffer"]
    assert isinstance(momentum, zinf_fx.StoredTensor)  # from the second step on


def test_compiled_training(tmp_path):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(torch.nn.Sequential(torch.nn.Linear(33, 301), torch.nn.GELU(), torch.nn.Linear(301, 2)))
    zinf_fx.offload(models[0], store=tmp_path, placement="nvme", chunk="64KiB")
    sides = [(net, torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)) for net in models]
    calls = [torch.compile(models[0], backend="zinf"), models[1]]
    for _ in range(STEPS):
        x = torch.randn(4, 33)
        losses = []
        for (_, optimizer), call in zip(sides, calls, strict=True):
            for micro in (x, 2 * x):
                loss = call(micro).square().mean()
                loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["AdamW", slow("SGD"), slow("Adagrad")])
def test_buffers_are_bounded(tmp_path, name: str):
    options = {"momentum": 0.9} if name == "SGD" else {}
    pair = Pair(tmp_path, "nvme", shapes=((400_000,), *[(100,)] * 200, (400_000,)), host_memory="16MiB")
    pair.give_gradients()
    tiers = pair.stored[0].stored.tiers
    tiers.drain()
    arena, allocated = tiers.host, []
    allocate = arena.allocate
    arena.allocate = lambda nbytes: (allocated.append(arena.in_use + nbytes), allocate(nbytes))[1]
    _, optimizer = pair.sides(name, lr=0.1, **options)[0]
    for _ in range(2):
        optimizer.step()
        assert arena.in_use == 0
    operands = {"AdamW": 4, "SGD": 3, "Adagrad": 3}[name]
    # Three chunks; the first values of states go one chunk after the other, but many small ones are on their way.
    assert (64 << 10) < max(allocated) <= 3 * operands * (64 << 10) + 200 * 4096


def test_states_from_elsewhere_move_to_their_tier(tmp_path):
    pair = Pair(tmp_path, "nvme")
    (_, mine), (_, theirs) = pair.sides("AdamW", lr=1e-2)
    for _ in range(2):
        pair.give_gradients()
        theirs.step()
    with torch.no_grad():
        for stored, plain in zip(pair.stored, pair.plain, strict=True):
            stored.copy_(plain)
    mine.load_state_dict(copy.deepcopy(theirs.state_dict()))  # tensors are not copied by it
    for _ in range(2):
        pair.give_gradients()
        mine.step()
        theirs.step()
        pair.check()
    for stored in pair.stored:
        assert all(isinstance(v, zinf_fx.StoredTensor) for k, v in mine.state[stored].items() if k != "step")
    torch.save(mine.state_dict(), tmp_path / "optimizer.pt")
    saved = torch.load(tmp_path / "optimizer.pt")["state"]
    for index, states in theirs.state_dict()["state"].items():
        for name, value in states.items():
            assert type(saved[index][name]) is torch.Tensor and torch.equal(saved[index][name], value)


def test_parameters_stored_after_the_optimizer_was_made_and_used(tmp_path):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(torch.nn.Linear(70, 80))
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in models]
    for step in range(4):
        if step == 2:
            zinf_fx.offload(models[0], store=tmp_path, placement="nvme")
        for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
            theirs.grad = torch.randn(theirs.shape)
            mine.grad = theirs.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs)
        assert isinstance(optimizers[0].state[mine]["exp_avg"], zinf_fx.StoredTensor)


def test_autograd_notices_the_update(tmp_path):
    pair = Pair(tmp_path, "nvme", shapes=((8, 8),))
    _, optimizer = pair.sides("SGD", lr=0.1)[0]
    stale = (torch.randn(8, requires_grad=True) @ pair.stored[0]).square().sum()
    pair.give_gradients()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_a_torn_step_is_refused_until_a_state_is_loaded(tmp_path):
    pair = Pair(tmp_path, "nvme", shapes=((100_000,),))
    _, optimizer = pair.sides("AdamW")[0]
    pair.give_gradients()
    optimizer.step()
    saved = optimizer.state_dict()
    tiers = pair.stored[0].stored.tiers
    inject(tiers.store, Fault("completion", nth=4, operation="write", errno=5))
    with pytest.raises(StoreError):
        optimizer.step()
    assert tiers.host.in_use == 0
    clear_faults(tiers.store)
    with pytest.raises(OptimizerError, match=r"was interrupted.*from a checkpoint"):
        optimizer.step()
    optimizer.load_state_dict(saved)
    with pytest.raises(StoreError):  # the parameter's bytes are lost all the same
        optimizer.step()


def test_a_view_is_refused(tmp_path):
    (parameter,) = Pair(tmp_path, "nvme", shapes=((4, 6),)).stored
    view = torch.optim.SGD([parameter.detach()[0].requires_grad_()], lr=0.1, fused=True)
    view.param_groups[0]["params"][0].grad = torch.ones(6)
    with pytest.raises(OptimizerError, match="is a view of a stored tensor"):
        view.step()


def test_gradients_that_are_not_contiguous(tmp_path):
    pair = Pair(tmp_path, "nvme", shapes=((4, 6),))
    sides = pair.sides("SGD", lr=0.1, momentum=0.9)
    for step in range(3):
        gradient = (torch.arange(24.0) + step).view(6, 4).t()
        for (parameters, optimizer), mine in zip(sides, (gradient, gradient.contiguous()), strict=True):
            parameters[0].grad = mine  # in memory, PyTorch's fused kernels take elements in the order in which they lie
            optimizer.step()
        pair.check()


def _full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, zinf_fx.StoredTensor) else value
