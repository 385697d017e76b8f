"""The geometry of a two-dimensional convolution: which pixels each output pixel reads, and which shapes it accepts.

:class:`Setting` is a convolution as the user describes it; with an image size it becomes a :class:`Geometry`, which has
two :class:`Axis`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ebflow_plugin.errors import InputError, suggest
from ebflow_plugin.options import as_integer, at_least

PADDING_MODES = ("circular", "reflect", "replicate", "zeros")

Pair = tuple[int, int]
Sides = tuple[int, int, int, int]
Image = tuple[int, int, int]


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a convolution.

    Arguments:
        size: The number of input pixels.
        kernel: The number of taps.
        stride: The step between the positions of two output pixels.
        dilation: The step between two taps.
        before: The number of padding pixels before the first pixel.
        after: The number of padding pixels after the last pixel.
        mode: How the padding is filled: ``zeros``, ``circular``, ``reflect`` or ``replicate``.

    Example:
        >>> Axis(size=4, kernel=3, before=1, after=1).sources()
        [[-1, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, -1]]
    """

    size: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0
    mode: str = "zeros"

    @property
    def extent(self) -> int:
        """The number of pixels from the first tap to the last."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def out(self) -> int:
        """The number of output pixels."""
        return (self.size + self.before + self.after - self.extent) // self.stride + 1

    def sources(self) -> list[list[int]]:
        """The input pixel that each tap of each output pixel reads; -1 if it reads a zero."""
        first = [i * self.stride - self.before for i in range(self.out)]
        return [[self._source(start + tap * self.dilation) for tap in range(self.kernel)] for start in first]

    def _source(self, place: int) -> int:
        last = self.size - 1
        if 0 <= place <= last:
            return place
        elsewhere = {"circular": place % self.size, "replicate": min(max(place, 0), last), "zeros": -1}
        return elsewhere.get(self.mode, -place if place < 0 else 2 * last - place)


@dataclass(frozen=True)
class Geometry:
    """A convolution of images of one size.

    Arguments:
        channels: The number of input channels.
        out_channels: The number of output channels.
        rows: The vertical axis.
        columns: The horizontal axis.
        groups: The number of groups of channels that do not mix.

    Example:
        >>> axis = Axis(size=8, kernel=2, stride=2)
        >>> Geometry(3, 12, axis, axis).out_shape
        (12, 4, 4)
    """

    channels: int
    out_channels: int
    rows: Axis
    columns: Axis
    groups: int = 1

    @property
    def shape(self) -> Image:
        """The shape (C, H, W) of an input."""
        return self.channels, self.rows.size, self.columns.size

    @property
    def out_shape(self) -> Image:
        """The shape (C, H, W) of an output."""
        return self.out_channels, self.rows.out, self.columns.out

    @property
    def size(self) -> int:
        """The number of elements of an input."""
        return math.prod(self.shape)

    @property
    def transposed(self) -> Geometry:
        """The same convolution of the transposed image."""
        return replace(self, rows=self.columns, columns=self.rows)

    @property
    def group(self) -> Geometry:
        """The convolution of one group."""
        channels, out_channels = self.channels // self.groups, self.out_channels // self.groups
        return replace(self, channels=channels, out_channels=out_channels, groups=1)


@dataclass(frozen=True)
class Setting:
    """A convolution of images of any size, whose output must have as many elements as its input.

    Arguments:
        in_channels: The number of input channels.
        out_channels: The number of output channels.
        kernel_size: The height and width of the kernel.
        stride: The vertical and horizontal stride.
        padding: The padding (left, right, top, bottom), in the order of ``torch.nn.functional.pad``.
        padding_mode: ``zeros``, ``circular``, ``reflect`` or ``replicate``.
        dilation: The vertical and horizontal distance of the kernel's taps.
        groups: The number of groups of channels that do not mix.

    Example:
        >>> setting = Setting.of(3, kernel_size=4, stride=2)
        >>> setting.padding, setting.out_channels
        ((1, 1, 1, 1), 12)
        >>> setting.geometry((3, 8, 6)).out_shape
        (12, 4, 3)
        >>> setting.input_shape((12, 4, 3))
        (3, 8, 6)
    """

    in_channels: int
    out_channels: int
    kernel_size: Pair
    stride: Pair
    padding: Sides
    padding_mode: str
    dilation: Pair
    groups: int

    @classmethod
    def of(
        cls,
        in_channels: int,
        kernel_size: int | Pair,
        out_channels: int | None = None,
        stride: int | Pair = 1,
        padding: int | Pair | Sides | None = None,
        padding_mode: str = "zeros",
        dilation: int | Pair = 1,
        groups: int = 1,
    ) -> Setting:
        """Checks the user's options, and fills in defaults."""
        in_channels, groups = at_least(1, "in_channels", in_channels), at_least(1, "groups", groups)
        kernel_size, stride = _pair("kernel_size", kernel_size), _pair("stride", stride)
        dilation = _pair("dilation", dilation)
        if out_channels is None:
            out_channels = in_channels * math.prod(stride)
        out_channels = at_least(1, "out_channels", out_channels)
        if padding_mode not in PADDING_MODES:
            raise InputError(f"unknown padding_mode {padding_mode!r}. {suggest(padding_mode, PADDING_MODES)}")
        for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
            if channels % groups:
                raise InputError(f"{name}={channels} cannot be divided into groups={groups}.")
        sides = _automatic_padding(kernel_size, stride, dilation) if padding is None else _sides(padding)
        return cls(in_channels, out_channels, kernel_size, stride, sides, padding_mode, dilation, groups)

    def geometry(self, event_shape: tuple[int, ...]) -> Geometry:
        """Returns the convolution of images with shape (C, H, W).

        Raises:
            InputError: The convolution does not take such images, or does not keep the number of elements.
        """
        if len(event_shape) != 3 or event_shape[0] != self.in_channels:
            raise InputError(
                f"the convolution takes images with {self.in_channels} channels, shape ({self.in_channels}, H, W), "
                f"but got shape {tuple(event_shape)}."
            )
        rows, columns = self._axes(event_shape[1], event_shape[2])
        for axis, name in ((rows, "height"), (columns, "width")):
            pad = max(axis.before, axis.after)
            if pad > {"reflect": axis.size - 1, "circular": axis.size}.get(axis.mode, pad):
                raise InputError(f"{axis.mode} padding of {pad} pixels needs a larger {name} than {axis.size}.")
        geometry = Geometry(self.in_channels, self.out_channels, rows, columns, self.groups)
        size, out_size = geometry.size, math.prod(geometry.out_shape)
        if min(geometry.out_shape) < 1 or out_size != size:
            raise InputError(
                f"the convolution must keep the number of elements, but takes an input of shape {geometry.shape} "
                f"({size} elements) to an output of shape {geometry.out_shape} ({max(out_size, 0)} elements). "
                "Change out_channels, stride or padding, or the size of the image."
            )
        return geometry

    def input_shape(self, out_shape: tuple[int, ...]) -> Image:
        """Returns the shape (C, H, W) of the images whose outputs have the given shape.

        Raises:
            InputError: There are none.
        """
        if len(out_shape) != 3 or out_shape[0] != self.out_channels:
            raise InputError(
                f"the convolution returns images with {self.out_channels} channels, shape ({self.out_channels}, H, W), "
                f"but got shape {tuple(out_shape)}."
            )
        _, out_height, out_width = out_shape
        size = math.prod(out_shape)
        # With a stride, several heights have the same number of output rows. Complete cells come first.
        for height in (out_height * self.stride[0], *range(1, size // self.in_channels + 1)):
            width, rest = divmod(size, self.in_channels * height) if height else (0, 1)
            if rest == 0:
                rows, columns = self._axes(height, width)
                if (rows.out, columns.out) == (out_height, out_width):
                    return self.in_channels, height, width
        raise InputError(f"no input of the convolution has as many elements as an output of shape {tuple(out_shape)}.")

    def cell_taps(self) -> tuple[list[int], list[int]] | None:
        """Returns the taps that read the rows and the columns of an output pixel's own cell of stride x stride pixels.

        None if the output has no channel, or the kernel no tap, for some element of the cell.
        """
        if self.out_channels != self.in_channels * math.prod(self.stride):
            return None
        left, _, top, _ = self.padding
        taps: list[list[int]] = []
        for place, before in ((0, top), (1, left)):
            reads = {tap * self.dilation[place] - before: tap for tap in range(self.kernel_size[place])}
            if not all(pixel in reads for pixel in range(self.stride[place])):
                return None
            taps.append([reads[pixel] for pixel in range(self.stride[place])])
        return taps[0], taps[1]

    def _axes(self, height: int, width: int) -> tuple[Axis, Axis]:
        left, right, top, bottom = self.padding
        (kernel, wide_kernel), (stride, wide_stride) = self.kernel_size, self.stride
        dilation, wide_dilation = self.dilation
        rows = Axis(height, kernel, stride, dilation, top, bottom, self.padding_mode)
        return rows, Axis(width, wide_kernel, wide_stride, wide_dilation, left, right, self.padding_mode)


def convolve(x: Tensor, weight: Tensor, geometry: Geometry, bias: Tensor | None = None) -> Tensor:
    """Convolves images.

    Arguments:
        x: The images, with shape (B, C, H, W).
        weight: The kernel, with shape (out channels, C / groups, kernel height, kernel width).
        geometry: The geometry of the convolution.
        bias: A constant for each output channel.

    Example:
        >>> import torch
        >>> axis = Axis(size=3, kernel=2, before=1)
        >>> convolve(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2), Geometry(1, 1, axis, axis))
        tensor([[[[1., 2., 2.],
                  [2., 4., 4.],
                  [2., 4., 4.]]]])
    """
    rows, columns = geometry.rows, geometry.columns
    padding = _conv_padding(geometry)
    if padding is None:
        x = _pad(x, geometry)
    stride, dilation = (rows.stride, columns.stride), (rows.dilation, columns.dilation)
    return F.conv2d(x, weight, bias, stride, padding or 0, dilation, geometry.groups)


def convolve_transposed(y: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Applies the transpose of :func:`convolve`: from images with the shape of its output to those of its input.

    Example:
        >>> import torch
        >>> axis = Axis(size=3, kernel=2, before=1)
        >>> convolve_transposed(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2), Geometry(1, 1, axis, axis))
        tensor([[[[4., 4., 2.],
                  [4., 4., 2.],
                  [2., 2., 1.]]]])
    """
    padding, axes = _conv_padding(geometry), (geometry.rows, geometry.columns)
    stride, dilation = [axis.stride for axis in axes], [axis.dilation for axis in axes]
    unread = [axis.size + axis.before + axis.after - axis.extent - (axis.out - 1) * axis.stride for axis in axes]
    full = F.conv_transpose2d(y, weight, None, stride, padding or 0, unread, geometry.groups, dilation)
    if padding is not None:
        return full
    like = full.new_zeros(y.shape[0], *geometry.shape)
    return torch.func.vjp(lambda image: _pad(image, geometry), like)[1](full)[0]


def patches(x: Tensor, geometry: Geometry) -> Tensor:
    """The pixels that each output pixel reads, of all channels, in the order of a kernel's entries.

    Arguments:
        x: The images, with shape (B, C, H, W).
        geometry: The geometry of the convolution.

    Returns:
        One row for each image and output pixel, with shape (B H' W', C k²).

    Example:
        >>> axis = Axis(size=2, kernel=3, before=1, after=1)
        >>> patches(torch.ones(1, 1, 2, 2), Geometry(1, 1, axis, axis))[0].view(3, 3)
        tensor([[0., 0., 0.],
                [0., 1., 1.],
                [0., 1., 1.]])
    """
    rows, columns = geometry.rows, geometry.columns
    kernel, dilation, stride = (
        (getattr(rows, name), getattr(columns, name)) for name in ("kernel", "dilation", "stride")
    )
    return F.unfold(_pad(x, geometry), kernel, dilation, 0, stride).mT.flatten(0, 1)


def _conv_padding(geometry: Geometry) -> Pair | None:
    """The ``padding`` argument of ``conv2d``; None if the image must be padded before, in a copy."""
    rows, columns = geometry.rows, geometry.columns
    if rows.mode == "zeros" and rows.before == rows.after and columns.before == columns.after:
        return rows.before, columns.before
    return None if any((rows.before, rows.after, columns.before, columns.after)) else (0, 0)


def _pad(x: Tensor, geometry: Geometry) -> Tensor:
    rows, columns = geometry.rows, geometry.columns
    mode = "constant" if rows.mode == "zeros" else rows.mode
    return F.pad(x, (columns.before, columns.after, rows.before, rows.after), mode=mode)


def _automatic_padding(kernel_size: Pair, stride: Pair, dilation: Pair) -> Sides:
    """Returns the padding that yields one output pixel for each cell of stride x stride pixels."""
    sides: list[int] = []
    for kernel, step, gap in zip(kernel_size, stride, dilation, strict=True):
        total = gap * (kernel - 1) + 1 - step
        if total < 0:
            raise InputError(
                f"the kernel {kernel_size} with dilation {dilation} is smaller than the stride {stride}, so some "
                "pixels would never be read."
            )
        # With stride 1 a multiple of the dilation, so that a tap falls on the output's own pixel.
        before = gap * ((kernel - 1) // 2) if step == 1 else total // 2
        sides += [before, total - before]
    top, bottom, left, right = sides
    return left, right, top, bottom


def _pair(name: str, value: int | Pair) -> Pair:
    both = value if as_integer(value) is None and not isinstance(value, bool) else (value, value)
    if not isinstance(both, tuple | list) or len(both) != 2:
        raise InputError(f"{name} must be an integer, or one for the height and one for the width, got {value!r}.")
    return at_least(1, name, both[0]), at_least(1, name, both[1])


def _sides(value: int | Pair | Sides) -> Sides:
    given = value if isinstance(value, tuple | list) else (value,) * 4
    if len(given) == 2:
        given = (given[1], given[1], given[0], given[0])
    sides = [side for one in given if (side := as_integer(one)) is not None and side >= 0]
    if len(given) != 4 or len(sides) != 4:
        raise InputError(
            "padding must be a non-negative integer, (vertical, horizontal), or (left, right, top, bottom); "
            f"got {value!r}."
        )
    left, right, top, bottom = sides
    return left, right, top, bottom
