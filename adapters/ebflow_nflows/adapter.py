"""The adapter for nflows: which class acts how, and how a Flow is walked. Imports no flow library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from ebflow_nflows import linear, steps
from ebflow_nflows.base import ForeignBase, MixtureBase, NflowsBase, NormalBase
from ebflow_plugin.conditioners import see_into
from ebflow_plugin.discovery import Adapter
from ebflow_plugin.elementwise import ActivationStep
from ebflow_plugin.errors import UnsupportedStepError
from ebflow_plugin.matrix_steps import FullStep, PackedLUStep
from ebflow_plugin.plan import Plan
from ebflow_plugin.rules import Child, Container, Rule
from ebflow_plugin.steps import IdentityStep, IndexedPermutationStep, RefusedStep

# nflows, its forks, a package that is built of its parts, and our own layers
PACKAGES = ("nflows", "glasflow", "enflows", "flowcon", "nessai", "ebflow_nflows")
see_into(*PACKAGES, "sbi")


def composite(module: Any) -> Iterator[Child]:
    """The members of a CompositeTransform."""
    return (Child(f"_transforms.{index}", member) for index, member in enumerate(module._transforms))


def inverse(module: Any) -> Iterator[Child]:
    """The member of an InverseTransform."""
    yield Child("_transform", module._transform, inverted=True)


def multiscale(module: Any) -> Iterator[Child]:
    """The levels of a MultiscaleCompositeTransform, a split behind each but the last, and the joined latents."""
    last = len(module._transforms) - 1
    for index, member in enumerate(module._transforms):
        yield Child(f"_transforms.{index}", member)
        if index < last:
            yield Child("", module, step=linear.SplitStep)
    yield Child("", module, step=linear.CollectStep)


class EstimatedStep(RefusedStep):
    """An invertible residual block of enflows or flowcon."""

    reason = "its log-det is a random estimate"


RULES: dict[str, Rule] = {
    "CompositeTransform": Container(composite),
    "CompositeCDFTransform": Container(composite),
    "InverseTransform": Container(inverse),
    "Logit": Container(inverse),
    "CauchyCDFInverse": Container(inverse),
    "MultiscaleCompositeTransform": Container(multiscale),
    # linear
    "IdentityTransform": IdentityStep,
    "PointwiseAffineTransform": linear.PointwiseAffineStep,
    "AffineTransform": linear.PointwiseAffineStep,
    "Permutation": IndexedPermutationStep,
    "RandomPermutation": IndexedPermutationStep,
    "ReversePermutation": IndexedPermutationStep,
    "SqueezeTransform": linear.NflowsSqueezeStep,
    "NaiveLinear": linear.NaiveLinearStep,
    "LULinear": PackedLUStep,
    "QRLinear": linear.QRLinearStep,
    "SVDLinear": linear.SVDLinearStep,
    "HouseholderSequence": linear.HouseholderStep,
    "OneByOneConvolution": linear.OneByOneConvolutionStep,
    "BatchNorm": linear.BatchNormStep,
    "ActNorm": linear.ActNormStep,
    "FullLinear": FullStep,
    "FullConv2d": FullStep,
    "Inverted": Container(inverse),
    # nonlinear
    "SmoothLeakyReLU": ActivationStep,
    "Tanh": steps.TanhStep,
    "LogTanh": steps.LogTanhStep,
    "LeakyReLU": steps.LeakyReLUStep,
    "Sigmoid": steps.SigmoidStep,
    "Exp": steps.ExpStep,
    "GatedLinearUnit": steps.GatedLinearUnitStep,
    "CauchyCDF": steps.CauchyCDFStep,
    "AffineCouplingTransform": steps.ConditionedStep,
    "AdditiveCouplingTransform": steps.AdditiveCouplingStep,
    "MaskedAffineAutoregressiveTransform": steps.ConditionedStep,
    "UMNNCouplingTransform": steps.IntegratedStep,
    "MaskedUMNNAutoregressiveTransform": steps.IntegratedStep,
    "iResBlock": EstimatedStep,
    **{
        name.format(shape): step
        for shape, step in (
            ("Linear", steps.LinearSplineStep),
            ("Quadratic", steps.TailedSplineStep),
            ("Cubic", steps.TailedSplineStep),
            ("RationalQuadratic", steps.SplineStep),
        )
        for name in ("Piecewise{}CDF", "Piecewise{}CouplingTransform", "MaskedPiecewise{}AutoregressiveTransform")
    },
}

BASES = {
    "StandardNormal": NormalBase,
    "DiagonalNormal": NormalBase,
    "ConditionalDiagonalNormal": NormalBase,
    "MADEMoG": MixtureBase,
}


class NflowsAdapter(Adapter):
    """Walks the flows of nflows and its forks."""

    name = "nflows"
    flows = (
        "Flow objects of nflows, glasflow, enflows and flowcon; for a bare Transform, give it a base density first: "
        "Flow(transform, StandardNormal([features]))"
    )
    packages = PACKAGES
    rules = MappingProxyType(RULES)
    opaque = steps.UnknownStep
    density_methods = ("log_prob", "_log_prob")
    constrained = MappingProxyType(
        {
            "LULinear": lambda module: (module.features, False),
            "QRLinear": lambda module: (module.features, False),
            "SVDLinear": lambda module: (module.features, False),
            "HouseholderSequence": lambda module: (module.features, False),
            "OneByOneConvolution": lambda module: (module.features, True),
        }
    )

    def is_flow(self, model: object) -> bool:
        return any(parent.__name__ in ("Flow", "NFlow") and self.ours(parent) for parent in type(model).__mro__)

    def plan(self, flow: Any, overrides: Mapping[str, str] | None = None) -> Plan:
        self.refuse_own_density(flow)
        overrides = overrides or {}
        self.check_overrides(overrides, flow)
        transform, base = getattr(flow, "_transform", None), getattr(flow, "_distribution", None)
        if transform is None or base is None or not hasattr(base, "log_prob"):
            lacking = "transform" if transform is None else "base distribution with log_prob"
            raise UnsupportedStepError(f"{type(flow).__name__} has no {lacking}; build it with Flow(transform, base)")
        base_class = BASES.get(type(base).__name__, NflowsBase) if self.ours(type(base)) else ForeignBase
        embedding = getattr(flow, "_embedding_net", None)
        return Plan(
            steps=tuple(self.walk(transform, "_transform", self.inverted, overrides)),
            base=base_class(base, "_distribution"),
            adapter=self.name,
            **({} if embedding is None or isinstance(embedding, nn.Identity) else {"embed": embedding}),
        )

    def full_layer(self, features: int, images: bool) -> nn.Module:
        from ebflow_nflows.layers import FullConv2d, FullLinear

        return FullConv2d(features, kernel_size=1) if images else FullLinear(features)

    def inverse_of(self, module: nn.Module) -> nn.Module:
        from ebflow_nflows.layers import Inverted

        return Inverted(module)

    def unit(self, flow: nn.Module, path: str, inverted: bool) -> tuple[str, bool]:
        """An InverseTransform around a layer goes with it: the full layer has the inverse matrix."""
        parent = path.rpartition(".")[0]
        while parent and type(flow.get_submodule(parent)).__name__ == "InverseTransform":
            path, inverted = parent, not inverted
            parent = path.rpartition(".")[0]
        return path, inverted

    def own_log_prob(self, flow: Any, x: Tensor, context: Tensor | None) -> Tensor:
        self.release(flow)
        return super().own_log_prob(flow, x, context)


ADAPTER = NflowsAdapter()
