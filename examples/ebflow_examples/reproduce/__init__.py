"""``ebflow reproduce``: the tables and figures of the paper, at a length that a budget allows, beside its own numbers.

Each module holds one of them: its cells (a cell is one training run, or one measurement, of one seed), how to compute
one, and what to make of them. :mod:`~ebflow_examples.reproduce.common` runs cells and keeps them, so that a run that
was stopped goes on; :mod:`~ebflow_examples.reproduce.timed` trains for so many seconds;
:mod:`~ebflow_examples.reproduce.output` writes the table, the JSON file and the Markdown; and
:mod:`~ebflow_examples.reproduce.paper` has the numbers of the paper. Importing this package imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

from ebflow_examples.reproduce.contents import EXPERIMENTS, OWN_DATA, WHATS

__all__ = ["EXPERIMENTS", "OWN_DATA", "WHATS", "experiment", "main"]


def experiment(what: str) -> Any:
    """The module of an experiment: its ``MINUTES``, ``cells``, ``compute`` and ``report``."""
    return import_module(f"ebflow_examples.reproduce.{what.lower()}")


def main(what: str, *, budget: float | None = None, seeds: int | None = None, **told: Any) -> None:
    """Reproduces a table or a figure, or all.

    Arguments:
        what: One of :data:`WHATS`.
        budget: Minutes for each experiment; by default what it needs for good numbers.
        seeds: Seeds 0, 1, …; three by default, one with ``quick``.
        **told: More of :class:`~ebflow_examples.reproduce.common.Options`; what is None has its default.

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
    told = {name: value for name, value in told.items() if value is not None}
    asked = common.Options(what, budget or 1.0, seeds=seeds or (1 if told.get("quick") else 3), **told)
    integer("jobs", asked.jobs)
    integer("seeds", 1 if seeds is None else seeds)
    for name, value in (("budget", budget), ("seconds", asked.seconds), ("margin", asked.margin)):
        if value is not None:
            positive(name, value)
    if budget is not None and asked.seconds is not None:
        raise InputError("budget and seconds are both given; choose one")
    if asked.margin >= 0.5:
        raise InputError(f"margin must be below 0.5, got {asked.margin:g}")
    if what in OWN_DATA and asked.data != common.Options.data:
        raise InputError(f"{what} has data of its own; leave out --data")
    if what in OWN_DATA and "margin" in told:
        raise InputError(f"{what} has data of its own, which have no margin; leave out --margin")
    if not asked.kept and what not in OWN_DATA and what != "report":
        common.check_images(asked.data)
    writable(asked.out)
    for name in () if what == "report" else EXPERIMENTS if what == "all" else (what,):
        made = experiment(name)
        options = replace(asked, what=name, budget=budget or made.MINUTES)
        output.write(options, made, common.run(options, made))
    output.assemble(asked.out)
