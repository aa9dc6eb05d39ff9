"""A step of several micro-batches, operator by operator, equals a loop over them, and moves what one of them moves."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from followed import followed_plans
from gate import slow
from ranks.launching import on_ranks
from ranks.training import data_parallel, no_sync, world_size
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zinf_fx
from zinf_fx.config import Config
from zinf_fx.errors import BudgetError, ConfigError
from zinf_fx.frontend import decisions
from zinf_fx.frontend.capture import Capture
from zinf_fx.frontend.explain import plan_model
from zinf_fx.frontend.graph_inputs import abstract_inputs, graph_inputs
from zinf_fx.frontend.micro_batches import batch_size
from zinf_fx.plan.memory.accounting import flows, phases
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.rates import NOMINAL
from zinf_fx.plan.sharding import Groups
from zinf_fx.plan.show.table import render

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig

WIDTH, WORDS, LENGTH, PART = 16, 32, 6, 2
TIGHT = {"device_memory": 1024}


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.dropout(self.down(F.gelu(self.up(self.norm(h)))))


class AttentionBlock(Block):
    """Takes twice as long to plan."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        batch, length, width = h.shape
        q, k, v = (x.view(batch, length, 2, width // 2).transpose(1, 2) for x in self.qkv(self.norm(h)).split(width, 2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.shape)
        h = h + self.dropout(self.out(attended))
        return h + self.dropout(self.down(F.gelu(self.up(h))))


class Model(nn.Module):
    """Gives its loss, and its logits of shape [batch, length, words]."""

    def __init__(self, dropout: float = 0.0, tied: bool = False, blocks: Sequence[type[Block]] = (Block,)) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(block(dropout) for block in blocks))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        h = self.blocks(self.words(words) + self.places(torch.arange(words.shape[1])))
        logits = self.head(h)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def tokens(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    words = torch.randint(0, WORDS, (2, count * PART, LENGTH), generator=torch.Generator().manual_seed(seed))
    return words[0], words[1]


def loop(model: nn.Module, count: int, *batch: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Do what plain PyTorch does: a backward pass for each micro-batch. Return losses and logits."""
    results = []
    for number, part in enumerate(zip(*(tensor.chunk(count) for tensor in batch), strict=True), start=1):
        with nullcontext() if number == count else no_sync(model):
            loss, logits = model(*part)
            (loss * scale if scale else loss / count).backward()
        results.append((loss.detach(), logits.detach()))
    return torch.stack([loss for loss, _ in results]), torch.cat([logits for _, logits in results])


def twin_of(plain: nn.Module, store: Path | None, **options: Any) -> tuple[nn.Module, Callable[..., Any]]:
    """Return a copy that is stored, and that compiled. `store`: None for the default one."""
    placement = options.pop("placement", "nvme")
    twin = zinf_fx.offload(copy.deepcopy(plain), store=store, placement=placement)
    return twin, torch.compile(twin, backend="zinf", dynamic=True, options=options)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same_gradients(twin: nn.Module, plain: nn.Module, same: Callable = torch.equal) -> None:
    for (name, ours), theirs in zip(twin.named_parameters(), plain.parameters(), strict=True):
        assert same(full(ours.grad), theirs.grad), name


def equals_the_loop(rank: int, count: int, options: dict[str, Any], tied: bool = False) -> int:
    """Assert that steps equal the loop, in DistributedDataParallel on several ranks. Return the bytes that this rank
    sends in the last one.

    The gradients of a tied weight's two uses are summed over the micro-batches each by itself.
    """
    alone, same = world_size() == 1, partial(torch.allclose, rtol=0, atol=1e-5) if tied else torch.equal
    blocks = [AttentionBlock if alone else Block] * (2 if "device_memory" in options else 1)
    torch.manual_seed(0)
    plain = Model(0.1, tied, blocks)
    twin, compiled = twin_of(plain, None, micro_batches=count, **options)
    run = data_parallel(plain)
    ours = zinf_fx.optim.AdamW(twin.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for step in range(3 if alone else 2):
        batch = tokens(count, 10 * rank + step)
        torch.manual_seed(step)
        losses, expected = loop(run, count, *batch)
        after = torch.get_rng_state()
        torch.manual_seed(step)
        before = zinf_fx.stats(twin).sent_bytes
        loss, logits = compiled(*batch)
        loss.backward()
        assert torch.equal(torch.get_rng_state(), after)
        assert same(logits, expected)
        assert torch.allclose(loss, losses.mean(), rtol=1e-6)
        assert_same_gradients(twin, plain, same)
        if alone:  # several ranks sum the norms of shards
            norms = [torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5) for net in (twin, plain)]
            assert torch.equal(*norms)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        if not alone:
            ours.finish()
        sent = zinf_fx.stats(twin).sent_bytes - before
    for (name, parameter), other in zip(twin.named_parameters(), plain.parameters(), strict=True):
        assert same(parameter.full_tensor(), other), name
    return sent


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (8, {"pack": None, "residency": False}),
        slow(2, {"activations": "recompute", "pack": None}),
        slow(4, {"activations": "offload", "placement": "host"}),
        slow(4, {"device_memory": "160KiB", "activations": "auto"}),
        (4, {"activations": "recompute", "pack": None, "micro_batch_group": "auto"}),
        slow(2, {"activations": "offload", "placement": "host", "pack": None, "micro_batch_group": 3}),
        slow(4, {"activations": 1, "device_memory": "160KiB", "micro_batch_group": "auto"}),
        slow(2, {"activations": "recompute", "pack": None, "micro_batch_group": 100}),
        slow(4, {"placement": "device", "micro_batch_group": "auto"}),
        slow(4, {"placement": "device"}),
        slow(5, {"prefetch": None, "pack": None}),
    ],
    ids=str,
)
def test_a_step_equals_the_loop(count: int, options: dict[str, Any]) -> None:
    on_ranks(1, equals_the_loop, count, options)


def equals_the_loop_in_parts_and_whole(rank: int, group: object, tied: bool) -> tuple[int, int]:
    """Return the bytes that this rank sends in a step of two micro-batches, and in one of one."""
    options = {"placement": "infinity-nvme"}
    in_parts = equals_the_loop(rank, 2, {**options, "micro_batch_group": group}, tied)
    torch.compiler.reset()
    return in_parts, equals_the_loop(rank, 1, options, tied)


@pytest.mark.parametrize(("group", "tied"), [(1, False), slow("auto", True)])
def test_two_ranks_send_as_much_as_with_one_micro_batch(group: object, tied: bool) -> None:
    """Each reduces its gradients once, as DistributedDataParallel does after no_sync."""
    for of_several, of_one in on_ranks(2, equals_the_loop_in_parts_and_whole, group, tied):
        assert of_several == of_one > 0


@cache
def planned_in_groups(group: object, activations: object) -> Plan:
    """Plan four layers and four micro-batches."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=4, hidden=64, heads=2, context=32, vocabulary=WORDS, tied=False))
    options = {"micro_batches": 4, "micro_batch_group": group, "activations": activations, "pack": None}
    (plan,) = plan_model(model, torch.randint(0, WORDS, (2, 8, 32)).unbind(), placement="nvme", **options).plans
    return plan


@pytest.mark.slow
def test_groups_compute_with_less_and_move_the_same() -> None:
    """What a layer computes again for backward is there of one micro-batch at a time, its tiles of all of them."""
    figures = {}
    for group in (1, "auto", 100):
        plan = planned_in_groups(group, 1)
        values = max(operator.values for operator in plan.graphs[1].operators)
        moved = sum(traffic.nvme for _, traffic in phases(plan))
        tiles = max(flow.device + flow.host for flow in flows(plan, plan.graphs[1]))
        figures[group] = values, moved, tiles, len(plan.graphs[1].operators)
        assert ("4 micro-batches by groups of " in render(plan)) == (group != 1)
    assert figures["auto"][0] < 0.7 * figures[1][0]
    assert figures["auto"][1] <= figures[1][1]
    assert figures[1][2] < figures["auto"][2] < figures[100][2]
    assert 1 == figures[100][3] < figures["auto"][3] < figures[1][3]


@pytest.mark.parametrize(("activations", "part"), [slow(1, 0.25), slow("recompute", 0.96), slow(2, 0.1)])
def test_groups_compute_the_end_again_too(activations: object, part: float) -> None:
    """What follows the last checkpoint is not saved of all micro-batches, when it is used up of one at a time."""
    kept = {group: planned_in_groups(group, activations).kept for group in (1, "auto")}
    assert kept["auto"] < part * kept[1], kept


@pytest.mark.slow
@pytest.mark.parametrize("group", ["auto", 100])
def test_groups_take_the_memory_that_is_planned(tmp_path: Path, group: object) -> None:
    torch.manual_seed(0)
    model = zinf_fx.offload(
        GPT(GPTConfig(layers=3, hidden=128, heads=2, context=32, vocabulary=WORDS, tied=False)),
        store=tmp_path,
        placement="nvme",
        chunk="64KiB",
    )
    options = {"micro_batches": 4, "micro_batch_group": group, "activations": 1}
    compiled = torch.compile(model, backend="zinf", dynamic=True, options=options)
    optimizer = zinf_fx.optim.AdamW(model.parameters(), overlap=False)
    for _ in range(3):
        compiled(*torch.randint(0, WORDS, (2, 8, 32)).unbind()).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = zinf_fx.stats(model)
    assert stats.peak_host_bytes == pytest.approx(stats.planned_host_bytes, rel=0.05), str(stats)
    assert stats.displaced_buffers == 0, str(stats)


@pytest.mark.parametrize(("room", "count"), [slow(1300 << 10, 2), slow(1 << 40, 1)])
def test_the_plan_decides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, room: int, count: int
) -> None:
    """What is planned for the model says how it trains: as the loop over so many micro-batches."""
    here = decisions.this_machine(Config(store=tmp_path), torch.device("cpu"))
    here = replace(here, device=replace(here.device, capacity=room))
    monkeypatch.setattr(decisions, "this_machine", lambda *_: here)
    torch.manual_seed(0)
    plain = GPT(GPTConfig(layers=1, hidden=16, heads=2, context=32, vocabulary=256, tied=False))
    batch = torch.randint(0, 256, (2, 4, 32)).unbind()
    options = {"micro_batches": "auto", "activations": 1}
    planning = plan_model(plain, batch, placement="nvme", chunk="64KiB", **options)
    (division,), (plan,) = planning.divisions, planning.plans
    taken = plan.config.micro_batches, plan.config.micro_batch_group
    assert taken == (division.chosen.micro_batches, division.chosen.group) and taken[0] == count, str(division)
    assert planning.text().startswith(str(division))
    twin = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement="nvme", chunk="64KiB")
    compiled = torch.compile(twin, backend="zinf", dynamic=True, options=options)
    with caplog.at_level("INFO", "zinf_fx"):
        for size in (4, 4, 2, 1):  # another size is decided for anew; one sample can't be divided
            twin.zero_grad()
            compiled(*(x[:size] for x in batch)).backward()
            if size in (4, 1):
                plain.zero_grad()
                parts = count if size > 1 else 1
                for part in zip(*(tensor[:size].chunk(parts) for tensor in batch), strict=True):
                    (plain(*part) / parts).backward()
                assert_same_gradients(twin, plain)
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("micro_batches auto: ")]
    assert said[0] == f"micro_batches auto: {division.reason}" and len(said) == 2
    with torch.no_grad():
        compiled(*(x[:3] for x in batch))


