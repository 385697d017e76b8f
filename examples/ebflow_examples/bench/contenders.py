"""What takes part: our objectives and plain torch's on the paper's models, as calls without arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import ebflow_plugin as ebf
from ebflow_examples.bench import plain
from ebflow_plugin.training.optimizers import fusible

DIM, BATCH, ALPHA = 784, 100, 0.3  # the paper's models for MNIST
SIGMA = EPS = 1.0
OPTIONS: dict[str, dict[str, Any]] = {
    "DSM": {"sigma": SIGMA},
    "FDSSM": {"eps": EPS},
    "ML stochastic": {"log_det": "stochastic"},
    "ML relative": {"log_det": "relative"},
}


def objective(name: str, model: ebf.EBFlow) -> Any:
    """Our objective, with the options of the paper's MNIST runs."""
    return getattr(ebf.objectives, name.split()[0])(model, **OPTIONS.get(name, {}))


def plain_loss(name: str, model: Any) -> Callable[[Tensor], Tensor]:
    """The same objective in plain torch, with noise of its own at each call."""
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "SSM": lambda x: plain.ssm(model, x, plain.rademacher(x)),
        "DSM": lambda x: plain.dsm(model, x, torch.randn_like(x), SIGMA),
        "FDSSM": lambda x: plain.fdssm(model, x, plain.sphere(x), EPS),
        "ML": lambda x: plain.ml(model, x),
    }
    return losses[name]


def training_step(
    module: nn.Module, loss: Callable[..., Tensor], *inputs: Tensor | None, rate: float = 1e-7
) -> Callable[[], None]:
    """A whole step of training: loss, backward, Adam. The rate is so small that the weights stay where they are."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=rate, fused=fusible(trained))

    def step() -> None:
        loss(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def quiet(function: Callable[..., Any], *inputs: Any) -> Callable[[], Any]:
    """A call without gradients."""
    return torch.no_grad()(lambda: function(*inputs))
