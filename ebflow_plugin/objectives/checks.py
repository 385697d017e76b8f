r"""Checks, before training, of what score matching cannot learn with a given flow.

The constructor of an objective checks the steps of the flow and the preprocessing:

- A discontinuous score biases the objectives that integrate by parts.
- A discontinuous density biases every kind of score matching. For a LeakyReLU with slope 0.5 before a shift of 0.7, DSM
  learns 0.43 and 0.32, however small σ is.
- A wrong second derivative makes the objectives that differentiate the score wrong.
- Data with a discontinuous density bias the objectives that integrate by parts over it.

The first batch shows the parameters that the score does not depend on (a class prior, say). Score matching leaves them
at their initial values.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ebflow_plugin.errors import (
    BiasWarning,
    ContextError,
    EBFlowError,
    InputError,
    UnseenParameterWarning,
    UnsupportedStepError,
)
from ebflow_plugin.linalg.dense import without_autocast
from ebflow_plugin.linalg.streams import seeded_by
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives.base import Objective
from ebflow_plugin.plan.energy_model import perturbed
from ebflow_plugin.plan.preprocessing import DequantizeStep
from ebflow_plugin.plan.registry import altered_part
from ebflow_plugin.plan.smoothness import Smoothness
from ebflow_plugin.plan.step import Part

__all__ = [
    "EVERY_JUMP",
    "BlindSpots",
    "refuse_false_derivatives",
    "refuse_useless_context",
    "warn_about_jumps",
    "warn_about_uniform_noise",
]

ROWS = 16  # samples in a search for blind spots
EVERY_JUMP = (Smoothness.KINKED, Smoothness.JUMPS, Smoothness.UNKNOWN)
_MEANING = {
    Smoothness.KINKED: "its score jumps",
    Smoothness.JUMPS: "its density jumps",
    Smoothness.FALSE: "its second derivatives are wrong",
    Smoothness.UNKNOWN: "of unknown smoothness",
}


def refuse_false_derivatives(objective: Objective) -> None:
    """Raises if a step's second derivatives, in x or in x and the parameters, are silently wrong."""
    refused = [part for part in _parts(objective.model) if part.smoothness == Smoothness.FALSE]
    if refused:
        name = type(objective).__name__
        raise UnsupportedStepError(
            f"{name} cannot train {len(refused)} steps of this flow\n  " + "\n  ".join(_lines(refused)) + f"\n{name} "
            "differentiates the score, and would be silently wrong there. Use an objective that needs energies alone: "
            "ML, SML or FDSSM."
        )


def warn_about_jumps(objective: Objective, harmed_by: Collection[Smoothness], rarely: bool = False) -> None:
    """Warns if the smoothness of a step biases the objective, or may bias it.

    Arguments:
        objective: The objective.
        harmed_by: The kinds of smoothness that bias it.
        rarely: Whether it sees jumps of the score, but only in few samples (finite differences).
    """
    harmful = [part for part in _parts(objective.model) if part.smoothness in harmed_by]
    kinds = {part.smoothness for part in harmful}
    if not kinds:
        return
    name = type(objective).__name__
    advice = []
    if Smoothness.KINKED in kinds:
        effect = (
            "sees jumps of the score only in the few samples near them: use eps of at least 0.1"
            if rarely
            else "integrates by parts and misses jumps of the score, so its value and gradients are biased"
        )
        advice.append(
            f"{name} {effect}. Use DSM, which they do not bias, or ebflow_plugin.smooth(flow), which replaces "
            "ReLU-like activations of conditioners by smooth ones."
        )
    if Smoothness.JUMPS in kinds:
        advice.append(
            "The score does not show by how much a density jumps, so every kind of score matching is biased there: use "
            "ML or SML, or a smooth layer (SmoothLeakyReLU)."
        )
    if Smoothness.UNKNOWN in kinds:
        advice.append(
            f"{name} needs a continuous score, and the unknown classes may not have one. If they do, declare it: "
            'register_nonlinear(cls, smoothness="smooth"), for the class of the step, or of your network inside it. '
            "DSM needs less."
        )
    warnings.warn(
        f"{name} may be wrong about {len(harmful)} of {len(objective.model.core_plan.steps)} steps\n  "
        + "\n  ".join(_lines(harmful))
        + "\n"
        + "\n".join(advice),
        BiasWarning,
        stacklevel=3,
    )


