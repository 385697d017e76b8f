"""The smooth leaky ReLU of the paper."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebflow_plugin.errors import InputError


class SmoothLeakyReLU(nn.Module):
    r"""An elementwise, smooth, invertible activation.

    .. math::
        z = \alpha y + (1 - \alpha) \log(1 + e^y), \qquad
        \log |\det| = \sum_i \log(\alpha + (1 - \alpha) \sigma(y_i))

    This is the smooth leaky ReLU of Table A.2 of the paper. The residual form adds :math:`y`, so that the slope lies
    between :math:`1 + \alpha` and 2. All derivatives exist, so it can be used with every objective.

    Cost: :math:`O(D)`. The inverse takes a fixed number of Newton steps, without synchronising with the device.

    Arguments:
        alpha: The slope at minus infinity, in (0, 1].
        residual: Whether to add the input.

    Example:
        >>> layer = SmoothLeakyReLU(alpha=0.3)
        >>> x = torch.tensor([[-2.0, 0.0, 3.0]], dtype=torch.float64)
        >>> y = layer.transform(x)
        >>> torch.allclose(layer.invert(y), x)
        True
        >>> layer.log_det(x).shape
        torch.Size([1])
    """

    # Four reach double precision from the point of _start, for every alpha down to 1e-300 (measured).
    steps = 6

    def __init__(self, alpha: float = 0.3, residual: bool = False) -> None:
        super().__init__()
        if not 0 < alpha <= 1:
            raise InputError(f"alpha must lie in (0, 1], got {alpha}.")
        self.alpha = float(alpha)
        self.residual = residual

    def transform(self, x: Tensor) -> Tensor:
        """Applies the activation to every element of ``x``."""
        # torch's own threshold of 20 is wrong by 2e-9; at 40 the two branches agree to the last bit of a double.
        return torch.add(self._slope * x, F.softplus(x, threshold=40.0), alpha=1 - self.alpha)

    def log_det(self, x: Tensor) -> Tensor:
        """Returns the log-determinant of each sample of ``x``, with shape (B, ...): shape (B,)."""
        each = self.slope(x).log()
        return each.flatten(1).sum(1) if each.dim() > 1 else each

    def slope(self, x: Tensor) -> Tensor:
        """Returns the derivative at every element of ``x``."""
        return self._slope + (1 - self.alpha) * torch.sigmoid(x)

    def slopes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the derivative, and the first and second derivative of its logarithm, at every element of ``x``."""
        share = torch.sigmoid(x)
        slope = self._slope + (1 - self.alpha) * share
        first = (1 - self.alpha) * (share - share.square()) / slope  # a graph keeps fewer tensors than of a product
        return slope, first, first * (1 - 2 * share - first)

    def invert(self, y: Tensor) -> Tensor:
        """Returns the ``x`` that ``transform`` maps to ``y``.

        Accurate to rounding for every finite ``y``, and differentiable: derivatives up to the third are exact, in
        reverse and in forward mode.
        """
        bend = 1 - self.alpha
        if bend == 0:
            return y / self._slope
        goal = y.detach()
        # Softplus lies between relu and relu + log 2, which brackets the root.
        low, high = self._straight(goal - bend * math.log(2)), self._straight(goal)
        x = self._start(goal)
        for _ in range(self.steps):
            x = torch.minimum(torch.maximum(self._newton(x, goal), low), high)
        # A Newton step with a graph, taken at the root, has the correct first derivative. Each further step doubles the
        # number of correct derivatives and adds one: two steps have three, as the gradient of score matching needs.
        for _ in range(2):
            x = self._newton(x, y)
        return x

    def extra_repr(self) -> str:
        """Describes the layer in the ``repr`` of a model."""
        return f"alpha={self.alpha}, residual={self.residual}"

    @property
    def _slope(self) -> float:
        return 1 + self.alpha if self.residual else self.alpha

    def _newton(self, x: Tensor, goal: Tensor) -> Tensor:
        return x - (self.transform(x) - goal) / self.slope(x)

    def _straight(self, y: Tensor) -> Tensor:
        """The inverse of the activation with relu in place of softplus."""
        return torch.where(y > 0, y / (self._slope + 1 - self.alpha), y / self._slope)

    def _start(self, y: Tensor) -> Tensor:
        r"""Returns a point near the root, from where Newton's method converges in a few steps.

        The function is convex and increasing, so Newton's method lands to the right of the root after one step, and
        descends from there. But far from the root, where for a small alpha the function is nearly exponential, it moves
        only by 1 per step. For a root below zero, softplus lies between :math:`e^x \log 2` and :math:`e^x`. With
        :math:`e^x` in its place the root is :math:`y / s - t`, where
        :math:`t + \log t = y / s + \log((1 - \alpha) / s)` and :math:`s` is the slope; the true root lies at most
        :math:`-\log\log 2 = 0.37` above it.
        """
        slope, bend = self._slope, 1 - self.alpha
        shift = math.log(bend) - math.log(slope)
        line = y / slope
        right = (line + shift).clamp(max=torch.finfo(y.dtype).max)
        # t by its asymptotes and Newton steps; below -1, t = exp(right) is accurate enough.
        middle = right.clamp(min=-1)
        t = torch.where(middle > 1, middle - middle.clamp(min=1).log(), middle.clamp(max=1).exp())
        for _ in range(2):
            t = t * ((1 + middle - t.log()) / (1 + t))
        t = torch.where(right < -1, right.clamp(max=0).exp(), t)
        curved = torch.where(t < 1, line - t, t.log() - shift)  # equal, but each loses digits where the other does not
        return torch.where(y < bend * math.log(2), curved, self._straight(y))
