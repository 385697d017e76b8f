"""The arguments of :func:`~ebflow_plugin.fit`, checked and completed before any work is done."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import ceil
from numbers import Integral
from typing import Any

from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ebflow_plugin.errors import InputError
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives import Objective
from ebflow_plugin.plan.inputs import flag, is_number, one_of, path_of, positive, whole
from ebflow_plugin.training.batches import Batches, LoaderBatches
from ebflow_plugin.training.ema import EMA
from ebflow_plugin.training.progress import Callback

__all__ = ["Settings", "average", "listeners", "optimizer_of", "scalar_objective", "scheduler_of"]

EVALUATIONS = 20  # in a run, unless evaluate_every says otherwise
AT_LEAST_EVERY = 1000
FEWEST = 3  # evaluations in a run, however many rows they go through


@dataclass
class Settings:
    """What :func:`~ebflow_plugin.fit` was asked for, but for objects such as the optimizer. Checked when it is made."""

    steps: int | None = None
    epochs: int | None = None
    batch_size: int = 128
    evaluate_every: int | None = None
    patience: int | None = None
    clip_norm: float | None = None
    checkpoint: Any = None
    checkpoint_every: int | None = None
    resume: bool = True
    on_non_finite: str = "stop"
    conditioning: float = 0.0
    calibrate: bool | str | None = None
    metrics: Any = None
    progress: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise InputError(f"fit needs either steps or epochs, got steps={self.steps!r} and epochs={self.epochs!r}")
        self.batch_size = whole("batch_size", self.batch_size)
        for name in ("steps", "epochs", "evaluate_every", "checkpoint_every", "patience"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else whole(name, value))
        if self.clip_norm is not None:
            positive("clip_norm", self.clip_norm)
        if not is_number(self.conditioning) or self.conditioning < 0:
            raise InputError(f"conditioning must be a number, at least 0, got {self.conditioning!r}")
        self.conditioning = float(self.conditioning)
        one_of("on_non_finite", self.on_non_finite, ("stop", "skip"))
        if self.calibrate is not None and not isinstance(self.calibrate, bool):
            one_of("calibrate", self.calibrate, ("full", "diagonal"))
        flag("resume", self.resume)
        flag("progress", self.progress)
        for name in ("checkpoint", "metrics"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else path_of(name, value))
        if not isinstance(self.seed, Integral) or isinstance(self.seed, bool):
            raise InputError(f"seed must be a whole number, got {self.seed!r}")
        self.seed = int(self.seed)  # other types of the same value would give other streams

    @property
    def calibration(self) -> str | None:
        """How to calibrate at each evaluation; None for not at all."""
        return ("full" if self.calibrate is True else str(self.calibrate)) if self.calibrate else None

    def completed(self, source: Batches | LoaderBatches, held_out: Batches | LoaderBatches | None) -> Settings:
        """With the number of steps, and how often to evaluate and to save.

        The latter follow from how many rows an evaluation goes through, not from a clock, so that the same seed gives
        the same run.
        """
        if held_out is None and (self.patience is not None or self.calibration is not None):
            raise InputError("patience and calibrate need validation data, whose NLL they go by")
        total = self.steps or (self.epochs or 0) * len(source)
        often = min(AT_LEAST_EVERY, max(1, total // EVALUATIONS))
        evaluated = 0 if held_out is None else held_out.rows + (source.rows if self.calibration is not None else 0)
        worth = ceil(evaluated * len(source) / source.rows)  # steps that go through as many rows
        return replace(
            self,
            steps=total,
            epochs=None,
            evaluate_every=self.evaluate_every or max(often, min(worth, ceil(total / FEWEST))),
            checkpoint_every=self.checkpoint_every or self.evaluate_every or often,
        )


def scalar_objective(caller: str, objective: object) -> Objective:
    """Returns an objective whose value is a scalar, or raises an error that names who needs one."""
    if not isinstance(objective, Objective):
        kind = type(objective).__name__
        raise InputError(f"{caller} needs an objective, such as ebf.objectives.SSM(model), got {kind}")
    if objective.reduction != "mean":
        raise InputError(f'{caller} needs an objective with reduction="mean", whose value is a scalar')
    return objective


def listeners(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    """Checks the callbacks."""
    if callable(callbacks) or not isinstance(callbacks, Iterable):
        raise InputError(f"callbacks must be a list of functions: callbacks=[function], got {callbacks!r}")
    found = tuple(callbacks)
    for place, callback in enumerate(found):
        if not callable(callback):
            raise InputError(f"callbacks[{place}] is no function of an event, but {callback!r}")
    return found


def optimizer_of(
    objective: Objective, optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None
) -> Optimizer:
    """The optimizer that was given, or made by the function that was given, or Adam. It holds what is to be trained."""
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
        return Adam(parameters, lr=1e-3)
    made = optimizer if isinstance(optimizer, Optimizer) else None
    if made is None:
        if not callable(optimizer):
            raise InputError(f"optimizer must be an Optimizer, or a function that makes one, got {optimizer!r}")
        made = optimizer(parameters)
        if not isinstance(made, Optimizer):
            raise InputError(f"the function given as optimizer must return a torch.optim.Optimizer, got {made!r}")
    held = {id(parameter) for group in made.param_groups for parameter in group["params"]}
    lacking = [name for name, parameter in named.items() if id(parameter) not in held]
    if len(lacking) == len(parameters):
        raise InputError("the optimizer holds none of the model's parameters; make it from objective.parameters()")
    if lacking:
        raise InputError(
            f"the optimizer lacks {len(lacking)} of {len(parameters)} trainable parameters of the model: "
            f"{_some(lacking)}. Make it from objective.parameters(), or freeze what is to stay as it is: "
            "requires_grad_(False)."
        )
    if held - known:
        raise InputError(
            f"the optimizer holds {len(held - known)} parameters that are not the model's, which fit does not train; "
            "put them in the flow (an embedding_net, say), or train them in a loop of your own"
        )
    closure = inspect.signature(type(made).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise InputError(
            f"{type(made).__name__} computes the loss of a step several times, which fit does not do: each batch has "
            "noise of its own, computed once. Take an optimizer such as Adam or SGD, or a loop of your own with "
            "optimizer.step(closure)."
        )
    return made


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def scheduler_of(
    optimizer: Optimizer, scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None, validated: bool
) -> LRScheduler | None:
    """The scheduler that was given, or made by the function that was given."""
    if scheduler is None:
        return None
    made = scheduler if isinstance(scheduler, LRScheduler) else scheduler(optimizer) if callable(scheduler) else None
    if not isinstance(made, LRScheduler):
        raise InputError(
            f"scheduler must be a torch learning-rate scheduler, or a function that makes one, got {scheduler!r}"
        )
    if made.optimizer is not optimizer:
        raise InputError("the scheduler is of another optimizer; pass a function: scheduler=lambda optimizer: …")
    if isinstance(made, ReduceLROnPlateau) and not validated:
        raise InputError(
            "ReduceLROnPlateau goes by the NLL of validation data, and would never move without: pass some"
        )
    return made


def average(model: EBFlow, ema: bool | EMA | None) -> EMA | None:
    """The average that was given, or a new one. It begins here, behind the data-dependent start."""
    if ema is None or ema is False:
        return None
    if ema is True:
        return EMA(model)
    if not isinstance(ema, EMA):
        raise InputError(f"ema must be True, an ebflow_plugin.EMA or None, got {ema!r}")
    if ema.model is not model:
        raise InputError("the EMA is of another model; make it of the objective's: EMA(objective.model)")
    if ema.updates == 0:
        ema.restart()
    return ema
