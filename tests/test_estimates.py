"""What training takes, by plans: of a Transformer's dimensions and of modules, against the papers' statements, figures
worked out by hand, and plans of all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from gate import named, slow
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zinf_fx.config import PRESETS
from zinf_fx.cycles import no_search_for_cycles
from zinf_fx.errors import ConfigError
from zinf_fx.frontend import estimate as estimates
from zinf_fx.frontend.estimate import (
    Estimate,
    Figures,
    Optimizer,
    Planner,
    Prediction,
    Transformer,
    Workload,
    combined,
    estimate,
    of_module,
    of_transformer,
)
from zinf_fx.plan import hardware
from zinf_fx.plan.checkpoint_bytes import CheckpointSizes, Saving, checkpoints
from zinf_fx.plan.hardware import Disks, Hardware, Link, Memory

DGX_2 = hardware.load("dgx-2")
FOUR = replace(DGX_2, ranks_per_node=4)
RTX = hardware.load("rtx-4090")


def by_preset(estimated: Estimate) -> dict[str, Prediction]:
    return {prediction.preset: prediction for prediction in estimated.predictions}


def transformer(layers: int, hidden: int, heads: int, batch: int = 1, sequence: int = 1024, **fields) -> Workload:
    dimensions = {"layers": layers, "hidden": hidden, "heads": heads, "batch": batch, "sequence": sequence}
    return of_transformer(**dimensions, dtype="float16", **fields)


SMALL = transformer(9, 512, 8, sequence=128)
PER_LAYER = 12 * 512 * 512


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let estimates have these presets alone: `only(*presets)`."""
    return lambda *presets: monkeypatch.setattr(estimates, "PLACEMENTS", presets)


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(SMALL, FOUR, Optimizer())


# Plans of two depths


@pytest.fixture(scope="module")
def planner_of_all() -> Planner:
    with torch.device("meta"):
        built = {9: (Transformer(9, 512, 8, torch.float16, None), SMALL.built[5][1])}
    return Planner(replace(SMALL, built=built), FOUR, Optimizer())


@pytest.mark.parametrize("preset", named(("zero-2", "infinity-nvme", "infinity-cpu", "nvme"), {"infinity-nvme"}))
def test_what_two_depths_say_is_what_a_plan_of_all_layers_says(planner: Planner, planner_of_all: Planner, preset: str):
    with no_search_for_cycles():
        whole, extended = (candidate.figures(PRESETS[preset]) for candidate in (planner_of_all, planner))
    exact = ("flops", "disk", "saved", "gradients", "tiles", "activations", "living", "values")
    for name in exact:
        assert getattr(extended, name) == getattr(whole, name), name
    assert {name: movement.nbytes for name, movement in extended.moved.items()} == {
        name: movement.nbytes for name, movement in whole.moved.items()
    }
    assert extended.needed == pytest.approx(whole.needed, rel=0.01)
    assert extended.serial == pytest.approx(whole.serial, rel=1e-3)
    assert extended.overlapped == pytest.approx(whole.overlapped, rel=0.03)


def test_shallow_models_are_planned_as_they_are():
    assert [*transformer(7, 64, 1).built] == [7] and [*transformer(8, 64, 1).built] == [5, 7]
    assert [*transformer(12, 64, 1, interval=3).built] == [12]
    assert [*transformer(13, 64, 1, interval=3).built] == [9, 12]


