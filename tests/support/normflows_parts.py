"""How the normflows cases are made: the case of a flow, and the parts that they are put together from."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import normflows as nf
import torch
from normflows import flows
from normflows.distributions import ClassCondDiagGaussian, DiagGaussian
from normflows.nets import LipschitzMLP
from torch import Tensor, nn

from case import CONTEXT_SEED, Case, perturb, seeded
from randomness import rng

D, CLASSES, CONTEXT = 6, 3, 3
VEC, IMG = (D,), (4, 2, 4)  # height and width differ, so that nothing may mistake one for the other
BOTH = "train eval"
Make = Callable[[], nn.Module | list[nn.Module]]  # a Flow, Flows in the order of sampling, or a whole model
MODELS = (nf.NormalizingFlow, nf.ClassCondFlow, nf.MultiscaleFlow)

FLOAT32 = {"own_tol": 1e-6, "note": "the library sums these log-dets in float32"}
SELF_INIT = "the first batch becomes the parameters of its ActNorm, in eval mode too"
TRTRS_GONE = "torch.trtrs is gone, so that the cached inverse raises"


@dataclass(frozen=True)
class NormflowsCase(Case):
    """One model of normflows. Its context may be class labels, which the library calls y."""

    library: str = "normflows"
    classes: int | None = None  # labels: integers where `context_shape` is (), one-hot rows where it is (classes,)

    def context(self, batch: int = 5, seed: int = 0) -> Tensor | None:
        """Draw a batch of contexts: of class labels where the case has classes."""
        if self.classes is None:
            return super().context(batch, seed)
        generator = rng(CONTEXT_SEED + seed)
        labels = torch.randint(self.classes, (batch,), generator=generator)
        return nn.functional.one_hot(labels, self.classes).double() if self.context_shape else labels

    def own(self, flow: nn.Module, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Give the library's own log-density of x, of shape (B,)."""
        return own_log_prob(flow, x, context)

    def __str__(self) -> str:
        return f"normflows {self.name}"  # nflows has classes of the same names


def own_log_prob(flow: nn.Module, x: Tensor, context: Tensor | None = None) -> Tensor:
    """Call `log_prob` as this class of models wants it; on a copy of x, since `Shift` writes into what it is given."""
    if isinstance(flow, nf.ClassCondFlow | nf.MultiscaleFlow):
        return flow.log_prob(x.clone(), context)  # a MultiscaleFlow without classes wants a y of None
    if isinstance(flow, nf.ConditionalNormalizingFlow):
        return flow.log_prob(x.clone(), context=context)
    return flow.log_prob(x.clone())


def show(flow: nn.Module, x: Tensor, context: Tensor | None) -> None:
    """Let a batch through the flow, so that what initialises itself from data has done so."""
    if isinstance(flow, nf.MultiscaleFlow):
        flow.inverse_and_log_det(x)  # log_prob raises where the first step is an ActNorm
    else:
        own_log_prob(flow, x, context)


def smallest(
    make: Make, latent: tuple[int, ...], context_shape: tuple[int, ...] | None, classes: int | None
) -> nn.Module:
    """Give the smallest model of the library that holds the flow or flows; a model as it is."""
    part = make()
    if isinstance(part, MODELS):
        return part
    steps = part if isinstance(part, list) else [part]
    if classes is not None:
        return nf.ClassCondFlow(ClassCondDiagGaussian(latent, classes), steps)
    model = nf.NormalizingFlow if context_shape is None else nf.ConditionalNormalizingFlow
    return model(DiagGaussian(latent), steps)


def model_case(
    name: str,
    make: Make,
    shape: tuple[int, ...] = VEC,
    mode: str = "eval",
    *,
    latent: tuple[int, ...] | None = None,
    noise: float = 0.3,
    seen_data: bool = False,
    context_shape: tuple[int, ...] | None = None,
    classes: int | None = None,
    **facts: object,
) -> NormflowsCase:
    """Give the case of a flow or model: seeded, in float64, moved away from its initial values, in its mode.

    With `seen_data`, a batch has gone through it before: what initialises itself from data has done so.
    """

    def build() -> nn.Module:
        with seeded(), torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.lu is deprecated")
            flow = smallest(make, latent or shape, context_shape, classes).double().eval()
            if seen_data:
                show(flow, found.x(32, seed=1), found.context(32, seed=1))
        perturb(flow, noise)
        nf.utils.update_lipschitz(flow, 50)  # a perturbed Residual is no contraction before
        return flow.train(mode == "train")

    found = NormflowsCase(name, build=build, event_shape=shape, context_shape=context_shape, classes=classes, **facts)
    return found


def rows(cls: str, config: str, make: Make, modes: str = "eval", **options: object) -> list[NormflowsCase]:
    """Give one case a mode."""
    options = {"shape": IMG if config.startswith("img") else VEC} | options
    return [model_case(f"{cls}: {config} ({mode})", make, mode=mode, **options) for mode in modes.split()]


linear = partial(rows, expect="linear")
nonlinear = partial(rows, expect="nonlinear")
refused = partial(rows, expect="refused")


# The parts


def net(n_in: int, n_out: int, activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    """Give the conditioner of a coupling of vectors."""
    return nn.Sequential(nn.Linear(n_in, 8), activation(), nn.Linear(8, n_out))


def conv_net(n_in: int, n_out: int) -> nn.Module:
    """Give the conditioner of a coupling of images."""
    return nn.Sequential(nn.Conv2d(n_in, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, n_out, 1))


def masked(scale: nn.Module | None, shift: nn.Module | None, first: int = 1, size: int = D) -> nn.Module:
    """Give a MaskedAffineFlow that keeps every other coordinate."""
    return flows.MaskedAffineFlow(torch.tensor([float((i + first) % 2) for i in range(size)]), s=scale, t=shift)


def lu_permute(size: int = D, cached: bool = False, **options: bool) -> nn.Module:
    flow = flows.LULinearPermute(size, **options)
    flow.linear.use_cache(cached)
    return flow


def residual(size: int = D, **options: object) -> nn.Module:
    """Give a Residual with a Lipschitz constant of 1/4: the 20 terms that its series always has are then exact."""
    return flows.Residual(LipschitzMLP([size, 8, size], lipschitz_const=0.5, init_zeros=False), **options)


def rqs(kind: str, *args: object, size: int = D, activation: type[nn.Module] = nn.Tanh, **options: object) -> nn.Module:
    """Give a rational-quadratic spline flow, of kind Coupled, Autoregressive, CircularCoupled, …"""
    cls = getattr(flows, f"{kind}RationalQuadraticSpline")
    return cls(size, 1, 8, *args, num_bins=4, activation=activation, **options)


def glow_levels(**options: object) -> tuple[list[list[nn.Module]], list[nn.Module]]:
    """Give the flows and merges of a Glow for images (1, 4, 4), with latents (8, 1, 1) and (2, 2, 2)."""
    levels = [[flows.GlowBlock(channels, 6, **options), flows.Squeeze()] for channels in (8, 4)]
    return levels, [flows.Merge()]
