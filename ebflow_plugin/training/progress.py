"""The event of each evaluation of a training run, and the built-in callbacks: displays and JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import IO, Any

from ebflow_plugin.ema import EMA
from ebflow_plugin.errors import InputError
from ebflow_plugin.model import EBFlow
from ebflow_plugin.training.checkpoints import atomic_write, not_written

__all__ = ["Callback", "Event", "JsonLines", "Lines", "LiveDisplay", "Record", "describe", "display"]

Record = dict[str, Any]
SHOWN_LAYERS = 8


@dataclass(frozen=True)
class Event:
    """The argument of callbacks, at each evaluation.

    Attributes:
        step: The number of the step.
        record: The metrics of the evaluation.
        model: The model, with its current weights.
        ema: The average of the weights, if there is one.
        steps: The number of steps of the run.
        start_nll: The validation NLL before the first step, if it was computed.
        seconds_left: The estimated time left, for steps and evaluations.
    """

    step: int
    record: Mapping[str, Any]
    model: EBFlow
    ema: EMA | None
    steps: int = 0
    start_nll: float | None = None
    seconds_left: float = 0.0

    def pace(self) -> list[str]:
        """The step, the speed, and the time left, as text."""
        minutes, seconds = divmod(round(max(0.0, self.seconds_left)), 60)
        left = f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} left"
        return [f"step {self.step}/{self.steps}", f"{self.record['steps_per_second']:.1f} steps/s", left]


Callback = Callable[[Event], object]


class Lines:
    """Prints one line for each evaluation to a file, standard error by default."""

    def __init__(self, file: IO[str] | None = None) -> None:
        self._file, self._started = file, False

    def __call__(self, event: Event) -> None:
        """Prints the line; before the first one, the NLL of the start."""
        if not self._started and event.start_nll is not None:
            self._write(f"step 0/{event.steps}", *describe({"nll": event.start_nll}))
        self._started = True
        step, *pace = event.pace()
        self._write(step, *describe(event.record), *pace)

    def _write(self, *parts: str) -> None:
        print("  ".join(parts), file=self._file or sys.stderr, flush=True)


class LiveDisplay:
    """A live display on a rich Console: a bar with speed and time left, metrics, and condition numbers."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=console or Console(stderr=True), refresh_per_second=4)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Leaves the last state on the screen."""
        self._live.stop()

    def __call__(self, event: Event) -> None:
        """Shows an evaluation."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        bar, (step, *pace) = Table.grid(padding=(0, 2, 0, 0)), event.pace()
        bar.add_row(step, ProgressBar(event.steps, event.step, width=40), *pace)
        parts: list[Any] = [bar, "  ".join(describe(event.record, conditions=False))]
        conditions = event.record.get("condition") or {}
        if conditions:
            table = Table("full layer", "smallest σ", "condition ≥", box=None, padding=(0, 2, 0, 0))
            worst = sorted(conditions, key=lambda path: -conditions[path]["condition"])
            for path in worst[:SHOWN_LAYERS]:
                table.add_row(path, *(f"{conditions[path][name]:.1e}" for name in ("smallest", "condition")))
            if len(worst) > SHOWN_LAYERS:
                table.add_row(f"and {len(worst) - SHOWN_LAYERS} better ones", "", "")
            parts.append(table)
        self._live.update(Group(*parts), refresh=True)


class JsonLines:
    r"""Writes metrics to a file, one JSON object per line.

    It replaces an existing file, and starts with ``records``.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lines = JsonLines(Path(folder) / "metrics.jsonl", [{"step": 1}])
        ...     lines(Event(2, {"step": 2, "loss": 0.5}, model=None, ema=None))
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

    def __call__(self, event: Event) -> None:
        """Appends a line."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(event.record))
        except OSError as error:
            raise not_written(self.path, error) from error


def display() -> tuple[Callback, AbstractContextManager[object]]:
    """The display of a run, and its context: live on a terminal if rich is installed, else lines."""
    if find_spec("rich") is not None and sys.stderr.isatty():
        live = LiveDisplay()
        return live, live
    return Lines(), nullcontext()


def describe(record: Mapping[str, Any], conditions: bool = True) -> list[str]:
    """The metrics of an evaluation, as text.

    Example:
        >>> describe({"loss": 1.0, "nll": 2.0, "best_nll": 2.0, "skipped": 3})
        ['loss 1.0000', 'NLL 2.0000 (best)', '3 batches skipped']
    """
    parts = []
    if record.get("loss") is not None:
        parts.append(f"loss {record['loss']:.4f}")
    if record.get("nll") is not None:
        best, before = record.get("best_nll"), record.get("nll_uncalibrated")
        note = "" if best is None else " (best)" if best == record["nll"] else f" (best {best:.4f})"
        parts.append(f"NLL {'' if before is None else f'{before:.4f} -> '}{record['nll']:.4f}{note}")
    if record.get("bits_per_dim") is not None:
        parts.append(f"bits/dim {record['bits_per_dim']:.4f}")
    if conditions and record.get("condition"):
        parts.append(f"condition ≥ {max(values['condition'] for values in record['condition'].values()):.1e}")
    if record.get("skipped"):
        parts.append(f"{record['skipped']} batches skipped")
    if record.get("exact_log_dets"):
        parts.append(f"{record['exact_log_dets']} log-dets exact (no convergence)")
    return parts


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(_plain(record), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """The same value for JSON, with NaN and inf as strings."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return str(value) if isinstance(value, float) and not isfinite(value) else value
