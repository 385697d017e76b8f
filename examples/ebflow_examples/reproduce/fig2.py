"""Fig. 2: the time of a step against D, and NLL against training time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ebflow_examples.bench import growth
from ebflow_examples.bench import report as bench_report
from ebflow_examples.bench.results import Settings, Table
from ebflow_examples.bench.timing import Spread
from ebflow_examples.console import Grid
from ebflow_examples.reproduce import table2
from ebflow_examples.reproduce.common import Cell, CellResult, Options, kept_cells
from ebflow_examples.reproduce.output import Report
from ebflow_examples.reproduce.table2_report import draw

MINUTES = 15.0
GROWTH = "growth"


def cells(options: Options) -> list[Cell]:
    """The measurement of step times; and fc our way, unless Table 2 has curves."""
    timing = Cell("fig2", GROWTH, {"quick": options.quick, "seed": 0, "search": False}, timed=False)
    pairs = [] if _borrowed(options) else product(range(options.seeds), table2.LOSSES)
    runs = [table2.cell_of(options, "fig2", "ours", "fc", loss, seed) for seed, loss in pairs]
    return [timing, *table2.with_rates(options, runs)]


def compute(cell: Cell, folder: Path, data_root: str | None) -> dict[str, Any]:
    """Step times as ``ebflow bench growth`` measures them, or a run as in Table 2."""
    if cell.name != GROWTH:
        return table2.compute(cell, folder, data_root)
    return next(growth.growth(Settings(quick=cell.settings["quick"], seed=cell.settings["seed"]))).as_dict()


def report(options: Options, found: Sequence[CellResult], path: Path) -> Report:
    """The exponents, and two pictures."""
    grids, rows, pictures = [], [], []
    for timing in (each for each in found if each.cell.name == GROWTH):
        content = timing.result
        keep = [{key: value for key, value in row.items() if key != "target"} for row in content["rows"]]
        made = Table(content["group"], content["title"], [_revived(row) for row in keep], content["note"])
        bench_report.draw(made, path)
        grids.append(Grid(made.title, *bench_report.cells(made)))
        rows += keep
        pictures.append(path)
    borrowed = _borrowed(options)
    curves = borrowed or [each for each in found if each.cell.name != GROWTH and not each.cell.settings["search"]]
    if curves:
        pictures.append(path.with_stem(f"{path.stem}b"))
        draw(options, curves, pictures[-1])
    notes = [
        "(a) A step is loss, backward and Adam, of two dense layers, interleaved on one core; in brackets the 90 % "
        "interval over rounds. The paper's Fig. 2 (a) has no exponents; it says O(D³) for ML and SML, "
        "O(D²) for the others. (b) NLL of validation data against training time"
        + (f", from the cells of Table 2: `{borrowed[0].facts['command']}`." if borrowed else "."),
    ]
    return Report(grids, rows, notes, pictures, borrowed)


def _borrowed(options: Options) -> list[CellResult]:
    wanted = {"data": options.data, "margin": options.margin, "quick": options.quick, "search": False}
    kept = kept_cells(options, table2, wanted)
    return [each for each in kept if each.cell.timed]


def _revived(row: dict[str, Any]) -> dict[str, Any]:
    """A row as it was before it went through JSON."""
    return {key: Spread(**value) if isinstance(value, dict) else value for key, value in row.items()}
