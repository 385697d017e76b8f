"""Small flows for the tests of the training loop, and what they share."""

import torch
from nflows import distributions, flows, transforms

import ebflow_plugin as ebf
from ebflow_nflows import FullLinear, SmoothLeakyReLU
from randomness import rng

TIMING = ("seconds", "steps_per_second")


def make_model(size=4, seed=0, actnorm=True, dtype=torch.float32):
    generator = rng(seed)
    steps = [transforms.ActNorm(size)] if actnorm else []
    steps += [
        FullLinear(size, init="orthogonal", generator=generator),
        SmoothLeakyReLU(0.3),
        FullLinear(size, init="orthogonal", generator=generator),
    ]
    flow = flows.Flow(transforms.CompositeTransform(steps), distributions.StandardNormal([size]))
    return ebf.wrap(flow.to(dtype))


def make_data(rows=200, size=4, seed=0, dtype=torch.float32):
    generator = rng(seed)
    mixing = torch.randn(size, size, generator=rng(99))
    return (torch.randn(rows, size, generator=generator) @ mixing).to(dtype)


def without_timing(records):
    return [{name: value for name, value in record.items() if name not in TIMING} for record in records]


def weights(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(a, b):
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def adam(rate):
    return lambda parameters: torch.optim.Adam(parameters, lr=rate)


class CrashError(Exception):
    """What ends a run in the middle."""
