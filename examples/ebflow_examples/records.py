"""What a run of ``ebflow train`` records and shows: the metrics file, lines, and a live display. Imports Lightning."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from torch import Tensor

from ebflow_examples.console import as_lines
from ebflow_plugin.lightning import ConditionGuard, ExactNLL, FiniteGuard
from ebflow_plugin.training.events import Event, Record, describe
from ebflow_plugin.training.files import atomic_write

METRICS = "metrics.jsonl"


class Records(Callback):
    """One record for each validation: kept for the summary, written as a JSON line, and shown.

    It is part of the checkpoints, so that a resumed run has the records of an uninterrupted one.

    Attributes:
        history: The records so far.
    """

    def __init__(self, folder: Path, progress: bool) -> None:
        self.history: list[Record] = []
        self._path, self._progress = folder / METRICS, progress
        self._shown = ExitStack()
        self._seconds, self._counted = 0.0, 0
        self._sum: Tensor | float = 0.0  # of the losses, on the device

    def state_dict(self) -> dict[str, Any]:
        """All but what is shown."""
        seconds = self._seconds + (time.monotonic() - self._mark[0] if self._counted else 0.0)
        return {"history": self.history, "seconds": seconds, "counted": self._counted, "loss": float(self._sum)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there."""
        self.history, self._seconds = state_dict["history"], state_dict["seconds"]
        self._counted, self._sum = state_dict["counted"], state_dict["loss"]

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        """Writes the file anew, with the records so far: a killed run may have written more."""
        self._write(trainer)

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        """Shows the NLL of the start."""
        self._began = self._mark = time.monotonic(), trainer.global_step
        self._show: Callable[[Event], object] = lambda event: None
        if self._progress and trainer.is_global_zero:
            self._show = self._shown.enter_context(display())
        start = _piece(trainer, ExactNLL).start_nll
        if start is not None and not trainer.global_step:
            self._show(Event(0, {"nll": start}, module.objective.model, steps=trainer.max_steps))

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        """Sums the loss, on the device."""
        self._sum = module.last[1].double() + self._sum
        self._counted += 1

    def on_validation_start(self, trainer: Trainer, module: Any) -> None:
        """Stops the clock: validation is no training."""
        now = time.monotonic()
        self._seconds += now - self._mark[0]
        self._speed = (trainer.global_step - self._mark[1]) / max(now - self._mark[0], 1e-9)

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        """Makes the record."""
        found, calibration = module.evaluated[1:]
        counted = torch.tensor([float(self._sum), float(self._counted)], dtype=torch.float64)
        sums = trainer.strategy.reduce(counted, reduce_op="sum")
        start = _piece(trainer, ExactNLL).start_nll
        best = min(each for each in (start, found.nll, *(r["nll"] for r in self.history)) if each is not None)
        record: Record = {
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "loss": float(sums[0] / sums[1]),
            "grad_norm": float(torch.linalg.vector_norm(_piece(trainer, FiniteGuard).norms)),
            "lr": float(trainer.optimizers[0].param_groups[0]["lr"]),
            "nll": found.nll,
            "bits_per_dim": found.bits_per_dim,
            "best_nll": best,
            "seconds": self._seconds,
            "steps_per_second": self._speed,
        }
        if calibration is not None:
            record["nll_uncalibrated"] = found.uncalibrated
        guard = _piece(trainer, ConditionGuard)
        if guard is not None and guard.spectra:
            record["condition"] = {
                path: {"smallest": one.smallest, "condition": one.condition} for path, one in guard.spectra.items()
            }
        record.update(module.objective.metrics())
        self.history.append(record)
        self._write(trainer)
        passed, taken = time.monotonic() - self._began[0], trainer.global_step - self._began[1]
        left = passed / taken * (trainer.max_steps - trainer.global_step)
        event = Event(trainer.global_step, record, module.objective.model, None, trainer.max_steps, left)
        self._show(event)
        self._sum, self._counted = 0.0, 0
        self._mark = time.monotonic(), trainer.global_step

    def teardown(self, trainer: Trainer, module: Any, stage: str) -> None:
        """Leaves the last state on the screen."""
        self._shown.close()

    def _write(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            atomic_write(self._path, lambda file: file.write(as_lines(self.history)))

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        """The same."""
        self.teardown(trainer, module, "fit")


def _piece(trainer: Trainer, kind: type[Callback]) -> Any:
    """The callback of a kind; None without one."""
    pieces: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((piece for piece in pieces if isinstance(piece, kind)), None)


@contextmanager
def display() -> Iterator[Callable[[Event], object]]:
    """What shows the evaluations of a run: live on a terminal, else a line for each."""
    if not sys.stderr.isatty():
        yield lambda event: print(event, file=sys.stderr, flush=True)
        return
    with Live(console=Console(stderr=True), refresh_per_second=4) as live:

        def show(event: Event) -> None:
            bar, (step, *pace) = Table.grid(padding=(0, 2, 0, 0)), event.pace()
            bar.add_row(step, ProgressBar(event.steps, event.step, width=40), *pace)
            live.update(Group(bar, "  ".join(describe(event.record))), refresh=True)

        yield show
