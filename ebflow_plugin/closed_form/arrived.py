"""Statistics of what arrives at a full layer, and the whitening map that held-out rows choose."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, log, pi

import torch
from torch import Tensor

from ebflow_plugin.closed_form.calibration import choose_shrinkage
from ebflow_plugin.closed_form.full_layers import FullLayer, refuse_dependent, spreads
from ebflow_plugin.closed_form.moments import HeldOut, Moments
from ebflow_plugin.closed_form.passes import HELD_OUT, Thinned
from ebflow_plugin.errors import InputError, SingularError

ROWS = 5000  # a marginal map is fitted to this many rows, up to twice as many


class Arrived:
    """Statistics of the input of a layer, from one pass: of the rows to fit to, and of the held-out rows."""

    def __init__(self, layer: FullLayer, stream: Iterable[tuple[Tensor, Tensor, Tensor | None]]) -> None:
        self.layer = layer
        self.fit, self.held, self.log_dets = Moments(), Moments(), Moments(diagonal=True)
        sample, others = Thinned(ROWS), Thinned(ROWS // 2)
        self.times, held_out = 1, HeldOut(HELD_OUT)
        self.matrix: Tensor | None = None  # of a convolution, fitted to the rows to fit to
        for value, log_det, weights in stream:
            held = held_out(value)
            self.shape: tuple[int, ...] = tuple(value.shape[1:])
            self.times = len(layer.rows(value[:1]))
            for chosen, moments, thinned in ((~held, self.fit, sample), (held, self.held, others)):
                if not bool(chosen.any()):
                    continue
                own = None if weights is None else weights[chosen]
                for rows, each in layer.weighted_rows(value[chosen], own):
                    moments.add(rows, each)
                    thinned.add(rows, each, shuffled=self.times > 1)
            if bool(held.any()):
                self.log_dets.add(log_det[held, None], None if weights is None else weights[held])
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
        """The shrinkage that minimises the held-out NLL of a Gaussian with the moments of ``fit``, and that NLL.

        For a convolution it is the shrinkage for which patches are most likely, and the NLL of the fitted layer.
        """
        where, entries = self.layer.where, len(self.fit.mean)
        if not bool(torch.isfinite(self.fit.scatter).all()):
            raise InputError(f"the input of {where} holds NaN or inf; ebflow_plugin.verify(flow, x) finds where")
        if len(self.layer.cells) < entries or self.layer.groups > 1:
            return self._judge_patches()
        spread = spreads(self.fit, where)
        rho, nll, correlation = _shrink(self.fit, self.held, spread)
        if rho > 0 and self.fit.count > 2 * entries:  # a shrinkage that too few rows do not explain
            refuse_dependent(torch.linalg.eigvalsh(correlation), self.fit.count, where)
        return rho, self.times * (nll + spread.log().sum().item()) - self.log_dets.mean.item()

    def _judge_patches(self) -> tuple[float, float]:
        """Chooses between no shrinkage and that for which held-out patches are most likely, by the layer that it gives.

        Overlapping patches are no independent rows, and natural images have heavy tails: little shrinkage is best.
        """
        spread = self.fit.covariance().diagonal().clamp_min(0.0).sqrt()
        live = (spread > 0).nonzero().flatten()  # the taps of a kernel that is wider than the image read zeros alone
        rho = _shrink(self.fit.part(live), self.held.part(live), spread[live])[0] if len(live) else 0.0
        second, best = self.held.second_moments(self.fit.mean), (0.0, inf)
        for shrinkage in dict.fromkeys((0.0, rho)):
            try:
                matrix, log_det = self.layer.whitening(self.fit, self.shape, shrinkage, self.matrix)
            except SingularError:
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


def _shrink(fit: Moments, held: Moments, spread: Tensor) -> tuple[float, float, Tensor]:
    """The shrinkage, the NLL of held-out rows in units of the spread, and the correlations."""
    scales = torch.outer(spread, spread)
    correlation = fit.covariance() / scales
    return *choose_shrinkage(correlation, held.second_moments(fit.mean) / scales), correlation
