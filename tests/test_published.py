"""Weights that are published as codes and scales, in tensors of their own: what is stored, computed and refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gate import slow
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zinf_fx
from zinf_fx import StoredTensor
from zinf_fx.checkpoint import convert
from zinf_fx.checkpoint.manifest import manifest_of, to_text
from zinf_fx.cli import main
from zinf_fx.errors import CheckpointError, ConfigError, StoredTensorError, StoreError
from zinf_fx.quantisation import quantised_shape

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


class Model(nn.Module):
    """A linear layer of each kind, experts, and something to train."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 192)
        self.blocks, self.rows, self.whole = nn.Linear(192, 200), nn.Linear(200, 192), nn.Linear(192, 192, bias=False)
        self.integers = nn.Linear(192, 192, bias=False)
        self.experts = nn.Parameter(torch.randn(2, 192, 128))
        self.others = nn.Parameter(torch.randn(2, 128, 192))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.whole(self.rows(torch.tanh(self.blocks(self.table(tokens)))))
        x = torch.tanh(self.integers(x)).expand(2, *x.shape)
        return torch.bmm(torch.tanh(torch.bmm(x, self.experts)), self.others).float().square().mean()


class Shifted(nn.Module):
    """A frozen base, and what is trained beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.shift = base.requires_grad_(False), nn.Parameter(torch.ones(192, dtype=BF16))
        base.blocks.register_forward_pre_hook(lambda module, inputs: inputs[0] * self.shift)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.base(tokens)


def codes_of(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of values over their scales, some of which are the largest there are."""
    limit = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    return (weight.float() / scale * limit).clamp(-limit, limit).to(dtype)


def spread(scales: Tensor, shape: tuple[int, int]) -> Tensor:
    return scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]


