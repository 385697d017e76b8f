"""Small zuko models, for tests of single facts. The cases are in zuko_cases.py."""

import torch
from zuko.lazy import Flow

from case import perturb
from zuko_parts import D, normal


def flow_of(*layers, base=None):
    """A flow of these layers, from data to noise: float64, in eval mode, moved from its initial values."""
    torch.manual_seed(0)
    flow = Flow(list(layers), base or normal(D)).double().eval()
    perturb(flow, 0.2)
    return flow
