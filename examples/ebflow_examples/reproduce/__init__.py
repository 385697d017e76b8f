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

__all__ = ["EXPERIMENTS", "OWN_DATA", "WHATS", "experiment", "main"]

EXPERIMENTS = {
    "table1": "Table 1 and Fig. 1: divergences and densities on sine, swirl and checkerboard",
    "table2": "Table 2: NLL and steps per second of fc and cnn on images, the paper's way and ours, in equal time",
    "table3": "Table 3 and Fig. 3: what EMA and MaP do, and the norm of the gradient",
    "fig4": "Fig. 4: images drawn from a Glow that was trained by score matching",
    "fig5": "Fig. 5: imputation by Langevin steps",
    "tableA3": "Table A.3: estimates of log Z",
    "deep": "deep models fitted in closed form, beside the paper's fc: NLL and seconds, no gradient step",
    "figA4": "Fig. A.4: full linear layers against triangular and LU ones",
    "glow": "A Glow with 3 x 3 in the place of 1 x 1 convolutions, in equal time on CIFAR-10",
    "race": "A race to a known floor: objectives in equal time on textures, D = 3072",
}
OWN_DATA = ("table1", "tableA3", "figA4", "glow", "race")  # whose data are fixed
WHATS = {**EXPERIMENTS, "all": "all of these in turn", "report": "RESULTS.md from what is there"}


def experiment(what: str) -> Any:
    """The module of an experiment: its ``MINUTES``, ``cells``, ``compute`` and ``report``."""
    return import_module(f"ebflow_examples.reproduce.{what.lower()}")


def main(
    what: str,
    *,
    budget: float | None = None,
    seeds: int | None = None,
    margin: float | None = None,
    **told: Any,
) -> None:
    """Reproduces a table or a figure, or all.

    Arguments:
        what: One of :data:`WHATS`.
        budget: Minutes for each experiment; by default what it needs for good numbers.
        seeds: Seeds 0, 1, …; three by default, one with ``quick``.
        margin: How far images are kept from 0 and 1; 1e-6 by default, as in the authors' code.
        told: The other fields of :class:`~ebflow_examples.reproduce.common.Options`.

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
    options = common.Options(what, margin=margin or common.MARGIN, **told)
    options = replace(options, seeds=seeds or (1 if options.quick else 3))
    integer("jobs", options.jobs)
    integer("seeds", 1 if seeds is None else seeds)
    for name, value in (("budget", budget), ("seconds", options.seconds), ("margin", margin)):
        if value is not None:
            positive(name, value)
    if budget is not None and options.seconds is not None:
        raise InputError("budget and seconds are both given; choose one")
    if margin is not None and margin >= 0.5:
        raise InputError(f"margin must be below 0.5, got {margin:g}")
    if what in OWN_DATA and options.data != common.Options.data:
        raise InputError(f"{what} has data of its own; leave out --data")
    if what in OWN_DATA and margin is not None:
        raise InputError(f"{what} has data of its own, which have no margin; leave out --margin")
    if not options.kept and what not in OWN_DATA and what != "report":
        common.check_images(options.data)
    writable(options.out)
    names = {"report": (), "all": tuple(EXPERIMENTS)}.get(what, (what,))
    for name in names:
        made = experiment(name)
        asked = replace(options, what=name, budget=budget or made.MINUTES)
        output.write(asked, made, common.run(asked, made), EXPERIMENTS[name])
    output.assemble(options.out, EXPERIMENTS)
