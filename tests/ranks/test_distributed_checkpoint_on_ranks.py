"""torch.distributed.checkpoint of stored models and their optimizers, on one and two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.launching import on_ranks

Found = dict[str, Any]


def _made(placement: object, optimizer: str) -> tuple[torch.nn.Module, torch.nn.Module, torch.optim.Optimizer]:
    """A model with a shape that no number of ranks divides into rows, itself and compiled, and its optimizer."""
    from torch import nn

    import zinf_fx

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(67, 301), nn.GELU(), nn.LayerNorm(301), nn.Linear(301, 67, bias=False))
    dtype = torch.bfloat16 if optimizer == "bf16" else torch.float32
    zinf_fx.offload(model.to(dtype), placement=placement, collective_timeout=60)
    kind = torch.optim.AdamW if optimizer == "torch" else zinf_fx.optim.AdamW
    return model, torch.compile(model, backend="zinf"), kind(model.parameters(), lr=1e-2, fused=True)


def _step(run: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int) -> float:
    dtype = next(run.parameters()).dtype
    batch = torch.randn(8, 67, generator=torch.Generator().manual_seed(2 * number + rank)).to(dtype)
    loss = (run(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _values(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and states, as arrays."""
    found = {name: value.full_tensor().float().numpy() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{name}.{key}"] = torch.as_tensor(whole).numpy().copy()
    return found


def trained(rank: int, folder: str, placement: object, optimizer: str, saves: bool | str) -> Found:
    """Three steps and a save, or a load; what there is then, and the losses of two more steps."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from zinf_fx.integrations.distributed_checkpoint import Stager
    from zinf_fx.optim import reserve_states
    from zinf_fx.runtime.tensor.storage import TensorStorage

    torch._dynamo.reset()
    model, run, steps = _made(placement, optimizer)
    for number in range(3 if saves else 0):
        _step(run, steps, number, rank)
    if not saves and optimizer == "bf16":
        reserve_states(steps)
    states = dict(zip(("model", "optimizer"), get_state_dict(run, steps), strict=True))
    gather = TensorStorage.value
    TensorStorage.value = lambda storage: pytest.fail("a whole tensor was gathered")
    try:
        if saves == "later":
            group = dist.new_group()
            dcp.async_save(states, checkpoint_id=folder, async_stager=Stager(), process_group=group).result()
        elif saves:
            dcp.save(states, checkpoint_id=folder)
        else:
            dcp.load(states, checkpoint_id=folder)
            set_state_dict(run, steps, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    finally:
        TensorStorage.value = gather
    return {"values": _values(model, steps), "losses": [_step(run, steps, number, rank) for number in (3, 4)]}


def assert_equal(found: Found, expected: Found) -> None:
    assert found["values"].keys() == expected["values"].keys() and len(found["values"]) > 10
    for name, value in found["values"].items():
        assert (value == expected["values"][name]).all(), name


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["zinf", "bf16", "torch"])
@pytest.mark.parametrize("placement", ["infinity-nvme", "zero-1"])
def test_what_two_ranks_saved_is_loaded_by_two_and_by_one(tmp_path: Path, placement: str, optimizer: str):
    saved = on_ranks(2, trained, str(tmp_path), placement, optimizer, True)
    loaded = on_ranks(2, trained, str(tmp_path), placement, optimizer, False)
    (alone,) = on_ranks(1, trained, str(tmp_path), "nvme", optimizer, False)
    for before, after in zip(saved, loaded, strict=True):
        assert_equal(after, before)
        assert after["losses"] == before["losses"]
    assert_equal(alone, saved[0])


@pytest.mark.slow
def test_what_one_rank_saved_is_loaded_by_two(tmp_path: Path):
    (saved,) = on_ranks(1, trained, str(tmp_path), "nvme", "zinf", True)
    for loaded in on_ranks(2, trained, str(tmp_path), "infinity-nvme", "zinf", False):
        assert_equal(loaded, saved)


@pytest.mark.slow
def test_what_two_ranks_saved_in_the_background_is_loaded(tmp_path: Path):
    saved = on_ranks(2, trained, str(tmp_path), "infinity-cpu", "zinf", "later")
    for before, after in zip(saved, on_ranks(2, trained, str(tmp_path), "zero-3", "zinf", False), strict=True):
        assert_equal(after, before)
        assert after["losses"] == before["losses"]
