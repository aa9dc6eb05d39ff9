"""A step runs the chunks that its plan has, in an order that the plan's events allow."""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from followed import followed_plans
from gate import slow
from torch import nn

import zinf_fx
from zinf_fx.config import LEAST_CHUNK
from zinf_fx.optim.chunk_queue import ChunkMemory
from zinf_fx.optim.chunks import ChunkUpdate, OpenChunk
from zinf_fx.optim.slices import OpenSlice
from zinf_fx.plan.plan import Plan

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from gpt import GPT, GPTConfig

Training = tuple[nn.Module, tuple[torch.Tensor, ...]]
"""A model and its inputs."""

ChunkElements = list[tuple[str, int, int]]
"""The parameters of a chunk, and of each the first element and how many elements the chunk has."""


class _Recorded:
    """The chunks that a model's steps run, and what happens to them.

    Attributes:
        chunks: in the order in which they are opened.
        events: ("read_states", "update" or "write_states", number of the chunk), in order.
    """

    def __init__(self, model: nn.Module, patch: pytest.MonkeyPatch) -> None:
        self._names = {parameter.stored.key: name for name, parameter in model.named_parameters()}
        self.chunks: list[ChunkElements] = []
        self.events: list[tuple[str, int]] = []
        self._written: dict[int, int] = {}  # by slice, the number of its chunk
        open_chunk, update, store = ChunkMemory.open, ChunkUpdate.run, OpenSlice.store

        def opened(memory: ChunkMemory, chunk: object) -> OpenChunk:
            result = open_chunk(memory, chunk)
            self._written.update((id(opened_slice), result.number) for opened_slice in result.slices)
            self.chunks.append(self._elements_of(result))
            self.events.append(("read_states", result.number))
            return result

        def updated(step: ChunkUpdate, chunk: OpenChunk, *arguments: object) -> None:
            self.events.append(("update", chunk.number))
            update(step, chunk, *arguments)

        def stored(written: OpenSlice, unscaled: bool) -> None:
            self.events.append(("write_states", self._written[id(written)]))
            store(written, unscaled)

        patch.setattr(ChunkMemory, "open", opened)
        patch.setattr(ChunkUpdate, "run", updated)
        patch.setattr(OpenSlice, "store", stored)

    def _elements_of(self, chunk: OpenChunk) -> ChunkElements:
        slices = [opened_slice.states for opened_slice in chunk.slices]
        members = [pair for states in slices for pair in zip(states.parameters, states.elements, strict=True)]
        return [(self._names[member.stored.key], part.start, len(part)) for member, part in members]

    def clear(self) -> None:
        self.chunks.clear()
        self.events.clear()


def planned_chunks(plan: Plan) -> list[ChunkElements]:
    def name_of(tile: int, member: int) -> str:
        return plan.tiles[tile].members[member].name if plan.tiles[tile].members else plan.tiles[tile].name

    return [
        [(name_of(part.tile, part.member), part.start, part.count) for part in chunk.slices]
        for chunk in plan.update.chunks
    ]


def small() -> Training:
    """Return a GPT whose parameters move in packs."""
    tokens = torch.randint(0, 256, (1, 16))
    return GPT(GPTConfig(layers=4, hidden=64, heads=4, context=16)), (tokens, tokens)


def large() -> Training:
    """Matrices that are several chunks each."""
    layers = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.Linear(512, 8))
    return layers, (torch.randn(2, 512),)


class Backwards(nn.Module):
    """Layers that are used in the opposite order of that in which they are stored."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = layer(x).relu()
        return x


def backwards() -> Training:
    return Backwards(), (torch.randn(2, 512),)


def train(model: nn.Module, inputs: tuple[torch.Tensor, ...], optimizer: zinf_fx.optim.AdamW) -> None:
    output = model(*inputs)
    (output if output.dim() == 0 else output.square().mean()).backward()
    optimizer.step()
    optimizer.finish()
    optimizer.zero_grad()


CASES = [*itertools.product((torch.float32, torch.bfloat16), (small, large, backwards), ("host", "nvme"))]
IN_THE_GATE = (
    (torch.float32, small, "nvme"),
    (torch.bfloat16, large, "nvme"),
    (torch.bfloat16, backwards, "nvme"),
    (torch.float32, backwards, "host"),
)


@pytest.mark.parametrize(
    ("dtype", "make", "placement"), [case if case in IN_THE_GATE else slow(*case) for case in CASES]
)
def test_a_step_runs_the_chunks_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Training], placement: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    inputs = tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs)
    pack = "auto" if make is small else None
    model = zinf_fx.offload(model.to(dtype), store=tmp_path, placement=placement, chunk=LEAST_CHUNK, pack=pack)
    optimizer, recorded = zinf_fx.optim.AdamW(model.parameters()), _Recorded(model, monkeypatch)
    compiled = torch.compile(model, backend="zinf")
    with followed_plans(model) as plans:
        train(compiled, inputs, optimizer)
    (plan,) = plans
    chunks = planned_chunks(plan)
    assert len(chunks) > plan.regions.chunk_count
    assert placement == "host" or any(tile.members for tile in plan.tiles) == (make is small)
    for step in range(2):
        if step:
            recorded.clear()
            train(compiled, inputs, optimizer)
        if step and placement == "host":  # updated where they are, in no chunks
            assert not recorded.chunks
        else:
            assert recorded.chunks == chunks
            check_order(plan, recorded.events)


def check_order(plan: Plan, executed: list[tuple[str, int]]) -> None:
    """Check that a chunk is read, updated and written in this order, chunks are updated in the plan's order, and
    nothing is read before the updates that the plan has before it."""
    updates = [event.chunk for event in plan.update.events if event.kind == "update"]
    assert [chunk for kind, chunk in executed if kind == "update"] == updates
    planned_before: dict[int, int] = defaultdict(int)  # by the chunk that is read, how many updates come first
    ended = 0
    for event in plan.update.events:
        if event.kind == "read_states" and not event.prefetched:
            planned_before[event.chunk] = ended
        ended += event.kind == "update"
    read: set[int] = set()
    updated: list[int] = []
    for kind, chunk in executed:
        if kind == "read_states":
            assert len(updated) >= planned_before[chunk], f"chunk {chunk} was read early"
            read.add(chunk)
        elif kind == "update":
            assert chunk in read
            updated.append(chunk)
        else:
            assert updated[-1] == chunk
