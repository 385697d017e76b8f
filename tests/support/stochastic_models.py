"""Models for the tests of likelihood without determinants, and its gradient."""

import math

import torch
from nflows.distributions.normal import StandardNormal
from nflows.flows.base import Flow
from nflows.transforms import CompositeTransform

import ebflow_plugin as ebf
from randomness import randn, rng


def perturbed(flow, scale=0.1, seed=0):
    """The flow in float64, every parameter moved by noise of single precision."""
    generator = rng(seed)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return flow.double()


def nflows_model(*transforms, shape):
    return ebf.wrap(perturbed(Flow(CompositeTransform(transforms), StandardNormal(shape))))


def batch(model, rows=5, seed=0):
    return randn(rows, *model.plan.event_shape, seed=seed)


def gradient(loss, x, context=None):
    """The gradient of all trainable parameters, as one vector."""
    parameters = [parameter for parameter in loss.model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = None
    loss(x, context).sum().backward()
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])


def unit_probes(like, generator):
    """All unit vectors, the same for each layer, so that the mean over the probes is the trace itself."""
    size = len(like)
    unit = math.sqrt(size) * torch.eye(size, dtype=like.dtype)
    return unit[:, None].expand(-1, like[0].numel() // size, -1).reshape(like.shape)
