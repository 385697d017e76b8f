"""``ebflow profile``: what a training step costs with each objective, on one model, batch size and device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import ebflow_plugin as ebf
from ebflow_examples.bench.memory import METHOD, peak_bytes
from ebflow_examples.bench.timing import interleaved
from ebflow_examples.console import table
from ebflow_examples.runs import choose_device
from ebflow_examples.streams import stream
from ebflow_examples.targets import Target
from ebflow_plugin.errors import InputError
from ebflow_plugin.plan.inputs import positive

__all__ = ["OBJECTIVES", "Cost", "Profile", "batch_for", "measure", "profile"]

OBJECTIVES = ("dsm", "ssm", "fdssm", "ml", "ml stochastic", "sml", "relative_ml", "sm")
LARGEST_SM = 128  # dimensions up to which the exact trace is worth a try


@dataclass(frozen=True)
class Cost:
    """What a step costs with one objective.

    Attributes:
        objective: Its name.
        milliseconds: The median of the rounds.
        low: The fastest tenth.
        high: The slowest tenth.
        megabytes: The most memory that a step holds at once: all of the loss, gradients, Adam's state; not the weights.
        remark: Why it was not measured, or must not be used on this model.
        usable: Whether what it learns on this model is right.
    """

    objective: str
    milliseconds: float | None = None
    low: float | None = None
    high: float | None = None
    megabytes: float | None = None
    remark: str = ""
    usable: bool = True


@dataclass(frozen=True)
class Profile:
    """The costs of all objectives on one model.

    Attributes:
        costs: One for each, in the order of :data:`OBJECTIVES`.
        shape: The shape of a batch.
        device: Where it was measured.
        threads: CPU threads.
        rounds: How many rounds were timed; each has all objectives, in a shuffled order.
    """

    costs: tuple[Cost, ...]
    shape: tuple[int, ...]
    device: str
    threads: int
    rounds: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "memory": METHOD, "recommendation": self.recommendation}

    @property
    def recommendation(self) -> str:
        """Which objective to use, and why."""
        cost = {each.objective: each for each in self.costs if each.milliseconds is not None and each.usable}
        sliced = [name for name in ("dsm", "ssm", "fdssm") if name in cost]
        if not sliced:
            return (
                "Use ml: no score-matching objective is right on this model." if "ml" in cost else "Use none of them."
            )
        best = min(sliced, key=lambda name: cost[name].milliseconds or 0.0)
        if "ml" not in cost:
            return f"Use {best}: the fastest that works on this model."
        ratio = (cost["ml"].milliseconds or 0.0) / (cost[best].milliseconds or 1.0)
        if ratio < 1.5:
            return (
                f"Use ml: its determinants are cheap here (a step takes {ratio:.2f} times one of {best}), and it sees "
                "the likelihood itself. Score matching pays where linear layers are large."
            )
        words = f"Use {best}: {ratio:.1f} times as many steps a second as ml. Follow the exact NLL beside the loss."
        relative = cost.get("relative_ml")
        if relative is not None and (relative.milliseconds or 0.0) < (cost[best].milliseconds or 0.0):
            words += " relative_ml is cheaper still, but takes other steps than ml: compare them by NLL."
        stochastic = cost.get("ml stochastic")
        if stochastic is not None and (stochastic.milliseconds or 0.0) < ratio * (cost[best].milliseconds or 0.0) / 2:
            times = (stochastic.milliseconds or 0.0) / (cost[best].milliseconds or 1.0)
            words += f" ml with --log-det stochastic sees the likelihood at {times:.1f} times the cost of {best}."
        return words

    def __str__(self) -> str:
        rows = [
            (
                each.objective,
                "-" if each.milliseconds is None else f"{each.milliseconds:.2f}",
                "-" if each.low is None or each.high is None else f"{each.low:.2f} to {each.high:.2f}",
                "-" if each.milliseconds is None else f"{1000 / each.milliseconds:.1f}",
                "-" if each.megabytes is None else f"{each.megabytes:.1f}",
                each.remark,
            )
            for each in self.costs
        ]
        lined = table(("objective", "ms a step", "10 to 90 %", "steps/s", "peak MB", "remark"), rows, remarks=True)
        where = f"batch {self.shape}, {self.device}, {self.threads} threads, {self.rounds} rounds, interleaved"
        return "\n".join(
            (
                lined,
                f"\nA step: loss, gradients, Adam. {where}; medians.",
                f"Peak: gradients, Adam's state and all of the loss, without the weights; {METHOD}.",
                f"\n{self.recommendation}",
            )
        )


def measure(
    target: Target, *, batch_size: int, seconds: float, device: str = "auto", threads: int | None = None
) -> Profile:
    """Profiles what the user pointed at."""
    if threads is not None:
        torch.set_num_threads(threads)
    positive("--seconds", seconds)
    model = target.wrap().to(choose_device(device))
    batch = batch_for(model, batch_size, target.rows, target.shape).to(choose_device(device))
    context = None
    if target.context is not None:
        context = torch.randn(len(batch), *target.context, generator=stream(0, "context")).to(batch)
    with Console(stderr=True).status(f"timing the objectives, interleaved, for about {seconds:g} s"):
        return profile(model, batch, context, seconds=seconds)


def batch_for(model: ebf.EBFlow, size: int, rows: Tensor | None, shape: Sequence[int] | None) -> Tensor:
    """A batch to measure with: rows of data, or noise of a shape.

    Raises:
        InputError: If nothing tells the shape.
    """
    if size < 1:
        raise InputError(f"--batch-size must be at least 1, got {size}")
    if rows is not None:
        return rows.repeat(-(-size // len(rows)), *[1] * (rows.dim() - 1))[:size]
    known = shape or model.plan.event_shape
    if known is None:
        raise InputError("the model does not tell the shape of its data; pass --shape 784, say, or --data")
    return torch.randn(size, *known, generator=stream(0, "data"))


def profile(
    model: ebf.EBFlow,
    batch: Tensor,
    context: Tensor | None = None,
    *,
    seconds: float = 20.0,
    objectives: Sequence[str] = OBJECTIVES,
) -> Profile:
    """Times every objective, interleaved, then measures the memory of one step of each.

    Each has its own optimiser; a learning rate of zero leaves the model as it is, so that all see the same one.
    """
    device = batch.device
    steps, remarks = {}, {}
    for name in objectives:
        made, remark = _step(name, model, batch, context)
        if made is None:
            remarks[name] = Cost(name, remark=remark, usable=False)
        else:
            steps[name] = made
            remarks[name] = Cost(name, remark=remark, usable=not remark)
    if not steps:
        reasons = "\n  ".join(f"{name}: {cost.remark}" for name, cost in remarks.items())
        raise InputError(
            f"no objective works on this model and batch; give it data of its own with --data, or the shape of its "
            f"context with --context\n  {reasons}"
        )
    samples = interleaved(steps, seconds=seconds, device=device)
    rounds = len(next(iter(samples.values())).seconds)
    costs = []
    for name, cost in remarks.items():
        if name in steps:
            times = torch.tensor(samples[name].seconds, dtype=torch.float64).mul(1000.0)
            low, middle, high = times.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
            held = _megabytes(name, model, batch, context)
            cost = Cost(name, middle, low, high, held, cost.remark, cost.usable)
        costs.append(cost)
    return Profile(tuple(costs), tuple(batch.shape), str(device), torch.get_num_threads(), rounds)


def _step(
    name: str, model: ebf.EBFlow, batch: Tensor, context: Tensor | None
) -> tuple[Callable[[], object] | None, str]:
    """A training step with an objective, tried once; or None and why not. The second is a remark in either case."""
    if name == "sm" and batch[0].numel() > LARGEST_SM:
        return None, f"left out: {batch[0].numel()} Hessian products a step; ssm estimates it with one"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ebf.EBFlowWarning)
        try:
            step = _make_step(name, model, batch, context)
            step()
        except Exception as error:  # a model of the user's can fail in any way, with one objective and not another
            return None, f"refused: {_short(error)}"
    biased = [str(each.message).splitlines() for each in caught if issubclass(each.category, ebf.BiasWarning)]
    return step, f"biased: {biased[0][0]} ({biased[0][1].rpartition(': ')[2]})" if biased else ""


def _megabytes(name: str, model: ebf.EBFlow, batch: Tensor, context: Tensor | None) -> float:
    model.zero_grad()  # what torch's profiler did not see come, it warns of when it goes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ebf.EBFlowWarning)  # said before, as a remark
        return peak_bytes(partial(_make_step, name, model, batch, context), batch.device) / 1e6


def _make_step(name: str, model: ebf.EBFlow, batch: Tensor, context: Tensor | None) -> Callable[[], None]:
    name, _, log_det = name.partition(" ")
    options = {"log_det": log_det} if log_det else {}
    objective = ebf.make_objective(name, model, generator=stream(0, "noise", device=batch.device), **options)
    optimiser = torch.optim.Adam([p for p in objective.parameters() if p.requires_grad], lr=0.0)

    def step() -> None:
        optimiser.zero_grad()
        objective(batch, context).backward()
        optimiser.step()

    return step


def _short(message: object) -> str:
    """The first line of a message, or its class."""
    return (str(message).splitlines() or [type(message).__name__])[0].rstrip(".")
