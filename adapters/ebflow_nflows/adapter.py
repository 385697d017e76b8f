"""The adapter for nflows: the rules of its classes, and the walk of a Flow. Imports no flow library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from ebflow_nflows import linear, steps
from ebflow_nflows.base import ChangedBase, ForeignBase, MixtureBase, NflowsBase, NormalBase
from ebflow_plugin.adapting import (
    ActivationStep,
    Adapter,
    Child,
    Container,
    FullConvStep,
    FullLinearStep,
    IdentityStep,
    IndexedPermutationStep,
    PackedLUStep,
    Plan,
    RefusedStep,
    Rule,
    drop_caches,
    is_a,
    known_class,
    register_networks,
)
from ebflow_plugin.errors import UnsupportedStepError

# nflows, its forks, a package that uses its parts, and our own layers
PACKAGES = ("nflows", "glasflow", "enflows", "flowcon", "nessai", "ebflow_nflows")
# Networks, and steps that are as smooth as their networks: all hold their activations as modules or attributes.
register_networks(
    (*PACKAGES, "sbi"),
    *("MLP", "ResidualBlock", "ResidualNet", "ConvResidualBlock", "ConvResidualNet", "ContextSplineMap", "MADE"),
    *("MixtureOfGaussiansMADE", "MADEMoG", "MaskedLinear", "MaskedFeedforwardBlock", "MaskedResidualBlock"),
    *("AffineCouplingTransform", "AdditiveCouplingTransform", "MaskedAffineAutoregressiveTransform"),
)


def multiscale(module: Any) -> Iterator[Child]:
    """The levels of a MultiscaleCompositeTransform, a split after each but the last, and the joined latents."""
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
    **dict.fromkeys(("CompositeTransform", "CompositeCDFTransform"), Container.of_list("_transforms")),
    **dict.fromkeys(
        ("InverseTransform", "Logit", "CauchyCDFInverse", "Inverted"), Container.of_one("_transform", inverted=True)
    ),
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
    "FullLinear": FullLinearStep,
    "FullConv2d": FullConvStep,
    # nonlinear
    "SinhArcsinh": ActivationStep,
    "SmoothLeakyReLU": ActivationStep,
    "Tanh": steps.TanhStep,
    "LogTanh": steps.LogTanhStep,
    "LeakyReLU": steps.LeakyReLUStep,
    "Sigmoid": steps.ScaledSigmoidStep,
    "Exp": steps.ExpStep,
    "GatedLinearUnit": steps.GatedLinearUnitStep,
    "CauchyCDF": steps.CauchyCDFStep,
    "AffineCouplingTransform": steps.CouplingStep,
    "AdditiveCouplingTransform": steps.AdditiveCouplingStep,
    "MaskedAffineAutoregressiveTransform": steps.NetworkStep,
    "UMNNCouplingTransform": steps.IntegratedStep,
    "MaskedUMNNAutoregressiveTransform": steps.IntegratedStep,
    "iResBlock": EstimatedStep,
    **{
        name.format(shape): step
        for shape, step in (
            ("Linear", steps.LinearSplineStep),
            ("Quadratic", steps.TailedSplineStep),
            ("Cubic", steps.TailedSplineStep),
            ("RationalQuadratic", steps.RationalSplineStep),
        )
        for name in ("Piecewise{}CDF", "Piecewise{}CouplingTransform", "MaskedPiecewise{}AutoregressiveTransform")
    },
}

BASES: dict[str, type[NflowsBase]] = {
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
    models = ("Flow", "NFlow")
    packages = PACKAGES
    rules = MappingProxyType(RULES)
    opaque = steps.UnknownStep
    density_methods = ("log_prob", "_log_prob")
    inverters = ("InverseTransform", "Inverted")
    constrained = MappingProxyType(
        {
            **dict.fromkeys(
                ("LULinear", "QRLinear", "SVDLinear", "HouseholderSequence"), lambda module: (module.features, False)
            ),
            "OneByOneConvolution": lambda module: (module.features, True),
        }
    )

    def plan(self, flow: Any, overrides: Mapping[str, str] | None = None) -> Plan:
        self.refuse_own_density(flow)
        overrides = self.check_overrides(overrides, flow)
        transform, base = getattr(flow, "_transform", None), getattr(flow, "_distribution", None)
        if transform is None or base is None or not hasattr(base, "log_prob"):
            missing = "transform" if transform is None else "base distribution with log_prob"
            raise UnsupportedStepError(f"{type(flow).__name__} has no {missing}; build it with Flow(transform, base)")
        embedding = getattr(flow, "_embedding_net", None)
        return Plan(
            steps=tuple(self.walk(transform, "_transform", self.inverted, overrides)),
            base=self._base(base),
            adapter=self.name,
            **({} if embedding is None or isinstance(embedding, nn.Identity) else {"embedding": embedding}),
        )

    def _base(self, base: Any) -> NflowsBase:
        """The base density, by its class or by a parent whose density the class does not change."""
        known = known_class(base, self.packages, BASES)
        if known is not None:
            return BASES[known](base, "_distribution")
        return (ChangedBase if is_a(base, BASES, self.packages) else ForeignBase)(base, "_distribution")

    def inverse_of(self, module: nn.Module) -> nn.Module:
        from ebflow_nflows.layers import Inverted

        return Inverted(module)

    def release(self, flow: nn.Module) -> None:
        drop_caches(flow, self.packages)


ADAPTER = NflowsAdapter()
