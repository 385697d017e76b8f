r"""The circular twin of a convolution: the same kernel with circular padding, inverted by the Fourier transform.

A convolution with zero, reflect or replicate padding differs from its circular twin only near the edges, so the inverse
:math:`M` of the twin approximates its own. In cells of stride x stride pixels, one for each output pixel,

.. math:: y_o(p) = \sum_{i, t} w_{o i t}\, x_{i, r_t}(p + q_t), \qquad t \cdot \text{dilation} - \text{padding}
          = q_t \cdot \text{stride} + r_t

so that at each frequency f the twin is the :math:`C \times C` matrix
:math:`B(f)_{o, (i, r)} = \sum_{t : r_t = r} w_{o i t}\, e^{2 \pi \mathrm{i} f q_t / N}`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from ebflow_plugin.linalg.convolution import determinant, structure
from ebflow_plugin.linalg.geometry import Axis, Geometry, convolve, convolve_transposed
from ebflow_plugin.linalg.operators import Approximation, DenseOperator, LinearOperator

# A frequency whose inverse is larger than one over this, relative to the mean, is not inverted: in the preconditioner,
# and in the control variate of a trace (measured on MNIST: 56 times the variance of a batch in the worst layer, 96 with
# the first limit, 83 without a control variate).
SINGULAR, UNLIKE = 1e-3, 0.1


class ConvOperator(LinearOperator):
    """A convolution, approximated by the inverse of its circular twin, or else by its transpose.

    Arguments:
        weight: The kernel, with shape (out channels, C / groups, kernel height, kernel width).
        geometry: The geometry of the convolution.

    Example:
        >>> from ebflow_plugin.linalg.geometry import Setting
        >>> geometry = Setting.of(1, kernel_size=3).geometry((1, 2, 2))
        >>> operator = ConvOperator(torch.eye(9)[4].view(1, 1, 3, 3) * 2, geometry)
        >>> operator.approximate().solve(torch.ones(1, 1, 2, 2))
        tensor([[[[0.5000, 0.5000],
                  [0.5000, 0.5000]]]])
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

    def at(self, weight: Tensor) -> ConvOperator:
        """The same convolution with another kernel."""
        return ConvOperator(weight, self.geometry)

    def sum_of_squares(self) -> float | None:
        counts = []
        for axis in (self.geometry.rows, self.geometry.columns):
            taps = axis.sources()
            if any(len(seen := [pixel for pixel in row if pixel >= 0]) != len(set(seen)) for row in taps):
                return None  # taps share a pixel, with reflect or replicate padding: their entries add up
            counts.append([sum(row[tap] >= 0 for row in taps) for tap in range(len(taps[0]))])
        squares = self.like.double().square().sum((0, 1))
        times = torch.outer(*(squares.new_tensor(count) for count in counts))
        return float((squares * times).sum())


def conv_operator(weight: Tensor, geometry: Geometry) -> LinearOperator:
    """A convolution as an operator: a dense matrix for each group if each output pixel reads only its own cell."""
    axes = geometry.rows, geometry.columns
    if structure(geometry) == "patches" and all((axis.kernel, axis.dilation) == (axis.stride, 1) for axis in axes):
        blocks = weight.unflatten(0, (geometry.groups, -1)).flatten(2)  # each pixel is read once
        operator = DenseOperator(blocks, times=math.prod(geometry.out_shape[1:]))
        operator.blocks, operator.cost = determinant(geometry)
        return operator
    return ConvOperator(weight, geometry)


def side_by_side(convolutions: Sequence[ConvOperator]) -> ConvOperator:
    """Convolutions of one geometry as one, which acts on their channels side by side.

    Example:
        >>> from ebflow_plugin.linalg.geometry import Setting
        >>> geometry = Setting.of(2, kernel_size=3).geometry((2, 4, 4))
        >>> both = side_by_side([ConvOperator(torch.randn(2, 2, 3, 3), geometry) for _ in range(2)])
        >>> both.shape, both.geometry.groups
        ((4, 4, 4), 2)
    """
    count, one = len(convolutions), convolutions[0].geometry
    channels, out_channels, groups = count * one.channels, count * one.out_channels, count * one.groups
    wide = replace(one, channels=channels, out_channels=out_channels, groups=groups)
    return ConvOperator(torch.cat([each.weight for each in convolutions]), wide)


def has_twin(geometry: Geometry) -> bool:
    """Whether the image consists of complete cells, one for each output pixel."""
    return all(axis.out * axis.stride == axis.size for axis in (geometry.rows, geometry.columns))


