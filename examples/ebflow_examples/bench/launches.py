"""How many kernels a training step launches: what a GPU waits for where a model is made of small operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ebflow_plugin as ebf
from ebflow_examples.bench import plain
from ebflow_examples.bench.contenders import ALPHA, objective, plain_loss
from ebflow_examples.bench.results import Settings, Table
from ebflow_examples.models import build

# Operators that compute nothing: they make a tensor without filling it, look at one in another way, or ask for a type.
FREE = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}
FREE |= {"aten::promote_types", "aten::detach"}


class _Counter(TorchDispatchMode):
    """Counts the operators that would launch a kernel."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func._schema.name not in FREE:
            self.total += 1
        return func(*args, **(kwargs or {}))


def count(step: Callable[[], object]) -> int:
    """The number of kernels that a call launches, after one call to warm up.

    Example:
        >>> import torch
        >>> a = torch.ones(3)
        >>> count(lambda: (a + 1).view(1, 3).sum())
        2
    """
    step()
    with _Counter() as counter:
        step()
    return counter.total


def launches(settings: Settings) -> Iterator[Table]:
    """Loss and gradients, without the optimiser, which is the same for both."""
    rows = []
    for kind, shape, names in (
        ("fc", (64,), ("SSM", "DSM", "FDSSM", "ML", "ML relative")),
        ("cnn", (1, 12, 12), ("SSM", "DSM", "FDSSM", "ML stochastic")),
    ):
        x = settings.data(8, *shape)
        hand = plain.model(kind, shape, ALPHA).to(x)
        for name in names:
            ours = objective(name, ebf.wrap(build(kind, shape, alpha=ALPHA).to(x)))
            other = plain_loss(name, hand) if " " not in name else None  # nobody has these by hand
            counts = {"ours": count(partial(_step, ours, x)), "by hand": other and count(partial(_step, other, x))}
            rows.append({"step": f"{kind} {name}", **counts})
    note = "Operators of torch that compute something, counted in one step: loss and gradients, without the optimiser."
    yield Table("launches", "kernels that a training step launches", rows, note)


def _step(loss: Callable[[Tensor], Tensor], x: Tensor) -> None:
    loss(x).backward()
