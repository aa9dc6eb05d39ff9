"""A training loop of accelerate, as users write it, plainly or with zinf: prepare, save_state, load_state.

torchrun --standalone --nproc-per-node 2 with_accelerate.py plain|stored DIRECTORY train|save [theirs]

`theirs`: a stored model with accelerate's own Accelerator.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import vision  # noqa: F401
from accelerate import Accelerator as TheirAccelerator
from torch import nn

import zinf_fx
import zinf_fx.errors
from zinf_fx.integrations.accelerate import Accelerator

how, directory, saves = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "save"
theirs = how == "plain" or sys.argv[4:] == ["theirs"]
accelerator = (TheirAccelerator if theirs else Accelerator)(  # first of all: this initialises torch.distributed
    cpu=True, gradient_accumulation_steps=2, dynamo_backend="zinf" if how == "stored" else None
)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32))
if how == "stored":  # then the model: it is divided over the ranks that there are
    zinf_fx.offload(
        model, store=directory / f"store{accelerator.process_index}", placement="infinity-nvme", collective_timeout=20
    )
batches = [torch.randn(32, generator=torch.Generator().manual_seed(n)) for n in range(32)]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
loader = torch.utils.data.DataLoader(batches, batch_size=4)
prepared, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)


def epoch() -> list[torch.Tensor | float]:
    """Return losses of all ranks, and the parameters after."""
    losses = []
    for batch in loader:
        with accelerator.accumulate(prepared):
            loss = prepared(batch).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses += accelerator.gather(loss.detach().reshape(1)).tolist()
    return [*losses, *(p.full_tensor() if how == "stored" else p.detach().clone() for p in model.parameters())]


results = epoch()
try:
    if saves:
        accelerator.save_state(directory / how / "state")
        results += epoch()
        accelerator.load_state(directory / how / "state")  # and the second epoch again
    results += epoch()
    if saves:
        accelerator.save_model(accelerator.unwrap_model(prepared, keep_torch_compile=False), directory / how / "model")
except zinf_fx.errors.RanksError as error:
    torch.save([str(error)], directory / f"{how}.pt")
    raise
if accelerator.is_main_process:
    torch.save(results, directory / f"{how}.pt")
accelerator.end_training()
