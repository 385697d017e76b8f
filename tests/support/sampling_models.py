"""A Gaussian model with known moments, for the tests of chains."""

import torch
from nflows import distributions, flows

import ebflow_nflows
import ebflow_plugin as ebf
from randomness import rng


def make_gaussian(dim=3, **options):
    """A linear-Gaussian flow, with its mean and covariance."""
    generator = rng(dim)
    layer = ebflow_nflows.FullLinear(dim, dtype=torch.float64)
    with torch.no_grad():
        layer.weight += 0.4 * torch.randn(dim, dim, generator=generator, dtype=torch.float64)
        layer.bias.normal_(generator=generator)
    layer.requires_grad_(False)
    model = ebf.wrap(flows.Flow(layer, distributions.StandardNormal([dim])), **options)
    inverse = torch.linalg.inv(layer.weight)
    return model, -inverse @ layer.bias, inverse @ inverse.mT


def assert_moments(samples, mean, covariance, effective):
    """Within five standard errors, for samples that are worth ``effective`` independent ones."""
    spread = covariance.diagonal().sqrt()
    assert bool(((samples.mean(0) - mean).abs() < 5 * spread / effective**0.5).all()), samples.mean(0) - mean
    error = torch.cov(samples.mT) - covariance
    scale = (covariance.square() + torch.outer(spread, spread).square()).sqrt()
    assert bool((error.abs() < 5 * scale / effective**0.5).all()), error
