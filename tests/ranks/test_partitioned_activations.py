"""What is saved for backward and equal on all ranks of tensor parallelism is divided over them: ZeRO, Pa and Pa+cpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from followed import followed_plans
from ranks import tensor_parallel as tp
from ranks.launching import on_ranks

import zinf_fx
from zinf_fx.errors import RanksError
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.simulation.communication import communication


def saved(plan: Plan) -> dict[str, tuple[int, int]]:
    """By name, bytes of each activation that backward gets, and those that a rank has of it until then."""
    tiles = [tile for tile in plan.graph("forward").tiles if tile.activation]
    return {tile.name: (tile.nbytes, tile.held_nbytes) for tile in tiles}


def trained(where: str, divided: bool, sequence: bool = False, **options: object) -> dict[str, Any]:
    """Return losses and parameters of two steps, what is saved as planned, and bytes of a step: sent and written to
    disk, as counted; and sent, as planned."""
    mesh = tp.mesh_of(1, 2)
    placement = {"parameters": "host", "activations": where}
    gpt = tp.parallel(tp.model(), mesh["tp"], sequence)
    zinf_fx.offload(gpt, placement=placement, activations="recompute", partition_activations=divided, **options)
    run = torch.compile(gpt, backend="zinf")
    optimizer = zinf_fx.optim.AdamW(gpt.parameters(), lr=1e-2)
    losses = tp.train(run, optimizer, (0, 1), 2)
    parameters, before = tp.values(gpt), zinf_fx.stats(gpt)
    with followed_plans(gpt) as plans:
        tp.train(run, optimizer, (0, 1), 1)
    after = zinf_fx.stats(gpt)
    (plan,) = plans
    return {
        "losses": losses,
        "parameters": parameters,
        "saved": saved(plan),
        "kept": plan.kept,
        "sent": after.sent_bytes - before.sent_bytes,
        "planned": sum(collective.total for collective in communication(plan)),
        "written": after.bytes_written - before.bytes_written,
    }


def with_and_without(rank: int, cases: list[tuple[str, bool]]) -> list[tuple[dict[str, Any], dict[str, Any], bool]]:
    """By case (where activations live, whether sequences are divided): what `trained` tells, and whether parameters are
    equal."""
    runs = []
    for where, sequence in cases:
        whole, divided = (trained(where, partition, sequence) for partition in (False, True))
        mine, others = whole.pop("parameters"), divided.pop("parameters")
        runs.append((whole, divided, all(torch.equal(mine[name], others[name]) for name in mine)))
    return runs


def divided_and_plain(rank: int) -> tuple[dict[str, Any], bool]:
    """Return what `trained` tells with checkpoints on NVMe, divided; and whether plain PyTorch trains the same."""
    mesh = tp.mesh_of(1, 2)
    plain = tp.parallel(tp.model(), mesh["tp"])
    losses = tp.train(plain, torch.optim.AdamW(tp.groups(plain), lr=1e-2, fused=True), (0, 1), 2)
    results = trained("nvme", True)
    parameters = results.pop("parameters")
    same = all(torch.equal(parameters[name], value) for name, value in tp.values(plain).items())
    return results, same and results["losses"] == losses


def test_checkpoints_take_half_of_the_bytes_on_two_ranks():
    for divided, same in on_ranks(2, divided_and_plain):
        assert same and len(divided["saved"]) > 1
        assert all(held == nbytes // 2 for nbytes, held in divided["saved"].values())
        # ZeRO, section 8: an all-gather of each checkpoint, of which a ring of two sends half.
        held = sum(held for _, held in divided["saved"].values())
        assert divided["written"] == divided["sent"] == divided["planned"] == held


@pytest.mark.slow
@pytest.mark.parametrize("where", ["device", "host", "nvme"])
def test_dividing_changes_nothing_but_the_bytes(where: str):
    for ((whole, divided, same),) in on_ranks(2, with_and_without, [(where, False)]):
        assert same and divided["losses"] == whole["losses"] and len(divided["saved"]) > 1
        assert all(held == nbytes // 2 for nbytes, held in divided["saved"].values())
        held = sum(held for _, held in divided["saved"].values())
        assert divided["sent"] == divided["planned"] == held and whole["sent"] == whole["planned"] == 0
        if where == "device":
            assert not whole["saved"] and whole["kept"] - divided["kept"] == 2 * held
        else:
            assert whole["saved"] == {name: (nbytes, nbytes) for name, (nbytes, _) in divided["saved"].items()}
        if where == "nvme":
            assert whole["written"] == 2 * divided["written"] == 2 * held


@pytest.mark.slow
def test_where_sequences_are_divided_only_what_is_gathered_is_equal():
    for ((whole, divided, same),) in on_ranks(2, with_and_without, [("host", True)]):
        assert same and divided["losses"] == whole["losses"] and divided["saved"].keys() == whole["saved"].keys()
        parts = {name for name, (nbytes, held) in divided["saved"].items() if held == nbytes // 2}
        assert parts and all("cat" in name or "log_softmax" in name for name in parts)


def other_inputs(rank: int) -> str:
    mesh = tp.mesh_of(1, 2)
    gpt = zinf_fx.offload(tp.parallel(tp.model(), mesh["tp"]), placement="host", partition_activations=True)
    batch = torch.randint(tp.VOCABULARY, (2, 1, 16), generator=torch.Generator().manual_seed(rank))
    with pytest.raises(RanksError) as raised:
        torch.compile(gpt, backend="zinf")(*batch)
    return str(raised.value)


@pytest.mark.slow
def test_ranks_with_other_inputs_are_refused():
    for text in on_ranks(2, other_inputs):
        assert "give all of them the same batch" in text
