"""Lets a torchvision wheel be imported beside a CPU build of torch: import this before whatever imports torchvision.

Only CUDA builds of torchvision are on PyPI, and their compiled operators don't load without torch's CUDA libraries.
torchvision then fails at import, where it describes two of these to the compiler. Here they are declared, without
kernels: no model that is trained here calls them.
"""

from __future__ import annotations

import torch

if torch.version.cuda is None:
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
