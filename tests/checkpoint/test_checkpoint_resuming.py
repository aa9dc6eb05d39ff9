"""What was interrupted and resumed equals what was not, bit for bit; on one rank, on several, and on other numbers of
ranks than saved it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gate import named, slow
from jobs import Job, assert_equal, value_of
from ranks.launching import on_ranks
from safetensors.torch import load_file

import zinf_fx
from zinf_fx.optim.formats import join
from zinf_fx.runtime.memory.host import aligned_empty

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def resume(rank: int, directory: Path, at: int, until: int, how: dict[str, Any]) -> None:
    """Train, save after `at` micro-batches and go on; load into another training, and do the same."""
    first = Job(None, seed=1, **how)
    first.train(at)
    first.save(directory)
    at_save = first.values()
    losses = first.train(until)

    second = Job(None, seed=2 + rank, **how)
    second.load(directory)
    assert_equal(second.values(), at_save)
    assert second.train(until) == losses
    assert_equal(second.values(), first.values())


@pytest.mark.parametrize(
    ("ranks", "placement", "at"),
    [
        (1, "device", 4),
        (1, "host", 4),
        (1, "nvme", 5),
        *(slow(1, *case) for case in (("device", 5), ("host", 5), ("nvme", 4))),
        *(slow(2, *case) for case in (("infinity-nvme", 4), ("zero-2", 5))),
    ],
)
def test_in_any_placement(tmp_path: Path, ranks: int, placement: str, at: int):
    """It is interrupted between two steps, after 4 passes, and while gradients are accumulated, after 5."""
    on_ranks(ranks, resume, tmp_path, at, 9, {"placement": placement, "compiled": at == 5})


@pytest.mark.parametrize(
    "how",
    [
        slow({"options": {"step_in_backward": True}, "scales": False}),
        {"options": {"step_in_backward": True}, "scales": False, "compiled": True},
        slow({"options": {"state_dtype": torch.bfloat16}}),
        {"options": {"state_dtype": "8bit", "master_dtype": "split"}},
        {"fields": {"pack": "auto"}, "compiled": True},
        slow({"fields": {"chunk": "64KiB", "host_memory": "4MiB"}}),
        {"dtype": torch.float32, "options": {"amsgrad": True}},
        slow({"optimizer": zinf_fx.optim.SGD, "options": {"momentum": 0.9}}),
        {"optimizer": zinf_fx.optim.NAdam},
        {"optimizer": zinf_fx.optim.Adafactor, "scales": False},
        slow({"optimizer": torch.optim.AdamW, "options": {"fused": True}, "dtype": torch.float32}),
        {"optimizer": torch.optim.RMSprop, "placement": "device", "dtype": torch.float32},
        {"placement": {"parameters": "device", "gradients": "host", "optimizer": "nvme", "activations": "device"}},
        slow({"options": {"overlap": False}, "compiled": True}),
    ],
    ids=lambda how: " ".join(f"{name}={value}" for name, value in how.items()),
)
def test_with_any_options(tmp_path: Path, how: dict[str, Any]):
    at = 4 if how.get("options", {}).get("step_in_backward") else 5
    on_ranks(1, resume, tmp_path, at, 7, how)


FORMS = {"split": {"master_dtype": "split"}, "whole": {}, "few": {"state_dtype": "8bit", "master_dtype": "split"}}


@pytest.mark.parametrize(
    ("saved", "loaded"), [("split", "whole"), ("whole", "split"), ("whole", "few"), ("few", "whole")]
)
def test_states_of_another_form(tmp_path: Path, saved: str, loaded: str):
    """They are what `load_state_dict` makes of them. Masters lose nothing: the training goes on bit for bit."""
    first = Job(tmp_path / "a", seed=1, options=FORMS[saved])
    first.train(4)
    first.save(tmp_path / "checkpoint")
    second, third = (Job(tmp_path / name, seed=2, options=FORMS[loaded]) for name in "bc")
    second.load(tmp_path / "checkpoint")
    third.model.load_state_dict(first.model.state_dict())
    third.adam.load_state_dict(first.adam.state_dict())
    states = [{n: value for n, value in job.values().items() if not n.startswith("grad")} for job in (second, third)]
    assert_equal(*states)
    if "few" in (saved, loaded):
        return
    torch.manual_seed(5)
    losses = first.train(8)
    torch.manual_seed(5)
    assert second.train(8) == losses
    weights = ({n: value for n, value in job.values().items() if n.startswith("model")} for job in (first, second))
    assert_equal(*weights)


def test_before_the_first_step(tmp_path: Path):
    on_ranks(1, resume, tmp_path, 0, 3, {})


def test_into_a_training_that_goes_on(tmp_path: Path):
    job = Job(tmp_path / "a", seed=1)
    job.train(5)
    job.save(tmp_path / "checkpoint")
    losses, values = job.train(8), job.values()
    job.load(tmp_path / "checkpoint")
    assert job.train(8) == losses
    assert_equal(job.values(), values)


@dataclass(frozen=True)
class State:
    """What a job has, and the losses that led there."""

    rates: list[float]
    values: dict[str, torch.Tensor]
    losses: list[float]


def state(job: Job, losses: list[float]) -> State:
    """Masters that are split are joined."""
    values = job.values()
    for index, parameter in enumerate(job.adam.param_groups[0]["params"]):
        if (up := values.pop(f"state.{index}.master_up", None)) is not None:
            lower = values[f"state.{index}.master"].view(-1).view(torch.int16)
            masters = join(value_of(parameter).view(-1), lower, up.view(-1), torch.empty(parameter.numel()))
            values[f"state.{index}.master"] = masters.view(parameter.shape)
    return State(job.schedule.get_last_lr(), values, losses)


def take_up(rank: int, number: int, folder: Path, how: dict[str, Any]) -> tuple[State, State, State]:
    """Load the checkpoint before the one with this number, unless this is the first, train, save, and train on. Returns
    the states after loading, saving, and training on."""
    # Ranks of tensor parallelism begin with the same parameters that are not divided, and drop the same.
    job = Job(None, seed=5 + number * rank, scales=False, **how)
    if number:
        job.load(folder / str(number - 1))
    else:
        torch.manual_seed(0)
    loaded = state(job, [])
    losses = job.train(4 * number + 5)  # the last micro-batch leaves gradients
    job.save(folder / str(number))
    return loaded, state(job, losses), state(job, job.train(4 * number + 9))


HOST, TILED = {"placement": "host"}, {"placement": "infinity-nvme", "fields": {"tile": "4KiB"}}
PARALLEL = {"placement": "infinity-cpu", "tensor_parallel": True}
FEW = {"state_dtype": "8bit"}
FEW_SPLIT = FEW | {"master_dtype": "split"}
CHAINS = {
    "one rank": [(1, {"placement": "nvme", "fields": {"chunk": "64KiB"}}), (1, {"placement": "device"}), (1, HOST)],
    "two ranks and one": [(2, TILED), (1, HOST)],
    "three ranks and tensor parallelism": [(2, TILED), (3, {"placement": "zero-2"}), (1, HOST), (2, PARALLEL)],
    "codes of eight bits, and masters that are split or not": [
        (2, {"placement": "infinity-nvme", "options": FEW_SPLIT}),
        (1, HOST | {"options": FEW}),
        (3, {"placement": "infinity-cpu", "options": FEW_SPLIT}),
    ],
    "all placements": [
        (2, PARALLEL | {"placement": "infinity-nvme"}),
        (4, PARALLEL | {"placement": "infinity-nvme"}),
        *((4, {"placement": preset}) for preset in ("dp", "zero-1", "zero-3", "zero-offload")),
        (3, {"placement": "infinity-cpu", "fields": {"partition": "owner"}}),
        (2, {"placement": "infinity-nvme", "fields": {"pack": "auto"}}),
        (1, {"placement": "nvme"}),
    ],
}


@pytest.mark.parametrize("name", named(CHAINS, {"one rank", "two ranks and one"}))
def test_into_other_placements_and_numbers_of_ranks(tmp_path: Path, name: str):
    """On one rank, the training goes on bit for bit; on several, other placements may add in another order."""
    before = []
    for number, (size, how) in enumerate(CHAINS[name]):
        states = on_ranks(size, take_up, number, tmp_path, how)
        for rank, (loaded, trained, _) in enumerate(states if number else []):
            _, saved, went_on = before[min(rank, len(before) - 1)]
            assert loaded.rates == saved.rates
            assert_equal(loaded.values, saved.values)
            if size == len(before) == 1:
                assert (trained.rates, trained.losses) == (went_on.rates, went_on.losses)
                assert_equal(trained.values, went_on.values)
        before = states


def test_a_plain_training(tmp_path: Path):
    """Nothing is stored; all is in memory."""

    def training(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Dropout(0.1), torch.nn.Linear(30, 20)).bfloat16()
        model[0].weight.data = model[0].weight.data.t().contiguous().t()  # in another order in memory
        return model, torch.optim.AdamW(model.parameters(), amsgrad=True)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(3):
            loss = model(torch.randn(4, 40, dtype=torch.bfloat16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    first, second = training(1), training(2)
    train(*first)
    zinf_fx.save_checkpoint(tmp_path, *first)
    losses = train(*first)
    zinf_fx.load_checkpoint(tmp_path, *second)
    assert train(*second) == losses
    assert all(map(torch.equal, first[0].parameters(), second[0].parameters()))


@pytest.mark.parametrize("count", [1, 8, 512], ids=["one", "less than a page", "a page"])
def test_buffers_that_are_conjugated_or_negated_lazily(tmp_path: Path, count: int):
    """Their memory, which may be that of another buffer, has other values."""

    def built(value: complex) -> torch.nn.Module:
        module, turns = torch.nn.Module(), aligned_empty(8 * count)[: 8 * count].view(torch.complex64).fill_(value)
        for name, buffer in (("turns", turns), ("back", turns.conj()), ("sines", turns.conj().imag)):
            module.register_buffer(name, buffer)
        return module

    saved, apart = built(1 + 2j), built(0)
    assert saved.back.is_conj() and saved.sines.is_neg()
    apart.back, apart.sines = apart.back.clone().conj(), apart.sines.clone()
    expected = {"turns": 1 + 2j, "back": 1 - 2j, "sines": -2.0}
    zinf_fx.save_checkpoint(tmp_path / "saved", saved)
    zinf_fx.export_safetensors(saved, tmp_path / "weights")
    zinf_fx.load_checkpoint(tmp_path / "saved", apart)
    for tensors in (apart.state_dict(), load_file(tmp_path / "weights" / "model.safetensors")):
        assert {name: set(value.tolist()) for name, value in tensors.items()} == {n: {v} for n, v in expected.items()}


@pytest.mark.parametrize("placement", ["host", "nvme", None])
def test_gradients_of_all_models(tmp_path: Path, placement: str | None):
    """They are those of a generator and a discriminator, say, that share a layer."""

    def training(seed: int) -> tuple[torch.nn.Module, torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        shared = torch.nn.Linear(40, 40)
        models = [torch.nn.Sequential(shared, torch.nn.Linear(40, 30)).bfloat16() for _ in range(2)]
        if placement is not None:
            for model in models:
                zinf_fx.offload(model, store=tmp_path, placement=placement)
        return (*models, zinf_fx.optim.SGD([*models[0].parameters(), *models[1][1].parameters()], lr=0.1))

    def gradients(*models: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {
            f"{n}.{name}": value_of(p.grad) for n, model in enumerate(models) for name, p in model.named_parameters()
        }

    first, other, optimizer = training(1)
    for model in (first, other):
        model(torch.ones(2, 40, dtype=torch.bfloat16)).float().square().sum().backward()
    zinf_fx.save_checkpoint(tmp_path / "saved", first, optimizer, other=other)
    expected = gradients(first, other)

    second, another, optimizer = training(2)
    zinf_fx.load_checkpoint(tmp_path / "saved", second, optimizer, other=another)
    assert_equal(gradients(second, another), expected)

    third, _, _ = training(3)
    zinf_fx.load_checkpoint(tmp_path / "saved", third, other=None)
    assert_equal(gradients(third), {name: gradient for name, gradient in expected.items() if name.startswith("0.")})
