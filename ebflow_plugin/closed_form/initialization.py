"""The whitening start: the first full layer is initialised to the whitening map of its input.

If only linear steps follow, the density of the model is that of this layer, and it is fitted to a Gaussian base.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, distributed, nn

from ebflow_plugin.closed_form.calibration import gaussian_of
from ebflow_plugin.closed_form.kernels import fit_kernel
from ebflow_plugin.closed_form.moments import Moments, Rows
from ebflow_plugin.errors import InputError, SingularError
from ebflow_plugin.layers import FullLinear
from ebflow_plugin.linalg.geometry import patches
from ebflow_plugin.linalg.memo import own_tensors
from ebflow_plugin.plan.inputs import resampled_rows
from ebflow_plugin.plan.linear import InitialisedAffineStep, IsometryStep
from ebflow_plugin.plan.matrices import FullStep
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import LinearStep, Step
from ebflow_plugin.plan.values import flatten

__all__ = [
    "IMAGES",
    "broadcast",
    "cell_of",
    "cells_of",
    "first_cell",
    "first_full_layer",
    "fit_to_base",
    "fitted_matrix",
    "groups_of",
    "is_linear",
    "matrix_of",
    "may_precede",
    "refuse_dependent",
    "refuse_unfit",
    "resampled",
    "rows_of",
    "set_matrix",
    "spreads",
    "start_together",
    "weighted_rows",
    "whiten",
    "whiten_layer",
]

IMAGES = 100  # patches are taken of so many at once, since they take k² times the memory
ROUNDING = 1e-10  # an eigenvalue below this fraction of the largest has lost most of its digits


def first_full_layer(plan: Plan) -> int:
    """The index of the first full layer, which only ActNorms, permutations and other fixed steps may precede.

    Raises:
        InputError: If no full layer can become the whitening map.
    """
    for index, step in enumerate(plan.steps):
        if isinstance(step, FullStep):
            refuse_unfit(step)
            return index
        if step.n_in != 1 or step.n_out != 1:
            raise InputError(f"the whitening start needs a full layer that sees all data; {step.where} comes first")
        if not may_precede(step):
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


def may_precede(step: Step) -> bool:
    """Whether a step may come before a full layer that is fitted: a fixed one, an ActNorm, or a permutation."""
    trainable = isinstance(step.module, nn.Module) and any(p.requires_grad for p in step.module.parameters())
    return not trainable or isinstance(step, (InitialisedAffineStep, IsometryStep))


def refuse_unfit(step: FullStep) -> None:
    """Refuses a full layer whose parameters cannot be set to a whitening map, before anything is edited."""
    if step.inverted:
        raise InputError(f"{step.where} cannot start as a whitening map: data pass through its inverse")
    names = {"weight"} if step.module.bias is None else {"weight", "bias"}
    if not names <= dict(step.module.named_parameters(recurse=False)).keys():
        raise InputError(f"{step.where} cannot start as a whitening map: it computes its weight (a parametrization)")
    cell_of(step)


def rows_of(step: FullStep, value: Tensor) -> Tensor:
    """The vectors that a full layer's weight multiplies: rows of features, or the patches of a convolution."""
    layer = step.module
    if isinstance(layer, FullLinear):
        return value.flatten(0, -2)
    return patches(value, layer.setting.geometry(value.shape[1:]))


def cell_of(step: FullStep) -> Tensor:
    """The entries of a row, within its group, that are the output's own place: all, or those of a convolution's cell.

    Raises:
        InputError: If a convolution has none.
    """
    layer = step.module
    places = torch.arange(layer.weight[0].numel()).view(layer.weight[0].shape)
    if isinstance(layer, FullLinear):
        return places
    taps = layer.setting.cell_taps()
    if taps is None:
        raise InputError(
            f"{step.where} cannot start as a whitening map: that needs an output channel, and a tap of the kernel, for "
            "each element of a cell of stride x stride pixels"
        )
    return places[:, taps[0]][:, :, taps[1]].flatten()


def cells_of(step: FullStep) -> Tensor:
    """The entries of a row that are the output's own place, of all groups."""
    groups = torch.arange(groups_of(step))[:, None] * step.module.weight[0].numel()
    return (groups + cell_of(step).flatten()).flatten()


def groups_of(step: FullStep) -> int:
    """The number of groups of features that a full layer does not mix."""
    return 1 if isinstance(step.module, FullLinear) else step.module.setting.groups


def first_cell(step: FullStep, value: Tensor) -> Tensor:
    """The entries of an input that are the first output's own place, as a view: ``(B, D)``, or ``(B, C, *stride)``."""
    if isinstance(step.module, FullLinear):
        return value.view(len(value), -1, value.shape[-1])[:, 0]
    high, wide = step.module.setting.stride
    return value[:, :, :high, :wide]


