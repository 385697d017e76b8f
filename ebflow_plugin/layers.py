r"""The maps that the flow libraries lack, with their arithmetic written once.

An adapter mixes these modules with its library's base class and gives them that library's ``forward`` and
``inverse``; they define neither. ``transform`` is the density direction, from data to noise; ``invert`` undoes it.
"""

from __future__ import annotations

import math
from itertools import product

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ebflow_plugin.errors import InputError, suggest
from ebflow_plugin.linalg.circular import conv_operator
from ebflow_plugin.linalg.convolution import conv_matrix
from ebflow_plugin.linalg.dense import KeptLU
from ebflow_plugin.linalg.geometry import Setting, convolve, convolve_transposed, positive_integer
from ebflow_plugin.linalg.operators import Operator, dense_operator, single_at_least
from ebflow_plugin.sinh_arcsinh import SinhArcsinh

__all__ = ["FullConv2d", "FullLinear", "SinhArcsinh", "SmoothLeakyReLU"]

INITS = ("identity", "negative_identity", "normal", "orthogonal")


class FullLinear(nn.Module):
    r"""A fully-connected map with an unconstrained weight.

    .. math:: z = W y + b

    The log-determinant is :math:`\log |\det W|` (Table A.2 of the paper, fully-connected).

    Cost: :math:`O(D^2)` for each vector transformed. ``log_det`` and the first ``invert`` are :math:`O(D^3)`; what they
    compute is kept until the weight changes, unless the weight wants a gradient.

    Arguments:
        features: The number :math:`D` of features.
        bias: Whether there is a bias.
        init: How the weight begins: ``identity``, ``negative_identity`` (as in the paper's models), ``orthogonal``
            (random), or ``normal`` (independent entries of variance :math:`1 / D`). The bias begins at zero.
        generator: The source of random numbers for ``init``.
        device: Where the parameters are.
        dtype: Their type.

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
        features = self.features = positive_integer("features", features)
        self.init = _known_init(init)
        self.weight = nn.Parameter(torch.empty(features, features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(features, device=device, dtype=dtype)) if bias else None
        self._lu = KeptLU()
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Begins anew, as ``init`` says."""
        if self.init == "normal":
            nn.init.normal_(self.weight, std=self.features**-0.5, generator=generator)
        else:
            _orthogonal(self.weight, self.init, generator)
        if self.bias is not None:
            self.bias.zero_()

    def transform(self, x: Tensor) -> Tensor:
        r"""Returns :math:`W x + b` for ``x`` with shape :math:`(*, D)`."""
        self._check(x.shape)
        return F.linear(x, self.weight, self.bias)

    def multiply(self, x: Tensor) -> Tensor:
        r"""Returns :math:`W x`, without the bias."""
        return F.linear(x, self.weight)

    def multiply_transposed(self, y: Tensor, shape: tuple[int, ...]) -> Tensor:
        r"""Returns :math:`W^\top y` with the given shape, which is that of ``y``."""
        return y @ self.weight

    def invert(self, y: Tensor) -> Tensor:
        r"""Returns the ``x``, with shape :math:`(*, D)`, that ``transform`` takes to ``y``.

        Raises:
            SingularError: The weight has no inverse.
        """
        self._check(y.shape)
        right = y if self.bias is None else y - self.bias
        return self._lu.solve(self.weight, right.reshape(-1, self.features)).reshape(y.shape)

    def log_det(self, event_shape: tuple[int, ...]) -> Tensor:
        r"""Returns :math:`\log |\det|` of ``transform`` for events with shape :math:`(*, D)`, a scalar.

        Raises:
            SingularError: The weight has no inverse, and wants no gradient. In a graph the result is ``-inf``, since
                a training step must not wait for the device.
        """
        self._check(event_shape)
        return self._lu.log_abs_det(self.weight) * math.prod(event_shape[:-1])

    def operator(self, event_shape: tuple[int, ...]) -> Operator:
        r"""Returns :math:`W`, for events with shape :math:`(*, D)`, as something that multiplies."""
        self._check(event_shape)
        return dense_operator(single_at_least(self.weight), times=math.prod(event_shape[:-1]))

    def output_shape(self, event_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the output for an event shape: the same."""
        self._check(event_shape)
        return tuple(event_shape)

    def input_shape(self, event_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the event shape whose output has the given shape: the same."""
        return self.output_shape(event_shape)

    def extra_repr(self) -> str:
        """Describes the layer in the text of a model."""
        return f"{self.features}, bias={self.bias is not None}, init={self.init!r}"

    def _check(self, shape: tuple[int, ...]) -> None:
        if len(shape) == 0 or shape[-1] != self.features:
            raise InputError(
                f"FullLinear({self.features}) takes {self.features} features in the last dimension, "
                f"but got shape {tuple(shape)}."
            )


class FullConv2d(nn.Module):
    r"""A convolution with an unconstrained kernel, for any setting that keeps the number of elements.

    .. math:: z = w \star y + b

    The log-determinant is :math:`\log |\det \hat W|` of the :math:`D \times D` matrix that the convolution is (Table
    A.2 of the paper, convolutional). The matrix is never built where it has structure
    (:mod:`ebflow_plugin.linalg.convolution`). ``log_det`` and the factors for ``invert`` are kept until the kernel or
    the size of the image changes, unless the kernel wants a gradient (:class:`~ebflow_plugin.linalg.dense.KeptLU`).

    Arguments:
        in_channels: The number of input channels.
        out_channels: The number of output channels; ``in_channels`` times the area of the stride by default.
        kernel_size: The height and width of the kernel.
        stride: The vertical and horizontal stride.
        padding: One number, (vertical, horizontal), or (left, right, top, bottom). By default such that the output
            has a pixel for each cell of stride x stride pixels of the input: half of what the kernel exceeds the
            stride by on either side, the odd one at the end.
        dilation: The vertical and horizontal distance of the kernel's taps.
        groups: The number of groups of channels that do not mix.
        bias: Whether there is a bias for each output channel.
        padding_mode: ``zeros``, ``circular``, ``reflect`` or ``replicate``.
        init: How the kernel begins. ``identity``: each output channel copies one element of its cell, so that the map
            is the identity for stride 1 and takes space to depth otherwise (in the order of
            ``torch.nn.functional.pixel_unshuffle``); ``negative_identity``: the same, negated; ``orthogonal``: a random
            orthogonal mixing of the elements of a cell; ``normal``: the identity plus independent entries of
            standard deviation 0.1 over the root of the fan-in, which are small since a convolution with a kernel of
            noise alone is nearly singular. Where the output channels do not match the cells, only ``normal`` is
            possible, and means entries of variance one over the fan-in. The bias begins at zero.
        generator: The source of random numbers for ``init``.
        device: Where the parameters are.
        dtype: Their type.

    The order of the arguments is that of ``torch.nn.Conv2d``.

    Example:
        >>> layer = FullConv2d(3, 3, 7, init="negative_identity")
        >>> layer.transform(torch.ones(1, 3, 8, 8)).shape
        torch.Size([1, 3, 8, 8])
        >>> FullConv2d(3, kernel_size=4, stride=2).output_shape((3, 8, 8))
        (12, 4, 4)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        kernel_size: int | tuple[int, int] | None = None,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | tuple[int, int, int, int] | None = None,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        init: str = "identity",
        generator: Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if kernel_size is None or isinstance(out_channels, (tuple, list)):
            size = "…" if out_channels is None else out_channels
            raise InputError(
                f"got out_channels={out_channels}, kernel_size={kernel_size}: the order is FullConv2d(in_channels, "
                "out_channels, kernel_size), as in torch.nn.Conv2d. To leave out_channels out, write "
                f"FullConv2d({in_channels}, kernel_size={size})."
            )
        self.setting = Setting.of(
            in_channels, kernel_size, out_channels, stride, padding, padding_mode, dilation, groups
        )
        self.init = _known_init(init)
        shape = (self.setting.out_channels, in_channels // groups, *self.setting.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        self._lu = KeptLU(conv_matrix)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Begins anew, as ``init`` says."""
        setting, taps = self.setting, self.setting.cell_taps()
        fan_in = math.prod(self.weight.shape[1:])
        if self.bias is not None:
            self.bias.zero_()
        if taps is None:
            if self.init != "normal":
                raise InputError(
                    f"init={self.init!r} needs an output channel, and a tap of the kernel, for each element of a cell "
                    f"of stride x stride pixels, which {setting} has not. Use init='normal' if you mean it; the order "
                    "is (in_channels, out_channels, kernel_size), as in torch.nn.Conv2d."
                )
            nn.init.normal_(self.weight, std=fan_in**-0.5, generator=generator)
            return
        if self.init == "normal":
            nn.init.normal_(self.weight, std=0.1 * fan_in**-0.5, generator=generator)
        else:
            self.weight.zero_()
        block = setting.out_channels // setting.groups
        mixing = self.weight.new_empty(setting.groups, block, block)
        for part in mixing:
            _orthogonal(part, self.init, generator)
        kernel = self.weight.view(setting.groups, block, -1, *setting.kernel_size)
        cell = mixing.view(setting.groups, block, -1, *setting.stride)
        for row, column in product(range(setting.stride[0]), range(setting.stride[1])):
            kernel[..., taps[0][row], taps[1][column]] += cell[..., row, column]

    def transform(self, x: Tensor) -> Tensor:
        r"""Convolves images ``x`` with shape :math:`(B, C, H, W)`.

        Raises:
            InputError: The output would have more or fewer elements than the input.
        """
        _check_batch(x)
        return convolve(x, self.weight, self.setting.geometry(x.shape[1:]), self.bias)

    def multiply(self, x: Tensor) -> Tensor:
        """Convolves without the bias."""
        return convolve(x, self.weight, self.setting.geometry(x.shape[1:]))

    def multiply_transposed(self, y: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Applies the transpose of ``multiply``, for images with the given shape."""
        return convolve_transposed(y, self.weight, self.setting.geometry(shape[1:]))

    def invert(self, y: Tensor) -> Tensor:
        r"""Returns the images that ``transform`` takes to ``y``, with shape :math:`(B, C', H', W')`.

        Raises:
            SingularError: The convolution has no inverse.
            InputError: It has no structure, and is too large for a dense factorisation.
        """
        _check_batch(y)
        geometry = self.setting.geometry(self.setting.input_shape(y.shape[1:]))
        right = y if self.bias is None else y - self.bias[:, None, None]
        return self._lu.solve(self.weight, right, geometry)

    def log_det(self, event_shape: tuple[int, ...]) -> Tensor:
        r"""Returns :math:`\log |\det|` of ``transform`` for images with shape :math:`(C, H, W)`, a scalar.

        Raises:
            SingularError: The convolution has no inverse, and its kernel wants no gradient. In a graph the result is
                ``-inf``, since a training step must not wait for the device.
            InputError: It has no structure, and is too large for a dense factorisation.
        """
        return self._lu.log_abs_det(self.weight, self.setting.geometry(event_shape))

    def operator(self, event_shape: tuple[int, ...]) -> Operator:
        """Returns the linear part, for images with shape (C, H, W), as something that multiplies."""
        return conv_operator(single_at_least(self.weight), self.setting.geometry(event_shape))

    def output_shape(self, event_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape (C', H', W') of the output for images with shape (C, H, W)."""
        return self.setting.geometry(event_shape).out_shape

    def input_shape(self, event_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape (C, H, W) of the images whose output has shape (C', H', W')."""
        return self.setting.geometry(self.setting.input_shape(event_shape)).shape

    def extra_repr(self) -> str:
        """Describes the layer in the text of a model."""
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self.setting).items())
        return f"{fields}, bias={self.bias is not None}, init={self.init!r}"


class SmoothLeakyReLU(nn.Module):
    r"""An elementwise, smooth, invertible activation.

    .. math::
        z = \alpha y + (1 - \alpha) \log(1 + e^y), \qquad
        \log |\det| = \sum_i \log(\alpha + (1 - \alpha) \sigma(y_i))

    This is the smooth leaky ReLU of Table A.2 of the paper. The residual form adds :math:`y`, so that the slope lies
    between :math:`1 + \alpha` and 2. All derivatives exist, so that it suits every objective.

    Cost: :math:`O(D)`. The inverse takes a fixed number of Newton steps, and waits for nothing.

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

    # Four reach double precision from the start that _start gives, for every alpha down to 1e-300 (measured).
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
        return self._slope * x + (1 - self.alpha) * F.softplus(x, threshold=40.0)

    def log_det(self, x: Tensor) -> Tensor:
        """Returns the log-determinant at ``x``, with shape (B, ...), for each sample: shape (B,)."""
        each = self.slope(x).log()
        return each.flatten(1).sum(1) if each.dim() > 1 else each

    def slope(self, x: Tensor) -> Tensor:
        """Returns the derivative at every element of ``x``."""
        return self._slope + (1 - self.alpha) * torch.sigmoid(x)

    def slopes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the derivative, and the first and second derivative of its logarithm, at every element of ``x``."""
        share = torch.sigmoid(x)
        slope = self._slope + (1 - self.alpha) * share
        first = (1 - self.alpha) * share * (1 - share) / slope
        return slope, first, first * (1 - 2 * share - first)

    def invert(self, y: Tensor) -> Tensor:
        """Returns the ``x`` that ``transform`` takes to ``y``.

        Precise to rounding for every finite ``y``, and differentiable: derivatives up to the third are exact, in
        reverse and in forward mode.
        """
        bend = 1 - self.alpha
        if bend == 0:
            return y / self._slope
        goal = y.detach()
        # softplus lies between relu and relu + log 2, which brackets the root
        low, high = self._straight(goal - bend * math.log(2)), self._straight(goal)
        x = self._start(goal)
        for _ in range(self.steps):
            x = torch.minimum(torch.maximum(self._newton(x, goal), low), high)
        # A Newton step with a graph, taken at the root, has the right first derivative. Each further one doubles the
        # number of right derivatives and adds one: two give three, as the gradient of a score-matching loss needs.
        for _ in range(2):
            x = self._newton(x, y)
        return x

    def extra_repr(self) -> str:
        """Describes the layer in the text of a model."""
        return f"alpha={self.alpha}, residual={self.residual}"

    @property
    def _slope(self) -> float:
        return 1 + self.alpha if self.residual else self.alpha

    def _newton(self, x: Tensor, goal: Tensor) -> Tensor:
        return x - (self.transform(x) - goal) / self.slope(x)

    def _straight(self, y: Tensor) -> Tensor:
        """Inverts the activation with relu in the place of softplus."""
        return torch.where(y > 0, y / (self._slope + 1 - self.alpha), y / self._slope)

    def _start(self, y: Tensor) -> Tensor:
        r"""Returns a point near the root, from where Newton's method converges in a few steps.

        The function is convex and increasing, so that Newton's method comes to the right of the root in one step, and
        from there down to it; but far from it, where a small alpha leaves an exponential, it moves by 1 a step only.
        For a root below zero, softplus lies between :math:`e^x \log 2` and :math:`e^x`. With :math:`e^x` in its place
        the root is at :math:`y / s - t`, where :math:`t + \log t = y / s + \log((1 - \alpha) / s)` and :math:`s` is
        the slope; the true root lies at most :math:`-\log\log 2 = 0.37` above it.
        """
        slope, bend = self._slope, 1 - self.alpha
        shift = math.log(bend) - math.log(slope)
        line = y / slope
        right = (line + shift).clamp(max=torch.finfo(y.dtype).max)
        # t by its asymptotes and Newton steps; below -1, t = exp(right) is near enough
        middle = right.clamp(min=-1)
        t = torch.where(middle > 1, middle - middle.clamp(min=1).log(), middle.clamp(max=1).exp())
        for _ in range(2):
            t = t * ((1 + middle - t.log()) / (1 + t))
        t = torch.where(right < -1, right.clamp(max=0).exp(), t)
        bent = torch.where(t < 1, line - t, t.log() - shift)  # equal, but each loses digits where the other does not
        return torch.where(y < bend * math.log(2), bent, self._straight(y))


def _known_init(name: str) -> str:
    if name not in INITS:
        raise InputError(f"unknown init {name!r}. {suggest(name, INITS)}")
    return name


def _orthogonal(matrix: Tensor, init: str, generator: Generator | None) -> None:
    """Fills a square matrix with a random rotation, or with plus or minus the identity."""
    if init == "orthogonal":
        nn.init.orthogonal_(matrix, generator=generator)
    else:
        nn.init.eye_(matrix).mul_(-1 if init == "negative_identity" else 1)


def _check_batch(images: Tensor) -> None:
    if images.dim() != 4:
        raise InputError(
            f"FullConv2d takes batches of images, shape (B, C, H, W), but got shape {tuple(images.shape)}."
        )
