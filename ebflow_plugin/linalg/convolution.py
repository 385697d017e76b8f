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

with :math:`C` channels in each of :math:`H \times W` output pixels. Groups are independent, each with its own, smaller
matrix.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg.dense import Band, Dense, Matrix, Solver
from ebflow_plugin.linalg.geometry import Geometry, convolve
from ebflow_plugin.linalg.operators import Blocks, Cost

# Bytes of a dense matrix and its factors. Beyond it the machine would swap, or fail far from the cause.
DENSE_LIMIT = 4 * 2**30


def structure(geometry: Geometry) -> Literal["patches", "fourier", "band", "dense"]:
    """Returns which structure the matrix of a convolution, or of each of its groups, has.

    Example:
        >>> from ebflow_plugin.linalg.geometry import Setting
        >>> structure(Setting.of(3, kernel_size=3).geometry((3, 32, 32)))
        'band'
        >>> structure(Setting.of(3, kernel_size=3, padding_mode="circular").geometry((3, 32, 32)))
        'fourier'
    """
    group = geometry.group
    axes = (group.rows, group.columns)
    if all(axis.out * axis.stride == axis.size for axis in axes):
        if all(axis.before == 0 and axis.extent <= axis.stride for axis in axes):
            return "patches"
        if all(axis.mode == "circular" for axis in axes):
            return "fourier"
    width = min(sum(bandwidths(group)), sum(bandwidths(group.transposed)))
    return "band" if width + Band.panel <= group.size else "dense"  # the faster one (measured with and without a graph)


def determinant(geometry: Geometry) -> tuple[Blocks, Cost]:
    """The blocks that the determinant of a convolution is computed from, and what it costs.

    Example:
        >>> from ebflow_plugin.linalg.geometry import Setting
        >>> str(determinant(Setting.of(3, kernel_size=3).geometry((3, 32, 32)))[0])
        'banded 3072 × 3072 determinant'
    """
    kind, group, groups = structure(geometry), geometry.group, geometry.groups
    channels, rows, columns = group.out_shape
    if kind in ("patches", "fourier"):  # one block for all cells of stride × stride pixels, or one per frequency
        cells = rows * columns if kind == "fourier" else 1
        return Blocks(channels, cells * groups), Cost(groups * channels**3 * cells, 32.0 * channels**2 * cells)
    if kind == "band":
        lower, upper = min(bandwidths(group), bandwidths(group.transposed), key=sum)
        cost = Cost(groups * group.size * lower * (lower + upper), 16.0 * lower * (lower + upper))
        return Blocks(group.size, groups, banded=True), cost
    return Blocks(group.size, groups), Cost(groups * group.size**3 / 3, 16.0 * group.size**2)