def matrix_of(step: FullStep) -> Tensor:
    """The matrix that takes a row (:func:`rows_of`) to the output, with shape (features, entries of a row)."""
    return torch.block_diag(*step.module.weight.flatten(1).chunk(groups_of(step)))


def set_matrix(step: FullStep, matrix: Tensor, bias: Tensor) -> None:
    """Writes the matrix of :func:`matrix_of`, and the bias, into a full layer."""
    layer, groups = step.module, groups_of(step)
    blocks = matrix.unflatten(0, (groups, -1)).unflatten(2, (groups, -1)).diagonal(dim1=0, dim2=2)
    layer.weight.copy_(blocks.movedim(-1, 0).reshape(layer.weight.shape))
    if layer.bias is not None:
        layer.bias.copy_(bias)


@torch.no_grad()
def whiten(plan: Plan, stream: Iterable[Rows]) -> None:
    """Runs the whitening start on a plan: its ActNorms from the first batch, its first full layer from all data.

    Arguments:
        plan: The plan.
        stream: The data, in one pass.
    """
    index = first_full_layer(plan)
    layer = plan.steps[index]
    assert isinstance(layer, FullStep)
    before = plan[:index]
    moments = Moments()
    first: tuple[Tensor, Tensor | None] | None = None
    for x, context, weights, _ in stream:
        if first is None:
            first = resampled(x, context, weights)
            start_together(before, *first)
        (value,), _ = before.encode(x, plan.embed(context))
        for rows, own in weighted_rows(layer, value, weights):
            moments.add(rows, own)
        shape = tuple(value.shape[1:])
    assert first is not None
    moments.reduce()
    whiten_layer(layer, moments, shape)
    start_together(plan, *first)
    if is_linear(plan, index + 1):
        latents, _ = plan.encode(first[0][:1], plan.embed(None if first[1] is None else first[1][:1]))
        shapes = tuple(tuple(latent.shape[1:]) for latent in latents)
        try:
            base = gaussian_of(plan.base, shapes, latents[0].new_empty(0), "whiten=True")
        except InputError:
            return  # nothing to fit to in closed form: the layer whitens, and no more was promised
        fit_to_base(plan, index, base, *first)


def is_linear(plan: Plan, start: int) -> bool:
    """Whether all steps from an index on are linear."""
    return all(isinstance(step, LinearStep) for step in plan.steps[start:])


@torch.no_grad()
def fit_to_base(plan: Plan, place: int, base: tuple[Tensor, Tensor], x: Tensor, context: Tensor | None) -> bool:
    r"""Lets a full layer whose output is white map to the base's own Gaussian, through the steps after the layer.

    If u = M y + c are the steps after it, N(μ, σ²) the base, and y = T w + t with w white, then T and t minimise the
    expected NLL, ½ E‖(M (T w + t) + c - μ) / σ‖² - log|det T|. With S = Mᵀ diag(σ⁻²) M, summed over the P positions
    that share the layer, Tᵀ S T = P·I. M has one column per unit vector, so the cost is O(D²) per step, and D³ once.
    Nonlinear steps are replaced by their secants from zero to the unit vectors.

    Arguments:
        plan: The plan. Its layer with the index ``place`` is composed with w -> T w + t.
        place: The index of the layer.
        base: Mean and standard deviation of the base, with shape ``(D,)``.
        x: Data, of which one row shows the shapes.
        context: Its context.

    Returns:
        Whether there is such a map; if the steps after the layer are singular, there is none.
    """
    step, after = plan.steps[place], plan[place + 1 :]
    assert isinstance(step, FullStep)
    layer = step.module
    embedded = plan.embed(None if context is None else context[:1])
    (white,), _ = plan[: place + 1].encode(x[:1], embedded)
    axis = -1 if isinstance(layer, FullLinear) else 1
    shape = white.movedim(axis, -1).shape[1:]
    size, (mean, std) = shape[-1], base

    def images(probes: Tensor) -> Tensor:
        rows = probes.reshape(len(probes), *shape).movedim(-1, axis)
        given = None if embedded is None else embedded.expand(len(probes), *embedded.shape[1:])
        return flatten(after.encode(rows, given)[0]).double()

    origin = images(white.new_zeros(1, shape.numel()))
    positions = shape.numel() // size
    gram, total = (torch.zeros(size, columns, dtype=std.dtype, device=std.device) for columns in (size, len(std)))
    for position in range(positions):
        units = white.new_zeros(size, positions, size)
        units[:, position].fill_diagonal_(1.0)
        scaled = (images(units) - origin) / std
        gram += scaled @ scaled.T
        total += scaled
    gram, total, origin = broadcast(gram, total, origin)  # contexts differ between processes
    groups = torch.arange(size, device=gram.device) // (size // groups_of(step))
    mixed = gram.where(groups[:, None] != groups, 0.0)  # what a layer of groups could not follow
    lower, failed = torch.linalg.cholesky_ex(gram - mixed)
    singular = bool(failed) or not bool(torch.isfinite(lower).all())
    if singular or bool(mixed.abs().max() > 1e-6 * gram.diagonal().max()):
        return False
    scale = positions**0.5 * torch.linalg.solve_triangular(lower, torch.eye(size).to(lower), upper=False).T
    shift = torch.linalg.pinv(total @ total.T, hermitian=True) @ total @ ((mean - origin[0]) / std)
    bias = shift if layer.bias is None else scale @ layer.bias.double() + shift
    set_matrix(step, scale @ matrix_of(step).double(), bias)
    return True


