"""fit(): a short training loop, with the exact NLL of validation data beside the loss."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ebflow_plugin.errors import EBFlowError, InputError, TrainingError
from ebflow_plugin.linalg.random import derive_seed, kept_random_state
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives import Objective, ReverseKL
from ebflow_plugin.options import as_integer, at_least, flag, one_of, positive
from ebflow_plugin.training.batches import endless, loader_of, once, process, refuse_batch
from ebflow_plugin.training.ema import EMA
from ebflow_plugin.training.evaluation import Judge
from ebflow_plugin.training.events import Event, Record
from ebflow_plugin.training.files import write_weights
from ebflow_plugin.training.guards import FiniteWatch, checks_every, failure, gradient_norms
from ebflow_plugin.training.optimizers import optimizer_of, scheduler_of

KINDS = ("full", "diagonal")  # of calibration
EVALUATIONS, AT_LEAST_EVERY = 20, 1000  # by default 20 evaluations in a run, and one in 1000 steps
VALIDATION_BATCH = 256


@dataclass(frozen=True)
class FitResult:
    """The result of :func:`fit`.

    Attributes:
        history: The metrics of each evaluation.
        steps: The number of steps.
        stopped: Why it ended: ``"steps"``, ``"patience"`` or ``"callback"``.
        start_nll: The validation NLL before the first step, after ActNorms were initialised; None without validation.
        best_nll: The lowest validation NLL, including that of the start; of the averaged weights if there is an EMA.
        best_step: Its step.
        best_state: Its weights, a state dict of the model on the CPU.
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
    data: Any = None,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int = 128,
    optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None = None,
    scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
    clip_norm: float | None = None,
    validation: Any = None,
    evaluate_every: int | None = None,
    patience: int | None = None,
    ema: bool | EMA | None = None,
    calibrate: bool | str | None = None,
    compile: bool = False,
    callback: Callable[[Event], object] | None = None,
    progress: bool = True,
    seed: int = 0,
) -> FitResult:
    r"""Trains the model of an objective, with the exact NLL of validation data beside the loss.

    The optimum of score matching is not that of the likelihood: the NLL can rise while the loss falls. So pass
    ``validation``, select weights by it (``result.load_best(model)``), and stop by it (``patience``). After training,
    the model has its last weights.

    The same seed yields the same run. All noise comes from generators of the run (or the objective's own); the state of
    torch's global generators is restored. It is a short loop in one process, in memory. Checkpoints, resuming, several
    devices, precision and loggers are Lightning's: :mod:`ebflow_plugin.lightning`.

    Arguments:
        objective: The loss; it holds the model.
        data: A tensor, a tuple ``(x, context)`` or ``(x, context, weights)``, a Dataset with a length, or a DataLoader
            of these, which keeps its own batch size and order. A context may be None; weights are those of the rows, in
            the loss, the validation NLL, calibrations and starts; the loss divides by their sum in each batch. None
            for an objective without data, :class:`~ebflow_plugin.objectives.ReverseKL`.
        steps: The number of steps. This or ``epochs``.
        epochs: The number of passes over the data. This or ``steps``.
        batch_size: Rows in a batch. Rows that do not fill a batch are left out of the epoch.
        optimizer: An optimizer of all trainable parameters of the model, or a function that builds one from them; Adam
            with a learning rate of 0.001 by default. To train only some parameters, freeze the others. Optimizers that
            need a closure (LBFGS) are not supported.
        scheduler: A learning-rate scheduler, or a function that builds one from the optimizer. It is stepped after each
            step (``ReduceLROnPlateau`` after each evaluation, with the validation NLL).
        clip_norm: The largest norm of the gradient of all parameters together.
        validation: Data as in ``data``, whose exact NLL is computed before the first step and at each evaluation.
        evaluate_every: Steps between two evaluations, each of which is one record of the history. By default 20 in a
            run, and at least every 1000 steps.
        patience: Stops after this many evaluations without a better NLL.
        ema: Evaluates averaged weights, and keeps the best of them: True, or an :class:`~ebflow_plugin.EMA` of the
            model.
        calibrate: Calibrates the model at each evaluation (``"full"``, the same as True, or ``"diagonal"``; see
            :meth:`EBFlow.calibrate <ebflow_plugin.EBFlow.calibrate>`), and reports the NLL after it: the best weights
            are the best calibrated ones. Training continues without the calibration. It takes one pass over the data
            each time.
        compile: Compiles the objective, unless it is compiled already, which takes about a minute, once
            (:meth:`Objective.compile <ebflow_plugin.objectives.Objective.compile>`).
        callback: A function of an :class:`~ebflow_plugin.Event`, called at each evaluation. If it returns True, the run
            stops.
        progress: Prints a line for each evaluation to standard error.
        seed: The seed of all randomness.

    Raises:
        InputError: If an argument is invalid, before anything is trained.
        TrainingError: If the loss or a gradient is not finite, or a layer is singular; it names the step and the layer.

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
    if (steps is None) == (epochs is None):
        raise InputError(f"fit needs either steps or epochs, got steps={steps!r} and epochs={epochs!r}")
    counts = {"steps": steps, "epochs": epochs, "evaluate_every": evaluate_every, "patience": patience}
    for name, value in counts.items():
        if value is not None:
            at_least(1, name, value)
    if clip_norm is not None:
        positive("clip_norm", clip_norm)
    kind = None
    if calibrate is not None and calibrate is not False:
        kind = one_of("calibrate", "full" if calibrate is True else calibrate, KINDS)
    if validation is None and (patience is not None or kind is not None):
        raise InputError("patience and calibrate need validation data, whose NLL they use")
    if as_integer(seed) is None:
        raise InputError(f"seed must be an integer, got {seed!r}")
    if callback is not None and not callable(callback):
        raise InputError(f"callback must be a function of an event, got {callback!r}")
    flag("progress", progress), flag("compile", compile)
    seed, optimiser = int(seed), optimizer_of(objective, optimizer)
    schedule = None if scheduler is None else scheduler_of(optimiser, scheduler, validated=validation is not None)
    plateau, model = isinstance(schedule, ReduceLROnPlateau), objective.model
    if data is None and not all(isinstance(term, ReverseKL) for _, term in objective.pairs()):
        raise InputError("fit needs data: only objectives without data, such as ReverseKL, train without them")
    if data is None and (steps is None or kind is not None):
        raise InputError("without data, fit needs steps in place of epochs, and cannot calibrate")
    if process()[1] > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("fit trains in one process, and there are several; ebflow_plugin.lightning trains in them all")
    loader = None if data is None else loader_of("data", data, batch_size, seed)
    size = max(batch_size, VALIDATION_BATCH)
    held_out = None if validation is None else loader_of("validation", validation, size, None)
    length = 0 if loader is None else len(loader)
    if compile and not objective.is_compiled:
        objective.compile()
    plan, device = model.core, model.like().device
    stream: Iterator[Any] = repeat((None, None, None)) if loader is None else endless(loader, device)
    streams = ("global", 0), ("noise", 0), ("start",), ("validation", 0)
    everything, noise, start, evaluations = (derive_seed(seed, *name) for name in streams)
    with (
        kept_random_state(device),
        use_generators(noise_of(objective, Generator(device).manual_seed(noise))),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        torch.manual_seed(everything)
        first = next(stream)
        if loader is not None:
            refuse_batch("data", first, model)
        waits = plan.uninitialised()
        if waits and loader is not None:
            model.initialize(*first, generator=Generator(device).manual_seed(start))
            waits = []
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        parameters, look, watch = list(trained.values()), checks_every(device), FiniteWatch(list(trained))
        total = int(steps) if epochs is None else epochs * length  # type: ignore[arg-type]
        every, average, history = evaluate_every or evaluate_every_default(total), _average(model, ema), list[Record]()
        judge = Judge(model, held_out, lambda: once(loader), kind, average, evaluations)
        zero = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        start_nll, stopped, step, seconds = None, "steps", 0, 0.0
        try:
            if held_out is not None and not waits:
                start_nll = judge(0)["nll"]  # the start may have the best weights of the run
                if progress:
                    print(Event(0, {"nll": start_nll}, model, steps=total), file=sys.stderr, flush=True)
            began = since = time.monotonic()
            summed, before = zero, 0  # the losses since the last evaluation, and its step
            for step, (x, context, weights) in zip(range(1, total + 1), chain([first], stream), strict=False):
                for parameter in parameters:
                    parameter.grad = None
                loss = objective(x, context) if weights is None else objective(x, context, weights)
                if loss.requires_grad:
                    torch.autograd.backward(loss, inputs=parameters)
                norms = gradient_norms(parameters, zero)
                watch.record(step, loss, norms)
                due = step % every == 0 or step == total
                if (due or step % look == 0) and (finding := watch.check(now=due)):
                    raise failure(model, finding, step, x, context)
                norm = torch.linalg.vector_norm(norms)
                if clip_norm is not None:
                    nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
                optimiser.step()
                if schedule is not None and not plateau:
                    schedule.step()
                if average is not None:
                    average.update()
                summed = summed + loss.detach()
                if not due:
                    continue
                passed, taken = time.monotonic() - since, step - before
                seconds += passed
                record: Record = {
                    "step": step,
                    "epoch": (step - 1) // length if length else 0,
                    "loss": float(summed) / taken,
                    "grad_norm": float(norm),
                    "lr": float(optimiser.param_groups[0]["lr"]),
                    "seconds": seconds,
                    "steps_per_second": taken / max(passed, 1e-9),
                }
                if held_out is not None:
                    record |= judge(step)
                    if plateau:
                        schedule.step(record["nll"])  # type: ignore[union-attr]
                record |= objective.metrics()
                history.append(record)
                event = Event(step, record, model, average, total, (time.monotonic() - began) / step * (total - step))
                if progress:
                    print(event, file=sys.stderr, flush=True)
                if callback is not None and callback(event) is True:
                    stopped = "callback"
                    break
                if patience is not None and judge.stale >= patience:
                    stopped = "patience"
                    break
                summed, before, since = zero, step, time.monotonic()
        except (TrainingError, InputError):
            raise
        except EBFlowError as error:  # a singular layer
            raise TrainingError(f"step {step}: {error}") from error
        finally:
            for parameter in parameters:
                parameter.grad = None
        return FitResult(history, step, stopped, start_nll, judge.nll, judge.step, judge.state, average)


def noise_of(objective: Objective, shared: Generator, rank: int = 0) -> dict[Objective, Generator]:
    """The generator of each term in a process: its own, or the shared one.

    Each process but the first uses, in place of a term's own generator, a new one with a seed derived from it, so that
    no two processes draw the same noise, and the user's generator is not reseeded.
    """
    generators, copies = {}, dict[int, Generator]()
    for _, term in objective.pairs():
        own = term.generator
        if own is not None and rank:
            own = copies.setdefault(id(own), Generator(own.device).manual_seed(derive_seed(own.initial_seed(), rank)))
        generators[term] = shared if own is None else own
    return generators


@contextmanager
def use_generators(noise: Mapping[Objective, Generator]) -> Iterator[None]:
    """Replaces the generators of the terms inside a ``with`` block."""
    own = {term: term.generator for term in noise}
    for term, generator in noise.items():
        term.generator = generator
    try:
        yield
    finally:
        for term in noise:
            term.generator = own[term]


def evaluate_every_default(steps: int) -> int:
    """The steps between two evaluations of a run, unless somebody says otherwise.

    Example:
        >>> evaluate_every_default(200), evaluate_every_default(100_000)
        (10, 1000)
    """
    return min(AT_LEAST_EVERY, max(1, steps // EVALUATIONS))


def _average(model: EBFlow, ema: bool | EMA | None) -> EMA | None:
    """The user's EMA, or a new one. It starts here, after the data-dependent start."""
    if ema is None or ema is False:
        return None
    average = EMA(model) if ema is True else ema
    if not isinstance(average, EMA):
        raise InputError(f"ema must be True, an ebflow_plugin.EMA or None, got {ema!r}")
    if average.model is not model:
        raise InputError("the EMA is of another model; create it as EMA(objective.model)")
    if average.updates == 0:
        average.restart()
    return average
