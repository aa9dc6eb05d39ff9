"""Parameters that forward writes to are refused, with the line that does so, before anything runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from twins import fresh_dynamo  # noqa: F401

import zinf_fx


class Renormed(nn.Module):
    """An embedding whose rows are scaled down as they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.embedding, self.last = nn.Linear(8, 8), nn.Embedding(16, 8, max_norm=1.0), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.embedding(torch.arange(len(x)))
        return self.last(self.first(x).tanh() + rows).square().sum()


class Clamped(nn.Module):
    """A weight that is kept within bounds by forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.weight.clamp_(-0.1, 0.1)
        return self.last(self.first(x).tanh()).square().sum()


class RowZeroed(nn.Module):
    """A weight of which forward zeroes a row, through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.weight[0].zero_()
        return self.last(self.first(x).tanh()).square().sum()


class ColumnSet(RowZeroed):
    """The same by assignment."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.weight[:, 1] = 0.5
        return self.last(self.first(x).tanh()).square().sum()


MODELS = {"max_norm": Renormed, "clamp": Clamped, "a view": RowZeroed, "an assignment to a view": ColumnSet}


@pytest.mark.parametrize("one_line", [False, True], ids=["offloaded", "one line"])
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_they_are_refused_with_their_place(build: Callable[[], nn.Module], one_line: bool):
    model, options = build(), {"placement": "host"}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if not one_line:
        zinf_fx.offload(model, **options)
    with pytest.raises(
        Exception, match=r"writes to a (stored tensor|view of a stored parameter \('last.weight': )"
    ) as failure:
        torch.compile(model, backend="zinf", options=options if one_line else {})(torch.randn(4, 8))
    assert __file__ in str(failure.value)
    for name, parameter in model.named_parameters():
        assert (type(parameter) is nn.Parameter) == one_line and torch.equal(parameter.detach(), before[name])
