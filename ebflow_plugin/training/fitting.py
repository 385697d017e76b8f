"""fit(): training with validation, checkpoints and guards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ebflow_plugin.ema import EMA
from ebflow_plugin.errors import InputError
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives import Objective
from ebflow_plugin.training.checkpoints import write_weights
from ebflow_plugin.training.loop import Run
from ebflow_plugin.training.options import Settings, scalar_objective
from ebflow_plugin.training.progress import Callback, Record

__all__ = ["FitResult", "fit"]


@dataclass(frozen=True)
class FitResult:
    """The result of :func:`fit`.

    Attributes:
        history: The metrics of each evaluation, as in the JSON lines.
        steps: The number of steps, including those before a resume.
        stopped: Why it ended: ``"steps"``, ``"patience"`` or ``"callback"``.
        start_nll: The validation NLL before the first step, after ActNorms were initialised; None without validation.
        best_nll: The lowest validation NLL, including that of the start; of the averaged weights if there is an EMA.
        best_step: Its step.
        best_state: Its weights, a state dict of the model on the CPU.
        skipped: The number of batches that were skipped because something was not finite.
        checkpoint: The folder of the checkpoints.
        metrics: The file of the JSON lines.
        ema: The EMA of the weights, if there is one.

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
        """Loads the weights with the lowest validation NLL into a model.

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

    The optimum of score matching is not that of the likelihood: the NLL can rise while the loss falls. So pass
    ``validation``, select weights by it (``result.load_best(model)``), and stop by it (``patience``). After training,
    the model has its last weights.

    The same seed yields the same run. A run that is killed at any moment and started again with the same arguments and
    ``checkpoint`` folder yields the same numbers as an uninterrupted one. All noise comes from generators of the run
    (or the objective's own); the state of torch's global generators is restored.

    Under ``torchrun`` each process calls ``fit`` with the same arguments and its model on its own device. Each process
    uses batches of ``batch_size`` rows, gradients are averaged, and the first process writes the files.

    Arguments:
        objective: The loss; it holds the model.
        data: A tensor, a pair ``(tensor, context)``, a Dataset with a length, or a DataLoader. A DataLoader keeps its
            own batch size and order, which a resumed run reproduces if its randomness comes from torch's generators.
            A context that the model does not use raises an error.
        optimizer: An optimizer of all trainable parameters of the model, or a function that builds one from them; Adam
            with a learning rate of 0.001 by default. To train only some parameters, freeze the others. Optimizers that
            need a closure (LBFGS) are not supported.
        steps: The total number of steps. This or ``epochs``.
        epochs: The number of passes over the data. This or ``steps``.
        batch_size: Rows in a batch. Rows that do not fill a batch are left out of the epoch.
        validation: Data as in ``data``, whose exact NLL is computed at each evaluation.
        evaluate_every: Steps between two evaluations, each of which is one record of the metrics. By default 20 in a
            run, and at least every 1000 steps; but fewer, down to 3 in a run, if an evaluation would process more rows
            (of the validation data, and of the data to calibrate) than the steps before it.
        patience: Stops after this many evaluations without a better NLL.
        ema: Evaluates averaged weights, and keeps the best of them: True, or an :class:`~ebflow_plugin.EMA` of the
            model.
        scheduler: A learning-rate scheduler, or a function that builds one from the optimizer. It is stepped after each
            step (``ReduceLROnPlateau`` after each evaluation, with the validation NLL).
        clip_norm: The largest norm of the gradient of all parameters together.
        checkpoint: A folder for checkpoints (the last two), the best weights and the metrics.
        checkpoint_every: Steps between two checkpoints; as ``evaluate_every`` by default, or 20 in a run, and at least
            every 1000 steps.
        resume: Resumes from the last checkpoint in the folder, if there is one. If False, existing checkpoints are
            removed.
        callbacks: Functions of an :class:`~ebflow_plugin.training.progress.Event`, called at each evaluation. If one
            returns True, the run stops.
        on_non_finite: ``"stop"`` raises a :class:`TrainingError` that names the step and the layer; ``"skip"`` skips
            and counts the batch (and stops after 10 in a row). On CUDA, ``"skip"`` synchronises with the device in each
            step, ``"stop"`` in every tenth.
        conditioning: The weight of a penalty on full layers that are nearly singular
            (:func:`~ebflow_plugin.plan.spectrum.conditioning_penalty`).
        calibrate: Calibrates the model at each evaluation (``"full"``, the same as True, or ``"diagonal"``; see
            :meth:`EBFlow.calibrate <ebflow_plugin.EBFlow.calibrate>`), and reports the NLL after it: the best weights
            are the best calibrated ones. Training continues without the calibration. It takes one pass over the data
            each time, which makes evaluations rarer by default.
        metrics: A file for the metrics as JSON lines, ``metrics.jsonl`` in the checkpoint folder by default. A new run
            replaces it.
        progress: Shows a live display on a terminal (with rich), a line for each evaluation elsewhere.
        seed: The seed of all randomness.

    Raises:
        InputError: If an argument is invalid, before anything is trained.
        TrainingError: If the loss or a gradient is not finite.
        KeyboardInterrupt: On Ctrl-C; with ``checkpoint``, after one more step is taken and saved.

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
    settings = Settings(
        optimizer, steps, epochs, batch_size, validation, evaluate_every, patience, ema, scheduler, clip_norm,
        checkpoint, checkpoint_every, resume, callbacks, on_non_finite, conditioning, calibrate, metrics, progress,
        seed,
    )  # fmt: skip
    with ExitStack() as stack, torch.inference_mode(False), torch.enable_grad():
        run = Run(scalar_objective("fit", objective), data, settings, stack)
        run.train()
        done = run.progress
        return FitResult(
            done.history, done.step, done.stopped or "steps", done.start_nll, done.best_nll, done.best_step,
            run.best_state, done.skipped, None if run.folder is None else run.folder.path, run.metrics, run.ema,
        )  # fmt: skip
