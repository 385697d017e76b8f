"""A race on textures, whose entropy is known: exact likelihood, the same without determinants, and score matching."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ebflow_examples import racing
from ebflow_examples.console import Grid
from ebflow_examples.data import load
from ebflow_examples.racing import CONTENDERS, SAMPLES
from ebflow_examples.reproduce.common import Cell, CellResult, Options, tries
from ebflow_examples.reproduce.output import Report, column, grouped, mean
from ebflow_examples.streams import stream

MINUTES = 10.0
RATES = (1e-3, 3e-3, 1e-2)
SEARCH = 0.2  # of the time of a race, for each rate
ROWS = 250
CHOOSING = 100  # validation images that a rate is chosen by


def cells(options: Options) -> list[Cell]:
    """One for each objective and seed, and those that try learning rates, with two seeds."""
    told = {"data": "textures16" if options.quick else "textures", "quick": options.quick}
    search = {
        loss: [
            each
            for rate in RATES
            for each in tries(
                Cell("race", f"{loss}-rate{rate:g}", {**told, "loss": loss, "search": True, "lr": rate}, part=SEARCH),
                options.quick,
            )
        ]
        for loss in CONTENDERS
    }
    runs = [
        Cell(
            "race",
            f"{loss}-seed{seed}",
            {**told, "loss": loss, "seed": seed, "search": False},
            best_of=tuple(each.name for each in search[loss]),
        )
        for seed in range(options.seeds)
        for loss in CONTENDERS
    ]
    return [*(each for tried in search.values() for each in tried), *runs]


def compute(cell: Cell, folder: Path, data_root: str | None) -> dict[str, Any]:
    """Trains; a search is judged by validation images, a race evaluated on test images."""
    settings = cell.settings
    seed, contender = settings["seed"], CONTENDERS[settings["loss"]]
    data = load(settings["data"], seed=seed)
    rows = data.validation[:CHOOSING] if settings["search"] else data.test[:ROWS]
    lap = racing.run(contender, data, rows, cell.seconds, rate=settings["lr"], seed=seed)
    found = {"judge": "above_floor", **lap.facts()}
    if settings["search"]:
        return found
    drawn = lap.model.sample(SAMPLES, generator=stream(seed, "samples"))
    np.save(folder / f"{cell.name}.npy", drawn.numpy())
    return {**found, "spread": racing.spread(drawn, data)}


def report(options: Options, found: Sequence[CellResult], path: Path) -> Report:
    """Nats above the floor on the way and at the end, steps, rates, and the spread of samples; curves and samples."""
    from ebflow_examples.textures import SIDES, Textures

    runs = [each for each in found if not each.cell.settings["search"]]
    groups = {key[0]: group for key, group in grouped(runs, "loss").items()}
    if not groups:
        return Report([], [], ["No objective came to an end."], [])
    name = next(iter(groups.values()))[0]["data"]
    floor = Textures(SIDES[name]).entropy()
    lines, rows = [], []
    for loss in sorted(groups, key=lambda loss: column(groups[loss], "above_floor").value):
        group = groups[loss]
        above, steps, width = (column(group, key) for key in ("above_floor", "steps", "spread"))
        quarter, half = (mean(_at(each["curve"], share * each["seconds"]) for each in group) for share in (0.25, 0.5))
        rate = f"{group[0]['lr']:g}"
        told = {"loss": loss, "above_floor": above, "at_a_quarter": quarter, "at_half": half, "steps": steps}
        rows.append({**told, "rate": rate, "spread": width, "floor": floor})
        way = [f"{each.value:,.0f}" for each in (quarter, half)]
        lines.append([CONTENDERS[loss].name, rate, f"{steps.value:.0f}", *way, above.text(1), width.text(2)])
    seconds = mean(each["seconds"] for group in groups.values() for each in group).value
    head = ("objective", "rate", "steps", f"{seconds / 4:.0f} s", f"{seconds / 2:.0f} s", f"{seconds:.0f} s", "spread")
    size = 3 * SIDES[name] ** 2
    grid = Grid(f"{name}, D = {size}: nats above the entropy of {floor:,.1f}, by CPU seconds of training", head, lines)
    drawn = {loss: options.folder / f"{group[0].cell.name}.npy" for loss, group in groups.items()}
    racing.draw(
        path,
        f"The same model, {seconds:.0f} seconds of one core: how far from the best possible",
        {loss: [each["curve"] for each in group] for loss, group in groups.items()},
        {loss: column(group, "steps").value for loss, group in groups.items()},
        {loss: torch.from_numpy(np.load(file)) for loss, file in drawn.items()},
        load(name, seed=0),
    )
    return Report([grid], rows, _notes(), [path])


def _at(curve: Sequence[tuple[float, float]], seconds: float) -> float:
    x, y = np.array(curve).T
    return float(np.interp(seconds, x, y))


def _notes() -> list[str]:
    settings = ", ".join(
        f"{each.name}: {', '.join(f'{key} = {value}' for key, value in each.options.items())}"
        for each in CONTENDERS.values()
        if each.options
    )
    return [
        f"`cnn` of one block (two 7 × 7 convolutions, zeros around the image), which can reach the floor, from the "
        f"paper's start; Adam, batches of {racing.BATCH}, a cosine schedule by CPU time of one thread, evaluations not "
        f"counted, the last weights; {settings}. Each rate is the best of {', '.join(f'{rate:g}' for rate in RATES)} "
        f"on {CHOOSING} validation images after {SEARCH:.0%} of the time, in the mean of two seeds. Nats above "
        f"the floor: the mean of log p of the truth less that of the model on {ROWS} test images. Spread: the standard "
        "deviation of the pixels of samples over that of the data; 1 is right.",
        "With padding by wrapping around (`circular`) determinants come from Fourier transforms and cost next to "
        "nothing: exact ML is then the one to use.",
    ]
