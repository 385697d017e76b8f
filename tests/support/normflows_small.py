"""Small normflows models and data, for tests of single facts. The cases are in normflows_cases.py."""

from __future__ import annotations

import normflows as nf
import torch
from normflows.distributions import DiagGaussian
from torch import Tensor, nn

from case import perturb
from normflows_parts import D


def model_of(*steps: nn.Module, base: nn.Module | None = None, model: type = nf.NormalizingFlow) -> nn.Module:
    """Give a model of these steps, in the order of sampling: float64, in eval mode, moved from its initial values."""
    flow = model(base or DiagGaussian(D), list(steps)).double().eval()
    perturb(flow, 0.2)
    return flow


def data(*shape: int, seed: int = 0) -> Tensor:
    """Draw a batch, of five vectors by default."""
    return torch.randn(shape or (5, D), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
