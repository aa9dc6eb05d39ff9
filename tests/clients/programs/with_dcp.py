"""torch.distributed.checkpoint on a model that two ranks train: what it is told.

torchrun --standalone --nproc-per-node 2 with_dcp.py stored DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import zinf_fx

how, directory = sys.argv[1], Path(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
zinf_fx.offload(model, store=directory / f"store{dist.get_rank()}", placement="infinity-nvme")
try:
    dcp.save({"model": model.state_dict()}, checkpoint_id=directory / "saved")
    told = ["saved"]
except CheckpointException as error:
    told = [f"{type(failure[0]).__name__}: {failure[0]}" for _, failure in sorted(error.failures.items())]
if dist.get_rank() == 0:
    torch.save(told, directory / f"{how}.pt")
