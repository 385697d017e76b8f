"""How a model becomes a plan: for authors of adapters, and for users who register a class.

In: any object that is, or holds, a flow. Out: its adapter, and the plan that the adapter builds.

An adapter imports the core only from here, :mod:`ebflow_plugin.errors` and :mod:`ebflow_plugin.layers`:

- :class:`Adapter`, and the rules of classes: :class:`Child`, :class:`Container`, :class:`Rule`, or a class of steps;
- the kinds of steps: :class:`LinearStep` and its subclasses, :class:`NonlinearStep`, :class:`ElementwiseStep`,
  :class:`OpaqueStep`, :class:`RefusedStep`; the base density, :class:`Base`;
- the building blocks of steps and bases: :class:`Linearization`, :class:`ElementwiseMap`, :class:`Smoothness`,
  some functions.

Modules of the core, in this package too, import a name from where it is defined.
"""

from ebflow_plugin.adapting.adapter import Adapter, comes_from, is_a
from ebflow_plugin.adapting.densities import density_smoothness, gaussian_of
from ebflow_plugin.adapting.rules import (
    REGISTERED,
    Child,
    Container,
    OpaqueStep,
    Rule,
    registered_smoothness,
)
from ebflow_plugin.adapting.shared import (
    DEPENDS_ON_CONTEXT,
    VOLUME_PRESERVING,
    BoundedStep,
    ConditionedStep,
    IndexedPermutationStep,
    PackedLUStep,
    SigmoidStep,
    drop_caches,
    lazy_layers,
    takes_context,
)
from ebflow_plugin.adapting.spline_steps import PackedSplineStep
from ebflow_plugin.linalg.memo import Memo
from ebflow_plugin.plan.elementwise import (
    ActivationStep,
    ElementwiseMap,
    ElementwiseStep,
    clamped_logit_map,
    logit_map,
)
from ebflow_plugin.plan.linear import (
    ElementwiseAffineStep,
    IdentityStep,
    InitialisedAffineStep,
    IsometryStep,
    OrthogonalStep,
    PermutationStep,
    RefusedStep,
    SqueezeStep,
    TranslationStep,
)
from ebflow_plugin.plan.matrices import Factor, FullConvStep, FullLinearStep, MatrixStep, MixingStep, TriangularStep
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.registry import known_class
from ebflow_plugin.plan.smooth_modules import Smoothness, register_networks, worst_of
from ebflow_plugin.plan.smoothness import smoothness_of
from ebflow_plugin.plan.splines import rational_quadratic
from ebflow_plugin.plan.step import (
    Base,
    Gaussian,
    Linearization,
    LinearStep,
    NonlinearStep,
    Shape,
    Shapes,
    Step,
)
from ebflow_plugin.plan.values import per_sample, summed

__all__ = [
    "DEPENDS_ON_CONTEXT",
    "REGISTERED",
    "VOLUME_PRESERVING",
    "ActivationStep",
    "Adapter",
    "Base",
    "BoundedStep",
    "Child",
    "ConditionedStep",
    "Container",
    "ElementwiseAffineStep",
    "ElementwiseMap",
    "ElementwiseStep",
    "Factor",
    "FullConvStep",
    "FullLinearStep",
    "Gaussian",
    "IdentityStep",
    "IndexedPermutationStep",
    "InitialisedAffineStep",
    "IsometryStep",
    "LinearStep",
    "Linearization",
    "MatrixStep",
    "Memo",
    "MixingStep",
    "NonlinearStep",
    "OpaqueStep",
    "OrthogonalStep",
    "PackedLUStep",
    "PackedSplineStep",
    "PermutationStep",
    "Plan",
    "RefusedStep",
    "Rule",
    "Shape",
    "Shapes",
    "SigmoidStep",
    "Smoothness",
    "SqueezeStep",
    "Step",
    "TranslationStep",
    "TriangularStep",
    "clamped_logit_map",
    "comes_from",
    "density_smoothness",
    "drop_caches",
    "gaussian_of",
    "is_a",
    "known_class",
    "lazy_layers",
    "logit_map",
    "per_sample",
    "rational_quadratic",
    "register_networks",
    "registered_smoothness",
    "smoothness_of",
    "summed",
    "takes_context",
    "worst_of",
]
