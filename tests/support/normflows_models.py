"""Whole normflows models, of the kinds that users have.

Two are missing. `ResampledGaussian` is in no normflows: it comes with `larsflow`, which pip does not find here. A
`NormalizingFlowVAE` has no density of its own, only samples z of q(z | x) and their log q: its base is an encoder.
Its flow gets one as ClassCondFlow(ConditionalDiagGaussian(D, net), vae.flows), which hands y = x to the base alone;
net is the encoder's, with the second half of its output halved: a log-variance there, a log-scale here.
"""

from __future__ import annotations

from functools import partial

import normflows as nf
import torch
from normflows import flows
from normflows.distributions import (
    AffineGaussian,
    ClassCondDiagGaussian,
    DiagGaussian,
    DiagGaussianProposal,
    GaussianMixture,
    GlowBase,
    UniformGaussian,
)
from normflows.distributions.base import ConditionalDiagGaussian
from normflows.nets import MLP
from torch import nn

from normflows_parts import (
    BOTH,
    CLASSES,
    CONTEXT,
    FLOAT32,
    IMG,
    SELF_INIT,
    D,
    Make,
    NormflowsCase,
    conv_net,
    glow_levels,
    lu_permute,
    masked,
    net,
    residual,
    rows,
    rqs,
)

LABELS = {"context_shape": (), "classes": CLASSES}  # an integer to a sample
ONE_HOT = {"context_shape": (CLASSES,), "classes": CLASSES}
GLOW = {"shape": (1, 4, 4), "seen_data": True}

linear, nonlinear, refused = (partial(rows, expect=expect, noise=0.1) for expect in ("linear", "nonlinear", "refused"))


def stack(*makes: Make, times: int = 2) -> list[nn.Module]:
    """Give the flows `times` over, in the order of sampling."""
    return [make() for _ in range(times) for make in makes]


def maf(**options: object) -> nn.Module:
    return flows.MaskedAffineAutoregressive(D, 8, activation=torch.tanh, **options)


def coupling_nvp() -> list[nn.Module]:
    return stack(lambda: flows.AffineCouplingBlock(MLP([3, 8, 6])), lambda: flows.Permute(D, "swap"))


def masked_nvp(base: nn.Module | None = None) -> nn.Module:
    """Give a RealNVP of smooth steps, on any base."""
    steps = [masked(net(D, D), net(D, D)), masked(net(D, D), net(D, D), first=0), flows.ActNorm(D)]
    return nf.NormalizingFlow(base or DiagGaussian(D, trainable=False), steps)


def circular_flow(kind: str) -> nn.Module:
    """Give a neural spline flow of two angles in [-8, 8] and four other coordinates."""
    scale = torch.ones(D).index_fill(0, torch.tensor([0, 3]), 16.0)
    return nf.NormalizingFlow(
        UniformGaussian(D, [0, 3], scale), stack(partial(rqs, kind, [0, 3], tail_bound=8.0), lu_permute)
    )


def image_flow(base: nn.Module, use_lu: bool) -> nn.Module:
    """Give the steps of Glow blocks, one by one."""
    coupling = partial(flows.AffineCouplingBlock, scale_map="sigmoid")
    conv, norm = partial(flows.Invertible1x1Conv, 4, use_lu=use_lu), partial(flows.ActNorm, (4, 1, 1))
    return nf.NormalizingFlow(base, stack(lambda: coupling(conv_net(2, 4)), conv, norm))


def labelled_glow(transform: nn.Module | None = None, **options: object) -> nn.Module:
    bases = [GlowBase((8, 1, 1), CLASSES), ClassCondDiagGaussian((2, 2, 2), CLASSES)]
    return nf.MultiscaleFlow(bases, *glow_levels(**options), transform=transform)


def plain_glow(transform: nn.Module | None = None, **options: object) -> nn.Module:
    bases = [DiagGaussian((8, 1, 1)), GlowBase((2, 2, 2))]
    return nf.MultiscaleFlow(bases, *glow_levels(**options), transform=transform, class_cond=False)


def glow_behind_act_norm() -> nn.Module:
    model = plain_glow()
    model.flows[-1].append(flows.ActNorm((1, 1, 1)))
    return model


def mixture() -> nn.Module:
    centres = [[-1.0, 1.0] * 3, [1.0, -1.0] * 3, [0.0, 0.5] * 3]
    return GaussianMixture(3, D, centres, [[0.5] * D, [1.0] * D, [1.5] * D], [1.0, 2.0, 3.0])


def nested() -> list[nn.Module]:
    inner = flows.Composite([lu_permute(), flows.AffineCouplingBlock(net(3, 6))])
    return [flows.Composite([flows.Reverse(inner), flows.Permute(D)]), flows.Reverse(flows.Reverse(maf()))]


def shared() -> list[nn.Module]:
    layer = lu_permute()
    return [layer, masked(net(D, D), net(D, D)), layer]


def offenders() -> list[nn.Module]:
    """Give the model of DESIGN.md's error message: nine steps, of which 3 and 5 have no density."""
    chain = flows.MetropolisHastings(DiagGaussian(D), DiagGaussianProposal((D,), [0.5] * D), 2)
    norm = flows.Reverse(flows.BatchNorm())
    return [*coupling_nvp()[:3], chain, lu_permute(), norm, lu_permute(), *coupling_nvp()[:2]]


