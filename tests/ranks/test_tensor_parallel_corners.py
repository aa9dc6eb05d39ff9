"""Models of tensor parallelism go through other graphs, copies and scaled losses around training steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from gate import slow
from ranks import tensor_parallel as tp
from ranks.launching import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from versions import BEFORE_2_12

import zinf_fx
from zinf_fx.errors import ConfigError, RanksError
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor


class Net(nn.Module):
    """Has two layers: the first one's columns are divided, the second one's rows. `factor`: of what goes in."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = (
            nn.Parameter(distribute_tensor(torch.randn(16, 16), mesh, [Shard(dim)])) for dim in (1, 0)
        )

    def forward(self, x: torch.Tensor, factor: int = 1) -> torch.Tensor:
        x = x * factor
        x = DTensor.from_local(x, self.up.device_mesh, [Replicate()], run_check=False)
        return (x @ self.up @ self.down).full_tensor().square().mean()


def graphs_with_gradients_present(mesh: DeviceMesh) -> bool:
    """Return whether a graph can be compiled while there are gradients, and leaves them as they are."""
    model = zinf_fx.offload(Net(mesh), placement="host")
    run = torch.compile(model, backend="zinf")
    x = torch.ones(2, 16)
    loss = run(x)
    loss.backward()
    before = model.up.grad.full_tensor()
    with torch.no_grad():
        evaluated = run(x)
    run(x).backward()
    return torch.equal(evaluated, loss) and torch.equal(model.up.grad.full_tensor(), 2 * before)


def copies_train(mesh: DeviceMesh) -> bool:
    """Return whether copies of a model train as it does, compiled or not, and it stays as it was."""
    model = zinf_fx.offload(Net(mesh), placement="host")
    copies = [copy.deepcopy(model) for _ in range(3)]
    before = model.up.full_tensor()
    for run in (copies[0], torch.compile(copies[1], backend="zinf"), copies[2]):
        module = getattr(run, "_orig_mod", run)
        if module is copies[2]:  # an optimizer may come after the first backward pass
            run(torch.ones(2, 16)).backward()
            optimizer = zinf_fx.optim.SGD(module.parameters(), lr=0.1)
        else:
            optimizer = zinf_fx.optim.SGD(module.parameters(), lr=0.1)
            run(torch.ones(2, 16)).backward()
        optimizer.step()
    values = [copied.up.full_tensor() for copied in copies]
    stayed = torch.equal(model.up.full_tensor(), before) and not torch.equal(values[0], before)
    return stayed and all(torch.equal(value, values[0]) for value in values)


def views_from_outside_have_gradients(mesh: DeviceMesh) -> bool:
    """Return whether a gradient comes through a view of a parameter that eager code gives to a graph."""
    model = zinf_fx.offload(Net(mesh), placement="host")
    product = torch.compile(lambda weight, x: (x @ weight).full_tensor().sum(), backend="zinf")
    x = DTensor.from_local(torch.ones(2, 16), mesh, [Replicate()], run_check=False)
    product(model.up.t(), x).backward()
    return torch.equal(model.up.grad.full_tensor(), torch.full((16, 16), 2.0))


def parameters_freeze_and_thaw(mesh: DeviceMesh) -> bool:
    """Return whether what is frozen and unfrozen after offloading gets gradients accordingly, in every graph."""
    model = Net(mesh)
    model.up.requires_grad_(False)
    zinf_fx.offload(model, placement="host")
    as_asked = []
    for up, down in ((True, False), (False, True), (True, True)):
        model.up.requires_grad_(up)
        model.down.requires_grad_(down)
        torch.compile(model, backend="zinf")(torch.ones(2, 16)).backward()
        as_asked.append((model.up.grad is not None, model.down.grad is not None) == (up, down))
        model.zero_grad()
    return all(as_asked)


