"""Parameters that are in memory with all that their update needs are stepped by the torch class as they are."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from gate import slow
from twins import python_calls, python_calls_by_name

import zinf_fx
from zinf_fx import optim
from zinf_fx.errors import OptimizerError
from zinf_fx.optim.in_place import InPlaceUpdate
from zinf_fx.runtime.tensor.storage import new_states

PLACED = ("device", "host")


@pytest.fixture
def called(monkeypatch) -> list[int]:
    """Return how many parameters each call of a torch class was for."""
    counts: list[int] = []
    run = InPlaceUpdate.run

    def counting(update: InPlaceUpdate, inner: torch.optim.Optimizer) -> None:
        counts.append(len(update.batch.members))
        run(update, inner)

    monkeypatch.setattr(InPlaceUpdate, "run", counting)
    return counts


@pytest.mark.parametrize("placement", PLACED)
@pytest.mark.parametrize("kind", [optim.AdamW, slow(optim.SGD), slow(optim.Adagrad)])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1), (torch.bfloat16, 14)], ids=["fp32", "bf16"])
def test_python_calls_for_each_parameter(twins, placement: str, kind: type, dtype: torch.dtype, most: int):
    """There is no window, chunk or lock for each parameter, and the class doesn't list them anew: what is left is that
    it checks the type of their counts, and that masters are compared with what the parameters hold."""
    counts = []
    for parameters in (100, 200):
        pair = twins(placement, dtype, shapes=((7, 5),) * parameters)
        optimizer = kind(pair.stored, lr=1e-2)
        for _ in range(2):
            pair.give_gradients()
            optimizer.step()
        pair.give_gradients()
        counts.append(python_calls(optimizer.step))
    per_parameter = (counts[1] - counts[0]) / 100
    assert per_parameter <= most, per_parameter


@pytest.mark.parametrize("kind", [optim.Adadelta, optim.Adam, optim.ASGD, optim.NAdam, optim.RMSprop, optim.SGD])
def test_lists_of_the_last_step_serve_the_next_one(twins, monkeypatch, kind: type):
    """They serve with other gradients and another learning rate, and as long as the states have the same objects."""
    arithmetic = kind._arithmetic
    make, made = arithmetic._init_group, []
    options = {optim.SGD: {"momentum": 0.9, "fused": True}, optim.Adam: {"fused": True}}.get(kind, {})
    pair = twins("device")
    optimizer, reference = kind(pair.stored, **options), arithmetic(pair.masters, **options)

    def noting(self: torch.optim.Optimizer, *arguments: object) -> object:
        made[-1] = True
        return make(self, *arguments)

    for step in range(7):
        for opt in (optimizer, reference):
            opt.param_groups[0]["lr"] = 0.1 / (step + 1)
        pair.give_gradients()
        if step == 4:
            name = next(name for name, value in reference.state[pair.masters[0]].items() if value.dim())
            for opt, parameter in ((optimizer, pair.stored[0]), (reference, pair.masters[0])):
                opt.state[parameter][name] = torch.full(parameter.shape, 0.5)
        reference.step()
        made.append(False)
        with monkeypatch.context() as patch:
            patch.setattr(arithmetic, "_init_group", noting)
            optimizer.step()
        pair.check()
    assert made == [True, True, False, False, True, True, False]


def test_states_are_looked_at_once_where_their_lists_serve(twins):
    pair = twins("device")
    optimizer, looked = optim.AdamW(pair.stored), []
    for _ in range(4):
        pair.give_gradients()
        looked.append(python_calls_by_name(optimizer.step)["values_of"])
    assert looked[-1] == 1 < looked[1], looked


def test_a_step_leaves_nothing_behind_that_holds_weights(twins, monkeypatch):
    pair, ran = twins("device"), []
    optimizer = optim.AdamW(pair.stored)
    run = InPlaceUpdate.run

    def noting(update: InPlaceUpdate, inner: torch.optim.Optimizer) -> None:
        ran.append(weakref.ref(inner))
        run(update, inner)

    monkeypatch.setattr(InPlaceUpdate, "run", noting)
    gc.disable()
    try:
        for _ in range(4):
            pair.give_gradients()
            optimizer.step()
    finally:
        gc.enable()
    assert len(ran) == 3
    assert not any(inner() is not None for inner in ran)


def test_lists_are_made_anew_where_a_class_puts_other_tensors_in_its_states(twins, monkeypatch):
    class Replacing(torch.optim.Optimizer):
        def __init__(self, params: object, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr})

        def _init_group(self, group: dict, parameters: list, gradients: list, sums: list) -> None:
            for p in group["params"]:
                if p.grad is not None:
                    parameters.append(p)
                    gradients.append(p.grad)
                    sums.append(self.state[p].setdefault("sum", torch.zeros(())))

        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            for group in self.param_groups:
                self._init_group(group, parameters := [], gradients := [], sums := [])
                for p, gradient, before in zip(parameters, gradients, sums, strict=True):
                    p.sub_(gradient * before, alpha=group["lr"])
                    self.state[p]["sum"] = before + 1

    class Streaming(optim.Streamed, Replacing):
        pass

    monkeypatch.setattr(Replacing, "__module__", "torch.optim.of_tomorrow")
    pair = twins("device")
    pair.train(Streaming(pair.stored), Replacing(pair.masters), steps=5)


def test_a_class_of_somebody_else_sees_its_gradients_where_they_are(twins):
    class Looking(torch.optim.AdamW):
        seen = 0

        def step(self, closure: object = None) -> object:
            type(self).seen += sum(p.grad is not None for group in self.param_groups for p in group["params"])
            return super().step(closure)

    class Streaming(optim.Streamed, Looking):
        pass

    pair = twins("device", shapes=((7,), (5,)))
    optimizer = Streaming(pair.stored)
    for _ in range(4):
        pair.give_gradients()
        before = Looking.seen
        optimizer.step()
        assert Looking.seen == before + 2 + 1  # of a stand-in, first


@pytest.mark.parametrize("placement", PLACED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", [{}, {"fused": False}, {"foreach": True}], ids=str)
def test_one_call_per_group_from_the_second_step_on(
    twins, called, placement: str, dtype: torch.dtype, options: dict[str, bool]
):
    pair = twins(placement, dtype)
    optimizer = optim.AdamW([{"params": pair.stored[:2]}, {"params": pair.stored[2:], "lr": 0.1}], **options)
    groups = [{"params": pair.masters[:2]}, {"params": pair.masters[2:], "lr": 0.1}]
    reference = torch.optim.AdamW(groups, **(options or {"fused": True}))
    pair.train(optimizer, reference, steps=1)
    assert not called
    pair.train(optimizer, reference, steps=1)
    assert called == [2, 5]
    pair.give_gradients(skip=(0, 4))
    optimizer.step()
    reference.step()
    pair.check()
    assert called == [2, 5, 1, 4]


def test_temporary_tensors_of_a_class_are_bounded(twins, called, monkeypatch):
    monkeypatch.setattr("zinf_fx.optim.in_place.AT_A_TIME", 1000)
    pair = twins("host", shapes=((400,), (400,), (400,), (1001,), (1000,)))
    optimizer, reference = optim.RMSprop(pair.stored), torch.optim.RMSprop(pair.masters)
    pair.train(optimizer, reference)
    assert called == [2, 1, 1] * 2  # one is too large, and goes through memory in chunks


def test_copies_of_gradients_are_bounded(twins, called, monkeypatch):
    monkeypatch.setattr("zinf_fx.optim.in_place.AT_A_TIME", 1000)
    pair = twins("host", torch.bfloat16, shapes=((400,), (400,), (400,), (1001,), (1000,)))
    pair.train(optim.AdamW(pair.stored), torch.optim.AdamW(pair.masters, fused=True))
    assert called == [2, 1, 1] * 2


@pytest.mark.parametrize("placement", PLACED)
def test_a_master_takes_over_what_is_written_to_its_parameter(twins, called, placement: str):
    pair = twins(placement, torch.bfloat16)
    optimizer, reference = optim.AdamW(pair.stored), torch.optim.AdamW(pair.masters, fused=True)
    pair.train(optimizer, reference)
    assert called == [7, 7]
    with torch.no_grad():
        pair.stored[0].mul_(2)
        pair.masters[0].copy_(pair.plain[0].mul_(2))
    pair.train(optimizer, reference)
    assert called == [7, 7, 6, 7, 7]


def test_a_fused_class_unscales_copies_of_gradients(twins, called):
    pair = twins("device", torch.bfloat16)
    optimizer, reference = optim.AdamW(pair.stored), torch.optim.AdamW(pair.masters, fused=True)
    pair.train(optimizer, reference, steps=2)
    for opt in (optimizer, reference):
        opt.grad_scale, opt.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    pair.train(optimizer, reference, steps=2)
    assert called == [7] * 3


def test_stored_in_place_and_ordinary_parameters_in_one_step(twins, called):
    pairs = [twins(placement, shapes=((30, 40), (50,))) for placement in ("device", "nvme", "host")]
    low = twins("host", dtype=torch.bfloat16, shapes=((30, 40),))
    ordinary = torch.nn.Parameter(torch.linspace(0, 1, 33))
    twin = torch.nn.Parameter(ordinary.detach().clone())
    optimizer = optim.AdamW([*(p for pair in (*pairs, low) for p in pair.stored), ordinary], lr=1e-2)
    reference = torch.optim.AdamW([*(p for pair in (*pairs, low) for p in pair.masters), twin], lr=1e-2, fused=True)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(opt, 0.7) for opt in (optimizer, reference)]
    for step in range(5):
        for pair in (*pairs, low):
            pair.give_gradients()
        ordinary.grad = torch.randn(33)
        twin.grad = ordinary.grad.clone()
        assert optimizer.step(lambda: 2.5) == reference.step(lambda: 2.5)
        for schedule in schedules:
            schedule.step()
        for pair in (*pairs, low):
            pair.check()
        assert torch.equal(ordinary, twin)
        assert called == [4, 1] * step  # the one with a master by itself
    for pair in pairs:
        for stored, master in zip(pair.stored, pair.masters, strict=True):
            for name, value in reference.state[master].items():
                shown = optimizer.state[stored][name]
                assert isinstance(shown, zinf_fx.StoredTensor) == (name != "step")
                assert torch.equal(shown.full_tensor() if name != "step" else shown, value)


@pytest.mark.parametrize("placement", PLACED)
def test_hooks_and_grad_scaler(twins, called, placement: str):
    pair = twins(placement)
    sides = []
    for kind, parameters in ((optim.AdamW, pair.stored), (torch.optim.AdamW, pair.masters)):
        optimizer, seen = kind(parameters, fused=True), []
        optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("after"))
        sides.append((optimizer, torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2), seen))
    for step in range(6):
        pair.give_gradients()
        if step == 3:
            pair.stored[4].grad[3] = pair.masters[4].grad[3] = torch.inf
        for optimizer, scaler, _ in sides:
            scaler.scale(torch.ones(()))
            if step == 4:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
            scaler.step(optimizer)
            scaler.update()
        pair.check()
        for stored, master in zip(pair.stored, pair.masters, strict=True):
            assert torch.equal(stored.grad, master.grad)  # the fused operation unscales it
    assert sides[0][1].get_scale() == sides[1][1].get_scale() != 64.0
    assert sides[0][2] == sides[1][2]
    assert called == [7] * 4


@pytest.mark.parametrize("error", [RuntimeError("lightning"), KeyboardInterrupt()], ids=type)
@pytest.mark.parametrize("placement", PLACED)
def test_an_error_in_the_middle_tears_the_step(twins, monkeypatch, placement: str, error: BaseException):
    pair, beside = twins(placement, shapes=((6,), (7,))), twins("nvme", shapes=((8,),))
    names = [*zip("ab", pair.stored, strict=True), ("c", beside.stored[0])]
    optimizer = optim.AdamW(names)
    for _ in range(2):
        for trained in (pair, beside):
            trained.give_gradients()
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())

    def failing(update: InPlaceUpdate, inner: torch.optim.Optimizer) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(InPlaceUpdate, "run", failing)
        with pytest.raises(type(error)):
            optimizer.step()
    torn = optimizer.torn
    assert (torn.updated, torn.partial, torn.untouched) == ((), ("a", "b"), ("c",))
    with pytest.raises(OptimizerError, match=r"step was interrupted .*load the model's parameters"):
        optimizer.step()
    optimizer.load_state_dict(saved)
    optimizer.step()


def test_what_was_updated_at_once_is_named_when_the_rest_fails(twins, monkeypatch):
    pair, beside = twins("host", shapes=((6,), (7,))), twins("nvme", shapes=((8,),))
    optimizer = optim.AdamW([*zip("ab", pair.stored, strict=True), ("c", beside.stored[0])])
    for _ in range(2):
        for trained in (pair, beside):
            trained.give_gradients()
        optimizer.step()

    def failing(*arguments: object) -> None:
        raise RuntimeError("lightning")

    monkeypatch.setattr("zinf_fx.runtime.tensor.windows.Window.store", failing)
    with pytest.raises(RuntimeError, match="lightning"):
        optimizer.step()
    torn = optimizer.torn
    assert (torn.updated, torn.partial, torn.untouched) == (("a", "b"), ("c",), ())


@pytest.mark.parametrize("stored", [False, True])
def test_states_that_the_user_replaces(twins, called, stored: bool):
    pair = twins("host", shapes=((30, 40), (50,)))
    optimizer, reference = optim.AdamW(pair.stored), torch.optim.AdamW(pair.masters, fused=True)
    pair.train(optimizer, reference)
    value = torch.rand(30, 40)
    reference.state[pair.masters[0]]["exp_avg_sq"] = value.clone()
    if stored:
        mine = zinf_fx.StoredTensor.of(new_states([pair.stored[0].stored])[0], (30, 40), "cpu")
        mine.copy_(value)
    optimizer.state[pair.stored[0]]["exp_avg_sq"] = mine if stored else value
    for entry in (optimizer.state[pair.stored[1]], reference.state[pair.masters[1]]):
        entry["step"] = torch.tensor(7.0)
    called.clear()
    pair.train(optimizer, reference)
    assert called == [1, 2, 2]
    shown = optimizer.state[pair.stored[0]]["exp_avg_sq"]
    assert torch.equal(shown.full_tensor(), reference.state[pair.masters[0]]["exp_avg_sq"])


def test_states_that_are_loaded_groups_that_join_and_options_that_change(twins, called):
    pair = twins("device", shapes=((30, 40), (50,), (60,)))
    optimizer = optim.AdamW(pair.stored[:2])
    reference = torch.optim.AdamW(pair.masters[:2], fused=True)
    for _ in range(2):
        pair.give_gradients()
        optimizer.step()
        reference.step()
    for opt in (optimizer, reference):
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    optimizer.add_param_group({"params": pair.stored[2:], "lr": 0.1})
    reference.add_param_group({"params": pair.masters[2:], "lr": 0.1})
    pair.train(optimizer, reference)
    for opt in (optimizer, reference):
        opt.param_groups[0]["weight_decay"] = 0.5
        opt.zero_grad()
    pair.train(optimizer, reference)
    assert called[-2:] == [2, 1]


def test_a_model_that_is_converted_and_back(tmp_path, called, steps_in):
    model = torch.nn.Linear(30, 7)
    masters = [p.detach().clone() for p in model.parameters()]
    zinf_fx.offload(model, store=tmp_path, placement="host")
    optimizer, reference = optim.AdamW(model.parameters()), torch.optim.AdamW(masters, fused=True)
    dtypes = (*(torch.float32,) * 3, *(torch.bfloat16,) * 2, *(torch.float32,) * 3)
    assert len(list(steps_in(dtypes, model, masters, optimizer, reference))) == len(dtypes)
    assert called == [2] * 6  # all but the first, and the one after which there are masters


def test_gradients_that_the_class_can_not_take_as_they_are(twins, called):
    pair = twins("host", shapes=((4, 6), (5,)))
    optimizer, reference = optim.AdamW(pair.stored), torch.optim.AdamW(pair.masters, fused=True)
    pair.train(optimizer, reference, steps=2)
    pair.give_gradients()
    pair.stored[0].grad = pair.masters[0].grad.t().contiguous().t()
    called.clear()
    optimizer.step()
    reference.step()
    pair.check()
    assert called == [1]
    pair.stored[1].grad = torch.ones(5).to_sparse()
    with pytest.raises(OptimizerError, match="only dense gradients"):
        optimizer.step()


@pytest.mark.parametrize("placement", PLACED)
def test_autograd_and_compiled_code_notice_the_update(tmp_path, placement: str):
    model = torch.nn.Linear(8, 8)
    zinf_fx.offload(model, store=tmp_path, placement=placement)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="zinf")
    x = torch.randn(3, 8, requires_grad=True)
    for call in (compiled, model):
        for _ in range(3):
            call(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(call(x), torch.nn.functional.linear(x, *(p.full_tensor() for p in model.parameters())))
        stale = call(x).square().sum()
        call(x).square().sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()


def test_a_class_whose_numbers_come_round_again(twins, called):
    class Alternating(torch.optim.Optimizer):
        def __init__(self, params: object, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    self.state[p]["odd"] = 1 - self.state[p].get("odd", 0)
                    p.sub_(p.grad)

    class Streaming(optim.Streamed, Alternating):
        pass

    pair = twins("device", shapes=((7,), (5,)))
    optimizer = Streaming(pair.stored)
    for skipped in ((), (), (1,), (0,), ()):
        pair.give_gradients(skip=skipped)
        optimizer.step()
    assert called == [2, 1, 1, 2]
    assert [optimizer.state[parameter]["odd"] for parameter in pair.stored] == [0, 0]


def test_a_class_that_puts_new_tensors_in_the_place_of_its_states(twins, called):
    class Replacing(torch.optim.Optimizer):
        def __init__(self, params: object, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        state = self.state[p]
                        state["momentum"] = 0.9 * state.get("momentum", torch.zeros_like(p)) + p.grad
                        state["count"] = state.get("count", 0) + 1
                        p.sub_(state["momentum"], alpha=group["lr"] / state["count"])

    class Streaming(optim.Streamed, Replacing):
        pass

    pair = twins("device")
    optimizer, reference = Streaming(pair.stored), Replacing(pair.masters)
    pair.train(optimizer, reference, steps=4)
    assert called == [7] * 3
    assert optimizer.state[pair.stored[0]]["count"] == 4
    shown = optimizer.state[pair.stored[0]]["momentum"]
    assert torch.equal(shown.full_tensor(), reference.state[pair.masters[0]]["momentum"])
