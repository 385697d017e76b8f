"""The optimizer and the scheduler of a training run, and the checks of what it trains."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ebflow_plugin.errors import InputError
from ebflow_plugin.layers import FullConv2d
from ebflow_plugin.objectives import Objective
from ebflow_plugin.options import positive


def scalar_objective(caller: str, objective: object) -> Objective:
    """Returns an objective whose value is a scalar, or raises an error that names the caller."""
    if not isinstance(objective, Objective):
        kind = type(objective).__name__
        raise InputError(f"{caller} needs an objective, such as ebf.objectives.SSM(model), got {kind}")
    return objective


def parameter_groups(model: nn.Module, lr: float, *, trained: bool | None = None) -> list[dict[str, Any]]:
    """Groups for any torch optimiser, in which a kernel of k × k pixels has 1/k of the learning rate, or 1/k².

    Neighbouring pixels are alike. While the gradients of all taps of a kernel have one sign, as in the first steps of a
    new optimiser, a step of each of them moves the output of the convolution k² times as far as that of one tap; once
    noise decides the signs, k times. The determinant of the layer moves with it, to zero at worst. Schedulers of torch
    keep the ratio of the groups.

    Arguments:
        model: A model, or any module. The kernels are those of our ``FullConv2d``: a network's own convolutions have
            no determinant.
        lr: The learning rate of all other parameters.
        trained: Whether the model was trained with smaller kernels before, which
            :func:`~ebflow_plugin.unconstrain` made larger: 1/k² of the rate, so that what it knows is kept from the
            first step on. By default this is so for kernels of a flow whose ActNorms had seen data by then.

    Returns:
        Groups with all parameters that require a gradient; those of kernels larger than 1 × 1 are last, one a size.

    Example:
        >>> import torch
        >>> import ebflow_plugin as ebf
        >>> layers = nn.Sequential(FullConv2d(2, kernel_size=1), FullConv2d(2, kernel_size=3))
        >>> [(round(group["lr"], 2), [tuple(each.shape) for each in group["params"]])
        ...  for group in ebf.parameter_groups(layers, 0.6)]
        [(0.6, [(2, 2, 1, 1), (2,), (2,)]), (0.2, [(2, 2, 3, 3)])]
        >>> optimizer = torch.optim.Adam(ebf.parameter_groups(layers, 1e-3))
    """
    lr, shares = positive("lr", lr), dict[int, int]()
    for layer in model.modules():
        if isinstance(layer, FullConv2d):
            careful = layer.widened_in_use if trained is None else trained
            shares[id(layer.weight)] = max(layer.weight.shape[2:]) ** (2 if careful else 1)
    groups: dict[int, list[nn.Parameter]] = {1: []}
    for each in model.parameters():
        if each.requires_grad:
            groups.setdefault(shares.get(id(each), 1), []).append(each)
    return [{"params": groups[share], "lr": lr / share} for share in sorted(groups) if groups[share]]


def optimizer_of(
    objective: Objective, optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None
) -> Optimizer:
    """The user's optimizer, or that of the user's function, or Adam. Raises unless it has all trainable parameters."""
    scalar_objective("fit", objective)
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
        fused = fusible(parameters)
        return Adam(parameter_groups(objective.model, 1e-3), fused=fused)
    built = optimizer(parameters) if callable(optimizer) else optimizer  # an Optimizer is no function
    if not isinstance(built, Optimizer):
        raise InputError(f"optimizer must be an Optimizer, or a function that returns one, got {built!r}")
    held = {id(parameter) for group in built.param_groups for parameter in group["params"]}
    missing = [name for name, parameter in named.items() if id(parameter) not in held]
    if missing or held - known:
        raise InputError(
            f"the optimizer must hold the {len(parameters)} trainable parameters of the model and no others: it lacks "
            f"{f'{len(missing)} of them ({_some(missing)})' if missing else 'none'}, and holds {len(held - known)} "
            "others. Build it from objective.parameters(); freeze what shall stay as it is, requires_grad_(False)."
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
    optimizer: Optimizer, scheduler: LRScheduler | Callable[[Optimizer], LRScheduler], validated: bool
) -> LRScheduler:
    """The user's scheduler, or that of the user's function."""
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
