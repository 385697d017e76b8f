"""Fig. A.4: full linear layers against lower and upper triangular ones, and their product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ebflow_plugin as ebf
from ebflow_examples import plots
from ebflow_examples.config import TrainConfig
from ebflow_examples.console import Grid
from ebflow_examples.data import load
from ebflow_examples.models import flow_for
from ebflow_examples.reproduce.common import Cell, CellResult, Options
from ebflow_examples.reproduce.output import Report, column, grouped
from ebflow_examples.reproduce.timed import train_for
from ebflow_examples.runs import Run, likelihood
from ebflow_examples.streams import drawing_from

MINUTES = 8.0
DATA = "autoregressive10"
KINDS = {"full": ("F, full", "#0072B2"), "lower": ("L, lower", "#009E73"), "upper": ("U, upper", "#E69F00"),
         "lu": ("LU, their product", "#D55E00")}  # fmt: skip
LAYERS = 6


def cells(options: Options) -> list[Cell]:
    """One for each kind of layer and seed."""
    return [
        Cell("figA4", f"{kind}-seed{seed}", {"linear": kind, "seed": seed, "quick": options.quick})
        for seed in range(options.seeds)
        for kind in KINDS
    ]


def compute(cell: Cell, folder: Path, data_root: str | None) -> dict[str, Any]:
    """Trains by maximum likelihood on entries of unit variance; the NLL is of the data as they are."""
    kind, seed, quick = (cell.settings[key] for key in ("linear", "seed", "quick"))
    config = TrainConfig(
        data=DATA, model="fc", linear=kind, loss="ml", seed=seed, device="cpu", batch_size=500, lr=3e-3,
        whiten=False, calibrate="none", ema_decay=0.99,
    )  # fmt: skip
    known = load(DATA, seed=seed)
    assert known.truth is not None
    centre, scale = known.train.mean(0), known.train.std(0)
    parts = {name: (getattr(known, name) - centre) / scale for name in ("train", "validation", "test")}
    data = replace(known, **parts, truth=None)
    with drawing_from(seed, "weights"):
        flow, data = flow_for("fc", data, linear=kind, layers=LAYERS)
    run = Run(config, data, ebf.wrap(flow))
    trained = train_for(run, cell.seconds, evaluations=3 if quick else 25)
    trained.result.load_best(run.model)
    offset = float(scale.log().sum())
    facts = trained.facts()
    facts["curve"] = [(seconds, nll + offset) for seconds, nll in trained.curve]
    test = data.test[:500] if quick else data.test
    return {
        "nll": likelihood(run.model, test, seed).nll + offset,
        "entropy": -float(known.truth.log_prob(known.test).mean()),
        **facts,
    }


def report(options: Options, found: Sequence[CellResult], path: Path) -> Report:
    """NLL by the kind of layer, and curves."""
    groups = grouped(found, "linear")
    kinds = [kind for kind in KINDS if (kind,) in groups]
    lines, rows = [], []
    for kind in kinds:
        nll, steps = (column(groups[kind,], key) for key in ("nll", "steps"))
        lines.append([KINDS[kind][0], nll.text(3), f"{steps.mean:.0f}"])
        rows.append({"linear": kind, "nll": nll, "steps": steps})
    curves = {kind: [each["curve"] for each in groups[kind,]] for kind in kinds}
    with plots.figure(path, 7.4, 3.8) as figure:
        axes, colours = figure.subplots(), {kind: colour for kind, (_, colour) in KINDS.items()}
        plots.curves(axes, curves, lambda kind, end: f"{KINDS[kind][0]}  {end:.2f}", colours=colours)
        title = f"{DATA}: NLL of validation data by linear layer"
        axes.set(title=title, xlabel="seconds of training, one core", ylabel="nats")
    entropy = column([each for each in found if not each.failed], "entropy").mean
    notes = [
        f"ML, {LAYERS} linear layers with smooth leaky ReLUs between them, entries scaled to unit variance for "
        "training; the paper says neither depth nor scale, nor its s and d. The entropy of the data, which no model "
        f"can go below, is {entropy:.2f}. The paper gives no numbers: F is the best there, LU is inferior to it, and L "
        "and U differ noticeably."
    ]
    return Report([Grid(f"NLL of test data, {DATA}", ("linear layers", "NLL", "steps"), lines)], rows, notes, [path])
