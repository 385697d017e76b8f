r"""A two-dimensional convolution as a square matrix: its determinant and its inverse.

A convolution whose output has as many elements as its input is a :math:`D \times D` matrix, and one with structure:

========= ============================================================= ======================================
structure when                                                          cost of the determinant
========= ============================================================= ======================================
patches   the kernel is no larger than the stride, no padding (1x1, …)  :math:`O(C^3)`
fourier   circular padding                                              :math:`O(HW C^3)`
band      the kernel reaches a few image rows far                       :math:`O(D\, b^2)`, :math:`b \approx kWC/2`
dense     otherwise                                                     :math:`O(D^3)`, and :math:`O(D^2)` memory
========= ============================================================= ======================================

with :math:`C` channels in each pixel of the output. Groups are independent maps, each with its own, smaller matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg import Band, Dense, Matrix, Solver

__all__ = ["Axis", "Geometry", "conv_matrix", "convolve", "structure"]

Structure = Literal["patches", "fourier", "band", "dense"]

# A dense matrix and its factors, in bytes. Above it the machine would swap or fail, far from the cause.
DENSE_LIMIT = 4 * 2**30


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a convolution.

    Arguments:
        size: The number of input pixels.
        kernel: The number of taps.
        stride: The step between the places of two output pixels.
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
        """Returns the input pixel that each tap of each output pixel reads; -1 if it reads a zero."""
        return [[self._source(i * self.stride + tap * self.dilation - self.before) for tap in range(self.kernel)] for i in range(self.out)]

    def _source(self, place: int) -> int:
        last = self.size - 1
        if 0 <= place <= last:
            return place
        match self.mode:
            case "circular":
                return place % self.size
            case "reflect":
                return -place if place < 0 else 2 * last - place
            case "replicate":
                return min(max(place, 0), last)
            case _:
                return -1


@dataclass(frozen=True)
class Geometry:
    """All that a convolution does, apart from its kernel.

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
    def shape(self) -> tuple[int, int, int]:
        """The shape (C, H, W) of an input."""
        return self.channels, self.rows.size, self.columns.size

    @property
    def out_shape(self) -> tuple[int, int, int]:
        """The shape (C, H, W) of an output."""
        return self.out_channels, self.rows.out, self.columns.out

    @property
    def size(self) -> int:
        """The number of elements of an input."""
        return self.channels * self.rows.size * self.columns.size

    @property
    def turned(self) -> Geometry:
        """The same convolution of the transposed image."""
        return replace(self, rows=self.columns, columns=self.rows)

    @property
    def group(self) -> Geometry:
        """The convolution that one group does."""
        channels, out_channels = self.channels // self.groups, self.out_channels // self.groups
        return replace(self, channels=channels, out_channels=out_channels, groups=1)


def convolve(x: Tensor, weight: Tensor, geometry: Geometry, bias: Tensor | None = None) -> Tensor:
    """Convolves images.

    Arguments:
        x: The images, with shape (B, C, H, W).
        weight: The kernel, with shape (out channels, C / groups, kernel height, kernel width).
        geometry: What the convolution does with it.
        bias: A constant for each output channel.

    Example:
        >>> axis = Axis(size=3, kernel=2, before=1)
        >>> convolve(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2), Geometry(1, 1, axis, axis))
        tensor([[[[1., 2., 2.],
                  [2., 4., 4.],
                  [2., 4., 4.]]]])
    """
    rows, columns = geometry.rows, geometry.columns
    stride, dilation = (rows.stride, columns.stride), (rows.dilation, columns.dilation)
    padding = (0, 0)
    if rows.mode == "zeros" and rows.before == rows.after and columns.before == columns.after:
        padding = (rows.before, columns.before)  # the convolution pads by itself, without a copy
    else:
        mode = "constant" if rows.mode == "zeros" else rows.mode
        x = F.pad(x, (columns.before, columns.after, rows.before, rows.after), mode=mode)
    return F.conv2d(x, weight, bias, stride, padding, dilation, geometry.groups)


def structure(geometry: Geometry) -> Structure:
    """Returns which structure the matrix of one group of a convolution has.

    Example:
        >>> axis = Axis(size=32, kernel=3, before=1, after=1)
        >>> structure(Geometry(3, 3, axis, axis))
        'band'
        >>> structure(Geometry(3, 3, replace(axis, mode="circular"), replace(axis, mode="circular")))
        'fourier'
    """
    group = geometry.group
    axes = (group.rows, group.columns)
    if all(axis.out * axis.stride == axis.size for axis in axes):
        if all(axis.before == 0 and axis.extent <= axis.stride for axis in axes):
            return "patches"
        if all(axis.mode == "circular" for axis in axes):
            return "fourier"
    lower, upper = min(_bandwidths(group), _bandwidths(group.turned), key=sum)
    return "band" if 2 * (lower + upper + Band.panel) <= group.size else "dense"


