"""Cells: the single runs that a table or a figure is made of, computed one by one or side by side, and kept."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import torch

from ebflow_examples.console import note
from ebflow_examples.data import LEVELS, NAMES, load
from ebflow_examples.defaults import CALIBRATION_ROWS
from ebflow_examples.reproduce.provenance import commit, recipe
from ebflow_examples.training import versions
from ebflow_plugin.errors import InputError, SingularError, TrainingError
from ebflow_plugin.training.files import atomic_write

TRAINING = 0.75  # of the budget; the rest is for data, evaluations, calibrations and pictures
QUICK_SECONDS = 0.2
START = "start"  # what the names of files with started weights begin with
MARGIN = 1e-6  # how far pixels are kept from 0 and 1, as in the authors' code


@dataclass(frozen=True)
class Options:
    """What ``ebflow reproduce`` was told.

    Attributes:
        what: The table or figure.
        budget: Minutes.
        seeds: Seeds 0, 1, …
        jobs: Processes that work side by side, each with one thread.
        out: The folder for the results and the cells.
        data: ``mnist``, or other images in its place.
        data_root: Where the data are.
        only: Words that a cell must have in its name, such as ``ours``, ``fc`` or ``dsm``.
        quick: A moment for each cell: shows that all of it works, and nothing else.
        fresh: Computes cells that are there already.
        seconds: Seconds of training for each cell, in the place of a share of the budget.
        margin: How far images are kept from 0 and 1.
        kept: Shows the cells that are there, and computes none.
    """

    what: str
    budget: float = 0.0
    seeds: int = 3
    jobs: int = 1
    out: Path = Path("runs/reproduce")
    data: str = "mnist"
    data_root: str | None = None
    only: tuple[str, ...] = ()
    quick: bool = False
    fresh: bool = False
    seconds: float | None = None
    margin: float = MARGIN
    kept: bool = False

    @property
    def command(self) -> str:
        """The command line that asks for the same."""
        length = f"--budget {self.budget:g}" if self.seconds is None else f"--seconds {self.seconds:g}"
        flags = [length, f"--seeds {self.seeds}"]
        flags += [f"--jobs {self.jobs}"] * (self.jobs > 1)
        flags += [f"--data {self.data}"] * (self.data != "mnist")
        flags += [f"--margin {self.margin:g}"] * (self.margin != MARGIN)
        flags += [f"--only {word}" for word in self.only] + ["--quick"] * self.quick + ["--kept"] * self.kept
        return " ".join(["ebflow reproduce", self.what, *flags])

    @property
    def folder(self) -> Path:
        """Where the cells of this experiment are."""
        return self.out / "cells" / self.what


@dataclass(frozen=True)
class Cell:
    """One run of an experiment.

    Attributes:
        what: The experiment.
        name: Its name in the experiment, words joined by ``-``.
        settings: What it is told, as JSON; its seed is among them.
        timed: Whether it trains for a share of the budget.
        seconds: That share.
        always: Whether it is needed whatever cells are asked for.
        part: How long it trains, as a part of what others do.
        best_of: The names of cells that tried learning rates: it takes the rate of the one with the lowest
            ``validation_nll``, or whatever result they name as their ``judge``, as its setting ``lr``. A rate that
            was tried with several seeds is judged by their mean.
        judge: The result that its rate is chosen by; by default what those that tried rates name.
        recipe: A digest of the code and the constants that compute it: another recipe is another cell.
    """

    what: str
    name: str
    settings: dict[str, Any]
    timed: bool = True
    seconds: float = 0.0
    always: bool = False
    part: float = 1.0
    best_of: tuple[str, ...] = ()
    judge: str | None = None
    recipe: str = ""

    def __getitem__(self, key: str) -> Any:
        """A setting."""
        return self.settings[key]


@dataclass(frozen=True)
class CellResult:
    """A cell that was computed.

    Attributes:
        cell: What was asked for.
        result: What came out; empty if training failed.
        failed: Why it failed.
        wall: Seconds that all of it took, by the clock on the wall.
        facts: Versions, commit and command.
    """

    cell: Cell
    result: dict[str, Any]
    failed: str = ""
    wall: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        """A setting of the cell, or something of the result."""
        return self.cell.settings[key] if key in self.cell.settings else self.result[key]


class Experiment(Protocol):
    """What a module of this package has.

    Attributes:
        MINUTES: The budget that gives good numbers.
    """

    MINUTES: float

    def cells(self, options: Options) -> list[Cell]:
        """The cells, without their share of the time."""

    def compute(self, cell: Cell, folder: Path, data_root: str | None) -> dict[str, Any]:
        """Computes a cell; what is no JSON goes into the folder, under the name of the cell."""

    def report(self, options: Options, found: Sequence[CellResult], path: Path) -> Any:
        """Makes the tables, and the picture at the path; an :class:`~ebflow_examples.reproduce.output.Report`."""


def check_images(data: str) -> None:
    """Refuses data that are no images with grey levels, or too few, before any work.

    Raises:
        InputError: If they are not.
    """
    if data in LEVELS:
        return
    found = None if data in NAMES else load(data)  # a user's own, which are on the spot
    if found is None or found.levels is None or len(found.event_shape) != 3:
        raise InputError(
            f"tables and figures are of images with grey levels, and {data} has none: choose {', '.join(LEVELS)}, a "
            "folder of images, or a file of images as uint8"
        )
    if len(found.train) < CALIBRATION_ROWS:
        raise InputError(
            f"{data} has {len(found.train)} images to train on; models are calibrated, which needs {CALIBRATION_ROWS}"
        )


def run(options: Options, made: Experiment) -> list[CellResult]:
    """Computes the cells of an experiment that are not there yet, and returns all of them in order.

    Raises:
        InputError: If no cell has the words that were asked for, or none is there and none may be computed.
    """
    words = set(options.only)
    made_cells = made.cells(options)
    asked = [cell for cell in made_cells if cell.always or words <= set(cell.name.split("-"))]
    if words and all(cell.always for cell in asked):
        raise InputError(f"no cell of {options.what} has all of these words in its name: {', '.join(options.only)}")
    wanted = {name for cell in asked for name in (cell.name, *cell.best_of)}
    digest = recipe(made, options.data)
    made_cells = [replace(cell, recipe=digest) for cell in made_cells if cell.name in wanted]
    cells = _shared(options, made_cells)
    options.folder.mkdir(parents=True, exist_ok=True)
    for path in options.folder.glob(f"{START}-*") if options.fresh else ():
        path.unlink()
    found = _round(options, made, [cell for cell in cells if not cell.best_of])
    ready = []
    for cell in cells:
        if cell.best_of and (rate := _best_rate(cell, found)) is not None:
            ready.append(replace(cell, settings={**cell.settings, "lr": rate}))
        elif cell.best_of and not options.kept:
            found[cell.name] = CellResult(cell, {}, "training failed at every rate of the grid")
    found |= _round(options, made, ready)
    if not found:
        raise InputError(f"no cell of {options.what} is in {options.folder}; leave out --kept to compute them")
    return [found[cell.name] for cell in cells if cell.name in found]


def _round(options: Options, made: Experiment, cells: Sequence[Cell]) -> dict[str, CellResult]:
    """Computes those of some cells that are not there yet: all of them by name."""
    found: dict[str, CellResult] = {}
    stale = []
    for cell in cells:
        kept = None if options.fresh else _kept(cell, options.folder)
        if kept is not None and (options.kept or kept.cell.recipe == cell.recipe):
            found[cell.name] = kept
        elif kept is not None:
            stale.append(kept)
    missing = [cell for cell in cells if cell.name not in found and not options.kept]
    if found and missing:
        note(
            f"{options.what}: {len(found)} of {len(cells)} cells are there already ({commits(found.values())})", "bold"
        )
    if stale:
        note(
            f"{options.what}: {len(stale)} cells are of other code or data than this ({commits(stale)}), and are "
            "computed again; --kept shows them as they are",
            "bold",
        )
    if missing:
        length = sum(cell.seconds for cell in missing if cell.timed) / 60 / options.jobs
        note(f"{options.what}: {len(missing)} cells to compute, {length:.1f} min of training in all and more", "bold")
    started = time.monotonic()
    for place, each in enumerate(_computed(options, made, missing), start=1):
        found[each.cell.name] = each
        left = (time.monotonic() - started) / place * (len(missing) - place)
        word = f"failed: {each.failed.splitlines()[0]}" if each.failed else _headline(each.result)
        note(f"{options.what} [{place}/{len(missing)}] {each.cell.name}: {word}  ({left / 60:.1f} min left)", "bold")
    return found


def with_rates(
    runs: Sequence[Cell], search: Callable[[Cell], tuple[Mapping[str, float], float]], quick: bool
) -> list[Cell]:
    """Puts cells that try learning rates in front of the runs that take the best of them.

    Each rate has two seeds, one if it is to be quick: one seed and a few steps would be the toss of a coin.

    Arguments:
        runs: The runs.
        search: Of a run, the rates that are tried for it by the names of these cells, which runs can share, and for
            how long, as a part of the time. No rates for a run that has its own.
        quick: Whether it is to be quick.
    """
    tries: dict[str, Cell] = {}
    taking = []
    for run in runs:
        rates, part = search(run)
        names = {
            f"{name}{again}": {**run.settings, "search": True, "lr": rate, "seed": seed}
            for name, rate in rates.items()
            for seed, again in enumerate([""] if quick else ["", "-again"])
        }
        for name, settings in names.items():
            tries.setdefault(name, replace(run, name=name, settings=settings, part=part, judge=None))
        taking.append(replace(run, best_of=tuple(names)))
    return [*tries.values(), *taking]


def judged(tried: Iterable[CellResult], judge: str | None = None) -> float | None:
    """What a learning rate led to on validation data, over its seeds: the lowest is the best. None if one failed.

    Arguments:
        tried: The runs with this rate.
        judge: The result to look at; what the runs name by default, or else the NLL.
    """
    found = list(tried)
    if not found or any(each.failed for each in found):
        return None
    return sum(each.result[judge or each.result.get("judge", "validation_nll")] for each in found) / len(found)


def _best_rate(cell: Cell, found: Mapping[str, CellResult]) -> float | None:
    """The learning rate that validation data like best; None if training failed at every one."""
    rates: dict[float, list[CellResult]] = {}
    for name in cell.best_of:
        if name in found:
            rates.setdefault(found[name]["lr"], []).append(found[name])
    values = {rate: value for rate, tried in rates.items() if (value := judged(tried, cell.judge)) is not None}
    return min(values, key=lambda rate: values[rate], default=None)


def _shared(options: Options, cells: list[Cell]) -> list[Cell]:
    """Assigns each timed cell its part of the budget, or of the seconds that were asked for."""
    count = sum(cell.part for cell in cells if cell.timed)
    share = TRAINING * options.budget * 60 * options.jobs / max(1.0, count)
    share = QUICK_SECONDS if options.quick else share if options.seconds is None else options.seconds
    part = {cell.name: 1.0 if options.quick else cell.part for cell in cells}
    return [replace(cell, seconds=round(part[cell.name] * share, 2)) if cell.timed else cell for cell in cells]


def _computed(options: Options, made: Experiment, cells: Sequence[Cell]) -> Iterator[CellResult]:
    code = commit()  # before the work: the files may change in the meantime
    if options.jobs == 1:
        with one_thread():
            for cell in cells:
                yield compute(made.compute, cell, options, code)
        return
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        tasks = [pool.submit(compute, made.compute, cell, options, code) for cell in cells]
        for task in as_completed(tasks):
            yield task.result()


def compute(
    work: Callable[[Cell, Path, str | None], dict[str, Any]], cell: Cell, options: Options, code: str
) -> CellResult:
    """Computes a cell by the function of its experiment, and keeps it with the commit of its code.

    A run that failed is a result, too.
    """
    started = time.monotonic()
    result: dict[str, Any] = {}
    failed = ""
    try:
        result = work(cell, options.folder, options.data_root)
    except (TrainingError, SingularError) as error:
        failed = str(error)
    facts = {"command": options.command, "commit": code, "threads": torch.get_num_threads(), "versions": versions()}
    found = CellResult(cell, result, failed, round(time.monotonic() - started, 2), facts)
    text = f"{json.dumps(asdict(found), indent=1)}\n"
    atomic_write(options.folder / f"{cell.name}.json", lambda file: file.write(text.encode()))
    return found


def _kept(cell: Cell, folder: Path) -> CellResult | None:
    """The cell as it was computed before, if it was told the same, and had as much time; by whatever code."""
    path = folder / f"{cell.name}.json"
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    of = content["cell"].get("recipe", "")
    same = json.loads(json.dumps(asdict(cell))) == {**content["cell"], "recipe": cell.recipe}
    return CellResult(**{**content, "cell": replace(cell, recipe=of)}) if same else None


def commits(found: Iterable[CellResult]) -> str:
    """The commits that cells are of, in words."""
    count = Counter(each.facts.get("commit", "of an unknown commit") for each in found)
    if len(count) == 1:
        return f"commit {next(iter(count))}"
    return "commits " + ", ".join(f"{name} ({number} cells)" for name, number in count.items())


@contextmanager
def one_thread() -> Iterator[None]:
    """Lets torch use one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _headline(result: dict[str, Any]) -> str:
    words = [f"{key} {result[key]:.4g}" for key in ("nll", "kl", "fisher", "steps", "seconds") if key in result]
    return ", ".join(words) or "done"
