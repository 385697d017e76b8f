"""Models that are fitted in closed form, without a gradient step: the deep ones beside the paper's FC-based one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ebflow_examples import plots
from ebflow_examples.config import TrainConfig
from ebflow_examples.console import Grid
from ebflow_examples.defaults import CONV_ROWS, start_rows
from ebflow_examples.reproduce.common import Cell, CellResult, Options
from ebflow_examples.reproduce.output import Report, column, grouped
from ebflow_examples.runs import build, likelihood

MINUTES = 8.0
MODELS = {"fc2": ("fc", 2), "deep2": ("deep", 2), "deep3": ("deep", 3), "deep5": ("deep", 5), "conv4": ("conv", 4)}
COUNT, COLUMNS = 64, 8


def cells(options: Options) -> list[Cell]:
    """One for each model and seed."""
    settings = {"data": options.data, "quick": options.quick}
    return [
        Cell("deep", f"{name}-seed{seed}", {"kind": name, "seed": seed, **settings}, timed=False)
        for seed in range(options.seeds)
        for name in MODELS
    ]


def compute(cell: Cell, folder: Path, data_root: str | None) -> dict[str, Any]:
    """Fits a model to the training rows in closed form, and draws from it. The seed is that of all noise."""
    kind, seed, quick = (cell.settings[key] for key in ("kind", "seed", "quick"))
    model, layers = MODELS[kind]
    told = {"data": cell.settings["data"], "model": model, "layers": layers, "seed": seed, "data_root": data_root}
    run = build(TrainConfig(**told, device="cpu", limit=1000 if quick else None))
    cpu, wall = time.process_time(), time.perf_counter()
    started = run.model.initialize(start_rows(run), gaussianize=True, generator=run.generator(seed, "start"))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert started is not None
    drawn = run.model.sample(COUNT, generator=run.generator(seed, "samples"))
    np.save(folder / f"{cell.name}.npy", run.as_images(drawn).numpy())
    found = likelihood(run.model, run.data.test[:50] if quick else run.data.test, seed)
    held_out = [layer.nll for layer in started.layers]
    return {**found.to_dict(), "cpu_seconds": cpu, "seconds": wall, "held_out": held_out}


def report(options: Options, found: Sequence[CellResult], path: Path) -> Report:
    """NLL of test data and seconds by model, and samples of each."""
    groups = grouped(found, "kind")
    kinds = [kind for kind in MODELS if (kind,) in groups]
    lines, rows, panels = [], [], {}
    for kind in kinds:
        nll, bits, cpu = (column(groups[kind,], key) for key in ("nll", "bits_per_dim", "cpu_seconds"))
        model, layers = MODELS[kind]
        lines.append([f"{model}, {layers} layers", nll.text(1), bits.text(3), f"{cpu.mean:.0f} s"])
        rows.append({"model": model, "layers": layers, "nll": nll, "bits_per_dim": bits, "cpu_seconds": cpu})
        title = f"{model}, {layers} layers: {nll.mean:.0f} nats"
        panels[title] = options.folder / f"{groups[kind,][0].cell.name}.npy"
    plots.save_panels(path, panels, COLUMNS, 3.6)
    notes = [
        "No gradient step was taken. Each full layer whitens what reaches it, and the nonlinearity after it makes each "
        "feature as Gaussian as it can: a smooth leaky ReLU in fc, a sinh-arcsinh map in deep. The layers of conv are "
        f"3 x 3 convolutions on a torus, fitted to the first {CONV_ROWS:,} images. Gaussianization in "
        "closed form is of Chen and Gopinath (2000), with rotations of Laparra et al. (2011), as a flow that is "
        "trained of Meng et al. (2020). Seconds are those of the processor, for the fit alone."
    ]
    head = ("model", "NLL of test data", "bits/dim", "processor time")
    return Report([Grid(f"Fitted in closed form: {options.data}", head, lines)], rows, notes, [path] if kinds else [])
