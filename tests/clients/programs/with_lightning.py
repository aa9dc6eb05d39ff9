"""A LightningModule that two ranks train, save, and take up again, in DDPStrategy or with zinf.

torchrun --standalone --nproc-per-node 2 with_lightning.py plain|stored DIRECTORY
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

import zinf_fx
from zinf_fx.integrations.lightning import Ranks

how, directory = sys.argv[1], Path(sys.argv[2])
warnings.simplefilter("ignore")


class Module(lightning.LightningModule):
    """A network that is offloaded when there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.losses = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), []

    def configure_model(self) -> None:
        if how == "stored" and not isinstance(self.net[0].weight, zinf_fx.StoredTensor):
            store = directory / f"store{os.environ['RANK']}"
            zinf_fx.offload(self.net, store=store, placement="infinity-nvme", collective_timeout=20)
            self.net.compile(backend="zinf")

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def fit(epochs: int, resumed: Path | None = None) -> Module:
    module, folder = Module(), directory / how
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=Ranks() if how == "stored" else DDPStrategy(), max_epochs=epochs,
        accumulate_grad_batches=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=[ModelCheckpoint(folder, save_last=True)],
    )  # fmt: skip
    batches = [torch.randn(32, generator=torch.Generator().manual_seed(n)) for n in range(32)]
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=4), ckpt_path=resumed)
    return module


first = fit(1)
second = fit(3, directory / how / "last.ckpt")
values = [p.full_tensor() if how == "stored" else p.detach() for p in second.parameters()]
if os.environ["RANK"] == "0":
    torch.save([*first.losses, *second.losses, *values], directory / f"{how}.pt")
