"""A base that is read in place: by several models and processes at once, and changed by none."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from forked import Running
from gate import slow
from test_frozen_formats import Model, built, in_memory, trained
from torch import nn

import zinf_fx
from zinf_fx.errors import CheckpointError, ConfigError, StoredTensorError, StoreError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def meta() -> Model:
    with torch.device("meta"):
        return Model()


def saved(tmp_path: Path, how: str) -> Path:
    """Save a base in a directory: quantised in a checkpoint, or as safetensors files."""
    store = tmp_path / "store"
    store.mkdir()
    options = {"nf4": {"frozen_dtype": "nf4"}, "as it is": {}, "safetensors": {}}[how]
    model = zinf_fx.offload(built().requires_grad_(False), store=store, placement="nvme", **options)
    if how == "safetensors":
        zinf_fx.export_safetensors(model, tmp_path / "base")
    else:
        zinf_fx.save_checkpoint(tmp_path / "base", model)
    return tmp_path / "base"


def content(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


class WithHead(nn.Module):
    """A base, and something to train beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.shift = nn.Parameter(torch.zeros(16, 64))
        base.table.register_forward_hook(lambda module, inputs, result: result + self.shift[inputs[0]])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.base(tokens)


@pytest.mark.parametrize("how", ["nf4", slow("safetensors"), slow("as it is")])
def test_two_models_over_one_base_train_as_over_its_values(tmp_path: Path, how):
    base = saved(tmp_path, how)
    before = content(base)
    models = [WithHead(zinf_fx.attach_base(meta(), base, store=tmp_path / "store")) for _ in range(2)]
    plain = WithHead(in_memory(built(), models[0].base).requires_grad_(False))
    outcomes = []
    for model in (plain, *models):
        run = torch.compile(model, backend="aot_eager" if model is plain else "zinf")
        losses = trained(model, run, torch.optim.AdamW([model.shift], lr=0.1, fused=True))
        outcomes.append([*losses, model.shift.detach()])
        torch._dynamo.reset()
    for mine in outcomes[1:]:
        assert all(map(torch.equal, mine, outcomes[0]))
    stats = zinf_fx.stats(models[0])
    assert stats.bytes_read > 0 and stats.bytes_written == 0
    assert content(base) == before


def test_a_base_does_not_change(tmp_path: Path):
    base = saved(tmp_path, "nf4")
    before = content(base)
    model = zinf_fx.attach_base(meta(), base, store=tmp_path / "store")
    weight = model.head.weight
    value = weight.full_tensor()
    refusal = "read in place from a base, which other jobs may share, can't change"
    with pytest.raises(StoreError, match=refusal), torch.no_grad():
        weight.add_(1.0)
    assert torch.equal(weight.full_tensor(), value)
    assert content(base) == before
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("how", ["nf4", "as it is"])
def test_a_model_takes_its_own_state_dict(tmp_path: Path, how):
    """Nothing of a base is written then, and what is quantised is not rounded again."""
    model = zinf_fx.attach_base(meta(), saved(tmp_path, how), store=tmp_path / "store")
    own = copy.deepcopy(model)
    for net in (model, own):
        before = [parameter.stored.value().clone() for parameter in net.parameters()]
        net.load_state_dict(net.state_dict())
        assert all(map(torch.equal, before, (parameter.stored.value() for parameter in net.parameters())))


def test_what_is_saved_beside_a_base_is_what_was_trained(tmp_path: Path):
    base = saved(tmp_path, "nf4")

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = WithHead(zinf_fx.attach_base(meta(), base, store=tmp_path / "store"))
        return model, zinf_fx.optim.AdamW([model.shift], lr=0.1)

    model, optimizer = made()
    trained(model, torch.compile(model, backend="zinf"), optimizer)
    zinf_fx.save_checkpoint(tmp_path / "adapter", model, optimizer)
    assert sum(path.stat().st_size for path in (tmp_path / "adapter").rglob("*") if path.is_file()) < 1 << 20
    again, its_optimizer = made()
    zinf_fx.load_checkpoint(tmp_path / "adapter", again, its_optimizer)
    assert torch.equal(again.shift, model.shift)


JOB = """
import sys, time, torch
from pathlib import Path
import zinf_fx
from test_base import WithHead, meta, trained
rate, base, store, both_attached = sys.argv[1:]
model = WithHead(zinf_fx.attach_base(meta(), base, store=store))
print("attached", flush=True)
while not Path(both_attached).exists():
    time.sleep(0.01)
losses = trained(model, torch.compile(model, backend="zinf"), torch.optim.AdamW([model.shift], lr=float(rate)))
print([loss.item() for loss in losses])
"""


