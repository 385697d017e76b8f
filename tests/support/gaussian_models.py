"""Correlated Gaussian data, and flows of full layers, for the tests of starts and of calibration."""

import torch
from nflows import distributions, flows, transforms

from ebflow_nflows import FullLinear, SmoothLeakyReLU
from randomness import rng

D = 5


def data(n=400, dim=D, seed=0):
    generator = rng(seed)
    mixing = torch.randn(dim, dim, dtype=torch.float64, generator=rng(99))
    return torch.randn(n, dim, dtype=torch.float64, generator=generator) @ mixing + 3.0


def linear_flow():
    return flows.Flow(FullLinear(D), distributions.StandardNormal([D])).double()


def nonlinear_flow(init="orthogonal"):
    layers = [FullLinear(D, init=init), SmoothLeakyReLU(0.3), FullLinear(D, init=init)]
    return flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([D])).double()


def nll(model, x, context=None):
    with torch.no_grad():
        return -model.log_prob(x, context).mean().item()
