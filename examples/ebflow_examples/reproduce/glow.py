"""A Glow with k × k convolutions in the place of its 1 × 1 ones, which likelihood without determinants makes cheap."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import normflows as nf
import numpy as np
from safetensors.torch import save_file
from torch.optim import Adam

import ebflow_plugin as ebf
from ebflow_examples import clock, plots
from ebflow_examples.console import Grid
from ebflow_examples.data import DataSet, load
from ebflow_examples.models import build
from ebflow_examples.reproduce.common import Cell, CellResult, Options
from ebflow_examples.reproduce.output import Report, at, column, grouped, mean
from ebflow_examples.runs import likelihood
from ebflow_examples.streams import drawing_from, stream

MINUTES = 700.0
RATE = 6e-3
WARM_UP = 2.0  # seconds in which the rate grows
CLIP = 1000.0  # of gradients, all of which are longer: without it one of three runs of 3 × 3 kernels diverged at once
BATCH = 32
STARTING_ROWS = 256  # that ActNorm is started with
EVALUATIONS = 10
VALIDATION_ROWS = 1000
SAMPLES, COLUMNS = 64, 8
SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)  # of a run: what tables show
LENGTHS = {"long": 1.0, "half": 0.5}  # parts of the seconds
PLAIN = {"data": "cifar10-jpeg", "library": "nflows", "kernel": 1, "padding": "zeros", "hidden": 32}
ARMS: dict[str, dict[str, Any]] = {
    "kernel1": {},
    "kernel3": {"kernel": 3},
    "kernel5": {"kernel": 5},
    "circular3": {"kernel": 3, "padding": "circular"},
    "wide48": {"hidden": 48},
    "wide64": {"hidden": 64},
    "wide64kernel3": {"hidden": 64, "kernel": 3},
    "mnist1": {"data": "mnist"},
    "mnist3": {"data": "mnist", "kernel": 3},
    "normflows1": {"library": "normflows"},
    "normflows3": {"library": "normflows", "kernel": 3},
}
MAIN = ("kernel1", "kernel3")  # with all seeds; the others with one
COLOURS = {"kernel1": plots.COLOURS["ml"], "kernel3": plots.COLOURS["score"]}
LABELS = {"kernel1": "1 × 1", "kernel3": "3 × 3"}


def cells(options: Options) -> list[Cell]:
    """One for each model, length and seed: what ``--only kernel3 --only long --only seed0`` chooses from."""
    return [
        Cell(
            "glow",
            f"{arm}-{length}-seed{seed}",
            {"arm": arm, "length": length, "seed": seed, "quick": options.quick, **PLAIN, **ARMS[arm]},
            part=part,
        )
        for seed in range(options.seeds)
        for length, part in LENGTHS.items()
        for arm in ARMS
        if arm in MAIN or (seed == 0 and not options.quick)
    ]


def compute(cell: Cell, folder: Path, data_root: str | None) -> dict[str, Any]:
    """Trains; bits per dimension of validation images on the way, and of test images at the end; samples."""
    told, seed = cell.settings, cell.settings["seed"]
    quick = told["quick"]
    data = load("digits" if quick else told["data"], root=data_root, seed=seed)
    model = model_of(told, data)
    exact = told["kernel"] == 1  # as the library does it
    objective = ebf.objectives.ML(model, log_det="exact" if exact else "auto")
    validation = data.validation[: 20 if quick else VALIDATION_ROWS]

    def schedule(share: float) -> float:
        """The rate grows for two seconds, and falls as a cosine."""
        return min(1.0, (share * cell.seconds + 0.05) / WARM_UP) * clock.SCHEDULES["cosine"](share)

    trained = clock.train(
        objective, data.train, cell.seconds, lambda step: likelihood(model, validation, seed).bits_per_dim,
        optimizer=lambda _: Adam(ebf.parameter_groups(model, RATE), fused=True), schedule=schedule,
        moments=[place / EVALUATIONS for place in range(1, EVALUATIONS + 1)], batch_size=BATCH, seed=seed,
        clip_norm=CLIP,
    )  # fmt: skip
    found = likelihood(model, data.test[:20] if quick else data.test, seed)
    taken = []
    for place in range(2):  # the first call factorises
        began = time.process_time()
        drawn = model.sample(SAMPLES, generator=stream(seed, "samples", place))
        taken.append(time.process_time() - began)
    np.save(folder / f"{cell.name}.npy", data.pixels(drawn).numpy())
    save_file(model.state_dict(), folder / f"{cell.name}.safetensors")
    return {
        "bits_per_dim": found.bits_per_dim,
        "error": found.bits_error,
        "curve": trained.curve,
        "seconds": trained.curve[-1][0],
        "steps": trained.result.steps,
        "weights": sum(each.numel() for each in model.parameters()),
        "sample_seconds": taken,
        **objective.metrics(),
    }


def model_of(told: Mapping[str, Any], data: DataSet) -> ebf.EBFlow:
    """The Glow of a cell, started from training images; whatever the kernel, the same density at first."""
    with drawing_from(told["seed"], "weights"):
        size: dict[str, Any] = {"levels": 1, "blocks": 1} if told["quick"] else {"levels": 2, "blocks": 4}
        make = glow_of_normflows if told["library"] == "normflows" else partial(build, "glow")
        flow = make(data.event_shape, hidden=told["hidden"], **size)
    if told["kernel"] > 1:
        flow = ebf.unconstrain(flow, told["kernel"], padding_mode=told["padding"])
    assert data.levels is not None
    model = ebf.wrap(flow, preprocess=[ebf.Dequantize(data.levels), ebf.Rescale(-0.5, 0.5)])
    model.initialize(data.train[:STARTING_ROWS])
    return model


def glow_of_normflows(shape: Sequence[int], *, hidden: int, levels: int, blocks: int) -> nf.MultiscaleFlow:
    """A Glow as in the tutorial of normflows, which goes from noise to data."""
    channels, height, width = shape
    bases, flows = [], []
    for level in range(1, levels + 1):  # from the data on
        last = level == levels
        channels, height, width = 4 * channels, height // 2, width // 2
        flows.append([*(nf.flows.GlowBlock(channels, hidden) for _ in range(blocks)), nf.flows.Squeeze()])
        channels = channels if last else channels // 2  # the other half is finished
        bases.append(nf.distributions.DiagGaussian((channels, height, width)))
    merges = [nf.flows.Merge() for _ in range(levels - 1)]
    return nf.MultiscaleFlow(bases[::-1], flows[::-1], merges, class_cond=False)


def report(options: Options, found: Sequence[CellResult], path: Path) -> Report:
    """Bits per dimension by CPU seconds, of validation images on the way and of test images; curves and samples."""
    groups = {(arm, length): group for (arm, length), group in grouped(found, "arm", "length").items()}
    rows, grids, pictures = [], [], []
    for length in LENGTHS:
        own = [_row(arm, each, group) for (arm, each), group in groups.items() if each == length]
        if own:
            rows += own
            grids.append(_grid(own))
    main = next((them for length in LENGTHS if (them := _main(groups, length))), None)
    if main:
        pictures = [path, path.with_stem(f"{path.stem}_samples")]
        _draw_curves(path, main)
        files = {
            f"{_name(arm)}, seed {first['seed']}: {first['bits_per_dim']:.3f} bits/dim": first.cell.name
            for arm, (first, *_) in main.items()
        }
        plots.save_panels(
            pictures[1], {title: options.folder / f"{name}.npy" for title, name in files.items()}, COLUMNS, 4.6
        )
    return Report(grids, rows, [*_gains(groups), *_notes()], pictures)


def _main(groups: Mapping[tuple[str, str], Sequence[CellResult]], length: str) -> dict[str, Sequence[CellResult]]:
    """What the pictures show."""
    return {arm: groups[arm, length] for arm in MAIN if (arm, length) in groups}


def _row(arm: str, length: str, group: Sequence[CellResult]) -> dict[str, Any]:
    return {
        "arm": arm,
        "length": length,
        "seeds": len(group),
        "seconds": column(group, "seconds"),
        **{f"at_{share:.0%}": mean(at(each, share) for each in group) for share in SHARES},
        "test": column(group, "bits_per_dim"),
        "steps": column(group, "steps"),
        "ms_a_step": mean(1e3 * each["seconds"] / each["steps"] for each in group),
        "sample_seconds": mean(each["sample_seconds"][1] for each in group),
    }


def _grid(rows: Sequence[Mapping[str, Any]]) -> Grid:
    """The table of runs of one length."""
    seconds, lines = rows[0]["seconds"].mean, []
    for row in rows:
        way = [f"{row[f'at_{share:.0%}'].mean:.3f}" for share in SHARES]
        ends = f"{row['steps'].mean:,.0f}", f"{row['ms_a_step'].mean:.0f}", f"{row['sample_seconds'].mean:.1f}"
        lines.append([_name(row["arm"]), f"{row['seeds']}", *way, row["test"].text(3), *ends])
    times = [f"{share * seconds:,.0f} s" for share in SHARES]
    head = ["model", "seeds", *times, "test", "steps", "ms a step", "64 samples, s"]
    return Grid(f"Bits per dimension in runs of {seconds:,.0f} CPU seconds", head, lines)


def _name(arm: str) -> str:
    """A model as tables call it."""
    told = {**PLAIN, **ARMS[arm]}
    words = [f"{told['kernel']} × {told['kernel']}"]
    words += ["normflows"] * (told["library"] == "normflows")
    words += [str(told["data"])] * (told["data"] != PLAIN["data"])
    words += ["circular"] * (told["padding"] == "circular")
    words += [f"couplings {told['hidden']} wide"] * (told["hidden"] != PLAIN["hidden"])
    return ", ".join(words)


def _gains(groups: Mapping[tuple[str, str], Sequence[CellResult]]) -> list[str]:
    """What 3 × 3 gains, seed by seed: bits, and the share of the time after which it stays below the end of 1 × 1."""
    lines = []
    for length in LENGTHS:
        plain = {each["seed"]: each for each in groups.get(("kernel1", length), ())}
        for each in groups.get(("kernel3", length), ()):
            if (other := plain.get(each["seed"])) is None:
                continue
            gain = other["bits_per_dim"] - each["bits_per_dim"]
            share = _time_to(each["curve"], other["curve"][-1][1])
            when = "does not reach" if share is None else f"after {share:.2f} of the time stays below"
            lines.append(
                f"Run of {each['seconds']:,.0f} s, seed {each['seed']}: 3 × 3 is {gain:.3f} bits/dim below 1 × 1 on "
                f"test images, and {when} the final validation NLL of 1 × 1."
            )
    return lines


def _time_to(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """The share of the time from which on a run stays below this NLL; None if it ends above.

    Example:
        >>> _time_to([(0.0, 3.0), (1.0, 1.0), (2.0, 3.0), (4.0, 1.0)], 2.0)  # not the first time
        0.75
    """
    x, y = np.array(curve).T
    fine = np.linspace(0.0, x[-1], 2001)
    above = np.flatnonzero(np.interp(fine, x, y) > target)
    return None if y[-1] > target else float(fine[above[-1] + 1] / x[-1]) if len(above) else 0.0


def _notes() -> list[str]:
    return [
        "A small Glow: 2 levels of 4 blocks, affine couplings with Glow's networks (32 wide), started by ActNorm from "
        f"{STARTING_ROWS} images. The 1 × 1 convolutions of the same start became k × k ones with zeros around the old "
        f"weight (`unconstrain(kernel_size=k)`). Batches of {BATCH}, Adam {RATE:g} with a cosine over the run "
        f"(`parameter_groups`: k × k kernels at 1/k of it), gradients clipped at {CLIP:g}, by CPU seconds of one "
        'thread, evaluations not counted, the last weights. k × k: `ML(log_det="auto")`, 1 × 1: exact. '
        f"Validation: {VALIDATION_ROWS} images with the same noise each time; test: all test images, once. The exact "
        "NLL of all models."
    ]


def _draw_curves(path: Path, main: Mapping[str, Sequence[CellResult]]) -> None:
    """The first picture of README: read at half its size."""
    curves = {arm: [each["curve"] for each in group] for arm, group in main.items()}
    last = max(curve[-1][0] for seeds in curves.values() for curve in seeds)
    # The first part is steep, and would flatten the rest.
    heights = [
        y for seeds in curves.values() for curve in seeds for x, y in curve if x >= min(0.15 * last, curve[-1][0])
    ]
    room = 0.1 * (max(heights) - min(heights)) + 1e-3
    with plots.figure(path, 8.4, 4.6) as figure:
        axes = figure.subplots()
        axes.set_ylim(min(heights) - room, max(heights) + room)
        plots.curves(axes, curves, lambda arm, end: f"{LABELS[arm]}: {end:.3f}", 15, COLOURS)
        axes.tick_params(labelsize=13)
        axes.set_title("Glow with 3 × 3 in the place of its 1 × 1 convolutions", fontsize=16)
        axes.set_xlabel("CPU seconds of training, one core", fontsize=14)
        axes.set_ylabel("bits/dim, validation", fontsize=14)
