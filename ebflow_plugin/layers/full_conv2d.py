"""A full, unconstrained convolution."""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Generator, Tensor, nn

from ebflow_plugin.errors import InputError
from ebflow_plugin.layers.full_linear import empty_parameters, fill_orthogonal, known_init
from ebflow_plugin.linalg.convolution import Convolution, conv_operator
from ebflow_plugin.linalg.dense import CachedLU
from ebflow_plugin.linalg.geometry import Setting, convolve, convolve_transposed
from ebflow_plugin.linalg.operators import LinearOperator, single_at_least


class FullConv2d(nn.Module):
    r"""A convolution with an unconstrained kernel, for any setting that preserves the number of elements.

    .. math:: z = w \star y + b

    The log-determinant is :math:`\log |\det \hat W|` of the :math:`D \times D` matrix of the convolution (Table A.2 of
    the paper, convolutional). The matrix is not built if it has structure (:mod:`ebflow_plugin.linalg.convolution`).
    ``log_det`` and the factors for ``invert`` are cached until the kernel or the size of the image changes, unless the
    kernel requires a gradient (:class:`~ebflow_plugin.linalg.dense.CachedLU`).

    Arguments:
        in_channels: The number of input channels.
        out_channels: The number of output channels; ``in_channels`` times the area of the stride by default.
        kernel_size: The height and width of the kernel.
        stride: The vertical and horizontal stride.
        padding: One number, (vertical, horizontal), or (left, right, top, bottom). By default such that the output
            has one pixel for each cell of stride x stride pixels of the input: half of the difference of kernel and
            stride on either side, with an odd one at the end.
        dilation: The vertical and horizontal distance of the kernel's taps.
        groups: The number of groups of channels that do not mix.
        bias: Whether there is a bias for each output channel.
        padding_mode: ``zeros``, ``circular``, ``reflect`` or ``replicate``.
        init: The initialisation of the kernel. ``identity``: each output channel copies one element of its cell, so
            that the map is the identity for stride 1 and space-to-depth otherwise (in the order of
            ``torch.nn.functional.pixel_unshuffle``); ``negative_identity``: the same, negated; ``orthogonal``: a random
            orthogonal mixing of the elements of a cell; ``normal``: the identity plus independent entries of
            standard deviation 0.1 over the root of the fan-in, which are small since a convolution with a purely
            random kernel is nearly singular. If the output channels do not match the cells, only ``normal`` is
            possible, with entries of variance one over the fan-in. The bias is initialised to zero.
        generator: The random generator of ``init``.
        device: The device of the parameters.
        dtype: Their dtype.

    The order of the arguments is that of ``torch.nn.Conv2d``.

    Attributes:
        widened_in_use: Whether ``unconstrain`` made its kernel larger in a flow that had seen data, which the first
            steps of an optimiser must not undo (:func:`~ebflow_plugin.parameter_groups`). No part of the state dict.

    Example:
        >>> layer = FullConv2d(3, 3, 7, init="negative_identity")
        >>> layer.transform(torch.ones(1, 3, 8, 8)).shape
        torch.Size([1, 3, 8, 8])
        >>> FullConv2d(3, kernel_size=4, stride=2).output_shape((3, 8, 8))
        (12, 4, 4)
    """

    widened_in_use = False

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
        self.init = known_init(init)
        shape = (self.setting.out_channels, in_channels // groups, *self.setting.kernel_size)
        self.weight, self.bias = empty_parameters(shape, bias, device, dtype)
        self.lu = CachedLU(Convolution)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Initialises the parameters again, by ``init``."""
        setting, taps = self.setting, self.setting.cell_taps()
        fan_in = math.prod(self.weight.shape[1:])
        if self.bias is not None:
            self.bias.zero_()
        if taps is None:
            if self.init != "normal":
                raise InputError(
                    f"init={self.init!r} needs an output channel, and a tap of the kernel, for each element of a cell "
                    f"of stride x stride pixels, which {setting} does not have. Use init='normal' if this is intended; "
                    "the order is (in_channels, out_channels, kernel_size), as in torch.nn.Conv2d."
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
            fill_orthogonal(part, self.init, generator)
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
        r"""Returns the images that ``transform`` maps to ``y``, with shape :math:`(B, C', H', W')`.

        Raises:
            SingularError: The convolution has no inverse.
            InputError: It has no structure, and is too large for a dense factorisation.
        """
        _check_batch(y)
        geometry = self.setting.geometry(self.setting.input_shape(y.shape[1:]))
        return self.lu.solve(self.weight, y if self.bias is None else y - self.bias[:, None, None], geometry)

    def log_det(self, event_shape: tuple[int, ...]) -> Tensor:
        r"""Returns :math:`\log |\det|` of ``transform`` for images with shape :math:`(C, H, W)`, a scalar.

        Raises:
            SingularError: The convolution has no inverse, and its kernel requires no gradient. In a graph the result
                is ``-inf``, since a training step must not synchronise with the device.
            InputError: It has no structure, and is too large for a dense factorisation.
        """
        return self.lu.log_abs_det(self.weight, self.setting.geometry(event_shape))

    def operator(self, event_shape: tuple[int, ...]) -> LinearOperator:
        """Returns the linear part as an operator, for images with shape (C, H, W)."""
        return conv_operator(single_at_least(self.weight), self.setting.geometry(event_shape))

    def output_shape(self, event_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape (C', H', W') of the output for images with shape (C, H, W)."""
        return self.setting.geometry(event_shape).out_shape

    def input_shape(self, event_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape (C, H, W) of the images whose output has shape (C', H', W')."""
        return self.setting.geometry(self.setting.input_shape(event_shape)).shape

    def extra_repr(self) -> str:
        """Describes the layer in the ``repr`` of a model."""
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self.setting).items())
        return f"{fields}, bias={self.bias is not None}, init={self.init!r}"


def _check_batch(images: Tensor) -> None:
    if images.dim() != 4:
        raise InputError(
            f"FullConv2d takes batches of images, shape (B, C, H, W), but got shape {tuple(images.shape)}."
        )