@pytest.mark.parametrize("others", [(), slow((torch.ones(LENGTH, LENGTH).tril(),))], ids=["places", "mask"])
def test_a_batch_of_one_sample_stays_whole(others: tuple[Tensor, ...]) -> None:
    """Dynamo fixes a size of 1. The length, which other arguments have in their first dimension, is no batch's."""
    planning = plan_model(Placed(4, 4), (*one_sample(), *others), placement="nvme", micro_batches="auto")
    assert planning.divisions == [] and planning.plans[0].config.micro_batches == 1


class Means(nn.Linear):
    def forward(self, *inputs: Tensor) -> Tensor:
        return self.weight.sum() * sum(tensor.mean() for tensor in inputs)


@pytest.mark.parametrize(
    ("shapes", "micro_batches", "marked", "size"),
    [
        ([(16, 5), (1, 16)], "auto", True, 16),
        ([(16, 5), (1, 16)], "auto", False, 1),
        ([(1, 5), (8,), (8,)], 2, False, 8),
    ],
    ids=["marked", "equal", "vectors"],
)
def test_which_size_is_the_batch(
    shapes: list, micro_batches: object, marked: bool, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It stands beside a tensor that has one row, which may be a sample, or for all samples."""
    sizes = []

    def backend(module: torch.fx.GraphModule, inputs: list) -> Callable:
        config = Config(placement="nvme", micro_batches=micro_batches)
        sizes.append(batch_size(module, graph_inputs(module, inputs, inputs), config))
        return module.forward

    tensors = [torch.ones(shape) for shape in shapes]
    if marked:
        torch._dynamo.maybe_mark_dynamic(tensors[0], 0)
    with caplog.at_level("INFO", "zinf_fx"):
        torch.compile(Means(4, 4), backend=backend, dynamic=None if marked else True)(*tensors)
    assert sizes == [size]
    assert ("taken for one sample" in caplog.text) == (size == 1)


def test_what_is_saved_leaves_where_the_batch_stays_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The graph is planned for the sizes of the call, as where the batch is divided."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(8, 64, 64)
    options = {"micro_batches": "auto", "activations": "offload"}
    (plan,) = plan_model(plain, (x,), placement="host", **options).plans
    assert plan.config.micro_batches == 1
    assert any(tile.activation for tile in plan.tiles)
    twin, compiled = twin_of(plain, tmp_path, placement="host", **options)
    compiled(x).square().mean().backward()
    plain(x).square().mean().backward()
    assert_same_gradients(twin, plain)
    assert "activations stay on the device" not in caplog.text


def test_a_graph_that_no_number_divides(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, division: dict[str, object], **__: object) -> None:
        raise ConfigError(f"there is no graph of {division['micro_batches']}")

    monkeypatch.setattr(decisions, "Capture", refuse)
    with pytest.raises(ConfigError, match="no graph of 1"):
        plan_model(Model(), tokens(2), placement="nvme", micro_batches="auto")


def captured(**options: Any) -> Capture:
    """Return a small model's only graph."""
    captures = []

    def backend(module: torch.fx.GraphModule, inputs: list) -> Callable:
        config = Config(placement="nvme", **options)
        stored = abstract_inputs(module, inputs, config)
        captures.append(Capture(module, stored, config, rates=NOMINAL, groups=Groups(), seen=inputs))
        captures[0].capture()
        return module.forward

    torch.compile(Model(), backend=backend)(*tokens(1))
    return captures[0]


@pytest.mark.parametrize(("own", "fits", "too_small"), [({}, {}, TIGHT), slow(TIGHT, {"device_memory": None}, {})])
def test_what_did_not_fit_has_no_plan_when_it_is_asked_for_again(own: dict, fits: dict, too_small: dict) -> None:
    capture = captured(**own)
    plan = capture.planned(**fits)
    assert plan is not None
    for _ in range(2):
        with pytest.raises(BudgetError):
            capture.planned(**too_small)
    assert capture.planned(**fits) is plan


@pytest.mark.parametrize("micro_batches", ["auto", slow(2)])
def test_in_one_line(tmp_path: Path, micro_batches: object) -> None:
    """An ordinary model, which leaves at the first call. Beside what is saved, the budget has room for an operator, and
    none for a group of them."""
    torch.manual_seed(0)
    plain, batch = Model(blocks=[AttentionBlock]), tokens(2)
    twin = copy.deepcopy(plain)
    options = {"micro_batches": micro_batches, "device_memory": "44KiB", "tile": None, "store": tmp_path}
    compiled = torch.compile(twin, backend="zinf", dynamic=True, options=options)
    compiled(*batch)[0].backward()  # finds ordinary parameters
    assert all(isinstance(parameter, zinf_fx.StoredTensor) for parameter in twin.parameters())
    twin.zero_grad()
    with followed_plans(twin) as plans:
        compiled(*batch)[0].backward()
    (plan,) = plans
    loop(plain, plan.config.micro_batches, *batch)
    assert_same_gradients(twin, plain)


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 2, 4])
def test_groups_accumulate(tmp_path: Path, group: int) -> None:
    """Eight micro-batches are in groups: a sum of sums, which rounds in other places than the loop's."""
    torch.manual_seed(0)
    plain = Model()
    twin, compiled = twin_of(plain, tmp_path, micro_batches=group)
    batch = tokens(8)
    loop(plain, 8, *batch)
    for part in zip(*(tensor.chunk(8 // group) for tensor in batch), strict=True):
        (compiled(*part)[0] * group / 8).backward()
    for (name, parameter), other in zip(twin.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(parameter.grad), other.grad, rtol=1e-4, atol=1e-7, msg=name)


def test_a_tied_weight_has_both_gradients_summed_by_themselves(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Model(dropout=0.1, tied=True)
    twin, compiled = twin_of(plain, tmp_path, micro_batches=4, pack=None)
    batch = tokens(4)
    torch.manual_seed(1)
    loop(plain, 4, *batch)
    torch.manual_seed(1)
    compiled(*batch)[0].backward()
    tied = twin.words.weight.grad.full_tensor()
    torch.testing.assert_close(tied, plain.words.weight.grad, rtol=1e-5, atol=1e-8)
    assert torch.equal(twin.places.weight.grad.full_tensor(), plain.places.weight.grad)


def test_losses_are_summed_where_that_is_asked_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Model()
    twin, compiled = twin_of(plain, tmp_path, micro_batches=4, micro_batch_loss="sum")
    batch = tokens(4)
    losses, _ = loop(plain, 4, *batch, scale=1.0)
    loss, _ = compiled(*batch)
    loss.backward()
    torch.testing.assert_close(loss, losses.sum(), rtol=1e-6, atol=0.0)
    assert_same_gradients(twin, plain)


def test_inputs_and_results_that_are_differentiated(tmp_path: Path) -> None:
    """The batch's own gradient, and that of a result which is no loss; a result that depends on no micro-batch."""

    class Both(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
            y = super().forward(x)
            return y.transpose(0, 1), self.weight.square().sum(), (y > 0).sum(), x.shape[0]

    torch.manual_seed(0)
    plain = Both(3, 5)
    twin, compiled = twin_of(plain, tmp_path, micro_batches=2)
    ours, theirs = (torch.arange(24.0).view(8, 3).div(7).requires_grad_() for _ in range(2))
    tangent = torch.randn(5, 8)
    y, penalty, positive, size = compiled(ours)
    assert size == 8
    ((y * tangent).sum() + penalty).backward()
    for x, part in zip(theirs.chunk(2), tangent.chunk(2, 1), strict=True):
        z, penalty_here, *_ = plain(x)
        ((z * part).sum() + penalty_here / 2).backward()
    assert torch.equal(penalty, penalty_here)
    assert positive == (y > 0).sum()
    assert torch.equal(ours.grad, theirs.grad)
    assert_same_gradients(twin, plain)


def test_what_depends_on_no_micro_batch(tmp_path: Path) -> None:
    """Results, numbers and gradients of what all micro-batches share are those of one call; 1-d inputs are no batch."""

    class Shared(nn.Linear):
        def forward(self, anchors: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
            near = (super().forward(x)[:, 0, None] - 2 * anchors[None]).square()
            return near.mean(), self.weight * 2, anchors.square().sum(), x.shape[1] * 2 + 1

    torch.manual_seed(0)
    plain = Shared(4, 3)
    twin, compiled = twin_of(plain, tmp_path, micro_batches=2)
    x, (ours, theirs) = torch.randn(8, 4), (torch.arange(6.0).requires_grad_() for _ in range(2))
    for call, anchors in ((compiled, ours), (plain, theirs)):
        loss, twice, shared, number = call(anchors, x)
        assert number == 9
        (loss + twice.sum() + shared).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    for mine, expected in zip(twin.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(mine.grad), expected.grad)


def test_random_numbers_by_layout(tmp_path: Path) -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = super().forward(x).transpose(1, 2)
            y = y + torch.randn_like(y)
            return y.square().mean(), y

    torch.manual_seed(0)
    plain = Noisy(5, 7)
    twin, compiled = twin_of(plain, tmp_path, micro_batches=3)
    x = torch.randn(6, 4, 5)
    torch.manual_seed(1)
    _, expected = loop(plain, 3, x)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    loss, y = compiled(x)
    loss.backward()
    assert torch.equal(y, expected) and torch.equal(torch.get_rng_state(), after)
    assert_same_gradients(twin, plain)


def test_parameters_and_gradients_move_once(tmp_path: Path) -> None:
    """They do as planned, and as measured."""
    torch.manual_seed(0)
    model, batch = Model(), tokens(2)
    plans, moved = {}, {}
    for count, inputs in ((1, tuple(x[:PART] for x in batch)), (2, batch)):
        torch._dynamo.reset()
        twin, compiled = twin_of(model, tmp_path, micro_batches=count, pack=None, residency=False)
        optimizer = zinf_fx.optim.AdamW(twin.parameters(), lr=1e-2)
        with followed_plans(twin) as followed:
            for _ in range(3):
                before = zinf_fx.stats(twin)
                compiled(*inputs)[0].backward()
                optimizer.step()
                optimizer.zero_grad()
                optimizer.finish()
        after = zinf_fx.stats(twin)
        (plans[count],) = followed
        moved[count] = after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written
    whole, halves = plans[1], plans[2]
    assert ", 2 micro-batches" in render(halves)
    assert [traffic for _, traffic in phases(halves)] == [traffic for _, traffic in phases(whole)]
    assert [len(graph.events) for graph in halves.graphs] == [len(graph.events) for graph in whole.graphs]
    # The head of the next step may have been fetched when the step is over, or not.
    assert moved[2] == pytest.approx(moved[1], rel=0.2)


def test_each_size_of_the_batch_has_a_plan_and_evaluation_is_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Model()
    twin, compiled = twin_of(plain, tmp_path, micro_batches=2)
    for count in (2, 4, 2):
        batch = tuple(x[: count * PART] for x in tokens(4))
        plain.zero_grad()
        twin.zero_grad()
        loop(plain, 2, *batch)
        compiled(*batch)[0].backward()
        assert_same_gradients(twin, plain)
    three = tuple(x[:3] for x in tokens(4))  # which can't be divided by two
    with torch.no_grad():
        torch.testing.assert_close(compiled(*three)[1], plain(*three)[1])


@pytest.mark.slow
def test_tensors_of_a_second_size_are_one_batch(tmp_path: Path) -> None:
    """For sizes that differ from those before, Dynamo has a symbol for every tensor's."""
    torch.manual_seed(0)
    plain = GPT(GPTConfig(layers=1, hidden=WIDTH, heads=2, context=31, vocabulary=WORDS, tied=False))
    twin, compiled = twin_of(plain, tmp_path, micro_batches=2)
    for count in (2, 4):
        batch = [torch.randint(0, WORDS, (count * PART, 31)) for _ in range(2)]
        plain.zero_grad()
        twin.zero_grad()
        for part in zip(*(tensor.chunk(2) for tensor in batch), strict=True):
            (plain(*part) / 2).backward()
        compiled(*batch).backward()
        assert_same_gradients(twin, plain)


@pytest.mark.parametrize("micro_batches", [4, slow("auto")])
def test_a_plan_file_is_followed(tmp_path: Path, micro_batches: object) -> None:
    torch.manual_seed(0)
    plain, batch = Model(), tokens(4)
    plan = zinf_fx.export_plan(plain, batch, micro_batches=micro_batches, placement="nvme")
    plan.save(tmp_path / "plan.json")
    twin, compiled = twin_of(plain, tmp_path, plan=tmp_path / "plan.json")
    loop(plain, plan.config.micro_batches, *batch)
    compiled(*batch)[0].backward()
    assert_same_gradients(twin, plain)


class Writes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2)).sum()


class Checkpointed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: F.dropout(F.linear(x, self.weight), 0.2), x, use_reentrant=False).sum()


class Best(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y.mean(), y[:, 0].argmax()


class Flat(nn.Linear):
    """Gives the loss of each token."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(0, 1).square().mean(1)


class Placed(nn.Embedding):
    """Makes each word depend on all before it."""

    def forward(self, words: Tensor, places: Tensor, mask: Tensor | None = None) -> Tensor:
        h = super().forward(words) * places[:, None]
        return (h.cumsum(1) if mask is None else mask @ h).square().mean()


def one_sample() -> tuple[Tensor, Tensor]:
    """Return words [1, length] and places [length]."""
    return torch.ones(1, LENGTH, dtype=torch.long), torch.arange(LENGTH, dtype=torch.float32)


@pytest.mark.parametrize(
    ("model", "inputs", "options", "dynamic", "expected"),
    [
        (Model(), tokens(4), {"micro_batches": 4}, False, "sizes in the captured graph are fixed"),
        (Model(), tokens(4), {"micro_batches": 3}, True, "is of size 8 .* is no multiple"),
        (Placed(4, 4), one_sample(), {"micro_batches": 2}, True, "is of size 1 .* is no multiple"),
        (nn.BatchNorm1d(4), (torch.ones(8, 4),), {"micro_batches": 2}, True, "Statistics of a batch"),
        (nn.Linear(4, 4), (torch.ones(8, 4),), {"micro_batches": 0}, True, "micro_batches=0 is not accepted"),
        (Writes(4, 4), (torch.ones(8, 4),), {"micro_batches": 2}, True, "writes in place"),
        (Checkpointed(4, 4), (torch.ones(8, 4),), {"micro_batches": 2}, True, "take the checkpointing out"),
        (Best(4, 4), (torch.ones(8, 4),), {"micro_batches": 2}, True, "whole number .* neither a sum nor a count"),
        (
            Flat(4, 4),
            (torch.ones(8, 3, 4),),
            {"micro_batches": 2},
            True,
            r"0 is made of the batch size 8 .* as in x.view\(",
        ),
        (Model(), tokens(4), {"micro_batch_group": 2}, True, "batch isn't divided: give micro_batches too"),
        (Model(), tokens(4), {"micro_batches": "auto"}, False, "micro_batches=auto: the sizes in .* are fixed"),
    ],
    ids=[
        *("fixed", "multiple", "one sample", "batch norm", "zero", "in place", "checkpoint"),
        *("argmax", "flat", "group alone", "auto, fixed"),
    ],
)
def test_refused(model: nn.Module, inputs: tuple, options: dict, dynamic: bool, expected: str, tmp_path: Path) -> None:
    compiled = torch.compile(
        model, backend="zinf", dynamic=dynamic, options={**options, "placement": "host", "store": tmp_path}
    )
    with pytest.raises(ConfigError, match=expected):
        compiled(*inputs)
    assert not any(isinstance(parameter, zinf_fx.StoredTensor) for parameter in model.parameters()), (
        "nothing was changed"
    )


@pytest.mark.parametrize("marked", [True, slow(False)])
def test_another_size_that_is_equal_by_chance(tmp_path: Path, marked: bool) -> None:
    torch.manual_seed(0)
    plain, batch = Model(), tokens(3)  # six of six words
    twin = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement="nvme")
    for x in batch if marked else ():
        torch._dynamo.maybe_mark_dynamic(x, 0)
    loop(plain, 3, *batch)
    dynamic = None if marked else True
    torch.compile(twin, backend="zinf", dynamic=dynamic, options={"micro_batches": 3})(*batch)[0].backward()
    assert_same_gradients(twin, plain)


class Differences(torch.nn.Module):
    """Whose targets are as wide as the first batch is large."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (self.linear(x) - target).square().mean()


@pytest.mark.parametrize("keyword", [slow(False), True])
def test_a_width_that_is_equal_by_chance(tmp_path: Path, keyword: bool) -> None:
    """It is equal in the first batch, or in a later one."""
    torch.manual_seed(0)
    plain = Differences()
    twin = copy.deepcopy(plain)
    options = {"placement": "nvme", "store": tmp_path, "micro_batches": 4}
    run = torch.compile(twin, backend="zinf", dynamic=True, options=options)
    for size in (8, 16, 12, 8):
        x, target = torch.randn(size, 16), torch.randn(size, 8)
        for part, aim in zip(x.chunk(4), target.chunk(4), strict=True):
            (plain(part, aim) / 4).backward()
        (run(x, target=target) if keyword else run(x, target)).backward()
    for ours, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_a_width_that_is_equal_by_chance_in_a_function(tmp_path: Path) -> None:
    """Of which nobody sees the call before Dynamo does. Where nothing compares the two sizes, both are open."""
    words = zinf_fx.offload(Model(), store=tmp_path, placement="nvme")
    run = torch.compile(lambda x, y: words(x, y), backend="zinf", dynamic=True, options={"micro_batches": 3})
    with pytest.raises(ConfigError, match="or are equal to it: exactly one"):
        run(*tokens(3))
    model = zinf_fx.offload(Differences(), store=tmp_path, placement="nvme")
    run = torch.compile(lambda x, y: model(x, y), backend="zinf", dynamic=True, options={"micro_batches": 4})
    batch = torch.randn(8, 16), torch.randn(8, 8)
    with pytest.raises(ConfigError, match=r"equals the batch's by chance, call .*maybe_mark_dynamic"):
        run(*batch)
    for x in batch:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    run(*batch).backward()
