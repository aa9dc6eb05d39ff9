"""Adapters over a frozen base in a quantised format train as over the same values in memory, on any number of ranks."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from pathlib import Path

import pytest
import torch
from followed import followed_plans
from gate import slow
from ranks.launching import on_ranks
from ranks.training import data_parallel
from torch import Tensor, nn

import zinf_fx
from zinf_fx import StoredTensor
from zinf_fx.errors import CheckpointError, ConfigError, StoredTensorError
from zinf_fx.frontend.explain import plan_model
from zinf_fx.plan.memory.accounting import bytes_read, phases
from zinf_fx.quantisation import quantised
from zinf_fx.runtime.execute import workspace
from zinf_fx.sizes import blocks

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WIDTH = 64


class Adapted(nn.Module):
    """Has a frozen linear layer with a low-rank adapter beside it (LoRA)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(Adapted(WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 16, bias=False).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def base_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p for n, p in model.named_parameters() if not p.requires_grad and p.dim() == 2 and "table" not in n}


def built(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def in_memory(model: nn.Module, stored: nn.Module) -> nn.Module:
    """`model` with the values that `stored` has."""
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), stored.parameters(), strict=True):
            mine.copy_(theirs.full_tensor())
    return model


def trained(model: nn.Module, run, optimizer, steps: int = 3, rank: int = 0) -> list[Tensor]:
    """Return the losses of a rank's steps."""
    torch.manual_seed(1 + rank)
    losses = []
    for _ in range(steps):
        loss = run(torch.randint(16, (4, 8)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


OPTIONS = {
    "nvme": {"placement": "nvme"},
    "host": {"placement": "host"},
    "device": {"placement": "device"},
    "recomputed": {"placement": "nvme", "activations": "recompute"},
    "each by itself": {"placement": "nvme", "pack": None},
    "in a budget": {"placement": "nvme", "pack": None, "host_memory": "1MiB"},
}


# Options, formats and dtypes act apart from each other: in the gate, each format and each dtype at least once.
FP32, BF16 = torch.float32, torch.bfloat16
CELLS = [
    (1, "nf4", "nvme", BF16, 10),
    (1, "int8", "recomputed", BF16, 10),
    slow(1, None, "recomputed", BF16, 10),
    slow(1, "nf4", "host", FP32, 3),
    slow(1, "nf4", "recomputed", BF16, 3),
    (1, "nf4", "in a budget", FP32, 3),
    slow(1, "int8", "nvme", FP32, 3),
    (1, "fp8", "nvme", BF16, 3),
    *(slow(1, "nf4", options, dtype, 10) for options in OPTIONS for dtype in (FP32, BF16)),
    *(slow(1, name, "nvme", dtype, 10) for name in ("int8", "fp8", None) for dtype in (FP32, BF16)),
    *(slow(2, name, options, FP32, 10) for name, options in (("nf4", "recomputed"), ("int8", "nvme"), (None, "nvme"))),
]


def train_over_base(rank: int, name: str | None, options: str, dtype: torch.dtype, steps: int) -> None:
    """Train over a base and over its values in memory, where several ranks have DistributedDataParallel."""
    model = zinf_fx.offload(built(dtype), frozen_dtype=name, **OPTIONS[options])
    base = base_of(model)
    assert len(base) == 4 and {tensor.quantised and tensor.quantised.format for tensor in base.values()} == {name}
    assert model.table.weight.quantised is None and model.table.weight.dtype == dtype
    plain = in_memory(built(dtype), model)
    assert all((tensor.shape, tensor.dtype) == ((plain.get_parameter(n)).shape, dtype) for n, tensor in base.items())
    before = {n: tensor.full_tensor() for n, tensor in base.items()}
    mine = zinf_fx.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    theirs = zinf_fx.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.05)
    if dtype == torch.bfloat16:  # with masters, which a stored twin of the adapters has
        theirs = zinf_fx.optim.AdamW(
            [p for p in zinf_fx.offload(plain, placement="device").parameters() if p.requires_grad], lr=0.05
        )
    losses = trained(model, torch.compile(model, backend="zinf"), mine, steps, rank)
    expected = trained(plain, torch.compile(data_parallel(plain), backend="aot_eager"), theirs, steps, rank)
    assert all(map(torch.equal, losses, expected)) and losses[0] != losses[-1]
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.full_tensor(), other.full_tensor() if isinstance(other, StoredTensor) else other)
    assert all(torch.equal(before[n], tensor.full_tensor()) for n, tensor in base.items())


@pytest.mark.parametrize(("ranks", "name", "options", "dtype", "steps"), CELLS)
def test_training_over_a_quantised_base_equals_training_over_its_values(ranks: int, name, options, dtype, steps):
    on_ranks(ranks, train_over_base, name, options, dtype, steps)


