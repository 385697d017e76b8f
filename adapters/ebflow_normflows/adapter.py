"""The adapter for normflows: the rules of its classes, and the walk of a model. Imports no flow library.

normflows calls the direction from noise to data ``forward``. The density direction is ``inverse``, through the flows in
reverse order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ebflow_normflows import linear, steps
from ebflow_normflows.base import LevelsBase, NormflowsBase
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
    Rule,
    SqueezeStep,
    Step,
    drop_caches,
    is_a,
    known_class,
    register_networks,
)
from ebflow_plugin.errors import InputError, NotAFlowError, UnsupportedStepError

# Networks, and steps that are as smooth as their networks: all hold their activations as modules or attributes.
register_networks(
    steps.PACKAGES,
    *("MLP", "ConvNet2d", "LipschitzMLP", "LipschitzCNN", "InducedNormLinear", "InducedNormConv2d", "Swish", "MADE"),
    *("ResidualBlock", "ResidualNet", "ConvResidualBlock", "ConvResidualNet", "MaskedLinear", "ActNorm"),
    *("MaskedFeedforwardBlock", "MaskedResidualBlock", "PeriodicFeaturesElementwise", "PeriodicFeaturesCat"),
    *("AffineCoupling", "MaskedAffineFlow", "MaskedAffineAutoregressive", "Residual", "iResBlock"),
)


def backwards(step: type[Step]) -> Container:
    """The rule of a class for which the step describes the *inverse*."""
    return Container(lambda module: [Child("", module, inverted=True, step=step)])


BLOCK = Container.of_list("flows")


def coupling_block(module: Any) -> Rule:
    """An AffineCouplingBlock: its coupling, as one step with the split and the merge around it."""
    kinds = [known_class(member, steps.PACKAGES) for member in module.flows]
    if kinds == ["Split", "AffineCoupling", "Merge"] and module.flows[0].mode == module.flows[2].mode:
        step = steps.whole_coupling(module.flows[0].mode)
        return Container(lambda module: [Child("flows.1", module.flows[1], step=step)])
    return BLOCK


def lu_permute(module: Any) -> Iterator[Child]:
    """The two parts of a LULinearPermute, whose forward is the inverse of both."""
    yield Child("linear", module.linear, inverted=True)
    yield Child("permutation", module.permutation, inverted=True)


def permute(module: Any) -> Rule:
    """A Permute, by its mode."""
    modes: dict[str, Rule] = {"shuffle": linear.ShuffleStep, "swap": linear.SwapStep}
    return modes.get(module.mode, steps.UnknownStep)  # which raises, as normflows does


def convolution(module: Any) -> Rule:
    """An Invertible1x1Conv, by its parametrisation."""
    return backwards(linear.LUConvolutionStep if module.use_lu else linear.ConvolutionStep)


def vector(module: Any) -> Rule:
    """An InvertibleAffine, by its parametrisation."""
    return backwards(linear.LUVectorStep if module.use_lu else linear.VectorStep)


def masked_affine(module: Any) -> Rule:
    """A MaskedAffineFlow, which is the identity without networks."""
    trivial = module.s is torch.zeros_like and module.t is torch.zeros_like
    return IdentityStep if trivial else steps.MaskedAffineStep


RULES: dict[str, Rule] = {
    "Reverse": Container.of_one("flow", inverted=True),
    "Composite": Container.of_list("_flows"),
    "GlowBlock": BLOCK,
    "AffineCouplingBlock": coupling_block,
    "LULinearPermute": Container(lu_permute),
    "CoupledRationalQuadraticSpline": Container.of_one("prqct", inverted=True),
    "CircularCoupledRationalQuadraticSpline": Container.of_one("prqct", inverted=True),
    "AutoregressiveRationalQuadraticSpline": Container.of_one("mprqat", inverted=True),
    "CircularAutoregressiveRationalQuadraticSpline": Container.of_one("mprqat", inverted=True),
    # linear
    "Split": linear.SplitStep,
    "Merge": backwards(linear.SplitStep),
    "Squeeze": backwards(SqueezeStep),
    "Permute": permute,
    "Invertible1x1Conv": convolution,
    "InvertibleAffine": vector,
    "_Permutation": IndexedPermutationStep,
    "_RandomPermutation": IndexedPermutationStep,
    "_LULinear": PackedLUStep,
    "AffineConstFlow": linear.AffineConstStep,
    "ActNorm": linear.ActNormStep,
    "Shift": linear.ShiftStep,
    "FullLinear": backwards(FullLinearStep),
    "FullConv2d": backwards(FullConvStep),
    # nonlinear
    "SinhArcsinh": backwards(ActivationStep),
    "SmoothLeakyReLU": backwards(ActivationStep),
    "AffineCoupling": steps.CouplingStep,
    "MaskedAffineFlow": masked_affine,
    "MaskedAffineAutoregressive": steps.NetworkStep,
    "CCAffineConst": steps.ClassAffineStep,
    "PiecewiseRationalQuadraticCDF": steps.RationalSplineStep,
    "PiecewiseRationalQuadraticCoupling": steps.RationalSplineStep,
    "MaskedPiecewiseRationalQuadraticAutoregressive": steps.RationalSplineStep,
    "PeriodicWrap": steps.PeriodicStep,
    "PeriodicShift": steps.PeriodicStep,
    "Logit": steps.LogitStep,
    "Planar": steps.PlanarStep,
    "Radial": steps.RadialStep,
    "Residual": steps.ResidualStep,
    # refused
    "BatchNorm": steps.BatchNormStep,
    "MetropolisHastings": steps.StochasticStep,
    "HamiltonianMonteCarlo": steps.StochasticStep,
}

BACKWARDS = ("Invertible1x1Conv", "InvertibleAffine", "FullConv2d")  # classes whose steps describe the inverse


class NormflowsAdapter(Adapter):
    """Walks the models of normflows."""

    name = "normflows"
    flows = (
        "NormalizingFlow, ConditionalNormalizingFlow, ClassCondFlow and MultiscaleFlow; for a bare Flow, give it a "
        "base density first: NormalizingFlow(DiagGaussian(shape), [flow])"
    )
    models = ("ConditionalNormalizingFlow", "NormalizingFlow", "ClassCondFlow", "MultiscaleFlow", "NormalizingFlowVAE")
    packages = steps.PACKAGES
    rules = MappingProxyType(RULES)
    opaque = steps.UnknownStep
    inverted = True
    inverters = ("LULinearPermute", "Reverse")
    constrained = MappingProxyType(
        {
            "_LULinear": lambda module: (module.features, False),
            "InvertibleAffine": lambda module: (module.num_channels, False) if module.use_lu else None,
            "Invertible1x1Conv": lambda module: (module.num_channels, True) if module.use_lu else None,
        }
    )

    def plan(self, flow: Any, overrides: Mapping[str, str] | None = None) -> Plan:
        kind = self._kind(flow)
        if kind == "NormalizingFlowVAE":
            self._refuse_vae(flow)
        self.refuse_own_density(flow)
        overrides = self.check_overrides(overrides, flow)
        base: NormflowsBase | LevelsBase
        if not all(hasattr(part, "log_prob") for part in (flow.q0 if kind == "MultiscaleFlow" else [flow.q0])):
            raise UnsupportedStepError(f"{type(flow).__name__} needs a base distribution with log_prob as its q0")
        if kind == "MultiscaleFlow":
            walked = tuple(self._levels(flow, overrides))
            base = LevelsBase(flow.q0, "q0", flow.class_cond)
        else:
            walked = tuple(self._walk_back(flow.flows, "flows", overrides))
            base = NormflowsBase(flow.q0, "q0", kind != "NormalizingFlow")
        for step in walked:
            if isinstance(step, steps.NormflowsStep):
                step.conditional = kind == "ConditionalNormalizingFlow"
        plan = Plan(steps=walked, base=base, adapter=self.name)
        if base.takes_context or any(isinstance(step, steps.ClassAffineStep) for step in walked):
            return plan
        # A MultiscaleFlow without classes requires an argument y, and does not use it.
        return replace(plan, embedding=no_context if kind == "NormalizingFlow" else ignored_context)

    def own_log_prob(self, flow: Any, x: Tensor, context: Tensor | None) -> Tensor:
        """The library's own ``log_prob``, of a copy of x: ``Shift`` writes into its input."""
        self.release(flow)
        x, kind = x.clone(), self._kind(flow)
        if kind == "ConditionalNormalizingFlow":
            result: Tensor = flow.log_prob(x, context=context)
        elif kind == "ClassCondFlow":
            result = flow.log_prob(x, context)
        elif kind == "MultiscaleFlow":
            result = self._own_of_levels(flow, x, context)
        else:
            result = flow.log_prob(x)
        return result

    def inverse_of(self, module: nn.Module) -> nn.Module:
        from normflows.flows import Reverse

        return Reverse(module)

    def unit(self, flow: nn.Module, path: str, inverted: bool) -> tuple[str, bool]:
        if type(flow.get_submodule(path)).__name__ in BACKWARDS:
            inverted = not inverted
        return super().unit(flow, path, inverted)

    def release(self, flow: nn.Module) -> None:
        drop_caches(flow, self.packages)

    def _kind(self, flow: object) -> str:
        """The name of the class of normflows that a model is of."""
        return next(name for name in self.models if is_a(flow, (name,), self.packages))

    def _walk_back(self, flows: Any, path: str, overrides: Mapping[str, str]) -> Iterator[Step]:
        for index in reversed(range(len(flows))):
            yield from self.walk(flows[index], f"{path}.{index}", self.inverted, overrides)

    def _levels(self, flow: Any, overrides: Mapping[str, str]) -> Iterator[Step]:
        """The steps of a MultiscaleFlow, with a split after each level but the first."""
        if flow.transform is not None:
            yield from self.walk(flow.transform, "transform", self.inverted, overrides)
        for level in reversed(range(len(flow.q0))):
            yield from self._walk_back(flow.flows[level], f"flows.{level}", overrides)
            if level > 0:
                merge, path = flow.merges[level - 1], f"merges.{level - 1}"
                if known_class(merge, self.packages) == "Merge":
                    yield linear.LevelStep(merge, path)
                else:
                    step = steps.UnknownLevelStep(merge, path, inverted=True)
                    step.known, step.reason = False, "unknown: no plain Merge"
                    yield step

    @staticmethod
    def _own_of_levels(flow: Any, x: Tensor, context: Tensor | None) -> Tensor:
        result: Tensor
        try:
            result = flow.log_prob(x.clone(), context)
        except RuntimeError:
            # It adds in place to the log-det of its first flow, which fails for the scalar of an ActNorm. Any other
            # error is raised again here.
            latents, result = flow.inverse_and_log_det(x)
            for base, z in zip(flow.q0, latents, strict=True):
                result = result + (base.log_prob(z, context) if flow.class_cond else base.log_prob(z))
        return result

    @staticmethod
    def _refuse_vae(flow: object) -> NoReturn:
        raise NotAFlowError(
            f"{type(flow).__name__} has no density of its data: log p(x) of a VAE is an integral over z. Its flow has "
            "one, q(z | x), if its flows have inverses: wrap ClassCondFlow(ConditionalDiagGaussian(D, net), "
            "vae.flows), where net(x) returns mean and log-scale (NNDiagGaussian has the log-variance: halve it), and "
            "call energy(z, context=x). A flow prior is a NormalizingFlow of its own: wrap that."
        )


def no_context(context: Tensor | None) -> None:
    """Raises if there is a context, which would not be used."""
    if context is not None:
        raise InputError(
            "a NormalizingFlow takes no context: use ConditionalNormalizingFlow, or ClassCondFlow for class labels"
        )


def ignored_context(context: Tensor | None) -> None:
    """Drops a context, as the library does."""


ADAPTER = NormflowsAdapter()