def conv_matrix(weight: Tensor, geometry: Geometry) -> Matrix:
    """Returns the matrix of a convolution, whose solver takes and gives images.

    Arguments:
        weight: The kernel, with shape (out channels, C / groups, kernel height, kernel width).
        geometry: What the convolution does with it; its output must have as many elements as its input.

    Example:
        >>> axis = Axis(size=4, kernel=3, before=1, after=1, mode="circular")
        >>> weight = torch.zeros(1, 1, 3, 3).index_fill(2, torch.tensor(1), 2.0)
        >>> geometry = Geometry(1, 1, axis, replace(axis, kernel=1, before=0, after=0))
        >>> conv_matrix(weight[..., 1:2], geometry).log_abs_det().exp().round()
        tensor(65536.)
    """
    kind, group = structure(geometry), geometry.group
    parts = weight.chunk(geometry.groups)
    if kind == "patches" or kind == "fourier":
        return _Groups([_Cells(part, group, kind) for part in parts])
    return _Groups([_Pixels(part, group, kind) for part in parts])


class _Groups:
    """Independent maps of groups of channels."""

    def __init__(self, parts: list[_Cells] | list[_Pixels]) -> None:
        self.parts = parts

    def log_abs_det(self) -> Tensor:
        return torch.stack([part.log_abs_det() for part in self.parts]).sum()

    def inverse(self) -> Solver:
        solvers = [part.inverse() for part in self.parts]

        def solve(y: Tensor) -> Tensor:
            pieces = zip(solvers, y.chunk(len(solvers), 1), strict=True)
            return torch.cat([solver(piece) for solver, piece in pieces], 1)

        return solve


class _Cells:
    r"""A convolution that treats all cells of stride x stride pixels alike.

    One output pixel belongs to each cell. If they do not mix (``patches``), the matrix is block-diagonal with equal
    blocks; if they mix on a torus (``fourier``), the Fourier transform over the cells makes it block-diagonal, with a
    block for each frequency. The blocks come from convolving the unit vectors of a single cell.
    """

    def __init__(self, weight: Tensor, geometry: Geometry, kind: Literal["patches", "fourier"]) -> None:
        if kind == "patches":  # one cell stands for all
            rows, columns = geometry.rows, geometry.columns
            one = replace(geometry, rows=replace(rows, size=rows.stride), columns=replace(columns, size=columns.stride))
        else:
            one = geometry
        self.geometry, self.kind = geometry, kind
        self.cells = geometry.rows.out, geometry.columns.out
        block = geometry.out_channels
        # unit: one image for each element of the first cell
        unit = torch.eye(block, dtype=weight.dtype, device=weight.device).view(block, 1, 1, block)
        unit = _from_cells(F.pad(unit, (0, 0, 0, one.columns.out - 1, 0, one.rows.out - 1)), one)
        response = convolve(unit, weight, one).permute(2, 3, 1, 0)  # (rows, columns, out, in)
        scale = response.detach().abs().sum((0, 1))
        blocks = response if kind == "patches" else torch.fft.rfft2(response, dim=(0, 1))
        self.blocks = Dense(blocks, scale)

    def log_abs_det(self) -> Tensor:
        each = self.blocks.log_abs_det()
        rows, columns = self.cells
        if self.kind == "patches":
            return each.sum() * (rows * columns)
        # The half spectrum: every column of frequencies stands for its conjugate too, but for the real ones.
        twice = torch.full_like(each, 2.0)
        twice[:, 0] = 1.0
        if columns % 2 == 0:
            twice[:, -1] = 1.0
        return (each * twice).sum()

    def inverse(self) -> Solver:
        solver, dtype = self.blocks.inverse(), self.blocks.matrix.dtype

        def solve(y: Tensor) -> Tensor:
            if self.kind == "patches":
                cells = solver(y.permute(2, 3, 0, 1).flatten(0, 1).flatten(0, 1)[None, None])
                cells = cells.reshape(*self.cells, len(y), cells.shape[-1]).permute(2, 0, 1, 3)
            else:
                spectrum = torch.fft.rfft2(y.to(dtype.to_real()), dim=(2, 3)).permute(2, 3, 0, 1)
                cells = torch.fft.irfft2(solver(spectrum).permute(2, 0, 1, 3), s=self.cells, dim=(1, 2))
            return _from_cells(cells, self.geometry)

        return solve


