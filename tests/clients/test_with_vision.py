"""Models of timm and torchvision train at small sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
import torchvision
from rows import Row, compare_training
from torch import nn

IMAGES = [(torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(n)),) for n in range(3)]

TIMM = {
    "ViT": ("vit_tiny_patch16_224", {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3}),
    "ConvNeXt": ("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}),
    "ResNet": ("resnet10t", {}),
    "EfficientNet": ("efficientnet_b0", {}),
    "Swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (1, 1), "num_heads": (2, 4)},
    ),
}  # fmt: skip

TORCHVISION = {
    "ResNet-18": lambda: torchvision.models.resnet18(num_classes=10),
    "MobileNet v3": lambda: torchvision.models.mobilenet_v3_small(num_classes=10),
    "ViT": lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=10),
    "Swin": lambda: torchvision.models.SwinTransformer([4, 4], 24, [1, 1], [2, 4], [4, 4], num_classes=10),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.row("timm", f"{name}; offload()")) for name in TIMM]
)
def test_timm(row: Row, tmp_path: Path, name: str) -> None:
    kind, options = TIMM[name]

    def make() -> nn.Module:
        return timm.create_model(kind, pretrained=False, num_classes=10, **options)

    compare_training(row, make, IMAGES, tmp_path / "store")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.row("torchvision", f"{name}; offload()")) for name in TORCHVISION]
)
def test_torchvision(row: Row, tmp_path: Path, name: str) -> None:
    compare_training(row, TORCHVISION[name], IMAGES, tmp_path / "store")
