"""The arithmetic limit: what a step would take if it did nothing but its matrix products at this machine's rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import ebflow_plugin as ebf
from ebflow_examples.bench import plain
from ebflow_examples.bench.contenders import ALPHA, BATCH, DIM, objective, plain_loss, training_step
from ebflow_examples.bench.results import Settings, Table
from ebflow_examples.bench.timing import estimate
from ebflow_examples.models import build
from ebflow_plugin.training.options import fusible

__all__ = ["limit"]

PRODUCT = 2 * BATCH * DIM**2  # the operations of one batch through one layer


def limit(settings: Settings) -> Iterator[Table]:
    """Matrix products of a step, this machine's rate for them in the same run, and how far the step is from it."""
    x = settings.data(BATCH, DIM)
    weight = settings.data(DIM, DIM)
    model, by_hand = ebf.wrap(build("fc", (DIM,), alpha=ALPHA).to(x)), plain.FullyConnected(DIM, ALPHA).to(x)
    plain.copy_parameters(model, by_hand)
    steps = {name: training_step(model, objective(name, model), x) for name in ("SSM", "DSM", "FDSSM", "RelativeML")}
    for name in ("SSM", "DSM", "FDSSM"):
        steps[f"plain {name}"] = training_step(by_hand, plain_loss(name, by_hand), x)
    operations = {name: count(step) for name, step in steps.items()}
    weights = [nn.Parameter(torch.ones_like(p)) for p in model.parameters()]
    adam = torch.optim.Adam(weights, lr=1e-7, fused=fusible(weights))
    for parameter in adam.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    times = settings.time(
        "arithmetic limit",
        {
            **steps,
            "Adam": adam.step,
            "x W": lambda: x @ weight,  # a gradient in x
            "x Wᵀ": lambda: x @ weight.mT,  # a layer
            "xᵀ y": lambda: x.mT @ x,  # a gradient in W
        },
        seconds=5.0,
    )
    products = [times["x W"], times["x Wᵀ"], times["xᵀ y"]]
    rows = []
    for name in steps:
        count_of = operations[name] / PRODUCT
        over = estimate(partial(over_limit, count_of), [times[name], *products])
        rows.append(
            {
                "objective": name,
                "GFlop": operations[name] / 1e9,
                "products": count_of,
                "limit, ms": 1e3 * count_of * sum(product.median for product in products) / 3,
                "Adam, ms": 1e3 * times["Adam"].median,
                "step, ms": 1e3 * times[name].median,
                "step over limit": over,
            }
        )
    rates = ", ".join(f"{product.name} {PRODUCT / product.median / 1e9:.1f}" for product in products)
    yield Table(
        "limit",
        f"how far a step is from its matrix products, D = {DIM}, batch {BATCH}",
        rows,
        f"A product is 2·B·D² operations, one batch through one layer (x: {BATCH} x {DIM}, W: {DIM} x {DIM}); GFlop/s "
        f"in the same run: {rates}. The limit is the products at their mean rate; counted by torch's flop formulas.",
    )


def over_limit(products: float, medians: Tensor) -> Tensor:
    """The time of a step over that of its products, from the medians of the step and of the kinds of product."""
    return medians[..., 0] / (products * medians[..., 1:].mean(-1))


def count(step: Callable[[], object]) -> int:
    """The operations of the matrix products of a call; not of the first one, in which an objective looks around."""
    step()
    with _Products() as counter:
        step()
    return counter.operations


class _Products(TorchDispatchMode):
    """Counts by torch's own formulas. Their FlopCounterMode hooks modules, and cannot take a second backward."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        formula = flop_registry.get(function._overloadpacket)
        if formula is not None:
            self.operations += int(formula(*args, **(kwargs or {}), out_val=result))
        return result
