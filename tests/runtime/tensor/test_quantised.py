"""Parameters that can't be stored as they are, such as quantised ones: what stays in memory, and what is refused."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from followed import followed_plans
from versions import not_before_2_12

import zinf_fx
from zinf_fx import StoredTensor
from zinf_fx.cli import main
from zinf_fx.errors import BudgetError, CheckpointError, StoredTensorError
from zinf_fx.frontend.explain import plan_model
from zinf_fx.plan.show.table import render

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Packed(torch.Tensor):
    """Holds four-bit integers, as a quantising library packs them: of a class of its own, and frozen."""

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
        args = [argument.unpacked() if isinstance(argument, Packed) else argument for argument in args]
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


STAYING = [("parameter subclass", False), ("parameter subclass", True), ("tensor subclass", True)]


@pytest.mark.parametrize(("kind", "one_line"), STAYING)
def test_quantised_parameters_stay_in_memory_and_a_warning_says_so(kind, one_line):
    nbytes = QUANTISED[kind]
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
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter is other or torch.equal(parameter.grad, other.grad)


@not_before_2_12("guards of tensor subclasses compare values, which breaks the graph")
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_what_a_library_made_of_tensors_is_stored_as_these(tmp_path, activations):
    """Eager code and graphs compute bit for bit what the class does in memory, and save none of its values."""
    torch.manual_seed(0)
    plain, model = quantised("tensor subclass"), quantised("tensor subclass")
    model.load_state_dict({n: v for n, v in plain.state_dict().items() if n != "1.weight"}, strict=False)
    model[1].weight = weight = torch.nn.Parameter(Packed(plain[1].weight.packed, plain[1].weight.scale), False)
    zinf_fx.offload(model, store=tmp_path, placement="nvme", activations=activations, pack=None)
    assert model[1].weight is weight and type(weight) is Packed and weight._is_param
    assert isinstance(weight.packed, StoredTensor) and isinstance(weight.scale, StoredTensor)
    x, run = torch.randn(2, 8), torch.compile(model, backend="zinf")
    assert torch.equal(model(x), plain(x))
    with followed_plans(model) as plans:
        for call in (run, plain):
            call(x).square().sum().backward()
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter is weight or torch.equal(parameter.grad.full_tensor(), other.grad)
    (plan,) = plans
    names = {tile.name: tile.nbytes for tile in plan.tiles}
    assert names["1.weight.packed"] == 32 and names["1.weight.scale"] == 32
    assert plan.kept == 2 * 8 * 4  # what goes into the last layer, and no weight's values
    assert zinf_fx.stats(model).bytes_read > 0


def test_tensors_of_a_parameter_are_placed_as_rules_place_it(tmp_path):
    model = quantised("tensor subclass")
    rules = [("1.weight", "nvme"), ("*", "host")]
    zinf_fx.offload(model, store=tmp_path, placement={"parameters": rules})
    assert {model[1].weight.packed.base.tier, model[1].weight.scale.base.tier} == {"nvme"}
    assert model[0].weight.base.tier == "host"


def test_tensors_of_a_parameter_are_stored_once(tmp_path):
    model = quantised("tensor subclass")
    storages = []
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such as that the parameter stays in memory
            zinf_fx.offload(model, store=tmp_path, placement="nvme")
        storages.append([model[1].weight.packed.stored, model[1].weight.scale.stored])
    assert all(storage is other for storage, other in zip(*storages, strict=True))


def test_checkpoints_have_what_a_parameter_is_made_of(tmp_path):
    """Those of a model in memory, and of one whose parts are stored, which load each other's."""
    (tmp_path / "store").mkdir()
    saved, stored = quantised("tensor subclass"), quantised("tensor subclass")
    zinf_fx.offload(stored, store=tmp_path / "store", placement="nvme")
    assert not torch.equal(saved[1].weight.packed, stored[1].weight.packed.full_tensor())
    zinf_fx.save_checkpoint(tmp_path / "first", saved)
    zinf_fx.load_checkpoint(tmp_path / "first", stored)
    again = quantised("tensor subclass")
    zinf_fx.save_checkpoint(tmp_path / "second", stored)
    zinf_fx.load_checkpoint(tmp_path / "second", again)
    x = torch.randn(2, 8)
    assert torch.equal(stored(x), saved(x)) and torch.equal(again(x), saved(x))
    assert torch.equal(again[1].weight.packed, saved[1].weight.packed)


