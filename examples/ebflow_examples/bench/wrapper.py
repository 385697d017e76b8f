"""What the wrapper costs: its energy and log_prob against a loop over the same modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from nflows import distributions, flows, transforms
from torch import Tensor

import ebflow_plugin as ebf
from ebflow_examples.bench.contenders import ALPHA, BATCH, quiet
from ebflow_examples.bench.results import Settings, Table, compare
from ebflow_examples.models import build
from ebflow_nflows import FullLinear, SmoothLeakyReLU

DIM = 64


def wrapper(settings: Settings) -> Iterator[Table]:
    """The energy of a 40-step flow and the log_prob of a 200-step one, against a loop over the same modules."""
    x, rows = settings.data(BATCH, DIM), []
    for label, flow in (("full", alternating(20)), ("realnvp", build("realnvp", (DIM,), blocks=20))):
        model = ebf.wrap(flow.to(x))
        model.initialize(x)
        contenders = {"energy": quiet(model.energy, x), "loop by hand": quiet(loop_by_hand(flow), x)}
        times = settings.time(f"energy, 40 steps, {label}", contenders)
        rows.append(compare(f"energy, 40 steps, {label}", times["energy"], times["loop by hand"]))
    flow = alternating(100).to(x)
    model = ebf.wrap(flow)
    energy, log_z = loop_by_hand(flow), model.log_z().item()
    contenders = {
        "log_prob": quiet(model.log_prob, x),
        "loop by hand": quiet(lambda x: -energy(x) - log_z, x),
        "flow.log_prob": quiet(flow.log_prob, x),
    }
    times = settings.time("log_prob, 200 steps", contenders)
    rows += [
        compare("log_prob, 200 steps", times["log_prob"], times[name]) for name in ("loop by hand", "flow.log_prob")
    ]
    yield Table(
        "wrapper",
        f"what the wrapper costs, D = {DIM}, batch {BATCH}, without gradients",
        rows,
        "The loop by hand calls the same modules and the flow's own base density, and uses a constant for log Z.",
    )


def alternating(pairs: int) -> Any:
    """A flow of full layers, each with a smooth leaky ReLU after it."""
    steps = [part for _ in range(pairs) for part in (FullLinear(DIM, init="orthogonal"), SmoothLeakyReLU(ALPHA))]
    return flows.Flow(transforms.CompositeTransform(steps), distributions.StandardNormal([DIM]))


def loop_by_hand(flow: Any) -> Callable[[Tensor], Tensor]:
    """The energy of a flow, as one would write it for this flow alone."""
    modules = list(flow._transform._transforms)

    def energy(x: Tensor) -> Tensor:
        total: Tensor | float = 0.0
        for module in modules:
            if isinstance(module, FullLinear):
                x = module.transform(x)
            elif isinstance(module, transforms.ActNorm):
                x, _ = module(x)
            else:
                x, log_det = module(x)
                total = total + log_det
        return -(flow._distribution.log_prob(x) + total)

    return energy
