"""The loop of :func:`~ebflow_plugin.fit`: one :class:`Run`, its steps, evaluations and checkpoints."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ebflow_plugin.errors import EBFlowError, ResumeWarning, TrainingError, WriteError
from ebflow_plugin.linalg.random import mix, random_state, set_random_state
from ebflow_plugin.objectives import Objective
from ebflow_plugin.objectives.evaluation import LikelihoodSum, calibrated
from ebflow_plugin.objectives.noise import noise_of, use_generators
from ebflow_plugin.plan.inputs import Batch
from ebflow_plugin.plan.spectrum import ConditionWatch, FullLayer, conditioning_penalty, full_layers
from ebflow_plugin.training.batches import Batches, LoaderBatches, batches
from ebflow_plugin.training.checkpoints import CheckpointFolder, check_saveable, compare, write_weights
from ebflow_plugin.training.distributed import parallel, processes, start_once
from ebflow_plugin.training.guards import Finding, FiniteWatch, diagnose, failure, gradient_norms
from ebflow_plugin.training.interrupts import Interrupts
from ebflow_plugin.training.options import Settings, average, check_batch, optimizer_of, scheduler_of
from ebflow_plugin.training.progress import Callback, Event, JsonLines, Record, display

__all__ = ["Event", "Run"]

VALIDATION_BATCH = 256
CHECK_EVERY = {"cpu": 1}  # steps between two checks of losses and gradients, by device
CHECK_EVERY_ELSEWHERE = 10  # since a check synchronises with the device
SKIPPED_IN_A_ROW = 10
NOT_FINITE = (
    "Lower the learning rate, clip gradients (clip_norm=), keep the layers well-conditioned (conditioning=), or skip "
    'such batches (on_non_finite="skip").'
)
NEARLY_SINGULAR = (
    "Add conditioning=0.01 (or more) to fit(), lower the learning rate, or mix in a little likelihood: "
    "0.99 * SSM(model) + 0.01 * ML(model)."
)

Source = Batches | LoaderBatches


@dataclass
class Progress:
    """The progress of a run: all of its state that is neither weights nor generators."""

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
    """An objective with the conditioning penalty, as one module for DistributedDataParallel."""

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
    """A training run: the state of a checkpoint, and the loop. Its constructor resumes from a checkpoint.

    Arguments:
        objective: The loss; it holds the model.
        data: The training data.
        settings: The other arguments of ``fit``.
        stack: Closes the contexts that the run opens: of the random state, the generators, the display.
    """

    def __init__(self, objective: Objective, data: Any, settings: Settings, stack: ExitStack) -> None:
        self.objective, self.model, self.settings = objective, objective.model, settings
        self.device = device = self.model.like().device
        self.processes = group = processes(device)
        rank, world = group.rank, group.world
        self.data: Source = batches(data, settings.batch_size, seed=settings.seed, rank=rank, world=world)
        self.validation: Source | None = None
        if settings.validation is not None:
            size = max(settings.batch_size, VALIDATION_BATCH)
            held_out = settings.validation
            self.validation = batches(held_out, size, name="validation", shuffle=False, rank=rank, world=world)
        self.pace = settings.pace(self.data, self.validation)
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        torch.manual_seed(mix(settings.seed, "global", group.rank))
        noise = noise_of(objective, settings.seed, group.rank, device)
        stack.enter_context(use_generators(noise))
        first = self._to_device(*self.data.first())
        check_batch(self.model, "data", *first)
        if self.validation is not None:
            check_batch(self.model, "validation", *self._to_device(*self.validation.first()))
        self.optimizer = optimizer_of(objective, settings.optimizer)
        self.scheduler = scheduler_of(self.optimizer, settings.scheduler, validated=self.validation is not None)
        check_saveable(optimizer=self.optimizer, scheduler=self.scheduler)
        place = settings.checkpoint
        self.folder = None if place is None else group.on_first(lambda: CheckpointFolder(place))
        start_once(self.model, *first, group, Generator(device).manual_seed(mix(settings.seed, "start")))
        self.ema = average(self.model, settings.ema)
        self.facts = {
            **settings.facts(objective, self.optimizer, self.scheduler, self.ema),
            "data": str(self.data),
            "processes": str(group.world),
        }
        state: dict[str, Any] | None = None
        if self.folder is not None and settings.resume:
            state = group.on_first(self.folder.load)
        elif self.folder is not None:
            group.on_first(self.folder.clear)
        exact = state is None or group.on_first(lambda: compare(place, self.facts, state["facts"]))
        self.metrics = settings.metrics or (None if self.folder is None else self.folder.path / "metrics.jsonl")
        self.callbacks = self._callbacks(() if state is None else state["history"], stack)
        self.progress = Progress()
        self.best_state: dict[str, Tensor] | None = None
        self._probes = Generator(device).manual_seed(mix(settings.seed, "probes", group.rank))
        self._generators = [*dict.fromkeys(noise.values()), *self.data.generators, self._probes]
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._parameters = list(trained.values())
        self._watch = FiniteWatch(list(trained), group)
        layers = self._full_layers(first[0])
        self._conditions = ConditionWatch(layers, advice=NEARLY_SINGULAR)
        self._loss: nn.Module = PenalisedLoss(objective, layers, settings.conditioning, self._probes)
        if group.world > 1:
            self._loss = parallel(self._loss, device, unused=self._has_unused(*first))
        self._sum = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        self._grad_norm = torch.zeros((), device=device)
        self._validation_seed = mix(settings.seed, "validation", group.rank)
        self._skip = settings.on_non_finite == "skip"
        self._check_every = 1 if self._skip else CHECK_EVERY.get(device.type, CHECK_EVERY_ELSEWHERE)
        if state is not None:
            self._load(state, exact)

    def _callbacks(self, history: Sequence[Record], stack: ExitStack) -> tuple[Callback, ...]:
        """The user's callbacks; in the first process, the metrics file and the display before them."""
        ours: list[Callback] = []
        path = self.metrics
        if path is not None:
            ours.append(self.processes.on_first(lambda: JsonLines(path, history)))
        if self.settings.progress and self.processes.first:
            shown, context = display()
            stack.enter_context(context)
            ours.append(shown)
        return (*ours, *self.settings.callbacks) if self.processes.first else self.settings.callbacks

    def _full_layers(self, x: Tensor) -> list[FullLayer]:
        plan, u, _ = self.model.match(x[:1], None, Generator(self.device).manual_seed(0))
        try:
            return full_layers(plan, tuple(u.shape[1:]))
        except (EBFlowError, ValueError):  # a step of unknown class changes the shape
            return []

    def _has_unused(self, x: Tensor, context: Tensor | None) -> bool:
        """Whether the loss of the first batch does not depend on some parameters. All state is restored."""
        random, state = random_state(self.device, self._generators), self.objective.state()
        value, _ = self._loss(x, context)
        gradients = torch.autograd.grad(value, self._parameters, allow_unused=True)
        set_random_state(random, self.device, self._generators)
        self.objective.load_state(state)
        flag = torch.tensor(int(any(gradient is None for gradient in gradients)), device=self.device)
        return bool(self.processes.maximum(flag))

    def _to_device(self, x: Tensor, context: Tensor | None) -> Batch:
        context = None if context is None else context.to(self.device, non_blocking=True)
        return x.to(self.device, non_blocking=True), context

    def train(self) -> None:
        """Trains from the current step to the end.

        Raises:
            KeyboardInterrupt: On Ctrl-C; with a folder for checkpoints, after the next step is saved.
        """
        interrupts = Interrupts(listen=self.folder is not None and self.processes.world == 1)
        try:
            with interrupts:
                self._run(interrupts)
        except Exception as error:
            if not interrupts.asked or isinstance(error, EBFlowError):
                raise
            # Ctrl-C also reaches the workers of a DataLoader and the readers of pipes, which then fail first.
            message = f"stopped in step {self.progress.step}; fit(…, resume=True) resumes from the last checkpoint"
            raise KeyboardInterrupt(message) from error
        finally:
            for parameter in self._parameters:
                parameter.grad = None
        if interrupts.asked:
            raise KeyboardInterrupt(f"stopped after step {self.progress.step}; fit(…, resume=True) resumes from there")

    def _run(self, interrupts: Interrupts) -> None:
        progress, pace = self.progress, self.pace
        if progress.step == 0 and self.validation is not None and not self.model.core_plan.waits_for_data():
            self._evaluate(self.validation)  # the start may have the best weights of the run
            progress.start_nll = progress.best_nll
        mark = time.monotonic(), progress.step
        stopping = False
        while progress.step < pace.steps and not self._should_stop() and not stopping:
            stopping = interrupts.asked  # one that comes later stops after the next step: every saved step was checked
            progress.step += 1
            last = progress.step == pace.steps
            due = progress.step % pace.evaluate_every == 0 or last
            saving = self.folder is not None and (progress.step % pace.save_every == 0 or last or stopping)
            self._take_step(check=due or saving)
            if due:
                mark = self._record(mark)
            if self.folder is not None and (saving or self._should_stop()):
                state = self._state(mark[0])
                if self.processes.first:
                    self.folder.save(state)

    def _should_stop(self) -> bool:
        progress = self.progress
        if self.settings.patience is not None and progress.stale >= self.settings.patience:
            progress.stopped = "patience"
        return bool(progress.stopped)

    def _take_step(self, check: bool) -> None:
        progress, parameters = self.progress, self._parameters
        for parameter in parameters:
            parameter.grad = None
        batch = self._to_device(*self.data.next())
        loss, value = self._loss(*batch)
        if loss.requires_grad:
            torch.autograd.backward(loss, inputs=parameters)
        norms = gradient_norms(parameters, self._sum)
        self._watch.record(progress.step, value, norms)
        if check or progress.step % self._check_every == 0:
            finding = self._watch.check()
            if finding is not None:
                self._not_finite(finding, batch)
                return
        progress.skipped_in_a_row = 0
        self._grad_norm = torch.linalg.vector_norm(norms)
        if self.settings.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.settings.clip_norm, self._grad_norm)
        self.optimizer.step()
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
        if self.ema is not None:
            self.ema.update()
        self._sum += value
        progress.counted += 1

    def _not_finite(self, finding: Finding, batch: Batch) -> None:
        """Skips the batch, or raises the error with its cause."""
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
        state, name = self._state(0.0), f"failed-{step:08d}.pt"
        try:
            if self.processes.first:
                self.folder.write(name, state)
        except WriteError as error:  # the first failure is the one to raise
            return f"The state could not be saved: {error} "
        path = self.folder.path / name
        return f"The state is in {path}; fit(…, resume=True) resumes from the last checkpoint before it. "

    def _record(self, mark: tuple[float, int]) -> tuple[float, int]:
        """Evaluates, appends the record, and calls the callbacks."""
        progress, now = self.progress, time.monotonic()
        total = self.processes.total(torch.stack([self._sum, torch.full_like(self._sum, progress.counted)]))
        value, count = total.tolist()
        record: Record = {
            "step": progress.step,
            "epoch": self.data.epoch,
            "loss": value / count if count else math.nan,
            "grad_norm": float(self._grad_norm),
            "lr": float(self.optimizer.param_groups[0]["lr"]),
        }
        self._sum.zero_()
        progress.counted = 0
        spectra = self._conditions.check(progress.step)
        if self.validation is not None:
            record.update(self._evaluate(self.validation))
            if isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.step(record["nll"])
            record["best_nll"] = progress.best_nll
        if spectra:
            record["condition"] = {
                path: {"smallest": one.smallest, "condition": one.condition} for path, one in spectra.items()
            }
        if progress.skipped:
            record["skipped"] = progress.skipped
        gathered = self.processes.gather(self.objective.metrics())  # the first process's, with the counts of all summed
        counts = {name for name, value in gathered[0].items() if isinstance(value, int)}
        record.update({**gathered[0], **{name: sum(each.get(name, 0) for each in gathered) for name in counts}})
        passed = now - mark[0]
        progress.seconds += passed
        record["seconds"] = progress.seconds
        speed = record["steps_per_second"] = (progress.step - mark[1]) / passed if passed > 0 else 0.0
        progress.history.append(record)
        left = self.pace.seconds_left(progress.step, speed, time.monotonic() - now)
        event = Event(progress.step, record, self.model, self.ema, self.pace.steps, progress.start_nll, left)
        for callback in self.callbacks:
            if callback(event) is True:
                progress.stopped = "callback"
        return time.monotonic(), progress.step

    def _evaluate(self, validation: Source) -> Record:
        """The NLL of the validation data with the averaged weights, calibrated on request; saves the best weights."""
        kind, random = self.settings.calibration, random_state(self.device, self._generators)
        try:
            rows = (self._to_device(*batch) for batch in self.data.once())
            with nullcontext() if self.ema is None else self.ema.applied(), calibrated(self.model, rows, kind):
                total = LikelihoodSum(self.model, Generator(self.device).manual_seed(self._validation_seed))
                for x, context in validation.once():
                    total.add(x, context)
                nll, bits, uncalibrated = total.mean(self.processes.total)
                if math.isnan(nll):
                    raise TrainingError("the NLL on the validation data is not a number")
                record: Record = {"nll": nll, "bits_per_dim": bits}
                if kind is not None:
                    record["nll_uncalibrated"] = uncalibrated
                self._save_if_best(record)
        except WriteError:
            raise
        except EBFlowError as error:
            step = self.progress.step
            raise TrainingError(f"step {step}: {error}\n{self._save_failure(step)}") from error
        finally:
            set_random_state(random, self.device, self._generators)  # calibrating draws from them
        return record

    def _save_if_best(self, record: Record) -> None:
        progress, nll = self.progress, record["nll"]
        progress.stale += 1
        if progress.best_nll is None or nll < progress.best_nll:
            progress.best_nll, progress.best_step, progress.stale = nll, progress.step, 0
            self.best_state = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
            if self.folder is not None and self.processes.first:
                self.folder.save_best(self.best_state, {"step": progress.step, **record})

    def _state(self, since: float) -> dict[str, Any]:
        """The complete state of the run. A collective call of all processes."""
        own = {"random": random_state(self.device, self._generators), "data": self.data.state()}
        ranks = self.processes.gather({**own, "loss": float(self._sum), "objective": self.objective.state()})
        progress = {name: value for name, value in vars(self.progress).items() if name != "stopped"}
        progress["seconds"] += time.monotonic() - since if since else 0.0
        return {
            **progress,
            "ranks": ranks,
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "facts": self.facts,
        }

    def _load(self, state: dict[str, Any], exact: bool) -> None:
        """Resumes from a checkpoint of a run with the same model, objective and optimiser.

        If ``exact``, as if never interrupted. If not (with another batch size or number of processes, say), from the
        start of the epoch, with new noise.
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
            own = ranks[self.processes.rank]
            self.data.load(own["data"], self.device)
            set_random_state(own["random"], self.device, self._generators)
            self._sum.fill_(own["loss"])
            self.objective.load_state(own.get("objective", {}))  # earlier versions did not save it
        else:
            self.data.load({"epoch": ranks[0]["data"]["epoch"], "position": 0}, self.device)
            for place, generator in enumerate(self._generators):
                generator.manual_seed(mix(self.settings.seed, "again", place, state["step"], self.processes.rank))
        if state["best_nll"] is not None:
            self._load_best()

    def _load_best(self) -> None:
        """Loads the best weights so far. If they are lost, the run continues, and searches for the best from here."""
        assert self.folder is not None
        best = self.processes.on_first(self.folder.find_best)
        if not isinstance(best, str):
            self.best_state = best
            return
        progress = self.progress
        if self.processes.first:
            warnings.warn(
                f"the best weights so far are lost: {best}. The run continues, and the best are those from step "
                f"{progress.step} on.",
                ResumeWarning,
                stacklevel=5,
            )
        progress.best_nll = progress.best_step = None
        if self.validation is not None:
            self._evaluate(self.validation)
