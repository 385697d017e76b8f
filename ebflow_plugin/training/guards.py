"""What stops a training run before it goes wrong: values that are not finite, and layers that become singular."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ebflow_plugin.errors import ConditioningWarning, InputError, TrainingError
from ebflow_plugin.model import EBFlow
from ebflow_plugin.plan.preprocessing import Dequantize
from ebflow_plugin.plan.spectrum import FullLayer, Spectrum, estimate_spectrum
from ebflow_plugin.plan.step import Step
from ebflow_plugin.plan.values import Value
from ebflow_plugin.training.distributed import Processes, own_gradients

__all__ = ["ConditionWatch", "Finding", "FiniteWatch", "TrainingError", "diagnose", "gradient_norms"]

NEAR_SINGULAR = 1e4
KEEP_AWAY = (
    "Add conditioning=0.01 (or more) to fit(), lower the learning rate, or mix in a little likelihood: "
    "0.99 * SSM(model) + 0.01 * ML(model)."
)


@dataclass(frozen=True)
class Finding:
    """The first step at which something was not finite.

    Attributes:
        step: The number of the step.
        loss: Whether the loss was not finite.
        parameters: The names of the parameters whose gradient was not finite, in the order of the model.
    """

    step: int
    loss: bool
    parameters: tuple[str, ...]


class FiniteWatch:
    """Watches losses and gradients without waiting for the device, and tells which step was the first bad one.

    :meth:`see` notes what is not finite, on the device; :meth:`look` fetches the notes.

    Arguments:
        names: The names of the parameters whose gradients are watched.
        processes: All of the processes learn what one of them finds.

    Example:
        >>> watch = FiniteWatch(["weight", "bias"])
        >>> for step in range(1, 4):
        ...     bias = torch.tensor(float("nan") if step > 1 else 0.0)
        ...     watch.see(step, torch.tensor(0.0), torch.stack([torch.tensor(1.0), bias]))
        >>> watch.look()
        Finding(step=2, loss=False, parameters=('bias',))
    """

    def __init__(self, names: Sequence[str], processes: Processes | None = None) -> None:
        self._names = tuple(names)
        self._processes = processes or Processes()
        self._bad: Tensor | None = None
        self._step: Tensor | None = None

    def see(self, step: int, loss: Tensor, norms: Tensor) -> None:
        """Notes the loss of a step, and the norms of its gradients, one for each name."""
        bad = ~torch.isfinite(torch.cat([loss.detach().reshape(1).to(norms), norms]))
        now = torch.full((), step, dtype=torch.int64, device=bad.device)
        if self._bad is None or self._step is None:
            self._bad, self._step = bad, now
        else:
            latched = self._bad.any()
            self._bad, self._step = torch.where(latched, self._bad, bad), torch.where(latched, self._step, now)

    def look(self) -> Finding | None:
        """Waits for the device, and forgets: what was the first bad step since the last look?"""
        if self._bad is None or self._step is None:
            return None
        bad, self._bad = self._bad.to(torch.int64), None
        step = torch.where(bad.any(), self._step, torch.iinfo(torch.int64).max)
        self._processes.maximum(bad)
        step = -self._processes.maximum(-step)
        flags = bad.tolist()
        if not any(flags):
            return None
        names = tuple(name for name, flag in zip(self._names, flags[1:], strict=True) if flag)
        return Finding(int(step), bool(flags[0]), names)


def gradient_norms(parameters: Iterable[nn.Parameter], like: Tensor) -> Tensor:
    """The norm of each parameter's gradient, zero where there is none; of the own part where they are sharded."""
    gradients = own_gradients(parameters)
    there = [gradient for gradient in gradients if gradient is not None]
    found = iter(torch._foreach_norm(there) if there else ())
    norms = [like.new_zeros(()) if gradient is None else next(found).to(like) for gradient in gradients]
    return torch.stack(norms) if norms else like.new_zeros(0)


