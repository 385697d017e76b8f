"""verify(): a numeric self-check of a wrapped flow on the user's own data.

Steps are classified by class, since a numeric probe can be fooled (a coupling that starts at zero looks linear). This
is the other half: the claims of the classification are measured on copies of the flow, in float64, at the data and near
it, and again after perturbing every parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ebflow_plugin.chunks import picked
from ebflow_plugin.errors import InputError, UnseenParameterWarning, VerificationError, warn
from ebflow_plugin.linalg.precision import full_precision
from ebflow_plugin.linalg.random import kept_random_state
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives.unseen import perturbed, unseen_parameters
from ebflow_plugin.plan.inputs import refuse_non_finite
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import LinearStep, Step
from ebflow_plugin.plan.values import Value, flatten, shapes_of, unflatten
from ebflow_plugin.wrapper import wrap

__all__ = ["Check", "VerificationReport", "compare", "invariants", "verify"]

_JACOBIAN_LIMIT = 2048  # the largest event size for a full Jacobian: 32 MB, and seconds for each step
_FEW = 128  # up to this size a Jacobian takes milliseconds, so it is computed at more points
_CHUNK = 128  # rows of a Jacobian that are computed at once


@dataclass(frozen=True)
class Check:
    """One claim, and its measurement.

    Attributes:
        name: The claim.
        passed: Whether it holds; None if it could not be measured.
        detail: The numbers, or why it could not be measured.
        path: The step; empty for the whole model.
    """

    name: str
    passed: bool | None
    detail: str
    path: str = ""


@dataclass(frozen=True)
class VerificationReport:
    """All checks of :func:`verify`. Prints as a table; truthy if nothing failed."""

    checks: tuple[Check, ...]

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.passed is False)

    def __bool__(self) -> bool:
        return not self.failures

    def __iter__(self) -> Iterator[Check]:
        return iter(self.checks)

    def __str__(self) -> str:
        words = {True: "ok", False: "FAILED", None: "not measured"}
        rows = [(words[check.passed], check.name, check.path, check.detail) for check in self.checks]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        hold, open_ = (sum(check.passed is word for check in self.checks) for word in (True, None))
        rest = f"; {open_} could not be measured" if open_ else ""
        return "\n".join((*lines, f"{hold} of {len(self.checks)} checks hold{rest}"))


@torch.inference_mode(False)  # derivatives are checked
def verify(flow: Any, x: Tensor, context: Tensor | None = None) -> VerificationReport:
    """Checks a wrapped flow numerically on your own batch.

    It measures that log_prob equals the flow's own and -energy - log Z; that samples of a batch do not influence each
    other; that each linear step is affine; that each log-det matches autograd's Jacobian (events of up to 2048
    elements); that each step's inverse undoes it; that the score and a second backward agree with finite differences.
    It also warns of trainable parameters that score matching cannot see, such as a class prior.
    Claims that cannot be measured are listed, with the reason. The flow is copied first: neither its parameters nor the
    state of a fresh ActNorm change.

    Arguments:
        flow: A flow, or an object that holds one, as for :func:`~ebflow_plugin.wrap`, or an
            :class:`~ebflow_plugin.EBFlow`.
        x: A few data points, with shape ``(B, *)``; at least two.
        context: Their context.

    Returns:
        A report that prints as a table.

    Raises:
        InputError: If x or the context holds NaN or inf; the message says how many, and where the first one is.
        VerificationError: If a check fails; the message is the report and names the step.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> flow = flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2]))
        >>> report = ebf.verify(flow, torch.randn(4, 2))
        >>> bool(report), len(report.failures)
        (True, 0)
    """
    model = flow if isinstance(flow, EBFlow) else wrap(flow)
    x = model.check(x, context)
    if x.shape[0] < 2:
        raise InputError(f"verify needs at least two data points, got {x.shape[0]}")
    refuse_non_finite("x", x)
    if context is not None and context.is_floating_point():
        refuse_non_finite("context", context)
    if len(model.preprocessing) or model.calibration.ready:
        model, x = _bare(model, x)
    report = VerificationReport(tuple(_checks(model, x.detach(), None if context is None else context.detach())))
    if not report:
        raise VerificationError(
            f"{len(report.failures)} of {len(report.checks)} checks failed\n{VerificationReport(report.failures)}"
        )
    return report


def _bare(model: EBFlow, x: Tensor) -> tuple[EBFlow, Tensor]:
    """The flow without added preprocessing and calibration, and its input."""
    added = sum(step.path.startswith("preprocess.") for step in model.plan.steps)
    with torch.no_grad():
        x = x if model.dequantize is None else model.dequantize.dequantize(x)[0]
        (x,), _ = model.plan[:added].encode(x)
    return wrap(model.flow, match_after=None, overrides=model.overrides), x


def _checks(model: EBFlow, x: Tensor, context: Tensor | None) -> Iterator[Check]:
    with kept_random_state(x.device), full_precision(x):
        torch.manual_seed(0)
        copied = copy.deepcopy(model)
        copied.plan.initialize(x, context)
        yield from _attempt("log_prob", invariants, copied, x, context)
        try:
            double, x = copied.double(), x.double()
            context = context.double() if context is not None and context.is_floating_point() else context
            double.energy(x, context)
        except Exception as error:  # a model with hard-coded float32: its derivatives are not measured
            yield Check("derivatives", None, f"the flow does not run in float64: {error}")
            return
        yield from _step_checks(double.plan, x, context, "")
        unseen = _unseen(double, x, context)
        double.requires_grad_(False)  # gradients of the parameters are not needed any more, and cost memory
        yield from _attempt("derivatives agree with finite differences", _derivatives, double, x, context)
        yield unseen
        yield from _step_checks(perturbed(double).plan, x, context, ", parameters moved")


def _attempt(name: str, measure: Callable[..., Iterator[Check]], *arguments: Any) -> Iterator[Check]:
    """Runs one measurement; an error inside it is a failure."""
    try:
        yield from measure(*arguments)
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        yield Check(name, False, f"{type(error).__name__}: {error} {notes}".strip())


def compare(name: str, ours: Tensor, theirs: Tensor, tolerance: float, path: str = "") -> Check:
    """Compares two tensors by their largest relative difference."""
    if ours.shape != theirs.shape:
        return Check(name, False, f"shapes {tuple(ours.shape)} and {tuple(theirs.shape)}", path)
    difference = ((ours - theirs).abs() / (1.0 + theirs.abs())).max() if ours.numel() else ours.new_zeros(())
    return Check(name, bool(difference <= tolerance), f"largest relative difference {difference.item():.1e}", path)


@torch.no_grad()
def invariants(
    model: EBFlow,
    x: Tensor,
    context: Tensor | None,
    own: Callable[[], Tensor] | None = None,
    tolerance: float | None = None,
) -> Iterator[Check]:
    """Contract 1: log_prob is the flow's own and -energy - log Z, and that of each sample alone.

    Arguments:
        model: A model whose ActNorms have started.
        x: Data.
        context: Its context.
        own: Returns the flow's own log_prob; by default the adapter's ``own_log_prob``.
        tolerance: The largest relative difference; by default one for the dtype of x.
    """
    usual = 1e-3 if x.dtype != torch.float64 else 1e-8
    ours, name = model.log_prob(x, context), "log_prob equals the flow's own"
    try:
        theirs = model.adapter.own_log_prob(model.flow, x.clone(), context) if own is None else own()
    except Exception as error:  # for example, nflows cannot invert its NaiveLinear
        yield Check(name, None, f"the flow's own log_prob raises {type(error).__name__}: {error}")
    else:
        # 1e-6 in float64: nflows computes the log-det of its LeakyReLU in float32, whatever the dtype of the model.
        check = compare(name, ours, theirs, tolerance or max(usual, 1e-6))
        flaws = [] if check.passed else _library_flaws(model.plan, tuple(x.shape[1:]))
        yield replace(check, passed=None, detail="; ".join((check.detail, *flaws))) if flaws else check
    total = -model.energy(x, context) - model.log_z(tuple(x.shape[1:]))
    yield compare("log_prob = -energy - log Z", ours, total, tolerance or usual)
    parts = [slice(1), slice(1, None)]
    alone = [model.log_prob(*picked(part, x, context)) for part in parts]
    yield compare("samples do not influence each other", torch.cat(alone), ours, tolerance or usual)


def _library_flaws(plan: Plan, event_shape: tuple[int, ...]) -> list[str]:
    """Known errors of the library's own log-dets for this event shape; ours are checked against autograd."""
    linear = [(step, shapes) for step, shapes in plan.shapes(event_shape) if isinstance(step, LinearStep)]
    return [f"the library {flaw} ({step.where})" for step, shapes in linear if (flaw := step.library_flaw(shapes[0]))]


