"""The whitening start: the first full layer is initialised to the whitening map of its input."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from ebflow_plugin.closed_form.moments import Moments
from ebflow_plugin.errors import InputError, SingularError
from ebflow_plugin.layers import FullLinear
from ebflow_plugin.plan.linear import InitialisedAffineStep, IsometryStep
from ebflow_plugin.plan.matrices import FullStep
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import own_tensors

__all__ = [
    "broadcast",
    "first_full_layer",
    "refuse_dependent",
    "rows_of",
    "spreads",
    "start_together",
    "whiten",
    "whiten_layer",
]

ROUNDING = 1e-10  # an eigenvalue below this fraction of the largest has lost most of its digits


def first_full_layer(plan: Plan) -> int:
    """The index of the first full layer, which only ActNorms, permutations and other fixed steps may precede.

    Raises:
        InputError: If no full layer can become the whitening map.
    """
    for index, step in enumerate(plan.steps):
        if isinstance(step, FullStep):
            _refuse_unfit(step)
            return index
        if step.takes != 1 or step.gives != 1:
            raise InputError(f"the whitening start needs a full layer that sees all data; {step.where} comes first")
        trainable = isinstance(step.module, nn.Module) and any(p.requires_grad for p in step.module.parameters())
        if trainable and not isinstance(step, (InitialisedAffineStep, IsometryStep)):
            full = any(isinstance(other, FullStep) for other in plan.steps)
            raise InputError(
                "the whitening start needs a FullLinear or FullConv2d before any other trainable step; "
                f"{step.where} comes first"
                + ("." if full else ". ebflow_plugin.unconstrain(flow) turns LU and similar layers into full ones.")
            )
    raise InputError(
        "the whitening start needs a FullLinear or FullConv2d, and the flow has none; ebflow_plugin.unconstrain(flow) "
        "turns LU and similar layers into full ones"
    )


def _refuse_unfit(step: FullStep) -> None:
    """Refuses a full layer whose parameters cannot be set to a whitening map, before anything is edited."""
    if step.inverted:
        raise InputError(f"{step.where} cannot start as a whitening map: data pass through its inverse")
    names = {"weight"} if step.module.bias is None else {"weight", "bias"}
    if not names <= dict(step.module.named_parameters(recurse=False)).keys():
        raise InputError(f"{step.where} cannot start as a whitening map: it computes its weight (a parametrization)")


def rows_of(step: FullStep, value: Tensor) -> Tensor:
    """The vectors that a full layer's matrix multiplies: rows of features, or cells of stride × stride pixels.

    A convolution whitens each cell separately: the best map of its form with one tap per pixel.
    """
    layer = step.module
    if isinstance(layer, FullLinear):
        return value.flatten(0, -2)
    setting = layer.setting
    high, wide = setting.stride
    if high != wide or setting.groups != 1 or setting.cell_taps() is None:
        raise InputError(
            f"{step.where} cannot start as a whitening map: that needs a square stride, one group, and an output "
            "channel and a tap of the kernel for each element of a cell"
        )
    cells = F.pixel_unshuffle(value, high) if high > 1 else value
    return cells.movedim(1, -1).flatten(0, -2)


@torch.no_grad()
def whiten(plan: Plan, stream: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Runs the whitening start on a plan: its ActNorms from the first batch, its first full layer from all data.

    Arguments:
        plan: The plan.
        stream: The data, in one pass.
    """
    index = first_full_layer(plan)
    layer = plan.steps[index]
    assert isinstance(layer, FullStep)
    before = replace(plan, steps=plan.steps[:index])
    moments = Moments()
    first: tuple[Tensor, Tensor | None] | None = None
    for x, context in stream:
        if first is None:
            first = x, context
            start_together(before, x, context)
        (value,), _ = before.encode(x, plan.embed(context))
        moments.add(rows_of(layer, value))
    assert first is not None
    moments.reduce()
    whiten_layer(layer, moments)
    start_together(plan, *first)


def start_together(plan: Plan, x: Tensor, context: Tensor | None) -> None:
    """Initialises the steps of a plan from a batch; in a distributed run all processes take those of the first."""
    plan.initialize(x, context)
    for step in plan.steps:
        if isinstance(step, InitialisedAffineStep):
            own = tuple(own_tensors(step.module))
            for tensor, first in zip(own, broadcast(*own), strict=True):
                tensor.copy_(first)


def broadcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors of the first process of a distributed run, in all of its processes."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return tensors
    shared = [tensor.detach().cpu() for tensor in tensors]
    distributed.broadcast_object_list(shared, src=0)
    return tuple(first.to(tensor) for first, tensor in zip(shared, tensors, strict=True))


@torch.no_grad()
def whiten_layer(step: FullStep, moments: Moments, shrinkage: float = 0.0) -> float:
    """Sets a full layer to the symmetric whitening map of its input: C^(-1/2) (x - m).

    Returns:
        The log-determinant of C^(-1/2).
    """
    layer = step.module
    if not bool(torch.isfinite(moments.scatter).all()):
        raise InputError(f"the input of {step.where} holds NaN or inf; ebflow_plugin.verify(flow, x) finds where")
    weight, log_det = whitening(moments, step.where, shrinkage)
    bias = -weight @ moments.mean
    if layer.bias is None and bool((moments.mean.abs() > 1e-6 * moments.covariance().diagonal().sqrt()).any()):
        raise InputError(f"{step.where} needs a bias to subtract the mean of the data")
    if isinstance(layer, FullLinear):
        layer.weight.copy_(weight)
    else:
        (rows, columns), setting = layer.setting.cell_taps(), layer.setting
        cell = weight.to(layer.weight).reshape(len(weight), -1, *setting.stride)
        layer.weight.zero_()
        for row, column in product(range(setting.stride[0]), range(setting.stride[1])):
            layer.weight[..., rows[row], columns[column]] = cell[..., row, column]
    if layer.bias is not None:
        layer.bias.copy_(bias)
    return log_det


def spreads(moments: Moments, where: str) -> Tensor:
    """The standard deviation of each feature.

    Raises:
        SingularError: If one of them is constant.
    """
    spread = moments.covariance().diagonal().clamp_min(0.0).sqrt()
    constant = (spread <= 1e-12 * moments.mean.abs()).nonzero().flatten().tolist()
    if constant:
        raise SingularError(
            f"features {constant[:5]} of the input of {where} are constant over {moments.count} data points, and "
            "cannot be whitened; dequantize the data, or leave these features out"
        )
    return spread


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
    spread, covariance = spreads(moments, where), moments.covariance()
    covariance = (1 - shrinkage) * covariance + shrinkage * covariance.diagonal().diag()
    values, vectors = torch.linalg.eigh(covariance)
    if values.min() > ROUNDING * values.max():
        return (vectors * values.rsqrt()) @ vectors.T, -0.5 * values.log().sum().item()
    values, vectors = torch.linalg.eigh(covariance / torch.outer(spread, spread))
    refuse_dependent(values, moments.count, where)
    log_det = -0.5 * values.log().sum() - spread.log().sum()
    return (vectors * values.rsqrt()) @ vectors.T / spread, log_det.item()


def refuse_dependent(values: Tensor, count: int, where: str) -> None:
    """Raises :class:`SingularError` if correlations with these eigenvalues have no inverse."""
    flat = int((values <= 1e-12 * values.max()).sum())
    if flat:
        raise SingularError(
            f"the features of the input of {where} are linearly dependent over {count} data points: "
            f"{flat} of {len(values)} directions have no variance of their own, and cannot be whitened; "
            "dequantize the data, or pass more of it"
        )
