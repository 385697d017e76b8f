"""The Gaussianising start of deep models: layer by layer, in closed form.

Each full layer whitens its input. The elementwise nonlinearity after it makes each feature as Gaussian as it can
(:mod:`~ebflow_plugin.closed_form.marginals`), and its output is the data of the next layer. This is Gaussianization
(Chen and Gopinath 2000; with fixed rotations Laparra et al. 2011; as a trained flow Meng et al. 2020), here with
symmetric whitenings: their basis, the nearest to that of the data, does better than rotated ones. A convolution has the
kernel whose output is most likely under a standard normal (:mod:`~ebflow_plugin.closed_form.kernels`), and the maps of
channels after it, ``SinhArcsinh(C, dim=-3)``, are fitted alike. A convolution of single pixels with as many groups as
channels is an affine map for each channel: before a map of channels it is the best beginning. Between the layers there
may be squeezes.

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
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isfinite

import torch
from torch import nn
from torch.nn import functional

from ebflow_plugin.chunks import with_progress
from ebflow_plugin.closed_form.full_layers import FullLayer
from ebflow_plugin.closed_form.initialization import (
    LayerInput,
    Passes,
    broadcast,
    first_full_layer,
    is_linear,
    may_precede,
    start_together,
)
from ebflow_plugin.closed_form.marginals import MarginalMap, fit_marginals
from ebflow_plugin.errors import InputError, SingularError
from ebflow_plugin.layers import FullConv2d
from ebflow_plugin.linalg.memo import own_tensors
from ebflow_plugin.plan.matrices import FullStep
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import LinearStep

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


def chain(plan: Plan) -> list[FullLayer]:
    """The full layers that can start together: linear steps between them, and nonlinearities to fit.

    Raises:
        InputError: If there are fewer than two, or no nonlinearity.
    """
    layers = [first_full_layer(plan)]
    for place, step in enumerate(plan.steps):
        if place <= layers[-1].place or step is layers[-1].bend:
            continue
        if isinstance(step, FullStep):
            following = FullLayer(plan, place)
            if not _is_free(following, layers):
                break
            layers.append(following)
        elif not (isinstance(step, LinearStep) and step.n_in == step.n_out == 1 and may_precede(step)):
            break  # ActNorms, permutations, squeezes and fixed linear steps may come between
    first = layers[0]
    if first.module.bias is None:
        raise InputError(
            "gaussianize=True needs a full layer with a bias, so that its features have scales and shifts of their "
            f"own; {first.where} has none. Use whiten=True alone."
        )
    if not any(other.bend for other in layers[:-1]):
        after = plan.steps[layers[0].place + 1 :]
        raise InputError(
            "gaussianize=True needs an elementwise nonlinearity, such as SinhArcsinh, after the first full layer, and "
            "another full layer with a bias and parameters of its own after that; "
            f"found {after[0].where if after else 'nothing'}. Use whiten=True alone."
        )
    return layers


def _is_free(layer: FullLayer, layers: list[FullLayer]) -> bool:
    """Whether a later full layer can be set to a whitening map, with parameters of its own."""
    own = _memory(layer.module)
    apart = all(own.isdisjoint(_memory(other.module)) for other in layers)
    return layer.unfit() is None and layer.module.bias is not None and apart


def _memory(module: nn.Module) -> set[tuple[torch.device, int]]:
    """Where the tensors of a module are: if two modules share memory, editing one edits the other."""
    # A meta tensor has no address.
    return {(tensor.device, tensor.untyped_storage().data_ptr() or id(tensor)) for tensor in own_tensors(module)}


@torch.no_grad()
def gaussianize(
    passes: Passes, flow: nn.Module, appended: tuple[LinearStep, ...] = (), progress: bool = False
) -> StartReport:
    """Initialises every full layer of a chain to a whitening, and every nonlinearity between to a marginal map.

    One pass over the data per layer, O(N·D² + D³) for rows of D entries, and two to judge the model before and after.
    If a marginal map makes the held-out rows less likely, it and all later ones become nearly affine: those would be
    fitted to the same data.
    If the whole start makes them less likely, or fails, the model is put back.

    Arguments:
        passes: The plan, and the data.
        flow: The module that all steps of the plan belong to.
        appended: The steps after those of the plan, which the start replaces: a calibration.
        progress: Shows a progress bar.

    Raises:
        InputError: If there is no such chain, or the base is not a diagonal Gaussian.
        SingularError: If the data cannot be whitened.
    """
    plan, layers = passes.plan, chain(passes.plan)
    whole, saved = replace(plan, steps=(*plan.steps, *appended)), copy.deepcopy(flow.state_dict())
    try:
        try:
            before = passes.nll(whole)
        except SingularError:  # of the old weights: nothing is less likely
            before = inf
        flow.load_state_dict(saved)  # ActNorms start again, from the output of the new layers
        started = _fit(passes, layers, progress)
    except BaseException:
        flow.load_state_dict(saved)
        raise
    report = StartReport(tuple(started), before)
    if not report.kept:
        flow.load_state_dict(saved)
        start_together(whole, *passes.first)
    return report


def _fit(passes: Passes, layers: list[FullLayer], progress: bool) -> list[LayerStart]:
    """Fits the layers of a chain. The NLL of the last is that of the whole model."""
    plan, started = passes.plan, list[LayerStart]()
    linear, since = 0.0, 0  # the log-det of the linear steps so far; where the last pass ended
    shape: tuple[int, ...] | None = None
    judged: tuple[LayerInput, float] | None = None  # the last layer, and the whitening of it that was judged
    for number, layer in enumerate(with_progress(layers, progress, "Gaussianising start")):
        last = layer is layers[-1]
        arrived = LayerInput(layer, passes.to(layer.place))
        linear -= float(plan[since : layer.place].log_z(shape or passes.event_shape, arrived.fit.mean))
        rho, nll = arrived.judge()
        nll -= linear
        if judged is not None and not nll <= started[-1].nll:
            before, shrinkage = judged
            before.whiten(before.fit, shrinkage)  # what follows will be affine, so that this is the last whitening
            kept = replace(started.pop(), shrinkage=shrinkage)
            started += _straighten(layers[number - 1 :], passes, before.shape, kept)
            passes.restart()
            nll, _ = _settle(passes, layers[-1])
            return [*started[:-1], replace(started[-1], nll=nll)]
        enough = arrived.fit.count >= ENOUGH * len(arrived.fit.mean)
        judged, moments = (arrived, rho), arrived.fit
        if enough and not last:  # few held-out rows must stay unseen, since they judge later layers too
            moments = arrived.everything()
            rho = 0.0  # shrinkage keeps the basis near that of the layer before, whose features are Gaussian already
        linear += arrived.whiten(moments, rho)
        if last:
            nll, aimed = _settle(passes, layer)
            arrived.whiten(arrived.everything(), rho)  # the model is judged: no row is left to hold out for
            if aimed:
                passes.fit_to_base(layer.place)
            return [*started, LayerStart(layer.where, nll, rho, None)]
        fitted_features = None
        if layer.bend is not None:
            matrix, bias = layer.matrix, layer.module.bias
            sample, others = (functional.linear(rows, matrix, bias) for rows in (arrived.sample, arrived.others))
            fitted = MarginalMap(*broadcast(*fit_marginals(layer.bend, sample, others)))
            linear += arrived.times * fitted.write(layer.bend, layer.module)
            fitted_features = int(fitted.helps.sum())
        started.append(LayerStart(layer.where, nll, rho, fitted_features))
        since, shape = layer.place + 1, arrived.shape
    raise AssertionError("a chain has a last layer")


def _settle(passes: Passes, layer: FullLayer) -> tuple[float, bool]:
    """Aims the last layer, whose output is white, at the base, and judges the whole model by held-out rows.

    Returns:
        The NLL, and whether the layer was aimed: before nonlinear steps it may be better left as it was.
    """
    plan = passes.plan
    start_together(plan, *passes.first)
    linear = is_linear(plan, layer.place + 1)
    unaimed = inf if linear and passes.base is not None else passes.nll()
    white = copy.deepcopy(layer.module.state_dict())
    aimed = passes.fit_to_base(layer.place)
    nll = passes.nll() if aimed or linear else inf
    if linear or nll <= unaimed:
        return nll, aimed
    layer.module.load_state_dict(white)
    return unaimed, False


def _straighten(layers: list[FullLayer], passes: Passes, shape: tuple[int, ...], start: LayerStart) -> list[LayerStart]:
    """Makes the marginal maps after some layers nearly affine.

    The first layer whitens. Each later layer undoes the steps since the one before it, up to a rotation of what is
    white already: if these take y to A y + c, with A the same for each row, the layer is (A Aᵀ)^(-1/2) (· - c).

    Arguments:
        layers: The layers.
        passes: The data.
        shape: The event shape of the input of the first.
        start: The start of the first so far.

    Returns:
        The starts of these layers.
    """
    started = [replace(start, fitted_features=None if layers[0].bend is None else 0)]
    for before, layer in pairwise(layers):
        module = before.module
        scale, shift = torch.ones_like(module.bias), torch.zeros_like(module.bias)
        if before.bend is not None:
            straight = MarginalMap.nearly_linear(before.bend, module.bias)
            straight.write(before.bend, module)
            scale, shift = straight.scale, straight.shift
        if isinstance(module, FullConv2d):
            scale, shift = scale[:, None, None], shift[:, None, None]
        start_together(passes.plan[: layer.place], *passes.first)
        part, white = passes.plan[before.place + 1 : layer.place], scale.new_zeros(1, *module.output_shape(shape))
        (ends,), _ = part.encode(torch.cat([white + shift, white + shift + scale]))
        size, cell = (ends[1] - ends[0]).abs().mean(), layer.cells.to(white.device)
        unit = size * torch.eye(len(cell)).to(white)
        probes = ends[:1].repeat(len(cell) + 1, *(1 for _ in ends.shape[1:]))
        first = layer.first_cell(probes[1:])
        first.add_(unit.view_as(first))
        sources = part.decode((probes,))  # a step away from the centre shows a row of the inverse of A
        inverse = ((sources[1:] - sources[:1]) / (size * scale)).flatten(1).double()
        vectors, values, _ = torch.linalg.svd(inverse)
        undoing = (vectors * values) @ vectors.T
        matrix = values.new_zeros(layer.matrix.shape)
        matrix[:, cell] = undoing
        layer.set(matrix, -undoing @ layer.first_cell(ends[:1]).flatten().double())
        straightened = layer.bend is not None and layer is not layers[-1]
        started.append(LayerStart(layer.where, start.nll, 0.0, 0 if straightened else None))
        shape = tuple(ends.shape[1:])
    return started
