"""How the zuko cases are made: the case of lazy transforms, and the parts that they are put together from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import zuko
from torch import Tensor, nn
from zuko.distributions import DiagNormal
from zuko.flows import ElementWiseTransform, GeneralCouplingTransform, MaskedAutoregressiveTransform
from zuko.lazy import Flow, LazyComposedTransform, LazyDistribution, LazyInverse, UnconditionalDistribution
from zuko.lazy import UnconditionalTransform as Fixed

from case import Case, case_rows, drawn, perturb

D, VEC, IMG = 4, (4,), (2, 4, 4)
Make = Callable[[], nn.Module]  # a LazyTransform, or a whole Flow
NET = {"hidden_features": (8,), "activation": nn.Tanh}
RELU = {"hidden_features": (8,)}
CONTEXT = {"context_shape": (3,)}
BISECTED = {"own_tol": 1e-4, "note": "zuko inverts it by bisection, to 1e-6"}


@dataclass(frozen=True)
class ZukoCase(Case):
    """One model of zuko."""

    library: str = "zuko"

    def own(self, flow: nn.Module, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Give the library's own log-density."""
        return flow(context).log_prob(x)

    def __str__(self) -> str:
        return f"zuko {self.name}"


def normal(*shape: int) -> LazyDistribution:
    return UnconditionalDistribution(DiagNormal, torch.zeros(shape), torch.ones(shape), ndims=len(shape), buffer=True)


def build(make: Make, latent: tuple[int, ...], mode: str, noise: float) -> nn.Module:
    """Build the flow, move it away from its initial values, and set its mode."""
    part = drawn(make)
    flow = (part if isinstance(part, LazyDistribution) else Flow(part, normal(*latent))).double()
    perturb(flow, noise)
    return flow.train(mode == "train")


rows = partial(case_rows, ZukoCase, build, (VEC, IMG), {"noise": 0.2})
linear = partial(rows, expect="linear")
nonlinear = partial(rows, expect="nonlinear")
refused = partial(rows, expect="refused")


# The parts


def fixed(maker: Callable, *shapes: tuple[int, ...], scale: float = 1.0, buffer: bool = False, **options) -> Make:
    """Give a transform whose parameters are random tensors of these shapes."""
    return lambda: Fixed(maker, *(scale * torch.randn(shape) for shape in shapes), buffer=buffer, **options)


def elementwise(context: int = 0, features: int = D, **options: object) -> Make:
    return lambda: ElementWiseTransform(features, context, **{**(NET if context else {}), **options})


def coupling(context: int = 0, **options: object) -> Make:
    return lambda: GeneralCouplingTransform(D, context, **{**NET, **options})


def autoregressive(context: int = 0, **options: object) -> Make:
    return lambda: MaskedAutoregressiveTransform(D, context, **{**NET, **options})


def inverse(make: Make) -> Make:
    return lambda: LazyInverse(make())


def composed(*makes: Make) -> Make:
    return lambda: LazyComposedTransform(*(make() for make in makes))


def flow(name: str, context: int = 0, **options: object) -> Make:
    return lambda: getattr(zuko.flows, name)(D, context, **{"transforms": 2, **NET, **options})


def lu(buffer: bool = False) -> Make:
    return lambda: Fixed(zuko.transforms.LULinearTransform, LU=torch.eye(D) + 0.2 * torch.randn(D, D), buffer=buffer)


rotation = fixed(zuko.transforms.RotationTransform, (D, D), scale=0.5)
permutation = lambda: Fixed(zuko.transforms.PermutationTransform, order=torch.tensor([2, 0, 3, 1]), buffer=True)  # noqa: E731
affine = fixed(zuko.transforms.MonotonicAffineTransform, VEC, VEC, scale=0.5)
