"""The sinh-arcsinh map: an elementwise nonlinearity with parameters for the tails and the skewness of each feature."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ebflow_plugin.errors import InputError
from ebflow_plugin.options import as_integer, at_least


class SinhArcsinh(nn.Module):
    r"""The sinh-arcsinh map of Jones and Pewsey (2009), elementwise, smooth and invertible in closed form.

    .. math::
        z_i = \sinh(w_i), \quad w_i = \delta_i \operatorname{arsinh}(y_i) - \epsilon_i, \qquad
        \log |\det| = \sum_i \log \delta_i + \log \cosh w_i - \tfrac12 \log(1 + y_i^2)

    With :math:`\delta < 1` heavy tails become lighter, :math:`|z| \sim |y|^\delta`, on both sides, so that outliers
    stay finite however many layers follow; :math:`\epsilon` removes skewness. It is initialised to the identity,
    :math:`\delta = 1, \epsilon = 0`; ``model.initialize(data, gaussianize=True)`` fits it in closed form.

    Cost: :math:`O(D)`, the inverse too.

    Arguments:
        features: The number :math:`D` of features.
        dim: The dimension that they are in, counted from the end: the last one, or -3 for the channels of images.
        device: The device of the parameters.
        dtype: Their dtype.

    Attributes:
        log_tail: :math:`\log \delta`, with shape ``(D,)``.
        skewness: :math:`\epsilon`, with shape ``(D,)``.

    Example:
        >>> layer = SinhArcsinh(3)
        >>> x = torch.tensor([[-2.0, 0.0, 3.0]])
        >>> torch.allclose(layer.transform(x), x)
        True
        >>> layer.log_det(x).shape
        torch.Size([1])
        >>> SinhArcsinh(3, dim=-3).transform(torch.zeros(1, 3, 8, 8)).shape
        torch.Size([1, 3, 8, 8])
    """

    def __init__(
        self,
        features: int,
        dim: int = -1,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.features = at_least(1, "features", features)
        number = as_integer(dim)
        if number is None or number >= 0:
            raise InputError(f"dim must be a negative integer, such as -1 or -3, got {dim!r}.")
        self.dim = number
        self.log_tail = nn.Parameter(torch.zeros(features, device=device, dtype=dtype))
        self.skewness = nn.Parameter(torch.zeros(features, device=device, dtype=dtype))

    def transform(self, x: Tensor) -> Tensor:
        """Applies the map to every element of ``x``, with shape (*, D), or (*, D, H, W) for ``dim=-3``."""
        return torch.sinh(self._angle(x))

    def invert(self, y: Tensor) -> Tensor:
        """Returns the ``x`` that ``transform`` maps to ``y``."""
        self._check(y)
        log_tail, skewness = self._placed()
        return torch.sinh((torch.asinh(y) + skewness) * torch.exp(-log_tail))

    def log_det(self, x: Tensor) -> Tensor:
        """Returns the log-determinant of each sample of ``x``, with shape (B, ..., D): shape (B,)."""
        return self.slope(x).log().flatten(1).sum(1)

    def slope(self, x: Tensor) -> Tensor:
        """Returns the derivative at every element of ``x``."""
        return torch.exp(self._placed()[0]) * torch.cosh(self._angle(x)) * (1 + x * x).rsqrt()

    def slopes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the derivative, and the first and second derivative of its logarithm, at every element of ``x``."""
        angle, tail, inner = self._angle(x), torch.exp(self._placed()[0]), (1 + x * x).rsqrt()
        tanh = torch.tanh(angle)
        turn, pull = tail * tanh * inner, x * inner.square()
        second = (tail * inner).square() * (1 - tanh * tanh) - turn * pull - inner.square() + 2 * pull.square()
        return tail * torch.cosh(angle) * inner, turn - pull, second

    def extra_repr(self) -> str:
        """Describes the layer in the ``repr`` of a model."""
        return str(self.features) if self.dim == -1 else f"{self.features}, dim={self.dim}"

    def _placed(self) -> tuple[Tensor, Tensor]:
        """The parameters, in a shape to be broadcast against a batch."""
        if self.dim == -1:
            return self.log_tail, self.skewness
        shape = (-1, *(1 for _ in range(-1 - self.dim)))
        return self.log_tail.view(shape), self.skewness.view(shape)

    def _angle(self, x: Tensor) -> Tensor:
        self._check(x)
        log_tail, skewness = self._placed()
        return torch.exp(log_tail) * torch.asinh(x) - skewness

    def _check(self, x: Tensor) -> None:
        if x.dim() < -self.dim or x.shape[self.dim] != self.features:
            place = "the last dimension" if self.dim == -1 else f"dimension {self.dim}"
            raise InputError(
                f"SinhArcsinh({self.extra_repr()}) takes {self.features} features in {place}, "
                f"but got shape {tuple(x.shape)}."
            )
