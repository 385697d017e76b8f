"""The whitening start: the first full layer is initialised to the whitening map of its input.

If only linear steps follow, the density of the model is that of this layer, and it is fitted to a Gaussian base.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, distributed, nn

from ebflow_plugin.chunks import picked
from ebflow_plugin.closed_form.calibration import gaussian_of
from ebflow_plugin.closed_form.full_layers import FullLayer
from ebflow_plugin.closed_form.moments import Moments, Rows
from ebflow_plugin.errors import InputError
from ebflow_plugin.layers import FullLinear
from ebflow_plugin.linalg.memo import own_tensors
from ebflow_plugin.plan.inputs import resampled_rows
from ebflow_plugin.plan.linear import InitialisedAffineStep, IsometryStep
from ebflow_plugin.plan.matrices import FullStep
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import LinearStep, Step
from ebflow_plugin.plan.values import flatten


def first_full_layer(plan: Plan) -> FullLayer:
    """The first full layer, which only ActNorms, permutations and other fixed steps may precede.

    Raises:
        InputError: If no full layer can become the whitening map.
    """
    for index, step in enumerate(plan.steps):
        if isinstance(step, FullStep):
            layer = FullLayer(plan, index)
            if (why := layer.unfit()) is not None:
                raise InputError(why)
            return layer
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


@torch.no_grad()
def whiten(plan: Plan, stream: Iterable[Rows]) -> None:
    """Runs the whitening start on a plan: its ActNorms from the first batch, its first full layer from all data.

    Arguments:
        plan: The plan.
        stream: The data, in one pass.
    """
    layer, moments = first_full_layer(plan), Moments()
    before = plan[: layer.place]
    first: tuple[Tensor, Tensor | None] | None = None
    for x, context, weights, _ in stream:
        if first is None:
            first = resampled(x, context, weights)
            start_together(before, *first)
        (value,), _ = before.encode(x, plan.embed(context))
        for rows, own in layer.weighted_rows(value, weights):
            moments.add(rows, own)
        shape = tuple(value.shape[1:])
    assert first is not None
    moments.reduce()
    layer.whiten(moments, shape)
    start_together(plan, *first)
    if is_linear(plan, layer.place + 1):
        x, context = picked(slice(1), *first)
        latents, _ = plan.encode(x, plan.embed(context))
        try:
            base = gaussian_of(plan.base, latents, "whiten=True")
        except InputError:
            return  # nothing to fit to in closed form: the layer whitens, and no more was promised
        fit_to_base(plan, layer.place, base, *first)


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
    layer, after = FullLayer(plan, place), plan[place + 1 :]
    x, context = picked(slice(1), x, context)
    embedded = plan.embed(context)
    (white,), _ = plan[: place + 1].encode(x, embedded)
    axis = -1 if isinstance(layer.module, FullLinear) else 1
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
    groups = torch.arange(size, device=gram.device) // (size // layer.groups)
    mixed = gram.where(groups[:, None] != groups, 0.0)  # what a layer of groups could not follow
    lower, failed = torch.linalg.cholesky_ex(gram - mixed)
    singular = bool(failed) or not bool(torch.isfinite(lower).all())
    if singular or bool(mixed.abs().max() > 1e-6 * gram.diagonal().max()):
        return False
    scale = positions**0.5 * torch.linalg.solve_triangular(lower, torch.eye(size).to(lower), upper=False).T
    shift = torch.linalg.pinv(total @ total.T, hermitian=True) @ total @ ((mean - origin[0]) / std)
    bias = layer.module.bias
    layer.set(scale @ layer.matrix.double(), shift if bias is None else scale @ bias.double() + shift)
    return True


def resampled(x: Tensor, context: Tensor | None, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A batch for a start that cannot weight its rows: each is there as often as its weight asks."""
    return (x, context) if weights is None else picked(resampled_rows(weights), x, context)


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
