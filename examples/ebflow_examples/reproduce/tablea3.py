"""Table A.3: log Z by importance sampling, as in the paper, and by Lanczos from the same budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from nflows import distributions, flows
from torch import Generator

import ebflow_plugin as ebf
from ebflow_examples import plots
from ebflow_examples.console import Grid
from ebflow_examples.reproduce import paper
from ebflow_examples.reproduce.common import Cell, CellResult, Options
from ebflow_examples.reproduce.output import Report, beside, column, grouped
from ebflow_examples.streams import stream
from ebflow_nflows import FullLinear

MINUTES = 2.0
SPREAD = 0.003  # W = I + SPREAD · G: the paper does not say what its W is; with this the errors are of its size
METHODS = {"importance": "importance sampling", "lanczos": "Lanczos"}
REPEATS = 100


def cells(options: Options) -> list[Cell]:
    """One for each method, number of evaluations M, and D; each is the mean of many repetitions."""
    repeats = 2 if options.quick else REPEATS
    return [
        Cell("tableA3", f"{method}-M{budget}-D{dim}",
             {"method": method, "budget": budget, "dim": dim, "repeats": repeats, "seed": 0}, timed=False)
        for method in METHODS
        for budget, errors in paper.LOG_Z.items()
        for dim in errors
    ]  # fmt: skip


@torch.no_grad()
def compute(cell: Cell, folder: Path, data_root: str | None) -> dict[str, Any]:
    """The mean of |d - d_est| / |d| with d = |det W| = 1 / Z."""
    settings = cell.settings
    model, generator = near_identity(settings["dim"]), stream(settings["seed"], "log_z")
    exact = model.log_z()
    found = [estimate(model, settings["method"], settings["budget"], generator) for _ in range(settings["repeats"])]
    return {"error": float((exact - torch.tensor(found)).expm1().abs().mean()), "log_z": float(exact)}


def near_identity(dim: int) -> ebf.EBFlow:
    """The paper's model, g(x) = W x, with W near the identity."""
    layer = FullLinear(dim, bias=False, dtype=torch.float64)
    layer.weight.data += SPREAD * torch.randn(dim, dim, generator=stream(dim, "weights"), dtype=torch.float64)
    return ebf.wrap(flows.Flow(layer, distributions.StandardNormal([dim])))


def estimate(model: ebf.EBFlow, method: str, budget: int, generator: Generator) -> float:
    """An estimate of log Z from a budget of energies, or of products with W and its transpose."""
    if method == "importance":
        return model.log_z(method="importance", samples=budget, generator=generator).value
    return model.log_z(method="lanczos", iterations=3, probes=budget // 6, generator=generator).value


def report(options: Options, found: Sequence[CellResult], path: Path) -> Report:
    """Error rates, the paper's beside those of importance sampling."""
    groups = grouped(found, "method", "budget", "dim")
    lines, rows = [], []
    dims = list(next(iter(paper.LOG_Z.values())))
    for budget, errors in paper.LOG_Z.items():
        for method, name in METHODS.items():
            line = [f"M = {budget}", name]
            for dim in dims:
                group = groups.get((method, budget, dim))
                theirs = errors[dim] if method == "importance" else None
                error = None if group is None else column(group, "error").mean
                line.append("" if error is None else beside(f"{error:.6f}", theirs, 6))
                rows.append({"M": budget, "method": method, "D": dim, "error": error, "paper": theirs})
            lines.append(line)
    with plots.figure(path, 9.6, 3.2) as figure:
        panels = figure.subplots(1, len(dims), sharey=True)
        for axes, dim in zip(panels, dims, strict=True):
            drawn = {
                METHODS[way]: [row["error"] for row in rows if (row["method"], row["D"]) == (way, dim)]
                for way in METHODS
            }
            drawn["the paper's"] = [errors[dim] for errors in paper.LOG_Z.values()]
            for name, values in drawn.items():
                axes.loglog(list(paper.LOG_Z), [error or math.nan for error in values], "o-", label=name)
            axes.minorticks_off()
            axes.set_xticks(list(paper.LOG_Z), [str(budget) for budget in paper.LOG_Z])
            axes.set(title=f"D = {dim}", xlabel="evaluations M")
        panels[0].set_ylabel("relative error of the determinant")
        panels[-1].legend(fontsize=8)
    notes = [
        f"W = I + {SPREAD} G with G standard normal. The paper does not say what its W is; the factor was chosen so "
        "that importance sampling has errors of the paper's size, so that their size is no result. The paper's "
        f"numbers look like single runs. Here means of |d - d_est| / |d| over {found[0]['repeats']} runs. Lanczos "
        "knows one thing more than products with W: the sum of the squares of its entries. `examples/log_z.py` has it "
        "without."
    ]
    head = ("budget", "method", *(f"D = {dim}" for dim in dims))
    return Report([Grid("Relative error of |det W| (the paper's)", head, lines, 2)], rows, notes, [path])
