"""Fig. 5: missing pixels by Langevin steps on the energy of fc, trained by DSM."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ebflow_examples.pictures import draw_imputation, impute_rows
from ebflow_examples.reproduce import table2
from ebflow_examples.reproduce.common import Cell, Found, Options
from ebflow_examples.reproduce.output import Grid, Report, column
from ebflow_examples.reproduce.timed import train_for
from ebflow_examples.runs import build

MINUTES = 5.0
STEPS, COUNT = 2000, 6


def cells(options: Options) -> list[Cell]:
    """One: a picture needs one seed."""
    settings = {"data": options.data, "model": "fc", "way": "ours", "loss": "dsm", "seed": 0, "quick": options.quick}
    return [Cell("fig5", "fc-dsm-seed0", settings)]


def compute(cell: Cell, folder: Path, data_root: str | None) -> dict[str, Any]:
    """Trains our way, imputes the left halves of test images, and draws them."""
    quick = cell.settings["quick"]
    run = build(table2.recipe(cell, data_root))
    trained = train_for(run, cell.seconds, evaluations=1 if quick else 4, validation=50 if quick else 2000)
    trained.result.load_best(run.model)
    found = impute_rows(run, COUNT, "left", share=0.5, steps=10 if quick else STEPS, seed=0)
    draw_imputation(run, found, folder / f"{cell.name}.png")
    return {
        "start_error": found.start_error,
        "mean_error": found.mean_error,
        "error": found.error,
        "nll": trained.result.best_nll,
        **trained.facts(),
    }


def report(options: Options, found: Sequence[Found], path: Path) -> Report:
    """The errors of the missing pixels, and the strips."""
    shutil.copyfile(options.folder / f"{found[0].cell.name}.png", path)
    names = {"noise, the start of the chains": "start_error", "the mean training image": "mean_error",
             "the chains": "error"}  # fmt: skip
    lines = [[name, f"{column(found, key).value:.2f}"] for name, key in names.items()]
    rows = [{"guess": name, "error": column(found, key)} for name, key in names.items()]
    notes = [
        f"The left halves of {COUNT} test images, chains of {STEPS} steps. A chain ends at one draw from what is "
        "possible, not at its mean, which would have a smaller error. The paper shows CelebA faces with digits as the "
        "masked part; there are none here, and it gives no numbers."
    ]
    head = ("the missing pixels are", "root mean square error, grey levels")
    return Report([Grid(f"fc by DSM on {options.data}", head, lines)], rows, notes, [path])
