"""A training step of the paper's fully-connected model, against plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import ebflow_plugin as ebf
from ebflow_examples.bench import plain
from ebflow_examples.bench.contenders import ALPHA, BATCH, DIM, objective, plain_loss, training_step
from ebflow_examples.bench.results import Settings, Table, compare
from ebflow_examples.models import build

__all__ = ["fc"]

TARGETS = {"SSM": 0.80, "DSM": 1.05, "FDSSM": 1.05}


def fc(settings: Settings) -> Iterator[Table]:
    """A training step of the paper's fc model, ours against plain torch, for each objective."""
    x, rows = settings.data(BATCH, DIM), []
    for name in ("SSM", "DSM", "FDSSM", "ML"):
        ours, by_hand = ebf.wrap(build("fc", (DIM,), alpha=ALPHA).to(x)), plain.FullyConnected(DIM, ALPHA).to(x)
        plain.copy_parameters(ours, by_hand)
        contenders = {
            name: training_step(ours, objective(name, ours), x),
            f"plain {name}": training_step(by_hand, plain_loss(name, by_hand), x),
        }
        times = settings.time(f"fc {name}", contenders, seconds=2.0)
        rows.append(compare(name, times[name], times[f"plain {name}"], TARGETS.get(name)))
    yield Table(
        "fc",
        f"training step of the paper's fc model, D = {DIM}, batch {BATCH}",
        rows,
        "Loss, backward and Adam (fused on the CPU); plain is hand-written torch with autograd's double backward.",
    )
