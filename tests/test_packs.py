"""Training with small parameters in packs equals that without, whatever is done with single ones of them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gate import slow
from ranks import training
from ranks.launching import on_ranks
from torch import Tensor, nn
from twins import Net, assert_nothing_leaked, x

import zinf_fx
from zinf_fx.frontend.packing import packs_of
from zinf_fx.plan.chunks import AT_A_TIME
from zinf_fx.runtime.tensor.quantised import Form
from zinf_fx.runtime.tensor.stored_bytes import StoredBytes
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.stored_tile import StoredTile

Train = Callable[[nn.Module, Callable, torch.optim.Optimizer], None]


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def one_step(model: nn.Module, call: Callable, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    call(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def twins(tmp_path: Path, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return a plain model, and its twin whose small parameters lie side by side on disk."""
    torch.manual_seed(0)
    plain = model
    if plain is None:
        plain = Net()
        del plain.unused  # it would lie between others
    options = {"placement": "nvme", "pack": "auto", **options}
    return plain, zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, **options)


def optimizers(plain: nn.Module, model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(plain.parameters(), fused=True), zinf_fx.optim.AdamW(model.parameters(), **options)]


def assert_equal(model: nn.Module, plain: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs), name


def assert_same_states(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    mine, plain = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert mine.keys() == plain.keys()
    for key, state in plain.items():
        for name, value in state.items():
            actual = mine[key][name]
            assert torch.equal(actual.full_tensor() if isinstance(actual, StoredTensor) else actual, value), (key, name)


def transfers(model: nn.Module) -> int:
    return next(model.parameters()).stored.tiers.store.counters().transfers


STATES_LEAVE = {"parameters": "device", "gradients": "nvme", "optimizer": "nvme"}


@pytest.mark.parametrize(
    ("placement", "in_backward"),
    [
        ("nvme", False),
        ("infinity-nvme", True),
        (STATES_LEAVE, False),
        *(slow(*case) for case in (("nvme", True), ("infinity-nvme", False), (STATES_LEAVE, True))),
    ],
    ids=str,
)
def test_steps_move_packs(tmp_path: Path, placement: object, in_backward: bool) -> None:
    plain, model = twins(tmp_path, placement=placement)
    pairs = zip((plain, model), optimizers(plain, model, step_in_backward=in_backward), strict=True)
    (_, plainly), (_, optimizer) = sides = list(pairs)
    calls = [plain, torch.compile(model, backend="zinf")]
    moved = 0
    for _ in range(5):
        optimizer.finish()
        before = transfers(model)
        batch = x()
        for (side, stepper), call in zip(sides, calls, strict=True):
            one_step(side, call, stepper, batch)
        optimizer.finish()
        moved = transfers(model) - before
        assert_equal(model, plain)
    assert_same_states(optimizer, plainly)
    # One pack is read for forward, written as gradient, and read and written with two states: not each of nine tensors.
    assert moved <= 12, moved
    del optimizer
    assert_nothing_leaked(model)


def test_what_stays_is_used_where_it_is_while_its_gradients_leave_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = twins(tmp_path, placement=STATES_LEAVE)
    call, batch = torch.compile(model, backend="zinf"), x()
    with monkeypatch.context() as patch:
        patch.setattr(StoredBytes, "device_window", lambda *_, **__: pytest.fail("a tile is brought"))
        loss = call(batch)
    before = transfers(model)
    loss.backward()
    next(model.parameters()).stored.tiers.drain()
    assert transfers(model) - before == 1
    plain(batch).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("placement", ["nvme", "infinity-nvme"])
def test_what_is_kept_of_a_gradient_keeps_its_values(tmp_path: Path, placement: str) -> None:
    """A view of it, too, while the next gradients are made; and the memory is free when it goes."""
    _, model = twins(tmp_path, placement=placement)
    call = torch.compile(model, backend="zinf")
    kept, values = [], []
    for _ in range(3):
        call(x()).backward()
        kept += [model.layers[0].weight.grad.detach(), model.layers[1].bias.grad[:3]]
        values += [tensor.full_tensor() for tensor in kept[-2:]]
        model.zero_grad()
    assert all(map(torch.equal, (tensor.full_tensor() for tensor in kept), values))
    assert not torch.equal(values[0], values[2])
    kept.clear()
    call(x()).backward()
    model.zero_grad()
    assert_nothing_leaked(model)


def test_the_schedule_shows_packs(tmp_path: Path) -> None:
    _, model = twins(tmp_path)
    call = torch.compile(model, backend="zinf")
    with zinf_fx.record(model) as recording:
        call(x()).backward()
    (plan,) = recording.plans
    (tile,) = plan.tiles
    assert [member.name for member in tile.members][:2] == ["layers.0.weight", "layers.0.bias"]
    assert tile.label == "layers.0.weight and 8 others"
    assert {event.kind for event in plan.graph("backward").events} >= {"wait", "reduce_scatter", "offload"}


def test_groups_with_other_options_share_packs(tmp_path: Path) -> None:
    plain, model = twins(tmp_path)

    def grouped(net: nn.Module) -> list[dict[str, Any]]:
        decayed = [p for p in net.parameters() if p.dim() > 1]
        return [
            {"params": decayed, "weight_decay": 0.1},
            {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 1e-2},
        ]

    sides = [
        (plain, plain, torch.optim.AdamW(grouped(plain), fused=True)),
        (model, torch.compile(model, backend="zinf"), zinf_fx.optim.AdamW(grouped(model))),
    ]
    for _ in range(3):
        batch = x()
        for side in sides:
            one_step(*side, batch)
    assert_equal(model, plain)
    optimizer = sides[1][2]
    optimizer.finish()
    before = transfers(model)
    one_step(*sides[1], x())
    optimizer.finish()
    assert transfers(model) - before <= 12


def test_each_kind_of_device_has_packs_of_its_own_size() -> None:
    """Of what is copied to a device with memory of its own, more moves together."""
    sizes = {"a": "cpu", "b": "cpu", "c": "cpu", "x": "meta", "y": "meta", "z": "meta"}
    parameters = {name: nn.Parameter(torch.empty(1 << 19, device=device)) for name, device in sizes.items()}
    forms = {name: Form.of(parameter) for name, parameter in parameters.items()}
    configs = dict.fromkeys(sizes, zinf_fx.Config(placement="nvme"))
    for names in ("abcxyz", "xyzabc"):
        packs = packs_of({name: parameters[name] for name in names}, forms, configs)
        assert sorted(packs) == [["a", "b"], ["x", "y", "z"]]


class Side:
    """Holds a model in training: a plain one, or one that is stored with `options`. It has two optimizers."""

    def __init__(self, options: dict[str, Any] | None, model: nn.Module | None = None) -> None:
        if model is None:
            model = training.model()
            if options is not None:
                zinf_fx.offload(model, **options)
        self.model, self.run = model, model if options is None else torch.compile(model, backend="zinf")
        second = model.norms[0].weight
        first = [parameter for parameter in model.parameters() if parameter is not second]
        kinds = torch.optim if options is None else zinf_fx.optim
        self.optimizers = kinds.AdamW(first, lr=1e-2, fused=True), kinds.SGD([second], lr=0.1, momentum=0.9, fused=True)
        self.losses: list[float] = []

    def train(self, batches: Sequence, *, accumulate: bool = False) -> None:
        """Step for each batch; or once for all, of which all backward passes but the last don't synchronise."""
        for number, batch in enumerate(batches, start=1):
            with zinf_fx.no_sync() if accumulate and number < len(batches) else nullcontext():
                loss = self.run(*batch)
                loss.backward()
            self.losses.append(loss.item())
            if not accumulate or number == len(batches):
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        """Return parameters, and their states."""
        tensors = list(self.model.parameters())
        for optimizer in self.optimizers:
            states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
            tensors += [state[name] for state in states for name in sorted(state)]
        return [t.full_tensor() if isinstance(t, StoredTensor) else t for t in tensors]


def accumulated(options: dict[str, Any] | None, batches: Sequence) -> Side:
    """Accumulate with and without synchronisation; one gradient is dropped in between, so that its pack arrives in
    parts."""
    side = Side(options)
    side.train(batches, accumulate=True)
    side.run(*batches[0]).backward()
    side.model.norms[1].weight.grad = None
    side.train(batches[1:], accumulate=True)
    return side


def partly_frozen(options: dict[str, Any] | None, batches: Sequence) -> Side:
    """One parameter is frozen for some steps, and another written to by hand."""
    side = Side(options)
    for frozen in (False, True, False):
        side.model.layers[1].weight.requires_grad_(not frozen)
        side.train(batches[:2])
        with torch.no_grad():
            side.model.layers[0].bias.mul_(2)
    return side


def built_and_loaded(options: dict[str, Any] | None, batches: Sequence) -> Side:
    """Return a model that is built piece by piece, whose parameters don't lie side by side, and takes over another
    one's states from a file."""
    first = Side(options)
    first.train(batches)
    with nullcontext() if options is None else zinf_fx.offloading(**options):
        model = training.Model()
    model.load_state_dict(first.model.state_dict())
    side = Side(options, model)
    for mine, theirs in zip(side.optimizers, first.optimizers, strict=True):
        torch.save(theirs.state_dict(), file := io.BytesIO())
        file.seek(0)
        mine.load_state_dict(torch.load(file, weights_only=True))
    side.train(batches)
    side.losses = first.losses + side.losses
    return side


Scenario = Callable[[dict[str, Any] | None, Sequence], Side]


def same_with_packs(rank: int, scenario: Scenario, placement: object) -> None:
    """Assert that a scenario gives with packs what it does in plain PyTorch or, on several ranks, without them: losses,
    and parameters with their states."""
    batches = [batch for (batch,) in training.batches(3, rank, 1)]
    without = None if training.world_size() == 1 else {"placement": placement, "pack": None}
    plain = scenario(without, batches)
    torch.compiler.reset()
    packed = scenario({"placement": placement, "pack": "auto"}, batches)
    assert packed.losses == plain.losses
    mine, theirs = packed.values(), plain.values()
    assert len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize(
    ("size", "scenario", "placement"),
    [
        *((1, scenario, "nvme") for scenario in (accumulated, partly_frozen, built_and_loaded)),
        (2, accumulated, "nvme"),
        slow(2, partly_frozen, "zero-2"),
        *(
            slow(2, scenario, placement)
            for scenario in (accumulated, partly_frozen, built_and_loaded)
            for placement in ("zero-1", "zero-3", "infinity-nvme")
        ),
    ],
)
def test_single_parameters_of_packs_are_what_they_are_without(size: int, scenario: Scenario, placement: str) -> None:
    on_ranks(size, same_with_packs, scenario, placement)


def test_clipped_gradients(tmp_path: Path) -> None:
    plain, model = twins(tmp_path)
    sides = zip((plain, torch.compile(model, backend="zinf")), optimizers(plain, model), strict=True)
    for call, optimizer in sides:
        torch.manual_seed(3)
        for _ in range(2):
            for _ in range(3):
                call(x()).backward()
            torch.nn.utils.clip_grad_norm_(call.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, msg=name)  # norms are summed in another order


def test_low_precision_parameters_have_masters_side_by_side(tmp_path: Path) -> None:
    """They have them as parameters that move by themselves, with states of low precision too."""
    torch.manual_seed(0)
    net = Net().to(torch.bfloat16)
    losses: dict[object, list[Tensor]] = {}
    for pack in (None, "auto"):
        model = zinf_fx.offload(copy.deepcopy(net), store=tmp_path, placement="nvme", pack=pack)
        optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2, state_dtype=torch.bfloat16)
        call = torch.compile(model, backend="zinf")
        torch.manual_seed(1)
        losses[pack] = []
        for step in range(4):
            loss = call(x().to(torch.bfloat16))
            losses[pack].append(loss.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                with torch.no_grad():  # what others write to one parameter is taken over into its master
                    model.layers[1].bias.add_(0.25)
    assert all(map(torch.equal, losses[None], losses["auto"]))


def test_a_member_changed_between_forward_and_backward(tmp_path: Path) -> None:
    _, model = twins(tmp_path)
    loss = torch.compile(model, backend="zinf")(x())
    with torch.no_grad():
        model.layers[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_member_changed_by_hand_is_seen(tmp_path: Path) -> None:
    plain, model = twins(tmp_path)
    call = torch.compile(model, backend="zinf")
    batch = x()
    for value in (0.0, 2.0):
        with torch.no_grad():
            for net in (plain, model):
                net.layers[1].bias.fill_(value)
        with torch.no_grad():
            assert torch.equal(call(batch), plain(batch))


def test_models_built_piece_by_piece_and_copies(tmp_path: Path) -> None:
    """What leaves while a model is built is brought together at the end; copies move in packs of several transfers."""
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    with zinf_fx.offloading(store=tmp_path, placement="nvme", pack="auto"):
        built = Net()
    assert len({parameter.stored.bytes.allocation for parameter in built.parameters()}) == 1
    with zinf_fx.offloading(store=tmp_path, placement="nvme", pack="auto"):
        converted = Net().to(torch.bfloat16)
    assert len({parameter.stored.bytes.allocation for parameter in converted.parameters()}) == 1
    for model in (built, copy.deepcopy(built)):
        reference = copy.deepcopy(plain)
        call, (plainly, optimizer) = torch.compile(model, backend="zinf"), optimizers(reference, model)
        for _ in range(2):
            batch = x()
            one_step(reference, reference, plainly, batch)
            one_step(model, call, optimizer, batch)
        assert_equal(model, reference)


class Blocks(nn.Module):
    """Layers that share one compiled graph."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(4))
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.blocks[0][0].weight

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = torch.relu(block(value))
        return self.tied(value).square().sum()


def test_layers_that_share_a_graph_and_a_tied_weight(tmp_path: Path) -> None:
    plain, model = twins(tmp_path, Blocks())
    assert model.tied.weight is model.blocks[0][0].weight
    for block in model.blocks:
        block.compile(backend="zinf")
    plainly, optimizer = optimizers(plain, model)
    for _ in range(3):
        batch = torch.randn(3, 16)
        one_step(plain, plain, plainly, batch)
        one_step(model, model, optimizer, batch)
        assert_equal(model, plain)


@pytest.mark.parametrize("size", [1, slow(2)])
def test_a_plan_with_packs_is_exported_and_followed(tmp_path: Path, size: int) -> None:
    with torch.device("meta"):
        model, tokens = training.Model(), torch.empty(3, 16, dtype=torch.long)
    plan = zinf_fx.export_plan(model, (tokens, tokens), placement="infinity-nvme", pack="auto", world_size=size)
    (pack,) = (tile for tile in plan.tiles if tile.members)
    assert len(pack.members) == 10
    if size > 1:
        assert pack.shard == sum(member.shard for member in pack.members)
        assert pack.gathered_nbytes > size * pack.shard_nbytes
    path = tmp_path / "plan.json"
    plan.save(path)
    assert zinf_fx.load_plan(path) == plan
    following = partial(training.differences, pack="auto", plan=path)
    for apart in on_ranks(size, following, ["infinity-nvme"], training.Loop(2)):
        assert apart == [0.0]


def test_counts_that_are_copied_for_the_update_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were loaded to the device, say, and the CPU updates."""
    monkeypatch.setattr("zinf_fx.optim.chunks.moved", lambda value, place: value.clone())
    plain, model = twins(tmp_path)
    theirs, ours = optimizers(plain, model)
    call = torch.compile(model, backend="zinf")
    for _ in range(4):
        batch = x()
        one_step(plain, plain, theirs, batch)
        one_step(model, call, ours, batch)
    assert_equal(model, plain)
    assert_same_states(ours, theirs)


def test_a_budget_that_packs_fit(tmp_path: Path) -> None:
    """A pack is at most a part of the budget; what is planned is enough."""
    plain, model = twins(tmp_path, Net(64, 12), host_memory="2MiB", chunk="64KiB")
    call, (plainly, optimizer) = torch.compile(model, backend="zinf"), optimizers(plain, model)
    with zinf_fx.record(model) as recording:
        for _ in range(3):
            batch = torch.randn(3, 64)
            one_step(plain, plain, plainly, batch)
            one_step(model, call, optimizer, batch)
    assert_equal(model, plain)
    (plan,) = recording.plans
    assert len(plan.tiles) > 1 and any(tile.members for tile in plan.tiles)
    assert all(tile.nbytes <= (2 << 20) // 64 for tile in plan.tiles if tile.members)
    assert model.scale.stored.tiers.host.peak <= 2 << 20


def test_a_member_that_is_updated_in_several_parts(tmp_path: Path) -> None:
    """It has more elements than the CPU converts at a time."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1100, 1000, bias=False), nn.LayerNorm(1000), nn.Linear(1000, 4)).to(torch.bfloat16)
    assert net[0].weight.numel() > AT_A_TIME and net[0].weight.nbytes < 4 << 20
    results = []
    for pack in (None, "auto"):
        model = zinf_fx.offload(copy.deepcopy(net), store=tmp_path, placement="nvme", pack=pack)
        optimizer, call = zinf_fx.optim.AdamW(model.parameters()), torch.compile(model, backend="zinf")
        torch.manual_seed(1)
        for _ in range(2):
            call(torch.randn(2, 1100, dtype=torch.bfloat16)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([parameter.full_tensor() for parameter in model.parameters()])
    assert all(map(torch.equal, *results))


def test_members_with_a_larger_parameter_between_them_are_updated_at_once(tmp_path: Path) -> None:
    layers = [nn.LayerNorm(1100), nn.Linear(1100, 1000, bias=False), nn.LayerNorm(1000), nn.Linear(1000, 4)]
    plain, model = twins(tmp_path, nn.Sequential(*layers))
    assert model[0].weight.stored.bytes.allocation is model[3].bias.stored.bytes.allocation
    (plainly, optimizer), call = optimizers(plain, model), torch.compile(model, backend="zinf")
    moved = 0
    for _ in range(2):
        batch = torch.randn(2, 1100)
        one_step(plain, lambda some: plain(some).square().sum(), plainly, batch)
        call(batch).square().sum().backward()
        before = transfers(model)
        optimizer.step()
        optimizer.finish()
        moved = transfers(model) - before
        optimizer.zero_grad()
    assert_equal(model, plain)
    # One pack, and the larger one in two pieces: each is read with its gradient and two states, and three are written.
    assert moved <= 24, moved


class Ending:
    """Tiers with work in the background that is over as soon as somebody has looked."""

    def __init__(self) -> None:
        self.settled: list[object] = []
        self._looks = iter([SimpleNamespace(settle=self.settled.append)])

    def check_process(self) -> None:
        pass

    @property
    def background(self) -> object:
        return next(self._looks, None)


def test_work_in_the_background_may_be_over_at_any_moment() -> None:
    pack, tiers = object.__new__(StoredTile), Ending()
    member = SimpleNamespace(key=1, shard=SimpleNamespace(refreshing=None))
    pack._every_tiers, pack._storages = {tiers}, [lambda: member]
    pack.settled()
    assert tiers.settled == [frozenset([1])]
