"""The plan as text: golden tables, names, widths."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn

from zinf_fx import Config
from zinf_fx.frontend.explain import plan_model
from zinf_fx.plan.memory.accounting import flows, phases, traffic
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import PROLOGUE, Event, GraphSchedule, MemoryRegions, Operator, Tile
from zinf_fx.plan.show import table
from zinf_fx.plan.show.names import GraphNames, abbreviate, module_of
from zinf_fx.plan.show.table import render
from zinf_fx.plan.update import update_of

MIB = 1 << 20
SHAPES = {"layers.0.up.weight": (1024, 256), "layers.0.up.bias": (1024,), "layers.1.up.weight": (512, 1024)}


def tiles(tier: str = "nvme", gradient_tier: str | None = None) -> tuple[Tile, ...]:
    return tuple(
        Tile(name, shape, torch.float32, tier, gradient_tier, state_tier=tier if gradient_tier else None)
        for name, shape in SHAPES.items()
    )


def hand_made(tier: str = "nvme") -> Plan:
    """Build two operators each way; distances are 1 everywhere, so that forward starts one tile's three transfers for
    backward."""
    transfers = ("fetch", "upload", "allgather")
    forward = (
        *(Event(kind, tile, PROLOGUE) for kind in transfers for tile in (0, 1)),
        *(Event(kind, 2, 0) for kind in transfers),
        Event("wait", 0, 0),
        Event("wait", 1, 0),
        Event("release", 0, 0),
        Event("release", 1, 0),
        *(Event(kind, 2, 1, for_backward=True) for kind in transfers),
        Event("wait", 2, 1),
        Event("release", 2, 1),
    )
    backward = (
        *(Event(kind, 2, PROLOGUE) for kind in transfers),
        *(Event(kind, 0, 0) for kind in transfers),
        Event("wait", 2, 0),
        Event("release", 2, 0),
        Event("reduce_scatter", 2, 0),
        Event("wait", 0, 1),
        Event("release", 0, 1),
        Event("reduce_scatter", 0, 1),
        Event("reduce_scatter", 1, 1),
        *(Event("offload", tile, 1) for tile in (2, 0, 1)),
    )
    linear, attention = "addmm", "mm, _scaled_dot_product_flash_attention_for_cpu_backward"
    plan = Plan(
        (
            GraphSchedule("forward", tiles(tier, "host"), (Operator(0, linear, 3), Operator(1, linear, 2)), forward),
            GraphSchedule("backward", tiles(tier, "host"), (Operator(0, "mm", 4), Operator(1, attention, 3)), backward),
        ),
        Config(placement={"parameters": tier, "gradients": "host", "optimizer": tier}, prefetch=(1, 1, 1)),
    )
    return replace(plan, update=update_of(plan))


class Tiny(nn.Module):
    """Has a tied embedding and head, a norm, a frozen layer, and a linear layer with bias."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).logsumexp(-1).mean()


def test_golden_of_a_hand_made_plan(golden):
    golden("table_hand_made.txt", render(hand_made()))


def test_golden_of_a_tiny_model(golden):
    with torch.device("meta"):
        model, tokens = Tiny(), torch.zeros(2, 8, dtype=torch.int64)
    (plan,) = plan_model(model, (tokens,), placement="infinity-nvme", pack=None).plans
    golden("table_tiny_training.txt", render(plan))
    options = {"placement": "infinity-cpu", "prefetch": None, "host_memory": "1MiB", "pack": None}
    with torch.no_grad():
        (plan,) = plan_model(model, (tokens,), **options).plans
    golden("table_tiny_inference.txt", render(plan, width=100))


def test_the_optimizers_step_has_a_line_per_chunk():
    plan = replace(hand_made(), regions=MemoryRegions(chunk_elements=1 << 18, chunk_count=4))
    plan = replace(plan, update=update_of(plan))
    text = render(plan)
    table = text[text.index("ADAM STEP: 4 chunks, at most 4 in memory at a time; sizes in KiB") :].splitlines()[2:8]
    assert "in backward" in table[0] and [line.split()[0] for line in table[2:]] == ["0", "1", "2", "3"]
    assert table[2].split()[1:] == ["0.up", "262,144", "3072.0", "3072.0", "0", "B"]
    assert "in backward" not in render(hand_made())
    assert "ADAM STEP" not in render(plan, operators=range(1))


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_the_text_fits_the_width(width: int):
    text = render(hand_made(), width=width)
    table = [line for line in text.splitlines() if line[:2].strip().isdigit() or line.startswith("--")]
    assert len(table) >= 6 and max(map(len, table)) <= max(width, 110)
    assert text.isascii() and not any(line.endswith(" ") for line in text.splitlines())


