"""``ebflow profile``: what a training step costs with each objective, on one model, batch size and device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import ebflow_plugin as ebf
from ebflow_examples.bench.contenders import training_step
from ebflow_examples.bench.memory import METHOD, peak_bytes
from ebflow_examples.bench.timing import interleaved
from ebflow_examples.console import table
from ebflow_examples.runs import choose_device
from ebflow_examples.streams import stream
from ebflow_examples.targets import Target
from ebflow_plugin.errors import InputError
from ebflow_plugin.options import positive

OBJECTIVES = ("dsm", "ssm", "fdssm", "ml", "ml stochastic", "ml relative", "sml", "sm")
COMPILED = ("dsm", "ssm", "fdssm", "ml", "sm")  # with ``compile``, also as one graph
OWN = "the library's ml"
LIKELIHOODS = ("ml", "ml stochastic", "ml relative")
CHEAP = 1.5  # times the cost of the cheapest likelihood, up to which exact ML is the one to use
LARGEST_SM = 128  # dimensions up to which the exact trace is worth a try


@dataclass(frozen=True)
class Cost:
    """What a step costs with one objective.

    Attributes:
        objective: Its name; ``NAME compiled`` is ``objective.compile()``, and :data:`OWN` the flow's own ``log_prob``.
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
        """Which objective to use, a line for each aim: the README's guide, with what was measured here."""
        cost = {each.objective: each.milliseconds for each in self.costs if each.usable and each.milliseconds}
        return "\n".join((_for_likelihood(cost), _for_score(cost)))

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
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        where = f"batch {self.shape}, {self.device}, {threads}, {self.rounds} rounds, interleaved"
        return "\n".join(
            (
                lined,
                f"\nA step: loss, gradients, Adam. {where}; medians.",
                f"Peak: gradients, Adam's state and all of the loss, without the weights; {METHOD}.",
                f"\nWhich objective?\n{self.recommendation}",
            )
        )


def _for_likelihood(cost: Mapping[str, float]) -> str:
    """The advice for who wants a low NLL, or samples."""
    ways = {name: cost[name] for name in LIKELIHOODS if name in cost}
    if not ways:
        return (
            "NLL, samples: no likelihood works on this model. Follow the exact NLL beside the loss of score matching."
        )
    best = min(ways, key=ways.__getitem__)
    if "ml" not in ways:
        return f"NLL, samples: use {_spelled(best)}, the cheapest likelihood that works on this model."
    times = ways["ml"] / ways[best]
    if times < CHEAP:
        return (
            "NLL, samples: use ml. Its determinants are cheap here, and nothing follows the NLL more closely. Score "
            "matching pays where linear layers are large."
        )
    more = (
        "the same gradient in the mean, by probes"
        if best == "ml stochastic"
        else "other steps than ml's: compare by NLL"
    )
    return f"NLL, samples: use {_spelled(best)}, {times:.1f} times as many steps a second as ml ({more})."


def _for_score(cost: Mapping[str, float]) -> str:
    """The advice for who wants the score, or has no likelihood."""
    ways = {name: cost[name] for name in ("dsm", "ssm", "fdssm") if name in cost}
    if not ways:
        return "Score, denoising: no score matching is right on this model; use the score of one that is trained by ml."
    best = "dsm" if "dsm" in ways else min(ways, key=ways.__getitem__)
    words = [f"Score, denoising: use {best}"]
    if "ml" in cost:
        words.append(f", {cost['ml'] / ways[best]:.1f} times as many steps a second as ml")
    if best == "dsm":
        words.append("; it learns the data with noise σ added")
        if "ssm" in ways:
            words.append(
                f". Without noise: ssm, a step {ways['ssm'] / ways['dsm']:.1f} times as long, if the density of data "
                "does not jump (grey levels: ebflow train --dequantize smooth)"
            )
    words.append(". Follow the exact NLL beside the loss, and calibrate at the end.")
    return "".join(words)


def _spelled(name: str) -> str:
    """An objective as ``ebflow train`` is told of it."""
    loss, _, log_det = name.partition(" ")
    return f"{loss} (ebflow train --loss {loss} --log-det {log_det})" if log_det else loss


def measure(
    target: Target,
    *,
    batch_size: int,
    seconds: float,
    device: str = "auto",
    threads: int | None = None,
    compiled: bool = False,
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
        return profile(model, batch, context, seconds=seconds, compiled=compiled)


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
    compiled: bool = False,
) -> Profile:
    """Times every objective and the library's own likelihood, interleaved, then the memory of one step of each.

    Each has its own optimiser; a learning rate of zero leaves the model as it is, so that all see the same one.
    """
    device = batch.device
    steps, remarks = {}, {}
    names = [each for name in objectives for each in ((name, f"{name} compiled") if name in COMPILED else (name,))]
    names = names if compiled else list(objectives)
    if not len(model.preprocessing):  # it would see other data than ours
        names.append(OWN)
    for name in names:
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
    if name == OWN:
        own = partial(model.adapter.own_log_prob, model.flow)
        return training_step(model, lambda x, given: -own(x, given).mean(), batch, context, rate=0.0)
    loss, _, way = name.partition(" ")
    options = {"log_det": way} if way not in ("", "compiled") else {}
    objective = ebf.make_objective(loss, model, generator=stream(0, "noise", device=batch.device), **options)
    if way == "compiled":
        objective.compile()
    return training_step(objective, objective, batch, context, rate=0.0)


def _short(message: object) -> str:
    """The first line of a message, or its class."""
    return (str(message).splitlines() or [type(message).__name__])[0].rstrip(".")