# Of a layer. Bytes per parameter: 2 of parameters, 2 of gradients, 12 of optimizer states. The paper loads parameters
# for forward, for backward, and for the recomputation (section 4.1), which a plan has together with backward.
MOVED = {
    "dp": {"parameters, gradients: links": 2, "optimizer states: device": 2 * 12},
    "zero-1": {"parameters, gradients: links": 2 + 2, "optimizer states: device": 2 * 12 / 4},
    "zero-2": {"parameters, gradients: links": 2 + 2, "optimizer states: device": 2 * 12 / 4},
    "zero-3": {"parameters, gradients: links": 2 * 2 + 2, "optimizer states: device": 2 * 12 / 4},
    "zero-offload": {
        "parameters, gradients: links": 2 + 2,
        "parameters, gradients: host": 2 / 4,
        "optimizer states: host": 2 * 12 / 4,
    },
    "infinity-cpu": {
        "parameters, gradients: links": 2 * 2 + 2,
        "parameters, gradients: host": (2 * 2 + 2) / 4,
        "optimizer states: host": 2 * 12 / 4,
    },
    # The step reads the states, and writes them and the parameters.
    "infinity-nvme": {
        "parameters, gradients: links": 2 * 2 + 2,
        "parameters, gradients: host": (2 * 2 + 2) / 4,
        "parameters, gradients: NVMe": 2 * 2 / 4,
        "optimizer states: host": 2 * 12 / 4,
        "optimizer states: NVMe": (2 * 12 + 2) / 4,
    },
    # Gradients are written in backward and read by the step, besides.
    "nvme": {
        "parameters, gradients: links": 2 * 2 + 2,
        "parameters, gradients: host": (2 * 2 + 2) / 4,
        "parameters, gradients: NVMe": (2 * 2 + 2) / 4,
        "optimizer states: host": 2 * 12 / 4,
        "optimizer states: NVMe": (2 * 12 + 2 + 2) / 4,
    },
}
# Bytes per parameter on the device, in host memory and on NVMe (ZeRO, section 5; ZeRO-Infinity, table 2).
LIVING = {
    "dp": (16, 0, 0),
    "zero-1": (4 + 12 / 4, 0, 0),
    "zero-2": (2 + 14 / 4, 0, 0),
    "zero-3": (16 / 4, 0, 0),
    "zero-offload": (2, 14 / 4, 0),
    "infinity-cpu": (0, 16 / 4, 0),
    "nvme": (0, None, 16 / 4),  # host memory has chunks of the optimizer's
    "infinity-nvme": (0, None, 14 / 4),
}


def of_a_layer(planner: Planner, preset: str) -> Figures:
    with no_search_for_cycles():
        fewer, more = (planner.planned(depth, PRESETS[preset], None) for depth in (5, 7))
    return combined(fewer, more, lambda low, high: (high - low) / 2)


# Others move through the links as these, or have one of their tiers.
OF_THE_GATE = {"zero-3", "infinity-nvme"}


@pytest.mark.parametrize("preset", named(MOVED, OF_THE_GATE))
def test_a_layer_moves_and_has_what_the_papers_say(planner: Planner, preset: str):
    layer = of_a_layer(planner, preset)
    assert {name: moved.nbytes / PER_LAYER for name, moved in layer.moved.items() if moved.nbytes} == MOVED[preset]
    device, host, nvme = LIVING[preset]
    assert layer.living - layer.activations == device * PER_LAYER
    assert host is None or layer.living_on_host == host * PER_LAYER
    assert layer.needed["nvme"] == nvme * PER_LAYER


LARGE = transformer(50, 4096, 16)
# Bytes of host memory per parameter of a rank, by the placements of `LIVING`, and those of which chunks have buffers.
IN_HOST_MEMORY = {
    "dp": (0, 0),
    "zero-2": (0, 0),
    "zero-3": (0, 0),
    "zero-offload": (2 + 12, 0),
    "infinity-cpu": (2 + 2 + 12, 0),
    "infinity-nvme": (2, 2 + 12),
    "nvme": (0, 2 + 2 + 12),
}


@pytest.fixture(scope="module", params=[SMALL, pytest.param(LARGE, marks=pytest.mark.slow)], ids=["small", "large"])
def planner_for_16(request: pytest.FixtureRequest) -> Planner:
    return Planner(request.param, DGX_2, Optimizer())


@pytest.mark.parametrize("preset", named(IN_HOST_MEMORY, {"infinity-nvme"}))
def test_host_memory_beside_a_device_with_memory_of_its_own(planner_for_16: Planner, preset: str):
    """States that live there, and what the CPU's update takes: of fp32 gradients, as many as eight pieces of 2^20
    elements, and three chunks of 2^23 elements of what is on NVMe. Shards are gathered on the device."""
    with no_search_for_cycles():
        needed = planner_for_16.figures(PRESETS[preset]).needed["host"]
    of_a_rank = planner_for_16.parameters() // 16
    lives, read = IN_HOST_MEMORY[preset]
    updated_by_cpu = lives or read
    of_step = (8 * 2**20 * 4 if updated_by_cpu else 0) + read * min(of_a_rank, 3 * 2**23)
    if not read:
        assert needed == lives * of_a_rank + of_step
    else:  # and, while there are chunks, shards on their way to the device or gradients on their way to NVMe
        assert 0 <= needed - lives * of_a_rank - of_step <= 2 * of_a_rank


