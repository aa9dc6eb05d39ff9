"""Every small model through every pass: values stay bitwise those of eager PyTorch, and who shares memory is seen."""

from __future__ import annotations

import pytest
from gate import slow
from passes.capturing import Record, assert_trains_like_eager
from passes.models import CASES, trained
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from zinf_fx.config import Config
from zinf_fx.passes.ir.aliases import aliased_inputs
from zinf_fx.passes.ir.framework import is_compute
from zinf_fx.passes.ir.printer import print_around


@pytest.fixture(scope="module", params=CASES)
def record(request: pytest.FixtureRequest) -> Record:
    """Return the record of one case, whose tests follow each other."""
    return trained(request.param)


def test_trains_like_eager(record: Record) -> None:
    assert record.captures == 1


def test_sees_all_that_share_memory(record: Record) -> None:
    """Fake tensors share storages as real ones do: an oracle that the passes don't use."""
    for stage in record.stages:
        for node in stage.before.nodes:
            if not is_compute(node):
                continue
            for argument in node.all_input_nodes:
                if _storages(node) & _storages(argument):
                    assert argument in aliased_inputs(node), print_around(stage.before, stage.context_before, node)


def _storages(node: fx.Node) -> set[int]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return {v.untyped_storage()._cdata for v in values if isinstance(v, FakeTensor)}


@pytest.mark.parametrize(
    "name", ["tied_far_apart", slow("weights_fetched_at_the_top"), slow("mlp"), slow("checkpointed_dropout")]
)
def test_trains_like_eager_without_prefetch(name: str) -> None:
    model, inputs = CASES[name]()
    assert_trains_like_eager(model, *inputs, config=Config(placement="infinity-nvme", prefetch=None))
