"""The adapter for zuko: the rules of its classes, and the walk of a Flow. Imports no flow library.

A lazy module of zuko builds a transform from a context. The walk goes by the classes of the lazy modules, and for an
UnconditionalTransform by the class of the transform that it builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ebflow_plugin.adapting import (
    REGISTERED,
    ActivationStep,
    Adapter,
    Base,
    Child,
    Container,
    FullConvStep,
    FullLinearStep,
    Plan,
    Rule,
    Step,
    comes_from,
    is_a,
    register_networks,
)
from ebflow_plugin.errors import InputError
from ebflow_zuko import linear, steps
from ebflow_zuko.base import base_of
from ebflow_zuko.linear import built_name, factory_of, held
from ebflow_zuko.transforms import PACKAGES, known_name

register_networks(("zuko", "sbi"))  # all of their networks hold their activations as modules


def matrix(step: type[Step], dim: int = 2) -> Rule:
    """The rule of a transform with one matrix or permutation; zuko handles those with one per sample."""

    def rule(module: Any) -> Rule | None:
        return step if all(tensor.dim() == dim for tensor in held(module)) else None

    return rule


# The rules of transforms whose parameters do not depend on a context.
TRANSFORMS: dict[str, Rule] = {
    **dict.fromkeys(steps.SMOOTHNESS, steps.UnivariateStep),
    "ComposedTransform": Container.of_list("transforms"),
    "ComposeTransform": Container.of_list("parts"),
    "DependentTransform": Container.of_one("base"),
    "IndependentTransform": Container.of_one("base_transform"),
    "Inverse": Container.of_one("_inv", inverted=True),
    "_InverseTransform": Container.of_one("_inv", inverted=True),
    # linear
    "IdentityTransform": linear.SameStep,
    "AdditiveTransform": linear.AdditiveStep,
    "AffineTransform": linear.AffineStep,
    "MonotonicAffineTransform": linear.AffineStep,
    "PermutationTransform": matrix(linear.OrderStep, dim=1),
    "RotationTransform": matrix(linear.RotationStep),
    "LULinearTransform": matrix(linear.TriangularMatrixStep),
    # nonlinear
    "ExpTransform": steps.ExpStep,
    "SigmoidTransform": steps.LogisticStep,
    "SoftclipTransform": steps.SoftclipStep,
    "FreeFormJacobianTransform": steps.IntegratedFlowStep,
}
COMPOSITIONS = ("ComposedTransform", "ComposeTransform", "DependentTransform", "IndependentTransform")


def unconditional(module: Any) -> Rule | None:
    """An UnconditionalTransform, by the class that it builds: of zuko, of torch, or registered by a user."""
    factory, name = factory_of(module), built_name(module)
    if isinstance(factory, type) and (registered := REGISTERED.get(factory)) is not None:
        return registered
    if name in COMPOSITIONS or _holds_a_transform(module):  # their members are transforms, not lazy modules
        return Container(lambda module: [Child("", module())])
    return TRANSFORMS.get(name or "")


def elementwise(module: Any) -> Rule:
    """An ElementWiseTransform: without a context its parameters are those of the module."""
    name = known_name(module.univariate)
    if hasattr(module, "phi") or name in ("AdditiveTransform", "IdentityTransform"):
        return TRANSFORMS.get(name or "", steps.UnivariateStep)
    return steps.UnivariateStep


def _holds_a_transform(module: Any) -> bool:
    """Whether it builds nothing, but returns a transform that sbi stored in it."""
    factory = getattr(module, "f", None)
    return type(factory).__name__ == "CallableTransform" and comes_from(type(factory), ("sbi",))


RULES: dict[str, Rule] = {
    "LazyComposedTransform": Container.of_list("transforms"),
    "LazyInverse": Container.of_one("transform", inverted=True),
    "UnconditionalTransform": unconditional,
    "Unconditional": unconditional,
    "ElementWiseTransform": elementwise,
    "MaskedAutoregressiveTransform": steps.AutoregressiveStep,
    "GeneralCouplingTransform": steps.CouplingStep,
    "FFJTransform": steps.IntegratedFlowStep,
    "FullLinear": FullLinearStep,
    "FullConv2d": FullConvStep,
    "SinhArcsinh": ActivationStep,
    "SmoothLeakyReLU": ActivationStep,
}


class ZukoAdapter(Adapter):
    """Walks the flows of zuko, and the estimators of sbi, which consist of a flow and a network for the context."""

    name = "zuko"
    flows = (
        "the flows of zuko.flows, zuko.lazy.Flow, zuko.mixtures.GMM, sbi's ZukoFlow; for a bare LazyTransform, give it "
        "a base density first: Flow(transform, UnconditionalDistribution(DiagNormal, mean, std, buffer=True))"
    )
    models = ("Flow", "GMM")
    packages = PACKAGES
    rules = MappingProxyType(RULES)
    opaque = steps.UnknownStep
    density_methods = ("forward",)
    inverters = ("LazyInverse",)
    constrained = MappingProxyType(
        dict.fromkeys(("RotationTransform", "LULinearTransform"), lambda module: (held(module)[0].shape[-1], False))
    )

    def is_flow(self, model: object) -> bool:
        return super().is_flow(model) or is_estimator(model)

    def rule(self, cls: type) -> Rule | None:
        if issubclass(cls, torch.distributions.Transform) and comes_from(cls, (*PACKAGES, "torch")):
            return TRANSFORMS.get(cls.__name__)
        return super().rule(cls)

    def plan(self, flow: Any, overrides: Mapping[str, str] | None = None) -> Plan:
        overrides = self.check_overrides(overrides, flow)
        if is_estimator(flow):
            self.refuse_own_density(flow, methods=("log_prob",), packages=("sbi",))
            walked, base = self._parts(flow.net, "net", overrides)
            return Plan(walked, base, adapter=self.name, embedding=Embedding(flow._embedding_net))
        walked, base = self._parts(flow, "", overrides)
        return Plan(walked, base, adapter=self.name)

    def _parts(self, flow: Any, path: str, overrides: Mapping[str, str]) -> tuple[tuple[Step, ...], Base]:
        """The steps of a flow and its base; if the base is a flow, its steps are appended, and its base is used."""
        walked: list[Step] = []
        while is_a(flow, ("Flow",), PACKAGES):
            self.refuse_own_density(flow)
            walked += self.walk(flow.transform, f"{path}.transform".lstrip("."), self.inverted, overrides)
            flow, path = flow.base, f"{path}.base".lstrip(".")
        return tuple(walked), base_of(flow, path)

    def own_log_prob(self, flow: Any, x: Tensor, context: Tensor | None) -> Tensor:
        """The library's own density: ``flow(context).log_prob(x)``."""
        if is_estimator(flow):
            of_samples: Tensor = flow.log_prob(x[None], context)
            return of_samples[0]
        return flow(context).log_prob(x)

    def inverse_of(self, module: nn.Module) -> nn.Module:
        from zuko.lazy import LazyInverse

        return LazyInverse(module)


class Embedding(nn.Module):
    """The embedding of a condition in sbi: standardisation, a network, and one row for each sample."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, context: Tensor | None) -> Tensor:
        """Maps conditions, with shape ``(B, *)``, to contexts of the flow, with shape ``(B, C)``."""
        if context is None:
            raise InputError("this estimator is conditional: pass the observations as context")
        embedded: Tensor = self.network(context)
        return embedded.reshape(context.shape[0], -1)


def is_estimator(model: object) -> bool:
    """Whether an object is sbi's ZukoFlow: a flow, and a network for the condition."""
    return is_a(model, ("ZukoFlow",), ("sbi",))


ADAPTER = ZukoAdapter()
