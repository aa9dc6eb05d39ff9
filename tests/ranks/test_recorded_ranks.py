"""Recordings of one of several ranks: its collectives, and files and processes with its number."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gate import slow
from launching import on_ranks
from training import batches, model

import zinf_fx
from zinf_fx.plan.hardware import load
from zinf_fx.plan.simulation.simulate import simulate_plan
from zinf_fx.plan.simulation.timeline import slices

LANES = ("all-gather", "reduce", "fetch", "offload")


def recorded(rank: int, placement: str) -> dict:
    """What a rank's recording says of its last step, and what plan and counters say of it."""
    torch._dynamo.reset()
    stored = zinf_fx.offload(model(), placement=placement)
    compiled = torch.compile(stored, backend="zinf")
    # What is still on its way to the disk would be copied, and not fetched.
    optimizer = zinf_fx.optim.AdamW(stored.parameters(), lr=1e-2, overlap=False)
    ranks = next(stored.parameters()).stored.shard.ranks
    ((batch,),) = batches(1, rank, 1)

    def step() -> None:
        compiled(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    sent = ranks.sent_bytes
    with zinf_fx.record(compiled) as recording:
        step()
        step()
        for parameter in stored.parameters():
            parameter.stored.settled()  # what was begun for the next step is over
    sent = ranks.sent_bytes - sent
    (plan,) = recording.plans
    hardware = load("rtx-4090").with_ranks(2)
    planned = slices(plan, simulate_plan(plan, hardware))
    with tempfile.TemporaryDirectory() as folder:
        path = recording.save(Path(folder) / "trace.json")
        events = json.loads(path.read_text())["traceEvents"]
    collectives = [one for s in recording.steps for one in s.slices if one.lane in ("all-gather", "reduce")]
    return {
        "measured": {lane: Counter(o.name for o in recording.steps[1].slices if o.lane == lane) for lane in LANES},
        "planned": {lane: Counter(one.name for one in planned if one.lane == lane) for lane in LANES},
        "sent": sent,
        "moved": sum(one.nbytes for one in collectives),
        "open": [one.name for one in collectives if "not over" in one.detail or one.end <= one.start],
        "file": path.name,
        "processes": [e["args"]["name"] for e in events if e["name"] == "process_name"],
    }


def recorded_in_turn(rank: int, placements: Sequence[str]) -> list[dict]:
    return [recorded(rank, placement) for placement in placements]


@pytest.mark.parametrize("placements", [["infinity-nvme"], slow(["infinity-nvme", "zero-2"])], ids=len)
def test_each_rank_records_its_collectives(placements: Sequence[str]):
    found = on_ranks(2, recorded_in_turn, placements)
    for rank, one in [(rank, one) for rank, of_rank in enumerate(found) for one in of_rank]:
        assert one["measured"] == one["planned"]
        assert one["measured"]["all-gather"] and one["measured"]["reduce"]
        assert one["sent"] == one["moved"] / 2  # of two ranks, each sends the other one's half
        assert one["open"] == []
        assert one["file"] == f"trace.rank{rank}.json"
        assert one["processes"] == ["planned, on 2 x RTX 4090 desktop", f"measured, rank {rank} of 2"]