@pytest.mark.parametrize(("preset", "messages"), [slow("dp", 2), slow("zero-2", 2), ("zero-3", 3)])
def test_the_links_take_as_long_as_the_papers_volumes(planner: Planner, preset: str, messages: int):
    """A ring sends 3/4 of the message of each collective, and an all-reduce has two (ZeRO, section 7)."""
    layer = of_a_layer(planner, preset)
    seconds = layer.moved["parameters, gradients: links"].seconds
    started = seconds - messages * 2 * PER_LAYER * 3 / 4 / FOUR.in_node.bandwidth
    assert 0 < started < 3 * 4 * FOUR.in_node.latency  # for four parameters, some of them in packs


def test_disk_bytes_of_a_layer(planner: Planner):
    """16 bytes read and 14 written, as benchmarks/train_step.py counts them in a bf16 model with fp32 Adam."""
    disk = of_a_layer(planner, "infinity-nvme").disk
    assert (4 * disk.nvme_to_host, 4 * disk.host_to_nvme) == (16 * PER_LAYER, 14 * PER_LAYER)


def test_work_and_activations_of_a_layer(planner: Planner):
    """Equation 3 and attention, less the last product of a layer, which the recomputation has no use for; equation 1,
    and the state of PyTorch's random numbers."""
    layer = of_a_layer(planner, "zero-3")
    tokens, hidden = 128, 512
    attention = 2 * 2 * tokens * tokens * hidden
    assert layer.flops == 8 * tokens * PER_LAYER - 2 * tokens * 4 * hidden**2 + 4.5 * attention
    assert layer.activations == pytest.approx(2 * tokens * hidden, rel=0.05)


# The model


@pytest.mark.slow
def test_a_transformer_of_a_trillion_parameters(only):
    """It is the third row of ZeRO-Infinity's figure 2a, for 4 sequences per device."""
    only("nvme")
    estimated = estimate(transformer(128, 25600, 256, 4), DGX_2)
    parameters = 12 * 128 * 25600**2
    assert estimated.parameters == parameters
    assert estimated.states == {"parameters": 2 * parameters, "gradients": 2 * parameters, "optimizer": 12 * parameters}
    (prediction,) = estimated.predictions
    assert prediction.memory["nvme"] == 16 * parameters
    assert 0.9 < prediction.step.flops / (8 * 4 * 1024 * parameters) < 1
    assert prediction.disk_written == 16 * parameters
    assert prediction.step.activations == pytest.approx(2 * 4 * 1024 * 25600 * 128, rel=0.15)  # with the last layer's


def test_adapters_beside_a_frozen_transformer(only):
    """Figures are by hand, for 2 layers of 64: 12 x 2 x 64^2 frozen parameters in nf4, and adapters of rank 4 in
    fp32."""
    only("infinity-nvme")
    dimensions = {"layers": 2, "hidden": 64, "heads": 2, "batch": 3, "sequence": 5}
    estimated = estimate(of_transformer(**dimensions, lora=4, frozen="nf4"), RTX)
    base, adapters = 12 * 2 * 64**2, 2 * 4 * ((64 + 3 * 64) + (64 + 64) + (64 + 4 * 64) + (4 * 64 + 64))
    assert estimated.parameters == base + adapters
    assert estimated.states["parameters"] == base * (0.5 + 4 / 64) + 4 * adapters
    assert (estimated.states["gradients"], estimated.states["optimizer"]) == (4 * adapters, 8 * adapters)
    (prediction,) = estimated.predictions
    assert prediction.step.saved.parameters == {"uint8": base * 0.5625, "float32": 4 * adapters}
    # What is frozen is not written: blocks of the states, and of the weights.
    assert 12 * adapters <= prediction.disk_written < prediction.disk_read
    with pytest.raises(ConfigError, match="all are trained: give --lora RANK"):
        of_transformer(**dimensions, frozen="nf4")


def test_other_states(only):
    only("dp")
    two = transformer(2, 64, 2, sequence=32)
    parameters = 12 * 2 * 64**2
    plain, more, few = (
        estimate(workload, RTX, optimizer=optimizer)
        for workload, optimizer in (
            (two, Optimizer()),
            (two, Optimizer(16)),
            (
                replace(
                    two,
                    dtype="bfloat16",
                    built=of_transformer(layers=2, hidden=64, heads=2, batch=1, sequence=32).built,
                ),
                Optimizer(None, "8bit", "split"),
            ),
        )
    )
    assert [estimated.states["optimizer"] / parameters for estimated in (plain, more)] == [12, 16]
    assert more.predictions[0].memory["device"] - plain.predictions[0].memory["device"] == 4 * parameters
    # Scales are 8 bytes for 256 elements, and of a split master, a byte has a bit for each of eight.
    assert few.states["optimizer"] == parameters * (2 + 2 + 8 / 256 + 1 / 8)
    with pytest.raises(ConfigError, match=r"'split' is for bfloat16 parameters, and these are torch\.float16"):
        estimate(two, RTX, optimizer=Optimizer(master_dtype="split"))


