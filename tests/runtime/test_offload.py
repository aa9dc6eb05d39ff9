"""Parameters leave for their tier, of a model that exists or is being built; or the model stays as it was."""

from __future__ import annotations

import copy
import errno
import gc
import os
import re
import resource
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import forked
import pytest
import torch
from gate import slow
from injecting import Fault, clear_faults, inject
from torch import nn

import zinf_fx
from zinf_fx import Config, StoredTensor
from zinf_fx.errors import ConfigError, StoredTensorError, StoreError
from zinf_fx.runtime.tensor.tiers import Tiers


class Model(nn.Module):
    """Has tied weights, a parameter at the root, a frozen one, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.embedding = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[0].weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(tokens)) * self.scale
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x).square().mean()


TOKENS = torch.tensor([3, 1, 15, 1])


def trained() -> Model:
    torch.manual_seed(0)
    model = Model()
    model(TOKENS).backward()
    return model


def collect() -> None:
    """Collect twice: the finalizers of the first round hold the store until they have run."""
    gc.collect()
    gc.collect()


def check_equal(plain: nn.Module, model: nn.Module) -> None:
    for (name, p), (other, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert name == other and q.equal(p) and q.requires_grad == p.requires_grad, name
        assert (p.grad is None) == (q.grad is None) and (p.grad is None or q.grad.equal(p.grad)), name


# -- of a model that exists ------------------------------------------------------------------------------------------


def test_parameters_leave_in_place(tmp_path, tier: str):
    plain, model = trained(), trained()
    objects, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    optimizer = zinf_fx.optim.SGD(model.parameters(), lr=0.1)
    assert zinf_fx.offload(model, store=tmp_path, placement=tier) is model
    assert all(p is objects[name] and p.base.tier == tier for name, p in model.named_parameters())
    assert all(b is buffers[name] and type(b) is torch.Tensor for name, b in model.named_buffers())
    assert model.head.weight is model.embedding.weight
    check_equal(plain, model)
    assert all(isinstance(p.grad, StoredTensor) for p in model.parameters() if p.grad is not None)
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    check_equal(plain, model)


def test_what_is_stored_stays_and_what_is_new_follows(tmp_path):
    model = zinf_fx.offload(trained(), store=tmp_path, placement="nvme")
    keys = {name: p.stored.key for name, p in model.named_parameters()}
    model.extra = nn.Linear(8, 8)
    zinf_fx.offload(model, store=tmp_path, placement="nvme")
    assert all(isinstance(p, StoredTensor) for p in model.parameters())
    assert all(model.get_parameter(name).stored.key == key for name, key in keys.items())


LAYOUTS = {
    "channels last": (torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last), True),
    "transposed": (torch.ones(3, 4).t(), True),
    "one channel": (torch.ones(4, 1, 2, 2).to(memory_format=torch.channels_last), False),
    "expanded": (torch.ones(1, 4).expand(3, 4), False),
    "part of a larger one": (torch.ones(3, 4)[1:], False),
}


@pytest.mark.parametrize(("value", "differs"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_parameter_that_is_laid_out_anew_is_named_once(tmp_path, value: torch.Tensor, differs: bool):
    model = nn.ParameterDict({"first": torch.ones(2), "second": value, "third": value.clone()})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        zinf_fx.offload(model, store=tmp_path, placement="nvme")
        zinf_fx.offload(model)
    assert [re.search(r"2 parameter\(s\), such as 'second'", str(warning.message)) is not None for warning in seen] == (
        [True] if differs else []
    )
    assert model["second"].is_contiguous() and model["second"].equal(value)


@pytest.mark.parametrize("model", [nn.ReLU(), nn.BatchNorm1d(3, affine=False), nn.ParameterList()], ids=str)
def test_nothing_to_move(tmp_path, model: nn.Module):
    assert zinf_fx.offload(model, store=tmp_path, placement="nvme") is model
    assert not list(tmp_path.iterdir())


class Special(nn.Parameter):
    """Is not a plain nn.Parameter."""


def with_parameter(parameter: nn.Parameter) -> Callable[[Model], None]:
    return lambda model: setattr(model.layers[2], "weight", parameter)


def share_memory(model: Model) -> None:
    model.layers[2].weight = nn.Parameter(model.layers[1].weight.data)


def sparse_gradient(model: Model) -> None:
    model.layers[2].weight.grad = torch.eye(8).to_sparse()


UNSTORABLE = {
    "meta": (with_parameter(nn.Parameter(torch.ones(8, 8, device="meta"))), "'layers.2.weight' is on the meta device"),
    "sparse": (with_parameter(nn.Parameter(torch.eye(8).to_sparse())), "'layers.2.weight' has layout torch.sparse_coo"),
    "subclass": (with_parameter(Special(torch.ones(8, 8))), "'layers.2.weight' is a Special"),
    "lazy": (lambda m: m.layers.append(nn.LazyLinear(3)), "'layers.3.weight' is not initialised"),
    "shared memory": (share_memory, "'layers.1.weight' and 'layers.2.weight' are different parameters in the same"),
    "sparse gradient": (sparse_gradient, "'layers.2.weight' has a gradient of layout torch.sparse_coo"),
}


@pytest.mark.parametrize(("spoil", "message"), UNSTORABLE.values(), ids=UNSTORABLE)
def test_what_cannot_be_stored_is_refused_and_nothing_moves(tmp_path, spoil: Callable, message: str):
    model = trained()
    spoil(model)
    with pytest.raises(StoredTensorError, match=message):
        zinf_fx.offload(model, store=tmp_path, placement="nvme")
    assert not any(isinstance(p, StoredTensor) for p in model.parameters()) and not list(tmp_path.iterdir())


@contextmanager
def failing_writes(store: Path, **fault: object) -> Iterator[None]:
    tiers = Tiers.of(Config(store=store, placement="nvme"))
    inject(tiers.store, Fault("completion", operation="write", **fault))
    yield
    clear_faults(tiers.store)


@contextmanager
def small_files(store: Path) -> Iterator[None]:
    Tiers.of(Config(store=store)).store.close()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def no_room_in_memory(store: Path) -> Iterator[dict[str, object]]:
    yield {"placement": "host", "host_memory": 8192}


FAULTS = {
    "a full disk, at the first write": lambda store: failing_writes(store, errno=errno.ENOSPC),
    "a full disk, at a later write": lambda store: failing_writes(store, errno=errno.ENOSPC, nth=9),
    "a broken disk": lambda store: failing_writes(store, errno=errno.EIO, nth=4),
    "a limit on file sizes": small_files,
    "a full host arena": no_room_in_memory,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_store_that_fails_leaves_the_model_as_it_was(tmp_path, fault: Callable):
    plain, model = trained(), trained()
    objects = list(model.parameters())
    with ExitStack() as stack:
        fields = {"placement": "nvme", **(stack.enter_context(fault(tmp_path)) or {})}
        with pytest.raises(StoreError) as raised:
            zinf_fx.offload(model, store=tmp_path, **fields)
        assert raised.value.operation in ("write", "allocate") and "optimizer" not in str(raised.value)
    assert all(type(p) is nn.Parameter and p is q for p, q in zip(model.parameters(), objects, strict=True))
    for net in (plain, model):
        net(TOKENS).backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    check_equal(plain, model)
    del raised
    collect()
    assert not list(tmp_path.iterdir())
    zinf_fx.offload(model, store=tmp_path, placement="nvme")
    check_equal(plain, model)


def missing(path: Path) -> Path:
    return path / "missing"


def plain_file(path: Path) -> Path:
    (path / "file").write_text("mine")
    return path / "file"


def read_only(path: Path) -> Path:
    return Path("/proc/self")


@pytest.mark.parametrize("place", [missing, plain_file, read_only])
def test_a_store_directory_that_cannot_be_used_is_named(tmp_path, place: Callable[[Path], Path]):
    store, model = place(tmp_path), trained()
    with pytest.raises(StoreError, match=str(store)):
        zinf_fx.offload(model, store=store, placement="nvme")
    check_equal(trained(), model)
    assert not any(isinstance(p, StoredTensor) for p in model.parameters())
    reached = False
    with pytest.raises(StoreError, match=str(store)), zinf_fx.offloading(store=store, placement="nvme"):
        reached = True
    assert not reached, "the fault shows before anything is built"


@pytest.mark.parametrize("use", [zinf_fx.offloading, lambda **fields: zinf_fx.offload(trained(), **fields)])
def test_bad_options_are_refused(use: Callable):
    with pytest.raises(ConfigError, match="unknown option 'stroe'"), use(stroe="/tmp"):
        pass


def test_a_disk_slower_than_the_model_waits_for_room_in_memory(tmp_path):
    torch.manual_seed(0)
    plain = nn.ParameterList(torch.randn(100_000) for _ in range(20))
    model = copy.deepcopy(plain)
    zinf_fx.offload(model, store=tmp_path, placement="nvme", host_memory="1MiB")
    assert all(p.equal(q) for p, q in zip(model, plain, strict=True))
    assert model[0].stored.tiers.host.peak <= 1 << 20


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_plain_optimizer_made_before_steps_what_is_stored(tmp_path, kind: type[torch.optim.Optimizer]):
    plain, model = trained(), trained()
    optimizers = [kind(net.parameters(), lr=0.1) for net in (plain, model)]
    zinf_fx.offload(model, store=tmp_path, placement="nvme")
    for optimizer in optimizers:
        optimizer.step()
    check_equal(plain, model)


# -- of a model that is being built ----------------------------------------------------------------------------------


class RootParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("none", None)
        self.before = nn.Parameter(torch.randn(4))
        self.inner = nn.Linear(4, 4)
        self.after = nn.Parameter(torch.randn(4))
        self.after = nn.Parameter(torch.randn(5))  # replaced
        del self.before
        self.frozen = nn.Parameter(torch.arange(3), requires_grad=False)


class Applied(nn.Module):
    """Initialised from outside in, once everything stands, as GPTs are."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)
        self.by_name = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Sequential(nn.Linear(8, 8), nn.PReLU())})
        self.embedding = nn.Embedding(16, 8, padding_idx=0)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self.initialise)
        with torch.no_grad():
            self.embedding.weight[1:3].uniform_(-1, 1)
            self.head.weight.data[4].normal_()
        for p in self.blocks.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    @staticmethod
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.02)
        if isinstance(module, nn.Embedding):
            nn.init.trunc_normal_(module.weight)


