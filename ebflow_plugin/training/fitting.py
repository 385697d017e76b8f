"""fit(): a training loop that people can trust."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ebflow_plugin.errors import InputError, ResumeWarning
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives import Objective
from ebflow_plugin.objectives.checks import refuse_useless_context
from ebflow_plugin.plan.inputs import refuse_non_finite
from ebflow_plugin.plan.preprocessing import Dequantize
from ebflow_plugin.training.batches import Batches, LoaderBatches, batches
from ebflow_plugin.training.checkpoints import CheckpointFolder, check_saveable, compare, write_weights
from ebflow_plugin.training.distributed import Processes, processes, start_once
from ebflow_plugin.training.ema import EMA
from ebflow_plugin.training.loop import FATAL, Run, facts_of
from ebflow_plugin.training.options import (
    Settings,
    average,
    listeners,
    optimizer_of,
    scalar_objective,
    scheduler_of,
)
from ebflow_plugin.training.progress import Callback, JsonLines, Record, display
from ebflow_plugin.training.randomness import lend, mix, noise_of

__all__ = ["FitResult", "fit"]

VALIDATION_BATCH = 256


@dataclass(frozen=True)
class FitResult:
    """What :func:`fit` returns.

    Attributes:
        history: The metrics of each evaluation, as in the JSON lines.
        steps: How many steps were taken, those before a resume included.
        stopped: Why it ended: ``"steps"``, ``"patience"`` or ``"callback"``.
        start_nll: The validation NLL before the first step, after the start of ActNorms; None without validation.
        best_nll: The lowest validation NLL, the start's included, of the averaged weights if there is an EMA.
        best_step: Its step.
        best_state: Its weights, a state dict of the model on the CPU.
        skipped: How many batches were skipped since something was not finite.
        checkpoint: The folder of the checkpoints.
        metrics: The file of the JSON lines.
        ema: The average that was kept.

    Example:
        >>> FitResult(history=[], steps=3, stopped="steps").best_nll is None
        True
    """

    history: Sequence[Record]
    steps: int
    stopped: str
    start_nll: float | None = None
    best_nll: float | None = None
    best_step: int | None = None
    best_state: dict[str, Tensor] | None = None
    skipped: int = 0
    checkpoint: Path | None = None
    metrics: Path | None = None
    ema: EMA | None = None

    def load_best(self, model: EBFlow) -> None:
        """Returns a model the weights with the lowest validation NLL.

        Raises:
            InputError: If there was no validation data.
        """
        if self.best_state is None:
            raise InputError("there are no best weights: fit(…, validation=…) finds them")
        write_weights(model, self.best_state, "the best weights")

    def __repr__(self) -> str:
        best = "" if self.best_nll is None else f", best NLL {self.best_nll:.4f} at step {self.best_step}"
        return f"FitResult({self.steps} steps, stopped by {self.stopped}{best})"


def fit(
    objective: Objective,
    data: Any,
    *,
    optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int = 128,
    validation: Any = None,
    evaluate_every: int | None = None,
    patience: int | None = None,
    ema: bool | EMA | None = None,
    scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
    clip_norm: float | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: bool = True,
    callbacks: Iterable[Callback] = (),
    on_non_finite: str = "stop",
    conditioning: float = 0.0,
    calibrate: bool | str | None = None,
    metrics: str | os.PathLike[str] | None = None,
    progress: bool = True,
    seed: int = 0,
) -> FitResult:
    r"""Trains the model of an objective, with the exact NLL of validation data beside the loss.

    The optimum of score matching is not that of the likelihood: NLL can rise while the loss falls. So give
    ``validation``, choose by it (``result.load_best(model)``), and stop by it (``patience``). The model is left with
    its last weights.

    The same seed gives the same run, and a run that was killed at any moment and started again with the same
    arguments and ``checkpoint`` folder gives the same numbers as one that never was. All noise comes from generators
    of the run (or the objective's own); torch's global generators are as before afterwards.

    Under ``torchrun`` each process calls ``fit`` with the same arguments and its model on its own device. Batches are
    of ``batch_size`` rows in each process, gradients are averaged, and the first process writes the files.

    Arguments:
        objective: The loss; it holds the model.
        data: A tensor, a pair ``(tensor, context)``, a Dataset with a length, or a DataLoader. A DataLoader keeps its
            own batch size and order, which resuming finds again if its randomness comes from torch's generators. A
            context that the model makes no use of is refused.
        optimizer: An optimizer of all of the model's trainable parameters, or a function that makes one from them;
            Adam with a learning rate of 0.001 by default. To train some of them, freeze the others. None that needs a
            closure (LBFGS).
        steps: How many steps to take in all. This or ``epochs``.
        epochs: How often to go through the data. This or ``steps``.
        batch_size: Rows in a batch. Rows that do not fill one are left to the next epoch, which has another order.
        validation: Data as in ``data``, whose exact NLL is computed at each evaluation.
        evaluate_every: Steps between two evaluations, each of which is one record of the metrics. By default 20 in a
            run, and at least every 1000 steps; but fewer, and not less than 3 in a run, where an evaluation would go
            through more rows (of the validation data, and to calibrate of the data) than the steps before it.
        patience: Stops after so many evaluations without a better NLL.
        ema: Evaluates, and keeps as the best, averaged weights: True, or an :class:`~ebflow_plugin.EMA` of the model.
        scheduler: A learning-rate schedule, or a function that makes one from the optimizer; it moves at each step
            (``ReduceLROnPlateau`` at each evaluation, by the NLL of the validation data).
        clip_norm: The largest norm of the gradient of all parameters together.
        checkpoint: A folder for checkpoints (the last two), the best weights and the metrics.
        checkpoint_every: Steps between two checkpoints; as ``evaluate_every`` by default, or 20 in a run, and at least
            every 1000 steps.
        resume: Goes on from the last checkpoint of the folder, if there is one. Otherwise they are removed.
        callbacks: Functions of an :class:`~ebflow_plugin.training.progress.Event`, called at each evaluation; one that
            returns True ends the run.
        on_non_finite: ``"stop"`` raises a :class:`TrainingError` that names the step and the layer; ``"skip"`` leaves
            the batch out and counts (and stops after 10 in a row). On CUDA, ``"skip"`` waits for the device at each
            step, ``"stop"`` at every tenth.
        conditioning: The weight of a penalty on full layers that are nearly singular
            (:func:`~ebflow_plugin.plan.spectrum.conditioning_penalty`).
        calibrate: Calibrates the model at each evaluation (``"full"``, which True means too, or ``"diagonal"``; see
            :meth:`EBFlow.calibrate <ebflow_plugin.EBFlow.calibrate>`), and takes the NLL after it for the NLL: the
            best weights are the calibrated best. Training goes on without. One pass over the data each time, which
            makes evaluations rarer by default.
        metrics: A file for the metrics as JSON lines, ``metrics.jsonl`` in the checkpoint folder by default. A run
            that begins anew begins the file anew.
        progress: Shows a live display on a terminal (with rich), a line for each evaluation elsewhere.
        seed: Where all randomness comes from.

    Raises:
        InputError: If something in the arguments cannot work, before anything is trained.
        TrainingError: If the loss or a gradient is not finite.
        KeyboardInterrupt: On Ctrl-C; with ``checkpoint``, when one more step is taken and saved.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> flow = flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2]))
        >>> model = ebf.wrap(flow)
        >>> x = 3.0 * torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
        >>> result = fit(ebf.objectives.SSM(model), x[:400], steps=40, batch_size=50, validation=x[400:],
        ...              optimizer=lambda p: torch.optim.Adam(p, lr=0.03), ema=True, progress=False)
        >>> result.history[-1]["nll"] < result.history[0]["nll"]
        True
        >>> result.load_best(model)
        >>> result
        FitResult(40 steps, stopped by steps, best NLL ...)
    """
    model = scalar_objective("fit", objective).model
    device, told = model.like().device, listeners(callbacks)
    settings = Settings(
        steps=steps, epochs=epochs, batch_size=batch_size, evaluate_every=evaluate_every, patience=patience,
        clip_norm=clip_norm, checkpoint=checkpoint, checkpoint_every=checkpoint_every, resume=resume,
        on_non_finite=on_non_finite, conditioning=conditioning, calibrate=calibrate, metrics=metrics, progress=progress,
        seed=seed,
    )  # fmt: skip
    seed = settings.seed
    with ExitStack() as stack, torch.inference_mode(False), torch.enable_grad():
        group = processes(device)
        rank, world = group.rank, group.world
        source = batches(data, settings.batch_size, seed=seed, rank=rank, world=world)
        held_out = None
        if validation is not None:
            size = max(settings.batch_size, VALIDATION_BATCH)
            held_out = batches(validation, size, name="validation", shuffle=False, rank=rank, world=world)
        settings = settings.completed(source, held_out)
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        torch.manual_seed(mix(seed, "global", group.rank))
        noise = noise_of(objective, seed, group.rank, device)
        stack.enter_context(lend(noise))
        for name, part in (("data", source), ("validation", held_out)):
            if part is not None:
                _check_first(model, part, name, device)
        chosen = optimizer_of(objective, optimizer)
        schedule = scheduler_of(chosen, scheduler, validated=held_out is not None)
        check_saveable(
            optimizer=chosen.state_dict(), **({} if schedule is None else {"scheduler": schedule.state_dict()})
        )
        place = settings.checkpoint
        folder = None if place is None else group.on_first(lambda: CheckpointFolder(place))
        x, context = source.first()
        context = None if context is None else context.to(device)
        start_once(model, x.to(device), context, group, Generator(device).manual_seed(mix(seed, "start")))
        averaged = average(model, ema)
        state = _last_checkpoint(folder, group, settings.resume)
        facts = facts_of(objective, chosen, schedule, averaged, source, settings, group)
        exact = state is None or group.on_first(lambda: compare(place, facts, state["facts"], FATAL))
        path = settings.metrics or (None if folder is None else folder.path / "metrics.jsonl")
        first_told: list[Callback] = []
        if path is not None:
            lines = group.on_first(lambda: JsonLines(path, () if state is None else state["history"]))
            first_told.append(lines)
        if settings.progress:
            shown, open_display = display()
            first_told.append(shown)
            if group.first:
                stack.enter_context(open_display)
        generators = list({id(generator): generator for generator in noise.values()}.values())
        run = Run(
            objective, source, held_out, chosen, schedule, averaged, settings, group, generators, folder,
            (*first_told, *told) if group.first else told,
        )  # fmt: skip
        if state is not None and folder is not None:
            run.load(state, exact)
            _restore_best(run, folder, state)
        run.train()
        progressed = run.progress
        return FitResult(
            history=progressed.history,
            steps=progressed.step,
            stopped=progressed.stopped or "steps",
            start_nll=progressed.start_nll,
            best_nll=progressed.best_nll,
            best_step=progressed.best_step,
            best_state=run.best_state,
            skipped=progressed.skipped,
            checkpoint=None if folder is None else folder.path,
            metrics=path,
            ema=averaged,
        )


def _check_first(model: EBFlow, source: Batches | LoaderBatches, name: str, device: torch.device) -> None:
    """Looks at a batch before any work is done: shapes, types, NaN, labels that nobody uses."""
    x, context = source.first()
    try:
        x, context = x.to(device), None if context is None else context.to(device)
        model.check(x, context)
        if x.is_floating_point():
            refuse_non_finite("its first batch", x)
        for step in model.preprocessing:
            if isinstance(step, Dequantize):
                step.refuse(x)
        refuse_useless_context(model, x, context)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


def _last_checkpoint(folder: CheckpointFolder | None, group: Processes, resume: bool) -> dict[str, Any] | None:
    """What the last checkpoint holds, if there is one to go on from; otherwise what is there is removed."""
    if folder is None:
        return None
    if resume:
        return group.on_first(folder.load)
    group.on_first(folder.clear)
    return None


def _restore_best(run: Run, folder: CheckpointFolder, state: dict[str, Any]) -> None:
    if state["best_nll"] is None:
        return
    best = run.processes.on_first(lambda: _read_best(folder))
    if not isinstance(best, str):
        run.best_state = best
        return
    if run.processes.first:
        warnings.warn(
            f"the best weights so far are lost: {best}. The run goes on, and the best are those from step "
            f"{state['step']} on.",
            ResumeWarning,
            stacklevel=3,
        )
    run.seek_best_again()


def _read_best(folder: CheckpointFolder) -> dict[str, Tensor] | str:
    """The best weights of a run, or why there are none: the checkpoints are enough to go on."""
    try:
        found = folder.load_best()
    except InputError as error:
        return str(error)
    return f"{folder.path} holds none" if found is None else found[0]
