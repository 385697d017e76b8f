"""Against what a user would pick instead: the flow libraries' own maximum likelihood, torchebm, torch-ema."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import normflows as nf
import torch
from torch import Tensor, nn
from zuko.distributions import DiagNormal
from zuko.lazy import Flow, UnconditionalDistribution, UnconditionalTransform
from zuko.transforms import LULinearTransform

import ebflow_plugin as ebf
import ebflow_zuko
from ebflow_examples.bench.contenders import ALPHA, BATCH, DIM, naive_fc, objective, training_step
from ebflow_examples.bench.results import Settings, Table, compare
from ebflow_examples.bench.wrapper import alternating
from ebflow_examples.models import build
from ebflow_normflows import SmoothLeakyReLU

__all__ = ["rivals"]

CHANNELS, SIZE = 48, 8  # what two squeezes make of a 3 x 32 x 32 image
FULL = ("SSM", "DSM", "FDSSM", "ML relative")  # objectives with a FullLinear
ALL = ("ML", "SSM", "DSM", "FDSSM")

Steps = dict[str, Callable[[], None]]


def rivals(settings: Settings) -> Iterator[Table]:
    """Training steps and averages against nflows, normflows, zuko, torchebm and torch-ema."""
    yield against_nflows(settings)
    yield after_unconstrain(settings)
    yield against_normflows(settings)
    yield against_zuko(settings)
    yield against_torchebm(settings)
    yield against_torch_ema(settings)


def ours(x: Tensor, make: Callable[[], nn.Module], names: Sequence[str], label: str = "") -> Steps:
    """A training step of each of our objectives, each with a model of its own."""
    models = {name: ebf.wrap(make().to(x)) for name in names}
    return {name + label: training_step(model, objective(name, model), x) for name, model in models.items()}


def timed(settings: Settings, title: str, theirs: Steps, ours: Mapping[str, Any], note: str, seconds: float) -> Table:
    """The table of all of ours against each of theirs."""
    times = settings.time(title, {**theirs, **ours}, seconds=seconds)
    rows = [compare(name, times[name], times[rival]) for rival in theirs for name in ours]
    return Table("rivals", f"training step {title}, batch {BATCH}", rows, note)


def against_nflows(settings: Settings) -> Table:
    """Maximum likelihood with the linear layers of nflows, against our objectives with FullLinear."""
    x = settings.data(BATCH, DIM)
    flows = {"nflows ML, NaiveLinear": naive_fc(DIM), "nflows ML, LULinear": build("fc", (DIM,), linear="lu")}
    return timed(
        settings,
        f"against nflows' maximum likelihood, D = {DIM}",
        {name: training_step(flow.to(x), nll(flow), x) for name, flow in flows.items()},
        ours(x, lambda: build("fc", (DIM,)), FULL, ", FullLinear"),
        "Two linear layers with a smooth leaky ReLU between them. A step of one objective is not worth a step of "
        "another: this is what a step costs, not what it learns.",
        4.0,
    )


def after_unconstrain(settings: Settings) -> Table:
    """A usual LU flow: nflows' maximum likelihood, our objectives on the same flow, and after unconstrain()."""
    x = settings.data(BATCH, DIM)
    lu = partial(build, "fc", (DIM,), linear="lu")
    plain = lu().to(x)
    steps: Steps = {}
    for name in ALL:
        steps |= ours(x, lu, [name], ", LULinear")
        steps |= ours(x, lambda: ebf.unconstrain(lu()), [name], ", after unconstrain")
    return timed(
        settings,
        f"of an LU flow, before and after unconstrain, D = {DIM}",
        {"nflows ML, LULinear": training_step(plain, nll(plain), x)},
        steps,
        "Two LULinear layers of nflows with a smooth leaky ReLU between them. Their determinants are products of "
        "diagonals: score matching has none to skip there, and it gains only with the full layers of unconstrain().",
        4.0,
    )


def against_normflows(settings: Settings) -> Table:
    """forward_kld with Invertible1x1Conv, against our objectives on the same flow."""
    x = settings.data(BATCH, CHANNELS, SIZE, SIZE)

    def convolutions() -> Any:
        steps: list[Any] = []
        for _ in range(4):
            steps += [nf.flows.Invertible1x1Conv(CHANNELS), SmoothLeakyReLU(ALPHA)]
        return nf.NormalizingFlow(nf.distributions.DiagGaussian((CHANNELS, SIZE, SIZE)), steps).to(x)

    flow = convolutions()
    return timed(
        settings,
        f"against normflows' forward_kld, four Invertible1x1Conv, {CHANNELS} x {SIZE} x {SIZE}",
        {"normflows forward_kld": training_step(flow, flow.forward_kld, x)},
        ours(x, convolutions, ALL),
        f"Its determinants are {CHANNELS} x {CHANNELS}, nearly free: there is nothing for score matching to save here.",
        2.5,
    )


