"""What Dynamo checks of stored parameters at each call: enough to tell them from others, and nothing twice."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch.utils._pytree import tree_map_only
from twins import Net, x

import zinf_fx
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def checks(run: torch.nn.Module, batch: torch.Tensor) -> int:
    """Return how often a call looks into stored tensors."""
    seen = 0
    wanted = StoredTensor.__tensor_flatten__.__code__

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal seen
        seen += event == "call" and frame.f_code is wanted

    sys.setprofile(count)
    try:
        run(batch)
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("placement", ["device", "host", "nvme"])
def test_each_parameter_is_looked_into_once(tmp_path: Path, placement: str) -> None:
    model = zinf_fx.offload(Net(), store=tmp_path, placement=placement)
    run = torch.compile(model, backend="zinf")
    run(x()).backward()
    assert checks(run, x()) == sum(parameter.grad is not None for parameter in model.parameters())


def test_parameters_that_are_alike_share_what_is_compared(tmp_path: Path) -> None:
    """The copies of it that Dynamo keeps are shared, too."""
    of = [{"placement": "host"}, {"placement": "host"}, {"placement": "nvme"}]
    models = [zinf_fx.offload(Net(), store=tmp_path, **options) for options in of]
    kinds = [[parameter.__tensor_flatten__()[1] for parameter in model.parameters()] for model in models]
    assert [len(set(map(id, of_model))) for of_model in kinds] == [1, 1, 1]
    assert kinds[0][0] is kinds[1][0] != kinds[2][0]
    assert copy.deepcopy(tree_map_only(torch.SymInt, str, kinds[0][0])) is kinds[0][0]
    other = models[0].scale.detach().view(2, -1)
    assert other.__tensor_flatten__()[1] != kinds[0][0]


def test_a_model_on_another_tier_is_compiled_for_itself(tmp_path: Path) -> None:
    """Its parameters have the same class, shapes and dtypes, and the code is the same."""
    plain = Net()
    batch = x()
    for placement in ("host", "nvme", "device"):
        stored = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement=placement)
        run = torch.compile(stored, backend="zinf")
        with zinf_fx.record(stored) as recording:
            assert torch.equal(run(batch), plain(batch))
        assert {tile.tier for plan in recording.plans for tile in plan.graphs[0].tiles} == {placement}
    assert torch.equal(torch.compile(plain, backend="zinf")(batch), plain(batch))


@pytest.mark.parametrize("dynamic", [None, True])
def test_parameters_of_other_shapes_have_graphs_of_their_own(tmp_path: Path, dynamic: bool | None) -> None:
    """Where they are arguments of what is compiled, Dynamo would take the sizes that differ for variable ones."""
    weights = torch.nn.ParameterList(torch.randn(8, width) for width in (8, 16, 24))
    plain = copy.deepcopy(weights)
    zinf_fx.offload(weights, store=tmp_path, placement="nvme")
    run = torch.compile(lambda weight: (torch.ones(2, 8) @ weight).square().sum(), backend="zinf", dynamic=dynamic)
    for weight, in_memory in zip(weights, plain, strict=True):
        loss, expected = run(weight), (torch.ones(2, 8) @ in_memory).square().sum()
        loss.backward()
        expected.backward()
        assert torch.equal(loss, expected) and weight.grad.equal(in_memory.grad)
