"""The whitening start: the first full layer is initialised to the whitening map of its input.

If only linear steps follow, the density of the model is that of this layer, and it is fitted to a Gaussian base.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from ebflow_plugin.closed_form.calibration import flatten, gaussian_of
from ebflow_plugin.closed_form.moments import Moments, Rows
from ebflow_plugin.errors import InputError, SingularError
from ebflow_plugin.layers import FullLinear
from ebflow_plugin.plan.linear import InitialisedAffineStep, IsometryStep
from ebflow_plugin.plan.matrices import FullStep
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import LinearStep, own_tensors
from ebflow_plugin.plan.weights import resampled_rows

__all__ = [
    "broadcast",
    "first_full_layer",
    "fit_to_base",
    "is_linear",
    "refuse_dependent",
    "resampled",
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
        if step.n_in != 1 or step.n_out != 1:
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
        rows = rows_of(layer, value)
        moments.add(rows, None if weights is None else weights.repeat_interleave(len(rows) // len(x)))
    assert first is not None
    moments.reduce()
    whiten_layer(layer, moments)
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
    layer, after = plan.steps[place].module, plan[place + 1 :]
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
    lower, failed = torch.linalg.cholesky_ex(gram)
    if bool(failed) or not bool(torch.isfinite(lower).all()):
        return False
    scale = positions**0.5 * torch.linalg.solve_triangular(lower, torch.eye(size).to(lower), upper=False).T
    shift = torch.linalg.pinv(total @ total.T, hermitian=True) @ total @ ((mean - origin[0]) / std)
    layer.weight.copy_((scale @ layer.weight.double().flatten(1)).reshape(layer.weight.shape))
    if layer.bias is not None:
        layer.bias.copy_(scale @ layer.bias.double() + shift)
    return True


def resampled(x: Tensor, context: Tensor | None, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A batch for a start that cannot weight its rows: each is there as often as its weight asks."""
    if weights is None:
        return x, context
    rows = resampled_rows(weights)
    return x[rows], None if context is None else context[rows]


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
