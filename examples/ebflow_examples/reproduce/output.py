"""What an experiment leaves after: a table on the screen, NAME.json, NAME.png, NAME.md, and RESULTS.md from all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ebflow_examples.bench.report import machine
from ebflow_examples.console import Grid, note, say, to_json
from ebflow_examples.reproduce.common import CellResult, Experiment, Options, commits
from ebflow_examples.reproduce.provenance import recipe

RESULTS = "RESULTS.md"
FEW_STEPS = 30  # of a search: below, its rate may be chance


@dataclass(frozen=True)
class Mean:
    """A mean over seeds.

    Attributes:
        mean: The mean.
        interval: Half the width of its 95 % interval, by Student's t; NaN from one seed.
        values: What it is the mean of.
    """

    mean: float
    interval: float
    values: tuple[float, ...] = ()

    def text(self, digits: int = 2) -> str:
        """As tables show it.

        Example:
            >>> Mean(1092.44, 0.26).text(1), Mean(0.5, math.nan).text()
            ('1092.4 ± 0.3', '0.50')
        """
        spread = "" if math.isnan(self.interval) else f" ± {self.interval:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


def mean(values: Iterable[float]) -> Mean:
    """The mean of the values of several seeds, with its 95 % interval.

    Example:
        >>> mean([1.0, 2.0, 3.0]).text()
        '2.00 ± 2.48'
    """
    from scipy.stats import t

    kept = torch.tensor(list(values), dtype=torch.float64)
    interval = math.nan
    if len(kept) > 1:
        interval = float(t.ppf(0.975, len(kept) - 1)) * float(kept.std()) / math.sqrt(len(kept))
    return Mean(float(kept.mean()), interval, tuple(kept.tolist()))


def beside(ours: str, paper: Sequence[float] | float | None, digits: int = 2) -> str:
    """A cell of a table: ours, and the paper's in brackets.

    Example:
        >>> beside("1089.8 ± 0.2", (1099.2, 0.2), 1), beside("3", None)
        ('1089.8 ± 0.2 (1099.2 ± 0.2)', '3')
    """
    if paper is None:
        return ours
    theirs = f"{paper:.{digits}f}" if isinstance(paper, float) else Mean(paper[0], paper[1]).text(digits)
    return f"{ours} ({theirs})"


def grouped(found: Iterable[CellResult], *keys: str) -> dict[tuple[Any, ...], list[CellResult]]:
    """Runs that differ in their seed alone, by the settings that tell them apart.

    Without those that failed, and those that only tried a learning rate.
    """
    groups: dict[tuple[Any, ...], list[CellResult]] = {}
    for each in found:
        if not each.failed and not each.cell.settings.get("search"):
            groups.setdefault(tuple(each.cell.settings.get(key) for key in keys), []).append(each)
    return groups


def at(run: CellResult, share: float) -> float:
    """The curve of a run after a share of its seconds."""
    x, y = np.array(run["curve"]).T
    return float(np.interp(share * run["seconds"], x, y))


@dataclass(frozen=True)
class Report:
    """What an experiment found.

    Attributes:
        grids: Its tables.
        rows: The same numbers, for programs.
        notes: What a reader must know, a paragraph each.
        pictures: The files that were drawn.
    """

    grids: Sequence[Grid]
    rows: Sequence[dict[str, Any]]
    notes: Sequence[str] = ()
    pictures: Sequence[Path] = ()


def write(options: Options, made: Experiment, found: Sequence[CellResult], title: str) -> Report:
    """Writes NAME.json, NAME.png and NAME.md, with a title, into the folder, and prints the tables."""
    out, name = options.out, options.what
    report: Report = made.report(options, found, out / f"{name}.png")
    report = replace(report, notes=[*report.notes, *remarks(found, recipe(made, options.data))])
    about = {**machine(torch.device("cpu"), 1), "jobs": options.jobs}
    about.pop("load at the start")
    wall = sum(each.wall for each in found)
    content = {
        "what": name,
        "about": title,
        "command": options.command,
        "options": {**asdict(options), "out": str(out)},
        "machine": about,
        "wall_seconds": round(wall, 1),
        "code": commits(found),
        "rows": report.rows,
        "notes": report.notes,
        "cells": [asdict(each) for each in found],
    }
    (out / f"{name}.json").write_text(f"{to_json(content)}\n", encoding="utf-8")
    (out / f"{name}.md").write_text(_markdown(title, options, report, found, wall, about), encoding="utf-8")
    say("\n\n".join(grid.screen() for grid in report.grids))
    for line in report.notes:
        say(f"\n{line}")
    note(f"computed by {commits(found)}")
    files = [f"{name}.json", f"{name}.md", *(path.name for path in report.pictures)]
    note(f"written: {', '.join(str(out / file) for file in files)}", "bold green")
    return report


def remarks(found: Sequence[CellResult], digest: str) -> list[str]:
    """What a reader must know of single cells, whatever the experiment.

    Those whose best weights are those of step 0; those whose rate was chosen by so few steps that chance has a say; and
    those that are not of the code that is here: with ``--kept`` they are shown, whatever computed them.
    """
    done = [each for each in found if not each.failed]
    # What tries a rate is not shown.
    start = [each.cell.name for each in done if each.cell.part == 1.0 and each.result.get("best_step") == 0]
    tried = [each for each in done if each.cell.settings.get("search") and each.result["steps"] < FEW_STEPS]
    short = {each["loss"]: f"{each['loss'].upper()} ({each['steps']})" for each in tried}.values()
    other = [each for each in found if each.cell.recipe != digest]
    told = {
        f"In {len(start)} cells no step made the NLL of validation data better than that of the start. Where the best "
        "weights are shown, theirs are those of step 0, and nothing was learnt": start,
        f"Of these objectives a search for the learning rate had fewer than {FEW_STEPS} steps": short,
        f"{len(other)} cells are of other code or data than this ({commits(other)})": [one.cell.name for one in other],
    }
    return [f"{words}: {', '.join(names)}." for words, names in told.items() if names]


def _markdown(
    title: str, options: Options, report: Report, found: Sequence[CellResult], wall: float, about: dict[str, Any]
) -> str:
    shares = sorted({each.cell.seconds for each in found if each.cell.timed and each.cell.part == 1.0})
    each_cell = f"; each run trains for {shares[0]:.0f} s" if shares else ""
    seeds = sorted({each.cell.settings["seed"] for each in found})
    named = f"Seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    count = f"{len(found)} cell{'s' * (len(found) > 1)}"
    failed = [f"- {each.cell.name}: {each.failed.splitlines()[0]}" for each in found if each.failed]
    parts = [
        f"## {title}",
        f"`{options.command}`",
        f"{named}; {count}, {wall / 60:.1f} minutes on the wall in all{each_cell}. "
        f"{about['device']}, one thread a cell, processes: {options.jobs}, torch {about['torch']}, {about['date']}; "
        f"{commits(found)}.",
        *(grid.markdown() for grid in report.grids),
        *report.notes,
        *(["Runs that failed:\n\n" + "\n".join(failed)] if failed else []),
        *(f"![{options.what}]({path.name})" for path in report.pictures),
    ]
    return "\n\n".join(parts) + "\n"


def assemble(out: Path, names: Iterable[str]) -> Path:
    """Puts RESULTS.md together from the parts that are there, in the order of their names."""
    parts = [path.read_text(encoding="utf-8") for name in names if (path := out / f"{name}.md").is_file()]
    head = "# Results\n\nThe paper's experiments by `ebflow reproduce`; the paper's numbers stand in brackets.\n"
    path = out / RESULTS
    path.write_text("\n".join([head, *parts]), encoding="utf-8")
    note(f"assembled: {path}", "bold green")
    return path


def columns(found: Sequence[CellResult], *keys: str) -> dict[str, Mean]:
    """The means of several of the results over seeds, by name."""
    return {key: column(found, key) for key in keys}


def column(found: Sequence[CellResult], key: str) -> Mean:
    """The mean of one of the results over seeds."""
    return mean(each.result[key] for each in found)