def test_two_processes_train_over_one_base(tmp_path: Path):
    base = saved(tmp_path, "nf4")
    before = content(base)
    both_attached = tmp_path / "both attached"
    jobs = [Running(JOB, rate, base, tmp_path / "store", both_attached) for rate in (0.1, 0.2)]
    for job in jobs:
        assert job.stdout.readline() == "attached\n"
    both_attached.touch()
    ends = [job.end() for job in jobs]
    assert [end.returncode for end in ends] == [0, 0], ends
    outcomes = [end.stdout for end in ends]
    first, second = ([float(number) for number in outcome.strip("[]\n").split(",")] for outcome in outcomes)
    assert first[0] == second[0] and first[1:] != second[1:]
    assert content(base) == before


REFUSED = {
    "another model": (lambda: nn.Linear(3, 3), {}, CheckpointError, r"lacks 'weight'; it lacks 'bias'"),
    "another dtype": (lambda: meta().to(torch.bfloat16), {}, CheckpointError, r"is float32\[.*and bfloat16\["),
    "another tier": (meta, {"placement": "host"}, ConfigError, "placement has them on 'host'"),
    "another format": (meta, {"frozen_dtype": "int8"}, ConfigError, "which is nf4, and frozen_dtype is 'int8'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(tmp_path: Path, what):
    make, options, kind, message = REFUSED[what]
    base, model = saved(tmp_path, "nf4"), make()
    with pytest.raises(kind, match=message):
        zinf_fx.attach_base(model, base, store=tmp_path / "store", **options)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


class Buffered(nn.Module):
    """One buffer with two names."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("one", torch.arange(float(size)))
        self.register_buffer("other", self.one)


def test_buffers_without_values_take_those_of_the_base(tmp_path: Path):
    (tmp_path / "store").mkdir()
    zinf_fx.save_checkpoint(tmp_path / "base", zinf_fx.offload(Buffered(), store=tmp_path / "store"))
    with torch.device("meta"):
        model, longer = Buffered(), Buffered(5)
    zinf_fx.attach_base(model, tmp_path / "base", store=tmp_path / "store")
    assert model.one is model.other and torch.equal(model.one, torch.arange(4.0))
    with pytest.raises(CheckpointError, match=r"'one' is float32\[4\], and float32\[5\] in the model"):
        zinf_fx.attach_base(longer, tmp_path / "base", store=tmp_path / "store")
    assert longer.one.is_meta


class Routed(nn.Module):
    """Has persistent buffers of many kinds, and others."""

    def __init__(self, bias: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("bias", torch.full((4,), bias))
        self.register_buffer("scalar", torch.tensor(bias, dtype=torch.float64))
        self.register_buffer("flags", torch.full((3,), bool(bias)))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("expanded", torch.tensor([bias]).expand(5))
        self.register_buffer("transposed", (torch.arange(6.0) * bias).view(2, 3).T)
        self.register_buffer("bytes", torch.full((4,), int(bias), dtype=torch.uint8))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.register_buffer("nothing", None)
        self.inner = nn.Module()
        self.inner.register_buffer("shared", self.bias)
        self.inner.seen = self.bias[:2]  # a view, which sees what the buffer becomes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) + self.bias


def routed() -> Routed:
    """Return a model with values that training left."""
    model = Routed(3.0)
    with torch.no_grad():
        model.linear.weight.fill_(0.25)
    for _ in range(3):
        model(torch.randn(5, 8))
    return model.eval()


def beginning(how: str) -> Routed:
    if how == "all on the meta device":
        with torch.device("meta"):
            model = Routed()
        model.passing = torch.ones(2)
        return model
    with torch.inference_mode(how == "in inference mode"):
        model = Routed()
    if how == "parameters on the meta device":  # as accelerate.init_empty_weights(include_buffers=False) makes it
        for name, own in list(model.named_parameters()):
            module, _, name = name.rpartition(".")
            setattr(model.get_submodule(module), name, nn.Parameter(own.to("meta")))
    if how == "compiled in parts":
        model.linear = torch.compile(model.linear, backend="zinf")
    return model


def base_of(model: nn.Module, tmp_path: Path, how: str) -> Path:
    (tmp_path / "store").mkdir(exist_ok=True)
    save = (
        zinf_fx.export_safetensors if how == "safetensors" else lambda model, path: zinf_fx.save_checkpoint(path, model)
    )
    save(model, tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("files", ["safetensors", "a checkpoint"])
@pytest.mark.parametrize(
    "how",
    ["in memory", "parameters on the meta device", "all on the meta device", "in inference mode", "compiled in parts"],
)
def test_persistent_buffers_are_those_of_the_files(tmp_path: Path, how: str, files: str):
    source = routed()
    base = base_of(source, tmp_path, files)
    model = beginning(how).eval()
    objects = dict(model.named_buffers(remove_duplicate=False))
    zinf_fx.attach_base(model, base, store=tmp_path / "store")
    for name, value in source.named_buffers(remove_duplicate=False):
        own = model.get_buffer(name)
        assert own.dtype == value.dtype and torch.equal(own, value), name
        assert own is objects[name] or how == "all on the meta device" or name == "expanded"
    assert model.inner.shared is model.bias
    if how != "all on the meta device":
        assert torch.equal(model.inner.seen, source.bias[:2])
    x = torch.randn(2, 8)
    if how != "in inference mode":
        assert torch.equal(model(x), source(x))


LEFT = {
    "a missing buffer": (lambda state: state.pop("norm.running_var"), r"it lacks 'norm\.running_var', a buffer"),
    "all names of one": (lambda state: (state.pop("bias"), state.pop("inner.shared", None)), r"it lacks 'bias', a buf"),
    "another shape": (lambda state: state.update(flags=torch.ones(4) > 0), r"'flags' is bool\[4\], and bool\[3\] in"),
    "another dtype": (
        lambda state: state.update(scalar=torch.tensor(1.0)),
        r"'scalar' is float32\[\], and float64\[\]",
    ),
}


@pytest.mark.parametrize("what", LEFT)
@pytest.mark.parametrize("how", ["in memory", "all on the meta device"])
def test_buffers_that_the_files_lack_are_refused(tmp_path: Path, what: str, how: str):
    change, message = LEFT[what]
    state = {name: value.clone() for name, value in routed().state_dict().items()}
    change(state)
    safetensors.torch.save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "model.safetensors"
    )
    model = beginning(how)
    before = {name: (buffer, None if buffer.is_meta else buffer.clone()) for name, buffer in model.named_buffers()}
    with pytest.raises(CheckpointError, match=message):
        zinf_fx.attach_base(model, tmp_path, store=tmp_path)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    for name, (buffer, value) in before.items():
        assert model.get_buffer(name) is buffer and (value is None or torch.equal(buffer, value))


def test_one_name_of_a_shared_buffer_is_enough(tmp_path: Path):
    state = {name: value.contiguous().clone() for name, value in routed().state_dict().items() if name != "bias"}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    model = zinf_fx.attach_base(beginning("in memory"), tmp_path, store=tmp_path)
    assert model.bias is model.inner.shared and model.bias.tolist() == [3.0] * 4


def test_what_is_not_persistent_is_left_alone(tmp_path: Path):
    """It is also where the files have it, as older ones do; on the meta device, it comes from there, or is refused."""
    state = {name: value.contiguous().clone() for name, value in routed().state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    model = beginning("in memory")
    model.passing = model.passing.to("meta")
    with pytest.raises(CheckpointError, match=r"lacks 'passing', a buffer without a value: accelerate"):
        zinf_fx.attach_base(model, tmp_path, store=tmp_path)
    safetensors.torch.save_file(state | {"passing": torch.full((2,), 7.0)}, tmp_path / "model.safetensors")
    zinf_fx.attach_base(model, tmp_path, store=tmp_path)
    assert model.passing.tolist() == [7.0, 7.0]
    other = zinf_fx.attach_base(beginning("in memory"), tmp_path, store=tmp_path)
    assert other.passing.tolist() == [1.0, 1.0]


def test_what_is_attached_while_only_inference_is_meant_can_be_trained_over(tmp_path: Path):
    base = saved(tmp_path, "nf4")
    with torch.inference_mode():
        model = zinf_fx.attach_base(meta(), base, store=tmp_path / "store")
    assert not any(parameter.is_inference() for parameter in model.parameters())
    model = WithHead(model)
    losses = trained(model, torch.compile(model, backend="zinf"), torch.optim.AdamW([model.shift], lr=0.1), steps=2)
    assert losses[0] != losses[1]


def test_files_that_are_gone_or_cut_are_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="has no weights"):
        zinf_fx.attach_base(meta(), tmp_path, store=tmp_path)
    base = saved(tmp_path, "nf4")
    data = max((path for path in base.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    with data.open("r+b") as file:
        file.truncate(data.stat().st_size - 4096)
    with pytest.raises(CheckpointError, match="is damaged"):
        zinf_fx.attach_base(meta(), base, store=tmp_path / "store")


def test_a_base_is_not_trained(tmp_path: Path):
    model = zinf_fx.attach_base(meta(), saved(tmp_path, "as it is"), store=tmp_path / "store")
    with pytest.raises(StoredTensorError, match=r"read in place from a base, which can't be trained: train adapters"):
        model.requires_grad_()


def test_a_base_stays_when_the_training_removes_its_checkpoint(tmp_path: Path):
    """Whose pages it would write again, in the same file."""
    for name in ("training", "reading"):
        (tmp_path / name).mkdir()
    model = zinf_fx.offload(nn.Linear(64, 64, bias=False), store=tmp_path / "training", placement="nvme", pack=None)
    store = model.weight.stored.tiers.store

    def save(value: float) -> None:
        with torch.no_grad():
            model.weight.fill_(value)
        zinf_fx.save_checkpoint(tmp_path / "saved", model)

    save(1.0)
    base = nn.Linear(64, 64, bias=False).requires_grad_(False)
    zinf_fx.attach_base(base, tmp_path / "saved", store=tmp_path / "reading", placement="nvme")
    for value in (2.0, 3.0, 4.0):
        save(value)
    assert base.weight.full_tensor().unique().tolist() == [1.0]
    before = store.in_use
    del base
    save(5.0)
    assert store.in_use < before
