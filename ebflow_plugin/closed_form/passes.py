"""Repeated passes over data through a plan: the input of one full layer after another, and the NLL of held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import inf, log, pi

import torch
from torch import Tensor

from ebflow_plugin.chunks import picked
from ebflow_plugin.closed_form.calibration import choose_shrinkage, gaussian_of
from ebflow_plugin.closed_form.full_layers import FullLayer
from ebflow_plugin.closed_form.initialization import fit_to_base, resampled, start_together
from ebflow_plugin.closed_form.moments import HeldOut, Moments, Rows
from ebflow_plugin.errors import InputError, SingularError
from ebflow_plugin.plan.inputs import resampled_rows
from ebflow_plugin.plan.plan import Plan

HELD_OUT = 5  # every fifth row is held out
ROWS = 5000  # a marginal map is fitted to this many rows, up to twice as many


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
        base: Mean and standard deviation of the Gaussian base, in float64 with shape ``(D,)``, after :meth:`nll`.
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
            self.base = self.base or gaussian_of(plan.base, latents, "gaussianize=True")
            losses.add((log_det + plan.base_log_prob(latents, plan.embed(context)))[:, None], weights)
        losses.reduce()
        if not losses.count:
            return float("nan")
        return plan.log_z(self.event_shape, self.first[0].new_empty(0, dtype=torch.float64)).item() - losses.mean.item()

    def fit_to_base(self, place: int) -> bool:
        """Fits a layer to the base, after :meth:`nll` (:func:`.initialization.fit_to_base`)."""
        assert self.base is not None
        return fit_to_base(self.plan, place, self.base, *self.first)

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
        order = torch.randperm(len(rows), generator=self._generator) if shuffled else torch.arange(len(rows))
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
