"""States in bf16 are updated in fp32 and rounded when they are stored, bit for bit as in an explicit loop."""

from __future__ import annotations

import pytest
import torch
from gate import slow

import zinf_fx
from zinf_fx import optim
from zinf_fx.errors import OptimizerError

OPTIMIZERS = {
    "AdamW": {"weight_decay": 0.1, "amsgrad": True},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adagrad": {"initial_accumulator_value": 0.5},
    "NAdam": {},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("placement", [slow("host"), "nvme"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bitwise_equal_to_an_explicit_loop(twins, name: str, placement: str, dtype: torch.dtype) -> None:
    pair = twins(placement, dtype)
    optimizer = getattr(optim, name)(pair.stored, state_dtype=torch.bfloat16, **OPTIMIZERS[name])
    fused = {} if name == "NAdam" else {"fused": True}
    reference = getattr(torch.optim, name)(pair.masters, **OPTIMIZERS[name], **fused)
    pair.train_rounding(optimizer, reference, lambda name, value: value.bfloat16(), steps=5)
    for stored, master in zip(pair.stored, pair.masters, strict=True):
        for state, value in reference.state[master].items():
            mine = optimizer.state[stored][state]
            if isinstance(mine, zinf_fx.StoredTensor):
                assert mine.dtype == torch.bfloat16 and torch.equal(mine.full_tensor().to(value.dtype), value), state


def test_bytes_and_state_dict(twins) -> None:
    traffic = {}
    for dtype in (None, torch.bfloat16):
        pair = twins(dtype=torch.bfloat16, shapes=((1 << 16,),))
        optimizer = optim.AdamW(pair.stored, state_dtype=dtype, overlap=False)
        traffic[dtype] = [nbytes >> 16 for nbytes in pair.moved_by_a_step(optimizer)]
        saved = optimizer.state_dict()
    # Master and moments are read and written, the parameter is written.
    assert traffic == {None: [12, 14], torch.bfloat16: [8, 10]}
    other = optim.AdamW(pair.stored, state_dtype=torch.bfloat16)
    other.load_state_dict(saved)
    assert other.state[pair.stored[0]]["exp_avg"].dtype == torch.bfloat16


def test_other_dtypes_are_refused(twins) -> None:
    with pytest.raises(OptimizerError, match=r"state_dtype=torch\.float16 is not accepted"):
        optim.AdamW(twins().stored, state_dtype=torch.float16)
