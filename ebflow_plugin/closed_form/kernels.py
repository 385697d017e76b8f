r"""The kernel of a convolution that makes images most likely under a standard normal base.

With S the covariance of the patches that the output pixels read, and W the matrix of the convolution for images with P
output pixels,

.. math:: \min_w\; \tfrac12 \langle w, w S \rangle - \tfrac1P \log |\det W|

has few unknowns. A quasi-Newton method (L-BFGS, in coordinates in which the patches are white) first takes the
log-determinant of the circular twin, O(P C³): Whittle's likelihood. From there it goes on with the true one, which
knows the border. At the minimum :math:`w S w^\top = I`: as after a whitening matrix, the output is white,
on average over its pixels.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite

import torch
from torch import Tensor

from ebflow_plugin.errors import SingularError
from ebflow_plugin.linalg.convolution import Convolution, structure
from ebflow_plugin.linalg.geometry import Geometry, convolve

STEPS = {"fourier": 200, "other": 40}  # of the quasi-Newton method: by Fourier transform they cost next to nothing
CLOSE = {"fourier": 1e-6, "other": 5e-3}  # nats for a whole image: a step that gains less is the last
FLAT = 1e-12  # eigenvalues of correlations below this fraction of the largest are directions that no patch has


def fit_kernel(covariance: Tensor, start: Tensor, geometry: Geometry, fitted: bool = False) -> tuple[Tensor, float]:
    """Fits the kernel of a convolution without groups.

    Cost: some ten to fifty determinants of the convolution with their gradients, and a hundred of its circular twin.

    Arguments:
        covariance: S in float64, with shape (C k², C k²), in the order of the kernel's entries.
        start: A kernel that is not singular, in float64 with shape (C', C, kernel height, kernel width).
        geometry: The geometry of the convolution.
        fitted: Whether ``start`` is the kernel of similar data, so that the circular twin has nothing to tell.

    Returns:
        The kernel, and the log-determinant of the convolution.

    Raises:
        SingularError: If the patches do not vary in a direction that the convolution needs.

    Example:
        >>> from ebflow_plugin.linalg.geometry import Setting
        >>> geometry = Setting.of(1, kernel_size=3).geometry((1, 4, 4))
        >>> centre = torch.eye(9).double()[4].view(1, 1, 3, 3)
        >>> kernel, log_det = fit_kernel(4 * torch.eye(9).double(), centre, geometry)
        >>> round(kernel[0, 0, 1, 1].item(), 3), round(log_det, 2)
        (0.5, -11.09)
    """
    spread = covariance.diagonal().clamp_min(0.0).sqrt()
    scale = spread.where(spread > 0, 1.0)  # a tap that reads nothing but padding has none
    values, vectors = torch.linalg.eigh(covariance / torch.outer(scale, scale))
    kept = values > FLAT * values[-1]
    root = scale[:, None] * vectors[:, kept] * values[kept].sqrt()
    inverse = (vectors[:, kept] * values[kept].rsqrt()).T / scale
    pixels = geometry.rows.out * geometry.columns.out

    def weight_of(free: Tensor) -> Tensor:
        return (free @ inverse).view(start.shape)

    def loss(free: Tensor, matrix: Geometry) -> Tensor:
        return 0.5 * free.square().sum() - Convolution(weight_of(free), matrix).log_abs_det() / pixels

    def descend(free: Tensor, matrix: Geometry) -> Tensor:
        kind = "fourier" if structure(matrix) == "fourier" else "other"
        moved = free.clone().requires_grad_()
        optimizer = torch.optim.LBFGS(
            [moved],
            max_iter=STEPS[kind],
            history_size=30,
            tolerance_grad=1e-9,
            tolerance_change=CLOSE[kind] / pixels,
            line_search_fn="strong_wolfe",
        )

        def closure() -> float:
            found = loss(moved, matrix)
            (moved.grad,) = torch.autograd.grad(found, moved)
            return float(found.detach())

        optimizer.step(closure)
        return moved.detach()

    begun = start.flatten(1) @ root
    probe = torch.randn(4, *geometry.shape, generator=torch.Generator().manual_seed(0)).to(start)
    lost = convolve(probe, start - weight_of(begun), geometry)  # nothing, if only taps that read one pixel are alike
    if float(lost.abs().max()) > 1e-6 * float(start.abs().max()):
        raise SingularError(
            f"{int((~kept).sum())} of {len(kept)} directions of its patches have no variance, so that no kernel can "
            "whiten them; dequantize the data, or pass more of it"
        )
    tried = [begun]
    with torch.enable_grad():
        if (twin := _twin(geometry)) is not None and not fitted:
            tried.append(descend(begun, twin))
        tried.append(descend(tried[-1], geometry))

    def finite(free: Tensor) -> float:
        try:
            found = float(loss(free, geometry))
        except SingularError:
            return inf
        return found if isfinite(found) else inf

    best = min(tried, key=finite)
    values, vectors = torch.linalg.eigh(best @ best.T)
    mixed = (vectors * values.rsqrt()) @ vectors.T @ best  # the best mixing of its output: white, to the last digit
    kernel = weight_of(mixed)
    return kernel, float(Convolution(kernel, geometry).log_abs_det())


def _twin(geometry: Geometry) -> Geometry | None:
    """The same convolution on a torus, if that is another one."""
    rows, columns = (replace(axis, mode="circular") for axis in (geometry.rows, geometry.columns))
    twin = replace(geometry, rows=rows, columns=columns)
    wraps = all(max(axis.before, axis.after) <= axis.size for axis in (rows, columns))
    return twin if twin != geometry and wraps and structure(twin) == "fourier" else None
