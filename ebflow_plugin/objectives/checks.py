r"""What score matching cannot do with a given flow, said before training and not found out after it.

Two things are looked for. When an objective is made, steps that bias or falsify it: a score that jumps biases what
integrates by parts, a density that jumps biases every kind of score matching (of a LeakyReLU with slope 0.5 before a
shift of 0.7, DSM learns 0.43 and 0.32, however small σ is), a wrong second derivative falsifies what differentiates the
score; and the data must not jump either, for what integrates by parts over their density. And with its first batch,
parameters that the score does not depend on (a class prior, say): score matching leaves them at their initial value.
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

ROWS = 16  # how many samples a search for blind spots takes
EVERY_JUMP = (Smoothness.KINKED, Smoothness.JUMPS, Smoothness.UNKNOWN)
_MEANING = {
    Smoothness.KINKED: "its score jumps",
    Smoothness.JUMPS: "its density jumps",
    Smoothness.FALSE: "its second derivatives are wrong",
    Smoothness.UNKNOWN: "of unknown smoothness",
}


def refuse_false_derivatives(objective: Objective) -> None:
    """Raises if a step's second derivatives, in x or in x and the parameters, are silently wrong."""
    found = [part for part in _parts(objective.model) if part.smoothness == Smoothness.FALSE]
    if found:
        name = type(objective).__name__
        raise UnsupportedStepError(
            f"{name} cannot train {len(found)} steps of this flow\n  " + "\n  ".join(_lines(found)) + f"\n{name} "
            "differentiates the score, and would be wrong there without an error. Use one that needs energies alone: "
            "ML, SML or FDSSM."
        )


def warn_about_jumps(objective: Objective, harmed_by: Collection[Smoothness], rarely: bool = False) -> None:
    """Warns if steps do what an objective cannot see, or may do so.

    Arguments:
        objective: The objective.
        harmed_by: What does it harm.
        rarely: Whether it sees jumps of the score, but with few samples (finite differences).
    """
    found = [part for part in _parts(objective.model) if part.smoothness in harmed_by]
    kinds = {part.smoothness for part in found}
    if not kinds:
        return
    name = type(objective).__name__
    advice = []
    if Smoothness.KINKED in kinds:
        effect = (
            "leaves jumps of the score to the few samples near them: take eps of at least 0.1"
            if rarely
            else "integrates by parts and misses jumps of the score, so that its value and gradients are biased"
        )
        advice.append(
            f"{name} {effect}. Use DSM, which they do no harm, or ebflow_plugin.smooth(flow), which gives ReLU-like "
            "activations of conditioners a smooth form."
        )
    if Smoothness.JUMPS in kinds:
        advice.append(
            "No score shows by how much a density jumps, so that every kind of score matching is biased there: use ML "
            "or SML, or a smooth layer (SmoothLeakyReLU)."
        )
    if Smoothness.UNKNOWN in kinds:
        advice.append(
            "Nobody said whether the score of the unknown classes is continuous, which "
            f'{name} needs; if you know that it is: register_nonlinear(cls, smoothness="smooth"), for the class of the '
            "step, or of your network inside of it. DSM needs less."
        )
    warnings.warn(
        f"{name} may be wrong about {len(found)} of {len(objective.model.core_plan.steps)} steps\n  "
        + "\n  ".join(_lines(found))
        + "\n"
        + "\n".join(advice),
        BiasWarning,
        stacklevel=3,
    )


def warn_about_uniform_noise(objective: Objective) -> None:
    """Warns if the data are made continuous by uniform noise: their density then jumps at every level.

    What integrates by parts does so over the density of the data, and misses its jumps as it misses those of a score.
    """
    noisy = [step for step in objective.model.prefix.steps if isinstance(step, DequantizeStep)]
    if any(step.module.noise == "uniform" for step in noisy):
        name = type(objective).__name__
        warnings.warn(
            f"{name} integrates by parts over the density of the data, which jumps here\n  {noisy[0].where}: uniform "
            "noise has a jump at every level\nValue and gradients are biased by that. Use "
            f'Dequantize({noisy[0].module.levels}, noise="smooth"), which has no jumps and a looser bound, or DSM or '
            "ML, which the jumps do no harm.",
            BiasWarning,
            stacklevel=3,
        )


def _parts(model: EBFlow) -> tuple[Part, ...]:
    return model.core_plan.parts()


def _lines(parts: Iterable[Part]) -> list[str]:
    return [f"{part.where}: {_MEANING[part.smoothness]}" for part in parts]


