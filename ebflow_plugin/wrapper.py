"""wrap() and describe(): the front door."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ebflow_plugin.adapting.discovery import find_flow
from ebflow_plugin.errors import InputError, UnknownStepWarning, UnseenParameterWarning, UnsupportedStepError, warn
from ebflow_plugin.model import EBFlow
from ebflow_plugin.plan.preprocessing import boundary, refuse_trainable
from ebflow_plugin.report import FlowReport


def wrap(
    flow: Any,
    *,
    match_after: str | int | None = "auto",
    preprocess: Sequence[nn.Module] = (),
    strict: bool = False,
    overrides: Mapping[str, str] | None = None,
    check_finite: bool = False,
) -> EBFlow:
    """Turns a normalizing flow into an energy-based flow that shares all parameters with it.

    The flow itself is not changed: it can be trained, saved and sampled as before, with or without the wrapper.

    Arguments:
        flow: A flow of a library that has an adapter (nflows and its forks, normflows, zuko), or an object that holds
            exactly one (sbi's density estimators, nessai's ``FlowModel``).
        match_after: Where the matched variable of score matching begins (MaP): after the step with this path or
            index; after the leading fixed steps that end in a logit or similar, or in a
            :class:`~ebflow_plugin.Standardize` (``"auto"``); or at the data (None).
            ``log_prob``, ``energy`` and ``score`` are those of the data in any case.
        preprocess: Steps to put in front of a flow that has none: :class:`~ebflow_plugin.Dequantize`,
            :class:`~ebflow_plugin.Rescale`, :class:`~ebflow_plugin.Logit`, :class:`~ebflow_plugin.Standardize`.
        strict: Raises on transforms of unknown class. By default they keep their own log-det, which is exact, and
            one :class:`~ebflow_plugin.UnknownStepWarning` lists them.
        overrides: ``"linear"`` or ``"nonlinear"`` by path in the flow, which replaces the rule of the class.
        check_finite: Checks every input for NaN and inf, which synchronises with the device.

    Raises:
        NotAFlowError: If the object is no flow and does not hold exactly one.
        UnsupportedStepError: If steps cannot be part of an energy; the message lists all of them, with the reasons.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> flow = flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2]))
        >>> model = ebf.wrap(flow)
        >>> import torch
        >>> x = torch.randn(5, 2)
        >>> torch.allclose(model.log_prob(x), flow.log_prob(x))
        True
        >>> model.energy(x).shape, model.score(x).shape
        (torch.Size([5]), torch.Size([5, 2]))
    """
    if isinstance(flow, EBFlow):
        raise InputError("this is an EBFlow already; to wrap its flow with other options, wrap model.flow")
    found = find_flow(flow)
    if found.inside and isinstance(flow, nn.Module):
        ours = {id(parameter) for parameter in found.flow.parameters()}
        outside = [name for name, p in flow.named_parameters() if p.requires_grad and id(p) not in ours]
        if outside:
            warn(
                f"the flow at .{found.inside} is wrapped alone: {len(outside)} trainable parameters of the "
                f"{type(flow).__name__} around it are not part of the model (the first is {outside[0]!r})",
                UnseenParameterWarning,
            )
    steps = (preprocess,) if isinstance(preprocess, nn.Module) else tuple(preprocess)
    model = EBFlow(found, match_after, steps, overrides, check_finite)
    plan, prefix = model.plan, model.prefix
    plan.refuse()
    unknown = [f"{step.where}: {step.reason}" for step in plan.steps if not step.known]
    if unknown:
        message = (
            f"{len(unknown)} of {len(plan.steps)} steps are not known (adapter {plan.adapter!r})\n  "
            + "\n  ".join(unknown)
            + ("" if strict else "\nThey keep their own log-det: exact, only slower.")
            + "\nRegister their class with ebflow_plugin.register_linear, register_nonlinear or register_container, or "
            'pass overrides={"path": "linear"}.'
        )
        if strict:
            raise UnsupportedStepError(message)
        warn(message, UnknownStepWarning)
    refuse_trainable(prefix)
    return model


def describe(flow: Any, *, overrides: Mapping[str, str] | None = None) -> FlowReport:
    """Walks a flow as :func:`wrap` does, and returns the report without wrapping it.

    Never raises on an unknown or refused class: the report shows it.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> flow = flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2]))
        >>> [(row.path, row.linearity) for row in ebf.describe(flow)]
        [('_transform', 'linear')]
    """
    if isinstance(flow, EBFlow):
        return flow.report
    found = find_flow(flow)
    plan = found.adapter.plan(found.flow, overrides)
    return FlowReport.of(plan, found.inside, boundary(plan, "auto"))