def warn_about_uniform_noise(objective: Objective) -> None:
    """Warns if the data are dequantised with uniform noise: their density then jumps at every level.

    Integration by parts runs over the density of the data, and misses its jumps as it misses those of a score.
    """
    noisy = [step for step in objective.model.prefix.steps if isinstance(step, DequantizeStep)]
    if any(step.module.noise == "uniform" for step in noisy):
        name = type(objective).__name__
        warnings.warn(
            f"{name} integrates by parts over the density of the data, which jumps here\n  {noisy[0].where}: uniform "
            "noise has a jump at every level\nThat biases its value and gradients. Use "
            f'Dequantize({noisy[0].module.levels}, noise="smooth"), which has no jumps and a looser bound, or DSM or '
            "ML, which the jumps do not bias.",
            BiasWarning,
            stacklevel=3,
        )


def _parts(model: EBFlow) -> tuple[Part, ...]:
    return model.core_plan.parts()


def _lines(parts: Iterable[Part]) -> list[str]:
    return [f"{part.where}: {_MEANING[part.smoothness]}" for part in parts]


class Blind(NamedTuple):
    """The names of the trainable parameters, by whether the score depends on them."""

    constant: list[str]  # the energy depends on them, but only by a term constant in x
    unused: list[str]  # not even the energy depends on them, for this context
    seen: set[str]  # the score depends on them


class BlindSpots:
    """Searches for parameters that the score does not depend on, on a perturbed copy of a model.

    It uses the first batch. Parameters that do not show there are tested at random points too, if the flow accepts
    them: data may lie in the tails of a spline, where its parameters have no effect.

    Arguments:
        model: The model of the objective.
        energy_is_seen: Whether the objective depends on the energy itself.
        step: The step length of an objective by finite differences; 0 for objectives of the score.
    """

    def __init__(self, model: EBFlow, energy_is_seen: bool = False, step: float = 0.0) -> None:
        self._model = model
        self._step = step
        self.pending = not energy_is_seen

    def search(self, x: Tensor, context: Tensor | None) -> str | None:
        """Searches with a batch of the matched variable, once, and warns. The user's generators are not advanced.

        Returns:
            Why the search failed, for a warning after the loss; None if it succeeded.
        """
        self.pending = False
        flow = self._model.flow
        if not any(parameter.requires_grad and not parameter.is_meta for parameter in flow.parameters()):
            return None
        if altered_part(flow) is not None:  # a patched method in a copy would still use the original's parameters
            return None
        x, context = x[:ROWS], None if context is None else context[:ROWS].detach()
        own = torch.Generator().manual_seed(0)
        try:
            with seeded_by(own), without_autocast(x):
                blind = find_blind_spots(self._model, x, context, self._step)
                if blind.constant or blind.unused:
                    elsewhere = torch.randn(x.shape, generator=own).to(x)
                    blind = self._confirm(blind, elsewhere, context)
        except Exception as error:  # a search must not stop a training run
            return f"could not find out which parameters score matching cannot see: {type(error).__name__}: {error}"
        self._warn(blind)
        return None

    def _confirm(self, blind: Blind, x: Tensor, context: Tensor | None) -> Blind:
        """Removes the parameters that show at other points."""
        try:
            again = find_blind_spots(self._model, x, context, self._step)
        except Exception:  # random points may lie outside the domain of the flow
            return blind
        constant = {*blind.constant, *again.constant} - again.seen - blind.seen
        return Blind(
            [name for name in (*blind.constant, *blind.unused) if name in constant],
            [name for name in blind.unused if name in again.unused],
            blind.seen | again.seen,
        )

    def _warn(self, blind: Blind) -> None:
        unseen = [*blind.constant, *blind.unused]
        if not unseen:
            return
        parameters = dict(self._model.flow.named_parameters())
        total = sum(parameter.requires_grad for parameter in parameters.values())
        lines = [
            f"{name}  {tuple(parameters[name].shape)}"
            + (": not part of the energy at all" if name in blind.unused else "")
            for name in unseen
        ]
        warnings.warn(
            f"score matching cannot see {len(unseen)} of {total} trainable parameters: the score does not depend on "
            "them, so they keep their values\n  " + "\n  ".join(lines) + "\nFreeze them with "
            "requires_grad_(False), or train them with a term that sees the energy (ML, or energy_weight).",
            UnseenParameterWarning,
            stacklevel=7,
        )


