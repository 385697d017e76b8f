"""Small normflows models and data, for tests of single facts. The cases are in normflows_cases.py."""

from __future__ import annotations

import normflows as nf
from normflows.distributions import DiagGaussian
from torch import nn

from case import perturb
from normflows_parts import D


def model_of(*steps: nn.Module, base: nn.Module | None = None, model: type = nf.NormalizingFlow) -> nn.Module:
    """Give a model of these steps, in the order of sampling: float64, in eval mode, moved from its initial values."""
    flow = model(base or DiagGaussian(D), list(steps)).double().eval()
    perturb(flow, 0.2)
    return flow
