"""A full, unconstrained linear layer."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ebflow_plugin.errors import InputError, suggest
from ebflow_plugin.linalg.dense import CachedLU, Dense
from ebflow_plugin.linalg.operators import LinearOperator, single_at_least
from ebflow_plugin.options import at_least

INITS = ("identity", "negative_identity", "normal", "orthogonal")


class FullLinear(nn.Module):
    r"""A fully-connected map with an unconstrained weight.

    .. math:: z = W y + b

    The log-determinant is :math:`\log |\det W|` (Table A.2 of the paper, fully-connected).

    Cost: :math:`O(D^2)` for each vector. ``log_det`` and the first ``invert`` are :math:`O(D^3)`; their results are
    cached until the weight changes, unless the weight requires a gradient.

    Arguments:
        features: The number :math:`D` of features.
        bias: Whether there is a bias.
        init: The initialisation of the weight: ``identity``, ``negative_identity`` (as in the paper's models),
            ``orthogonal`` (random), or ``normal`` (independent entries of variance :math:`1 / D`). The bias is
            initialised to zero.
        generator: The random generator of ``init``.
        device: The device of the parameters.
        dtype: Their dtype.

    Example:
        >>> layer = FullLinear(3, init="negative_identity")
        >>> layer.transform(torch.ones(2, 3))
        tensor([[-1., -1., -1.],
                [-1., -1., -1.]], grad_fn=<AddmmBackward0>)
        >>> layer.log_det((3,)).item()
        0.0
    """

    def __init__(
        self,
        features: int,
        bias: bool = True,
        init: str = "identity",
        *,
        generator: Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        features = self.features = at_least(1, "features", features)
        self.init = known_init(init)
        self.weight, self.bias = empty_parameters((features, features), bias, device, dtype)
        self.lu = CachedLU()
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Initialises the parameters again, by ``init``."""
        if self.init == "normal":
            nn.init.normal_(self.weight, std=self.features**-0.5, generator=generator)
        else:
            fill_orthogonal(self.weight, self.init, generator)
        if self.bias is not None:
            self.bias.zero_()

    def transform(self, x: Tensor) -> Tensor:
        r"""Returns :math:`W x + b` for ``x`` with shape :math:`(*, D)`."""
        self._check(x.shape)
        return F.linear(x, self.weight, self.bias)

    def multiply(self, x: Tensor) -> Tensor:
        r"""Returns :math:`W x`, without the bias."""
        return F.linear(x, self.weight)

    def invert(self, y: Tensor) -> Tensor:
        r"""Returns the ``x``, with shape :math:`(*, D)`, that ``transform`` maps to ``y``.

        Raises:
            SingularError: The weight has no inverse.
        """
        self._check(y.shape)
        right = y if self.bias is None else y - self.bias
        return self.lu.solve(self.weight, right.reshape(-1, self.features)).reshape(y.shape)

    def log_det(self, event_shape: tuple[int, ...]) -> Tensor:
        r"""Returns :math:`\log |\det|` of ``transform`` for events with shape :math:`(*, D)`, a scalar.

        Raises:
            SingularError: The weight has no inverse, and requires no gradient. In a graph the result is ``-inf``,
                since a training step must not synchronise with the device.
        """
        self._check(event_shape)
        each, times = self.lu.log_abs_det(self.weight), math.prod(event_shape[:-1])
        return each if times == 1 else each * times

    def operator(self, event_shape: tuple[int, ...]) -> LinearOperator:
        r"""Returns :math:`W` as an operator, for events with shape :math:`(*, D)`."""
        self._check(event_shape)
        return Dense(single_at_least(self.weight), times=math.prod(event_shape[:-1]))

    def output_shape(self, event_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the output for an event shape: the same."""
        self._check(event_shape)
        return tuple(event_shape)

    def input_shape(self, event_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the event shape whose output has the given shape: the same."""
        return self.output_shape(event_shape)

    def extra_repr(self) -> str:
        """Describes the layer in the ``repr`` of a model."""
        return f"{self.features}, bias={self.bias is not None}, init={self.init!r}"

    def _check(self, shape: tuple[int, ...]) -> None:
        if len(shape) == 0 or shape[-1] != self.features:
            raise InputError(
                f"FullLinear({self.features}) takes {self.features} features in the last dimension, "
                f"but got shape {tuple(shape)}."
            )


def known_init(name: str) -> str:
    """Returns the name, or raises if it is not in :data:`INITS`."""
    if name not in INITS:
        raise InputError(f"unknown init {name!r}. {suggest(name, INITS)}")
    return name


def empty_parameters(
    shape: tuple[int, ...], bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Returns an uninitialised weight of this shape and, if ``bias``, a bias with one entry for each of its rows."""
    weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
    return weight, nn.Parameter(weight.new_empty(shape[0])) if bias else None


def fill_orthogonal(matrix: Tensor, init: str, generator: Generator | None) -> None:
    """Fills a square matrix with a random rotation, or with plus or minus the identity."""
    if init == "orthogonal":
        nn.init.orthogonal_(matrix, generator=generator)
    else:
        nn.init.eye_(matrix).mul_(-1 if init == "negative_identity" else 1)
