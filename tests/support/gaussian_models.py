"""Flows of full layers with known moments or log Z, and their data, for the tests of starts, chains and estimates."""

import math

import torch
from nflows import distributions, flows, transforms

import ebflow_plugin as ebf
from ebflow_nflows import FullLinear, SmoothLeakyReLU
from randomness import rng

D = 5
WIDE = torch.float64


def data(n=400, dim=D, seed=0):
    generator = rng(seed)
    mixing = torch.randn(dim, dim, dtype=WIDE, generator=rng(99))
    return torch.randn(n, dim, dtype=WIDE, generator=generator) @ mixing + 3.0


def linear_flow():
    return flows.Flow(FullLinear(D), distributions.StandardNormal([D])).double()


def nonlinear_flow(init="orthogonal"):
    layers = [FullLinear(D, init=init), SmoothLeakyReLU(0.3), FullLinear(D, init=init)]
    return flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([D])).double()


def nll(model, x, context=None):
    with torch.no_grad():
        return -model.log_prob(x, context).mean().item()


def full_layer(weight, bias=0.0):
    layer = FullLinear(len(weight), dtype=WIDE)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(torch.as_tensor(bias, dtype=WIDE).expand(len(weight)))
    return layer


def frozen(*layers, **options):
    """The model of these layers, from data to noise, none of which is trained."""
    flow = flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([layers[0].features]))
    return ebf.wrap(flow.to(WIDE).requires_grad_(False), **options)


def gaussian(weight, bias=0.0, **options):
    """A linear-Gaussian model, with its mean and covariance."""
    model, inverse = frozen(full_layer(weight, bias), **options), torch.linalg.inv(weight)
    return model, -inverse @ torch.as_tensor(bias, dtype=WIDE).expand(len(weight)), inverse @ inverse.mT


def make_gaussian(dim=3, **options):
    generator = rng(dim)
    weight = torch.eye(dim, dtype=WIDE) + 0.4 * torch.randn(dim, dim, generator=generator, dtype=WIDE)
    return gaussian(weight, torch.randn(dim, generator=generator, dtype=WIDE), **options)


def assert_moments(samples, mean, covariance, effective):
    """Within five standard errors, for samples that are worth ``effective`` independent ones."""
    spread = covariance.diagonal().sqrt()
    assert bool(((samples.mean(0) - mean).abs() < 5 * spread / effective**0.5).all()), samples.mean(0) - mean
    error = torch.cov(samples.mT) - covariance
    scale = (covariance.square() + torch.outer(spread, spread).square()).sqrt()
    assert bool((error.abs() < 5 * scale / effective**0.5).all()), error


def near_identity(dim, spread, generator):
    weight = torch.eye(dim, dtype=WIDE) + spread * torch.randn(dim, dim, generator=generator, dtype=WIDE) / dim**0.5
    return full_layer(weight, 0.1 * torch.randn(dim, generator=generator, dtype=WIDE))


def make_model(dim, spread=0.3, nonlinear=False):
    """A model whose log Z is known, near a standard normal one."""
    generator = rng(dim)
    first = near_identity(dim, spread, generator)
    bend = [SmoothLeakyReLU(0.6), near_identity(dim, spread, generator)] if nonlinear else []
    return frozen(first, *bend)


def assert_agrees(estimate, exact, scale=4.0):
    assert math.isfinite(estimate.std_error)
    assert abs(estimate.value - float(exact)) < scale * estimate.std_error + 1e-6, (estimate, exact)
