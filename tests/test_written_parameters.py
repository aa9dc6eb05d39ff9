"""Parameters that forward writes to: trained as plain PyTorch trains them, or refused, with the line that does so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gate import slow
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zinf_fx
from zinf_fx.frontend.explain import plan_model

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WIDTH = 64


class Layers(nn.Module):
    """What the models here have in common; each writes to parameters in its own way, and uses them in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.embedding = nn.Embedding(32, WIDTH, max_norm=1.0)

    def write(self) -> None:
        """Write to parameters."""

    def forward(self, x: Tensor) -> Tensor:
        self.write()
        return self.last(self.first(x).tanh()).square().sum()


class Renormed(Layers):
    """An embedding whose rows are scaled down as they are looked up, twice, and which is the head, too."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(len(x))
        x = self.first(x).tanh() + self.embedding(rows) * self.embedding(rows + 1)
        return F.linear(x, self.embedding.weight).square().sum()


class Clamped(Layers):
    """A weight that is kept within bounds."""

    def write(self) -> None:
        with torch.no_grad():
            self.last.weight.clamp_(-0.05, 0.05)


class DataClamped(Layers):
    """The same, as transformers' Gemma3n does it."""

    def write(self) -> None:
        self.last.weight.data.clamp_(-0.05, 0.05)


class Several(Layers):
    """Weights that are written to more than once, and from each other."""

    def write(self) -> None:
        with torch.no_grad():
            self.last.weight.mul_(0.5 / self.first.weight.abs().max())
            self.last.weight.sub_(self.first.weight)
            self.first.weight.copy_(self.last.weight)
            self.first.bias.zero_()


class RowZeroed(Layers):
    """Has a weight of which forward zeroes a row, through a view."""

    def write(self) -> None:
        with torch.no_grad():
            self.last.weight[0].zero_()


class ColumnSet(Layers):
    """Does the same by assignment."""

    def write(self) -> None:
        with torch.no_grad():
            self.last.weight[:, 1] = 0.5


class Both(Clamped):
    """Has a weight and a view of it."""

    def write(self) -> None:
        row = self.last.weight.detach()[0]
        super().write()
        row.zero_()


class Used(Layers):
    """A weight that is written to after its use, where backward would need the value from before."""

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        self.last.weight.data.clamp_(-0.05, 0.05)
        return loss


