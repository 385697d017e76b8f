"""Detects losses and gradients that are not finite, and finds the step, the layer and the cause."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ebflow_plugin.errors import InputError, SingularError, TrainingError
from ebflow_plugin.linalg.delayed import Delayed
from ebflow_plugin.model import EBFlow
from ebflow_plugin.plan.step import Step
from ebflow_plugin.plan.values import Value

ADVICE = "Lower the learning rate, clip gradients, or mix in a little likelihood: 0.99 * SSM(model) + 0.01 * ML(model)."
CHECK_EVERY = {"cpu": 1}  # steps between two checks of losses and gradients, by device
CHECK_EVERY_ELSEWHERE = 10  # whose flags are read at the next check, when they have arrived
NEVER = 2**62


def checks_every(device: torch.device) -> int:
    """The steps between two checks of losses and gradients on a device.

    Example:
        >>> checks_every(torch.device("cpu")), checks_every(torch.device("meta"))
        (1, 10)
    """
    return CHECK_EVERY.get(device.type, CHECK_EVERY_ELSEWHERE)


class Finding(NamedTuple):
    """The first step at which something was not finite."""

    step: int
    loss: bool  # whether the loss was not finite
    parameters: tuple[str, ...]  # the parameters with a gradient that was not finite, in the order of the model


class FiniteWatch:
    """Watches losses and gradients without synchronising with the device, and finds the first bad step.

    :meth:`record` stores on the device what is not finite; :meth:`check` reads it, or, where that would synchronise
    with the device, what the check before has sent to the host.

    Arguments:
        names: The names of the parameters whose gradients are watched.
        least: The elementwise minimum over all processes of a run, so that they share what one of them finds.

    Example:
        >>> watch = FiniteWatch(["weight", "bias"])
        >>> for step in range(1, 4):
        ...     bias = torch.tensor(float("nan") if step > 1 else 0.0)
        ...     watch.record(step, torch.tensor(0.0), torch.stack([torch.tensor(1.0), bias]))
        >>> watch.check()
        Finding(step=2, loss=False, parameters=('bias',))
    """

    def __init__(self, names: Sequence[str], least: Callable[[Tensor], Tensor] = lambda steps: steps) -> None:
        self._names, self._least = tuple(names), least
        self._first: Tensor | None = None  # the first step at which the loss, and each gradient, was not finite
        self._sent: Delayed[None] = Delayed(lag=1)

    def record(self, step: int, loss: Tensor, norms: Tensor) -> None:
        """Records the loss of a step, and the norms of its gradients, one for each name."""
        finite = torch.isfinite(torch.cat([loss.detach().reshape(1).to(norms), norms]))
        found = torch.where(finite, NEVER, step)
        self._first = found if self._first is None else torch.minimum(self._first, found)

    def check(self, now: bool = True) -> Finding | None:
        """Returns the first bad step since the last check.

        Arguments:
            now: Whether to wait for the device. If not, it returns elsewhere than on the CPU what the check before
                asked for, so that a bad step is found one check later.
        """
        arrived: list[tuple[None, list[int]]] = []
        if self._first is not None:
            arrived, self._first = self._sent.add(None, self._least(self._first)), None
        for _, steps in arrived + (self._sent.flush() if now else []):
            if (first := min(steps)) < NEVER:
                names = tuple(name for name, step in zip(self._names, steps[1:], strict=True) if step == first)
                return Finding(first, steps[0] == first, names)
        return None


def gradient_norms(parameters: Iterable[nn.Parameter], like: Tensor) -> Tensor:
    """The norm of each parameter's gradient, zero if it has none; of the local shard of a sharded parameter."""
    full = (parameter.grad for parameter in parameters)
    gradients = [one.to_local() if one is not None and hasattr(one, "to_local") else one for one in full]
    present = [gradient for gradient in gradients if gradient is not None]
    each = iter(torch._foreach_norm(present) if present else ())
    norms = [like.new_zeros(()) if gradient is None else next(each).to(like) for gradient in gradients]
    return torch.stack(norms) if norms else like.new_zeros(0)


@torch.no_grad()
def diagnose(model: EBFlow, x: Tensor, context: Tensor | None) -> list[str]:
    """Finds where the values of a batch stop being finite on the way to noise: one line for each problem."""
    lines = []
    for name, tensor in (("the batch", x), ("its context", context)):
        if tensor is not None and not _finite(tensor):
            rows = (~torch.isfinite(tensor)).reshape(len(tensor), -1).any(1)
            lines.append(f"{name} holds NaN or inf in {int(rows.sum())} of {len(tensor)} rows")
    if model.dequantize is not None:
        try:
            model.dequantize.refuse(x)
        except InputError as error:  # on CUDA it is not raised in every step
            lines.append(str(error))
    broken = [name for name, parameter in model.named_parameters() if not _finite(parameter)]
    if broken:
        lines.append(f"{len(broken)} parameters hold NaN or inf, the first is {broken[0]}")
    if lines:
        return lines
    plan, before = model.plan, ""

    def visit(step: Step, value: Value) -> None:
        nonlocal before
        if not lines and not _finite(value):
            place = f"output of {before}" if before else f"input of {step.where}"
            lines.append(f"the first value that is not finite is the {place}")
        before = step.where

    try:
        latents, log_det = plan.encode(x.to(model.like().dtype), plan.embed(context), visit)
        if lines:
            return lines
        if before and not _finite(latents):
            return [f"the first value that is not finite is the output of {before}"]
        if log_det is not None and not _finite(log_det):
            return ["the values of all steps are finite, the sum of their log-dets is not"]
    except Exception as error:
        return [f"{before or 'the model'} raises {type(error).__name__}: {error}"]
    try:
        plan.log_z(tuple(x.shape[1:]), latents[0].new_zeros(()))
    except SingularError as error:  # elsewhere than on the CPU a training step does not look
        return str(error).splitlines()
    return ["all values on the way to noise are finite: a derivative is not, or the optimiser's step before"]


def failure(
    model: EBFlow, finding: Finding, step: int | None, x: Tensor | None, context: Tensor | None
) -> TrainingError:
    """The error, which names the step and the layer, and ends with advice.

    Arguments:
        model: The model.
        finding: What was found.
        step: The step of the batch, which is diagnosed if it is the one that was found; None for a later one.
        x: The batch, if there are data.
        context: The context of the batch.
    """
    message = [f"step {finding.step}: {'the loss' if finding.loss else 'a gradient'} is not finite"]
    if finding.parameters:
        name = finding.parameters[0]
        wanted = dict(model.named_parameters()).get(name)
        holders = (part for part in model.plan.parts() if isinstance(part.module, nn.Module))
        owner = next((part for part in holders if any(p is wanted for p in part.module.parameters())), None)
        where = name if owner is None else f"{name} of {owner.where}"
        message.append(f"{len(finding.parameters)} gradients are not finite, the first is that of {where}")
    if finding.step == step and x is not None:
        message += diagnose(model, x, context)
    return TrainingError("\n  ".join(message) + f"\n{ADVICE}")


def _finite(value: Value) -> bool:
    if not isinstance(value, Tensor):
        return all(_finite(part) for part in value)
    return not value.is_floating_point() or bool(torch.isfinite(value).all())