class TwoLinears(nn.Module):
    """Applies `up` and its activation, then `down`; the loss is the mean."""

    def __init__(self, dtype: torch.dtype = torch.float32, checkpointed: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256, bias=False, dtype=dtype)
        self.down = nn.Linear(256, 64, bias=False, dtype=dtype)
        self.register_buffer("scale", torch.ones(64, dtype=dtype))
        self.checkpointed = checkpointed

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).sin()) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return y.mean()


COUNT, FORWARD = 2 * 64 * 256, 2 * 4 * 2 * 64 * 256  # parameters, and FLOP for 4 rows


def of_two_linears(model: nn.Module, dtype: torch.dtype = torch.float32, **fields) -> Estimate:
    return estimate(of_module(model, (torch.zeros(4, 64, dtype=dtype),), name="x", **fields), RTX)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_module(only, device: str):
    only("dp")
    with torch.device(device):
        model, inputs = TwoLinears(), {"x": torch.zeros(4, 64)}
    estimated = estimate(of_module(model, inputs, name="x"), RTX)
    assert estimated.parameters == COUNT and estimated.workload.dtype == "float32"
    assert estimated.states == {"parameters": 4 * COUNT, "gradients": 4 * COUNT, "optimizer": 8 * COUNT}
    step = estimated.predictions[0].step
    assert step.flops == FORWARD + 2 * FORWARD - FORWARD // 2  # the inputs need no gradient
    # Saved: what sin and down work on; not the input, the weights or the buffer, which exist anyway.
    assert 4 * 4 * (256 + 256) <= step.activations <= 4 * (4 * (256 + 256) + 64)
    repeated = of_two_linears(TwoLinears(checkpointed=True)).predictions[0].step
    # What the recomputation needs: up, not down, whose result no gradient depends on.
    assert repeated.flops == step.flops + FORWARD // 2 and repeated.activations < 4 * 4 * 256


def test_frozen_parameters_have_no_gradients_and_no_states(only):
    only("dp")
    model = TwoLinears(torch.bfloat16)
    model.up.requires_grad_(False)
    estimated = of_two_linears(model, torch.bfloat16)
    assert estimated.workload.dtype == "bfloat16"
    assert estimated.states == {"parameters": 2 * COUNT, "gradients": COUNT, "optimizer": 6 * COUNT}
    packed = of_two_linears(model, torch.bfloat16, frozen="int8")
    assert estimated.states["parameters"] - packed.states["parameters"] == 256 * (2 * 64 - 68)


def test_tied_parameters_are_counted_once(only):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(16, 8)
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(self.tokens(tokens)), tokens)

    only("dp")
    estimated = estimate(of_module(Tied(), (torch.zeros(4, dtype=torch.long),), name="x"), RTX)
    assert estimated.parameters == 16 * 8 and estimated.states["parameters"] == 4 * 16 * 8


def test_a_model_in_several_graphs_has_what_all_have(only):
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = TwoLinears(), TwoLinears()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first.block(x)
            torch._dynamo.graph_break()
            return self.second(x)

    only("dp")
    estimated = of_two_linears(Broken())
    assert estimated.states == {"parameters": 8 * COUNT, "gradients": 8 * COUNT, "optimizer": 16 * COUNT}
    assert estimated.predictions[0].step.flops == 6 * FORWARD - FORWARD // 2


def test_a_model_that_trains_nothing():
    with pytest.raises(ConfigError, match="x trains nothing"):
        of_two_linears(TwoLinears().requires_grad_(False))


# What fits


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "batch", "fitting", "too_small"),
    [
        slow(40, 1536, 16, 1, "dp", None),  # 1.4B
        slow(50, 4096, 16, 1, "zero-2", "zero-1"),  # 10B
        slow(64, 4096, 16, 1, "zero-offload", "zero-2"),  # 13B
        slow(98, 4096, 32, 1, "zero-3", "zero-offload"),  # 20B
        slow(128, 25600, 256, 5, "nvme", "infinity-cpu"),  # 1T
    ],
)
def test_the_largest_models_of_figure_6a(
    only, layers: int, hidden: int, heads: int, batch: int, fitting: str, too_small: str | None
):
    """Each of the strategies of ZeRO-Infinity's table 2 on one DGX-2, with the models of the appendix's table 1.

    The model of ZeRO-Inf-CPU is left out: the table calls 125 layers of 8192 a model of 70B, and they are 100B.
    """
    only(*filter(None, (too_small, fitting)))
    estimated = estimate(transformer(layers, hidden, heads, batch), DGX_2)
    assert by_preset(estimated)[fitting].fits and estimated.chosen is by_preset(estimated)[fitting]


