r"""A two-dimensional convolution as a square matrix: its determinant and its inverse.

A convolution whose output has as many elements as its input is a :math:`D \times D` matrix, and one with structure:

========= ============================================================= ======================================
structure when                                                          cost of the determinant
========= ============================================================= ======================================
patches   each pixel is read once: kernel = stride, no padding (1x1, …)  :math:`O(C^3)`
fourier   circular padding                                              :math:`O(HW C^3)`
band      zero padding, and the kernel reaches a few image rows far     :math:`O(D\, b^2)`, :math:`b \approx kWC/2`
dense     otherwise                                                     :math:`O(D^3)`, and :math:`O(D^2)` memory
========= ============================================================= ======================================

with :math:`C` channels in each of :math:`H \times W` output pixels. Groups are independent, each with its own, smaller
matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg.band import Band
from ebflow_plugin.linalg.circular import circular_twin, frequency_blocks, from_cells, has_twin, on_frequencies, weights
from ebflow_plugin.linalg.dense import Dense
from ebflow_plugin.linalg.geometry import Geometry, convolve, convolve_transposed, patches
from ebflow_plugin.linalg.memo import is_traced, without_reading
from ebflow_plugin.linalg.operators import Approximation, Blocks, Cost, LinearOperator, Solver

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
        if all(axis.before == 0 and axis.extent == axis.kernel == axis.stride for axis in axes):
            return "patches"
        if all(axis.mode == "circular" for axis in axes):
            return "fourier"
    if any(axis.mode != "zeros" or axis.dilation > 1 for axis in axes):
        return "dense"
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


class Convolution(LinearOperator):
    """A convolution, approximated by the inverse of its circular twin, or else by its transpose.

    Arguments:
        weight: The kernel, with shape (out channels, C / groups, kernel height, kernel width).
        geometry: The geometry of the convolution; its output must have as many elements as its input.

    Example:
        >>> from ebflow_plugin.linalg.geometry import Setting
        >>> geometry = Setting.of(2, kernel_size=1).geometry((2, 3, 3))
        >>> operator = Convolution(torch.eye(2).view(2, 2, 1, 1) * 2, geometry)
        >>> operator.log_abs_det().exp().round()
        tensor(262144.)
        >>> operator.approximate().solve(torch.ones(1, 2, 3, 3)).unique()
        tensor([0.5000])
    """

    def __init__(self, weight: Tensor, geometry: Geometry) -> None:
        self.weight, self.geometry = weight, geometry
        self.shape, self.out_shape = geometry.shape, geometry.out_shape
        self.operations = float(math.prod(geometry.out_shape[1:]) * weight.numel())
        self.blocks, self.cost = determinant(geometry)

    def apply(self, x: Tensor) -> Tensor:
        return convolve(x, self.weight, self.geometry)

    def apply_transposed(self, y: Tensor) -> Tensor:
        return convolve_transposed(y, self.weight, self.geometry)

    def approximate(self) -> Approximation:
        if has_twin(self.geometry):
            return circular_twin(self.weight, self.geometry)
        return Approximation(lambda v: convolve_transposed(v, self.like, self.geometry))

    def at(self, weight: Tensor) -> Convolution:
        """The same convolution with another kernel."""
        return Convolution(weight, self.geometry)

    def sum_of_squares(self) -> float | None:
        axes = self.geometry.rows, self.geometry.columns
        if any(axis.mode != "zeros" and (axis.mode != "circular" or axis.extent > axis.size) for axis in axes):
            return None  # entries of taps that share a pixel add up
        one = replace(self.geometry, channels=1, out_channels=1, groups=1)
        times = patches(self.like.new_ones(1, *one.shape, dtype=torch.float64), one).sum(0)
        return float((self.like.double().square().sum((0, 1)).flatten() * times).sum())

    def log_abs_det(self) -> Tensor:
        parts = self._parts(self.weight)
        return torch.stack([(part.matrix.log_abs_det() * part.times).sum() for part in parts]).sum()

    def inverse(self) -> Solver:
        r"""Returns the map from outputs to images.

        If the kernel is differentiated, no factorisation is part of the graph. With :math:`W^{-1}` held constant, each
        step :math:`x + W^{-1} (y - w \star x)` at the solution adds one correct order of derivatives; it takes three.
        """
        traced = is_traced(self.weight)
        with without_reading() if traced else nullcontext():  # a training step must not wait for the device
            solvers = [partial(part.solve, part.matrix.inverse()) for part in self._parts(self.weight.detach())]

        def solve(y: Tensor) -> Tensor:
            pieces = [one(piece) for one, piece in zip(solvers, y.chunk(len(solvers), 1), strict=True)]
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)

        def refined(y: Tensor) -> Tensor:
            x = solve(y.detach())
            for _ in range(3):
                x = x + solve(y - self.apply(x))
            return x

        return refined if traced else solve

    def _parts(self, weight: Tensor) -> list[_Part]:
        """The convolution in parts that do not mix: all groups of channels at once, or each of them."""
        kind, geometry = structure(self.geometry), self.geometry
        if kind in ("patches", "fourier"):
            return [(_of_patches if kind == "patches" else _on_torus)(weight, geometry)]
        return [_by_pixels(part, geometry.group, kind == "band") for part in weight.chunk(geometry.groups)]


def conv_operator(weight: Tensor, geometry: Geometry) -> LinearOperator:
    """A convolution as an operator: a dense matrix for each group if each output pixel reads only its own cell."""
    if structure(geometry) != "patches":
        return Convolution(weight, geometry)
    operator = Dense(_patch_blocks(weight, geometry), times=math.prod(geometry.out_shape[1:]))
    operator.blocks, operator.cost = determinant(geometry)
    return operator


def side_by_side(convolutions: Sequence[Convolution]) -> Convolution:
    """Convolutions of one geometry as one, which acts on their channels side by side.

    Example:
        >>> from ebflow_plugin.linalg.geometry import Setting
        >>> geometry = Setting.of(2, kernel_size=3).geometry((2, 4, 4))
        >>> both = side_by_side([Convolution(torch.randn(2, 2, 3, 3), geometry) for _ in range(2)])
        >>> both.shape, both.geometry.groups
        ((4, 4, 4), 2)
    """
    count, one = len(convolutions), convolutions[0].geometry
    channels, out_channels, groups = count * one.channels, count * one.out_channels, count * one.groups
    wide = replace(one, channels=channels, out_channels=out_channels, groups=groups)
    return Convolution(torch.cat([each.weight for each in convolutions]), wide)


class _Part(NamedTuple):
    """A part of a convolution as a matrix.

    Attributes:
        matrix: The matrix, or its blocks.
        times: How often each block counts.
        solve: Maps a solver of the matrix, and outputs, to images. Refers to no part of the matrix.
    """

    matrix: Dense | Band
    times: Tensor | int
    solve: Callable[[Solver, Tensor], Tensor]


def _patch_blocks(weight: Tensor, geometry: Geometry) -> Tensor:
    return weight.unflatten(0, (geometry.groups, -1)).flatten(2)


def _of_patches(weight: Tensor, geometry: Geometry) -> _Part:
    """A convolution in which each output pixel reads a cell of stride x stride pixels, alone: equal blocks."""
    groups, (_, high, wide) = geometry.groups, geometry.out_shape

    def solve(solver: Solver, y: Tensor) -> Tensor:
        rows = y.unflatten(1, (groups, -1)).permute(1, 0, 3, 4, 2)  # (groups, B, rows, columns, channels)
        cells = solver(rows.flatten(1, 3)).reshape(groups, len(y), high, wide, rows.shape[-1])
        return from_cells(cells.permute(1, 0, 4, 2, 3), geometry)

    return _Part(Dense(_patch_blocks(weight, geometry)), high * wide, solve)


def _on_torus(weight: Tensor, geometry: Geometry) -> _Part:
    """A convolution with circular padding: the Fourier transform over cells makes a block for each frequency."""
    scale = frequency_blocks(weight.detach().abs(), geometry).real[:, :1, :1]  # the sums at frequency zero

    def solve(solver: Solver, y: Tensor) -> Tensor:
        return on_frequencies(geometry, lambda spectrum: solver(spectrum.mT).mT, y)

    blocks = frequency_blocks(weight, geometry)
    return _Part(Dense(blocks, scale=scale), weights(geometry.columns, weight.device), solve)


def _by_pixels(weight: Tensor, geometry: Geometry, banded: bool) -> _Part:
    """A convolution as a matrix over the elements of an image, pixel by pixel, with the channels innermost.

    In this order a small kernel makes a banded matrix. Pixels run row by row or column by column, whichever makes the
    narrower band.
    """
    by_columns = sum(bandwidths(geometry.transposed)) < sum(bandwidths(geometry))
    if by_columns:
        weight, geometry = weight.mT, geometry.transposed
    (channels, rows, columns), size = geometry.shape, geometry.size

    def solve(solver: Solver, y: Tensor) -> Tensor:
        y = y.mT if by_columns else y
        x = solver(y.permute(0, 2, 3, 1).flatten(1)).reshape(len(y), rows, columns, channels).permute(0, 3, 1, 2)
        return x.mT if by_columns else x

    entries = _entries(weight, geometry)
    if banded:
        return _Part(Band(size, *bandwidths(geometry), entries), 1, solve)
    need = 2 * size**2 * weight.element_size()
    if need > DENSE_LIMIT and not weight.is_meta:
        raise InputError(
            f"a {geometry.rows.kernel}x{geometry.columns.kernel} convolution of images of shape {geometry.shape} "
            f"with {geometry.rows.mode} padding has no structure that its determinant or inverse could use, and "
            f"its dense {size} x {size} matrix and factors need {need / 2**30:.1f} GB. The limit is "
            f"{DENSE_LIMIT / 2**30:.1f} GB, ebflow_plugin.linalg.convolution.DENSE_LIMIT. Use a smaller "
            "kernel, or circular padding with a stride that divides the image."
        )
    step = 1024  # rows at a time, so that the index tensors stay small
    dense = [entries(row, min(row + step, size), 0, size) for row in range(0, size, step)]
    return _Part(Dense(torch.cat(dense)), 1, solve)


def _entries(weight: Tensor, geometry: Geometry) -> Callable[[int, int, int, int], Tensor]:
    out_channels, _, out_columns = geometry.out_shape
    channels, _, columns = geometry.shape
    sources = (torch.tensor(axis.sources(), device="cpu") for axis in (geometry.rows, geometry.columns))
    row_sources, column_sources = (each.to(weight.device, non_blocking=True) for each in sources)

    def entries(start: int, stop: int, first: int, width: int) -> Tensor:
        """The rows ``start`` to ``stop`` of the matrix in the columns ``first`` to ``first + width``."""
        row = torch.arange(start, stop, device=weight.device)
        pixel = row // out_channels
        high = row_sources[pixel // out_columns][:, None, :, None]
        wide = column_sources[pixel % out_columns][:, None, None, :]
        channel = torch.arange(channels, device=weight.device)[:, None, None]
        place = ((high * columns + wide) * channels + channel - first).flatten(1)
        reads = ((high >= 0) & (wide >= 0)).expand(-1, channels, -1, -1).flatten(1)
        value = weight[row % out_channels].flatten(1)
        # A tap on zero padding adds a zero to some entry, so that all shapes are static. Taps can share a pixel with
        # reflect or replicate padding, so entries are added up.
        return value.new_zeros(stop - start, width).scatter_add(1, place.where(reads, 0), value.where(reads, 0))

    return entries


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