def vector_models() -> list[NormflowsCase]:
    auto, coupled = partial(rqs, "Autoregressive"), partial(rqs, "Coupled")
    swap = partial(flows.Permute, D, "swap")
    spline = partial(stack, partial(coupled, activation=nn.ReLU), lu_permute)
    dropout = partial(stack, partial(coupled, dropout_probability=0.5), lu_permute)
    angles = {"domain": "interval", "note": "x and all that the LU maps make of it stay inside the bound"}
    matrix = partial(flows.InvertibleAffine, D, use_lu=False)
    residuals = partial(stack, partial(residual, 2), lambda: flows.ActNorm(2))
    return [
        *nonlinear("RealNVP", "AffineCouplingBlock + Permute, ReLU", coupling_nvp, BOTH),
        *nonlinear("RealNVP", "MaskedAffineFlow + ActNorm, fixed base", masked_nvp, BOTH, seen_data=True),
        *nonlinear("RealNVP", "MaskedAffineFlow + ActNorm, FRESH", masked_nvp, "train", note=SELF_INIT),
        *nonlinear("NSF", "autoregressive + LULinearPermute", partial(stack, auto, lu_permute)),
        *nonlinear("NSF", "coupled + LULinearPermute, ReLU", spline, BOTH),
        *nonlinear("NSF", "circular coupled + LULinearPermute", partial(circular_flow, "CircularCoupled"), **angles),
        *nonlinear(
            "NSF",
            "circular autoregressive + LULinearPermute",
            partial(circular_flow, "CircularAutoregressive"),
            **angles,
        ),
        *refused("NSF", "coupled, dropout", dropout, "train", note="dropout draws anew on every call"),
        *nonlinear("NSF", "coupled, dropout", dropout),
        *nonlinear("MAF", "MaskedAffineAutoregressive + Permute", partial(stack, maf, swap)),
        *nonlinear("Residual flow", "D=2, ActNorm", residuals, shape=(2,), seen_data=True, inverse_tol=1e-2),
        *linear("Linear stack", "InvertibleAffine(use_lu=False) + LULinearPermute", partial(stack, matrix, lu_permute)),
        *nonlinear("Nested", "Composite, Reverse of Composite, Reverse of Reverse", nested, **FLOAT32),
        *nonlinear("Shared", "one LULinearPermute at two places", shared),
        *refused("Offenders", "MetropolisHastings and BatchNorm among nine steps", offenders, own_inverse=False),
    ]


def base_models() -> list[NormflowsCase]:
    coupled, context = partial(rqs, "Coupled", num_context_channels=CONTEXT), {"context_shape": (CONTEXT,)}
    conditional = partial(maf, context_features=CONTEXT)

    def conditional_maf() -> nn.Module:
        base = ConditionalDiagGaussian(D, net(CONTEXT, 2 * D))
        return nf.ConditionalNormalizingFlow(base, stack(conditional, lu_permute))

    def vae_flow() -> nn.Module:
        return nf.ClassCondFlow(ConditionalDiagGaussian(D, net(CONTEXT, 2 * D)), [maf(), lu_permute()])

    def labelled_affine() -> nn.Module:
        return nf.ClassCondFlow(AffineGaussian(IMG, (4, 1, 1), CLASSES), [flows.AffineCouplingBlock(conv_net(2, 4))])

    return [
        *nonlinear("Conditional", "MAF + LU, ConditionalDiagGaussian", conditional_maf, **context),
        *nonlinear("Conditional", "coupled NSF + LU, DiagGaussian", partial(stack, coupled, lu_permute), **context),
        *nonlinear("ClassCondFlow", "MAF + LU, ConditionalDiagGaussian, as of a VAE", vae_flow, **context),
        *nonlinear("ClassCondFlow", "RealNVP, ClassCondDiagGaussian, labels", coupling_nvp, BOTH, **LABELS),
        *nonlinear("ClassCondFlow", "RealNVP, ClassCondDiagGaussian, one-hot", coupling_nvp, **ONE_HOT),
        *nonlinear("ClassCondFlow", "img AffineGaussian, labels", labelled_affine, **LABELS),
        *nonlinear("GaussianMixture base", "RealNVP", lambda: masked_nvp(mixture()), seen_data=True),
        *nonlinear("AffineGaussian base", "RealNVP", lambda: masked_nvp(AffineGaussian(D, D)), seen_data=True),
    ]


def image_models() -> list[NormflowsCase]:
    logit, shift = nf.transforms.Logit, nf.transforms.Shift
    pixels = {"domain": "unit"} | GLOW
    crash = "log_prob adds in place to the 0-d log-det of its first step, and raises; inverse_and_log_det does not"
    return [
        *nonlinear(
            "Glow", "two levels, GlowBase and ClassCondDiagGaussian, labels", labelled_glow, BOTH, **GLOW, **LABELS
        ),
        *nonlinear("Glow", "two levels, labels, Logit in front", lambda: labelled_glow(logit()), **pixels, **LABELS),
        *nonlinear("Glow", "two levels, DiagGaussian and GlowBase, no classes", plain_glow, BOTH, **GLOW),
        *nonlinear(
            "Glow",
            "two levels, no classes, channel_inv, Shift in front",
            lambda: plain_glow(shift(), split_mode="channel_inv"),
            **pixels,
        ),
        *nonlinear(
            "Glow", "two levels, ActNorm outermost", glow_behind_act_norm, **GLOW, own_log_prob=False, note=crash
        ),
        *nonlinear(
            "Image flow",
            "img Invertible1x1Conv(use_lu=False), GlowBase",
            lambda: image_flow(GlowBase(IMG), use_lu=False),
            seen_data=True,
        ),
        *nonlinear(
            "Image flow",
            "img Invertible1x1Conv(use_lu=True), AffineGaussian",
            lambda: image_flow(AffineGaussian(IMG, (4, 1, 1)), use_lu=True),
            seen_data=True,
        ),
    ]


NORMFLOWS_MODELS: tuple[NormflowsCase, ...] = (*vector_models(), *base_models(), *image_models())
