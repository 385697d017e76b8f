"""How a model becomes a plan: for authors of adapters, and for users who register a class.

In: any object that is, or holds, a flow. Out: its adapter, and the plan that the adapter builds.

An adapter imports the core only from here, :mod:`ebflow_plugin.errors` and :mod:`ebflow_plugin.layers`:

- :class:`Adapter`, and the rules of classes: :class:`Child`, :class:`Container`, :class:`Rule`, or a class of steps;
- the kinds of steps: :class:`LinearStep` and its subclasses, :class:`NonlinearStep`, :class:`ElementwiseStep`,
  :class:`OpaqueStep`, :class:`RefusedStep`; the base density, :class:`Base`;
- the building blocks of steps and bases: :class:`Expansion`, :class:`Curve`, :class:`Smoothness`, and a few functions.

Modules of the core, in this package too, import a name from where it is defined.
"""

from ebflow_plugin.adapting.adapter import Adapter, comes_from, is_a, takes_context
from ebflow_plugin.adapting.densities import density_smoothness, gaussian_mean
from ebflow_plugin.adapting.rules import (
    REGISTERED,
    Child,
    Container,
    OpaqueStep,
    RegisteredLinearStep,
    RegisteredRule,
    Rule,
    registered_smoothness,
)
from ebflow_plugin.adapting.shared import (
    DEPENDS_ON_CONTEXT,
    VOLUME_PRESERVING,
    BoundedStep,
    ConditionedStep,
    FollowedStep,
    IndexedPermutationStep,
    PackedLUStep,
    SigmoidStep,
    SplineStep,
    drop_caches,
    follow_members,
    follow_residual_block,
    follow_residual_net,
    lazy_layers,
)
from ebflow_plugin.linalg.memo import Memo
from ebflow_plugin.plan.activations import scaling
from ebflow_plugin.plan.couplings import (
    FIRST_SECOND,
    INTERLEAVED,
    INTERLEAVED_LAST,
    PAIR,
    Halves,
    LogScale,
    affine,
    coupling,
    exponential_scale,
    indexed,
    negative_scale,
    shifted,
    sigmoid_scale,
    soft_clipped_scale,
)
from ebflow_plugin.plan.derivatives import gaussian_expansion, transformed
from ebflow_plugin.plan.elementwise import (
    ActivationStep,
    Curve,
    ElementwiseStep,
    clamped_logit_curve,
    logit_curve,
    sigmoid_curve,
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
)
from ebflow_plugin.plan.masked_couplings import masked_coupling
from ebflow_plugin.plan.matrices import FullStep, MatrixStep, MixingStep, TriangularStep
from ebflow_plugin.plan.networks import (
    COPY,
    SUM,
    Opaque,
    Operation,
    activated,
    acts_as_its_class,
    follow,
    follow_class,
    followed,
    gated,
    linear,
    without_context,
)
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.registry import changes_the_map, resolve
from ebflow_plugin.plan.smooth_modules import Smoothness, see_into, worst_of
from ebflow_plugin.plan.smoothness import smoothness_of
from ebflow_plugin.plan.step import (
    Base,
    BaseExpansion,
    Expandable,
    Expansion,
    Linearity,
    LinearStep,
    NonlinearStep,
    Part,
    Shape,
    Shapes,
    Step,
)
from ebflow_plugin.plan.values import Value, per_sample, summed

__all__ = [
    "COPY",
    "DEPENDS_ON_CONTEXT",
    "FIRST_SECOND",
    "INTERLEAVED",
    "INTERLEAVED_LAST",
    "PAIR",
    "REGISTERED",
    "SUM",
    "VOLUME_PRESERVING",
    "ActivationStep",
    "Adapter",
    "Base",
    "BaseExpansion",
    "BoundedStep",
    "Child",
    "ConditionedStep",
    "Container",
    "Curve",
    "ElementwiseAffineStep",
    "ElementwiseStep",
    "Expandable",
    "Expansion",
    "FollowedStep",
    "FullStep",
    "Halves",
    "IdentityStep",
    "IndexedPermutationStep",
    "InitialisedAffineStep",
    "IsometryStep",
    "LinearStep",
    "Linearity",
    "LogScale",
    "MatrixStep",
    "Memo",
    "MixingStep",
    "NonlinearStep",
    "Opaque",
    "OpaqueStep",
    "Operation",
    "OrthogonalStep",
    "PackedLUStep",
    "Part",
    "PermutationStep",
    "Plan",
    "RefusedStep",
    "RegisteredLinearStep",
    "RegisteredRule",
    "Rule",
    "Shape",
    "Shapes",
    "SigmoidStep",
    "Smoothness",
    "SplineStep",
    "SqueezeStep",
    "Step",
    "TriangularStep",
    "Value",
    "activated",
    "acts_as_its_class",
    "affine",
    "changes_the_map",
    "clamped_logit_curve",
    "comes_from",
    "coupling",
    "density_smoothness",
    "drop_caches",
    "exponential_scale",
    "follow",
    "follow_class",
    "follow_members",
    "follow_residual_block",
    "follow_residual_net",
    "followed",
    "gated",
    "gaussian_expansion",
    "gaussian_mean",
    "indexed",
    "is_a",
    "lazy_layers",
    "linear",
    "logit_curve",
    "masked_coupling",
    "negative_scale",
    "per_sample",
    "registered_smoothness",
    "resolve",
    "scaling",
    "see_into",
    "shifted",
    "sigmoid_curve",
    "sigmoid_scale",
    "smoothness_of",
    "soft_clipped_scale",
    "summed",
    "takes_context",
    "transformed",
    "without_context",
    "worst_of",
]
