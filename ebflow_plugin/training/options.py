"""The arguments of :func:`~ebflow_plugin.fit`, checked before training starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil
from numbers import Integral
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ebflow_plugin.ema import EMA
from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg.random import at_least
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives import Objective
from ebflow_plugin.objectives.checks import refuse_useless_context
from ebflow_plugin.plan.inputs import flag, is_number, one_of, path_of, positive, refuse_non_finite
from ebflow_plugin.plan.preprocessing import Dequantize
from ebflow_plugin.training.batches import Batches, LoaderBatches

__all__ = ["Pace", "Settings", "average", "check_batch", "fusible", "optimizer_of", "scalar_objective", "scheduler_of"]

EVALUATIONS = 20  # the default number of evaluations in a run
AT_LEAST_EVERY = 1000
KERNELS = ("fused", "foreach")  # options of optimizers that say how to compute, and not what
FEWEST = 3  # the smallest default number of evaluations, however many rows they process


class Pace(NamedTuple):
    """The number of steps of a run, and of the steps between two evaluations and two checkpoints."""

    steps: int
    evaluate_every: int
    save_every: int

    def seconds_left(self, step: int, speed: float, evaluation: float) -> float:
        """The time left, for the remaining steps and evaluations.

        ``speed`` is in steps per second, ``evaluation`` in seconds.

        Example:
            >>> Pace(steps=250, evaluate_every=100, save_every=100).seconds_left(100, speed=10.0, evaluation=5.0)
            25.0
        """
        total, every = self.steps, self.evaluate_every
        evaluations = total // every - step // every + (total % every > 0) if step < total else 0
        return ((total - step) / speed if speed else 0.0) + evaluations * evaluation


@dataclass
class Settings:
    """The arguments of :func:`~ebflow_plugin.fit` other than the objective and the data, checked on construction."""

    optimizer: Any
    steps: int | None
    epochs: int | None
    batch_size: int
    validation: Any
    evaluate_every: int | None
    patience: int | None
    ema: Any
    scheduler: Any
    clip_norm: float | None
    checkpoint: Any
    checkpoint_every: int | None
    resume: bool
    callbacks: Any
    on_non_finite: str
    conditioning: float
    calibrate: bool | str | None
    metrics: Any
    progress: bool
    seed: int

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise InputError(f"fit needs either steps or epochs, got steps={self.steps!r} and epochs={self.epochs!r}")
        for name in ("batch_size", "steps", "epochs", "evaluate_every", "checkpoint_every", "patience"):
            value = getattr(self, name)
            if value is not None or name == "batch_size":
                setattr(self, name, at_least(1, name, value))
        if self.clip_norm is not None:
            positive("clip_norm", self.clip_norm)
        if not is_number(self.conditioning) or self.conditioning < 0:
            raise InputError(f"conditioning must be a number, at least 0, got {self.conditioning!r}")
        self.conditioning = float(self.conditioning)
        one_of("on_non_finite", self.on_non_finite, ("stop", "skip"))
        if self.calibrate is not None and not isinstance(self.calibrate, bool):
            one_of("calibrate", self.calibrate, ("full", "diagonal"))
        kind = "full" if self.calibrate is True else str(self.calibrate)
        self.calibration = kind if self.calibrate else None
        if self.validation is None and (self.patience is not None or self.calibration is not None):
            raise InputError("patience and calibrate need validation data, whose NLL they use")
        flag("resume", self.resume)
        flag("progress", self.progress)
        for name in ("checkpoint", "metrics"):
            if getattr(self, name) is not None:
                setattr(self, name, path_of(name, getattr(self, name)))
        if not isinstance(self.seed, Integral) or isinstance(self.seed, bool):
            raise InputError(f"seed must be an integer, got {self.seed!r}")
        self.seed = int(self.seed)  # another type of the same value would seed other streams
        if callable(self.callbacks) or not isinstance(self.callbacks, Iterable):
            raise InputError(f"callbacks must be a list of functions: callbacks=[function], got {self.callbacks!r}")
        self.callbacks = tuple(self.callbacks)
        for place, callback in enumerate(self.callbacks):
            if not callable(callback):
                raise InputError(f"callbacks[{place}] must be a function of an event, got {callback!r}")

    def pace(self, data: Batches | LoaderBatches, validation: Batches | LoaderBatches | None) -> Pace:
        """The number of steps, and how often to evaluate and to save.

        These depend on how many rows an evaluation processes, not on measured times, so that the same seed yields the
        same run.
        """
        total, length = self.steps or 0, len(data)
        if self.epochs is not None:
            total = self.epochs * length
        often = min(AT_LEAST_EVERY, max(1, total // EVALUATIONS))
        evaluated = 0 if validation is None else validation.rows + (data.rows if self.calibration is not None else 0)
        worth = ceil(evaluated * length / data.rows)  # the steps that process as many rows as an evaluation
        evaluate_every = self.evaluate_every or max(often, min(worth, ceil(total / FEWEST)))
        return Pace(total, evaluate_every, self.checkpoint_every or self.evaluate_every or often)

    def facts(
        self, objective: Objective, optimizer: Optimizer, scheduler: LRScheduler | None, ema: EMA | None
    ) -> dict[str, str]:
        """The facts, as text, that a run should share with the checkpoint from which it resumes."""
        options = {name: value for name, value in sorted(optimizer.defaults.items()) if name not in KERNELS}
        words = "; ".join(f"{name}={value}" for name, value in options.items() if value is not None)
        groups = "+".join(str(len(group["params"])) for group in optimizer.param_groups)
        state = objective.model.state_dict().items()
        numbers = f"clip_norm={self.clip_norm}, conditioning={self.conditioning}"
        return {
            "model": "; ".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in state),
            "objective": objective.in_words(),
            "optimizer": f"{type(optimizer).__name__}; {words}; {groups} parameters",
            "scheduler": "none" if scheduler is None else type(scheduler).__name__,
            "ema": "none" if ema is None else f"decay={ema.decay}, warmup={ema.warmup}",
            "seed": str(self.seed),
            "training": f"accumulate=1, {numbers}, amp=False",  # the text of the first format
            "evaluation": f"calibrate={self.calibration}, on_non_finite={self.on_non_finite}",
        }


def check_batch(model: EBFlow, name: str, x: Tensor, context: Tensor | None) -> None:
    """Checks the first batch before training starts: shapes, types, NaN, and labels that the model does not use."""
    try:
        model.check(x, context)
        if x.is_floating_point():
            refuse_non_finite("its first batch", x)
        for step in model.preprocessing:
            if isinstance(step, Dequantize):
                step.refuse(x)
        refuse_useless_context(model, x, context)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


def scalar_objective(caller: str, objective: object) -> Objective:
    """Returns an objective whose value is a scalar, or raises an error that names the caller."""
    if not isinstance(objective, Objective):
        kind = type(objective).__name__
        raise InputError(f"{caller} needs an objective, such as ebf.objectives.SSM(model), got {kind}")
    if objective.reduction != "mean":
        raise InputError(f'{caller} needs an objective with reduction="mean", whose value is a scalar')
    return objective


def optimizer_of(
    objective: Objective, optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None
) -> Optimizer:
    """The user's optimizer, or that of the user's function, or Adam. Raises unless it has all trainable parameters."""
    named = {name: parameter for name, parameter in objective.model.named_parameters() if parameter.requires_grad}
    parameters = list(named.values())
    known = {id(parameter) for parameter in objective.model.parameters()}
    own = [name for name, p in objective.named_parameters() if p.requires_grad and id(p) not in known]
    if own:
        raise InputError(
            f"{type(objective).__name__} has parameters besides those of its model, which fit does not train: "
            f"{_some(own)}. Put them in the flow (an embedding_net, say), or freeze them."
        )
    if not parameters:
        raise InputError("the model has no parameters that require a gradient: there is nothing to train")
    if optimizer is None:
        return Adam(parameters, lr=1e-3, fused=fusible(parameters))
    built = optimizer if isinstance(optimizer, Optimizer) else None
    if built is None:
        if not callable(optimizer):
            raise InputError(f"optimizer must be an Optimizer, or a function that builds one, got {optimizer!r}")
        built = optimizer(parameters)
        if not isinstance(built, Optimizer):
            raise InputError(f"the function passed as optimizer must return a torch.optim.Optimizer, got {built!r}")
    held = {id(parameter) for group in built.param_groups for parameter in group["params"]}
    missing = [name for name, parameter in named.items() if id(parameter) not in held]
    if len(missing) == len(parameters):
        raise InputError("the optimizer holds none of the model's parameters; build it from objective.parameters()")
    if missing:
        raise InputError(
            f"the optimizer lacks {len(missing)} of {len(parameters)} trainable parameters of the model: "
            f"{_some(missing)}. Build it from objective.parameters(), or freeze the others: requires_grad_(False)."
        )
    if held - known:
        raise InputError(
            f"the optimizer holds {len(held - known)} parameters that are not the model's, which fit does not train; "
            "put them in the flow (an embedding_net, say), or train them in a loop of your own"
        )
    closure = inspect.signature(type(built).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise InputError(
            f"{type(built).__name__} computes the loss of a step several times, which fit does not do: each batch has "
            "noise of its own, computed once. Use an optimizer such as Adam or SGD, or a loop of your own with "
            "optimizer.step(closure)."
        )
    return built


def fusible(parameters: Iterable[Tensor]) -> bool | None:
    """The ``fused`` of Adam and AdamW: True on the CPU, where it is 3 to 8 times as fast, else None, torch's choice.

    There it reads a gradient in the memory order of its parameter without a look at its strides. Autograd gives
    gradients that order, but only where a parameter has no gaps in memory: it is None for those that are not
    contiguous. It knows no complex numbers, and on other devices it refuses some gradients.

    Example:
        >>> import torch
        >>> fusible([torch.ones(2, 3)]), fusible([torch.ones(2, 3), torch.ones(2, 6)[:, ::2]])
        (True, None)
    """
    plain = (each.device.type == "cpu" and each.is_contiguous() and each.is_floating_point() for each in parameters)
    return True if all(plain) else None


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def scheduler_of(
    optimizer: Optimizer, scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None, validated: bool
) -> LRScheduler | None:
    """The user's scheduler, or that of the user's function."""
    if scheduler is None:
        return None
    built = scheduler if isinstance(scheduler, LRScheduler) else scheduler(optimizer) if callable(scheduler) else None
    if not isinstance(built, LRScheduler):
        raise InputError(
            f"scheduler must be a torch learning-rate scheduler, or a function that builds one, got {scheduler!r}"
        )
    if built.optimizer is not optimizer:
        raise InputError("the scheduler is of another optimizer; pass a function: scheduler=lambda optimizer: …")
    if isinstance(built, ReduceLROnPlateau) and not validated:
        raise InputError("ReduceLROnPlateau uses the NLL of validation data: pass validation=")
    return built


def average(model: EBFlow, ema: bool | EMA | None) -> EMA | None:
    """The user's EMA, or a new one. It starts here, after the data-dependent start."""
    if ema is None or ema is False:
        return None
    if ema is True:
        return EMA(model)
    if not isinstance(ema, EMA):
        raise InputError(f"ema must be True, an ebflow_plugin.EMA or None, got {ema!r}")
    if ema.model is not model:
        raise InputError("the EMA is of another model; create it as EMA(objective.model)")
    if ema.updates == 0:
        ema.restart()
    return ema
