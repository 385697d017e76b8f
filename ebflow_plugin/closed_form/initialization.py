r"""Starting well: the whitening start, and the Gaussianising one.

*Whitening start*. The first full linear layer begins as the whitening map of what reaches it.

*Gaussianising start*. Where an elementwise nonlinearity f stands after that layer, each whitened feature y is scaled
and shifted, :math:`f(a y + b)`, so that f takes out as much of its skewness and its tails as it can. For one feature
at a time that is maximum likelihood of a one-dimensional flow,

.. math:: \min_{a, b}\; \tfrac12 \log \operatorname{Var} f(a y + b) - \mathbb{E} \log |a f'(a y + b)|,

two numbers from thousands of rows: no gradient, and hardly any sampling error however large D is. The next full layer
takes in the mean and the scale of what comes out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from ebflow_plugin.closed_form.calibration import share_memory
from ebflow_plugin.closed_form.moments import Moments
from ebflow_plugin.errors import InputError, SingularError
from ebflow_plugin.layers import FullLinear
from ebflow_plugin.plan.elementwise import ElementwiseStep
from ebflow_plugin.plan.linear import InitialisedAffineStep, IsometryStep
from ebflow_plugin.plan.matrices import FullStep
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import Step

__all__ = ["best_scales", "gaussianize", "whiten"]

ROWS = 5000  # that a scale and a shift are fitted to
SCALES = tuple(sign * 2.0**power for power in range(-1, 4) for sign in (1, -1))
SHIFTS = (-8.0, -5.0, -3.0, -1.5, 0.0, 1.5, 3.0, 5.0, 8.0)
MOVES = tuple((scale, shift) for scale in (-1, 0, 1) for shift in (-1, 0, 1) if scale or shift)
ROUNDS = 6
ROUNDING = 1e-10  # below this part of the largest, an eigenvalue has lost most of its digits


def first_full_layer(plan: Plan) -> int:
    """The place of the first full layer, after nothing but ActNorms, permutations and other fixed steps.

    Raises:
        InputError: If there is none that can become a whitening map.
    """
    for place, step in enumerate(plan.steps):
        if isinstance(step, FullStep):
            _refuse_unfit(step)
            return place
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
    """Refuses a full layer whose numbers cannot be set to those of a whitening map, before anything is edited."""
    if step.inverted:
        raise InputError(f"{step.where} cannot start as a whitening map: data pass through its inverse")
    names = {"weight"} if step.module.bias is None else {"weight", "bias"}
    if not names <= dict(step.module.named_parameters(recurse=False)).keys():
        raise InputError(f"{step.where} cannot start as a whitening map: it computes its weight (a parametrization)")


def rows_of(step: FullStep, value: Tensor) -> Tensor:
    """What the rows of a full layer's matrix act on: rows of features, or cells of stride × stride pixels of images.

    A convolution is whitened in each cell on its own: the best map of its form that needs no more than one tap a pixel.
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
def whiten(plan: Plan, stream: Iterable[tuple[Tensor, Tensor | None]], gaussian: bool = False) -> None:
    """Runs the whitening start on a plan: its ActNorms from the first batch, its first full layer from all data.

    Arguments:
        plan: The plan.
        stream: The data, gone through once.
        gaussian: Whether to go on with :func:`gaussianize`.
    """
    place = first_full_layer(plan)
    layer = plan.steps[place]
    assert isinstance(layer, FullStep)
    if gaussian:
        nonlinearity_after(plan, place)
    before = replace(plan, steps=plan.steps[:place])
    moments, sample = Moments(), Thinned(ROWS)
    first: tuple[Tensor, Tensor | None] | None = None
    for x, context in stream:
        if first is None:
            first = x, context
            before.initialize(x, context)
        (value,), _ = before.encode(x, plan.embed(context))
        rows = rows_of(layer, value)
        moments.add(rows)
        if gaussian:
            sample.add(rows)
    assert first is not None
    moments.reduce()
    whiten_first_layer(layer, moments)
    if gaussian:
        gaussianize(plan, place, sample.rows())
    plan.initialize(*first)


