"""ebflow_plugin: train an existing normalizing flow by energy instead of likelihood.

    import ebflow_plugin as ebf

    model = ebf.wrap(flow)      # a model of nflows, normflows or zuko; it stays as it is
    model.energy(x)             # without the determinants of linear layers
    model.score(x)
    model.log_prob(x)           # exact, equal to the flow's own

The rooms, in the order in which they import each other:

- ``wrapper``, ``verification``, ``testing``, ``lightning``: the front door. ``wrap`` lets an adapter walk a flow.
- ``training``: ``fit``, averaged weights, checkpoints, guards, processes.
- ``objectives``: score matching and likelihood, as losses of a model.
- ``model``, ``report``: ``EBFlow``, a plan with its preprocessing; the table of its steps.
- ``closed_form``: fits without a gradient: the starts, and the calibration of the base.
- ``sampling``: samples by the inverse, Langevin chains, divergences.
- ``log_z``: the constant that an energy leaves out, exact or estimated.
- ``adapting``: how a model becomes a plan; all that somebody imports who adds a library.
- ``plan``: the heart. The steps of a flow from data to noise, split into linear and nonlinear ones, and the base.
- ``layers``, ``linalg``, ``errors``: arithmetic of our layers, matrices and convolutions, what can go wrong.
"""

from ebflow_plugin import objectives
from ebflow_plugin.adapting.surgery import smooth, unconstrain
from ebflow_plugin.adapting.teaching import register_container, register_linear, register_nonlinear
from ebflow_plugin.errors import (
    AdapterError,
    EBFlowError,
    InputError,
    NoInverseError,
    NotAFlowError,
    SingularError,
    TrainingError,
    UnknownNameError,
    UnsupportedStepError,
    VerificationError,
    WriteError,
)
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives import objective, register_objective
from ebflow_plugin.plan.preprocessing import Dequantize, Logit, Rescale, Standardize
from ebflow_plugin.report import FlowReport
from ebflow_plugin.sampling.divergences import fisher_divergence, kl_divergence
from ebflow_plugin.sampling.langevin import denoise, impute, langevin
from ebflow_plugin.training import FitResult, fit, load_best
from ebflow_plugin.training.ema import EMA
from ebflow_plugin.verification import verify
from ebflow_plugin.version import __version__
from ebflow_plugin.wrapper import describe, wrap

__all__ = [
    "EMA",
    "AdapterError",
    "Dequantize",
    "EBFlow",
    "EBFlowError",
    "FitResult",
    "FlowReport",
    "InputError",
    "Logit",
    "NoInverseError",
    "NotAFlowError",
    "Rescale",
    "SingularError",
    "Standardize",
    "TrainingError",
    "UnknownNameError",
    "UnsupportedStepError",
    "VerificationError",
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
    "objective",
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
