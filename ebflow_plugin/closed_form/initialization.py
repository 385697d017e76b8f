"""Starts from data: passes over them through a plan, and the whitening start.

The whitening start initialises the first full layer to the whitening map of its input. If only linear steps follow, the
density of the model is that of this layer, and it is fitted to a Gaussian base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from math import inf, log, pi

import torch
from torch import Tensor, distributed, nn

from ebflow_plugin.chunks import picked
from ebflow_plugin.closed_form.calibration import choose_shrinkage, gaussian_of
from ebflow_plugin.closed_form.full_layers import FullLayer
from ebflow_plugin.closed_form.moments import HeldOut, Moments, Rows
from ebflow_plugin.errors import InputError, SingularError
from ebflow_plugin.layers import FullLinear
from ebflow_plugin.linalg.memo import own_tensors
from ebflow_plugin.plan.inputs import resampled_rows
from ebflow_plugin.plan.linear import InitialisedAffineStep, IsometryStep
from ebflow_plugin.plan.matrices import FullStep
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import LinearStep, Step
from ebflow_plugin.plan.values import flatten

HELD_OUT = 5  # every fifth row is held out
ROWS = 5000  # a marginal map is fitted to this many rows, up to twice as many


@torch.no_grad()
def whiten(passes: Passes) -> None:
    """Runs the whitening start: ActNorms from the first batch, the first full layer from all data, in one pass."""
    plan, moments = passes.plan, Moments()
    layer = first_full_layer(plan)
    for value, _, weights, _ in passes.to(layer.place):
        for rows, own in layer.weighted_rows(value, weights):
            moments.add(rows, own)
    moments.reduce()
    layer.whiten(moments, tuple(value.shape[1:]))
    start_together(plan, *passes.first)
    if is_linear(plan, layer.place + 1):
        with suppress(InputError):  # nothing to fit to in closed form: the layer whitens, and no more was promised
            passes.fit_to_base(layer.place)


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


class Passes:
    """The activations of the data at one step of a plan after another.

    With ``keep``, the activations of a pass are cached, and the next pass continues from there. Otherwise each pass
    applies all steps to the data again.

    Arguments:
        plan: The plan.
        data: Iterates over the data.
        keep: Whether to cache the activations, in as much memory as the data take.

    Attributes:
        first: The first batch, after the first pass.
        base: Mean and standard deviation of the Gaussian base, in float64 with shape ``(D,)``, once it was needed.
    """

    first: tuple[Tensor, Tensor | None]
    base: tuple[Tensor, Tensor] | None = None

    def __init__(self, plan: Plan, data: Callable[[], Iterator[Rows]], keep: bool) -> None:
        self.plan, self.data, self.keep = plan, data, keep
        self.restart()

    def restart(self) -> None:
        """Forgets cached activations, after a change of the steps that computed them."""
        self._place, self._cached = 0, list[Rows]()

    @property
    def event_shape(self) -> tuple[int, ...]:
        """The event shape of the data, after the first batch."""
        return tuple(self.first[0].shape[1:])

    def to(self, place: int) -> Iterator[Rows]:
        """The inputs of a step in batches, each with the log-dets of the nonlinear steps before it."""
        for index, ((value,), context, weights, log_det) in enumerate(self._through(self.plan[self._place : place])):
            rows = value, context, weights, log_det
            if self.keep:
                self._cached[index : index + 1] = [rows]  # in the place of the one before, if there is one
            yield rows
        if self.keep:
            self._place = place

    def nll(self, plan: Plan | None = None) -> float:
        """The mean NLL of held-out rows in nats, of the whole model as it is stored.

        Arguments:
            plan: The model, if it has other steps after those of the plan (a calibration).

        Raises:
            InputError: If the base is not a diagonal Gaussian.
            SingularError: If a linear step is singular.
        """
        plan, losses = plan or self.plan, Moments(diagonal=True)
        for latents, context, weights, log_det in self._through(plan[self._place :], HeldOut(HELD_OUT)):
            self._find_base(latents)
            losses.add((log_det + plan.base_log_prob(latents, plan.embed(context)))[:, None], weights)
        losses.reduce()
        if not losses.count:
            return float("nan")
        return plan.log_z(self.event_shape, self.first[0].new_empty(0, dtype=torch.float64)).item() - losses.mean.item()

    def fit_to_base(self, place: int) -> bool:
        """Fits a layer to the base, after the first pass (:func:`fit_to_base`)."""
        x, context = picked(slice(1), *self.first)
        base = self._find_base(self.plan.encode(x, self.plan.embed(context))[0])
        return fit_to_base(self.plan, place, base, x, context)

    def _find_base(self, latents: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        self.base = self.base or gaussian_of(self.plan.base, latents, "gaussianize=True")
        return self.base

    def _through(
        self, part: Plan, held_out: HeldOut | None = None
    ) -> Iterator[tuple[tuple[Tensor, ...], Tensor | None, Tensor | None, Tensor]]:
        """What some steps make of the data, or of held-out rows alone. The first batch initialises the steps."""
        started = False
        for x, context, weights, log_det in self._cached or self.data():
            if not started:
                first, started = resampled(x, context, weights), True
                self.first = getattr(self, "first", first)
                start_together(part, *first)
            if held_out is not None:
                x, context, weights, log_det = picked(held_out(x), x, context, weights, log_det)
            if len(x):
                latents, added = part.encode(x, self.plan.embed(context))
                yield latents, context, weights, log_det if added is None else log_det + added


class LayerInput:
    """Statistics of the input of a layer, from one pass: of the rows to fit to, and of the held-out rows."""

    def __init__(self, layer: FullLayer, stream: Iterable[Rows]) -> None:
        self.layer = layer
        self.fit, self.held, self.log_dets = Moments(), Moments(), Moments(diagonal=True)
        sample, others, held_out = Thinned(ROWS), Thinned(ROWS // 2), HeldOut(HELD_OUT)
        self.matrix: Tensor | None = None  # of a convolution, fitted to the rows to fit to
        for value, _, weights, log_det in stream:
            held = held_out(value)
            self.shape: tuple[int, ...] = tuple(value.shape[1:])
            self.times = len(layer.rows(value[:1]))
            self.log_dets.add(*picked(held, log_det[:, None], weights))
            for chosen, moments, thinned in ((~held, self.fit, sample), (held, self.held, others)):
                for rows, each in layer.weighted_rows(*picked(chosen, value, weights)):
                    moments.add(rows, each)
                    thinned.add(rows, each, shuffled=self.times > 1)
        if self.held.count < 2 * self.times:
            raise InputError(f"gaussianize=True needs at least {2 * HELD_OUT} data points, got {held_out.rows}")
        for moments in (self.fit, self.held, self.log_dets):  # so that every process decides the same
            moments.reduce()
        self.sample, self.others = sample.rows(), others.rows()

    def everything(self) -> Moments:
        """The moments of all rows, those held out included."""
        merged = Moments()
        for part in (self.fit, self.held):
            merged.merge(part)
        return merged

    def judge(self) -> tuple[float, float]:
        """Chooses between no shrinkage and that for which held-out rows are most likely, by the layer that it gives.

        Overlapping patches are no independent rows, and natural images have heavy tails: little shrinkage is best.

        Returns:
            The shrinkage, and the held-out NLL of a Gaussian with the moments of ``fit``, as the layer whitens them.
        """
        if not bool(torch.isfinite(self.fit.scatter).all()):
            raise InputError(
                f"the input of {self.layer.where} holds NaN or inf; ebflow_plugin.verify(flow, x) finds where"
            )
        spread = self.fit.covariance().diagonal().clamp_min(0.0).sqrt()
        live = (spread > 0).nonzero().flatten()  # the taps of a kernel that is wider than the image read zeros alone
        rho, second, best = 0.0, self.held.second_moments(self.fit.mean), (0.0, inf)
        if len(live):
            fit, held, scales = self.fit.part(live), self.held.part(live), torch.outer(spread[live], spread[live])
            rho, _ = choose_shrinkage(fit.covariance() / scales, held.second_moments(fit.mean) / scales)
        for shrinkage in dict.fromkeys((0.0, rho)):
            try:
                matrix, log_det = self.layer.whitening(self.fit, self.shape, shrinkage, self.matrix)
            except SingularError:  # which too few rows explain
                if shrinkage == rho or self.fit.count > 2 * len(spread):
                    raise
                continue
            nll = 0.5 * (((matrix @ second) * matrix).sum().item() + len(matrix) * log(2 * pi)) - log_det
            if nll < best[1]:
                best, self.matrix = (shrinkage, nll), matrix
        return best[0], self.times * best[1] - self.log_dets.mean.item()

    def whiten(self, moments: Moments, shrinkage: float) -> float:
        """Sets the layer to the whitening map of these rows. Returns the log-determinant of all rows of an event."""
        return self.times * self.layer.whiten(moments, self.shape, shrinkage, self.matrix)


class Thinned:
    """Evenly spaced rows of a stream of unknown length: between ``count`` and twice as many.

    Example:
        >>> thinned = Thinned(2)
        >>> for row in range(10):
        ...     thinned.add(torch.tensor([[row]]))
        >>> thinned.rows().flatten()
        tensor([0, 4, 8])
    """

    def __init__(self, count: int) -> None:
        self.count, self.stride, self.seen = count, 1, 0
        self._generator = torch.Generator().manual_seed(0)
        self._rows, self._weights = list[Tensor](), list[Tensor]()

    def add(self, rows: Tensor, weights: Tensor | None = None, *, shuffled: bool = False) -> None:
        """Adds rows with any event shape, and their weights. Shuffled, if their order has a period, as pixels have."""
        order = torch.arange(len(rows), device="cpu")
        if shuffled:
            order = torch.randperm(len(rows), generator=self._generator, device="cpu")
        chosen = order[-self.seen % self.stride :: self.stride].to(rows.device)
        self._rows.append(rows[chosen])
        self._weights.append(rows.new_ones(len(chosen)) if weights is None else weights[chosen])
        self.seen += len(rows)
        while sum(map(len, self._rows)) > 2 * self.count:
            self._rows, self._weights = ([torch.cat(parts)[::2].clone()] for parts in (self._rows, self._weights))
            self.stride *= 2

    def rows(self) -> Tensor:
        """The selected rows, each as often as its weight asks."""
        return torch.cat(self._rows)[resampled_rows(torch.cat(self._weights))]


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
