"""Table 4: the relative gradient beside the paper's objectives, in equal time. Its cells are some of Table 2's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ebflow_examples.console import Grid
from ebflow_examples.plots import OBJECTIVE_COLOURS, objective_name
from ebflow_examples.reproduce import paper, table2
from ebflow_examples.reproduce.common import Cell, CellResult, Options, kept_cells
from ebflow_examples.reproduce.output import Report, beside, column, grouped
from ebflow_examples.reproduce.table2_report import GAUSSIAN, notes

MINUTES = 30.0
compute = table2.compute  # as in Table 2
COST = {"ml": "D³L", "sml": "D³L"}


def cells(options: Options) -> list[Cell]:
    """Those of fc our way, unless Table 2 has them; and the Gaussian."""
    gaussian = table2.gaussian_cell(options, "table4")
    if _borrowed(options):
        return [gaussian]
    losses = table2.losses("ours", "fc")
    runs = [
        table2.cell_of(options, "table4", "ours", "fc", loss, seed) for seed in range(options.seeds) for loss in losses
    ]
    return table2.with_rates(options, [gaussian, *runs])


def report(options: Options, found: Sequence[CellResult], path: Path) -> Report:
    """NLL beside the paper's."""
    borrowed = _borrowed(options)
    runs = borrowed or [each for each in found if not each.cell.settings["search"]]
    groups = grouped(runs, "loss")
    lines, rows = [], []
    for loss in (loss for loss in OBJECTIVE_COLOURS if (loss,) in groups):
        nll, seconds = (column(groups[loss,], key) for key in ("nll", "seconds"))
        theirs = paper.RELATED[loss] if options.data == "mnist" else None
        lines.append(
            [objective_name(loss), COST.get(loss, "D²L"), beside(nll.text(1), theirs, 1), f"{seconds.value:.0f} s"]
        )
        rows.append({"loss": loss, "nll": nll, "seconds": seconds, "paper": theirs})
    lines += [["a Gaussian on the logits", "", f"{each['nll']:.1f}", ""] for each in found if each["loss"] == GAUSSIAN]
    source = [f"The cells are those of Table 2: `{borrowed[0].facts['command']}`."] if borrowed else []
    note = (
        "The paper's number for the relative gradient is that of Gresele et al. (2020), whose training it quotes; here "
        "it starts and ends as all others do (the same start, Adam, EMA, calibration). Other work that the paper "
        "quotes, with NICE on MNIST: SSM 3355, DSM 3398 ± 1343, FDSSM 1647 ± 306."
    )
    head = ("objective", "a step", "NLL (the paper's)", "training")
    grid = Grid(f"fc on {options.data}, ours, test data", head, lines, 2)
    return Report([grid], rows, [*notes(options, runs), note, *source], borrowed=borrowed)


def _borrowed(options: Options) -> list[CellResult]:
    """The cells of Table 2, if there are any of these data and this length."""
    told = {"data": options.data, "margin": options.margin, "quick": options.quick, "search": False}
    return kept_cells(options, table2, {**told, "model": "fc", "way": "ours"})
