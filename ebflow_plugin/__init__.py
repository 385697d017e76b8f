"""ebflow_plugin: train an existing normalizing flow by energy instead of likelihood.

    import ebflow_plugin as ebf

    model = ebf.wrap(flow)      # a flow of nflows, normflows or zuko, which is not changed
    model.energy(x)             # without the determinants of linear layers
    model.score(x)
    model.log_prob(x)           # exact, equal to the flow's own

The packages, each of which imports only those below it:

- ``wrapper``, ``verification``, ``covering``, ``testing``, ``lightning``: the entry points. ``wrap`` lets an adapter
  walk a flow.
- ``training``: ``fit``, a short loop; guards; averaged weights; the exact NLL of data; all that is serious, in
  Lightning.
- ``objectives``: score matching, likelihood and targets, as losses of a model.
- ``sampling``: Langevin chains by the score; samples of a model, weighted for a target density.
- ``model``, ``planned``, ``report``: ``EBFlow``; the plans that it computes with; the table of their steps.
- ``closed_form``: fits without gradients: data-dependent starts, and the calibration of the base.
- ``log_z``: the normalising constant, exact or estimated.
- ``adapting``: how a model becomes a plan; all that an adapter imports.
- ``plan``: the heart. The steps of a flow from data to noise, split into linear and nonlinear ones, and the base.
- ``layers``, ``linalg``, ``errors``: the arithmetic of our layers; matrices and convolutions; errors and warnings.
"""

from ebflow_plugin import objectives
from ebflow_plugin.adapting.adapter import Adapter
from ebflow_plugin.adapting.rules import register_container, register_linear, register_nonlinear
from ebflow_plugin.adapting.surgery import Replaced, smooth, unconstrain
from ebflow_plugin.closed_form.calibration import CalibrationReport
from ebflow_plugin.closed_form.gaussianization import LayerStart, StartReport
from ebflow_plugin.covering import CoverageReport, coverage
from ebflow_plugin.errors import (
    AdapterError,
    AdapterWarning,
    BiasWarning,
    ConditioningWarning,
    ContextError,
    CoverageWarning,
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
)
from ebflow_plugin.log_z.estimate import Estimate
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives import make_objective, register_objective
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.preprocessing import Dequantize, Logit, Rescale, Standardize
from ebflow_plugin.plan.step import Step
from ebflow_plugin.report import FlowReport
from ebflow_plugin.sampling.chains import Chains
from ebflow_plugin.sampling.langevin import denoise, impute, langevin
from ebflow_plugin.sampling.target import MetropolisChain, WeightedSamples, importance
from ebflow_plugin.training import EMA, Event, FitResult, fit, load_best, parameter_groups
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
    "CoverageReport",
    "CoverageWarning",
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
    "MetropolisChain",
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
    "WeightedSamples",
    "WriteError",
    "__version__",
    "coverage",
    "denoise",
    "describe",
    "fit",
    "importance",
    "impute",
    "langevin",
    "load_best",
    "make_objective",
    "objectives",
    "parameter_groups",
    "register_container",
    "register_linear",
    "register_nonlinear",
    "register_objective",
    "smooth",
    "unconstrain",
    "verify",
    "wrap",
]
