"""Parameters that can't be stored as they are, such as quantised ones: what stays in memory, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from twins import fresh_dynamo  # noqa: F401

import zinf_fx
from zinf_fx import StoredTensor
from zinf_fx.errors import StoredTensorError


class Packed(torch.Tensor):
    """Four-bit integers, as a quantising library packs them: of a class of its own, and frozen."""

    @staticmethod
    def __new__(cls, packed: torch.Tensor, scale: torch.Tensor) -> Packed:
        shape = (packed.shape[0], 2 * packed.shape[1])
        tensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype, device=packed.device)
        tensor.packed, tensor.scale = packed, scale
        return tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["packed", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict, context: None, outer_size: object, outer_stride: object) -> Packed:
        return Packed(inner["packed"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Packed(args[0].packed, args[0].scale)
        args = [one.unpacked() if isinstance(one, Packed) else one for one in args]
        return func(*args, **(kwargs or {}))

    def unpacked(self) -> torch.Tensor:
        halves = torch.stack([self.packed % 16, self.packed // 16], -1).flatten(-2)
        return (halves.to(self.scale.dtype) - 8) * self.scale


class Marked(torch.nn.Parameter):
    """A parameter of a subclass of nn.Parameter, as bitsandbytes has them."""


def quantised(kind: str) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    packed = Packed(torch.randint(256, (8, 4), dtype=torch.uint8), torch.full((8, 1), 0.1))
    value = torch.randn(8, 8)
    model[1].weight = {
        "tensor subclass": lambda: torch.nn.Parameter(packed, requires_grad=False),
        "parameter subclass": lambda: Marked(value, requires_grad=False),
    }[kind]()
    return model


QUANTISED = {"tensor subclass": "64 B", "parameter subclass": "256 B"}


@pytest.mark.parametrize("one_line", [False, True], ids=["offload", "one line"])
@pytest.mark.parametrize(("kind", "nbytes"), QUANTISED.items(), ids=QUANTISED)
def test_quantised_parameters_stay_in_memory_and_a_warning_says_so(kind, nbytes, one_line):
    plain = quantised(kind)
    model = copy.deepcopy(plain) if kind == "parameter subclass" else quantised(kind)
    model.load_state_dict(
        {name: value for name, value in plain.state_dict().items() if name != "1.weight"}, strict=False
    )
    model[1].weight = weight = plain[1].weight
    with pytest.warns(UserWarning, match=rf"1 frozen parameter\(s\), {nbytes}, stay .* such as '1.weight'"):
        if one_line:
            compiled = torch.compile(model, backend="zinf", options={"placement": "host"})
            compiled(torch.randn(2, 8))
        else:
            compiled = torch.compile(zinf_fx.offload(model, placement="host"), backend="zinf")
    assert model[1].weight is weight and not isinstance(weight, StoredTensor)
    x = torch.randn(2, 8)
    for call in (compiled, plain):
        call(x).square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one is other or torch.equal(one.grad.full_tensor(), other.grad)


def test_what_is_quantised_while_a_model_is_built_stays():
    with pytest.warns(UserWarning, match="1 frozen"), zinf_fx.offloading(placement="host"):
        model = quantised("parameter subclass")
    assert type(model[1].weight) is Marked and isinstance(model[0].weight, StoredTensor)


def test_a_trained_parameter_of_another_class_is_refused_with_what_to_do():
    model = torch.nn.Linear(4, 4)
    model.weight = Marked(model.weight.detach())
    with pytest.raises(StoredTensorError, match=r"'weight' is a Marked that is trained: .* requires_grad_\(False\)"):
        zinf_fx.offload(model, placement="host")


def test_plain_integers_are_stored():
    model = torch.nn.Linear(4, 4, bias=False)
    value = torch.randint(-9, 9, (4, 4), dtype=torch.int8)
    model.weight = torch.nn.Parameter(value, requires_grad=False)
    zinf_fx.offload(model, placement="host")
    assert isinstance(model.weight, StoredTensor) and torch.equal(model.weight.full_tensor(), value)