def shared_submodule() -> nn.Module:
    linear = nn.Linear(4, 4)
    return nn.Sequential(linear, nn.ReLU(), linear)


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "one module": lambda: nn.Linear(4, 4),
    "sequence": lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))),
    "parameters at the root": RootParameters,
    "initialised by apply": Applied,
    "tied": Model,
    "shared submodule": shared_submodule,
    "LSTM": lambda: nn.Sequential(nn.LSTM(4, 4, 2)),
    "attention": lambda: nn.Sequential(nn.MultiheadAttention(8, 2)),
    "weight_norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
    "orthogonal": lambda: nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(torch.float64),
    "tied, and converted": lambda: Model().to(torch.bfloat16),
    "converted back": lambda: nn.Sequential(Model().half(), nn.Linear(4, 4)).float(),
    "one module, converted": lambda: nn.Linear(4, 4).double(),
    "loaded": lambda: (
        (m := nn.Sequential(nn.Linear(4, 4))).load_state_dict(nn.Sequential(nn.Linear(4, 4)).state_dict()) and m
    ),
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_construction_equals_plain_construction(tmp_path, tier: str, build: Callable[[], nn.Module]):
    torch.manual_seed(0)
    plain, after = build(), torch.rand(3)
    torch.manual_seed(0)
    with zinf_fx.offloading(store=tmp_path, placement=tier):
        model = build()
    assert torch.rand(3).equal(after), "the generator is in another state"
    assert all(isinstance(p, StoredTensor) and p.base.tier == tier for p in model.parameters())
    check_equal(plain, model)
    same = [[p is q for q in m.parameters()] for m in (plain, model) for p in m.parameters(recurse=True)]
    assert same[: len(same) // 2] == same[len(same) // 2 :]
    assert all(type(b) is torch.Tensor and b.equal(a) for a, b in zip(plain.buffers(), model.buffers(), strict=True))


def test_what_has_no_values_yet_stays_as_it_is(tmp_path):
    with zinf_fx.offloading(store=tmp_path, placement="nvme"):
        model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4, device="meta"), nn.Linear(4, 4))
    kinds = [isinstance(p, StoredTensor) for p in model.parameters()]
    assert kinds == [False] * 4 + [True] * 2
    assert model[0](torch.ones(2, 3)).shape == (2, 4)
    zinf_fx.offload(model[0], store=tmp_path, placement="nvme")
    assert isinstance(model[0].weight, StoredTensor)


