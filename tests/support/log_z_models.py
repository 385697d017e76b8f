"""Models whose log Z is known, for its estimates."""

import math

import torch
from nflows import distributions, flows, transforms

import ebflow_nflows
import ebflow_plugin as ebf
from randomness import rng

WIDE = torch.float64


def full(dim, spread, generator):
    layer = ebflow_nflows.FullLinear(dim, dtype=WIDE)
    with torch.no_grad():
        layer.weight += spread * torch.randn(dim, dim, generator=generator, dtype=WIDE) / math.sqrt(dim)
        layer.bias.normal_(0.0, 0.1, generator=generator)
    return layer


def make_model(dim, spread=0.3, nonlinear=False):
    generator = rng(dim)
    layers = [full(dim, spread, generator)]
    if nonlinear:
        layers += [ebflow_nflows.SmoothLeakyReLU(0.6), full(dim, spread, generator)]
    flow = flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([dim]))
    return ebf.wrap(flow.requires_grad_(False))


def assert_agrees(estimate, exact, scale=4.0):
    assert math.isfinite(estimate.std_error)
    assert abs(estimate.value - float(exact)) < scale * estimate.std_error + 1e-6, (estimate, exact)