def other_numbers_are_refused(mesh: DeviceMesh) -> bool:
    """Return whether ranks notice that they call the model with different numbers, where its activations are
    divided."""
    model = zinf_fx.offload(Net(mesh), placement="host", partition_activations=True)
    run = torch.compile(model, backend="zinf")
    with pytest.raises(RanksError, match="differs"):
        for factor in (2, 4):  # the first one may be a constant, in graphs that differ
            run(torch.ones(2, 16), factor + mesh.get_local_rank())
    return True


def graphs_are_not_asked_for_ranks(mesh: DeviceMesh) -> bool:
    """Return whether a model that was not offloaded is refused, as long as only its graphs tell of ranks."""
    model = Net(mesh)
    options = {"placement": "host"}
    with pytest.raises(ConfigError, match="which ranks train all of them"):
        torch.compile(model, backend="zinf", options=options)(torch.ones(2, 16))
    options["process_group"] = tp.mesh_of(1, 2)["dp"].get_group()
    run = torch.compile(model, backend="zinf", options=options)
    first = run(torch.ones(2, 16))
    return torch.equal(run(torch.ones(2, 16)), first) and isinstance(model.up.to_local(), StoredTensor)


def models_are_parallelised_as_they_are_built(mesh: DeviceMesh) -> bool:
    """Return whether parameters that left already are divided: by each rank for itself, as it has the same ones."""
    torch.manual_seed(0)
    with zinf_fx.offloading(placement="host", process_group=tp.mesh_of(1, 2)["dp"].get_group()):
        layer = parallelize_module(nn.Linear(16, 16), mesh, ColwiseParallel(), src_data_rank=None)
    torch.manual_seed(0)
    plain = nn.Linear(16, 16)
    layer(torch.ones(1, 16)).sum().backward()
    plain(torch.ones(1, 16)).chunk(2, dim=-1)[mesh.get_local_rank()].sum().backward()
    whole = [layer.weight.full_tensor(), layer.weight.grad.to_local()]
    part = plain.weight.grad.chunk(2)[mesh.get_local_rank()]
    return isinstance(whole[1], StoredTensor) and torch.equal(whole[0], plain.weight) and torch.equal(whole[1], part)


def infinities_are_everyones(mesh: DeviceMesh) -> bool:
    """Return whether both ranks skip a step for an infinity in one rank's part; the gradients begin with one that both
    have whole, which is all that DTensor looks at."""
    model = Net(mesh)
    model.scale = nn.Parameter(distribute_tensor(torch.ones(16), mesh, [Replicate()]))
    zinf_fx.offload(model, placement="host")
    before = model.up.full_tensor()
    optimizer = zinf_fx.optim.SGD([model.scale, model.up, model.down], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(2, 16))).backward()
    model.scale.grad = torch.zeros_like(model.scale)
    if mesh.get_local_rank() == 1:
        with torch.no_grad():
            model.up.grad.to_local()[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    after = model.up.full_tensor()  # by both, whatever they found
    return scaler.get_scale() == 2.0 and torch.equal(after, before)


def on_two(rank: int, checks: Sequence[Callable[[DeviceMesh], bool]]) -> dict[str, bool]:
    mesh = tp.mesh_of(1, 2)["tp"]
    return {check.__name__: check(mesh) for check in checks}


CHECKS = (
    graphs_with_gradients_present,
    copies_train,
    # Up to torch 2.11, AOTAutograd refuses views that eager code makes of a DTensor whose local tensor is stored.
    *([views_from_outside_have_gradients] if not BEFORE_2_12 else []),
    infinities_are_everyones,
    parameters_freeze_and_thaw,
    other_numbers_are_refused,
    graphs_are_not_asked_for_ranks,
    models_are_parallelised_as_they_are_built,
)


IN_THE_GATE = (graphs_with_gradients_present, infinities_are_everyones, other_numbers_are_refused)


@pytest.mark.parametrize("checks", [IN_THE_GATE, slow(CHECKS)], ids=len)
def test_what_models_of_tensor_parallelism_go_through(checks: Sequence[Callable[[DeviceMesh], bool]]):
    for outcomes in on_ranks(2, on_two, checks):
        assert outcomes == {check.__name__: True for check in checks}