def test_few_parameters_are_in_memory_while_a_model_is_built(tmp_path):
    alive: list[weakref.ref[nn.Parameter]] = []
    most = 0

    class Layer(nn.Linear):
        def register_parameter(self, name: str, parameter: nn.Parameter | None) -> None:
            nonlocal most
            super().register_parameter(name, parameter)
            alive.append(weakref.ref(parameter))
            most = max(most, sum(not isinstance(ref(), StoredTensor | None) for ref in alive))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Layer(8, 8), Layer(8, 8)
            Layer(8, 8)  # thrown away

    with zinf_fx.offloading(store=tmp_path, placement="nvme"):
        model = nn.Sequential(*[Block() for _ in range(10)], *[Layer(8, 8) for _ in range(10)])
    assert len(list(model.parameters())) == 60 and most <= 2


MEASURED = """
import sys, torch, zinf_fx
use, store, placement = sys.argv[1:]
def memory(name): return int(next(l for l in open("/proc/self/status") if l.startswith(name)).split()[1]) << 10
def peak_begins_now(): open("/proc/self/clear_refs", "w").write("5")
def build(): return torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(24)])
torch.nn.Linear(8, 8)
fields = dict(store=store, placement=placement, host_memory="600MiB" if placement == "host" else "64MiB")
if use == "offload":
    model = build()
before = memory("VmRSS")
peak_begins_now()
if use == "offload":
    zinf_fx.offload(model, **fields)
else:
    with zinf_fx.offloading(**fields):
        model = build()
        if use == "initialised again":
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.02)
print(memory("VmHWM") - before, memory("VmRSS") - before)
"""
MODEL_BYTES = 24 * 2048 * 2049 * 4

