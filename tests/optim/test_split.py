"""Split masters: every bit of a master comes back, and training with them is that with masters of fp32."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gate import slow

import zinf_fx
from zinf_fx import optim
from zinf_fx.errors import ConfigError, OptimizerError
from zinf_fx.optim.formats import LOWER, MASTER, MASTER_UP, UPS, _join_anywhere, _split_anywhere, join, split
from zinf_fx.passes.ir.printer import tile_text

WAYS = {"native": (split, join), "operations": (_split_anywhere, _join_anywhere)}
LOWERS = (0, 1, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def bits_of(masters: torch.Tensor) -> torch.Tensor:
    return masters.view(torch.int32)


def kept(masters: torch.Tensor, way: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the weights of masters, and what is kept beside them."""
    weights = masters.to(torch.bfloat16)
    buffers = (
        torch.full((masters.numel(),), -1, dtype=LOWER),
        torch.full(UPS.shape(masters.shape), 255, dtype=UPS.dtype),
    )
    WAYS[way][0](masters, weights, *buffers)
    return weights, *buffers


def of_any_upper_half(lower: int) -> torch.Tensor:
    """Return masters of any sign, exponent and upper bits."""
    return (torch.arange(1 << 16, dtype=torch.int32) << 16 | lower).view(torch.float32)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lower", LOWERS)
def test_every_bit_comes_back(lower: int, way: str) -> None:
    masters = of_any_upper_half(lower)
    restored = WAYS[way][1](*kept(masters, way), torch.empty(masters.numel()))
    nan = masters.isnan()
    assert torch.equal(bits_of(restored)[~nan], bits_of(masters)[~nan]) and restored[nan].isnan().all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 511, 513, 100_003])
def test_of_any_size(count: int, way: str) -> None:
    masters = torch.randn(count, generator=torch.Generator().manual_seed(count))
    weights, lower, up = kept(masters, way)
    assert torch.equal(bits_of(WAYS[way][1](weights, lower, up, torch.empty(count))), bits_of(masters))
    if count % 8:
        assert up[-1] >> count % 8 == 0