def _step_checks(plan: Plan, x: Tensor, context: Tensor | None, when: str) -> Iterator[Check]:
    """Affinity of the linear steps, log-dets against autograd, and inverses, each at the input of the step."""
    reached: list[tuple[Step, Value]] = []
    try:
        with torch.no_grad():
            context = plan.embed(context)
            plan.encode(x, context, visit=lambda step, value: reached.append((step, value)))
    except Exception as error:  # perturbed parameters can leave the domain of a later step: the others are checked
        if not when:
            raise
        yield Check(f"every step runs{when}", None, f"{type(error).__name__}: {error}")
    for step, value in reached:
        for claim, measure in _CLAIMS.items():
            if measure is not _affinity or isinstance(step, LinearStep):
                yield from _attempt(claim + when, measure, step, value, context, claim + when)


def _on_flat(step: Step, value: Value, context: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The step as a function from flat rows to flat rows."""
    return lambda rows: flatten(step.encode(unflatten(rows, shapes_of(value)), context)[0])


def _affinity(step: Step, value: Value, context: Tensor | None, name: str) -> Iterator[Check]:
    """f(b) - f(a) = J(a)(b - a) = J(b)(b - a) between each point and the next, with the context of the first."""
    function = _on_flat(step, value, context)
    here = flatten(value).detach()
    there = here.roll(1, 0)
    moved = function(there) - function(here)
    tangents = [torch.autograd.functional.jvp(function, point, there - here)[1] for point in (here, there)]
    yield compare(name, torch.cat(tangents), torch.cat([moved, moved]), 1e-6, step.path)


def _log_det(step: Step, value: Value, context: Tensor | None, name: str) -> Iterator[Check]:
    rows = flatten(value).detach()
    size = rows.shape[1]
    if size > _JACOBIAN_LIMIT:
        yield Check(name, None, f"a Jacobian of {size} × {size} is too large", step.path)
        return
    rows, context = picked(slice(2 if size <= _FEW else 1), rows, context)
    ones = [picked(slice(row, row + 1), rows, context) for row in range(len(rows))]
    theirs = torch.stack([torch.linalg.slogdet(_jacobian(step, value, *one))[1] for one in ones])
    if isinstance(step, LinearStep):
        ours = torch.as_tensor(step.log_det(shapes_of(value), rows)).expand_as(theirs)
    else:
        ours = torch.as_tensor(step.encode(unflatten(rows, shapes_of(value)), context)[1])
    yield compare(name, ours.detach().to(theirs), theirs, 1e-5, step.path)


def _jacobian(step: Step, value: Value, point: Tensor, context: Tensor | None) -> Tensor:
    """The Jacobian of a step at one point, in chunks of rows: each row is the gradient at a copy of the point."""
    rows = []
    for which in torch.arange(point.shape[1], device=point.device).split(_CHUNK):
        copies = point.repeat(len(which), 1).requires_grad_()
        condition = None if context is None else context.repeat_interleave(len(which), 0)
        with torch.enable_grad():
            entries = _on_flat(step, value, condition)(copies).gather(1, which[:, None])
        rows.append(torch.autograd.grad(entries.sum(), copies)[0])
    return torch.cat(rows)


@torch.no_grad()
def _inverse(step: Step, value: Value, context: Tensor | None, name: str) -> Iterator[Check]:
    """decode(encode(x)) against x, or, for a map that loses digits of x, the encodings of both."""
    latents, _ = step.encode(value, context)
    try:
        back = step.decode(latents, context)
    except NotImplementedError:
        yield Check(name, None, "the step has no inverse", step.path)
        return
    again, _ = step.encode(back, context)
    pairs = [(flatten(back), flatten(value)), (flatten(again), flatten(latents))]
    if not all(bool(torch.isfinite(ours).all()) for ours, _ in pairs):
        yield Check(name, None, "the inverse is not finite at this data", step.path)
        return
    checks = [compare(name, ours, theirs, 1e-4, step.path) for ours, theirs in pairs]
    yield next((check for check in checks if check.passed), checks[0])


_CLAIMS = {
    "linear step is affine": _affinity,
    "log-det matches autograd": _log_det,
    "inverse undoes the step": _inverse,
}


def _derivatives(model: EBFlow, x: Tensor, context: Tensor | None) -> Iterator[Check]:
    """v·∇E against a difference of energies, and H v by double backward against a difference of scores."""
    step_size = 1e-5
    direction = torch.randn_like(x)
    ahead, after = x + step_size * direction, x - step_size * direction
    with torch.no_grad():
        slope = (model.energy(after, context) - model.energy(ahead, context)) / (2 * step_size)
    point = x.clone().requires_grad_()
    score = model.score(point, context)
    along = (score * direction).flatten(1).sum(1)
    yield _suspected(model, compare("score agrees with finite differences", along.detach(), slope, 1e-3))
    (product,) = torch.autograd.grad(along.sum(), point, allow_unused=True) if along.requires_grad else (None,)
    product = torch.zeros_like(x) if product is None else product
    difference = (model.score(ahead, context) - model.score(after, context)).detach() / (2 * step_size)
    check = compare("second backward agrees with finite differences", product, difference, 1e-3)
    yield _suspected(model, check)


def _suspected(model: EBFlow, check: Check) -> Check:
    """The check, which names the steps that are not known to be smooth if it failed."""
    if check.passed:
        return check
    suspects = [f"{step.path} ({step.smoothness})" for step in model.plan.steps if step.smoothness != "smooth"]
    why = f"steps whose score is not known to be smooth: {', '.join(suspects) or 'none'}"
    return replace(check, detail=f"{check.detail}; {why}")


def _unseen(model: EBFlow, x: Tensor, context: Tensor | None) -> Check:
    """The parameters that score matching leaves as they are. They are no error: likelihood trains them."""
    name = "the score depends on every trainable parameter"
    try:
        unseen = unseen_parameters(model, model.preprocess(x)[0], context)
    except Exception as error:  # a perturbed copy may leave the domain of the flow
        return Check(name, None, f"{type(error).__name__}: {error}")
    if not unseen:
        return Check(name, True, "none is unseen")
    warn(
        f"score matching cannot see {len(unseen)} trainable parameters: the score does not depend on them, so they "
        "keep their values\n  " + "\n  ".join(unseen) + "\nFreeze them with requires_grad_(False), or add a term that "
        "sees the energy (0.1 * ML(model), or energy_weight).",
        UnseenParameterWarning,
    )
    return Check(name, None, f"score matching cannot see {', '.join(unseen)}")