@torch.no_grad()
def diagnose(model: EBFlow, x: Tensor, context: Tensor | None) -> list[str]:
    """Finds where a batch stops being finite on its way to noise: one line for each thing that is wrong.

    Arguments:
        model: The model.
        x: The batch.
        context: Its context.
    """
    lines = []
    for name, tensor in (("the batch", x), ("its context", context)):
        if tensor is not None and not _finite(tensor):
            lines.append(f"{name} holds NaN or inf in {_bad_rows(tensor)} of {len(tensor)} rows")
    for module in model.preprocessing:
        if isinstance(module, Dequantize):
            try:
                module.refuse(x)
            except InputError as error:  # which is not raised at every step on CUDA
                lines.append(str(error))
    broken = [name for name, parameter in model.named_parameters() if not _finite(parameter)]
    if broken:
        lines.append(f"{len(broken)} parameters hold NaN or inf, the first is {broken[0]}")
    if lines:
        return lines
    first: list[tuple[Step, bool]] = []
    reached: list[Step] = []

    def visit(step: Step, value: Value) -> None:
        if not first and not _finite(value):
            first.append((reached[-1] if reached else step, bool(reached)))
        reached.append(step)

    plan = model.plan
    try:
        latents, log_det = plan.encode(x.to(model.like().dtype), plan.embed(context), visit)
    except Exception as error:
        return [f"{reached[-1].where if reached else 'the model'} raises {type(error).__name__}: {error}"]
    if not first and reached and not _finite(latents):
        first.append((reached[-1], True))
    if first:
        step, after = first[0]
        lines.append(f"the first value that is not finite is the {'output' if after else 'input'} of {step.where}")
    elif log_det is not None and not _finite(log_det):
        lines.append("the values of all steps are finite, the sum of their log-dets is not")
    else:
        lines.append("all values on the way to noise are finite: a derivative is not, or the optimiser's step before")
    return lines


def owner(model: EBFlow, name: str) -> str:
    """The step that a parameter belongs to, as messages show it; the parameter's name if it is part of none."""
    wanted = dict(model.named_parameters()).get(name)
    for part in model.plan.parts():
        if isinstance(part.module, nn.Module) and any(p is wanted for p in part.module.parameters()):
            return f"{name} of {part.where}"
    return name


def failure(model: EBFlow, finding: Finding, lines: Sequence[str], advice: str) -> TrainingError:
    """The error that names the step and the layer, and ends with what to do."""
    what = "the loss" if finding.loss else "a gradient"
    found = [f"step {finding.step}: {what} is not finite"]
    if finding.parameters:
        count = len(finding.parameters)
        found.append(f"  {count} gradients are not finite, the first is that of {owner(model, finding.parameters[0])}")
    found += [f"  {line}" for line in lines]
    return TrainingError("\n".join([*found, advice]))


class ConditionWatch:
    """Estimates the condition number of each full layer, and warns once about each that is nearly singular.

    Arguments:
        layers: The layers.
        limit: The condition number to warn at.
        advice: The end of the warning.
    """

    def __init__(self, layers: Sequence[FullLayer], limit: float = NEAR_SINGULAR, advice: str = KEEP_AWAY) -> None:
        self.layers = list(layers)
        self.limit, self.advice = limit, advice
        self._warned: set[str] = set()

    def look(self, step: int) -> dict[str, Spectrum]:
        """Estimates the spectrum of each layer, by its path."""
        found = {layer.step.path: estimate_spectrum(layer) for layer in self.layers}
        self._warn(step, found)
        return found

    def _warn(self, step: int, found: Mapping[str, Spectrum]) -> None:
        lines = []
        for layer in self.layers:
            spectrum = found[layer.step.path]
            near = math.isnan(spectrum.condition) or spectrum.condition > self.limit
            if near and layer.step.path not in self._warned:
                self._warned.add(layer.step.path)
                lines.append(
                    f"{layer.step.where}: smallest singular value about {spectrum.smallest:.1e}, condition number at "
                    f"least {spectrum.condition:.1e}"
                )
        if lines:
            warnings.warn(
                f"step {step}: {len(lines)} of {len(self.layers)} full layers are close to singular, where log Z and "
                "samples break\n  " + "\n  ".join(lines) + f"\n{self.advice}",
                ConditioningWarning,
                stacklevel=4,
            )


def _finite(value: Value) -> bool:
    if not isinstance(value, Tensor):
        return all(_finite(part) for part in value)
    return not value.is_floating_point() or bool(torch.isfinite(value).all())


def _bad_rows(tensor: Tensor) -> int:
    return int((~torch.isfinite(tensor)).reshape(len(tensor), -1).any(1).sum())