def conv_matrix(weight: Tensor, geometry: Geometry) -> Matrix:
    """Returns the matrix of a convolution, whose solver maps images to images.

    Arguments:
        weight: The kernel, with shape (out channels, C / groups, kernel height, kernel width).
        geometry: The geometry of the convolution; its output must have as many elements as its input.

    Example:
        >>> from ebflow_plugin.linalg.geometry import Setting
        >>> geometry = Setting.of(2, kernel_size=1).geometry((2, 3, 3))
        >>> matrix = conv_matrix(torch.eye(2).view(2, 2, 1, 1) * 2, geometry)
        >>> matrix.log_abs_det().exp().round()
        tensor(262144.)
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
        if len(solvers) == 1:
            return solvers[0]

        def solve(y: Tensor) -> Tensor:
            pieces = zip(solvers, y.chunk(len(solvers), 1), strict=True)
            return torch.cat([solver(piece) for solver, piece in pieces], 1)

        return solve


class _Cells:
    """A convolution that is the same for all cells of stride x stride pixels.

    One output pixel belongs to each cell. If cells do not mix (``patches``), the matrix is block-diagonal with equal
    blocks. If they mix on a torus (``fourier``), the Fourier transform over the cells makes it block-diagonal, with a
    block for each frequency. The blocks are computed by convolving the unit vectors of a single cell.
    """

    def __init__(self, weight: Tensor, geometry: Geometry, kind: Literal["patches", "fourier"]) -> None:
        self.geometry, self.kind = geometry, kind
        rows, columns = geometry.rows, geometry.columns
        if kind == "patches":  # one cell is enough
            rows, columns = replace(rows, size=rows.stride), replace(columns, size=columns.stride)
            geometry = replace(geometry, rows=rows, columns=columns)
        block = geometry.out_channels
        unit = torch.eye(block, dtype=weight.dtype, device=weight.device).view(block, 1, 1, block)
        unit = _from_cells(F.pad(unit, (0, 0, 0, columns.out - 1, 0, rows.out - 1)), geometry)
        response = convolve(unit, weight, geometry).permute(2, 3, 1, 0)  # (cell rows, cell columns, out, in)
        scale = response.detach().abs().sum((0, 1))
        self.blocks = Dense(response if kind == "patches" else torch.fft.rfft2(response, dim=(0, 1)), scale)

    def log_abs_det(self) -> Tensor:
        each = self.blocks.log_abs_det()
        _, rows, columns = self.geometry.out_shape
        if self.kind == "patches":
            return each.sum() * (rows * columns)
        # In the half spectrum, a column of frequencies counts for its conjugate too, unless it is its own.
        times = torch.full_like(each, 2.0)
        times[:, 0] = 1.0
        if columns % 2 == 0:
            times[:, -1] = 1.0
        return (each * times).sum()

    def inverse(self) -> Solver:
        solver, geometry, kind = self.blocks.inverse(), self.geometry, self.kind  # no closure over self, and its blocks
        _, rows, columns = geometry.out_shape

        def solve(y: Tensor) -> Tensor:
            if kind == "patches":
                cells = solver(y.permute(0, 2, 3, 1).flatten(0, 2)[None, None])
                cells = cells.reshape(len(y), rows, columns, cells.shape[-1])
            else:
                spectrum = torch.fft.rfft2(y, dim=(2, 3)).permute(2, 3, 0, 1)
                cells = torch.fft.irfft2(solver(spectrum).permute(2, 0, 1, 3), s=(rows, columns), dim=(1, 2))
            return _from_cells(cells, geometry)

        return solve


def _from_cells(cells: Tensor, geometry: Geometry) -> Tensor:
    """Turns (B, cell rows, cell columns, elements of a cell) into images."""
    cell = (geometry.channels, geometry.rows.stride, geometry.columns.stride)
    return cells.reshape(*cells.shape[:3], *cell).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


class _Pixels:
    """A convolution as a matrix over the elements of an image, pixel by pixel, with the channels innermost.

    In this order a small kernel makes a banded matrix. Pixels run row by row or column by column, whichever makes the
    narrower band.
    """

    def __init__(self, weight: Tensor, geometry: Geometry, kind: Literal["band", "dense"]) -> None:
        self.by_columns = sum(bandwidths(geometry.transposed)) < sum(bandwidths(geometry))
        if self.by_columns:
            weight, geometry = weight.mT, geometry.transposed
        self.weight, self.geometry = weight, geometry
        axes = geometry.rows, geometry.columns
        sources = (torch.tensor(axis.sources(), device="cpu") for axis in axes)
        self.row_sources, self.column_sources = (each.to(weight.device, non_blocking=True) for each in sources)
        self.matrix: Matrix
        if kind == "dense":
            self.matrix = Dense(self._dense())
        else:
            self.matrix = Band(geometry.size, *bandwidths(geometry), self._entries)

    def log_abs_det(self) -> Tensor:
        return self.matrix.log_abs_det()

    def inverse(self) -> Solver:
        solver, by_columns = self.matrix.inverse(), self.by_columns  # no closure over self, and its dense matrix
        channels, rows, columns = self.geometry.shape

        def solve(y: Tensor) -> Tensor:
            y = y.mT if by_columns else y
            x = solver(y.permute(0, 2, 3, 1).flatten(1)).reshape(len(y), rows, columns, channels).permute(0, 3, 1, 2)
            return x.mT if by_columns else x

        return solve

    def _dense(self) -> Tensor:
        geometry, size = self.geometry, self.geometry.size
        need = 2 * size**2 * self.weight.element_size()
        if need > DENSE_LIMIT and not self.weight.is_meta:
            raise InputError(
                f"a {geometry.rows.kernel}x{geometry.columns.kernel} convolution of images of shape {geometry.shape} "
                f"with {geometry.rows.mode} padding has no structure that its determinant or inverse could use, and "
                f"its dense {size} x {size} matrix and factors need {need / 2**30:.1f} GB. The limit is "
                f"{DENSE_LIMIT / 2**30:.1f} GB, ebflow_plugin.linalg.convolution.DENSE_LIMIT. Use a smaller "
                "kernel, or circular padding with a stride that divides the image."
            )
        step = 1024  # rows at a time, so that the index tensors stay small
        return torch.cat([self._entries(row, min(row + step, size), 0, size) for row in range(0, size, step)])

    def _entries(self, start: int, stop: int, first: int, width: int) -> Tensor:
        """Returns the rows ``start`` to ``stop`` of the matrix in the columns ``first`` to ``first + width``."""
        out_channels, _, out_columns = self.geometry.out_shape
        channels, _, columns = self.geometry.shape
        row = torch.arange(start, stop, device=self.weight.device)
        pixel = row // out_channels
        high = self.row_sources[pixel // out_columns][:, None, :, None]
        wide = self.column_sources[pixel % out_columns][:, None, None, :]
        channel = torch.arange(channels, device=self.weight.device)[:, None, None]
        place = ((high * columns + wide) * channels + channel - first).flatten(1)
        reads = ((high >= 0) & (wide >= 0)).expand(-1, channels, -1, -1).flatten(1)
        value = self.weight[row % out_channels].flatten(1)
        # A tap on zero padding adds a zero to some entry, so that all shapes are static. Taps can share a pixel with
        # reflect or replicate padding, so entries are added up.
        return value.new_zeros(stop - start, width).scatter_add(1, place.where(reads, 0), value.where(reads, 0))


@lru_cache(maxsize=256)
def bandwidths(geometry: Geometry) -> tuple[int, int]:
    """Returns the numbers of diagonals below and above the main one, with the pixels row by row."""
    out_channels, _, out_columns = geometry.out_shape
    channels, _, columns = geometry.shape
    # The offset (column - row) of an entry is a sum of contributions of the channels and of each axis.
    least, most = 1 - out_channels, channels - 1
    steps = ((columns * channels, out_columns * out_channels), (channels, out_channels))
    for axis, (step, out_step) in zip((geometry.rows, geometry.columns), steps, strict=True):
        shifts = [pixel * step - i * out_step for i, taps in enumerate(axis.sources()) for pixel in taps if pixel >= 0]
        least, most = least + min(shifts, default=0), most + max(shifts, default=0)
    last = geometry.size - 1
    return min(max(-least, 0), last), min(max(most, 0), last)