def test_checkpoints_of_other_classes_of_parameters_are_refused(tmp_path):
    model, plain = quantised("tensor subclass"), quantised("parameter subclass")
    zinf_fx.save_checkpoint(tmp_path / "saved", model)
    with pytest.raises(CheckpointError, match=r"an ordinary tensor, and a test_quantised.Packed with None in the ch"):
        zinf_fx.load_checkpoint(tmp_path / "saved", plain)
    with pytest.raises(CheckpointError, match=r"'1.weight' .* is a Packed, made of packed, scale, .*save_checkpoint"):
        zinf_fx.export_safetensors(model, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
    zinf_fx.export_safetensors(plain, tmp_path / "exported")
    with pytest.raises(CheckpointError, match=r"'1.weight' .* is a Packed, made of packed, scale, .*save_checkpoint"):
        zinf_fx.load_safetensors(model, tmp_path / "exported")


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_checkpoints_of_other_classes_of_parameters_are_not_converted(tmp_path, form, capsys):
    zinf_fx.save_checkpoint(tmp_path / "saved", quantised("tensor subclass"))
    assert main(["checkpoint", "convert", str(tmp_path / "saved"), "-o", str(tmp_path / "to"), "--format", form]) == 2
    assert "'model/1.weight' is a test_quantised.Packed, and saved are the tensors" in capsys.readouterr().err
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("kind", QUANTISED)
def test_what_is_quantised_after_offloading_stays(kind):
    """It stays as a parameter in the place of a stored one, and in a module that takes another's place."""
    model = zinf_fx.offload(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), placement="host")
    plain = quantised(kind)
    with pytest.warns(UserWarning, match=rf"1 frozen .*, {QUANTISED[kind]}, stay .* such as 'weight'"):
        model[0].weight = plain[1].weight
    with pytest.warns(UserWarning, match=rf"1 frozen .*, {QUANTISED[kind]}, stay .* such as '1.weight'"):
        model[1] = plain[1]
    assert model[0].weight is model[1].weight is plain[1].weight
    assert isinstance(model[0].bias, StoredTensor) and isinstance(model[1].bias, StoredTensor)


def test_what_stays_in_memory_is_counted_in_the_plan():
    model, x = torch.nn.Sequential(*quantised("tensor subclass"), torch.nn.BatchNorm1d(8)), torch.randn(2, 8)
    nbytes = 8 * 4 + 8 * 4 + (8 * 4 + 8 * 4 + 8)  # packed values and scales; two statistics and a count of batches
    (plan,) = plan_model(model, (x,), placement="host").plans
    assert plan.unmoved == nbytes and f"unmoved    {nbytes} B of buffers and parameters" in render(plan)
    moved, kept = 3 * 256 + 3 * 32, plan.kept  # a tile and gradients on their way, in the fullest operator
    plan_model(model, (x,), placement="host", device_memory=nbytes + kept + moved)
    with pytest.raises(BudgetError, match=rf"buffers, and parameters that are not stored +{nbytes} B"):
        plan_model(model, (x,), placement="host", device_memory=nbytes + kept + moved - 1)


def test_what_is_quantised_while_a_model_is_built_stays():
    with pytest.warns(UserWarning, match="1 frozen"), zinf_fx.offloading(placement="host"):
        (model,) = torch.nn.Sequential(quantised("parameter subclass"))  # taken over twice, and counted once
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
