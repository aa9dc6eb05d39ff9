"""`load_state_dict(assign=True)` of models with tied weights: names are one parameter where plain PyTorch has them in
one memory."""

from __future__ import annotations

import io
import itertools
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch
from ranks.launching import on_ranks
from torch import nn

import zinf_fx
from zinf_fx import StoredTensor

State = dict[str, torch.Tensor]


class Tied(nn.Module):
    """One weight with three names, of which one is deeper than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8)
        self.inner = nn.Sequential(nn.Linear(8, 9, bias=False), nn.Linear(9, 8))
        self.head = nn.Linear(8, 9, bias=False)
        self.inner[0].weight = self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.table(tokens))).sin().sum()


NAMES = ("table.weight", "inner.0.weight", "head.weight")


def tied(seed: int) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def _saved(state: State, **options: object) -> State:
    torch.save(state, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), **options)


def _mapped(state: State, folder: Path) -> State:
    path = folder / f"{uuid.uuid4()}.pt"
    torch.save(state, path)
    return torch.load(path, mmap=True)


def _with_clones(*names: str, of_one: bool = False) -> Callable[[State, Path], State]:
    def change(state: State, folder: Path) -> State:
        clone = state[names[0]].clone()
        return state | {name: clone if of_one else state[name].clone() for name in names}

    return change


def _without(*names: str) -> Callable[[State, Path], State]:
    return lambda state, folder: {name: value for name, value in state.items() if name not in names}


def _views_of_one(state: State, folder: Path) -> State:
    """Return views as libraries map files: one storage, in which each has a place of its own."""
    whole = torch.cat([state[name].view(-1) for name in NAMES])
    return state | {name: part.view(9, 8) for name, part in zip(NAMES, whole.chunk(3), strict=True)}


STATES: dict[str, Callable[[State, Path], State]] = {
    "itself": lambda state, folder: state,
    "parameters": lambda state, folder: {n: nn.Parameter(value) for n, value in state.items()},
    "saved": lambda state, folder: _saved(state),
    "mapped": _mapped,
    "equal tensors": _with_clones(*NAMES),
    "another for the first": _with_clones(NAMES[0]),
    "another for the last": _with_clones(NAMES[2]),
    "another for the last two": _with_clones(*NAMES[1:], of_one=True),
    "places in one storage": _views_of_one,
    "without the first": _without(NAMES[0]),
    "without the last": _without(NAMES[2]),
    "the second alone": _without(NAMES[0], NAMES[2]),
    "transposed for the last": lambda state, folder: state | {NAMES[2]: state[NAMES[2]].clone().T.contiguous().T},
}


def groups(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of each weight that is one."""
    by_memory: dict[int, list[str]] = {}
    for name in NAMES:
        weight = model.get_parameter(name)
        by_memory.setdefault(id(weight) if isinstance(weight, StoredTensor) else weight.data_ptr(), []).append(name)
    return [tuple(names) for names in by_memory.values()]


def value(weight: torch.Tensor) -> torch.Tensor:
    return weight.full_tensor() if isinstance(weight, StoredTensor) else weight


def assert_alike(model: nn.Module, plain: nn.Module) -> None:
    assert groups(model) == groups(plain)
    for name in plain.state_dict():
        assert isinstance(model.get_parameter(name), StoredTensor)
        assert torch.equal(value(model.get_parameter(name)), plain.get_parameter(name)), name


def stored(tmp_path: Path, seed: int, **fields: object) -> Tied:
    return zinf_fx.offload(tied(seed), store=tmp_path, **{"placement": "nvme", **fields})