@pytest.mark.parametrize(
    ("frozen_dtype", "activations"),
    [
        ("nf4", "keep"),
        (None, "recompute"),
        *(slow(*cell) for cell in (("nf4", "recompute"), (None, "keep"), ("int8", "keep"), ("int8", "recompute"))),
    ],
)
def test_a_step_reads_the_packed_bytes_per_pass_and_writes_what_is_trained(tmp_path: Path, frozen_dtype, activations):
    """Every matrix is read in forward, and in backward, where a gradient goes through it; nothing frozen is written."""
    # Without prefetch, no step reads what the next one begins with.
    options = {"pack": None, "residency": False, "prefetch": None, "activations": activations}
    # Gradients that are read while they are written would be copied, and not read.
    placement = {"parameters": "nvme", "gradients": "host", "optimizer": "nvme"}
    model = zinf_fx.offload(
        built(torch.bfloat16), store=tmp_path, placement=placement, frozen_dtype=frozen_dtype, **options
    )
    trained_ones = [p for p in model.parameters() if p.requires_grad]
    optimizer = zinf_fx.optim.AdamW(trained_ones, lr=0.05)
    run, tokens = torch.compile(model, backend="zinf"), torch.randint(16, (4, 8))
    with followed_plans(model) as plans:
        for _ in range(3):
            before = zinf_fx.stats(model)
            run(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.finish()
            after = zinf_fx.stats(model)
    (plan,) = plans
    moved = after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written
    traffic = [of_phase for _, of_phase in phases(plan)]
    assert moved == (
        sum(of_phase.nvme_to_host for of_phase in traffic),
        sum(of_phase.host_to_nvme for of_phase in traffic),
    )

    def nbytes(name: str) -> int:
        return blocks(model.get_parameter(name).stored.bytes.nbytes)

    read = Counter[str]()
    for live_range in plan.lifetimes:
        if live_range.moves("fetch"):
            read[plan.tiles[live_range.tile].name] += bytes_read(plan.tiles[live_range.tile])
    # No gradient goes through the first layer, as the embedding before it is not trained: backward reads it only where
    # that computes the layer again.
    first = 1 if activations == "keep" else 2
    expected = {"layers.0.base.weight": first, "layers.1.base.weight": 2, "layers.2.base.weight": 2, "head.weight": 2}
    assert {name: read[name] / nbytes(name) for name in expected} == expected
    packed = {None: 2 * WIDTH, "int8": WIDTH + 4, "nf4": WIDTH // 2 + 4}[frozen_dtype]
    assert nbytes("layers.1.base.weight") == blocks(WIDTH * packed)
    # Of each trained one: master, two moments, and the value.
    assert moved[1] == sum(3 * blocks(4 * p.numel()) + blocks(2 * p.numel()) for p in trained_ones)


def test_tiles_of_rows_are_dequantised_one_after_the_other(tmp_path: Path):
    model = zinf_fx.offload(built(), store=tmp_path, placement="nvme", frozen_dtype="nf4", pack=None)
    plain = in_memory(built(), model)
    run = torch.compile(model, backend="zinf", options={"tile": 1024})
    tokens = torch.randint(16, (4, 8))
    loss, expected = run(tokens), plain(tokens)
    torch.testing.assert_close(loss, expected)
    loss.backward(), expected.backward()
    torch.testing.assert_close(model.layers[0].down.weight.grad.full_tensor(), plain.layers[0].down.weight.grad)
    (plan,) = plan_model(model, (tokens,), config=zinf_fx.Config(tile=1024, pack=None)).plans
    tiles = [tile for tile in plan.graphs[0].tiles if tile.name.endswith("layers.0.base.weight")]
    assert [tile.shape for tile in tiles] == [(22, 36), (22, 36), (20, 36)]


def test_the_plan_counts_the_bytes_of_the_format(tmp_path: Path):
    """The plan is without a store: of a model on the meta device."""
    with torch.device("meta"):
        model = Model()
    config = zinf_fx.Config(placement="nvme", frozen_dtype="nf4", store=tmp_path, pack=None)
    (plan,) = plan_model(model, (torch.randint(16, (4, 8)),), config=config).plans
    tiles = {tile.name.removeprefix("model."): tile for tile in plan.graphs[0].tiles}
    assert tiles["layers.1.base.weight"].nbytes == WIDTH * (WIDTH // 2 + 4)
    assert tiles["layers.1.base.weight"].gradient_tier is None
    assert tiles["table.weight"].nbytes == 16 * WIDTH * 4
    offloaded = zinf_fx.offload(built(), config)
    (same,) = plan_model(offloaded, (torch.randint(16, (4, 8)),)).plans
    assert [tile.nbytes for tile in same.graphs[0].tiles] == [tile.nbytes for tile in plan.graphs[0].tiles]


def test_one_line_quantises_what_offload_would(tmp_path: Path):
    model = built()
    options = {"placement": "nvme", "frozen_dtype": "int8", "store": tmp_path}
    torch.compile(model, backend="zinf", options=options)(torch.randint(16, (4, 8)))
    assert {n for n, p in model.named_parameters() if p.quantised} == set(base_of(model))


def test_a_model_that_is_built_in_a_block_is_quantised_and_frozen(tmp_path: Path):
    torch.manual_seed(0)
    with zinf_fx.offloading(store=tmp_path, placement="nvme", frozen_dtype="int8"):
        model = nn.Sequential(nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        nn.init.normal_(model[1].weight)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    nn.init.normal_(plain[1].weight)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, p in model.named_parameters() if p.quantised} == {"1.weight"}
    stored = model[1].weight.stored.value().view(WIDTH, -1)
    assert torch.equal(stored, quantised(plain[1].weight, "int8"))
    assert torch.equal(model[0].weight.full_tensor(), plain[0].weight)


def merged(weight: Tensor, value: Tensor) -> None:
    """Merge as adapters are merged."""
    weight.zero_()
    weight.data += value


WRITES = {
    "merged": merged,
    "copy_": lambda weight, value: weight.copy_(value),
    "data": lambda weight, value: setattr(weight, "data", value),
    "part": lambda weight, value: [weight[row].copy_(value[row]) for row in range(len(value))],
    "sum": lambda weight, value: weight.zero_().add_(value),
    "load_state_dict": lambda weight, value: None,
}


@pytest.mark.parametrize("how", WRITES)
def test_what_is_written_is_rounded_to_the_format(tmp_path: Path, how):
    model = zinf_fx.offload(built(), store=tmp_path, placement="nvme", frozen_dtype="int8")
    weight, value = model.head.weight, torch.randn(16, WIDTH)
    with torch.no_grad():
        WRITES[how](weight, value)
    if how == "load_state_dict":
        model.load_state_dict({"head.weight": value}, strict=False)
    assert torch.equal(weight.stored.value().view(16, -1), quantised(value, "int8"))
    assert (weight.full_tensor() - value).abs().max() < 0.02


def row_written(weight: Tensor) -> None:
    weight[0] = 0.5


def data_written(weight: Tensor) -> None:
    weight.data[0, :] = 0.5


def value_modified(weight: Tensor) -> None:
    with zinf_fx.gathered(weight, modify=True) as value:
        value[0] = 0.5


def value_copied(weight: Tensor) -> None:
    value = weight.full_tensor()
    value[0] = 0.5
    weight.copy_(value)


PARTS = (row_written, data_written, value_modified, value_copied)


@pytest.mark.parametrize(("name", "write"), list(zip(("int8", "nf4", "fp8", "nf4"), PARTS, strict=True)))
def test_what_is_not_written_keeps_its_bytes(tmp_path: Path, name, write):
    """Values that were quantised in fp32 and are shown in bf16 would give other bytes."""
    model = zinf_fx.offload(built(), store=tmp_path, placement="nvme", frozen_dtype=name)
    weight = model.to(torch.bfloat16).head.weight
    before, value = weight.stored.value().view(16, -1).clone(), weight.full_tensor()
    assert not torch.equal(quantised(value, name), before)
    with torch.no_grad():
        write(weight)
    after = weight.stored.value().view(16, -1)
    assert torch.equal(after[1:], before[1:]) and not torch.equal(after[0], before[0])
    assert torch.equal(weight.full_tensor()[0], torch.full((WIDTH,), 0.5, dtype=torch.bfloat16))


def test_blocks_of_which_nothing_is_written_keep_their_bytes(tmp_path: Path):
    frozen = nn.Linear(200, 3).requires_grad_(False)
    weight = zinf_fx.offload(frozen, store=tmp_path, placement="nvme", frozen_dtype="nf4").to(torch.bfloat16).weight
    before = weight.full_tensor()
    with torch.no_grad():
        weight[1, 64:70] = 7.0
    after = weight.full_tensor()
    assert (after[1, 64:70] == 7).all()
    others = torch.ones_like(after, dtype=torch.bool)
    others[1, 64:128] = False
    assert torch.equal(after[others], before[others])


def test_copies_have_the_same_bytes(tmp_path: Path):
    model = zinf_fx.offload(built(torch.bfloat16), store=tmp_path, placement="nvme", frozen_dtype="nf4")
    weight, twin = model.head.weight, copy.deepcopy(model).head.weight
    assert twin.quantised == weight.quantised and twin.stored is not weight.stored
    assert torch.equal(twin.stored.value(), weight.stored.value())
    wider = model.to(torch.float32).head.weight
    assert wider.quantised.format == "nf4" and wider.dtype == torch.float32
    assert torch.equal(wider.full_tensor().bfloat16(), twin.full_tensor())


def test_what_can_not_be_honoured_is_refused(tmp_path: Path):
    with pytest.raises(
        ConfigError,
        match=r"frozen_dtype='nf3' is not accepted; accepted: None, 'int8', 'fp8', 'fp8_block', 'nf4', 'mxfp4'",
    ):
        zinf_fx.offload(built(), store=tmp_path, frozen_dtype="nf3")
    model = built()
    model.head.weight.data[3, 5] = torch.inf
    with pytest.raises(StoredTensorError, match=r"\(16, 64\) can't be quantised: infinite .*; give it finite values"):
        zinf_fx.offload(model, store=tmp_path, placement="nvme", frozen_dtype="nf4")
    assert type(model.head.weight) is nn.Parameter
    model = zinf_fx.offload(built(), store=tmp_path, placement="nvme", frozen_dtype="nf4")
    with pytest.raises(StoredTensorError, match="quantised as nf4, which can't be trained: train adapters"):
        model.requires_grad_()
    with pytest.raises(StoredTensorError, match="quantised as nf4, which can't be trained: train adapters"):
        model.head.weight.requires_grad = True
    with pytest.raises(StoredTensorError, match="quantised as nf4, which can't be trained: train adapters"):
        nn.Parameter(model.head.weight)
    assert not model.head.weight.requires_grad
    before = model.head.weight.full_tensor()
    with pytest.raises(StoredTensorError, match="infinite values"), torch.no_grad():
        model.head.weight.fill_(torch.nan)
    assert torch.equal(model.head.weight.full_tensor(), before)


Contents = tuple[list[Tensor], list[Tensor]]
"""The bytes and the values of a model's parameters."""


def contents(model: nn.Module) -> Contents:
    parameters = list(model.parameters())
    return [p.stored.value().clone() for p in parameters], [p.full_tensor() for p in parameters]


def made(seed: int, frozen_dtype: str | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = zinf_fx.offload(Model(), placement="nvme", frozen_dtype=frozen_dtype)
    return model, zinf_fx.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def save_and_export(rank: int, folder: Path, frozen_dtype: str) -> Contents:
    model, optimizer = made(0, frozen_dtype)
    trained(model, model, optimizer, steps=1)
    zinf_fx.save_checkpoint(folder / "saved", model, optimizer)
    zinf_fx.export_safetensors(model, folder / "weights")
    return contents(model)


def load_both(rank: int, folder: Path, frozen_dtype: str) -> tuple[Contents, Contents]:
    """Return what is loaded from the checkpoint, and then from the exported weights."""
    model, optimizer = made(1, frozen_dtype)
    zinf_fx.load_checkpoint(folder / "saved", model, optimizer)
    resumed = contents(model)
    zinf_fx.load_safetensors(model, folder / "weights")
    with pytest.raises(CheckpointError, match=r"base.weight"):
        zinf_fx.load_checkpoint(folder / "saved", *made(1, None))
    return resumed, contents(model)


@pytest.mark.parametrize(
    ("saving", "loading", "frozen_dtype"), [(1, 1, "nf4"), (1, 1, "int8"), (2, 1, "nf4"), (1, 2, "nf4")]
)
def test_a_checkpoint_has_the_bytes_and_exported_weights_the_values(
    tmp_path: Path, saving: int, loading: int, frozen_dtype: str
):
    """So what is resumed is what was saved, on any number of ranks, which quantising values again may not give."""
    octets, values = on_ranks(saving, save_and_export, tmp_path, frozen_dtype)[0]
    plain = Model()
    zinf_fx.load_safetensors(plain, tmp_path / "weights")
    assert all(map(torch.equal, plain.parameters(), values))
    for resumed, (_, loaded) in on_ranks(loading, load_both, tmp_path, frozen_dtype):
        assert all(map(torch.equal, [*resumed[0], *resumed[1]], [*octets, *values]))
        tolerance = 0 if frozen_dtype == "nf4" else 1e-6
        torch.testing.assert_close(loaded, values, atol=tolerance, rtol=tolerance)


def test_large_values_take_over_the_memory_of_earlier_ones(tmp_path: Path):
    """Pages are then not taken from the system for each; and none is taken over that somebody still has."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 1024)).requires_grad_(False)
    plain = copy.deepcopy(layers)
    model = in_memory(plain, zinf_fx.offload(layers, store=tmp_path, placement="nvme", frozen_dtype="nf4"))
    run = torch.compile(layers, backend="zinf")
    x = torch.randn(4, 1024, requires_grad=True)
    for _ in range(2):
        run(x).square().sum().backward()
        theirs = x.grad
        x.grad = None
        model(x).square().sum().backward()
        assert torch.equal(theirs, x.grad)
        x.grad = None
    gc.collect()
    assert 0 < workspace._arena.peak <= 3 * (4 << 20) and workspace._arena.in_use == 0