def circular_twin(weight: Tensor, geometry: Geometry) -> Approximation:
    r"""Inverts the circular twin of a convolution.

    Cost: :math:`O(HW (k C^2 + C^3))` once, a Fourier transform and :math:`O(HW C^2)` for each image. Nothing
    synchronises with the device. Frequencies at which the twin is nearly singular are only scaled; the threshold is
    stricter for the control variate than for the solve.

    Arguments:
        weight: The kernel, with shape (out channels, C / groups, kernel height, kernel width).
        geometry: The geometry of the convolution; :func:`has_twin` must hold.

    Example:
        >>> from ebflow_plugin.linalg.geometry import Setting
        >>> geometry = Setting.of(2, kernel_size=3, padding_mode="circular").geometry((2, 4, 4))
        >>> kernel, x = torch.randn(2, 2, 3, 3, dtype=torch.float64), torch.randn(5, 2, 4, 4, dtype=torch.float64)
        >>> torch.allclose(circular_twin(kernel, geometry).solve(convolve(x, kernel, geometry)), x)
        True
    """
    rows, columns, groups = geometry.rows, geometry.columns, geometry.groups
    fixed = weight.detach().unflatten(0, (groups, -1))  # (groups, out, in, kernel rows, kernel columns)
    high, wide = _waves(rows, fixed, rows.out), _waves(columns, fixed, columns.out // 2 + 1)
    along = torch.einsum("goitu,mub->goitmb", fixed.to(wide.dtype), wide)
    blocks = torch.einsum("nta,goitmb->gnmoiab", high, along).flatten(4)
    inverse, bounded = _guarded_inverses(blocks)  # (groups, rows, columns of frequencies, in, out)
    cell = (geometry.channels // groups, rows.stride, columns.stride)

    def apply(matrices: Tensor, y: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(y.unflatten(1, (groups, -1))).permute(1, 3, 4, 2, 0)
        cells = torch.fft.irfft2((matrices @ spectrum).permute(4, 0, 3, 1, 2), s=(rows.out, columns.out))
        return cells.unflatten(2, cell).permute(0, 1, 2, 5, 3, 6, 4).flatten(5).flatten(3, 4).flatten(1, 2)

    def trace(kernel: Tensor) -> Tensor:
        down, across = (_counts(axis, inverse.dtype, inverse.device) for axis in (rows, columns))
        # In the half spectrum, a column of frequencies counts for its conjugate too, unless it is its own.
        twice = torch.arange(wide.shape[0], device=fixed.device) * 2 % columns.out != 0
        part = torch.einsum("ubm,gnmiabo->gnuiao", across[..., : len(twice)] * (1 + twice), bounded.unflatten(3, cell))
        taps = torch.einsum("tan,gnuiao->goitu", down, part).real
        return (taps * kernel.unflatten(0, (groups, -1))).flatten(1).sum(1)

    return Approximation(partial(apply, inverse), partial(apply, bounded), trace)


def _waves(axis: Axis, like: Tensor, frequencies: int) -> Tensor:
    """The Fourier factor of each tap, on its pixel of a cell: (frequencies, taps, pixels of a cell), complex."""
    place = torch.arange(axis.kernel, device=like.device) * axis.dilation - axis.before
    cell = torch.div(place, axis.stride, rounding_mode="floor")
    frequency = torch.arange(frequencies, device=like.device)
    turns = (frequency[:, None] * cell) % axis.out  # integers, so that no digit of the angle is lost
    angle = turns.to(like.dtype) * (2 * math.pi / axis.out)
    pixels = torch.arange(axis.stride, device=like.device)
    own = (place - cell * axis.stride)[:, None] == pixels
    return torch.polar(torch.ones_like(angle), angle)[:, :, None] * own


def _guarded_inverses(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of each block, with a multiple of the identity in place of nearly singular ones.

    Two versions, with the thresholds :data:`SINGULAR` and :data:`UNLIKE`.
    """
    size = blocks.shape[-1]
    parts = torch.view_as_real(blocks)
    every = tuple(range(1, blocks.dim()))  # a group may be a layer of its own
    scale = parts.square().mean((*every, -1), keepdim=True)[..., 0].mul(2 * size).sqrt()  # of a singular value
    scale = scale.clamp_min(torch.finfo(parts.dtype).tiny)
    inverse = blocks.reciprocal() if size == 1 else torch.linalg.inv_ex(blocks).inverse
    length = torch.view_as_real(inverse).square().sum((-3, -2, -1)).sqrt()[..., None, None]
    unit = torch.eye(size, dtype=blocks.dtype, device=blocks.device) / scale
    guarded = torch.where(length * scale * SINGULAR < size, inverse, unit)
    return guarded, torch.where(length * scale * UNLIKE < size, guarded, unit)


@lru_cache(maxsize=64)
def _counts(axis: Axis, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The number of outputs for which a tap reads a pixel at each cell offset, Fourier-transformed over the offset.

    Its shape is (taps, pixels of a cell, frequencies). The trace of a product with the twin's inverse sums over it.
    """
    counts = torch.zeros(axis.kernel, axis.stride, axis.out, dtype=torch.float64, device="cpu")  # entry by entry
    for place, sources in enumerate(axis.sources()):
        for tap, source in enumerate(sources):
            if source >= 0:
                cell, pixel = divmod(source, axis.stride)
                counts[tap, pixel, (cell - place) % axis.out] += 1
    return torch.fft.ifft(counts).to(device=device, dtype=dtype, non_blocking=True)
