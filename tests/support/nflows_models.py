"""Whole nflows models, of the kinds that users have."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from nflows import transforms as T
from nflows.distributions.mixture import MADEMoG
from nflows.distributions.normal import ConditionalDiagonalNormal, DiagonalNormal, StandardNormal
from nflows.flows.base import Flow
from torch import Tensor, nn

from case import Case
from nflows_parts import (
    EYE_FLOAT32,
    IMG,
    SOLVE_GONE,
    TAILS,
    VEC,
    D,
    Make,
    act_norm,
    autoregressive,
    composite,
    coupling,
    glow,
    glow_step,
    inverse,
    linear,
    lu,
    lu_cached,
    multiscale,
    naive,
    net,
    nonlinear,
    qr_cached,
    relu,
    svd_cached,
)

CONTEXT = {"context_shape": (3,)}


class Laplace(nn.Module):
    """A user's own base density: no nflows class, only the two methods that a flow calls."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.location = nn.Parameter(torch.zeros(features))
        self.log_scale = nn.Parameter(torch.zeros(features))

    def log_prob(self, inputs: Tensor, context: Tensor | None = None) -> Tensor:
        distance = (inputs - self.location).abs() * torch.exp(-self.log_scale)
        return -(distance + self.log_scale + math.log(2)).sum(-1)

    def sample(self, num_samples: int, context: Tensor | None = None) -> Tensor:
        leading = (num_samples,) if context is None else (len(context), num_samples)
        u = torch.rand(*leading, *self.location.shape).to(self.location) - 0.5
        return self.location - torch.exp(self.log_scale) * u.sign() * torch.log1p(-2 * u.abs())


def on_base(base: Callable[[], nn.Module], **options: object) -> Make:
    """Put two LU layers and a coupling on the base density."""
    affine = partial(coupling, T.AffineCouplingTransform, net(**options))
    return lambda: Flow(composite(lu, affine, lu)(), base())


def nsf() -> Flow:
    spline = partial(coupling, T.PiecewiseRationalQuadraticCouplingTransform, net(relu, context_features=3), **TAILS)
    steps = (partial(T.RandomPermutation, D), lu, spline) * 2
    embedding = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    return Flow(composite(*steps)(), StandardNormal(VEC), embedding)


def maf() -> T.Transform:
    step = (partial(T.RandomPermutation, D), partial(autoregressive, T.MaskedAffineAutoregressiveTransform, relu))
    return composite(*(step * 3))()


def deep_glow() -> T.Transform:
    """Two levels of a squeeze and two steps, a container each; images of 3 x 4 x 4."""

    def level(channels: int, size: int) -> T.Transform:
        steps = [T.CompositeTransform(glow_step(channels, size)) for _ in range(2)]
        return T.CompositeTransform([T.SqueezeTransform(), *steps])

    return multiscale((level(12, 2), (12, 2, 2)), (level(24, 1), (24, 1, 1)))


def two_levels() -> T.Transform:
    first = composite(lu, partial(coupling, T.AffineCouplingTransform))()
    return multiscale((first, VEC), (autoregressive(T.MaskedAffineAutoregressiveTransform, size=3), (3,)))


def three_levels() -> T.Transform:
    def level(size: int) -> T.Transform:
        return T.CompositeTransform([T.LULinear(size), coupling(T.AffineCouplingTransform, size=size)])

    return multiscale(*((level(size), (size,)) for size in (11, 5, 2)))


def shared() -> T.Transform:
    layer = T.LULinear(D)
    return T.CompositeTransform([layer, coupling(T.AffineCouplingTransform), layer])


def logit_images() -> T.Transform:
    inside = T.PointwiseAffineTransform(shift=0.05, scale=0.9)
    return T.CompositeTransform([inside, T.Logit(), T.SqueezeTransform(), *glow_step(16, 2)])


def image_inverse() -> T.Transform:
    """From flat noise-shaped data to images: the density direction un-squeezes and joins."""
    return T.InverseTransform(glow(couple=False))


NFLOWS_MODELS: tuple[Case, ...] = (
    *nonlinear("NSF", "LU + RQ-spline coupling, context, embedding_net", nsf, modes="train eval", context_shape=(5,)),
    *nonlinear("MAF", "RandomPermutation stack, relu", maf, modes="train eval"),
    *nonlinear(
        "Glow", "2 levels of 2 nested steps", deep_glow, modes="train eval", shape=(3, 4, 4), latent=(48,), noise=0.1
    ),
    *nonlinear(
        "Nested",
        "Composite(Inverse(Composite), Multiscale)",
        composite(
            inverse(composite(lu, partial(coupling, T.AffineCouplingTransform), partial(act_norm, D))), two_levels
        ),
        noise=0.15,
    ),
    *nonlinear(
        "DiagonalNormal base",
        "vec",
        on_base(partial(DiagonalNormal, VEC)),
        own_sample=False,
        note="its _sample is not implemented",
    ),
    *nonlinear(
        "ConditionalDiagonalNormal base",
        "vec, context=3, encoder",
        on_base(lambda: ConditionalDiagonalNormal(VEC, nn.Linear(3, 2 * D)), context_features=3),
        **CONTEXT,
    ),
    *nonlinear(
        "MADEMoG base",
        "vec, no context",
        on_base(partial(MADEMoG, D, 8, None, num_mixture_components=3, activation=torch.tanh)),
        own_sample=False,
        note="MADEMoG draws only with a context",
    ),
    *nonlinear(
        "MADEMoG base",
        "vec, context=3",
        on_base(partial(MADEMoG, D, 8, 3, num_mixture_components=3, activation=torch.tanh), context_features=3),
        own_sample=False,
        note="MADEMoG draws only in float32",
        **CONTEXT,
    ),
    *nonlinear("Laplace base", "vec, the user's own nn.Module", on_base(partial(Laplace, D))),
    *nonlinear(
        "NaiveLinear stack",
        "vec, orthogonal_initialization=False, LeakyReLU(0.5)",
        composite(naive, partial(T.LeakyReLU, 0.5), naive, partial(T.LeakyReLU, 0.5), naive),
        modes="train eval",
        own_inverse=False,
        own_tol=1e-6,
        note=f"{SOLVE_GONE}; the log-det of LeakyReLU has float32 precision",
    ),
    *nonlinear("Shared", "vec, one LULinear at two places", shared, modes="train eval"),
    *nonlinear("Inverse of Multiscale", "vec", lambda: T.InverseTransform(two_levels())),
    *linear("Inverse of Multiscale", "flat to img, all linear", image_inverse, shape=(64,), latent=IMG, noise=0.1),
    *nonlinear("Logit + Glow step", "img in [0,1]", logit_images, domain="unit", latent=(16, 2, 2), noise=0.1),
    *nonlinear("Multiscale", "vec, 3 levels of odd sizes 11, 5, 2", three_levels, shape=(11,)),
    *nonlinear(
        "Cached",
        "vec, LU + QR + SVD with using_cache=True, coupling",
        composite(lu_cached, partial(coupling, T.AffineCouplingTransform), qr_cached, svd_cached),
        own_inverse=False,
        note=EYE_FLOAT32,
    ),
)
