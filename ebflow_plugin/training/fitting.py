"""fit(): a training loop that people can trust."""

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
        """Gives a model the weights with the lowest validation NLL.

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
    settings = Settings(
        optimizer, steps, epochs, batch_size, validation, evaluate_every, patience, ema, scheduler, clip_norm,
        checkpoint, checkpoint_every, resume, callbacks, on_non_finite, conditioning, calibrate, metrics, progress,
        seed,
    )  # fmt: skip
    with ExitStack() as stack, torch.inference_mode(False), torch.enable_grad():
        run = Run(scalar_objective("fit", objective), data, settings, stack)
        run.train()
        found = run.progress
        return FitResult(
            found.history, found.step, found.stopped or "steps", found.start_nll, found.best_nll, found.best_step,
            run.best_state, found.skipped, None if run.folder is None else run.folder.path, run.metrics, run.ema,
        )  # fmt: skip