# Bounds of the peak and of what is left, both less what was there before, in models.
MEMORY = {
    "construction": ("offloading", "nvme", (0, 0.35), (0, 0.25)),
    "initialised again": ("initialised again", "nvme", (0, 0.35), (0, 0.25)),
    "construction in host memory": ("offloading", "host", (0.95, 1.35), (0.95, 1.25)),
    "to the disk": ("offload", "nvme", (0, 0.25), (-1, -0.75)),
    "to host memory": ("offload", "host", (0, 0.35), (-0.1, 0.25)),
}


@pytest.mark.parametrize(
    ("use", "placement", "peak", "left"),
    [case if name == "construction" else slow(*case) for name, case in MEMORY.items()],
    ids=MEMORY,
)
def test_a_model_is_in_memory_once_at_most(
    tmp_path, use: str, placement: str, peak: tuple[float, float], left: tuple[float, float]
):
    done = forked.run(MEASURED, use, tmp_path, placement)
    for measured, (least, most) in zip(done.stdout.split(), (peak, left), strict=True):
        assert least <= int(measured) / MODEL_BYTES <= most


def test_an_error_in_the_block_ends_the_offloading(tmp_path):
    with pytest.raises(ZeroDivisionError), zinf_fx.offloading(store=tmp_path, placement="nvme"):
        nn.Sequential(nn.Linear(4, 4))
        raise ZeroDivisionError
    assert not any(isinstance(p, StoredTensor) for p in nn.Sequential(nn.Linear(4, 4)).parameters())
    collect()
    assert not list(tmp_path.iterdir())


