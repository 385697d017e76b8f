"""Against what a user would pick instead: the flow libraries' own maximum likelihood, torchebm, torch-ema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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

CHANNELS, SIZE = 48, 8  # what two squeezes make of a 3 x 32 x 32 image
ALL, FULL = ("ML", "SSM", "DSM", "FDSSM"), ("SSM", "DSM", "FDSSM", "ML relative")


def rivals(settings: Settings) -> Iterator[Table]:
    """Training steps and averages against nflows, normflows, zuko, torchebm and torch-ema."""
    yield against_nflows(settings)
    yield after_unconstrain(settings)
    yield against_normflows(settings)
    yield against_zuko(settings)
    yield against_torchebm(settings)
    yield against_torch_ema(settings)


Steps = Mapping[str, Callable[[], object]]


def against_nflows(settings: Settings) -> Table:
    """Maximum likelihood with the linear layers of nflows, against our objectives with FullLinear."""
    x = settings.data(BATCH, DIM)
    plain_flows = {"nflows ML, NaiveLinear": naive_fc(DIM), "nflows ML, LULinear": build("fc", (DIM,), linear="lu")}
    theirs = {name: training_step(flow.to(x), nll(flow), x) for name, flow in plain_flows.items()}
    return against(
        settings,
        f"nflows' maximum likelihood, D = {DIM}",
        theirs,
        our_steps(FULL, lambda: build("fc", (DIM,)), x, "{}, FullLinear"),
        "Two linear layers with a smooth leaky ReLU between them. A step of one objective is not worth a step of "
        "another: this is what a step costs, not what it learns.",
    )


def after_unconstrain(settings: Settings) -> Table:
    """A usual LU flow: nflows' maximum likelihood, our objectives on the same flow, and after unconstrain()."""
    x, lu = settings.data(BATCH, DIM), partial(build, "fc", (DIM,), linear="lu")
    plain = lu().to(x)
    ours: dict[str, Callable[[], object]] = {}
    for name in ALL:
        ours |= our_steps((name,), lu, x, "{}, LULinear")
        ours |= our_steps((name,), lambda: ebf.unconstrain(lu()), x, "{}, after unconstrain")
    return against(
        settings,
        f"nflows' maximum likelihood, an LU flow before and after unconstrain, D = {DIM}",
        {"nflows ML, LULinear": training_step(plain, nll(plain), x)},
        ours,
        "Two LULinear layers of nflows with a smooth leaky ReLU between them. Their determinants are products of "
        "diagonals: score matching has none to skip there, and it gains only with the full layers of unconstrain().",
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
    return against(
        settings,
        f"normflows' forward_kld, four Invertible1x1Conv, {CHANNELS} x {SIZE} x {SIZE}",
        {"normflows forward_kld": training_step(flow, flow.forward_kld, x)},
        our_steps(ALL, convolutions, x),
        f"Its determinants are {CHANNELS} x {CHANNELS}, nearly free: there is nothing for score matching to save here.",
        seconds=2.5,
    )


def against_zuko(settings: Settings) -> Table:
    """Maximum likelihood by zuko's own log_prob, against our objectives."""

    def fc(linear: Callable[[int], nn.Module]) -> nn.Module:
        base = UnconditionalDistribution(DiagNormal, torch.zeros(DIM), torch.ones(DIM), buffer=True)
        return Flow([linear(DIM), ebflow_zuko.SmoothLeakyReLU(ALPHA), linear(DIM)], base)

    def lu(features: int) -> nn.Module:
        return UnconditionalTransform(LULinearTransform, LU=torch.eye(features))

    x = settings.data(BATCH, DIM)
    plain_flows: dict[str, Any] = {
        "zuko ML, LULinearTransform": fc(lu).to(x),
        "zuko ML, FullLinear": fc(ebflow_zuko.FullLinear).to(x),
    }
    full = our_steps(FULL, lambda: fc(ebflow_zuko.FullLinear), x, "{}, FullLinear")
    return against(
        settings,
        f"maximum likelihood by zuko's log_prob, D = {DIM}",
        {
            name: training_step(flow, lambda x, flow=flow: -flow().log_prob(x).mean(), x)
            for name, flow in plain_flows.items()
        },
        full | our_steps(("ML", "DSM"), lambda: fc(lu), x, "{}, the LULinearTransform flow"),
        "Two linear layers with a smooth leaky ReLU between them. zuko multiplies L and U for each call, in O(D³); the "
        "wrapper applies one after the other, so that ML of the same flow is faster too.",
    )


def against_torchebm(settings: Settings) -> Table:
    """The sliced score matching of torchebm on the same energy, one projection."""
    title = f"torchebm's SlicedScoreMatching on the same energy, D = {DIM}"
    if find_spec("torchebm") is None:
        return missing(title, "torchebm")
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
    return against(
        settings,
        title,
        {"torchebm SlicedScoreMatching": training_step(model, rival, x)},
        our_steps(("SSM",), lambda: build("fc", (DIM,)), x),
        "One Rademacher v for each sample. Ours takes ½‖∇E‖², which has less variance than the ½(vᵀ∇E)² of torchebm.",
        seconds=2.0,
    )


def our_steps(
    names: Iterable[str], make: Callable[[], nn.Module], x: Tensor, label: str = "{}"
) -> dict[str, Callable[[], object]]:
    """A training step of each of our objectives, of a model of its own."""
    steps: dict[str, Callable[[], object]] = {}
    for name in names:
        model = ebf.wrap(make().to(x))
        steps[label.format(name)] = training_step(model, objective(name, model), x)
    return steps


def against(settings: Settings, title: str, theirs: Steps, ours: Steps, note: str, seconds: float = 4.0) -> Table:
    """Each of our steps against each of theirs, interleaved."""
    times = settings.time(title, {**theirs, **ours}, seconds=seconds)
    rows = [compare(name, times[name], times[rival]) for rival in theirs for name in ours]
    return Table("rivals", f"training step against {title}, batch {BATCH}", rows, note)


def against_torch_ema(settings: Settings) -> Table:
    """An update of the average, of few large parameters and of many small ones."""
    title = "update of the average against torch-ema"
    if find_spec("torch_ema") is None:
        return missing(title, "torch-ema")
    rival_class = import_module("torch_ema").ExponentialMovingAverage
    rows = []
    for label, flow in (("fc, D = 784", build("fc", (DIM,))), ("40 steps, D = 64", alternating(20))):
        model = ebf.wrap(flow.to(settings.device))
        ours, theirs = ebf.EMA(model), rival_class(list(model.parameters()), decay=0.999)
        times = settings.time(f"torch-ema, {label}", {"EMA": ours.update, "torch-ema": theirs.update}, seconds=0.5)
        rows.append(compare(f"EMA.update, {label}", times["EMA"], times["torch-ema"]))
    return Table("rivals", title, rows)


def nll(flow: Any) -> Callable[[Tensor], Tensor]:
    """Maximum likelihood as users of nflows write it."""
    return lambda x: -flow.log_prob(x).mean()


def missing(title: str, package: str) -> Table:
    """The table of a rival that is not installed; the extra ``bench`` has all of them."""
    row = {"what": package, "against": f"not installed: pip install {package} (part of the extra 'bench')"}
    return Table("rivals", title, [row])
