"""torch.distributed.checkpoint, as users write it: a model and its optimizer, saved, trained on, and loaded again.

torchrun --standalone --nproc-per-node 2 with_dcp.py plain|stored DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import zinf_fx

how, directory = sys.argv[1], Path(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
if how == "stored":
    zinf_fx.offload(model, store=directory / f"store{dist.get_rank()}", placement="infinity-nvme")
run = torch.compile(model, backend="zinf") if how == "stored" else DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
results = []


def train(steps: range) -> None:
    for number in steps:
        batch = torch.randn(4, 32, generator=torch.Generator().manual_seed(2 * number + dist.get_rank()))
        loss = run(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.item())


train(range(3))
for loads in (False, True):
    states = dict(zip(("model", "optimizer"), get_state_dict(run, optimizer), strict=True))
    if loads:
        dcp.load(states, checkpoint_id=directory / how)
        set_state_dict(run, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    else:
        dcp.save(states, checkpoint_id=directory / how)
    train(range(3, 6))
values = [p.full_tensor() if how == "stored" else p.detach() for p in model.parameters()]
if dist.get_rank() == 0:
    torch.save([*results, *values], directory / f"{how}.pt")
