"""What a test case is: one flow of one library as a seeded factory, and what is known about it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial

import torch
from torch import Tensor, nn

from randomness import rng

X_SEED, CONTEXT_SEED, PERTURB_SEED = 10_000, 20_000, 30_000  # streams that never meet the one of a model's own draws


@dataclass(frozen=True)
class Case:
    """One model. The facts about the library are those of a *fresh* flow, which has not been called before."""

    name: str
    _: KW_ONLY
    library: str
    build: Callable[[], nn.Module]  # the flow: float64, in the row's mode; two calls give equal parameters and buffers
    event_shape: tuple[int, ...]
    domain: str = "real"  # where x lives: "real", "unit" ([0, 1]^D) or "interval" ((-1, 1)^D)
    context_shape: tuple[int, ...] | None = None
    expect: str = "nonlinear"  # all its transforms together: "linear", "nonlinear", "refused", "broken"
    own_log_prob: bool = True  # the library evaluates the density, and rightly (where "refused": it evaluates it)
    own_inverse: bool = True  # the library's inverse of the transform runs, and undoes its forward where that runs
    own_sample: bool = True  # the base density can draw noise
    own_tol: float = 1e-9  # how exact the library's own log_prob is, per unit of log p
    inverse_tol: float = 1e-9  # how exact the library's own inverse is, per unit of x
    error: type[Exception] | None = None  # what a "broken" case raises, in `build` or in the flow's `log_prob`
    note: str = ""

    def x(self, batch: int = 5, seed: int = 0) -> Tensor:
        """Draw a float64 batch from inside the domain, away from its edges."""
        generator = rng(X_SEED + seed)
        shape = (batch, *self.event_shape)
        if self.domain == "real":
            return torch.randn(shape, generator=generator, dtype=torch.float64)
        low, high = {"unit": (0.05, 0.95), "interval": (-0.9, 0.9)}[self.domain]
        return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)

    def context(self, batch: int = 5, seed: int = 0) -> Tensor | None:
        """Draw a float64 batch of contexts, or none for a flow without."""
        if self.context_shape is None:
            return None
        generator = rng(CONTEXT_SEED + seed)
        return torch.randn((batch, *self.context_shape), generator=generator, dtype=torch.float64)

    def own(self, flow: nn.Module, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the library's own log-density."""
        return flow.log_prob(x, context)

    @property
    def dim(self) -> int:
        """The number of elements of one x."""
        return math.prod(self.event_shape)

    @property
    def supported(self) -> bool:
        """Whether `wrap` takes the flow."""
        return self.expect in ("linear", "nonlinear")

    def __str__(self) -> str:
        return self.name


def case_rows(
    case: Callable[..., Case],
    build: Callable[..., nn.Module],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    usual: dict[str, object],
    cls: str,
    config: str,
    make: Callable[[], nn.Module],
    expect: str,
    modes: str = "eval",
    *,
    shape: tuple[int, ...] | None = None,
    latent: tuple[int, ...] | None = None,
    **facts: object,
) -> list[Case]:
    """Give one case for each mode. A library has the first four: its case, how a flow is built, shapes and options.

    The shape is that of images if the config begins with "img", else that of vectors; so is that of the latents.
    `build` takes what makes the flow, the shape of the latents, the mode, and the options that `usual` has values for.
    """
    shape = shape or shapes[config.startswith("img")]
    options = {name: facts.pop(name, value) for name, value in usual.items()}
    return [
        case(
            name=f"{cls}: {config} ({mode})",
            build=partial(build, make, latent or shape, mode, **options),
            event_shape=shape,
            expect=expect,
            **facts,
        )
        for mode in modes.split()
    ]


def drawn(make: Callable[[], nn.Module]) -> nn.Module:
    """Make something with the same random numbers each time; names that a library has deprecated are welcome."""
    with seeded(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return make()


def subclasses(cls: type) -> set[type]:
    """Return a class, and all that are derived from it."""
    return {cls, *(below for child in cls.__subclasses__() for below in subclasses(child))}


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Seed torch's CPU generator inside the block, and leave it as it was after."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@torch.no_grad()
def perturb(module: nn.Module, scale: float = 0.3, seed: int = 0) -> None:
    """Move every parameter away from its initial value, where many nonlinear layers look linear."""
    generator = rng(PERTURB_SEED + seed)
    for parameter in module.parameters():
        parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


@torch.no_grad()
def set_running_stats(module: nn.Module, seed: int = 0) -> None:
    """Give every batch normalisation the statistics of some data that it might have seen."""
    generator = rng(PERTURB_SEED + seed)
    for layer in module.modules():
        if isinstance(getattr(layer, "running_var", None), Tensor):
            layer.running_mean.normal_(0.0, 0.3, generator=generator)
            layer.running_var.uniform_(0.5, 1.5, generator=generator)