class Returned(Clamped):
    """A weight that is a result, with the value from before."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        before = self.last.weight.data.t()
        return super().forward(x), before.to(torch.float64)


WRITING = {"max_norm": Renormed, "clamp": Clamped, "clamp of data": DataClamped, "several": Several}
OPTIONS: dict[str, dict[str, object]] = {
    "nvme": {"placement": "nvme"},
    "host": {"placement": "host"},
    "device": {"placement": "device"},
    "in tiles": {"placement": "nvme", "tile": "4KiB"},
    "within a budget": {"placement": "infinity-nvme", "host_memory": "768KiB"},
    "activations too": {"placement": "nvme", "activations": "offload", "prefetch": None},
}
CASES = [
    *((Clamped, name) for name in OPTIONS),
    *((model, "nvme") for model in WRITING.values() if model is not Clamped),
    (Several, "in tiles"),
    (Renormed, "within a budget"),
]
IN_THE_SLOW_TESTS = (
    *((Clamped, name) for name in ("host", "device", "activations too", "within a budget")),
    (Renormed, "within a budget"),
)


def x() -> Tensor:
    return torch.randn(4, WIDTH)


@pytest.mark.parametrize(
    ("build", "name"),
    [slow(*case) if case in IN_THE_SLOW_TESTS else case for case in CASES],
    ids=[f"{model.__name__}, {name}" for model, name in CASES],
)
def test_they_are_trained_as_plain_pytorch_trains_them(tmp_path: Path, build: Callable[[], nn.Module], name: str):
    torch.manual_seed(0)
    plain = build()
    model = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, **OPTIONS[name])
    compiled = torch.compile(model, backend="zinf")
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1, fused=True)
    ours = zinf_fx.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        batch = x()
        for net, optimizer, loss in ((plain, theirs, plain(batch)), (model, ours, compiled(batch))):
            net.loss = loss.detach()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(model.loss, plain.loss)
        with torch.no_grad():  # writes as well
            assert torch.equal(compiled(batch), plain(batch))
    for (key, value), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(value.detach(), other.full_tensor()), key
        assert theirs.state.get(value, {}).keys() == ours.state.get(other, {}).keys()
        for state, expected in theirs.state.get(value, {}).items():
            actual = ours.state[other][state]
            assert torch.equal(expected, getattr(actual, "full_tensor", lambda actual=actual: actual)()), (key, state)


@pytest.mark.parametrize("build", WRITING.values(), ids=WRITING)
def test_they_are_written_in_the_one_line_use(build: Callable[[], nn.Module]):
    torch.manual_seed(0)
    plain = build()
    model, batch = copy.deepcopy(plain), x()
    compiled = torch.compile(model, backend="zinf", options={"placement": "host"})
    assert torch.equal(compiled(batch), plain(batch))
    for (key, value), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(value.detach(), other.detach()), key


def test_the_plan_has_the_write_and_what_it_moves(tmp_path: Path):
    """It is behind the last use of the value from before, and backward gathers the parameter again."""
    model = zinf_fx.offload(Clamped(), store=tmp_path, placement="nvme")
    (plan,) = plan_model(model, (x(),)).plans
    forward, backward = plan.graphs
    number, written = next((n, tile) for n, tile in enumerate(plan.tiles) if tile.name == "last.weight")
    kinds = [event.kind for event in forward.events if event.tile == number and not event.for_backward]
    assert kinds == ["fetch", "upload", "allgather", "wait", "release", "write"]
    assert [event.kind for event in backward.events if event.tile == number][:4] == kinds[:4]
    assert plan.activation_buffer == written.nbytes
    text = zinf_fx.explain(model, x())
    assert "writes" in text and "host -> NVMe    16.0 KiB" in text


def test_a_plan_is_followed(tmp_path: Path):
    """A file's plan of a graph that writes."""
    torch.manual_seed(0)
    plain, batch = Several(), x()
    zinf_fx.export_plan(plain, (batch,), zinf_fx.Config(placement="nvme")).save(tmp_path / "plan.json")
    model = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement="nvme")
    compiled = torch.compile(model, backend="zinf", options={"plan": str(tmp_path / "plan.json")})
    for _ in range(2):
        assert torch.equal(compiled(batch), plain(batch))


VIEW = r"writes to a view of a stored parameter, or to a DTensor \('last.weight': "
REFUSED = {
    "a view": (RowZeroed, VIEW),
    "an assignment to a view": (ColumnSet, VIEW),
    "a parameter and a view of it": (Both, VIEW),
    "after its use": (Used, r"with 'last.weight' before it writes to it, and the value from before is needed in back"),
    "returned": (Returned, r"computes with 'last.weight' before it writes to it.* as a result"),
}


@pytest.mark.parametrize("one_line", [False, True], ids=["offloaded", "one line"])
@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_lost_is_refused_with_its_place(build: Callable[[], nn.Module], message: str, one_line: bool):
    model, options = build(), {"placement": "host"}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if not one_line:
        zinf_fx.offload(model, **options)
    with pytest.raises(Exception, match=message) as failure:
        torch.compile(model, backend="zinf", options=options if one_line else {})(x())
    assert __file__ in str(failure.value)
    for name, parameter in model.named_parameters():
        assert (type(parameter) is nn.Parameter) == one_line and torch.equal(parameter.detach(), before[name])


@pytest.mark.parametrize("placement", ["nvme", "zero-1"])
def test_many_ranks_refuse_it(placement: str):
    with pytest.raises(Exception, match=r"writes to a stored parameter .* that many ranks train") as failure:
        zinf_fx.export_plan(Clamped(), (x(),), zinf_fx.Config(placement=placement), world_size=2)
    assert __file__ in str(failure.value)


@pytest.mark.parametrize("build", [Clamped, DataClamped])
def test_tensor_parallelism_refuses_it_or_leaves_it_to_eager_code(build: Callable[[], nn.Module]):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plan = {"first": ColwiseParallel(), "last": RowwiseParallel()}
        model = parallelize_module(build(), init_device_mesh("cpu", (1,)), plan)
        zinf_fx.offload(model, placement="host", process_group=dist.new_group([0]))
        try:
            torch.compile(model, backend="zinf")(x())
        except Exception as failure:
            assert "writes to a DTensor whose parts are stored" in str(failure) and __file__ in str(failure)
        else:  # Dynamo of torch 2.15 leaves some of them to eager code
            assert model.last.weight.to_local().full_tensor().abs().max() <= 0.05
    finally:
        dist.destroy_process_group()
