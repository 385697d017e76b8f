"""Repeated passes over data through a plan: the activations at one step after another, and the NLL of held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ebflow_plugin.closed_form.calibration import gaussian_of
from ebflow_plugin.closed_form.initialization import fit_to_base, resampled, start_together
from ebflow_plugin.closed_form.moments import HeldOut, Moments, Rows
from ebflow_plugin.plan.inputs import resampled_rows
from ebflow_plugin.plan.plan import Plan

HELD_OUT = 5  # every fifth row is held out


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

    def __init__(self, plan: Plan, data: Callable[[], Iterator[Rows]], keep: bool) -> None:
        self.plan, self.data, self.keep = plan, data, keep
        self.first: tuple[Tensor, Tensor | None] | None = None
        self.base: tuple[Tensor, Tensor] | None = None
        self._place, self._cached = 0, list[Rows]()

    @property
    def event_shape(self) -> tuple[int, ...]:
        """The event shape of the data, after the first batch."""
        assert self.first is not None
        return tuple(self.first[0].shape[1:])

    def to(self, place: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """The inputs of a step, the log-dets of the nonlinear steps before it, ``(B,)``, and weights, in batches."""
        part = self.plan[self._place : place]
        started = False
        for index, (x, context, weights, log_det) in enumerate(self._batches()):
            if not started:
                start_together(part, *resampled(x, context, weights))
                started = True
            assert log_det is not None
            (value,), added = part.encode(x, self.plan.embed(context))
            total = log_det if added is None else log_det + added
            if self.keep and index < len(self._cached):
                self._cached[index] = value, context, weights, total
            elif self.keep:
                self._cached.append((value, context, weights, total))
            yield value, total, weights
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
        plan = plan or self.plan
        part = plan[self._place :]
        losses, held_out = Moments(diagonal=True), HeldOut(HELD_OUT)
        for x, context, weights, log_det in self._batches():
            if not held_out.rows:
                start_together(part, *resampled(x, context, weights))
            assert log_det is not None
            held = held_out(x)
            if not bool(held.any()):
                continue
            embedded = plan.embed(None if context is None else context[held])
            latents, added = part.encode(x[held], embedded)
            if self.base is None:
                shapes = tuple(tuple(latent.shape[1:]) for latent in latents)
                self.base = gaussian_of(plan.base, shapes, latents[0].new_empty(0), "gaussianize=True")
            total = log_det[held] if added is None else log_det[held] + added
            own = None if weights is None else weights[held]
            losses.add((total + plan.base_log_prob(latents, embedded))[:, None], own)
        losses.reduce()
        if not losses.count:
            return float("nan")
        assert self.first is not None
        return plan.log_z(self.event_shape, self.first[0].new_empty(0, dtype=torch.float64)).item() - losses.mean.item()

    def fit_to_base(self, place: int) -> bool:
        """Fits a layer to the base, after :meth:`nll` (:func:`.initialization.fit_to_base`)."""
        assert self.first is not None
        assert self.base is not None
        return fit_to_base(self.plan, place, self.base, *self.first)

    def restart(self) -> None:
        """Forgets cached activations, after a change of the steps that computed them."""
        self._cached.clear()
        self._place = 0

    def _batches(self) -> Iterator[Rows]:
        if self._cached:
            yield from list(self._cached)
            return
        for x, context, weights, log_volume in self.data():
            self.first = self.first or resampled(x, context, weights)
            yield x, context, weights, x.new_zeros(len(x)).double() if log_volume is None else log_volume.double()


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
        self._parts: list[Tensor] = []
        self._weights: list[Tensor] = []

    def add(self, rows: Tensor, weights: Tensor | None = None, *, shuffled: bool = False) -> None:
        """Adds rows with any event shape, and their weights: of all rows, or of none.

        Shuffled, if their order has a period, as that of pixels has.
        """
        chosen: slice | Tensor = slice(-self.seen % self.stride, None, self.stride)
        if shuffled:
            chosen = torch.randperm(len(rows), generator=self._generator)[chosen].to(rows.device)
        self._parts.append(rows[chosen].clone())
        if weights is not None:
            self._weights.append(weights[chosen].clone())
        self.seen += len(rows)
        while sum(map(len, self._parts)) > 2 * self.count:
            self._parts = [torch.cat(self._parts)[::2].clone()]
            self._weights = [torch.cat(self._weights)[::2].clone()] if self._weights else []
            self.stride *= 2

    def rows(self) -> Tensor:
        """The selected rows, each as often as its weight asks."""
        rows = torch.cat(self._parts)
        return rows[resampled_rows(torch.cat(self._weights))] if self._weights else rows