@pytest.mark.slow
def test_models_of_section_5_1_1(only):
    """Model states of 100T parameters fit in 96 nodes."""
    only("nvme")
    workload = transformer(315, 160 << 10, 1024)
    (huge,) = estimate(workload, replace(DGX_2, nodes=96), optimizer=Optimizer(16)).predictions
    assert huge.memory["nvme"] * 96 == pytest.approx(240 * 315 * (160 << 10) ** 2, rel=1e-4)  # shards are padded
    assert "nvme" not in huge.exceeded


@pytest.mark.slow
def test_checkpoints_leave_the_device_only_when_they_must_and_parameters_do(only):
    only("infinity-cpu")
    small = replace(FOUR, device=replace(FOUR.device, capacity=96 << 20))
    few, many = (estimate(transformer(9, 512, 8, batch, sequence=128), small).predictions[0] for batch in (1, 16))
    assert (few.activations, many.activations) == ("device", "host") and few.fits and many.fits
    assert many.step.living < few.step.living
    only("zero-3")
    (kept,) = estimate(transformer(9, 512, 8, 64, sequence=128), small).predictions
    assert kept.activations == "device" and kept.exceeded == ("device",)


def test_transfers_and_tiles_are_as_small_as_they_must_be(only):
    """A device has little room to work in, as in figure 6b."""
    only("infinity-cpu")
    wide = transformer(1, 1024, 8, sequence=32)
    (whole,) = estimate(wide, FOUR).predictions
    assert whole.step.tiles == 1
    less = whole.memory["device"] * 3 // 4
    (fewer,) = estimate(wide, replace(FOUR, device=replace(FOUR.device, capacity=less))).predictions
    assert fewer.fits and whole.memory["device"] > less >= fewer.memory["device"]
    (none,) = estimate(wide, replace(FOUR, device=replace(FOUR.device, capacity=1 << 16))).predictions
    assert none.exceeded == ("device",)


def test_nothing_fits(only):
    only("infinity-cpu", "nvme")
    tiny = replace(FOUR, nvme=replace(FOUR.nvme, capacity=1 << 20), host=replace(FOUR.host, capacity=1 << 20))
    estimated = estimate(transformer(2, 512, 8, sequence=32), tiny)
    assert estimated.chosen is None and estimated.needs == () and estimated.saves is None
    assert [prediction.exceeded for prediction in estimated.predictions] == [("host",), ("host", "nvme")]


# Time and wear, on a machine whose figures are round


ROUND = Hardware(
    name="round",
    nodes=1,
    ranks_per_node=2,
    achievable=0.5,
    peak={"float16": 2e9},
    device=Memory(10**9, 500e6, 500e6),
    host=Memory(10**9, 200e6, 200e6),
    nvme=Disks(10**9, 100e6, 50e6, endurance=10**15),
    upload=Link(25e6, 1e-6),
    download=Link(50e6, 1e-6),
    in_node=Link(75e6, 1e-6),
    between_nodes=Link(1e6, 1e-6),
)
LOAD = transformer(2, 64, 2, sequence=32)
LOADED = 12 * 2 * 64**2


def test_a_step_on_a_round_machine(only):
    only("nvme")
    (prediction,) = estimate(LOAD, ROUND).predictions
    step = prediction.step
    assert step.overlapped <= step.serial == pytest.approx(sum(step.seconds.values()))
    assert step.seconds["compute"] > step.flops / 1e9
    # Half of 100 bytes per second and of 50.
    states = step.moved["optimizer states: NVMe"]
    assert states.seconds == pytest.approx(14 / 2 * LOADED / 50e6 + 14 / 2 * LOADED / 25e6)
    assert prediction.disk_written == 16 * LOADED
    assert prediction.written_per_day == pytest.approx(16 * LOADED / step.overlapped * 86400)
    assert prediction.days == pytest.approx(10**15 / prediction.written_per_day)
    unknown = replace(ROUND, nvme=replace(ROUND.nvme, endurance=None))
    (worn,) = estimate(LOAD, unknown).predictions
    assert worn.days is None and worn.written_per_day > 0


