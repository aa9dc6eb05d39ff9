"""The tests expect this of PyTorch's versions: see docs/limits.md."""

import pytest
import torch
from torch.torch_version import TorchVersion

BEFORE_2_12 = TorchVersion(torch.__version__) < "2.12"


def not_before_2_12(reason: str) -> pytest.MarkDecorator:
    """Marks a test of what torch 2.11 can't do."""
    return pytest.mark.skipif(BEFORE_2_12, reason=f"torch 2.11: {reason}")
