r"""The circular twin of a convolution: the same kernel with circular padding, inverted by the Fourier transform.

A convolution with zero, reflect or replicate padding differs from its circular twin only near the edges, so the inverse
:math:`M` of the twin approximates its own. In cells of stride x stride pixels, one for each output pixel,

.. math:: y_o(p) = \sum_{i, t} w_{o i t}\, x_{i, r_t}(p + q_t), \qquad t \cdot \text{dilation} - \text{padding}
          = q_t \cdot \text{stride} + r_t

so that at each frequency f the twin is the :math:`C \times C` matrix
:math:`B(f)_{o, (i, r)} = \sum_{t : r_t = r} w_{o i t}\, e^{2 \pi \mathrm{i} f q_t / N}`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from ebflow_plugin.linalg.geometry import Axis, Geometry
from ebflow_plugin.linalg.operators import Approximation

# A frequency whose inverse is larger than one over this, relative to the mean, is not inverted: in the preconditioner,
# and in the control variate of a trace (measured on MNIST: 56 times the variance of a batch in the worst layer, 96 with
# the first limit, 83 without a control variate).
SINGULAR, UNLIKE = 1e-3, 0.1


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
        >>> from ebflow_plugin.linalg.geometry import Setting, convolve
        >>> geometry = Setting.of(2, kernel_size=3, padding_mode="circular").geometry((2, 4, 4))
        >>> kernel, x = torch.randn(2, 2, 3, 3, dtype=torch.float64), torch.randn(5, 2, 4, 4, dtype=torch.float64)
        >>> torch.allclose(circular_twin(kernel, geometry).solve(convolve(x, kernel, geometry)), x)
        True
    """
    rows, columns, groups = geometry.rows, geometry.columns, geometry.groups
    blocks = frequency_blocks(weight.detach(), geometry)
    inverse, bounded = _guarded_inverses(blocks)  # (groups, rows, columns of frequencies, in, out)
    cell = (geometry.channels // groups, rows.stride, columns.stride)
    solve, control = (
        partial(on_frequencies, geometry, partial(torch.matmul, matrices)) for matrices in (inverse, bounded)
    )

    def trace(kernel: Tensor) -> Tensor:
        down, across = (_counts(axis, inverse.dtype, inverse.device) for axis in (rows, columns))
        across = across[..., : blocks.shape[2]] * weights(columns, blocks.device)
        part = torch.einsum("ubm,gnmiabo->gnuiao", across, bounded.unflatten(3, cell))
        taps = torch.einsum("tan,gnuiao->goitu", down, part).real
        return (taps * kernel.unflatten(0, (groups, -1))).flatten(1).sum(1)

    return Approximation(solve, control, trace)


def frequency_blocks(weight: Tensor, geometry: Geometry) -> Tensor:
    """The matrix B(f) of the twin at each frequency, differentiable in the kernel.

    Returns:
        Complex blocks, with shape (groups, rows of frequencies, the first half of their columns, out, in).
    """
    kernel = weight.unflatten(0, (geometry.groups, -1))  # (groups, out, in, kernel rows, kernel columns)
    high, wide = (_places(axis, kernel) for axis in (geometry.rows, geometry.columns))
    response = torch.einsum("goitu,tna,umb->goiabnm", kernel, high, wide)
    return torch.fft.rfft2(response).permute(0, 5, 6, 1, 2, 3, 4).flatten(4)


def on_frequencies(geometry: Geometry, function: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    """Applies a function of spectra, with shape (groups, rows, columns, channels, B), to outputs: returns images."""
    spectrum = torch.fft.rfft2(y.unflatten(1, (geometry.groups, -1))).permute(1, 3, 4, 2, 0)
    cells = torch.fft.irfft2(function(spectrum).permute(4, 0, 3, 1, 2), s=geometry.out_shape[1:])
    return from_cells(cells, geometry)


def from_cells(cells: Tensor, geometry: Geometry) -> Tensor:
    """Turns (B, groups, elements of a cell, cell rows, cell columns) into images."""
    cell = (geometry.group.channels, geometry.rows.stride, geometry.columns.stride)
    return cells.unflatten(2, cell).permute(0, 1, 2, 5, 3, 6, 4).flatten(5).flatten(3, 4).flatten(1, 2)


def weights(columns: Axis, device: torch.device) -> Tensor:
    """How often a column of the half spectrum counts: for its conjugate too, unless it is its own."""
    return 1 + (torch.arange(columns.out // 2 + 1, device=device) * 2 % columns.out != 0).long()


def _places(axis: Axis, like: Tensor) -> Tensor:
    """1 where a tap of the twin's first output takes the cell (counted backwards) and the pixel of the cell."""
    place = torch.arange(axis.kernel, device=like.device) * axis.dilation - axis.before
    cell, pixel = -torch.div(place, axis.stride, rounding_mode="floor") % axis.out, place % axis.stride
    taken = (cell * axis.stride + pixel)[:, None] == torch.arange(axis.size, device=like.device)
    return taken.to(like.dtype).unflatten(1, (axis.out, axis.stride))


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
