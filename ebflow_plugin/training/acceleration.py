"""Faster training where the model allows it: conditioners in bfloat16, and the energy compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ebflow_plugin.errors import InputError
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives import DSM, FDSSM, ML, SML, SSM, Objective, WeightedSum
from ebflow_plugin.plan.step import NonlinearStep

__all__ = ["bf16_conditioners", "compiled_energy"]

PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
ONE_BACKWARD = (FDSSM, ML, SML)
DIFFERENTIATED = (DSM, SSM)


@contextmanager
def bf16_conditioners(model: EBFlow) -> Iterator[int]:
    """Runs the matrix products and convolutions of the networks inside of nonlinear steps in bfloat16.

    Everything else stays as it is: the linear steps of the flow, whose determinants belong to the density, the
    log-dets, and the energy, which is summed in single precision. Gives the number of layers that take part.

    Raises:
        InputError: If the model is not in single precision.
    """
    if model.like().dtype != torch.float32:
        raise InputError(f"amp=True is for models in torch.float32, this one is in {model.like().dtype}")
    layers = {
        id(part): part
        for step in model.plan.steps
        if isinstance(step, NonlinearStep) and isinstance(step.module, nn.Module)
        for part in step.module.modules()
        if isinstance(part, PRODUCTS)
    }
    if not layers:
        warnings.warn("amp=True changes nothing: the model has no networks inside of nonlinear steps", stacklevel=4)
    opened: list[Any] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        opened.append(torch.autocast(inputs[0].device.type, dtype=torch.bfloat16))
        opened[-1].__enter__()

    def leave(module: nn.Module, inputs: Any, output: Any) -> Any:
        opened.pop().__exit__(None, None, None)
        return output.float() if isinstance(output, Tensor) else output

    hooks = []
    for layer in layers.values():
        hooks.append(layer.register_forward_pre_hook(enter))
        hooks.append(layer.register_forward_hook(leave, always_call=True))
    try:
        yield len(layers)
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def compiled_energy(objective: Objective) -> Iterator[bool]:
    """Compiles the energy of an objective's model with ``torch.compile``, for the duration of a ``with`` block.

    For FDSSM, ML (exact and stochastic) and SML the energy itself, for SSM and DSM its derivatives in x: in closed form
    where the model has one, else by ``torch.func`` inside of the compiled function, since ``torch.compile`` cannot take
    a double backward. Sums of these too. SM, relative gradients, and objectives of the user's own, run as they are,
    with one warning. So does a model that
    cannot be compiled. Gives whether it is compiled.
    """
    terms = list(objective.terms) if isinstance(objective, WeightedSum) else [objective]
    others = sorted({type(term).__name__ for term in terms if not _is_compiled(term)})
    if others:
        valid = ", ".join(sorted(cls.__name__ for cls in (*ONE_BACKWARD, *DIFFERENTIATED)))
        warnings.warn(f"compile=True has no effect on {', '.join(others)}. It is for {valid}.", stacklevel=4)
        yield False
        return
    places: list[tuple[nn.Module, str]] = []

    def put(owner: nn.Module, name: str, function: Callable[..., Any]) -> None:
        owner.__dict__[name] = function
        places.append((owner, name))

    for term in terms:
        if isinstance(term, ONE_BACKWARD):
            energies = torch.compile(objective.model.core_plan.energy)
            put(term, "energies", _or_as_it_is(energies, term.energies, "energy"))
        if isinstance(term, DIFFERENTIATED):
            compiled = torch.compile(term.derivatives, fullgraph=True)
            put(term, "derivatives", _or_as_it_is(compiled, term.derivatives, f"derivatives of {type(term).__name__}"))
    try:
        yield True
    finally:
        for owner, name in places:
            del owner.__dict__[name]


def _is_compiled(term: nn.Module) -> bool:
    """Whether there is a compiled form. Relative gradients need a backward pass of their own."""
    relative = isinstance(term, ML) and term.log_det in ("relative", "auto")
    return type(term) in (*ONE_BACKWARD, *DIFFERENTIATED) and not relative


def _or_as_it_is(compiled: Callable[..., Any], plain: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Calls a compiled function with a graph; the plain one without, and for good after the first failure."""
    failed, tried = False, False

    def call(*args: Any, **options: Any) -> Any:
        nonlocal failed, tried
        if not failed and torch.is_grad_enabled():
            try:
                with nullcontext() if tried else warnings.catch_warnings():
                    if not tried:  # the compiler's own warnings are about its inner life
                        warnings.simplefilter("ignore")
                    tried = True
                    return compiled(*args, **options)
            except Exception as error:
                failed = True
                reason = str(error).strip().splitlines() or [type(error).__name__]
                warnings.warn(f"the {name} cannot be compiled, and runs as it is: {reason[0]}", stacklevel=2)
        return plain(*args, **options)

    return call