def _from_cells(cells: Tensor, geometry: Geometry) -> Tensor:
    """Turns (B, cell rows, cell columns, elements of a cell) into images."""
    channels, high, wide = geometry.channels, geometry.rows.stride, geometry.columns.stride
    images = cells.unflatten(3, (channels, high, wide)).permute(0, 3, 1, 4, 2, 5)
    return images.flatten(4, 5).flatten(2, 3)


class _Pixels:
    """A convolution as a matrix over the elements of an image, pixel by pixel and the channels of a pixel together.

    In this order the kernel's reach makes a band. Pixels go row by row or column by column, as the band is narrower.
    """

    def __init__(self, weight: Tensor, geometry: Geometry, kind: Literal["band", "dense"]) -> None:
        self.by_columns = sum(_bandwidths(geometry.turned)) < sum(_bandwidths(geometry))
        if self.by_columns:
            weight, geometry = weight.mT, geometry.turned
        self.weight, self.geometry = weight, geometry
        device = weight.device
        self.row_sources = torch.tensor(geometry.rows.sources(), device=device)
        self.column_sources = torch.tensor(geometry.columns.sources(), device=device)
        self.matrix: Matrix = self._dense() if kind == "dense" else self._band()

    def log_abs_det(self) -> Tensor:
        return self.matrix.log_abs_det()

    def inverse(self) -> Solver:
        solver = self.matrix.inverse()
        channels, rows, columns = self.geometry.shape

        def solve(y: Tensor) -> Tensor:
            y = y.mT if self.by_columns else y
            x = solver(y.permute(0, 2, 3, 1).flatten(1)).reshape(len(y), rows, columns, channels).permute(0, 3, 1, 2)
            return x.mT if self.by_columns else x

        return solve

    def _band(self) -> Band:
        size, (lower, upper) = self.geometry.size, _bandwidths(self.geometry)
        return Band(size, lower, upper, self._entries)

    def _dense(self) -> Dense:
        size = self.geometry.size
        need = 2 * size**2 * self.weight.element_size()
        if need > DENSE_LIMIT and not self.weight.is_meta:
            raise InputError(
                f"a convolution of {_shape(self.geometry.shape)} inputs with {self.geometry.rows.mode} padding and a "
                f"{self.geometry.rows.kernel}x{self.geometry.columns.kernel} kernel has no structure that its "
                f"determinant or inverse can use, and its dense {size} x {size} matrix and factors need "
                f"{need / 2**30:.1f} GB (limit {DENSE_LIMIT / 2**30:.1f} GB, ebflow_plugin.conv.DENSE_LIMIT). "
                "Use a smaller kernel, zero padding, or circular padding with a stride that divides the image."
            )
        step = 1024  # so that the indices stay small beside the matrix
        pieces = [self._entries(start, min(start + step, size), 0, size) for start in range(0, size, step)]
        return Dense(torch.cat(pieces))

    def _entries(self, start: int, stop: int, first: int, width: int) -> Tensor:
        """Returns the rows ``start`` to ``stop`` of the matrix in the columns from ``first``."""
        out_channels, _, out_columns = self.geometry.out_shape
        channels, _, columns = self.geometry.shape
        row = torch.arange(start, stop, device=self.weight.device)
        pixel, channel = row // out_channels, row % out_channels
        high = self.row_sources[pixel // out_columns][:, None, :, None]
        wide = self.column_sources[pixel % out_columns][:, None, None, :]
        inputs = torch.arange(channels, device=self.weight.device)[:, None, None]
        place = ((high * columns + wide) * channels + inputs - first).flatten(1)
        reads = ((high >= 0) & (wide >= 0)).expand(-1, channels, -1, -1).flatten(1)
        value = self.weight[channel].flatten(1)
        # Taps on the zero padding add a zero somewhere, so that all shapes are known beforehand. Taps can share a
        # pixel where the padding reflects or repeats, so that entries are added up.
        return value.new_zeros(stop - start, width).scatter_add(1, place.where(reads, 0), value.where(reads, 0))


@lru_cache(maxsize=128)
def _bandwidths(geometry: Geometry) -> tuple[int, int]:
    """Returns the numbers of diagonals below and above the main one, in pixel-major order by rows."""
    out_channels, _, out_columns = geometry.out_shape
    channels, _, columns = geometry.shape
    least, most = 1 - out_channels, channels - 1
    # column - row of an entry is a sum of what the two axes and the channels add to it
    for axis, step, out_step in (
        (geometry.rows, columns * channels, out_columns * out_channels),
        (geometry.columns, channels, out_channels),
    ):
        shifts = [source * step - i * out_step for i, taps in enumerate(axis.sources()) for source in taps if source >= 0]
        least, most = least + min(shifts, default=0), most + max(shifts, default=0)
    last = geometry.size - 1
    return min(max(-least, 0), last), min(max(most, 0), last)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape)
