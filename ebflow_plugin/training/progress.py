"""Where the numbers of a training run go: a live display, JSON lines, TensorBoard."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Protocol

from ebflow_plugin.errors import InputError
from ebflow_plugin.training.checkpoints import atomic_write, not_written

__all__ = ["Display", "JsonLines", "PlainDisplay", "Record", "RichDisplay", "TensorBoard", "display"]

Record = dict[str, Any]


class Display(Protocol):
    """Shows how a run goes."""

    def start(self, step: int, total: int, every: int = 0) -> None:
        """Begins, at a step, with so many steps between two evaluations."""

    def advance(self, step: int, loss: float | None) -> None:
        """Tells of a step; the loss is given now and then."""

    def record(self, record: Record) -> None:
        """Tells of an evaluation, and with ``evaluation_seconds`` how long it took."""

    def stop(self) -> None:
        """Ends."""


class NoDisplay:
    """Shows nothing."""

    def start(self, step: int, total: int, every: int = 0) -> None:
        """Does nothing."""

    def advance(self, step: int, loss: float | None) -> None:
        """Does nothing."""

    def record(self, record: Record) -> None:
        """Does nothing."""

    def stop(self) -> None:
        """Does nothing."""


class PlainDisplay(NoDisplay):
    """One line for each evaluation.

    Arguments:
        file: Where to; the standard error by default.

    Example:
        >>> shown = PlainDisplay(sys.stdout)
        >>> shown.start(0, 200)
        >>> shown.record({"step": 100, "loss": -1.5, "nll": 2.25, "bits_per_dim": 1.623, "steps_per_second": 50.0})
        step 100/200  loss -1.5000  NLL 2.2500  bits/dim 1.6230  50.0 steps/s  0:00:02 left
    """

    def __init__(self, file: IO[str] | None = None) -> None:
        self._file = file
        self._total = self._every = 0

    def start(self, step: int, total: int, every: int = 0) -> None:
        """Keeps the number of steps."""
        self._total, self._every = total, every

    def record(self, record: Record) -> None:
        """Writes the line."""
        parts = [f"step {record['step']}/{self._total}", *describe(record)]
        speed = record.get("steps_per_second")
        if speed:
            left = time_left(record["step"], self._total, self._every, speed, record.get("evaluation_seconds", 0.0))
            parts += [f"{speed:.1f} steps/s", f"{_clock(left)} left"]
        print("  ".join(parts), file=self._file or sys.stderr, flush=True)


class RichDisplay:
    """A live display: a bar with speed and time left, the numbers, and the full layers with their condition.

    Arguments:
        console: A rich Console; the standard error by default.
    """

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[speed]}"),
            TextColumn("{task.fields[left]}"),
        )
        self._task: Any = None
        self._loss: float | None = None
        self._last: Record = {}
        self._mark = (0.0, 0)  # when, and at which step, training went on last
        self._total = self._every = 0
        self._live = Live(
            self._bar, console=console or Console(stderr=True), refresh_per_second=4, get_renderable=self._render
        )

    def start(self, step: int, total: int, every: int = 0) -> None:
        """Opens the display."""
        self._total, self._every = total, every
        self._task = self._bar.add_task("", total=total, completed=step, speed="", left="")
        self._mark = time.monotonic(), step
        self._live.start()

    def advance(self, step: int, loss: float | None) -> None:
        """Moves the bar."""
        self._loss = self._loss if loss is None else loss
        self._bar.update(self._task, completed=step)
        passed, done = time.monotonic() - self._mark[0], step - self._mark[1]
        if done and passed > 0:
            left = time_left(step, self._total, self._every, done / passed, self._last.get("evaluation_seconds", 0.0))
            self._bar.update(self._task, speed=f"{done / passed:.1f} steps/s", left=f"{_clock(left)} left")

    def record(self, record: Record) -> None:
        """Shows an evaluation."""
        self._last = record
        self._loss = record.get("loss")
        self._mark = time.monotonic(), record["step"]

    def stop(self) -> None:
        """Closes the display, leaving its last state on the screen."""
        self._live.stop()

    def _render(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        parts: list[Any] = [self._bar]
        shown = {**self._last, "loss": self._loss}
        line = "  ".join(describe(shown, conditions=False))
        if line:
            parts.append(Text(line))
        conditions = self._last.get("condition") or {}
        if conditions:
            table = Table("full layer", "smallest σ", "condition ≥", box=None, padding=(0, 2, 0, 0))
            worst = sorted(conditions, key=lambda path: -_number(conditions[path]["condition"]))
            for path in worst[:8]:
                values = conditions[path]
                table.add_row(path, f"{_number(values['smallest']):.1e}", f"{_number(values['condition']):.1e}")
            if len(worst) > 8:
                table.add_row(f"and {len(worst) - 8} better ones", "", "")
            parts.append(table)
        return Group(*parts)


class JsonLines:
    r"""Metrics on the disk: one JSON object a line, each complete as soon as it is there.

    Arguments:
        path: The file.
        records: What it holds at the start, instead of whatever it held before.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lines = JsonLines(Path(folder) / "metrics.jsonl", [{"step": 1}])
        ...     lines.record({"step": 2, "loss": 0.5})
        ...     (Path(folder) / "metrics.jsonl").read_text()
        '{"step": 1}\n{"step": 2, "loss": 0.5}\n'
    """

    def __init__(self, path: Path, records: Iterable[Record] = ()) -> None:
        self.path = path
        text = "".join(_line(record) for record in records).encode()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, lambda file: file.write(text))
        except OSError as error:
            raise InputError(f"the metrics file {path} cannot be written: {error}") from error

    def record(self, record: Record) -> None:
        """Adds a line."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(record))
        except OSError as error:
            raise not_written(self.path, error) from error