@pytest.mark.parametrize("count", [1 << 18, (1 << 19) + 5])
def test_threads_share_the_elements(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    masters = torch.randn(count, generator=torch.Generator().manual_seed(count))
    alone = kept(masters, "operations")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    weights, lower, up = kept(masters, "native")
    assert torch.equal(lower, alone[1]) and torch.equal(up, alone[2])
    assert torch.equal(bits_of(join(weights, lower, up, torch.empty(count))), bits_of(masters))


def threads_for_values() -> list[Path]:
    """Return, of this process, the native threads that share work on values."""
    return [path for path in Path("/proc/self/task").glob("*/comm") if path.read_text().strip() == "zinf-values"]


@pytest.mark.timeout(60)
def test_a_process_made_by_fork_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    masters = torch.randn(1 << 18, generator=torch.Generator().manual_seed(5))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    lower = kept(masters, "native")[1].clone()
    assert len(threads_for_values()) >= 2
    child = os.fork()
    if not child:
        equal = not threads_for_values() and torch.equal(kept(masters, "native")[1], lower)
        os._exit(not (equal and len(threads_for_values()) == 2))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("up", [0, 255])
@pytest.mark.parametrize("lower", LOWERS)
def test_a_weight_that_was_written_has_a_master_that_is_rounded_to_it(lower: int, up: int, way: str) -> None:
    """Whatever was kept of another one."""
    weights = of_any_upper_half(0).to(torch.bfloat16)
    beside = torch.full(weights.shape, lower).to(LOWER), torch.full(UPS.shape(weights.shape), up, dtype=UPS.dtype)
    masters = WAYS[way][1](weights, *beside, torch.empty(weights.numel()))
    assert torch.equal(masters.to(torch.bfloat16).nan_to_num(7.0), weights.nan_to_num(7.0))
    assert torch.equal(masters.isnan(), weights.isnan())


def masters_of(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the masters that an optimizer keeps, in fp32."""
    masters = []
    for parameter in parameters:
        state = optimizer.state[parameter]
        master = state[MASTER].full_tensor().flatten()
        if MASTER_UP in state:
            weights, up = parameter.full_tensor().flatten(), state[MASTER_UP].full_tensor()
            master = join(weights, master, up, torch.empty(master.numel()))
        masters.append(master.view(parameter.shape))
    return masters


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"amsgrad": True},
    "SGD": {"lr": 0.25, "momentum": 0.5},  # whose masters are ties now and then
    "NAdam": {},
    "Adagrad": {},
    "RMSprop": {},
    "ASGD": {},
}


@pytest.mark.parametrize("placement", [slow("device"), "host", "nvme"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bitwise_equal_to_an_explicit_loop(twins, name: str, placement: str) -> None:
    pair = twins(placement, torch.bfloat16, pack="auto" if name != "RMSprop" else None)
    optimizer = getattr(optim, name)(pair.stored, master_dtype="split", **OPTIMIZERS[name])
    fused = {"fused": True} if name in ("AdamW", "SGD", "Adagrad") else {}
    pair.train(optimizer, getattr(torch.optim, name)(pair.masters, **OPTIMIZERS[name], **fused), steps=4)
    for master, expected in zip(masters_of(optimizer, pair.stored), pair.masters, strict=True):
        assert torch.equal(bits_of(master), bits_of(expected))


@pytest.mark.parametrize("state_dtype", ["8bit", torch.bfloat16])
def test_beside_states_of_fewer_bytes(twins, state_dtype: object) -> None:
    pairs = [twins(dtype=torch.bfloat16) for _ in range(2)]
    both = [
        optim.AdamW(pair.stored, state_dtype=state_dtype, master_dtype=master_dtype, lr=0.01)
        for pair, master_dtype in zip(pairs, ("split", None), strict=True)
    ]
    for _ in range(3):
        for pair, optimizer in zip(pairs, both, strict=True):
            pair.give_gradients()
            optimizer.step()
    actual, expected = (masters_of(optimizer, pair.stored) for optimizer, pair in zip(both, pairs, strict=True))
    assert all(map(torch.equal, map(bits_of, actual), map(bits_of, expected)))


def test_bytes_of_a_step(twins) -> None:
    """Those of masters are halved, and weights are read for them."""
    count, moved = 1 << 18, {}
    for master_dtype in (None, "split"):
        pair = twins(dtype=torch.bfloat16, shapes=((count,),), chunk="1MiB")
        optimizer = optim.AdamW(pair.stored, state_dtype="8bit", master_dtype=master_dtype, overlap=False)
        moved[master_dtype] = [nbytes / count for nbytes in pair.moved_by_a_step(optimizer)]
    assert moved == {None: [6, 8], "split": [6, 6]}
    assert optimizer.state[pair.stored[0]][MASTER_UP].stored.tier == "host"


@pytest.mark.parametrize("saved", [None, "split", "plain"])
@pytest.mark.parametrize("loaded", [None, "split"])
def test_states_of_any_kind_are_loaded(twins, saved: str | None, loaded: str | None) -> None:
    pair, other = (twins(dtype=torch.bfloat16) for _ in range(2))
    kind = torch.optim.AdamW(pair.plain) if saved == "plain" else optim.AdamW(pair.stored, master_dtype=saved)
    (pair if saved != "plain" else other).give_gradients()
    if saved == "plain":
        for plain in pair.plain:
            plain.grad = torch.ones_like(plain)
    kind.step()
    taken = optim.AdamW(other.stored, master_dtype=loaded)
    expected = [p.float() for p in pair.plain] if saved == "plain" else masters_of(kind, pair.stored)
    for mine, theirs in zip(other.stored, pair.plain if saved == "plain" else pair.stored, strict=True):
        with torch.no_grad():
            mine.copy_(theirs if saved == "plain" else theirs.full_tensor())
    taken.load_state_dict(kind.state_dict())
    reference = torch.optim.AdamW(expected, fused=True)
    reference.load_state_dict({**reference.state_dict(), "state": ordinary(kind.state_dict()["state"])})
    for mine, master in zip(other.stored, expected, strict=True):
        gradient = torch.randn(mine.shape, generator=pair.random).to(torch.bfloat16)
        mine.grad, master.grad = gradient, gradient.float()
    taken.step()
    reference.step()
    assert all(map(torch.equal, map(bits_of, masters_of(taken, other.stored)), map(bits_of, expected)))


@pytest.mark.parametrize("weights", ["before", "after"])
def test_split_masters_become_whole_with_the_weights_that_are_there(
    twins, weights: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What a split master has is below its weight: weights that come later have lost it."""
    pair, other = (twins(dtype=torch.bfloat16) for _ in range(2))
    kind, taken = optim.AdamW(pair.stored, master_dtype="split"), optim.AdamW(other.stored)
    pair.give_gradients()
    kind.step()

    def load_weights() -> None:
        with torch.no_grad():
            for mine, theirs in zip(other.stored, pair.stored, strict=True):
                mine.copy_(theirs.full_tensor())

    if weights == "before":
        load_weights()
    taken.load_state_dict(kind.state_dict())
    if weights == "after":
        load_weights()
    for _ in range(2):
        other.give_gradients()
        taken.step()
    told = [message for message in caplog.messages if "Load the model's state dict before the optimizer's" in message]
    assert len(told) == (len(other.stored) if weights == "after" else 0)


def ordinary(state: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return a state dict's values, without masters, as ordinary tensors of fp32."""
    values = {n: {k: v for k, v in entry.items() if k not in (MASTER, MASTER_UP)} for n, entry in state.items()}
    return {
        n: {k: (v.full_tensor() if hasattr(v, "full_tensor") else v.clone()).float() for k, v in entry.items()}
        for n, entry in values.items()
    }


def test_weights_that_others_write_to(twins) -> None:
    """What gets its value back has its master back; what is another one then is what the update begins with."""
    pair = twins(dtype=torch.bfloat16)
    optimizer = optim.AdamW(pair.stored, master_dtype="split")
    reference = torch.optim.AdamW(pair.masters, fused=True)
    pair.train(optimizer, reference, steps=1)
    values = [parameter.full_tensor().clone() for parameter in pair.stored]
    with torch.no_grad():
        for parameter in pair.stored:
            parameter.mul_(3.0)
        for parameter, value in zip(pair.stored, values, strict=True):
            parameter.copy_(value)
    pair.train(optimizer, reference, steps=1)
    with torch.no_grad():
        pair.stored[0].zero_()
    pair.give_gradients()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert not pair.stored[0].full_tensor().any()


def test_parameters_of_fp32_are_their_own_masters(twins) -> None:
    pair = twins()
    optimizer = optim.AdamW(pair.stored, master_dtype="split")
    pair.train(optimizer, torch.optim.AdamW(pair.masters, fused=True))
    assert MASTER not in optimizer.state[pair.stored[0]]


def test_what_cannot_be_split_is_refused(twins) -> None:
    with pytest.raises(OptimizerError, match=r"master_dtype='split' for .* torch.float16: the bits of bfloat16"):
        optim.AdamW(twins(dtype=torch.float16).stored, master_dtype="split")
    with pytest.raises(OptimizerError, match="leave master_dtype out"):
        optim.Muon(twins(shapes=((130, 258),), dtype=torch.bfloat16).stored, master_dtype="split")
    with pytest.raises(
        OptimizerError, match=r"master_dtype=torch\.bfloat16 is not accepted: None, torch.float32, 'split'"
    ):
        optim.AdamW(twins().stored, master_dtype=torch.bfloat16)


class Mixed(torch.nn.Module):
    """Has a layer in bf16, and one in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = torch.nn.Linear(64, 64).bfloat16(), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.narrow(x).float()).sum()


def test_plans_have_them() -> None:
    """Parameters in bf16 have them; those of fp32 have no master."""
    x = torch.zeros(2, 64).bfloat16()
    plan = zinf_fx.export_plan(Mixed(), (x,), placement="nvme", pack=None, master_dtype="split")
    forms = {tile.name: tile.master_dtype for tile in plan.tiles}
    assert forms == {"narrow.weight": "split", "narrow.bias": "split", "wide.weight": None, "wide.bias": None}
    assert [tile_text(tile).endswith(", master split") for tile in plan.tiles] == [
        form is not None for form in forms.values()
    ]
    with pytest.raises(ConfigError, match="master_dtype='16bit' is not accepted; accepted: 'float32', 'split'"):
        zinf_fx.export_plan(Mixed(), (x,), placement="nvme", master_dtype="16bit")