def test_paging_keeps_operator_numbers_and_says_what_is_shown():
    text = render(hand_made(), operators=range(1, 5))
    assert "FORWARD: 2 operators, shown are 1 to 1" in text and "prologue  " not in text
    assert [line.split()[0] for line in text.splitlines() if line[:2].strip().isdigit()] == ["1", "1"]
    beyond = render(hand_made(), operators=range(7, 9))
    assert "FORWARD: 2 operators, none in the range asked for (the last is 1)" in beyond


def test_a_module_stands_for_its_tiles_only_where_they_move_together():
    text = render(hand_made())
    waits, gradients = [line for line in text.splitlines() if line.startswith(" 0")], text.partition("BACKWARD")[2]
    assert "0.up: matmul" in waits[0]
    assert "1.up*" in text  # started by forward for backward
    assert "0.up" in gradients


def test_names_are_short_and_distinct():
    cases = {
        "blocks.0.attention.qkv": "0.qkv",
        "blocks.1.attention.qkv": "1.qkv",
        "blocks.0.self.query": "0.self.query",
        "blocks.0.cross.query": "0.cross.query",
        "encoder.3.mlp.up": "encoder.3.up",
        "decoder.3.mlp.up": "decoder.3.up",
        "bert.layer.0.attention.output.dense": "0.attention.output.dense",
        "bert.layer.0.output.dense": "0.output.dense",
        "bert.layer.0.intermediate.dense": "0.intermediate.dense",
        "a.b.c.same": "b.same",
        "a.x.c.same": "x.same",
        "x.y.twice": "x.y.twice",
        "y.x.twice": "y.x.twice",
        "norm": "norm",
        "features.0.mlp.2": "0.mlp.2",
        "layers.0.1": "layers.0.1",
        "0": "0",
        "": "",
    }
    assert abbreviate(cases) == cases
    assert module_of("blocks.0.up.weight") == "blocks.0.up" and module_of("scale") == "scale"


def test_bytes_in_flight_and_moved():
    plan = hand_made()
    forward, backward = plan.graphs
    first, bias, second = MIB, 4096, 2 * MIB
    assert [(f.fetched, f.device, f.host) for f in flows(plan, forward)] == [
        (first + bias, first + bias, 0),
        (second, first + bias + second, 0),
        (0, second, 0),  # what is started for backward finds the tile there
    ]
    assert [(f.fetched, f.device) for f in flows(plan, backward)] == [
        (0, second),
        (first, second + first + second),  # tile 2, tile 0, and the gradient of tile 2
        (0, first + second + first + bias),
    ]
    moved = traffic(plan, backward)
    assert (moved.nvme_to_host, moved.host_to_device, moved.device_to_host) == (first, second + first, 3 * MIB + 4096)
    adam = dict(phases(plan))["optimizer"]  # fp32: weight and two moments, read and written
    assert adam.nvme_to_host == adam.host_to_nvme == 3 * (3 * MIB + 4096)


def test_a_tile_that_waits_for_its_upload_is_in_host_memory():
    where = {"fetch": PROLOGUE, "upload": 0, "allgather": 0, "wait": 1, "release": 1}
    events = tuple(Event(kind, 0, operator) for kind, operator in where.items())
    graph = GraphSchedule("inference", tiles()[:1], (Operator(0, "", 1), Operator(1, "mm", 1)), events)
    plan = Plan((graph,), Config(placement="nvme"))
    assert [(f.device, f.host) for f in flows(plan, graph)] == [(0, MIB), (MIB, 0), (MIB, 0)]


@pytest.mark.parametrize(("tier", "moves"), [("host", ["host_to_device"]), ("device", [])])
def test_what_lives_in_memory_is_not_read(tier: str, moves: list[str]):
    plan = hand_made(tier)
    forward = dict(phases(plan))["forward"]
    assert [name for name in vars(forward) if getattr(forward, name)] == moves
    assert "Stages that move nothing in this placement: fetch" in render(plan)


@pytest.mark.parametrize("width", [60, 100, 160])
def test_a_table_is_laid_out_once_however_many_cells_are_tried(width: int):
    plan = hand_made()
    with mock.patch.object(table, "_layout", wraps=table._layout) as layout:
        render(plan, width=width)
    tables = [call.args for call in layout.call_args_list if "left" in call.kwargs]
    assert len(tables) == len(plan.graphs) + 1  # and the optimizer's step
    for header, rows in tables:  # the width that decides is that of what is printed
        laid_out = table._layout(header, rows, left=range(len(rows[0])))
        assert max(map(len, laid_out.splitlines())) == table._width_of(header, rows)


def test_a_graphs_names_are_worked_out_once_however_many_lines_it_has():
    """That takes time in proportion to its events."""
    with mock.patch.object(table, "GraphNames", side_effect=GraphNames) as names:
        render(hand_made())
    assert names.call_count == 2