def published(tensors: dict[str, Tensor], how: dict[str, str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the files of a model whose weights `how` names are published in these ways; and the values that they
    have."""
    files, values = dict(tensors), dict(tensors)
    for name, way in how.items():
        weight = files.pop(name)
        if way == "blocks":
            rows, columns = weight.shape
            scales = torch.rand(-(-rows // 128), -(-columns // 128)) / 100 + 1e-3
            files[name] = codes_of(weight, 448 * spread(scales, weight.shape), E4M3)
            files[f"{name}_scale_inv"] = scales
            values[name] = files[name].float() * spread(scales, weight.shape)
        elif way in ("rows", "whole", "integers"):
            dtype = torch.int8 if way == "integers" else E4M3
            scales = (torch.rand(1 if way == "whole" else len(weight), 1) / 100 + 1e-3).to(BF16)
            files[name] = codes_of(weight, 448 * scales.float(), dtype)
            files[f"{name}_scale"] = scales.view(()) if way == "whole" else scales
            if way == "rows":
                files[f"{name.removesuffix('weight')}input_scale"] = torch.ones(1)
            values[name] = files[name].float() * scales.float()
        else:
            *matrices, rows, columns = weight.mT.shape if way == "_blocks" else weight.shape
            files[f"{name}{way}"] = torch.randint(256, (*matrices, rows, columns // 32, 16), dtype=torch.uint8)
            scale_name = f"{name}{way[0]}scales"
            files[scale_name] = torch.randint(115, 122, (*matrices, rows, columns // 32), dtype=torch.uint8)
            pairs = torch.stack([files[f"{name}{way}"] & 15, files[f"{name}{way}"] >> 4], -1).flatten(-2)
            value = E2M1[pairs.long()] * (files[scale_name].float() - 127).exp2().unsqueeze(-1)
            value = value.flatten(-2)
            values[name] = value.mT.contiguous() if way == "_blocks" else value
    return files, {name: value.to(tensors[name].dtype) for name, value in values.items()}


HOW = {
    "blocks.weight": "blocks",
    "rows.weight": "rows",
    "whole.weight": "whole",
    "integers.weight": "integers",
    "experts": "_blocks",
    "others": ".blocks",
}
FORMAT_OF = {"blocks": "fp8_block", "rows": "fp8", "whole": "fp8", "integers": "int8"}


def written(tmp_path: Path, change: Callable[[dict[str, Tensor]], None] = lambda files: None) -> dict[str, Tensor]:
    """Write such a file as a model, with a change; the values."""
    torch.manual_seed(0)
    files, values = published(Model().to(BF16).state_dict(), HOW)
    change(files)
    (tmp_path / "store").mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in files.items()}, tmp_path / "model.safetensors")
    return values


def attached(tmp_path: Path, **options: object) -> nn.Module:
    with torch.device("meta"):
        model = Model().to(BF16)
    return zinf_fx.attach_base(model, tmp_path, store=tmp_path / "store", **options)


def loaded(tmp_path: Path, **options: object) -> nn.Module:
    with zinf_fx.offloading(store=tmp_path / "store", **{"placement": "nvme", **options}):
        model = Model().to(BF16).requires_grad_(False)
    zinf_fx.load_safetensors(model, tmp_path)
    return model


def trained(model: nn.Module, backend: str) -> list[Tensor]:
    optimizer = torch.optim.SGD([model.shift], lr=0.5)
    run, losses = torch.compile(model, backend=backend), []
    for tokens in torch.arange(10).view(2, 5):
        losses.append(run(tokens))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*(loss.detach() for loss in losses), model.shift.detach()]


@pytest.mark.parametrize("made", [attached, slow(loaded)])
def test_training_over_published_weights_equals_training_over_their_values(tmp_path: Path, made):
    values = written(tmp_path)
    model = made(tmp_path)
    for name, parameter in model.named_parameters():
        format_name = None if name not in HOW else FORMAT_OF.get(HOW[name], "mxfp4")
        assert isinstance(parameter, StoredTensor) and parameter.dtype == BF16
        assert (parameter.quantised and parameter.quantised.format) == format_name
        assert torch.equal(parameter.full_tensor(), values[name])
    plain = Model().to(BF16)
    plain.load_state_dict(values)
    mine, theirs = trained(Shifted(model), "zinf"), trained(Shifted(plain), "aot_eager")
    assert all(map(torch.equal, mine, theirs)) and not torch.equal(mine[0], mine[1])


def test_tiles_of_rows_are_dequantised_by_themselves(tmp_path: Path):
    values = written(tmp_path)
    model, plain = attached(tmp_path, pack=None, tile="16KiB"), Model().to(BF16)
    plain.load_state_dict(values)
    explained = str(zinf_fx.explain(model, torch.arange(5)))
    assert all(text in explained for text in ("blocks.weight[0:67]", "experts[0:1]", "dequantize, matmul"))
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="zinf")(torch.arange(5)), plain(torch.arange(5)))


def test_what_is_stored_are_the_packed_bytes(tmp_path: Path):
    written(tmp_path)
    model = Shifted(attached(tmp_path))
    for name, parameter in model.base.named_parameters():
        if name in HOW:
            shape = parameter.mT.shape if HOW[name] == "_blocks" else parameter.shape
            nbytes = quantised_shape(shape, parameter.quantised.format)
            assert parameter.stored.numel == nbytes[0] * nbytes[1] and parameter.stored.dtype == torch.uint8
    assert model.base.experts.stored.numel == 2 * 128 * (192 // 2 + 192 // 32)  # as the files have it
    assert model.base.blocks.weight.stored.numel == 200 * (192 + 2 * 4)


def test_what_is_trained_or_asked_for_in_another_format_takes_the_values(tmp_path: Path):
    values = written(tmp_path)
    model = zinf_fx.offload(Model().to(BF16), store=tmp_path / "store", placement="nvme")
    zinf_fx.load_safetensors(model, tmp_path)
    assert all(parameter.quantised is None for parameter in model.parameters())
    assert all(torch.equal(parameter.full_tensor(), values[name]) for name, parameter in model.named_parameters())
    plain = Model().to(BF16)
    zinf_fx.load_safetensors(plain, tmp_path)
    assert all(torch.equal(parameter, values[name]) for name, parameter in plain.named_parameters())
    rounded = loaded(tmp_path, frozen_dtype="int8")
    assert rounded.blocks.weight.quantised.format == "int8"
    step = values["blocks.weight"].float().abs().amax(1, keepdim=True) / 127
    assert ((rounded.blocks.weight.full_tensor() - values["blocks.weight"]).abs() <= step).all()
    # What was asked for as int8 is published so: its codes are kept.
    assert torch.equal(rounded.integers.weight.full_tensor(), values["integers.weight"])


def test_a_checkpoint_of_published_weights_is_a_base(tmp_path: Path):
    values = written(tmp_path)
    base = loaded(tmp_path)
    zinf_fx.save_checkpoint(tmp_path / "base", base)
    with torch.device("meta"):
        model = Model().to(BF16)
    zinf_fx.attach_base(model, tmp_path / "base", store=tmp_path / "store")
    assert all(parameter.stored.bytes.allocation.is_read_only for parameter in model.parameters())
    assert all(torch.equal(parameter.full_tensor(), values[name]) for name, parameter in model.named_parameters())
    assert copy.deepcopy(base).experts.quantised == model.experts.quantised
    with torch.no_grad():
        base.experts.zero_()
    zinf_fx.load_checkpoint(tmp_path / "base", base)
    assert torch.equal(base.experts.full_tensor(), values["experts"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("piece", [convert.PIECE, 10_000])
def test_a_checkpoint_is_converted_to_the_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int):
    values = written(tmp_path)
    zinf_fx.save_checkpoint(tmp_path / "saved", loaded(tmp_path))
    monkeypatch.setattr(convert, "PIECE", piece)
    assert main(["checkpoint", "convert", str(tmp_path / "saved"), "-o", str(tmp_path / "weights")]) == 0
    read = load_file(tmp_path / "weights" / "model.safetensors")
    to_dcp = ["-o", str(tmp_path / "dcp"), "--format", "dcp"]
    assert main(["checkpoint", "convert", str(tmp_path / "saved"), *to_dcp]) == 0
    states = {"model": {name: torch.zeros_like(value) for name, value in values.items()}}
    dcp.load(states, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for tensors in (read, states["model"]):
        assert tensors.keys() == values.keys()
        assert all(tensors[name].dtype == BF16 and torch.equal(tensors[name], values[name]) for name in values)


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_a_checkpoint_without_the_shapes_of_the_values_is_not_converted(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
):
    written(tmp_path)
    saved = tmp_path / "saved"
    zinf_fx.save_checkpoint(saved, loaded(tmp_path))
    manifest = manifest_of(saved)
    del manifest.values["model"]["quantised_shapes"]
    (saved / "manifest.json").write_bytes(to_text(manifest))
    zinf_fx.load_checkpoint(saved, loaded(tmp_path))
    assert main(["checkpoint", "convert", str(saved), "-o", str(tmp_path / "to"), "--format", form]) == 2
    assert "'model/experts' is quantised as mxfp4, and its shape is not in the manifest" in capsys.readouterr().err
    assert not (tmp_path / "to").exists()


def test_a_base_does_not_change_and_checkpoints_are_without_it(tmp_path: Path):
    values = written(tmp_path)
    model = Shifted(attached(tmp_path))
    assert all(parameter.stored.bytes.allocation.is_read_only for parameter in model.base.parameters())
    with pytest.raises(StoreError, match="a tensor of a base can't change"), torch.no_grad():
        model.base.experts.zero_()
    assert torch.equal(model.base.experts.full_tensor(), values["experts"])
    with pytest.raises(StoredTensorError, match="can't be trained"):
        model.base.requires_grad_()
    zinf_fx.save_checkpoint(tmp_path / "adapter", model)
    assert sum(path.stat().st_size for path in (tmp_path / "adapter").rglob("*") if path.is_file()) < 64 << 10
    with torch.no_grad():
        model.shift.zero_()
    zinf_fx.load_checkpoint(tmp_path / "adapter", model)
    assert model.shift.min() == 1


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda files: files.pop(name)


def replaced(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda files: files.update({name: value})


REFUSED = {
    "no scales": (without("blocks.weight_scale_inv"), r"'blocks.weight' is .*no 'blocks.weight_scale_inv' or"),
    "too few scales": (
        replaced("blocks.weight_scale_inv", torch.ones(2, 1, 2)),
        r"'blocks.weight_scale_inv' is float32\[2, 1, 2\], which doesn't fit 'blocks.weight', float8_e4m3fn\[200,",
    ),
    "other blocks": (replaced("blocks.weight_scale_inv", torch.ones(4, 3)), "or a block of 128 x 128 are read"),
    "scales of columns": (replaced("integers.weight_scale", torch.ones(1, 192)), "a matrix or a row are read"),
    "scales of another dtype": (
        replaced("rows.weight_scale", torch.ones(192, 1).byte()),
        "scales of float32, bfloat16",
    ),
    "zero points": (replaced("integers.weight_zero_point", torch.ones(192, 1).byte()), "without zero points"),
    "no exponents": (without("experts_scales"), "no 'experts_scales' beside it"),
    "too few exponents": (replaced("others.scales", torch.ones(2, 128, 5).byte()), "one byte per block"),
    "blocks of 16": (replaced("experts_blocks", torch.ones(2, 128, 12, 8).byte()), "blocks of MXFP4 are uint8"),
    "another shape": (
        lambda files: files.update({n: t[:1].clone() for n, t in files.items() if n.startswith("experts")}),
        r"'experts' is mxfp4\[1, 192, 128\]",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_codes_and_scales_that_do_not_fit_are_refused_by_name(tmp_path: Path, what):
    change, message = REFUSED[what]
    written(tmp_path, change)
    with torch.device("meta"):
        model = Model().to(BF16)
    with pytest.raises(CheckpointError, match=message):
        zinf_fx.attach_base(model, tmp_path, store=tmp_path / "store")
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_a_refused_file_leaves_a_stored_model_as_it_was(tmp_path: Path):
    written(tmp_path, without("experts_scales"))
    model = zinf_fx.offload(Model().to(BF16).requires_grad_(False), store=tmp_path / "store", placement="nvme")
    before = [parameter.full_tensor() for parameter in model.parameters()]
    with pytest.raises(CheckpointError, match="no 'experts_scales' beside it"):
        zinf_fx.load_safetensors(model, tmp_path)
    assert all(parameter.quantised is None for parameter in model.parameters())
    assert all(map(torch.equal, before, (parameter.full_tensor() for parameter in model.parameters())))


def test_a_base_in_another_format_than_asked_for_is_refused(tmp_path: Path):
    written(tmp_path)
    with pytest.raises(ConfigError, match="which is fp8, fp8_block, int8, mxfp4, and frozen_dtype is 'nf4'"):
        attached(tmp_path, frozen_dtype="nf4")


def test_values_without_any_scales_are_rounded_values(tmp_path: Path):
    """Some image models are published so: cast, and nothing else."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    save_file({"weight": layer.weight.detach().to(E4M3)}, tmp_path / "model.safetensors")
    other = nn.Linear(64, 64, bias=False)
    zinf_fx.load_safetensors(other, tmp_path)
    assert torch.equal(other.weight, layer.weight.to(E4M3).float())


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(2, 6, 128))


def of_experts(heights: tuple[int, int, int, int] = (3, 3, 3, 3)) -> dict[str, Tensor]:
    torch.manual_seed(0)
    names = [f"experts.{number}.{part}.weight" for number in range(2) for part in ("gate_proj", "up_proj")]
    tensors = {name: torch.randn(height, 128) for name, height in zip(names, heights, strict=True)}
    return published(tensors, dict.fromkeys(tensors, "rows"))[0]


EXPERTS_REFUSED = {
    "one is missing": (
        without("experts.1.up_proj.weight"),
        "consists of 4 weights, of which 'experts.1.up_proj.weight'",
    ),
    "one has no scales": (without("experts.1.up_proj.weight_scale"), "no 'experts.1.up_proj.weight_scale_inv' or"),
    "one has no codes": (
        replaced("experts.1.up_proj.weight", torch.ones(3, 128)),
        r"'experts.1.up_proj.weight' is float32\[3, 128\], and others of its experts are codes",
    ),
    "one is lower": (lambda files: files.update(of_experts((3, 3, 2, 4))), "of several formats or shapes"),
    "all are lower": (lambda files: files.update(of_experts((2, 2, 2, 2))), r"fp8\[2, 4, 128\]"),
}


@pytest.mark.parametrize("what", EXPERTS_REFUSED)
def test_experts_that_do_not_fit_are_refused_by_name(tmp_path: Path, what):
    change, message = EXPERTS_REFUSED[what]
    files = of_experts()
    change(files)
    save_file(files, tmp_path / "model.safetensors")
    model = Experts()
    before = model.experts.gate_up_proj.detach().clone()
    with pytest.raises(CheckpointError, match=message):
        zinf_fx.load_safetensors(model, tmp_path)
    assert torch.equal(model.experts.gate_up_proj, before)