class Thinned:
    """Rows of a stream of unknown length, evenly spread over it: some ``count`` to twice as many.

    Example:
        >>> thinned = Thinned(2)
        >>> for row in range(10):
        ...     thinned.add(torch.tensor([[row]]))
        >>> thinned.rows().flatten()
        tensor([0, 4, 8])
    """

    def __init__(self, count: int) -> None:
        self.count, self.stride, self.seen = count, 1, 0
        self._parts: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        """Takes rows in, with any event shape."""
        self._parts.append(rows[-self.seen % self.stride :: self.stride])
        self.seen += len(rows)
        while sum(map(len, self._parts)) > 2 * self.count:
            self._parts = [self.rows()[::2].clone()]
            self.stride *= 2

    def rows(self) -> Tensor:
        """What was kept."""
        return torch.cat(self._parts)


def nonlinearity_after(plan: Plan, place: int) -> ElementwiseStep:
    """The elementwise step after a dense layer with a bias.

    A convolution is refused: its pixels would share one scale and one shift, which made the NLL of the paper's MNIST
    model worse (1285 against 1186 nats, calibrated).

    Raises:
        InputError: If the layer is another one, or another step is after it.
    """
    layer = plan.steps[place]
    if not isinstance(layer.module, FullLinear) or layer.module.bias is None:
        raise InputError(
            f"gaussianize=True needs a FullLinear with a bias, whose features have scales and shifts of their own; "
            f"{layer.where} is none. Keep whiten=True alone."
        )
    after: Step | None = plan.steps[place + 1] if place + 1 < len(plan.steps) else None
    if not isinstance(after, ElementwiseStep):
        found = "nothing" if after is None else after.where
        raise InputError(
            f"gaussianize=True needs an elementwise nonlinearity, such as SmoothLeakyReLU, after the first full "
            f"layer; {found} stands there. Keep whiten=True alone."
        )
    return after


@torch.no_grad()
def gaussianize(plan: Plan, place: int, sample: Tensor) -> None:
    """Scales and shifts the features of a dense layer so that the nonlinearity after it makes them Gaussian.

    Arguments:
        plan: The plan.
        place: The place of the layer.
        sample: What reaches it, with shape ``(N, D)``.
    """
    layer, bend = plan.steps[place].module, nonlinearity_after(plan, place)
    scale, shift = _agreed(*best_scales(bend, layer.transform(sample)))
    layer.weight.mul_(scale[:, None])
    layer.bias.mul_(scale).add_(shift)
    following = plan.steps[place + 2].module if place + 2 < len(plan.steps) else None
    if isinstance(following, FullLinear) and following.bias is not None and not plan.steps[place + 2].inverted:
        if share_memory(following, layer):
            return
        bent, _ = bend.encode(layer.transform(sample), None)
        mean, spread = _agreed(bent.mean(0), bent.std(0))
        following.weight.div_(spread)
        following.bias.sub_(following.weight @ mean)