def assign(rank: int, folder: Path, placements: Sequence[str], states: Iterable[Sequence[str]]) -> None:
    """Assign a state dict, and train. `states`: what is done to that of the first rank, whose values and ties count,
    and of the others."""
    for placement, how in itertools.product(placements, states):
        plain, model = tied(2), zinf_fx.offload(tied(2), placement=placement)
        strict = not how[0].startswith(("without", "the second"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plain.load_state_dict(STATES[how[0]](tied(1).state_dict(), folder), assign=True, strict=strict)
            own = STATES[how[min(rank, len(how) - 1)]](tied(1 + rank).state_dict(), folder)
            model.load_state_dict(own, assign=True, strict=strict)
        assert_alike(model, plain)
        parted = len(groups(plain)) > 1 and strict
        assert (
            any("were one parameter, and are two from now on" in str(warning.message) for warning in caught) == parted
        )
        optimizer = zinf_fx.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.arange(5)).backward()
            optimizer.step()
            optimizer.zero_grad()
        for parameter, other in itertools.combinations((model.get_parameter(name) for name in NAMES), 2):
            assert torch.equal(value(parameter), value(other)) == (parameter is other)


@pytest.mark.parametrize("how", STATES)
def test_names_are_tied_as_in_plain_pytorch(tmp_path: Path, tier: str, how: str):
    on_ranks(1, assign, tmp_path, [tier], [[how]])


def test_ranks_tie_what_the_first_has_tied(tmp_path: Path):
    states = [["itself"], ["equal tensors"], ["itself", "equal tensors"]]
    on_ranks(2, assign, tmp_path, ["nvme", "zero-2"], states)


def test_each_step_updates_what_is_tied_once(tmp_path: Path):
    """The optimizer has states: it updates as with the weight loaded in place."""
    models = [stored(tmp_path, 2), stored(tmp_path, 2), tied(2)]
    models[0].load_state_dict(tied(1).state_dict(), assign=True)
    for model in models[1:]:
        model.load_state_dict(tied(1).state_dict())
    for model in models:
        optimizer = (zinf_fx.optim if isinstance(model.head.weight, StoredTensor) else torch.optim).AdamW(
            model.parameters(), lr=0.1, **({} if isinstance(model.head.weight, StoredTensor) else {"fused": True})
        )
        assert len(list(model.parameters())) == 3
        for _ in range(3):
            model(torch.arange(5)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for model in models[:2]:
        assert_alike(model, models[2])


def test_compiled_code_goes_on_with_what_was_assigned(tmp_path: Path):
    torch._dynamo.reset()
    plain, model = tied(2), stored(tmp_path, 2)
    run = torch.compile(model, backend="zinf")
    for seed in (1, 3):
        for net in (plain, model):
            net.load_state_dict(tied(seed).state_dict(), assign=True)
        plain.head.weight = plain.inner[0].weight = plain.table.weight
        loss, expected = run(torch.arange(5)), plain(torch.arange(5))
        loss.backward(), expected.backward()
        assert loss.item() == expected.item()
        assert torch.equal(value(model.head.weight.grad), plain.head.weight.grad)


@pytest.mark.parametrize("order", [NAMES, NAMES[::-1]])
def test_submodules_that_load_one_after_the_other(tmp_path: Path, order: tuple[str, ...]):
    plain, model = tied(2), stored(tmp_path, 2)
    weight = tied(1).state_dict()["head.weight"]
    for name in order:
        for net in (plain, model):
            net.get_submodule(name.removesuffix(".weight")).load_state_dict({"weight": weight}, assign=True)
        assert_alike(model, plain)
    assert len(groups(model)) == 1


def test_what_was_written_to_meanwhile_is_another_value(tmp_path: Path):
    model = stored(tmp_path, 2)
    weight = torch.ones(9, 8)
    model.table.weight = nn.Parameter(weight)
    weight.zero_()
    with pytest.warns(UserWarning, match="'weight' of Linear and 'weight' of Embedding were one parameter"):
        model.head.weight = nn.Parameter(weight)
    assert value(model.head.weight).eq(0).all() and value(model.table.weight).eq(1).all()


def test_memory_that_was_given_back_ties_nothing(tmp_path: Path):
    """A new tensor may have the address of one that is gone."""
    model = stored(tmp_path, 2)
    for number in range(4):
        for module in (model.table, model.head):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module.weight = nn.Parameter(torch.full((9, 8), float(number + (module is model.head))))
    assert model.table.weight is not model.head.weight
    assert value(model.table.weight).eq(3).all() and value(model.head.weight).eq(4).all()


def _trained(model: nn.Module) -> None:
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(5)).backward()
    optimizer.step()


MEANWHILE: dict[str, Callable[[nn.Module], object]] = {"nothing": lambda model: None, "a step": _trained}


@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_nothing_is_said_of_names_that_were_parted_on_purpose(tmp_path: Path, tier: str, meanwhile: str):
    """By a program that gave one of them a value that it has no more, or trained the model before it gives another."""
    model = stored(tmp_path, 2, placement=tier)
    given = torch.ones(9, 8)
    model.head.weight = nn.Parameter(given)
    if meanwhile == "nothing":
        del given
    MEANWHILE[meanwhile](model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "'weight' of")
        model.table.weight = nn.Parameter(torch.zeros(9, 8))
    assert len({id(parameter) for parameter in (model.head.weight, model.table.weight, model.inner[0].weight)}) == 3


def test_a_state_dict_that_parts_names_says_so_after_training_too(tmp_path: Path, tier: str):
    model = stored(tmp_path, 2, placement=tier)
    _trained(model)
    with pytest.warns(UserWarning, match="were one parameter, and are two from now on"):
        model.load_state_dict(_with_clones(*NAMES)(tied(1).state_dict(), tmp_path), assign=True)


def test_state_dicts_of_stored_models(tmp_path: Path):
    """Of another one, with which the bytes are shared then, as in plain PyTorch, and its own."""
    other, model = stored(tmp_path, 1), stored(tmp_path, 2)
    model.load_state_dict(other.state_dict(), assign=True)
    assert groups(model) == [NAMES] and torch.equal(value(model.head.weight), value(other.head.weight))
    for _ in range(3):
        model.load_state_dict(model.state_dict(), assign=True)
    assert groups(model) == [NAMES]


def test_a_model_whose_weights_are_not_tied_stays_so(tmp_path: Path):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    zinf_fx.offload(model, store=tmp_path, placement="nvme")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict({"0.weight": torch.ones(4, 4), "1.weight": torch.zeros(4, 4)}, assign=True)
    assert model[0].weight is not model[1].weight and value(model[1].weight).eq(0).all()


def test_frozen_and_quantised_weights_stay_tied(tmp_path: Path):
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).requires_grad_(False)
        model[1].weight = model[0].weight
        return model

    model = zinf_fx.offload(made(0), store=tmp_path, placement="nvme", frozen_dtype="int8")
    model.load_state_dict(made(1).state_dict(), assign=True)
    expected = zinf_fx.offload(made(1), store=tmp_path, placement="nvme", frozen_dtype="int8")
    assert model[0].weight is model[1].weight and model[0].weight.quantised is not None
    assert torch.equal(value(model[0].weight), value(expected[0].weight))


def test_a_tied_weight_that_was_assigned_can_be_converted(tmp_path: Path):
    model = stored(tmp_path, 2)
    model.load_state_dict(tied(1).state_dict(), assign=True)
    model.double()
    assert groups(model) == [NAMES] and model.head.weight.dtype == torch.float64
