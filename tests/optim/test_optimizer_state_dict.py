"""States travel between our optimizers, to and from plain torch.optim, through files and copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from gate import slow

import zinf_fx
from zinf_fx import optim
from zinf_fx.errors import OptimizerError

CLASSES = {
    "AdamW": ({"amsgrad": True}, {"fused": True}),
    "SGD": ({"lr": 0.1, "momentum": 0.9}, {"fused": True}),
    "Adagrad": ({}, {"fused": True}),
    "NAdam": ({}, {}),
    "ASGD": ({"t0": 1.0}, {}),
    "Rprop": ({}, {}),
}


def trained(pair, name: str):
    """Return an optimizer of ours and the plain one, two steps on."""
    options, plain_only = CLASSES[name]
    mine = getattr(optim, name)(pair.stored, **options)
    theirs = getattr(torch.optim, name)(pair.masters, **options, **plain_only)
    pair.train(mine, theirs, steps=2)
    return mine, theirs


def new(pair, name: str):
    """Return a new one of ours over the same parameters, with other options, which loading replaces."""
    options, _ = CLASSES[name]
    return getattr(optim, name)(pair.stored, **{**options, "lr": 1e-7})


def through_file(state: dict, tmp_path) -> dict:
    torch.save(state, tmp_path / "state.pt")
    return torch.load(tmp_path / "state.pt", weights_only=True)


@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("file", [False, True], ids=["live", "file"])
@pytest.mark.parametrize(("name", "placement"), [*((name, "nvme") for name in CLASSES), ("AdamW", "host")])
def test_ours_to_ours(twins, tmp_path, name: str, placement: str, dtype: torch.dtype, file: bool):
    pair = twins(placement, dtype)
    mine, theirs = trained(pair, name)
    resumed = new(pair, name)
    resumed.load_state_dict(through_file(mine.state_dict(), tmp_path) if file else mine.state_dict())
    for parameter in pair.stored:
        for state, value in mine.state[parameter].items():
            if isinstance(value, zinf_fx.StoredTensor):
                assert resumed.state[parameter][state].stored is not value.stored
    del mine
    pair.train(resumed, theirs)


@pytest.mark.parametrize("name", CLASSES)
def test_plain_to_ours_and_back(twins, tmp_path, name: str):
    pair = twins()
    _, theirs = trained(pair, name)
    resumed = new(pair, name)
    resumed.load_state_dict(theirs.state_dict())
    pair.train(resumed, theirs)
    options, plain_only = CLASSES[name]
    plain = getattr(torch.optim, name)(pair.masters, **options, **plain_only)
    plain.load_state_dict(through_file(resumed.state_dict(), tmp_path))
    pair.train(resumed, plain)


def test_plain_state_keeps_our_kernels_and_takes_masters_from_the_parameters(twins, tmp_path):
    pair = twins(dtype=torch.bfloat16)
    plain = torch.optim.AdamW(pair.masters, lr=0.5)
    pair.give_gradients()
    plain.step()
    mine = optim.AdamW(pair.stored)
    mine.load_state_dict(plain.state_dict())
    assert mine.param_groups[0]["fused"] and mine.param_groups[0]["lr"] == 0.5
    before = [p.full_tensor().float() for p in pair.stored]
    pair.give_gradients()
    reference = torch.optim.AdamW(before, fused=True)
    reference.load_state_dict(through_file(mine.state_dict(), tmp_path))
    for master, theirs in zip(before, pair.masters, strict=True):
        master.grad = theirs.grad
    mine.step()
    reference.step()
    for stored, master in zip(pair.stored, before, strict=True):
        assert torch.equal(stored.full_tensor(), master.bfloat16())


def test_loading_into_itself_changes_nothing(twins):
    pair = twins(dtype=torch.bfloat16)
    mine, theirs = trained(pair, "AdamW")
    store = pair.stored[0].stored.tiers.store
    written = store.counters().bytes_written
    mine.load_state_dict(mine.state_dict())
    assert store.counters().bytes_written == written
    pair.train(mine, theirs)


def test_parameters_without_state_start_afresh(twins):
    pair = twins()
    mine, _ = trained(pair, "AdamW")
    state = mine.state_dict()
    for key in (0, 4):
        del state["state"][key]
    mine.load_state_dict(state)
    assert pair.stored[0] not in mine.state and pair.stored[1] in mine.state
    pair.give_gradients()
    mine.step()
    assert [mine.state[p]["step"].item() for p in pair.stored] == [1, 3, 3, 3, 1, 3, 3]


def test_hooks_see_whole_states(twins):
    pair = twins(shapes=((10,),))
    mine, _ = trained(pair, "AdamW")
    resumed = new(pair, "AdamW")
    seen = []
    resumed.register_load_state_dict_pre_hook(lambda _, state: seen.append(sorted(state["state"][0])))
    resumed.register_load_state_dict_post_hook(lambda optimizer: seen.append(sorted(optimizer.state[pair.stored[0]])))
    resumed.load_state_dict(mine.state_dict())
    assert seen == [["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"]] * 2


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda s: s["state"][0].pop("exp_avg"), OptimizerError, "lacks exp_avg"),
        (lambda s: s["state"][1].update(exp_avg=torch.zeros(7)), OptimizerError, r"has shape \(7,\), its parameter"),
        (lambda s: s["param_groups"][0].update(capturable=True), OptimizerError, "capturable=True"),
        (lambda s: s["param_groups"].append(s["param_groups"][0]), ValueError, "different number of parameter groups"),
    ],
)
def test_what_does_not_fit_changes_nothing(twins, spoil, error: type, message: str):
    pair = twins()
    mine, theirs = trained(pair, "AdamW")
    state = copy.deepcopy(mine.state_dict())
    spoil(state)
    with pytest.raises(error, match=message):
        mine.load_state_dict(state)
    pair.train(mine, theirs)


def test_state_of_another_class(twins):
    pair = twins()
    mine, _ = trained(pair, "SGD")
    with pytest.raises(OptimizerError, match=r"lacks exp_avg.* saved by another class of optimizer than AdamW"):
        optim.AdamW(pair.stored).load_state_dict(mine.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_copies_train_on(twins, dtype: torch.dtype):
    pair = twins(dtype=dtype)
    mine, theirs = trained(pair, "AdamW")
    pair.stored, twin = copy.deepcopy((pair.stored, mine))
    assert twin.param_groups[0]["params"][0] is pair.stored[0]
    pair.train(twin, theirs)


def test_pickle_is_an_ordinary_optimizer_of_the_same_state(twins):
    pair = twins()
    mine, _ = trained(pair, "AdamW")
    back = pickle.loads(pickle.dumps(mine))
    parameter = back.param_groups[0]["params"][0]
    assert type(parameter) is torch.nn.Parameter
    assert torch.equal(back.state[parameter]["exp_avg"], mine.state[pair.stored[0]]["exp_avg"].full_tensor())
    parameter.grad = torch.ones_like(parameter)
    back.step()