def best_scales(bend: ElementwiseStep, y: Tensor) -> tuple[Tensor, Tensor]:
    """For each feature the scale a and the shift b with which f(a y + b) is most nearly Gaussian, by likelihood.

    A coarse grid on some of every other row, then a search around its best point on all of these. The rows between them
    decide whether the feature is better left as it is, which guards against few rows. Nothing guards against tails
    without a variance, like Cauchy's: no moment is right for them, and whitening is as arbitrary. O(N·D), no gradient.

    Arguments:
        bend: f.
        y: Features of mean about 0 and variance about 1, with shape ``(N, D)``.

    Returns:
        a and b, each with shape ``(D,)``.
    """
    curve = bend.inverse_curve if bend.inverted else bend.forward_curve

    def nll(rows: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        bent = curve(rows * scale + shift, None)
        return 0.5 * bent.value.var(0).log() - bent.log_slope().mean(0) - scale.abs().log()

    y, held_out = y[::2], y[1::2]
    some = y[:: max(1, len(y) // 1000)]
    scale, shift = torch.ones_like(y[0]), torch.zeros_like(y[0])
    best = torch.full_like(scale, float("inf"))
    for a, b in product(SCALES, SHIFTS):
        tried = torch.full_like(scale, a), torch.full_like(shift, b)
        best, scale, shift = _better(best, scale, shift, nll(some, *tried), *tried)
    best = nll(y, scale, shift)
    factor, move = 1.5, 1.0
    for _ in range(ROUNDS):
        for power, sign in MOVES:
            tried = scale * factor**power, shift + sign * move
            best, scale, shift = _better(best, scale, shift, nll(y, *tried), *tried)
        factor, move = factor**0.6, move * 0.6
    if not bool(torch.isfinite(best).all()):
        raise InputError(f"{bend.where} has no finite log-det on whitened data, so that nothing can be fitted to it")

    def surprise(scale: Tensor, shift: Tensor) -> Tensor:
        """The NLL of the rows that were held out, with the mean and the variance of the others."""
        known = curve(y * scale + shift, None).value
        bent = curve(held_out * scale + shift, None)
        variance = known.var(0)
        misfit = (bent.value - known.mean(0)).square().mean(0) / variance
        return 0.5 * (variance.log() + misfit) - bent.log_slope().mean(0) - scale.abs().log()

    if len(held_out) > 1:
        better = surprise(scale, shift) < surprise(torch.ones_like(scale), torch.zeros_like(shift))
        scale, shift = torch.where(better, scale, 1.0), torch.where(better, shift, 0.0)
    return scale, shift


def _better(
    best: Tensor, scale: Tensor, shift: Tensor, found: Tensor, new_scale: Tensor, new_shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    lower = found < best
    return (
        torch.where(lower, found, best),
        torch.where(lower, new_scale, scale),
        torch.where(lower, new_shift, shift),
    )


def _agreed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What the first process of a distributed run found, in all of them."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return tensors
    shared = [tensor.cpu() for tensor in tensors]
    distributed.broadcast_object_list(shared, src=0)
    return tuple(mine.to(tensor) for mine, tensor in zip(shared, tensors, strict=True))


@torch.no_grad()
def whiten_first_layer(step: FullStep, moments: Moments) -> None:
    """Makes a full layer the (symmetric) whitening map of what reaches it: C^(-1/2) (x - m)."""
    layer = step.module
    if not bool(torch.isfinite(moments.scatter).all()):
        raise InputError(f"what reaches {step.where} holds NaN or inf; ebflow_plugin.verify(flow, x) finds where")
    weight = whitening(moments, step.where)
    bias = -weight @ moments.mean
    if layer.bias is None and bool((moments.mean.abs() > 1e-6 * moments.covariance().diagonal().sqrt()).any()):
        raise InputError(f"{step.where} needs a bias to take off the mean of the data")
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


def whitening(moments: Moments, where: str) -> Tensor:
    """The symmetric whitening matrix, C^(-1/2).

    Where the scales of the features are so far apart that rounding swallows the small eigenvalues of C, it is R^(-1/2)
    after a division by the standard deviations, with the correlations R.

    Raises:
        SingularError: If the data have no variance in some direction.
    """
    covariance = moments.covariance()
    spread = covariance.diagonal().clamp_min(0.0).sqrt()
    constant = (spread <= 1e-12 * moments.mean.abs()).nonzero().flatten().tolist()
    if constant:
        raise SingularError(
            f"features {constant[:5]} of what reaches {where} are constant over {moments.count} data points, so that "
            "nothing can whiten them; dequantize the data, or leave these features out"
        )
    values, vectors = torch.linalg.eigh(covariance)
    if values.min() > ROUNDING * values.max():
        return (vectors * values.rsqrt()) @ vectors.T
    values, vectors = torch.linalg.eigh(covariance / torch.outer(spread, spread))
    flat = int((values <= 1e-12 * values.max()).sum())
    if flat:
        raise SingularError(
            f"the features of what reaches {where} are linearly dependent over {moments.count} data points: "
            f"{flat} of {len(values)} directions have no variance of their own, so that nothing can whiten them; "
            "dequantize the data, or give more of it"
        )
    return (vectors * values.rsqrt()) @ vectors.T / spread