def test_an_unstorable_parameter_is_named_where_it_is_built(tmp_path):
    with (
        pytest.raises(StoredTensorError, match=r"a parameter of shape \(8, 8\) is a Special"),
        zinf_fx.offloading(store=tmp_path, placement="nvme"),
    ):
        layer = nn.Linear(8, 8)
        layer.weight = Special(torch.ones(8, 8))
        nn.Sequential(layer)


# -- the end of a model ----------------------------------------------------------------------------------------------


def train_eagerly(model: nn.Module) -> None:
    optimizer = zinf_fx.optim.AdamW(model.parameters())
    for _ in range(2):
        model(TOKENS).backward()
        optimizer.step()


def train_compiled(model: nn.Module) -> None:
    train_eagerly(torch.compile(model, backend="zinf"))


def copy_and_convert(model: nn.Module) -> None:
    copy.deepcopy(model).to(torch.bfloat16).state_dict()


@pytest.mark.parametrize("use", [train_eagerly, train_compiled, copy_and_convert])
def test_a_model_that_dies_leaves_nothing_behind(tmp_path, use: Callable[[nn.Module], None]):
    other = zinf_fx.offload(nn.Linear(8, 8), store=tmp_path, placement="nvme")
    tiers = other.weight.stored.tiers
    tiers.drain()
    before = tiers.store.in_use, tiers.host.in_use
    model = zinf_fx.offload(Model(), store=tmp_path, placement="nvme")
    use(model)
    assert tiers.store.in_use > before[0]
    del model
    collect()
    tiers.drain()
    assert tiers.store.in_use == before[0]
    del other, tiers
    collect()
    assert not list(tmp_path.iterdir())


def test_an_allocation_that_collects_a_dead_model_does_not_block(tmp_path):
    """A finalizer may run in the middle of an allocation, in the thread that holds its lock."""
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for placement in ("nvme", "host"):
            keep = zinf_fx.offload(nn.Linear(4, 4), store=tmp_path, placement=placement)
            for _ in range(20):
                dead = nn.Module()
                dead.cycle = [dead]
                dead.p = nn.Parameter(torch.ones(3))
                zinf_fx.offload(dead, store=tmp_path, placement=placement)
            assert keep.weight.numel() == 16
    finally:
        gc.set_threshold(*thresholds)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_directory(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="not writable"):
        zinf_fx.offload(trained(), store=tmp_path, placement="nvme")


def test_space_for_gradients_is_reserved_before_the_first_step(tmp_path):
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256, bias=False) for _ in range(4)])
    model[0].requires_grad_(False)
    parameters = sum(p.nbytes for p in model.parameters())
    zinf_fx.offload(model, store=tmp_path, placement="nvme")
    store = model[0].weight.stored.tiers.store
    reserved = store.in_use
    assert reserved == parameters + parameters * 3 // 4
    for _ in range(2):
        model(torch.randn(2, 256)).sum().backward()
        assert store.in_use == reserved
        model.zero_grad()


CONTRADICTIONS = {
    "placement": ({"placement": "host"}, {"placement": "device"}, "placement=.* parameter 'weight' was offloaded with"),
    "config": ({"placement": "host"}, {"config": zinf_fx.Config(placement="device")}, "placement="),
    "another option": ({"placement": "host"}, {"prefetch": None}, "prefetch=None"),
}


@pytest.mark.parametrize(("first", "second", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_another_offload_with_other_options_is_refused(first, second, message):
    model = zinf_fx.offload(torch.nn.Linear(4, 4), **first)
    with pytest.raises(ConfigError, match=message):
        zinf_fx.offload(model, **second)
    assert model.weight.base.tier == "host"


def test_another_offload_with_the_same_options_moves_what_is_new():
    model = torch.nn.Sequential(zinf_fx.offload(torch.nn.Linear(4, 4), placement="host"))
    model.append(torch.nn.Linear(4, 4))
    stored = model[0].weight.stored
    for options in ({"placement": "host"}, {}):
        zinf_fx.offload(model, **options)
        assert model[0].weight.stored is stored and model[1].weight.base.tier == "host"
