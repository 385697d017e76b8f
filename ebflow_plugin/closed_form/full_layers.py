"""A full layer as a matrix on rows, and the whitening map that it can be set to.

A FullLinear multiplies rows of features. A FullConv2d multiplies patches: its rows have an entry for each tap of its
kernel. Of these, those of a cell of stride × stride pixels are the output's own place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ebflow_plugin.chunks import picked, rows_in_chunks
from ebflow_plugin.closed_form.kernels import fit_kernel
from ebflow_plugin.closed_form.moments import Moments
from ebflow_plugin.errors import InputError, SingularError
from ebflow_plugin.layers import FullLinear, SinhArcsinh
from ebflow_plugin.linalg.geometry import patches
from ebflow_plugin.plan.elementwise import ElementwiseStep
from ebflow_plugin.plan.matrices import FullStep
from ebflow_plugin.plan.plan import Plan

IMAGES = 100  # patches are taken of so many at once, since they take k² times the memory
ROUNDING = 1e-10  # an eigenvalue below this fraction of the largest has lost most of its digits


class FullLayer:
    """A full layer as a matrix that takes rows to features, in groups that it does not mix.

    Arguments:
        plan: A plan.
        place: The index of the layer in it.

    Attributes:
        module: The layer itself, a FullLinear or a FullConv2d.
        where: Its place in the model, for messages.
        groups: The number of groups of features that the layer does not mix.
        bend: The nonlinearity right after it, if it has the same parameters for each row of the layer's output.
    """

    bend: ElementwiseStep | None = None

    def __init__(self, plan: Plan, place: int) -> None:
        step, after = plan.steps[place], next(iter(plan.steps[place + 1 :]), None)
        assert isinstance(step, FullStep)
        self.step, self.place, self.where = step, place, step.where
        self.module: Any = step.module
        linear = isinstance(self.module, FullLinear)
        self.groups: int = 1 if linear else self.module.setting.groups
        if isinstance(after, ElementwiseStep):
            per_column = isinstance(after.module, SinhArcsinh) and after.module.dim != (-1 if linear else -3)
            self.bend = None if per_column else after

    @property
    def cell(self) -> Tensor:
        """The entries of a row, within its group, that are the output's own place: all, or those of a cell."""
        places = torch.arange(self.module.weight[0].numel()).view(self.module.weight[0].shape)
        if isinstance(self.module, FullLinear):
            return places
        rows, columns = self.module.setting.cell_taps()
        return places[:, rows][:, :, columns].flatten()

    @property
    def cells(self) -> Tensor:
        """The entries of a row that are the output's own place, of all groups."""
        groups = torch.arange(self.groups)[:, None] * self.module.weight[0].numel()
        return (groups + self.cell.flatten()).flatten()

    @property
    def matrix(self) -> Tensor:
        """The matrix that takes a row to the output, with shape (features, entries of a row)."""
        return torch.block_diag(*self.module.weight.flatten(1).chunk(self.groups))

    def set(self, matrix: Tensor, bias: Tensor) -> None:
        """Writes a matrix like :attr:`matrix`, and the bias, into the layer."""
        blocks = matrix.unflatten(0, (self.groups, -1)).unflatten(2, (self.groups, -1)).diagonal(dim1=0, dim2=2)
        self.module.weight.copy_(blocks.movedim(-1, 0).reshape(self.module.weight.shape))
        if self.module.bias is not None:
            self.module.bias.copy_(bias)

    def unfit(self) -> str | None:
        """Why the layer cannot be set to a whitening map, or None."""
        names = {"weight"} if self.module.bias is None else {"weight", "bias"}
        if self.step.inverted:
            why = "data pass through its inverse"
        elif not names <= dict(self.module.named_parameters(recurse=False)).keys():
            why = "it computes its weight (a parametrization)"
        elif not isinstance(self.module, FullLinear) and self.module.setting.cell_taps() is None:
            why = (
                "that needs an output channel, and a tap of the kernel, for each element of a cell of stride x stride "
                "pixels"
            )
        else:
            return None
        return f"{self.where} cannot start as a whitening map: {why}"

    def rows(self, value: Tensor) -> Tensor:
        """The vectors that the layer's weight multiplies: rows of features, or the patches of a convolution."""
        if isinstance(self.module, FullLinear):
            return value.flatten(0, -2)
        return patches(value, self.module.setting.geometry(value.shape[1:]))

    def weighted_rows(self, value: Tensor, weights: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The rows of an input, of some data points at a time, and the weight of each row."""
        for part in rows_in_chunks(len(value), None if isinstance(self.module, FullLinear) else IMAGES):
            some, own = picked(part, value, weights)
            rows = self.rows(some)
            yield rows, None if own is None else own.repeat_interleave(len(rows) // len(some))

    def first_cell(self, value: Tensor) -> Tensor:
        """The entries of an input that are the first output's own place: a view, ``(B, D)`` or ``(B, C, *stride)``."""
        if isinstance(self.module, FullLinear):
            return value.view(len(value), -1, value.shape[-1])[:, 0]
        high, wide = self.module.setting.stride
        return value[:, :, :high, :wide]

    @torch.no_grad()
    def whiten(
        self, moments: Moments, shape: tuple[int, ...], shrinkage: float = 0.0, start: Tensor | None = None
    ) -> float:
        """Sets the layer to the whitening map of its input: C^(-1/2) (x - m), or the kernel that is nearest to one.

        Arguments:
            moments: Those of its rows.
            shape: The event shape of its input.
            shrinkage: How far their covariance is shrunk towards its diagonal first, 0 to 1.
            start: A kernel that was fitted to similar rows.

        Returns:
            The log-determinant of the map, divided by the number of rows in an event.
        """
        matrix, log_det = self.whitening(moments, shape, shrinkage, start)
        bias = -matrix @ moments.mean
        if self.module.bias is None and bool((bias.abs() > 1e-6).any()):  # the output has variance 1
            raise InputError(f"{self.where} needs a bias to subtract the mean of the data")
        self.set(matrix, bias)
        return log_det

    def whitening(
        self, moments: Moments, shape: tuple[int, ...], shrinkage: float = 0.0, start: Tensor | None = None
    ) -> tuple[Tensor, float]:
        """The matrix of :meth:`whiten`, with the shape of :attr:`matrix`, and its log-determinant."""
        if not bool(torch.isfinite(moments.scatter).all()):
            raise InputError(f"the input of {self.where} holds NaN or inf; ebflow_plugin.verify(flow, x) finds where")
        places = torch.arange(len(moments.mean), device=moments.mean.device).chunk(self.groups)
        starts = (None,) * self.groups if start is None else start.chunk(self.groups)
        blocks, total = list[Tensor](), 0.0
        for chosen, begin in zip(places, starts, strict=True):
            begin = None if begin is None else begin[:, chosen]
            block, log_det = self._block(moments.part(chosen), shape, shrinkage, begin)
            blocks.append(block)
            total += log_det
        return torch.block_diag(*blocks), total

    def _block(
        self, moments: Moments, shape: tuple[int, ...], shrinkage: float, start: Tensor | None
    ) -> tuple[Tensor, float]:
        """The matrix of one group, and its log-determinant."""
        cell = self.cell.to(moments.mean.device)
        white, log_det = whitening(moments.part(cell), self.where, shrinkage)
        matrix = white.new_zeros(len(white), len(moments.mean))
        matrix[:, cell] = white
        if len(cell) == len(moments.mean):
            return matrix, log_det
        geometry = self.module.setting.geometry(shape).group
        begin = (matrix if start is None else start).view(-1, *self.module.weight.shape[1:])
        try:
            kernel, total = fit_kernel(shrunk(moments, shrinkage), begin, geometry, fitted=start is not None)
        except SingularError as error:
            raise SingularError(f"{self.where}: {error}") from error
        return kernel.flatten(1), total / (geometry.rows.out * geometry.columns.out)


def spreads(moments: Moments, where: str) -> Tensor:
    """The standard deviation of each feature.

    Raises:
        SingularError: If one of them is constant.
    """
    spread = moments.covariance().diagonal().clamp_min(0.0).sqrt()
    constant = (spread <= 1e-12 * moments.mean.abs()).nonzero().flatten().tolist()
    if constant:
        raise SingularError(
            f"features {constant[:5]} of the input of {where} are constant over {moments.count:.0f} data points, and "
            "cannot be whitened; dequantize the data, or leave these features out"
        )
    return spread


def shrunk(moments: Moments, shrinkage: float) -> Tensor:
    """The covariance, shrunk towards its diagonal."""
    covariance = moments.covariance()
    return (1 - shrinkage) * covariance + shrinkage * covariance.diagonal().diag()


def whitening(moments: Moments, where: str, shrinkage: float = 0.0) -> tuple[Tensor, float]:
    """The symmetric whitening matrix, C^(-1/2), and its log-determinant.

    If the scales of the features differ so much that the small eigenvalues of C are lost to rounding, the features are
    divided by their standard deviations first, and the matrix is R^(-1/2) with the correlations R.

    Arguments:
        moments: The moments of the data to whiten.
        where: The whitening step, for messages.
        shrinkage: How far C is shrunk towards its diagonal first, 0 to 1.

    Raises:
        SingularError: If the data have no variance in some direction.
    """
    spread, covariance = spreads(moments, where), shrunk(moments, shrinkage)
    values, vectors = torch.linalg.eigh(covariance)
    if values.min() > ROUNDING * values.max():
        return (vectors * values.rsqrt()) @ vectors.T, -0.5 * values.log().sum().item()
    values, vectors = torch.linalg.eigh(covariance / torch.outer(spread, spread))
    refuse_dependent(values, moments.count, where)
    log_det = -0.5 * values.log().sum() - spread.log().sum()
    return (vectors * values.rsqrt()) @ vectors.T / spread, log_det.item()


def refuse_dependent(values: Tensor, count: float, where: str) -> None:
    """Raises :class:`SingularError` if correlations with these eigenvalues have no inverse."""
    flat = int((values <= 1e-12 * values.max()).sum())
    if flat:
        raise SingularError(
            f"the features of the input of {where} are linearly dependent over {count:.0f} data points: "
            f"{flat} of {len(values)} directions have no variance of their own, and cannot be whitened; "
            "dequantize the data, or pass more of it"
        )
