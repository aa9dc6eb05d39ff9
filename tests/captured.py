"""Captures once, on import, in the process that others are forked from: they then capture as fast as for a second time.

What a first capture takes longer for are modules that it imports, and PyTorch's tables of what operators return for
which shapes: the model is the one that most tests of ranks train.
"""

from __future__ import annotations

import torch
import tqdm
from ranks import training

import zinf_fx.checkpoint.manager
import zinf_fx.observe.recording  # noqa: F401
from zinf_fx.frontend.explain import plan_model

if torch.cuda.device_count() == 0:  # threads of devices' derivatives are what no fork takes along
    # The first derivatives start a thread for each device; while a graph is captured, these would be pretended ones.
    torch.ones((), requires_grad=True).backward()
    tqdm.tqdm.monitor_interval = 0  # nor does one take this thread along
    for (batch,) in training.batches(1, 0, 1):
        plan_model(training.model(), batch, placement="infinity-nvme", world_size=2)
    torch._dynamo.reset()