def zuko_lu(features: int) -> nn.Module:
    """The linear layer of zuko, which holds LU factors."""
    return UnconditionalTransform(LULinearTransform, LU=torch.eye(features))


def zuko_fc(linear: Callable[[int], nn.Module]) -> Any:
    """The paper's FC-based model of zuko."""
    base = UnconditionalDistribution(DiagNormal, torch.zeros(DIM), torch.ones(DIM), buffer=True)
    return Flow([linear(DIM), ebflow_zuko.SmoothLeakyReLU(ALPHA), linear(DIM)], base)


def against_zuko(settings: Settings) -> Table:
    """Maximum likelihood by zuko's own log_prob, against our objectives."""
    x, full = settings.data(BATCH, DIM), ebflow_zuko.FullLinear
    flows = {"zuko ML, LULinearTransform": zuko_fc(zuko_lu).to(x), "zuko ML, FullLinear": zuko_fc(full).to(x)}
    return timed(
        settings,
        f"against maximum likelihood by zuko's log_prob, D = {DIM}",
        {name: training_step(flow, lambda x, flow=flow: -flow().log_prob(x).mean(), x) for name, flow in flows.items()},
        ours(x, lambda: zuko_fc(full), FULL, ", FullLinear")
        | ours(x, lambda: zuko_fc(zuko_lu), ("ML", "DSM"), ", the LULinearTransform flow"),
        "Two linear layers with a smooth leaky ReLU between them. zuko multiplies L and U for each call, in O(D³); the "
        "wrapper applies one after the other, so that ML of the same flow is faster too.",
        4.0,
    )


def against_torchebm(settings: Settings) -> Table:
    """The sliced score matching of torchebm on the same energy, one projection."""
    title = f"against torchebm's SlicedScoreMatching on the same energy, D = {DIM}"
    if find_spec("torchebm") is None:
        return missing(f"training step {title}, batch {BATCH}", "torchebm")
    losses, core = import_module("torchebm.losses"), import_module("torchebm.core")

    class Energy(core.BaseModel):  # type: ignore[name-defined,misc]
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)

    x = settings.data(BATCH, DIM)
    model = ebf.wrap(build("fc", (DIM,)).to(x))
    rival = losses.SlicedScoreMatching(model=Energy(model), n_projections=1, device=settings.device)
    note = "One Rademacher v for each sample. Ours takes ½‖∇E‖², which has less variance than the ½(vᵀ∇E)² of torchebm."
    theirs = {"torchebm SlicedScoreMatching": training_step(model, rival, x)}
    return timed(settings, title, theirs, ours(x, lambda: build("fc", (DIM,)), ["SSM"]), note, 2.0)


def against_torch_ema(settings: Settings) -> Table:
    """An update of the average, of few large parameters and of many small ones."""
    title = "update of the average against torch-ema"
    if find_spec("torch_ema") is None:
        return missing(title, "torch-ema")
    rival_class = import_module("torch_ema").ExponentialMovingAverage
    rows = []
    for label, flow in (("fc, D = 784", build("fc", (DIM,))), ("40 steps, D = 64", alternating(20))):
        model = ebf.wrap(flow.to(settings.device))
        average, theirs = ebf.EMA(model), rival_class(list(model.parameters()), decay=0.999)
        times = settings.time(f"torch-ema, {label}", {"EMA": average.update, "torch-ema": theirs.update}, seconds=0.5)
        rows.append(compare(f"EMA.update, {label}", times["EMA"], times["torch-ema"]))
    return Table("rivals", title, rows)


def nll(flow: Any) -> Callable[[Tensor], Tensor]:
    """Maximum likelihood as users of nflows write it."""
    return lambda x: -flow.log_prob(x).mean()


def missing(title: str, package: str) -> Table:
    """The table of a rival that is not installed; the extra ``bench`` has all of them."""
    row = {"what": package, "against": f"not installed: pip install {package} (part of the extra 'bench')"}
    return Table("rivals", title, [row])
