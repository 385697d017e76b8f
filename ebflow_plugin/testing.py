"""The contract of an adapter, as functions for the tests of third parties. Our own tests use the same ones.

    from ebflow_plugin import testing

    def test_my_flow():
        testing.check_flow(make_flow(), x)

Each function raises an AssertionError whose message states the measurement.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ebflow_plugin.model import EBFlow
from ebflow_plugin.plan.step import LinearStep
from ebflow_plugin.verification import Check, compare, invariants, verify
from ebflow_plugin.wrapper import wrap

__all__ = [
    "check_copies",
    "check_devices",
    "check_flow",
    "check_invariant",
    "check_inverse",
    "check_no_determinant",
    "check_untouched",
    "no_factorisation",
    "one_device",
]

# Words in the names of operators of torch that factorise or invert a matrix, or compute its determinant.
_FACTORISATIONS = {
    "cholesky", "det", "eig", "eigh", "eigvals", "eigvalsh", "exp", "geqrf", "inv", "inverse", "ldl", "logdet",
    "lstsq", "lu", "orgqr", "ormqr", "pinv", "pinverse", "qr", "slogdet", "solve", "svd", "svdvals", "tensorinv",
}  # fmt: skip


def _factorises(name: str) -> bool:
    """Whether an operator is one of these. A triangular solve costs no more than a product, and is none."""
    words = set(name.split("_"))
    if "triangular" in words or ("exp" in words and "matrix" not in words):
        return False
    return bool(words & _FACTORISATIONS)


def check_flow(flow: nn.Module, x: Tensor, context: Tensor | None = None, *, tolerance: float = 1e-6) -> None:
    """Runs every check of this module, and :func:`ebflow_plugin.verify`.

    Arguments:
        flow: A flow of a library that has an adapter.
        x: At least two data points, in float64 for the default tolerance.
        context: Their context.
        tolerance: The largest relative difference of values.

    Example:
        >>> from nflows import distributions, flows, transforms
        >>> flow = flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])).double()
        >>> check_flow(flow, torch.randn(3, 2, dtype=torch.float64))
    """
    check_untouched(flow, x, context)
    check_invariant(flow, x, context, tolerance=tolerance)
    check_no_determinant(flow, x, context)
    check_inverse(flow, x, context, tolerance=tolerance)
    check_copies(flow, x, context)
    check_devices(flow, x, context)
    verify(flow, x, context)


def check_invariant(
    flow: nn.Module,
    x: Tensor,
    context: Tensor | None = None,
    *,
    own: Callable[[], Tensor] | None = None,
    tolerance: float = 1e-6,
) -> None:
    """Contract 1: log_prob = -energy - log Z = the library's own, and log Z does not depend on x.

    Arguments:
        flow: A flow.
        x: Data.
        context: Its context.
        own: Returns the library's own log_prob; by default the adapter's ``own_log_prob``.
        tolerance: The largest relative difference.
    """
    model = _started(flow, x, context)
    ours, log_z = model.log_prob(x, context), model.log_z(tuple(x.shape[1:]))
    assert ours.shape == (len(x),), f"log_prob has shape {tuple(ours.shape)} for {len(x)} samples"
    assert ours.dtype == x.dtype, f"log_prob is {ours.dtype} for x in {x.dtype}"
    assert ours.device == x.device, f"log_prob is on {ours.device} for x on {x.device}"
    assert log_z.shape == (), f"log_z has shape {tuple(log_z.shape)}"
    for check in invariants(model, x, context, own, tolerance):
        _assert_holds(check)


def check_untouched(flow: nn.Module, x: Tensor, context: Tensor | None = None) -> None:
    """Contract 2: the flow is the same object with the same parameters and keys, and x is unchanged."""
    _started(flow, x, context)  # a fresh ActNorm would change at the first call of log_prob, ours or theirs
    before = {name: (id(tensor), tensor.detach().clone()) for name, tensor in flow.state_dict(keep_vars=True).items()}
    modes = [module.training for module in flow.modules()]
    data = x.clone()
    model = wrap(flow)
    assert model.flow is flow, "model.flow is not the flow"
    model.energy(x, context)
    model.score(x, context)
    model.log_prob(x, context)
    after = flow.state_dict(keep_vars=True)
    assert list(after) == list(before), "the keys of the flow's state_dict changed"
    for name, (identity, value) in before.items():
        assert id(after[name]) == identity, f"{name} is another tensor than before"
        assert torch.equal(after[name], value), f"{name} changed"
    assert {id(p) for p in model.parameters()} == {id(p) for p in flow.parameters()}, "the parameters differ"
    assert modes == [module.training for module in flow.modules()], "the train/eval mode of a module changed"
    assert torch.equal(x, data), "x was written into"
    assert not x.requires_grad, "x requires a gradient now"


def check_no_determinant(flow: nn.Module, x: Tensor, context: Tensor | None = None) -> None:
    """Contract 3: energy() and its gradient neither factorise a matrix nor compute the log-det of a linear step.

    A step whose density direction is the inverse of a full matrix needs that inverse: do not check such flows.
    """
    model = _started(flow, x, context)
    for step in model.plan.steps:
        if isinstance(step, LinearStep):
            step.log_abs_det = _forbidden(step.path)  # type: ignore[method-assign]
    with no_factorisation():
        model.score(x, context)


def check_inverse(flow: nn.Module, x: Tensor, context: Tensor | None = None, *, tolerance: float = 1e-6) -> None:
    """decode(encode(x)) is x."""
    model = _started(flow, x, context)
    with torch.no_grad():
        embedded = model.plan.embed(context)
        latents, _ = model.plan.encode(x, embedded)
        _assert_holds(compare("decode(encode(x)) is x", model.plan.decode(latents, embedded), x, tolerance))


def check_copies(flow: nn.Module, x: Tensor, context: Tensor | None = None) -> None:
    """Deepcopy and pickle return an independent model with the same values."""
    model = _started(flow, x, context)
    model.log_prob(x, context)
    copies: Sequence[EBFlow] = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))  # our own bytes, not a file
    for copied in copies:
        assert torch.equal(copied.log_prob(x, context), model.log_prob(x, context)), "a copy has another log_prob"
        ours, theirs = {id(p) for p in model.parameters()}, {id(p) for p in copied.parameters()}
        assert not ours & theirs, "a copy shares parameters"
        modules = {id(module) for module in copied.modules()}
        for step in copied.plan.steps:
            if isinstance(step.module, nn.Module):
                assert id(step.module) in modules, f"step {step.path} of a copy acts through the original"


def check_devices(flow: nn.Module, x: Tensor, context: Tensor | None = None) -> None:
    """Contract 7: on the meta device, no operation of a public path mixes devices, and results stay on it."""
    model = wrap(copy.deepcopy(wrap(flow)).flow.to("meta"))
    x = x.to("meta")
    context = None if context is None else context.to("meta")
    with one_device(torch.device("meta")):
        results = [model.energy(x, context), model.score(x, context), model.log_prob(x, context)]
        results.append(model.log_z(tuple(x.shape[1:])))
    for result in results:
        assert result.is_meta, f"a result is on {result.device}"
    assert results[1].shape == x.shape, "the score has another shape than x"


def _started(flow: nn.Module, x: Tensor, context: Tensor | None) -> EBFlow:
    model = wrap(flow)
    model.initialize(x, context)
    return model


class _Watch(TorchDispatchMode):
    """Calls a function with each operator and its arguments, before it runs."""

    def __init__(self, check: Callable[[Any, list[Any]], None]) -> None:
        super().__init__()
        self._check = check

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._check(func, tree_leaves((args, kwargs or {})))
        return func(*args, **(kwargs or {}))


@contextmanager
def no_factorisation() -> Iterator[None]:
    """Makes every operator of torch raise that factorises a matrix, inverts it, or computes its determinant.

    Example:
        >>> with no_factorisation():
        ...     torch.linalg.slogdet(torch.eye(2))
        Traceback (most recent call last):
        AssertionError: _linalg_slogdet was called
    """

    def check(func: Any, leaves: list[Any]) -> None:
        name = func._schema.name.removeprefix("aten::")
        assert not _factorises(name), f"{name} was called"

    with _Watch(check):
        yield


@contextmanager
def one_device(device: torch.device) -> Iterator[None]:
    """Makes every operator raise that mixes tensors of this device with others. CPU scalars are allowed, as on CUDA."""

    def check(func: Any, leaves: list[Any]) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len(tensors) > 1:
            others = [t for t in tensors if t.device != device and not (t.dim() == 0 and t.device.type == "cpu")]
            assert not others or len(others) == len(tensors), (
                f"{func._schema.name} mixes {device} with {others[0].device} (shape {tuple(others[0].shape)})"
            )

    with _Watch(check):
        yield


def _forbidden(path: str) -> Callable[..., Any]:
    def raises(*_: object) -> None:
        raise AssertionError(f"energy() computes the log-det of linear step {path}")

    return raises


def _assert_holds(check: Check) -> None:
    assert check.passed, f"{check.name}: {check.detail}"
