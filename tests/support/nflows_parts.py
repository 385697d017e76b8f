"""How the nflows cases are made: the case of a transform, and the transforms that they are put together from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from nflows import transforms as T
from nflows.distributions.normal import StandardNormal
from nflows.flows.base import Flow
from nflows.nn.nets import MLP, ConvResidualNet, ResidualNet
from torch import nn

from case import Case, case_rows, drawn, perturb, set_running_stats

D, VEC, IMG = 6, (6,), (4, 4, 4)
relu, tanh = torch.relu, torch.tanh
Make = Callable[[], nn.Module]  # a Transform, or a whole Flow

SOLVE_GONE = "torch.solve is gone, so that the inverse of NaiveLinear raises"
EYE_FLOAT32 = "the cached inverse mixes a float32 identity with the float64 weights, and raises"
LINSPACE_FLOAT32 = "the inverse of a linear spline reads its bin edges from a float32 linspace"
LEAKY = {"own_tol": 1e-6, "note": "the log-det of LeakyReLU has float32 precision"}
COUPLED, STOCHASTIC = "the samples of a batch influence each other", "dropout draws anew on every call"


def build(make: Make, latent: Sequence[int], mode: str, noise: float, fresh_stats: bool) -> Flow:
    """Build the flow, move it away from its initial values, and set its mode."""
    part = drawn(make)
    flow = (part if isinstance(part, Flow) else Flow(part, StandardNormal(latent))).double()
    perturb(flow, noise)
    if not fresh_stats:
        set_running_stats(flow)
    return flow.train(mode == "train")


rows = partial(case_rows, partial(Case, library="nflows"), build, (VEC, IMG), {"noise": 0.3, "fresh_stats": False})
linear = partial(rows, expect="linear")
nonlinear = partial(rows, expect="nonlinear")
refused = partial(rows, expect="refused")
broken = partial(rows, expect="broken", own_log_prob=False, own_inverse=False)


# The parts


def net(activation: Callable = tanh, **options: object) -> Callable[[int, int], nn.Module]:
    """Give the conditioner of a coupling of vectors."""
    return lambda i, o: ResidualNet(i, o, hidden_features=8, num_blocks=1, activation=activation, **options)


def conv_net(activation: Callable = tanh) -> Callable[[int, int], nn.Module]:
    """Give the conditioner of a coupling of images."""
    return lambda i, o: ConvResidualNet(i, o, hidden_channels=4, num_blocks=1, activation=activation)


def mlp(i: int, o: int) -> nn.Module:
    return MLP([i], [o], hidden_sizes=[8])


def coupling(cls: type, create_net: Callable | None = None, size: int = D, **options: object) -> T.Transform:
    return cls([1 - i % 2 for i in range(size)], create_net or net(), **options)


def autoregressive(cls: type, activation: Callable = tanh, size: int = D, **options: object) -> T.Transform:
    return cls(features=size, hidden_features=8, num_blocks=1, activation=activation, **options)


def act_norm(channels: int, *size: int) -> T.Transform:
    """Give an ActNorm that has seen data."""
    layer = T.ActNorm(channels)
    layer(0.5 + 1.5 * torch.randn(32, channels, *size))
    return layer


def multiscale(*levels: tuple[T.Transform, tuple[int, ...]]) -> T.Transform:
    """Stack the levels: each a transform and the shape of its outputs."""
    stack = T.MultiscaleCompositeTransform(num_transforms=len(levels))
    for level, shape in levels:
        stack.add_transform(level, shape)
    return stack


def glow_step(channels: int, size: int, couple: bool = True) -> list[T.Transform]:
    step = [act_norm(channels, size, size), T.OneByOneConvolution(channels)]
    return [*step, coupling(T.AffineCouplingTransform, conv_net(), channels)] if couple else step


def glow(channels: int = 4, couple: bool = True) -> T.Transform:
    """Give two levels of squeeze and one step each, for images of 4 x 4."""
    c1, c2 = 4 * channels, 8 * channels
    one = T.CompositeTransform([T.SqueezeTransform(), *glow_step(c1, 2, couple)])
    two = T.CompositeTransform([T.SqueezeTransform(), *glow_step(c2, 1, couple)])
    return multiscale((one, (c1, 2, 2)), (two, (c2, 1, 1)))


def inverse(make: Callable, *args: object, **options: object) -> Make:
    return lambda: T.InverseTransform(make(*args, **options))


def composite(*makes: Make) -> Make:
    return lambda: T.CompositeTransform([make() for make in makes])


lu, lu_cached = partial(T.LULinear, D), partial(T.LULinear, D, using_cache=True)
qr, qr_cached = partial(T.QRLinear, D, num_householder=3), partial(T.QRLinear, D, num_householder=4, using_cache=True)
svd, svd_cached = (partial(T.SVDLinear, D, num_householder=4, using_cache=cached) for cached in (False, True))
naive = partial(T.NaiveLinear, D, orthogonal_initialization=False)
naive_cached = partial(naive, using_cache=True)
one_by_one, one_by_one_cached = (
    partial(T.OneByOneConvolution, 4, using_cache=cached, identity_init=not cached) for cached in (False, True)
)
TAILS = {"tails": "linear", "tail_bound": 2.0, "num_bins": 5}
NO_TAILS = {"num_bins": 5}
