"""``ebflow reproduce``: the tables and figures of the paper, at a length that a budget allows, beside its own numbers.

Each module holds one of them: its cells (a cell is one training run, or one measurement, of one seed), how to compute
one, and what to make of them. :mod:`~ebflow_examples.reproduce.common` runs cells and keeps them, so that a run that
was stopped goes on; :mod:`~ebflow_examples.reproduce.timed` trains for so many seconds;
:mod:`~ebflow_examples.reproduce.output` writes the table, the JSON file and the Markdown; and
:mod:`~ebflow_examples.reproduce.paper` has the numbers of the paper. Importing this package imports nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from ebflow_examples.reproduce.contents import EXPERIMENTS, OWN_DATA, WHATS

__all__ = ["EXPERIMENTS", "OWN_DATA", "WHATS", "experiment", "main"]


def experiment(what: str) -> Any:
    """The module of an experiment: its ``MINUTES``, ``cells``, ``compute`` and ``report``."""
    return import_module(f"ebflow_examples.reproduce.{what.lower()}")


def main(
    what: str,
    *,
    budget: float | None = None,
    seeds: int | None = None,
    jobs: int = 1,
    out: Path = Path("runs/reproduce"),
    data: str = "mnist",
    data_root: str | None = None,
    only: tuple[str, ...] = (),
    quick: bool = False,
    fresh: bool = False,
    seconds: float | None = None,
    margin: float | None = None,
    kept: bool = False,
) -> None:
    """Reproduces a table or a figure, or all.

    Arguments:
        what: One of :data:`WHATS`.
        budget: Minutes for each experiment; by default what it needs for good numbers.
        seeds: Seeds 0, 1, …; three by default, one with ``quick``.
        jobs: Processes that work side by side, each with one thread.
        out: The folder for the results and the cells.
        data: ``mnist``, or other images in its place.
        data_root: Where the data are.
        only: Words that a cell must have in its name, such as ``ours``, ``fc`` or ``dsm``.
        quick: A moment for each cell: shows that all of it works, and nothing else.
        fresh: Computes cells that are there already.
        seconds: Seconds of training for each cell, in the place of a share of the budget.
        kept: Shows the cells that are there, and computes none.
        margin: How far images are kept from 0 and 1; 1e-6 by default, as in the authors' code.

    Raises:
        UnknownNameError: There is no such table or figure.
        InputError: A number is no good, or data are missing.
    """
    import ebflow_examples.reproduce.common as common
    import ebflow_examples.reproduce.output as output
    from ebflow_examples.folders import writable
    from ebflow_plugin.errors import InputError, UnknownNameError, suggest
    from ebflow_plugin.options import integer, positive

    if what not in WHATS:
        raise UnknownNameError(f"unknown table or figure {what!r}. {suggest(what, WHATS)}")
    integer("jobs", jobs)
    integer("seeds", 1 if seeds is None else seeds)
    for name, value in (("budget", budget), ("seconds", seconds), ("margin", margin)):
        if value is not None:
            positive(name, value)
    if budget is not None and seconds is not None:
        raise InputError("budget and seconds are both given; choose one")
    if margin is not None and margin >= 0.5:
        raise InputError(f"margin must be below 0.5, got {margin:g}")
    if what in OWN_DATA and data != common.Options.data:
        raise InputError(f"{what} has data of its own; leave out --data")
    if what in OWN_DATA and margin is not None:
        raise InputError(f"{what} has data of its own, which have no margin; leave out --margin")
    if not kept and what not in OWN_DATA and what != "report":
        common.check_images(data)
    writable(out)
    if what != "report":
        for name in EXPERIMENTS if what == "all" else (what,):
            options = common.Options(
                what=name,
                budget=budget or experiment(name).MINUTES,
                seeds=seeds or (1 if quick else 3),
                jobs=jobs,
                out=out,
                data=data,
                data_root=data_root,
                only=only,
                quick=quick,
                fresh=fresh,
                seconds=seconds,
                margin=margin or common.MARGIN,
                kept=kept,
            )
            output.write(options, experiment(name), common.run(options, experiment(name)))
    output.assemble(out)