def find_blind_spots(model: EBFlow, x: Tensor, context: Tensor | None = None, step: float = 0.0) -> Blind:
    """Finds the trainable parameters that the score does not depend on.

    Cost: one or two energies, and two backward passes.

    Arguments:
        model: A model, which is not changed: a copy is perturbed, since freshly initialised couplings look constant.
        x: Points of the matched variable.
        context: Their context.
        step: Tests differences of the energy over steps of this length, in place of the score.

    Raises:
        EBFlowError: If the energies of the copy, or their gradients, are not finite.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> class Prior(distributions.StandardNormal):
        ...     def __init__(self, shape):
        ...         super().__init__(shape)
        ...         self.level = nn.Parameter(torch.zeros(()))
        ...     def _log_prob(self, inputs, context):
        ...         return super()._log_prob(inputs, context) + self.level
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), Prior([2])))
        >>> find_blind_spots(model, torch.randn(4, 2)).constant
        ['_distribution.level']
    """
    model = perturbed(model)
    core = model.core
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
    named = {name: p for name, p in model.flow.named_parameters() if p.requires_grad and p.numel()}
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = core.energy(x, context)
        in_energy = _depends(energy.sum(), named)
        if step:  # weights of ±1: the terms cancel exactly where both energies have the same derivative
            ahead = core.energy(x + step * nn.functional.normalize(direction.flatten(1)).reshape(x.shape), context)
            signs = direction.flatten(1)[:, 0].sign()
            in_score = _depends((ahead * signs).sum() - (energy * signs).sum(), named)
        elif energy.requires_grad:
            (gradient,) = torch.autograd.grad(energy.sum(), x, create_graph=True, materialize_grads=True)
            in_score = _depends((gradient * direction).sum(), named)
        else:
            in_score = dict.fromkeys(named, False)
    return Blind(
        [name for name in named if in_energy[name] and not in_score[name]],
        [name for name in named if not in_energy[name] and not in_score[name]],
        {name for name in named if in_score[name]},
    )


def _depends(value: Tensor, named: dict[str, nn.Parameter]) -> dict[str, bool]:
    """Whether the gradient of the value with respect to each parameter is nonzero."""
    if not bool(torch.isfinite(value)):
        raise EBFlowError("the energy, or its gradient, of a perturbed copy is not finite")
    if not named or not value.requires_grad:
        return dict.fromkeys(named, False)
    gradients = torch.autograd.grad(value, list(named.values()), retain_graph=True, allow_unused=True)
    return {
        name: gradient is not None and bool(gradient.count_nonzero())
        for name, gradient in zip(named, gradients, strict=True)
    }


def refuse_useless_context(model: EBFlow, x: Tensor, context: Tensor | None) -> None:
    """Raises if a batch includes values, such as labels or targets, that the model does not use.

    Tests a perturbed copy of the model, since freshly initialised couplings ignore their context.
    """
    if context is None:
        return
    fix = (
        f"Drop the {'targets' if context.is_floating_point() else 'labels'}: pass the tensor alone, or DataLoader(…, "
        "collate_fn=lambda rows: torch.stack([row[0] for row in rows])). To condition on them, give the flow a "
        "context, or an embedding of labels."
    )
    what = f"each batch comes with {context.dtype} values of shape {tuple(context.shape)}"
    generator = torch.Generator().manual_seed(0)
    twin = perturbed(model)
    with torch.no_grad():
        u, _ = model.preprocess(x, torch.Generator(x.device).manual_seed(0))
        try:
            seen = twin.core.energy(u, context)
        except Exception as error:
            if isinstance(error, EBFlowError) and not isinstance(error, ContextError):
                raise
            raise InputError(f"{what}, and the model cannot take them as a context ({error}). {fix}") from error
        used = _differs(seen, twin, u, None)
        if not used and context.is_floating_point():  # perturbed integer labels may be invalid
            used = _differs(seen, twin, u, context + torch.randn(context.shape, generator=generator).to(context))
        if used is False:
            raise InputError(f"{what}, and the model makes no use of a context. {fix}")


def _differs(seen: Tensor, model: EBFlow, u: Tensor, context: Tensor | None) -> bool | None:
    """Whether the energies change with this context; None if the model does not accept it."""
    try:
        return not torch.equal(seen, model.core.energy(u, context))
    except Exception:
        return None