class TensorBoard:
    """Metrics for TensorBoard.

    Arguments:
        folder: Its log folder.
        step: Where the run goes on: what an interrupted run wrote behind it is hidden.

    Raises:
        InputError: If the tensorboard package is not installed.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InputError("tensorboard= needs the tensorboard package: pip install tensorboard") from error
        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1 if step else None)  # type: ignore[no-untyped-call,unused-ignore]

    def record(self, record: Record) -> None:
        """Adds the numbers of an evaluation."""
        for name, value in record.items():
            if isinstance(value, (int, float)) and name != "step":
                self._writer.add_scalar(name, value, record["step"])
        for path, values in (record.get("condition") or {}).items():
            self._writer.add_scalar(f"condition/{path}", _number(values["condition"]), record["step"])
        self._writer.flush()

    def close(self) -> None:
        """Closes the files."""
        self._writer.close()


def display(wanted: bool, first: bool = True) -> Display:
    """The display of a run: live on a terminal if rich is installed, lines otherwise, nothing if not wanted.

    Example:
        >>> type(display(False)).__name__
        'NoDisplay'
    """
    if not (wanted and first):
        return NoDisplay()
    if find_spec("rich") is not None and sys.stderr.isatty():
        return RichDisplay()
    return PlainDisplay()


def describe(record: Mapping[str, Any], conditions: bool = True) -> list[str]:
    """The numbers of an evaluation, for people.

    Example:
        >>> describe({"loss": 1.0, "nll": 2.0, "best_nll": 2.0, "skipped": 3})
        ['loss 1.0000', 'NLL 2.0000 (best)', '3 batches skipped']
    """
    parts = []
    if record.get("loss") is not None:
        parts.append(f"loss {record['loss']:.4f}")
    if record.get("nll") is not None:
        best = record.get("best_nll")
        note = "" if best is None else " (best)" if best == record["nll"] else f" (best {best:.4f})"
        before = record.get("nll_uncalibrated")
        parts.append(f"NLL {'' if before is None else f'{before:.4f} -> '}{record['nll']:.4f}{note}")
    if record.get("bits_per_dim") is not None:
        parts.append(f"bits/dim {record['bits_per_dim']:.4f}")
    if conditions and record.get("condition"):
        worst = max(_number(values["condition"]) for values in record["condition"].values())
        parts.append(f"condition ≥ {worst:.1e}")
    if record.get("skipped"):
        parts.append(f"{record['skipped']} batches skipped")
    if record.get("exact_log_dets"):
        parts.append(f"{record['exact_log_dets']} log-dets exact (no convergence)")
    return parts


def time_left(step: int, total: int, every: int, speed: float, evaluation: float) -> float:
    """How long a run will take, in seconds: the steps, and the evaluations among them.

    Arguments:
        step: Where it is.
        total: How many steps there are.
        every: Steps between two evaluations; there is one at the end too. 0 for none.
        speed: Steps in a second.
        evaluation: Seconds for an evaluation.

    Example:
        >>> time_left(step=100, total=250, every=100, speed=10.0, evaluation=5.0)
        25.0
    """
    evaluations = total // every - step // every + (total % every > 0) if every and step < total else 0
    return (total - step) / speed + evaluations * evaluation


def _line(record: Record) -> str:
    """One line of JSON; what JSON has no number for becomes a word."""
    return json.dumps(_plain(record), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return str(value)
    return value


def _number(value: Any) -> float:
    return float(value)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
