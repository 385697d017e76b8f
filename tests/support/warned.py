"""Small flows for the tests of what objectives warn of, and what was said."""

import warnings

import torch
from nflows.distributions.normal import StandardNormal
from nflows.flows.base import Flow
from nflows.transforms import (
    CompositeTransform,
    PiecewiseRationalQuadraticCDF,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def flow_of(*transforms, shape=(2,), base=None):
    torch.manual_seed(0)
    made = [transform() if isinstance(transform, type) else transform for transform in transforms]
    return Flow(CompositeTransform(made), base or StandardNormal(shape)).double()


def messages(make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make()
    return made, [str(warning.message) for warning in caught]


def spline(size=2):
    torch.manual_seed(1)
    made = PiecewiseRationalQuadraticCDF([size], num_bins=4, tails="linear", tail_bound=2.0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.5)
    return made
