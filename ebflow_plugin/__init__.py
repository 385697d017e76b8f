"""ebflow_plugin: train an existing normalizing flow by energy instead of likelihood.

    import ebflow_plugin as ebf

    model = ebf.wrap(flow)      # a flow of nflows, normflows or zuko, which is not changed
    model.energy(x)             # without the determinants of linear layers
    model.score(x)
    model.log_prob(x)           # exact, equal to the flow's own

The packages, each of which imports only those below it:

- ``wrapper``, ``verification``, ``testing``, ``lightning``: the entry points. ``wrap`` lets an adapter walk a flow.
- ``training``: ``fit``, checkpoints and resume, guards, processes.
- ``objectives``: score matching and likelihood, as losses of a model; the exact NLL of data.
- ``model``, ``report``, ``ema``: ``EBFlow``, a plan with its preprocessing; the table of its steps; averaged weights.
- ``closed_form``: fits without gradients: data-dependent starts, and the calibration of the base.
- ``sampling``: samples by the inverse, Langevin chains, divergences.
- ``log_z``: the normalising constant, exact or estimated.
- ``adapting``: how a model becomes a plan; all that an adapter imports.
- ``plan``: the heart. The steps of a flow from data to noise, split into linear and nonlinear ones, and the base.
- ``layers``, ``linalg``, ``errors``: the arithmetic of our layers; matrices and convolutions; errors and warnings.
"""

from typing import TYPE_CHECKING

from ebflow_plugin import objectives
from ebflow_plugin.adapting.adapter import Adapter
from ebflow_plugin.adapting.rules import register_container, register_linear, register_nonlinear
from ebflow_plugin.adapting.surgery import Replaced, smooth, unconstrain
from ebflow_plugin.closed_form.calibration import CalibrationReport
from ebflow_plugin.closed_form.gaussianization import LayerStart, StartReport
from ebflow_plugin.ema import EMA
from ebflow_plugin.errors import (
    AdapterError,
    AdapterWarning,
    BiasWarning,
    ConditioningWarning,
    ContextError,
    EBFlowError,
    EBFlowWarning,
    EstimateWarning,
    InputError,
    NoInverseError,
    NotAFlowError,
    ResumeWarning,
    SingularError,
    TrainingError,
    UnknownNameError,
    UnknownStepWarning,
    UnseenParameterWarning,
    UnsupportedStepError,
    VerificationError,
    WriteError,
    renamed,
)
from ebflow_plugin.log_z.estimate import Estimate
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives import make_objective, register_objective
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.preprocessing import Dequantize, Logit, Rescale, Standardize
from ebflow_plugin.plan.step import Step
from ebflow_plugin.report import FlowReport
from ebflow_plugin.sampling.chains import Chains
from ebflow_plugin.sampling.divergences import fisher_divergence, kl_divergence
from ebflow_plugin.sampling.langevin import denoise, impute, langevin
from ebflow_plugin.training import Event, FitResult, fit, load_best
from ebflow_plugin.verification import VerificationReport, verify
from ebflow_plugin.version import __version__
from ebflow_plugin.wrapper import describe, wrap

__all__ = [
    "EMA",
    "Adapter",
    "AdapterError",
    "AdapterWarning",
    "BiasWarning",
    "CalibrationReport",
    "Chains",
    "ConditioningWarning",
    "ContextError",
    "Dequantize",
    "EBFlow",
    "EBFlowError",
    "EBFlowWarning",
    "Estimate",
    "EstimateWarning",
    "Event",
    "FitResult",
    "FlowReport",
    "InputError",
    "LayerStart",
    "Logit",
    "NoInverseError",
    "NotAFlowError",
    "Plan",
    "Replaced",
    "Rescale",
    "ResumeWarning",
    "SingularError",
    "Standardize",
    "StartReport",
    "Step",
    "TrainingError",
    "UnknownNameError",
    "UnknownStepWarning",
    "UnseenParameterWarning",
    "UnsupportedStepError",
    "VerificationError",
    "VerificationReport",
    "WriteError",
    "__version__",
    "denoise",
    "describe",
    "fisher_divergence",
    "fit",
    "impute",
    "kl_divergence",
    "langevin",
    "load_best",
    "make_objective",
    "objectives",
    "register_container",
    "register_linear",
    "register_nonlinear",
    "register_objective",
    "smooth",
    "unconstrain",
    "verify",
    "wrap",
]

if not TYPE_CHECKING:  # with a module __getattr__, a type checker would accept any name
    __getattr__ = renamed(__name__, {"objective": "make_objective"})
