"""The Gaussianising start of deep models: layer by layer, in closed form.

Each full layer whitens its input. The elementwise nonlinearity after it makes each feature as Gaussian as it can
(:mod:`~ebflow_plugin.closed_form.marginals`), and its output is the data of the next layer. This is Gaussianization
(Chen and Gopinath 2000; with fixed rotations Laparra et al. 2011; as a trained flow Meng et al. 2020), here with
symmetric whitenings: their basis, the nearest to that of the data, does better than rotated ones.

Every fifth row is held out. A layer is fitted to the other rows, and kept if it makes the held-out rows more likely. A
marginal map that does not, of one feature or of all, is replaced by a nearly affine one. The last whitening uses all
rows, and so do the others if there are ten rows per feature: the held-out rows then judge the marginal maps only.

The last layer maps to the mean and the standard deviation of the base, through the steps after it: exactly if those are
linear. The held-out NLL of the whole model, before and after, decides whether the start is kept.

Example:
    >>> import ebflow_plugin as ebf
    >>> from nflows import distributions, flows, transforms
    >>> from ebflow_nflows import FullLinear, SinhArcsinh
    >>> layers = transforms.CompositeTransform([FullLinear(2), SinhArcsinh(2), FullLinear(2)])
    >>> model = ebf.wrap(flows.Flow(layers, distributions.StandardNormal([2])))
    >>> heavy = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0)).sinh()
    >>> report = model.initialize(heavy, gaussianize=True)
    >>> [round(layer.nll, 1) for layer in report.layers]
    [4.1, 3.6]
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isfinite

import torch
from torch import Tensor, nn

from ebflow_plugin.closed_form.calibration import choose_shrinkage, share_memory
from ebflow_plugin.closed_form.initialization import (
    broadcast,
    first_full_layer,
    is_linear,
    refuse_dependent,
    rows_of,
    spreads,
    start_together,
    whiten_layer,
)
from ebflow_plugin.closed_form.marginals import MarginalMap, fit_marginals
from ebflow_plugin.closed_form.moments import Moments, held_out
from ebflow_plugin.closed_form.passes import HELD_OUT, Passes, Thinned
from ebflow_plugin.errors import InputError, SingularError
from ebflow_plugin.layers import FullLinear
from ebflow_plugin.linalg.random import with_progress
from ebflow_plugin.plan.elementwise import ElementwiseStep
from ebflow_plugin.plan.linear import InitialisedAffineStep, IsometryStep
from ebflow_plugin.plan.matrices import FullStep
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import LinearStep

__all__ = ["LayerStart", "StartReport", "gaussianize"]

ROWS = 5000  # a marginal map is fitted to this many rows, up to twice as many
ENOUGH = 10  # with this many rows per feature, a hidden layer needs no shrinkage


@dataclass(frozen=True)
class LayerStart:
    """How one full layer started.

    Attributes:
        where: The layer.
        nll: The mean held-out NLL in nats: for the last layer, of the whole model with the steps after this layer and
            the base; for the others, of a model that ends with this layer. No marginal map was fitted to the held-out
            rows; nor was the last whitening, nor any if there are fewer than ten rows per feature.
        shrinkage: How far the covariance was shrunk towards its diagonal, 0 to 1: the best value for the held-out
            rows, or 0 for a hidden layer if there are enough rows.
        fitted_features: The number of features that the nonlinearity after the layer is fitted to; None if there is no
            nonlinearity to fit.

    Example:
        >>> LayerStart("0  FullLinear", nll=7.5, shrinkage=0.0, fitted_features=3).nll
        7.5
    """

    where: str
    nll: float
    shrinkage: float
    fitted_features: int | None


@dataclass(frozen=True)
class StartReport:
    """The held-out likelihood before a Gaussianising start, and after each layer. No gradient step was taken.

    Attributes:
        layers: The full layers, in order.
        before: The mean NLL of held-out rows of the model as it was, in nats. Infinite if it was singular.

    Example:
        >>> first, last = LayerStart("0  FullLinear", 7.5, 0.0, 3), LayerStart("2  FullLinear", 6.25, 0.01, None)
        >>> print(StartReport((first, last), before=9.0))
        held-out NLL, no gradient step taken
          9.00 nats before
          7.50 nats after 0  FullLinear (shrinkage 0, bends 3 features)
          6.25 nats after 2  FullLinear (shrinkage 0.01)
        >>> StartReport((first, last), before=5.0).nll
        5.0
    """

    layers: tuple[LayerStart, ...]
    before: float

    @property
    def kept(self) -> bool:
        """Whether the start was kept; if it made held-out rows less likely, the model is as it was."""
        return self.layers[-1].nll <= self.before or not isfinite(self.before)

    @property
    def nll(self) -> float:
        """The mean NLL of held-out rows of the whole model, in nats."""
        return self.layers[-1].nll if self.kept else self.before

    def __str__(self) -> str:
        lines = ["held-out NLL, no gradient step taken", f"  {self.before:.2f} nats before"]
        for layer in self.layers:
            bends = "" if layer.fitted_features is None else f", bends {layer.fitted_features} features"
            lines.append(f"  {layer.nll:.2f} nats after {layer.where} (shrinkage {layer.shrinkage:.3g}{bends})")
        if not self.kept:
            lines.append("  the start made held-out rows less likely: the model is as it was")
        return "\n".join(lines)


def chain(plan: Plan) -> list[int]:
    """The indices of the full layers that can start together, with a nonlinearity after each but the last.

    Raises:
        InputError: If there are fewer than two.
    """
    places = [first_full_layer(plan)]
    while (following := _next_layer(plan, places)) is not None:
        places.append(following)
    first = plan.steps[places[0]]
    if not isinstance(first.module, FullLinear) or first.module.bias is None:
        raise InputError(
            "gaussianize=True needs a FullLinear with a bias, whose features have scales and shifts of their own; "
            f"{first.where} is none. Use whiten=True alone."
        )
    if len(places) == 1:
        after = plan.steps[places[0] + 1] if places[0] + 1 < len(plan.steps) else None
        found = "nothing" if after is None else after.where
        raise InputError(
            "gaussianize=True needs an elementwise nonlinearity, such as SinhArcsinh, after the first full layer, and "
            "another FullLinear with a bias and parameters of its own after that; "
            f"found {found}. Use whiten=True alone."
        )
    return places


def _next_layer(plan: Plan, places: list[int]) -> int | None:
    """The next full layer of a chain: after a nonlinearity, and possibly ActNorms, permutations, fixed linear steps."""
    last = places[-1]
    if last + 1 >= len(plan.steps) or not isinstance(plan.steps[last + 1], ElementwiseStep):
        return None
    for place in range(last + 2, len(plan.steps)):
        step = plan.steps[place]
        if isinstance(step, FullStep):
            layer = step.module
            own = {"weight", "bias"} <= dict(layer.named_parameters(recurse=False)).keys()
            fit = isinstance(layer, FullLinear) and not step.inverted and own
            tied = any(share_memory(layer, plan.steps[other].module) for other in places)
            return place if fit and not tied else None
        trainable = isinstance(step.module, nn.Module) and any(p.requires_grad for p in step.module.parameters())
        allowed = isinstance(step, (InitialisedAffineStep, IsometryStep))
        if not isinstance(step, LinearStep) or step.n_in != 1 or step.n_out != 1 or (trainable and not allowed):
            return None
    return None


class Arrived:
    """Statistics of the input of a layer, from one pass: of the rows to fit to, and of the held-out rows."""

    def __init__(self, step: FullStep, stream: Iterable[tuple[Tensor, Tensor, Tensor | None]]) -> None:
        self.fit, self.held, self.log_dets = Moments(), Moments(), Moments(diagonal=True)
        sample, others = Thinned(ROWS), Thinned(ROWS // 2)
        self.times, index = 1, 0
        for value, log_det, weights in stream:
            held = held_out(index, len(value), HELD_OUT, value.device)
            index += len(value)
            self.shape: tuple[int, ...] = tuple(value.shape[1:])
            for chosen, moments, thinned in ((~held, self.fit, sample), (held, self.held, others)):
                if bool(chosen.any()):
                    rows = rows_of(step, value[chosen])
                    self.times = len(rows) // int(chosen.sum())
                    own = None if weights is None else weights[chosen].repeat_interleave(self.times)
                    moments.add(rows, own)
                    thinned.add(rows, own)
            if bool(held.any()):
                self.log_dets.add(log_det[held, None], None if weights is None else weights[held])
        if self.held.count < 2:
            raise InputError(f"gaussianize=True needs at least {2 * HELD_OUT} data points, got {index}")
        for moments in (self.fit, self.held, self.log_dets):  # so that every process decides the same
            moments.reduce()
        self.sample, self.others = sample.rows(), others.rows()

    def everything(self) -> Moments:
        """The moments of all rows, those held out included."""
        merged = Moments()
        for part in (self.fit, self.held):
            merged.merge(part)
        return merged

    def judge(self, where: str) -> tuple[float, float]:
        """The shrinkage that minimises the held-out NLL of a Gaussian with the moments of ``fit``, and that NLL."""
        if not bool(torch.isfinite(self.fit.scatter).all()):
            raise InputError(f"the input of {where} holds NaN or inf; ebflow_plugin.verify(flow, x) finds where")
        spread = spreads(self.fit, where)
        scales = torch.outer(spread, spread)
        correlation = self.fit.covariance() / scales
        rho, nll = choose_shrinkage(correlation, self.held.second_moments(self.fit.mean) / scales)
        if rho > 0 and self.fit.count > 2 * len(spread):  # a shrinkage that too few rows do not explain
            refuse_dependent(torch.linalg.eigvalsh(correlation), self.fit.count, where)
        return rho, self.times * (nll + spread.log().sum().item()) - self.log_dets.mean.item()


class Saved:
    """The state of the steps that a start may write to, to put it back."""

    def __init__(self, plan: Plan, places: list[int]) -> None:
        chosen = {place + offset for place in places for offset in (0, 1) if place + offset < len(plan.steps)}
        chosen |= {place for place, step in enumerate(plan.steps) if isinstance(step, InitialisedAffineStep)}
        modules = [plan.steps[place].module for place in sorted(chosen)]
        self._states = [
            (module, copy.deepcopy(module.state_dict())) for module in modules if hasattr(module, "state_dict")
        ]

    def restore(self) -> None:
        """Puts it back."""
        for module, state in self._states:
            module.load_state_dict(state)


@torch.no_grad()
def gaussianize(passes: Passes, appended: tuple[LinearStep, ...] = (), progress: bool = False) -> StartReport:
    """Initialises every full layer of a chain to a whitening, and every nonlinearity between to a marginal map.

    One pass over the data per layer, O(N·D² + D³), and two to judge the model before and after. If a marginal map makes
    the held-out rows less likely, it and all later ones become nearly affine: those would be fitted to the same data.
    If the whole start makes them less likely, or fails, the model is put back.

    Arguments:
        passes: The plan, and the data.
        appended: The steps after those of the plan, which the start replaces: a calibration.
        progress: Shows a progress bar.

    Raises:
        InputError: If there is no such chain, or the base is not a diagonal Gaussian.
        SingularError: If the data cannot be whitened.
    """
    plan, places = passes.plan, chain(passes.plan)
    whole, saved = replace(plan, steps=(*plan.steps, *appended)), Saved(plan, places)
    try:
        try:
            before = passes.nll(whole)
        except SingularError:  # of the old weights: nothing is less likely
            before = inf
        saved.restore()  # ActNorms start again, from the output of the new layers
        layers = _fit(passes, places, progress)
    except BaseException:
        saved.restore()
        raise
    report = StartReport(tuple(layers), before)
    if not report.kept:
        saved.restore()
        assert passes.first is not None
        start_together(whole, *passes.first)
    return report


def _fit(passes: Passes, places: list[int], progress: bool) -> list[LayerStart]:
    """Fits the layers of a chain. The NLL of the last is that of the whole model."""
    plan, started = passes.plan, list[LayerStart]()
    linear, since = 0.0, 0  # the log-det of the linear steps so far; where the last pass ended
    shape: tuple[int, ...] | None = None
    judged: tuple[FullStep, Moments, float] | None = None  # the last layer, and the whitening of it that was judged
    for number, place in enumerate(with_progress(places, progress, "Gaussianising start")):
        step, last = plan.steps[place], place == places[-1]
        assert isinstance(step, FullStep)
        arrived = Arrived(step, passes.to(place))
        between = _linear_log_det(plan, since, place, shape or passes.event_shape, arrived)
        rho, nll = arrived.judge(step.where)
        nll -= linear + between
        if judged is not None and not nll <= started[-1].nll:
            whiten_layer(*judged)  # what follows will be affine, so that this is the last whitening
            kept = replace(started.pop(), shrinkage=judged[2])
            started += _straighten(plan, places[number - 1 :], passes, arrived.shape, kept)
            passes.restart()
            nll, _ = _settle(passes, places[-1])
            return [*started[:-1], replace(started[-1], nll=nll)]
        enough = arrived.fit.count >= ENOUGH * len(arrived.fit.mean)
        judged, moments = (step, arrived.fit, rho), arrived.fit
        if enough and not last:  # few held-out rows must stay unseen, since they judge later layers too
            moments = arrived.everything()
            rho = 0.0  # shrinkage keeps the basis near that of the layer before, whose features are Gaussian already
        linear += between + arrived.times * whiten_layer(step, moments, rho)
        if last:
            nll, aimed = _settle(passes, place)
            whiten_layer(step, arrived.everything(), rho)  # the model is judged: no row is left to hold out for
            if aimed:
                passes.fit_to_base(place)
            return [*started, LayerStart(step.where, nll, rho, None)]
        nonlinearity = _nonlinearity(plan, place)
        sample, others = step.module.transform(arrived.sample), step.module.transform(arrived.others)
        own = fit_marginals(nonlinearity, sample, others)
        fitted = MarginalMap(*broadcast(own.scale, own.shift, own.log_tail, own.skewness, own.helps))
        linear += arrived.times * fitted.write(nonlinearity, step.module)
        started.append(LayerStart(step.where, nll, rho, int(fitted.helps.sum())))
        since, shape = place + 1, arrived.shape
    raise AssertionError("a chain has a last layer")


def _settle(passes: Passes, place: int) -> tuple[float, bool]:
    """Aims the last layer, whose output is white, at the base, and judges the whole model by held-out rows.

    Returns:
        The NLL, and whether the layer was aimed: before nonlinear steps it may be better left as it was.
    """
    plan, layer = passes.plan, passes.plan.steps[place].module
    assert passes.first is not None
    start_together(plan, *passes.first)
    linear = is_linear(plan, place + 1)
    unaimed = inf if linear and passes.base is not None else passes.nll()
    white = layer.weight.clone(), layer.bias.clone()
    aimed = passes.fit_to_base(place)
    nll = passes.nll() if aimed or linear else inf
    if linear or nll <= unaimed:
        return nll, aimed
    layer.weight.copy_(white[0])
    layer.bias.copy_(white[1])
    return unaimed, False


def _nonlinearity(plan: Plan, place: int) -> ElementwiseStep:
    """The nonlinearity after a layer of a chain."""
    step = plan.steps[place + 1]
    assert isinstance(step, ElementwiseStep)
    return step


def _straighten(
    plan: Plan, places: list[int], passes: Passes, shape: tuple[int, ...], last: LayerStart
) -> list[LayerStart]:
    """Makes the marginal maps after some layers nearly affine.

    The first layer whitens. Each later layer inverts the map since the one before it, so that the whitened features
    pass through unchanged.

    Returns:
        The starts of these layers; ``last`` is that of the first one so far.
    """
    started = [replace(last, fitted_features=0)]
    assert passes.first is not None
    for before, place in pairwise(places):
        nonlinearity, layer = _nonlinearity(plan, before), plan.steps[place].module
        straight = MarginalMap.nearly_linear(nonlinearity, layer.bias)
        straight.write(nonlinearity, plan.steps[before].module)
        start_together(plan[:place], *passes.first)
        part, size = plan[before + 1 : place], layer.features
        # The nearly affine map takes a whitened y to M y + c: zero shows c, and unit vectors the columns of M.
        units = torch.eye(size + 1, size).to(layer.bias).roll(1, 0)
        probes = straight.scale * units + straight.shift
        wide = probes.reshape(size + 1, *(1 for _ in shape[:-1]), size).expand(size + 1, *shape)
        (values,), _ = part.encode(wide)
        images = values.reshape(size + 1, -1, size)[:, 0].double()
        matrix = torch.linalg.inv(images[1:] - images[0]).T
        layer.weight.copy_(matrix)
        layer.bias.copy_(-matrix @ images[0])
        started.append(LayerStart(plan.steps[place].where, last.nll, 0.0, 0 if place != places[-1] else None))
    return started


def _linear_log_det(plan: Plan, since: int, place: int, shape: tuple[int, ...], arrived: Arrived) -> float:
    """The log-det of the linear steps between two places: ActNorms, permutations and fixed ones."""
    return -float(plan[since:place].log_z(shape, arrived.fit.mean))
