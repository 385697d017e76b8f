"""The loop of :func:`~ebflow_plugin.fit`: one :class:`Run`, its steps, evaluations and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ebflow_plugin.errors import EBFlowError, TrainingError, WriteError
from ebflow_plugin.objectives import Objective
from ebflow_plugin.objectives.base import waits_for_data
from ebflow_plugin.plan.inputs import Batch
from ebflow_plugin.plan.spectrum import FullLayer, conditioning_penalty, full_layers
from ebflow_plugin.training.batches import Batches, LoaderBatches
from ebflow_plugin.training.checkpoints import CheckpointFolder, atomic_write, identity, write_weights
from ebflow_plugin.training.distributed import Processes, parallel
from ebflow_plugin.training.ema import EMA
from ebflow_plugin.training.evaluation import calibrated, evaluate
from ebflow_plugin.training.guards import ConditionWatch, Finding, FiniteWatch, diagnose, failure, gradient_norms
from ebflow_plugin.training.interrupts import Interrupts
from ebflow_plugin.training.options import Settings
from ebflow_plugin.training.progress import Callback, Event, Record
from ebflow_plugin.training.randomness import mix, random_state, set_random_state

__all__ = ["Event", "Run"]

FATAL = ("model", "objective", "optimizer", "scheduler", "ema")
LOOK_EVERY = {"cpu": 1}  # steps between two looks at what is not finite; elsewhere a look waits for the device:
LOOK_EVERY_ELSEWHERE = 10
SKIPPED_IN_A_ROW = 10
NOT_FINITE = (
    "Lower the learning rate, clip gradients (clip_norm=), keep the layers away from singular ones (conditioning=), or "
    'leave out such batches (on_non_finite="skip").'
)

Source = Batches | LoaderBatches


@dataclass
class Progress:
    """What a run has come to: everything of it that is neither weights nor generators."""

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    stale: int = 0  # evaluations since the best one
    start_nll: float | None = None
    best_nll: float | None = None
    best_step: int | None = None
    seconds: float = 0.0
    counted: int = 0  # steps whose loss was summed since the last evaluation
    stopped: str = ""
    history: list[Record] = field(default_factory=list)


class PenalisedLoss(nn.Module):
    """An objective and the conditioning penalty: what DistributedDataParallel is put around."""

    def __init__(self, objective: Objective, layers: list[FullLayer], weight: float, generator: Generator) -> None:
        super().__init__()
        self.objective = objective
        self._layers, self._weight, self._generator = layers, weight, generator

    def forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """Computes the loss to minimise, and the value of the objective alone."""
        value: Tensor = self.objective(x, context)
        if not (self._weight and self._layers):
            return value, value.detach()
        return value + self._weight * conditioning_penalty(self._layers, self._generator), value.detach()


class Run:
    """A training run: everything that a checkpoint holds, and the loop.

    Arguments:
        objective: The loss; it holds the model.
        data: The training data.
        validation: The validation data, if any.
        optimizer: Of the trainable parameters.
        scheduler: Of the optimizer, if any.
        ema: Of the model, if any.
        settings: What was asked for, completed.
        processes: Who takes part.
        generators: What the objective draws from.
        folder: Of the checkpoints, if there are any.
        callbacks: Told of each evaluation.
    """

    def __init__(
        self,
        objective: Objective,
        data: Source,
        validation: Source | None,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        ema: EMA | None,
        settings: Settings,
        processes: Processes,
        generators: Sequence[Generator],
        folder: CheckpointFolder | None,
        callbacks: Sequence[Callback],
    ) -> None:
        self.objective, self.data, self.validation = objective, data, validation
        self.optimizer, self.scheduler, self.ema = optimizer, scheduler, ema
        self.settings, self.processes, self.folder, self.callbacks = settings, processes, folder, callbacks
        self.model = objective.model
        self.device = self.model.like().device
        self.progress = Progress()
        self.best_state: dict[str, Tensor] | None = None
        self.facts = facts_of(objective, optimizer, scheduler, ema, data, settings, processes)
        assert settings.steps is not None
        assert settings.evaluate_every is not None
        assert settings.checkpoint_every is not None
        self._steps, self._evaluate_every, self._save_every = (
            settings.steps, settings.evaluate_every, settings.checkpoint_every
        )  # fmt: skip
        self._probes = Generator(self.device).manual_seed(mix(settings.seed, "probes", processes.rank))
        self._generators = [*generators, *data.generators, self._probes]
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._parameters = list(trained.values())
        self._watch = FiniteWatch(list(trained), processes)
        layers = self._full_layers()
        self._conditions = ConditionWatch(layers)
        loss = PenalisedLoss(objective, layers, settings.conditioning, self._probes)
        self._loss: nn.Module = loss
        if processes.world > 1:
            self._loss = parallel(loss, self.device, unused=self._has_unused(loss))
        wide = torch.float32 if self.device.type == "mps" else torch.float64
        self._sum = torch.zeros((), dtype=wide, device=self.device)
        self._grad_norm = torch.zeros((), device=self.device)
        self._skip = settings.on_non_finite == "skip"
        self._look_every = 1 if self._skip else LOOK_EVERY.get(self.device.type, LOOK_EVERY_ELSEWHERE)

    def train(self) -> None:
        """Runs to the end, from wherever it is.

        Raises:
            KeyboardInterrupt: On Ctrl-C; with a folder for checkpoints, when the next step is saved.
        """
        interrupts = Interrupts(listen=self.folder is not None and self.processes.world == 1)
        try:
            with interrupts:
                self._run(interrupts)
        except Exception as error:
            if not interrupts.asked or isinstance(error, EBFlowError):
                raise
            # Ctrl-C reaches the workers of a DataLoader and the readers of pipes too, and those fail first.
            at = f"stopped in step {self.progress.step}; fit(…, resume=True) goes on from the last checkpoint"
            raise KeyboardInterrupt(at) from error
        finally:
            for parameter in self._parameters:
                parameter.grad = None
        if interrupts.asked:
            raise KeyboardInterrupt(f"stopped after step {self.progress.step}; fit(…, resume=True) goes on from there")

    def _run(self, interrupts: Interrupts) -> None:
        progress = self.progress
        if progress.step == 0 and self.validation is not None and not waits_for_data(self.model.core.plan):
            self._evaluate(self.validation)  # a good start can be the best there is
            progress.start_nll = progress.best_nll
        mark = time.monotonic(), progress.step
        stopping = False
        while progress.step < self._steps and not self._should_stop() and not stopping:
            stopping = interrupts.asked  # if it comes later, the next step is the last: no step is saved unlooked at
            progress.step += 1
            last = progress.step == self._steps
            due = progress.step % self._evaluate_every == 0 or last
            saving = self.folder is not None and (progress.step % self._save_every == 0 or last or stopping)
            self._take_step(look=due or saving)
            if due:
                mark = self._record(mark)
            if saving or (self._should_stop() and self.folder is not None):
                self.save(mark[0])

    def _take_step(self, look: bool) -> None:
        progress, settings, parameters = self.progress, self.settings, self._parameters
        for parameter in parameters:
            parameter.grad = None
        batch = self._to_device(*self.data.next())
        loss, value = self._loss(*batch)
        if loss.requires_grad:
            torch.autograd.backward(loss, inputs=parameters)
        norms = gradient_norms(parameters, self._sum)
        self._watch.see(progress.step, value, norms)
        if look or progress.step % self._look_every == 0:
            finding = self._watch.look()
            if finding is not None:
                self._not_finite(finding, batch)
                return
        progress.skipped_in_a_row = 0
        self._grad_norm = torch.linalg.vector_norm(norms)
        if settings.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, settings.clip_norm, self._grad_norm)
        self.optimizer.step()
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
        if self.ema is not None:
            self.ema.update()
        self._sum += value
        progress.counted += 1

    def _not_finite(self, finding: Finding, batch: Batch) -> None:
        """Leaves out the batch, or stops and says why."""
        progress = self.progress
        if self._skip:
            progress.skipped += 1
            progress.skipped_in_a_row += 1
            if progress.skipped_in_a_row < SKIPPED_IN_A_ROW:
                return
        lines = diagnose(self.model, *batch) if finding.step == progress.step else []
        if self._skip:
            lines.append(f"{progress.skipped_in_a_row} batches in a row were skipped")
        raise failure(self.model, finding, lines, self._save_failure(finding.step) + NOT_FINITE)

    def _save_failure(self, step: int) -> str:
        if self.folder is None:
            return ""
        state, path = self._state(0.0), self.folder.path / f"failed-{step:08d}.pt"
        try:
            if self.processes.first:
                atomic_write(path, lambda file: torch.save(state, file))
        except WriteError as error:  # the failure that brought us here is what matters
            return f"The state could not be saved: {error} "
        return f"The state is in {path}; fit(…, resume=True) goes on from the last checkpoint before it. "

    def _record(self, mark: tuple[float, int]) -> tuple[float, int]:
        """Evaluates, and tells everyone."""
        progress = self.progress
        now = time.monotonic()
        record: Record = {
            "step": progress.step,
            "epoch": self.data.epoch,
            "loss": self._mean_loss(),
            "grad_norm": float(self._grad_norm),
            "lr": float(self.optimizer.param_groups[0]["lr"]),
        }
        self._sum.zero_()
        progress.counted = 0
        spectra = self._conditions.look(progress.step)
        if self.validation is not None:
            record.update(self._evaluate(self.validation))
            if isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.step(record["nll"])
            record["best_nll"] = progress.best_nll
        if spectra:
            record["condition"] = {
                path: {"smallest": found.smallest, "condition": found.condition} for path, found in spectra.items()
            }
        if progress.skipped:
            record["skipped"] = progress.skipped
        record.update(self._objective_metrics())
        passed = now - mark[0]
        progress.seconds += passed
        record["seconds"] = progress.seconds
        record["steps_per_second"] = (progress.step - mark[1]) / passed if passed > 0 else 0.0
        progress.history.append(record)
        left = time_left(
            progress.step, self._steps, self._evaluate_every, record["steps_per_second"], time.monotonic() - now
        )
        event = Event(progress.step, record, self.model, self.ema, self._steps, progress.start_nll, left)
        for callback in self.callbacks:
            if callback(event) is True:
                progress.stopped = "callback"
        return time.monotonic(), progress.step

    def _objective_metrics(self) -> Record:
        """What the objective shows: that of the first process, with the counts of all."""
        found = self.processes.gather(self.objective.metrics())
        counts = {name for name, value in found[0].items() if isinstance(value, int)}
        return {**found[0], **{name: sum(each.get(name, 0) for each in found) for name in counts}}

    def _evaluate(self, validation: Source) -> Record:
        """NLL on the validation data with the averaged weights, calibrated if asked for; keeps the best ones."""
        try:
            return self._likelihood(validation)
        except WriteError:
            raise
        except EBFlowError as error:
            step = self.progress.step
            raise TrainingError(f"step {step}: {error}\n{self._save_failure(step)}") from error

    def _likelihood(self, validation: Source) -> Record:
        progress, seed = self.progress, self.settings.seed
        with self.ema.applied() if self.ema is not None else nullcontext(), self._calibrated():
            nll, bits, uncalibrated = evaluate(self.model, validation, seed, self.processes)
            found: Record = {"nll": nll, "bits_per_dim": bits}
            if self.settings.calibration is not None:
                found["nll_uncalibrated"] = uncalibrated
            if math.isnan(nll):
                raise TrainingError("the NLL on the validation data is not a number")
            progress.stale += 1
            if progress.best_nll is None or nll < progress.best_nll:
                progress.best_nll, progress.best_step, progress.stale = nll, progress.step, 0
                self.best_state = {
                    name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()
                }
                if self.folder is not None and self.processes.first:
                    self.folder.save_best(self.best_state, {"step": progress.step, **found})
        return found

    @contextmanager
    def _calibrated(self) -> Iterator[None]:
        """Calibrates the model for the duration of a ``with`` block. Nothing that follows changes by it."""
        rows = (self._to_device(*batch) for batch in self.data.once())
        drawn = random_state(self.device, self._generators)
        try:
            with calibrated(self.model, rows, self.settings.calibration):
                yield
        finally:
            set_random_state(drawn, self.device, self._generators)

    def _should_stop(self) -> bool:
        progress = self.progress
        if self.settings.patience is not None and progress.stale >= self.settings.patience:
            progress.stopped = "patience"
        return bool(progress.stopped)

    def _mean_loss(self) -> float:
        """The mean loss since the last evaluation, over all processes."""
        total = self.processes.total(torch.stack([self._sum, torch.full_like(self._sum, self.progress.counted)]))
        value, count = total.tolist()
        return value / count if count else float("nan")

    def _to_device(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        there = None if context is None else context.to(self.device, non_blocking=True)
        return x.to(self.device, non_blocking=True), there

    def _full_layers(self) -> list[FullLayer]:
        x, _ = self._to_device(*self.data.first())
        u, _ = self.model.preprocess(x[:1], Generator(self.device).manual_seed(0))
        try:
            return full_layers(self.model.core.plan, tuple(u.shape[1:]))
        except (EBFlowError, ValueError):  # a step of unknown class changes the shape
            return []

    def _has_unused(self, loss: PenalisedLoss) -> bool:
        """Whether the loss of the first batch leaves out parameters. Nothing that follows changes by asking."""
        kept, known = random_state(self.device, self._generators), self.objective.state()
        x, context = self._to_device(*self.data.first())
        value, _ = loss(x, context)
        found = torch.autograd.grad(value, self._parameters, allow_unused=True)
        set_random_state(kept, self.device, self._generators)
        self.objective.load_state(known)
        flag = torch.tensor(int(any(gradient is None for gradient in found)), device=self.device)
        return bool(self.processes.maximum(flag))

    def _state(self, since: float) -> dict[str, Any]:
        """Everything that the run is. All processes must ask for it together."""
        progress = self.progress
        mine = {"random": random_state(self.device, self._generators), "data": self.data.state()}
        ranks = self.processes.gather({**mine, "loss": float(self._sum), "objective": self.objective.state()})
        seconds = progress.seconds + (time.monotonic() - since if since else 0.0)
        return {
            **{name: value for name, value in vars(progress).items() if name not in ("seconds", "stopped")},
            "seconds": seconds,
            "ranks": ranks,
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "facts": self.facts,
        }

    def seek_best_again(self) -> None:
        """Begins the search for the best weights anew, with the present ones: those of before are lost."""
        self.progress.best_nll = self.progress.best_step = self.best_state = None
        if self.validation is not None:
            self._evaluate(self.validation)

    def save(self, since: float) -> None:
        """Writes a checkpoint, from the first process."""
        state = self._state(since)
        if self.folder is not None and self.processes.first:
            self.folder.save(state)

    def load(self, state: dict[str, Any], exact: bool) -> None:
        """Goes on from a checkpoint of a run with the same model, objective and optimiser.

        Arguments:
            state: What the checkpoint holds.
            exact: Whether to go on as if never interrupted. Else, with another batch size or number of processes, from
                the start of the epoch, with new noise.
        """
        write_weights(self.model, state["model"], "the weights in the checkpoint")
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        for name in vars(self.progress):
            if name in state:
                setattr(self.progress, name, state[name])
        ranks = state["ranks"]
        if exact:
            mine = ranks[self.processes.rank]
            self.data.load(mine["data"], self.device)
            set_random_state(mine["random"], self.device, self._generators)
            self._sum.fill_(mine["loss"])
            self.objective.load_state(mine.get("objective", {}))  # earlier versions had none
        else:  # another batch size or number of processes: from the start of the epoch, with new noise
            self.data.load({"epoch": ranks[0]["data"]["epoch"], "position": 0}, self.device)
            for place, generator in enumerate(self._generators):
                generator.manual_seed(mix(self.settings.seed, "again", place, state["step"], self.processes.rank))


def facts_of(
    objective: Objective,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    ema: EMA | None,
    data: Source,
    settings: Settings,
    processes: Processes,
) -> dict[str, str]:
    """What a run is, in words: a checkpoint must agree on it."""
    numbers = f"clip_norm={settings.clip_norm}, conditioning={settings.conditioning}"
    return {
        **identity(objective, optimizer, scheduler, ema),
        "data": str(data),
        "seed": str(settings.seed),
        "processes": str(processes.world),
        "training": f"accumulate=1, {numbers}, amp=False",  # in the words of the first format
        "evaluation": f"calibrate={settings.calibration}, on_non_finite={settings.on_non_finite}",
    }


def time_left(step: int, total: int, every: int, speed: float, evaluation: float) -> float:
    """How long a run will take, in seconds: the steps, and the evaluations among them.

    Arguments:
        step: Where it is.
        total: How many steps there are.
        every: Steps between two evaluations; there is one at the end too.
        speed: Steps in a second.
        evaluation: Seconds for an evaluation.

    Example:
        >>> time_left(step=100, total=250, every=100, speed=10.0, evaluation=5.0)
        25.0
    """
    evaluations = total // every - step // every + (total % every > 0) if step < total else 0
    return ((total - step) / speed if speed else 0.0) + evaluations * evaluation