def resampled(x: Tensor, context: Tensor | None, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A batch for a start that cannot weight its rows: each is there as often as its weight asks."""
    if weights is None:
        return x, context
    rows = resampled_rows(weights)
    return x[rows], None if context is None else context[rows]


def weighted_rows(step: FullStep, value: Tensor, weights: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The rows of a layer's input (:func:`rows_of`), of some data points at a time, and the weight of each row."""
    parts = [None] * -(-len(value) // IMAGES) if weights is None else weights.split(IMAGES)
    for part, own in zip(value.split(IMAGES), parts, strict=True):
        rows = rows_of(step, part)
        yield rows, None if own is None else own.repeat_interleave(len(rows) // len(part))


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
def whiten_layer(
    step: FullStep, moments: Moments, shape: tuple[int, ...], shrinkage: float = 0.0, start: Tensor | None = None
) -> float:
    """Sets a full layer to the whitening map of its input: C^(-1/2) (x - m), or the kernel that is nearest to one.

    Arguments:
        step: The layer.
        moments: Those of its rows (:func:`rows_of`).
        shape: The event shape of its input.
        shrinkage: How far their covariance is shrunk towards its diagonal first, 0 to 1.
        start: A kernel that was fitted to similar rows.

    Returns:
        The log-determinant of the map, divided by the number of rows in an event.
    """
    matrix, log_det = fitted_matrix(step, moments, shape, shrinkage, start)
    bias = -matrix @ moments.mean
    if step.module.bias is None and bool((bias.abs() > 1e-6).any()):  # the output has variance 1
        raise InputError(f"{step.where} needs a bias to subtract the mean of the data")
    set_matrix(step, matrix, bias)
    return log_det


def fitted_matrix(
    step: FullStep, moments: Moments, shape: tuple[int, ...], shrinkage: float = 0.0, start: Tensor | None = None
) -> tuple[Tensor, float]:
    """The matrix of :func:`whiten_layer`, with shape (features, entries of a row), and its log-determinant."""
    if not bool(torch.isfinite(moments.scatter).all()):
        raise InputError(f"the input of {step.where} holds NaN or inf; ebflow_plugin.verify(flow, x) finds where")
    groups = groups_of(step)
    places = torch.arange(len(moments.mean), device=moments.mean.device).chunk(groups)
    starts = (None,) * groups if start is None else start.chunk(groups)
    blocks, total = list[Tensor](), 0.0
    for chosen, begin in zip(places, starts, strict=True):
        part = moments.part(chosen) if groups > 1 else moments
        block, log_det = _fitted_block(step, part, shape, shrinkage, None if begin is None else begin[:, chosen])
        blocks.append(block)
        total += log_det
    return torch.block_diag(*blocks), total


def _fitted_block(
    step: FullStep, moments: Moments, shape: tuple[int, ...], shrinkage: float, start: Tensor | None
) -> tuple[Tensor, float]:
    """The matrix of one group, and its log-determinant."""
    cell = cell_of(step).to(moments.mean.device)
    white, log_det = whitening(moments.part(cell), step.where, shrinkage)
    matrix = white.new_zeros(len(white), len(moments.mean))
    matrix[:, cell] = white
    if len(cell) == len(moments.mean):
        return matrix, log_det
    geometry = step.module.setting.geometry(shape).group
    covariance = moments.covariance()
    covariance = (1 - shrinkage) * covariance + shrinkage * covariance.diagonal().diag()
    begin = (matrix if start is None else start).view(-1, *step.module.weight.shape[1:])
    try:
        kernel, total = fit_kernel(covariance, begin, geometry, fitted=start is not None)
    except SingularError as error:
        raise SingularError(f"{step.where}: {error}") from error
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


def refuse_dependent(values: Tensor, count: float, where: str) -> None:
    """Raises :class:`SingularError` if correlations with these eigenvalues have no inverse."""
    flat = int((values <= 1e-12 * values.max()).sum())
    if flat:
        raise SingularError(
            f"the features of the input of {where} are linearly dependent over {count:.0f} data points: "
            f"{flat} of {len(values)} directions have no variance of their own, and cannot be whitened; "
            "dequantize the data, or pass more of it"
        )