class Blind(NamedTuple):
    """Names of trainable parameters, by what of them the score shows."""

    constant: list[str]  # only the energy depends on them: a constant of x
    unused: list[str]  # nor does the energy, for this context
    seen: set[str]  # the others, which it depends on


class BlindSpots:
    """Searches for parameters that the score does not depend on, on a perturbed copy of a model.

    It looks at the first batch that comes. What that does not show is looked for at random points too, where the flow
    takes them: data may lie in the tails of a spline, which its parameters do not reach.

    Arguments:
        model: The model of the objective.
        energy_is_seen: Whether the objective sees the energy besides the score.
        step: The length of the steps by which it sees changes of the energy; 0 for the score.
    """

    def __init__(self, model: EBFlow, energy_is_seen: bool = False, step: float = 0.0) -> None:
        self._model = model
        self._step = step
        self.open = not energy_is_seen  # whether there is something to look for

    def look(self, x: Tensor, context: Tensor | None) -> str | None:
        """Searches with a batch of the matched variable, once. No generator of the user's is drawn from.

        Returns:
            Why it could not find out, to be said if the loss itself can be computed; None if it could.
        """
        self.open = False
        flow = self._model.flow
        if not any(parameter.requires_grad and not parameter.is_meta for parameter in flow.parameters()):
            return None
        if altered_part(flow) is not None:  # in a copy, a patched method would still act with the original's numbers
            return None
        x, context = x[:ROWS], None if context is None else context[:ROWS].detach()
        own = torch.Generator().manual_seed(0)
        try:
            with seeded_by(own), without_autocast(x):
                found = find_blind_spots(self._model, x, context, self._step)
                if found.constant or found.unused:
                    elsewhere = torch.randn(x.shape, generator=own).to(x)
                    found = self._confirmed(found, elsewhere, context)
        except Exception as error:  # a search must not stop a training run
            return f"could not find out which parameters score matching cannot see: {type(error).__name__}: {error}"
        self._report(found)
        return None

    def _confirmed(self, found: Blind, x: Tensor, context: Tensor | None) -> Blind:
        """What other points do not show either."""
        try:
            again = find_blind_spots(self._model, x, context, self._step)
        except Exception:  # the flow has a domain, and only the data are known to lie in it
            return found
        constant = {*found.constant, *again.constant} - again.seen - found.seen
        return Blind(
            [name for name in (*found.constant, *found.unused) if name in constant],
            [name for name in found.unused if name in again.unused],
            found.seen | again.seen,
        )

    def _report(self, found: Blind) -> None:
        unseen = [*found.constant, *found.unused]
        if not unseen:
            return
        parameters = dict(self._model.flow.named_parameters())
        total = sum(parameter.requires_grad for parameter in parameters.values())
        lines = [
            f"{name}  {tuple(parameters[name].shape)}"
            + (": not part of the energy at all" if name in found.unused else "")
            for name in unseen
        ]
        warnings.warn(
            f"score matching cannot see {len(unseen)} of {total} trainable parameters: the score does not depend on "
            "them, so that they keep their value\n  " + "\n  ".join(lines) + "\nFreeze them with "
            "requires_grad_(False), or train them with a term that sees the energy (ML, or energy_weight).",
            UnseenParameterWarning,
            stacklevel=7,
        )


def find_blind_spots(model: EBFlow, x: Tensor, context: Tensor | None = None, step: float = 0.0) -> Blind:
    """Names the trainable parameters that the score does not depend on: an energy or two, and two backward passes.

    Arguments:
        model: A model, which stays as it is: a copy is perturbed, since fresh couplings look constant.
        x: Points of the matched variable.
        context: Their context.
        step: Asks for changes of the energy over steps of this length, instead of the score.

    Raises:
        EBFlowError: If the copy gives values that are not finite.

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
        if step:  # signs of ±1 cancel exactly where both energies have the same derivative
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
    """Whether the gradient of a value in each parameter is anything but zero."""
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
    """Raises if a batch comes with values, such as labels or targets, that the model makes no use of.

    Looks at a perturbed copy of the model, since fresh couplings do not see their context.
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
        if not used and context.is_floating_point():  # other labels need not be labels
            used = _differs(seen, twin, u, context + torch.randn(context.shape, generator=generator).to(context))
        if used is False:
            raise InputError(f"{what}, and the model makes no use of a context. {fix}")


def _differs(seen: Tensor, model: EBFlow, u: Tensor, context: Tensor | None) -> bool | None:
    """Whether a model has other energies with this context; None if it does not take it."""
    try:
        return not torch.equal(seen, model.core.energy(u, context))
    except Exception:
        return None
