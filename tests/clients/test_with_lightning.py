"""Lightning's Trainer fits, clips, trains in mixed precision, saves checkpoints, and resumes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import lightning
import pytest
import torch
from launching_programs import results_of
from lightning.pytorch.callbacks import ModelCheckpoint
from rows import Row
from torch import Tensor, nn

import zinf_fx
from zinf_fx.integrations.lightning import SingleDevice

Optimizer = Callable[..., torch.optim.Optimizer]


class Module(lightning.LightningModule):
    """Trains a network of its own, compiled inside where `stored`."""

    def __init__(self, optimizer: Optimizer, store: Path | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))
        self.optimizer, self.losses = optimizer, []
        if store is not None:
            zinf_fx.offload(self.net, store=store, placement="nvme")
            self.net.compile(backend="zinf")

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("loss", self.net(batch).square().mean())

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = self.optimizer(self.net.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def fit(module: Module, directory: Path, resumed: Path | None = None, **options: object) -> list[Tensor | float]:
    """Return losses of the training steps, the last validation loss, and the parameters at the end."""
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    settings = {"max_epochs": 2, "gradient_clip_val": 0.5, "callbacks": [ModelCheckpoint(directory, save_last=True)]}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=directory, **settings | options,
    )  # fmt: skip
    batches = [torch.randn(32, generator=torch.Generator().manual_seed(n)) for n in range(16)]
    loader = torch.utils.data.DataLoader(batches, batch_size=4)
    torch.manual_seed(1)
    trainer.fit(module, loader, loader, ckpt_path=resumed)
    return [*module.losses, trainer.callback_metrics["loss"], *(p.detach() for p in module.parameters())]


def fused(parameters: object, **options: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True, **options)


def unfused(parameters: object, **options: object) -> torch.optim.Optimizer:
    return zinf_fx.optim.AdamW(parameters, fused=False, **options)


@pytest.mark.row("lightning", "`Trainer.fit`: clipping, validation, a scheduler, the checkpoint callback")
def test_fit(row: Row, tmp_path: Path) -> None:
    results = [fit(Module(fused), tmp_path / "plain")]
    results.append(fit(Module(zinf_fx.optim.AdamW, tmp_path / "store"), tmp_path / "stored"))
    row.compare(results[1], results[0])
    plain, stored = (torch.load(tmp_path / name / "last.ckpt", weights_only=False) for name in ("plain", "stored"))
    assert plain["state_dict"].keys() == stored["state_dict"].keys()
    row.compare(stored["state_dict"].values(), plain["state_dict"].values())
    assert type(stored["state_dict"]["net.0.weight"]) is Tensor


@pytest.mark.row("lightning", '`precision="bf16-mixed"` with clipping; `zinf_fx.optim.AdamW(fused=False)`')
def test_mixed_precision(row: Row, tmp_path: Path) -> None:
    results = [fit(Module(torch.optim.AdamW), tmp_path / "plain", precision="bf16-mixed")]
    results.append(fit(Module(unfused, tmp_path / "store"), tmp_path / "stored", precision="bf16-mixed"))
    row.compare(results[1], results[0])


@pytest.mark.row("lightning", "`fit(ckpt_path=...)` resumes from its checkpoint")
def test_resuming(row: Row, tmp_path: Path) -> None:
    results = {}
    for name, stores in (("plain", (None, None)), ("stored", (tmp_path / "store", tmp_path / "other"))):
        optimizer = zinf_fx.optim.AdamW if name == "stored" else fused
        (tmp_path / "other").mkdir(exist_ok=True)
        fit(Module(optimizer, stores[0]), tmp_path / name, max_epochs=1)
        results[name] = fit(Module(optimizer, stores[1]), tmp_path / name, tmp_path / name / "last.ckpt")
    row.compare(results["stored"], results["plain"])


@pytest.mark.row("lightning", "`zinf_fx.integrations.lightning.SingleDevice`: `fit(ckpt_path=...)`")
def test_resuming_by_shares(row: Row, tmp_path: Path) -> None:
    results = []
    for store, options in (("store", {}), ("other", {"resumed": tmp_path / "saved" / "last.ckpt"})):
        (tmp_path / store).mkdir(exist_ok=True)
        epochs = 2 if options else 1
        module = Module(zinf_fx.optim.AdamW, tmp_path / store)
        results = fit(module, tmp_path / "saved", max_epochs=epochs, strategy=SingleDevice(), **options)
    plain = []
    for resumed in (None, tmp_path / "plain" / "last.ckpt"):
        plain = fit(Module(fused), tmp_path / "plain", resumed, max_epochs=2 if resumed else 1)
    row.compare(results, plain)
    assert (tmp_path / "saved" / "last.ckpt" / "zinf" / "manifest.json").is_file()


@pytest.mark.row(
    "lightning", "`zinf_fx.integrations.lightning.Ranks`, 2 ranks: `fit`, accumulation, `fit(ckpt_path=...)`"
)
def test_two_ranks(row: Row, tmp_path: Path) -> None:
    results = {how: results_of("with_lightning.py", 2, how, tmp_path) for how in ("plain", "stored")}
    row.compare(results["stored"], results["plain"], to="to `DDPStrategy`")


@pytest.mark.row("lightning", '`fit(torch.compile(module, backend="zinf"))`, the whole LightningModule; accumulation')
def test_compiled_module(row: Row, tmp_path: Path) -> None:
    plain = fit(Module(fused), tmp_path / "plain", accumulate_grad_batches=2)
    module = zinf_fx.offload(Module(zinf_fx.optim.AdamW), store=tmp_path / "store", placement="nvme")
    compiled = torch.compile(module, backend="zinf")
    results = fit(compiled, tmp_path / "stored", accumulate_grad_batches=2)
    row.compare(results, plain)
