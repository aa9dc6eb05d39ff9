"""A step's resident memory, in a process of its own, is a few chunks, however large the states are."""

from __future__ import annotations

import sys

import forked
import pytest

SCRIPT = """
import sys
import torch
import zinf_fx

def resident() -> int:
    '''Of memory that is of no file: a forked process finds those of the libraries anew.'''
    with open("/proc/self/statm") as file:
        _, resident, of_files, *_ = map(int, file.read().split())
        return (resident - of_files) * 4096

model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(1 << 17, dtype=torch.bfloat16)) for _ in range(200))
zinf_fx.offload(model, store=sys.argv[1], placement="infinity-nvme", chunk="512KiB")
optimizer = zinf_fx.optim.AdamW(model)
for parameter in model:
    parameter.grad = torch.zeros_like(parameter)
before = resident()
for _ in range(2):
    optimizer.step()
print(resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_states_of_300_mib_leave_little_behind(tmp_path):
    growth = int(forked.run(SCRIPT, tmp_path).stdout)
    assert growth < 32 << 20  # three chunks of 16 bytes per element are 6 MiB
