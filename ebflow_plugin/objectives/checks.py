r"""Checks, before training, of what score matching cannot learn with a given flow.

The constructor of an objective checks the steps of the flow and the preprocessing:

- A discontinuous score biases the objectives that integrate by parts.
- A discontinuous density biases every kind of score matching. For a LeakyReLU with slope 0.5 before a shift of 0.7, DSM
  learns 0.43 and 0.32, however small σ is.
- A wrong second derivative makes the objectives that differentiate the score wrong.
- Data with a discontinuous density bias the objectives that integrate by parts over it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ebflow_plugin.errors import BiasWarning, UnsupportedStepError, warn
from ebflow_plugin.objectives.base import Objective
from ebflow_plugin.plan.smooth_modules import Smoothness
from ebflow_plugin.plan.step import Part

EVERY_JUMP = (Smoothness.KINKED, Smoothness.JUMPS, Smoothness.UNKNOWN)
_MEANING = {
    Smoothness.KINKED: "its score jumps",
    Smoothness.JUMPS: "its density jumps",
    Smoothness.WRONG: "its second derivatives are wrong",
    Smoothness.UNKNOWN: "of unknown smoothness",
}


def refuse_false_derivatives(objective: Objective) -> None:
    """Raises if a step's second derivatives, in x or in x and the parameters, are silently wrong."""
    refused, lines = _steps(objective, (Smoothness.WRONG,))
    if refused:
        name = type(objective).__name__
        raise UnsupportedStepError(
            f"{name} cannot train {len(refused)} steps of this flow\n{lines}\n{name} differentiates the score, and "
            "would be silently wrong there. Use an objective that needs energies alone: ML, SML or FDSSM."
        )


def warn_about_jumps(objective: Objective, harmed_by: Collection[Smoothness], rarely: bool = False) -> None:
    """Warns if the smoothness of a step biases the objective, or may bias it.

    Arguments:
        objective: The objective.
        harmed_by: The kinds of smoothness that bias it.
        rarely: Whether it sees jumps of the score, but only in few samples (finite differences).
    """
    name = type(objective).__name__
    effect = (
        "sees jumps of the score only in the few samples near them: use eps of at least 0.1"
        if rarely
        else "integrates by parts and misses jumps of the score, so its value and gradients are biased"
    )
    advice = {
        Smoothness.KINKED: f"{name} {effect}. Use DSM, which they do not bias, or ebflow_plugin.smooth(flow), which "
        "replaces ReLU-like activations of conditioners by smooth ones.",
        Smoothness.JUMPS: "The score does not show by how much a density jumps, so every kind of score matching is "
        "biased there: use ML or SML, or a smooth layer (SmoothLeakyReLU).",
        Smoothness.UNKNOWN: f"{name} needs a continuous score, and the unknown classes may not have one. If they do, "
        'declare it: register_nonlinear(cls, smoothness="smooth"), for the class of the step, or of your network '
        "inside it. DSM needs less.",
    }
    _warn(objective, harmed_by, advice)


def warn_about_jumping_densities(objective: Objective) -> None:
    """Warns if the model's own density jumps at places that its parameters move: no gradient of a sample shows that."""
    advice = (
        f"Gradients through samples miss the jumps, so those of {type(objective).__name__} are biased: use a smooth "
        "layer (SmoothLeakyReLU)."
    )
    _warn(objective, (Smoothness.JUMPS,), {Smoothness.JUMPS: advice})


def warn_about_uniform_noise(objective: Objective) -> None:
    """Warns if the data are dequantised with uniform noise: their density then jumps at every level.

    Integration by parts runs over the density of the data, and misses its jumps as it misses those of a score.
    """
    noisy = objective.model.dequantize
    if noisy is not None and noisy.noise == "uniform":
        warn(
            f"{type(objective).__name__} integrates by parts over the density of the data, which jumps here\n"
            f"  preprocess.0  {noisy}: uniform noise has a jump at every level\nThat biases its value and gradients. "
            f'Use Dequantize({noisy.levels}, noise="smooth"), which has no jumps and a looser bound, or DSM or ML, '
            "which the jumps do not bias.",
            BiasWarning,
        )


def _steps(objective: Objective, kinds: Collection[Smoothness]) -> tuple[list[Part], str]:
    """The steps of these kinds of smoothness, and a line for each."""
    found = [part for part in objective.model.core.parts() if part.smoothness in kinds]
    return found, "\n".join(f"  {part.where}: {_MEANING[part.smoothness]}" for part in found)


def _warn(objective: Objective, kinds: Collection[Smoothness], advice: Mapping[Smoothness, str]) -> None:
    """Warns about the steps of these kinds, with the advice for those that there are."""
    harmful, lines = _steps(objective, kinds)
    if harmful:
        found, count = {part.smoothness for part in harmful}, len(objective.model.core.steps)
        advices = "\n".join(text for kind, text in advice.items() if kind in found)
        name = type(objective).__name__
        warn(f"{name} may be wrong about {len(harmful)} of {count} steps\n{lines}\n{advices}", BiasWarning)