def test_checkpoints_on_disk(only):
    """There are 2 bytes for each parameter, and 12 of states, in a node whose drives write 50 MB per second."""
    only("infinity-cpu", "infinity-nvme")
    day, whole = 86400, 14 * LOADED
    saves = estimate(LOAD, ROUND, preset="infinity-nvme", every=day / 10, kept=4).saves
    assert saves.of_one == CheckpointSizes({"float16": 2 * LOADED}, {"float32": 12 * LOADED}, in_store=whole)
    assert (saves.every, saves.kept) == (day / 10, 4)
    days = pytest.approx(10**15 / (10 * whole))
    assert saves.copied == Saving(whole, whole / 50e6, 5 * whole, pytest.approx(10 * whole), days)
    assert saves.by_generations == Saving(0, 0.0, 4 * whole, 0.0, None)
    states = estimate(LOAD, ROUND, preset="infinity-cpu").saves
    assert states.by_generations == states.copied  # nothing is in the store
    sizes = CheckpointSizes({"float16": 200}, {"float32": 1200}, 1200)
    slow = replace(ROUND, nvme=Disks(10**6, 100.0, 50.0, endurance=864_000_000))
    part = checkpoints(sizes, slow, every=day, kept=4).by_generations
    assert part == Saving(200, 4.0, 4 * 1200 + 5 * 200, 200.0, 4_320_000.0)
    cluster = checkpoints(replace(sizes, in_store=1400), replace(slow, nodes=2), every=day, kept=1).copied
    assert (cluster.seconds, cluster.on_disk, cluster.written_per_day) == (700 / 50, 2 * 1400, 700)


def test_collectives_of_several_nodes_see_the_link_between_them(only):
    only("zero-3")
    in_one_node, in_two_nodes = (estimate(LOAD, replace(ROUND, nodes=nodes)).predictions[0].step for nodes in (1, 2))
    inside, between = (step.moved["parameters, gradients: links"].seconds for step in (in_one_node, in_two_nodes))
    assert between == pytest.approx(inside * 75 * 3 / 2, rel=0.01)


def test_what_a_device_lacks_nothing_of_moves_nothing(only):
    only("dp")
    (prediction,) = estimate(LOAD, replace(ROUND, ranks_per_node=1)).predictions
    assert {*prediction.step.seconds} == {"compute", "optimizer states: device"}
    assert prediction.step.seconds["optimizer states: device"] == pytest.approx(24 * LOADED / 500e6)
    assert prediction.days is None and prediction.written_per_day == 0


# Bandwidth


@pytest.mark.slow
def test_bandwidths_are_those_of_section_4(only):
    """They are 68 GB/s for parameters at batch 1 and 50 %, and 1.23 TB/s for 16 bytes of states at batch 2 and 90 %."""
    only("nvme")
    cluster = replace(DGX_2, nodes=32)
    work = transformer(128, 25600, 256, 2)
    estimated = estimate(work, cluster, wanted=(0.5, 0.9), preset="nvme", optimizer=Optimizer(16))
    needs = {need.moved: need for need in estimated.needs}
    links = needs["parameters, gradients: links"]
    assert 2 * links.bandwidths[0.5] == pytest.approx(68.36e9, rel=0.1)
    states = needs["optimizer states: host"]
    assert states.bandwidths[0.9] * 512 == pytest.approx(1.2305e12, rel=0.1)
    assert needs["parameters, gradients: host"].intensity == pytest.approx(512 * links.intensity, rel=0.05)
    assert needs["parameters, gradients: host"].available == pytest.approx(3e9, rel=0.01)
    assert links.available == pytest.approx(70e9, rel=0.05)


@pytest.mark.parametrize("wanted", [0.0, 1.0, -0.5, 90.0])
def test_an_efficiency_is_a_share(wanted: float):
    with pytest.raises(ConfigError, match=f"efficiency={wanted:g} is not accepted: give numbers above 0 and below 1"):
        estimate(LOAD, ROUND, wanted=(wanted,))


def test_unknown_presets_and_dtypes():
    with pytest.raises(ConfigError, match="placement='zero-4' is unknown; accepted: 'dp', 'zero-1'"):
        estimate(LOAD, ROUND, preset="zero-4")
    with pytest.raises(ConfigError, match="round has no peak for bfloat16; it has: float16"):
        estimate(replace(LOAD, dtype="bfloat16"), ROUND)
