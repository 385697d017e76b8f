"""The 148 rows of the census of normflows 1.7.3 as test cases: a flow, its options, its mode.

A case is named "<class>: <config> (<mode>)", in the words of `facts/census.csv`.
"""

from __future__ import annotations

from functools import partial

import normflows as nf
import torch
from normflows import flows
from normflows.distributions import DiagGaussian, DiagGaussianProposal
from normflows.flows.mixing import _LULinear, _Permutation, _RandomPermutation
from normflows.nets import MLP, LipschitzCNN
from torch import nn

from normflows_parts import (
    BOTH,
    CLASSES,
    CONTEXT,
    FLOAT32,
    IMG,
    SELF_INIT,
    TRTRS_GONE,
    VEC,
    D,
    NormflowsCase,
    conv_net,
    glow_levels,
    linear,
    lu_permute,
    masked,
    net,
    nonlinear,
    refused,
    residual,
)
from normflows_splines import SPLINE_CASES

SPLITS = ("channel", "channel_inv", "checkerboard", "checkerboard_inv")
PIXELS = {"shape": (1, 4, 6), "latent": (4, 2, 3)}  # what a Squeeze is for


def container_rows() -> list[NormflowsCase]:
    made = partial(flows.MaskedAffineAutoregressive, D, 8, activation=torch.tanh)
    blocks = [partial(flows.AffineCouplingBlock, split_mode=split) for split in SPLITS[:2]]
    return [
        *linear("Reverse", "vec of LULinearPermute", lambda: flows.Reverse(lu_permute())),
        *nonlinear("Reverse", "vec of MaskedAffineAutoregressive tanh", lambda: flows.Reverse(made())),
        *linear(
            "Composite",
            "vec LULinearPermute+Permute+AffineConst (all linear)",
            lambda: flows.Composite([lu_permute(), flows.Permute(D), flows.AffineConstFlow(D)]),
            **FLOAT32,
        ),
        *nonlinear(
            "Composite",
            "vec AffineCouplingBlock x2 tanh",
            lambda: flows.Composite([block(net(3, 6)) for block in blocks]),
            **FLOAT32,
        ),
        *linear(
            "Composite",
            "img Squeeze+1x1conv",
            lambda: flows.Composite([flows.Invertible1x1Conv(4, use_lu=True), flows.Squeeze()]),
            **PIXELS,
            **FLOAT32,
        ),
    ]


def reshape_rows() -> list[NormflowsCase]:
    """Merge gives lists and Split takes them: each gets a partner, of another mode, or the two were the identity."""
    found = linear("Squeeze", "img", flows.Squeeze, **PIXELS)
    odd = {
        "shape": (5,),
        "note": "for odd sizes channel and channel_inv do not go together: sampling would halve otherwise",
    }
    found += linear("Merge", "vec mode=channel odd D=5", lambda: [flows.Split(), flows.Merge()], **odd)
    for mode in SPLITS:
        other = "channel_inv" if mode == "channel" else "channel"
        channels, board = ((8, 2, 2), (2, 2, 8)) if "checkerboard" in mode else (IMG, IMG)
        merge = lambda mode=mode, other=other: [flows.Split(other), flows.Merge(mode)]  # noqa: E731
        split = lambda mode=mode, other=other: [flows.Split(mode), flows.Merge(other)]  # noqa: E731
        found += linear("Merge", f"vec mode={mode} (inverse: tensor -> list)", merge)
        found += linear("Merge", f"img mode={mode} (inverse: tensor -> list)", merge, latent=channels)
        found += linear("Split", f"vec mode={mode} (inverse: list -> tensor)", split)
        found += linear("Split", f"img mode={mode} (inverse: list -> tensor)", split, latent=board)
    return found


def mixing_rows() -> list[NormflowsCase]:
    conv, matrix = partial(flows.Invertible1x1Conv, 4), partial(flows.InvertibleAffine, D)
    cached = partial(_LULinear, D, using_cache=True)
    use_cache = "vec, linear.use_cache(True)"
    return [
        *linear("Permute", "vec shuffle", lambda: flows.Permute(D)),
        *linear("Permute", "vec swap", lambda: flows.Permute(D, "swap")),
        *linear("Permute", "vec swap odd D=5", lambda: flows.Permute(5, "swap"), shape=(5,)),
        *linear("Permute", "img shuffle", lambda: flows.Permute(4)),
        *linear("Invertible1x1Conv", "img use_lu=False (default)", conv, BOTH),
        *linear("Invertible1x1Conv", "img use_lu=True", partial(conv, use_lu=True)),
        *linear("InvertibleAffine", "vec use_lu=True (default)", matrix, BOTH),
        *linear("InvertibleAffine", "vec use_lu=False", partial(matrix, use_lu=False)),
        *linear("_Permutation", "vec (private)", lambda: _Permutation(torch.tensor([3, 0, 5, 1, 2, 4]))),
        *linear("_RandomPermutation", "vec (private)", lambda: _RandomPermutation(D)),
        *linear("_LULinear", "vec (private)", lambda: _LULinear(D), BOTH),
        *linear("_LULinear", "vec (private) using_cache=True", cached, "train"),
        *linear("_LULinear", "vec (private) using_cache=True", cached, own_log_prob=False, note=TRTRS_GONE),
        *linear("LULinearPermute", "vec identity_init=True", lu_permute, BOTH),
        *linear("LULinearPermute", "vec identity_init=False", partial(lu_permute, identity_init=False)),
        *linear("LULinearPermute", use_cache, partial(lu_permute, cached=True), "train"),
        *linear(
            "LULinearPermute",
            use_cache,
            partial(lu_permute, cached=True),
            own_inverse=False,
            own_tol=1e-6,
            note=TRTRS_GONE + "; the cached log-det is float32, and the cache keeps a graph",
        ),
    ]


def constant_rows() -> list[NormflowsCase]:
    """Constant affine maps, and those whose Jacobian is the identity and which are not affine."""
    affine, shift = flows.AffineConstFlow, nf.transforms.Shift
    bounds, shifts = torch.tensor([1.0, 2.0]), torch.tensor([0.3, -0.4])
    wrap, wrap_shift = partial(flows.PeriodicWrap, [0, 2]), partial(flows.PeriodicShift, [0, 2])
    wrapped = {"own_inverse": False, "note": "wraps what lies outside the bound, and nothing unwraps it"}
    no_y = {
        "context_shape": (CLASSES,),
        "classes": CLASSES,
        "own_log_prob": False,
        "own_inverse": False,
        "note": "affine in x, with a log-det of y; no model of the library hands y to its flows",
    }
    fresh = "vec, FRESH (first inverse call initialises, train AND eval)"
    return [
        *linear("AffineConstFlow", "vec shape=D", lambda: affine(D)),
        *linear("AffineConstFlow", "img shape=(C,1,1)", lambda: affine((4, 1, 1))),
        *linear("AffineConstFlow", "img shape=(C,H,W)", lambda: affine(IMG)),
        *linear("AffineConstFlow", "vec scale=False", lambda: affine(D, scale=False)),
        *linear("AffineConstFlow", "vec shift=False", lambda: affine(D, shift=False)),
        *nonlinear("CCAffineConst", "vec, y one-hot (3 classes)", lambda: flows.CCAffineConst(D, CLASSES), **no_y),
        *nonlinear(
            "CCAffineConst", "img shape (C,1,1), y one-hot", lambda: flows.CCAffineConst((4, 1, 1), CLASSES), **no_y
        ),
        *linear("ActNorm", "vec, initialised", lambda: flows.ActNorm(D), BOTH, seen_data=True),
        *linear("ActNorm", "img (C,1,1), initialised", lambda: flows.ActNorm((4, 1, 1)), seen_data=True),
        *linear("ActNorm", fresh, lambda: flows.ActNorm(D), BOTH, note=SELF_INIT),
        *linear("Shift", "vec (in-place on its input)", shift, note="writes into the caller's batch"),
        *linear(
            "Shift",
            "vec, caller passes x.clone()",
            lambda: [shift(), affine(D)],
            note="after another step, so that nobody else has the batch that it writes into",
        ),
        *nonlinear("PeriodicWrap", "vec ind=[0,2] bound=1.0", wrap, **wrapped),
        *nonlinear("PeriodicWrap", "vec ind=[0,2] tensor bound", lambda: wrap(bounds.clone()), **wrapped),
        *nonlinear("PeriodicShift", "vec ind=[0,2] shift=0.4", lambda: wrap_shift(shift=0.4), **wrapped),
        *nonlinear(
            "PeriodicShift",
            "vec ind=[0,2] tensor bound/shift, x inside bound",
            lambda: wrap_shift(bounds.clone(), shifts.clone()),
            domain="interval",
        ),
        *nonlinear("Logit", "vec alpha=0.05", nf.transforms.Logit, domain="unit"),
        *nonlinear("Logit", "img alpha=0.05", nf.transforms.Logit, domain="unit"),
    ]


def coupling_rows() -> list[NormflowsCase]:
    def lists(n_out: int, **options: object) -> list[nn.Module]:
        return [flows.Split(), flows.AffineCoupling(net(3, n_out), **options), flows.Merge()]

    def mlp() -> nn.Module:
        return MLP([D, 8, D], leaky=0.1)

    block, tanh, relu = flows.AffineCouplingBlock, partial(net, D, D), partial(net, D, D, nn.ReLU)
    sigmoid = partial(block, scale_map="sigmoid")
    found = []
    for scale_map in ("exp", "sigmoid", "sigmoid_inv"):
        config = f"vec list in/out scale_map={scale_map} net=tanh"
        found += nonlinear("AffineCoupling", config, partial(lists, 6, scale_map=scale_map))
    for split in SPLITS:
        config = f"vec split={split} scale_map=exp net=tanh"
        found += nonlinear("AffineCouplingBlock", config, lambda split=split: block(net(3, 6), split_mode=split))
    return [
        *found,
        *nonlinear("AffineCoupling", "vec list in/out scale=False net=tanh", partial(lists, 3, scale=False)),
        *nonlinear("MaskedAffineFlow", "vec s,t net=relu", lambda: masked(relu(), relu())),
        *nonlinear("MaskedAffineFlow", "vec t only (NICE) net=relu", lambda: masked(None, relu())),
        *nonlinear("MaskedAffineFlow", "vec s,t net=tanh", lambda: masked(tanh(), tanh())),
        *nonlinear("MaskedAffineFlow", "vec t only (NICE) net=tanh", lambda: masked(None, tanh())),
        *nonlinear("MaskedAffineFlow", "vec s only net=tanh", lambda: masked(tanh(), None)),
        *nonlinear("MaskedAffineFlow", "vec s,t = nf.nets.MLP (LeakyReLU)", lambda: masked(mlp(), mlp())),
        *linear("MaskedAffineFlow", "vec neither s nor t (identity)", lambda: masked(None, None)),
        *nonlinear("AffineCouplingBlock", "vec split=channel net=nf MLP(ReLU)", lambda: block(MLP([3, 8, 6]))),
        *nonlinear(
            "AffineCouplingBlock",
            "vec split=channel scale=False net=tanh (NICE)",
            lambda: block(net(3, 3), scale=False),
        ),
        *nonlinear(
            "AffineCouplingBlock",
            "vec split=channel scale=False net=ReLU (NICE)",
            lambda: block(net(3, 3, nn.ReLU), scale=False),
        ),
        *nonlinear(
            "AffineCouplingBlock",
            "img split=channel scale_map=sigmoid net=tanh",
            lambda: sigmoid(conv_net(2, 4)),
        ),
        *nonlinear(
            "AffineCouplingBlock",
            "img split=checkerboard scale_map=sigmoid net=tanh",
            lambda: sigmoid(conv_net(4, 8), split_mode="checkerboard"),
        ),
    ]


def glow_and_made_rows() -> list[NormflowsCase]:
    glow, made = partial(flows.GlowBlock, 4, 8), partial(flows.MaskedAffineAutoregressive, D, 8)
    tanh, seen = partial(made, activation=torch.tanh), {"seen_data": True}
    normed, coupled = partial(tanh, use_batch_norm=True), "the samples of a batch influence each other"
    exp, context = partial(glow, use_lu=False, scale_map="exp"), partial(tanh, context_features=CONTEXT)
    cls = "MaskedAffineAutoregressive"
    return [
        *nonlinear("GlowBlock", "img defaults (sigmoid, lu, ReLU net)", glow, BOTH, **seen),
        *nonlinear("GlowBlock", "img use_lu=False scale_map=exp", exp, **seen),
        *nonlinear("GlowBlock", "img scale=False (additive)", partial(glow, scale=False), **seen),
        *nonlinear("GlowBlock", "img net_actnorm=True", partial(glow, net_actnorm=True), **seen),
        *nonlinear("GlowBlock", "img FRESH (ActNorm not initialised)", glow, BOTH, note=SELF_INIT),
        *nonlinear("GlowBlock", "img split=checkerboard", partial(glow, split_mode="checkerboard"), **seen),
        *nonlinear(cls, "vec net=relu", made),
        *nonlinear(cls, "vec net=tanh", tanh),
        *nonlinear(cls, "vec net=tanh context=3", context, context_shape=(CONTEXT,)),
        *refused(cls, "vec net=tanh use_batch_norm", normed, "train", note=coupled),
        *nonlinear(cls, "vec net=tanh use_batch_norm", normed),
    ]


def one_way_rows() -> list[NormflowsCase]:
    """Flows without an inverse, where the density needs it and where only sampling does; and Markov chains."""
    planar, leaky = partial(flows.Planar, VEC), partial(flows.Planar, act="leaky_relu")
    radial, norm, reverse = partial(flows.Radial, VEC), flows.BatchNorm, flows.Reverse
    no_density = {"own_log_prob": False, "note": "has no inverse, which is its density direction"}
    no_sample = {"own_inverse": False, "note": "has no inverse, which is its sampling direction"}
    slope = {"inverse_tol": 1e-6, "note": "its negative slope is a float32 0.2 in its inverse and in its log-dets"}
    chain = {"own_inverse": False, "note": "moves at random, either way"}
    hmc = partial(flows.HamiltonianMonteCarlo, steps=3)
    return [
        *refused("Planar", "vec act=tanh", planar, **no_density),
        *nonlinear("Planar", "vec act=leaky_relu", lambda: leaky(VEC), **slope),
        *nonlinear("Planar", "img act=leaky_relu", lambda: leaky(IMG), **slope),
        *nonlinear(
            "Planar",
            "vec act=tanh via Reverse (density dir = Planar.forward)",
            lambda: reverse(planar()),
            **no_sample,
        ),
        *nonlinear("Planar", "vec act=leaky_relu via Reverse", lambda: reverse(leaky(VEC)), own_tol=1e-6, **slope),
        *refused("Radial", "vec", radial, **no_density),
        *nonlinear("Radial", "vec via Reverse (density dir = Radial.forward)", lambda: reverse(radial()), **no_sample),
        *refused("BatchNorm", "vec", norm, BOTH, **no_density),
        *refused(
            "BatchNorm",
            "vec via Reverse (density dir = BatchNorm.forward)",
            lambda: reverse(norm()),
            BOTH,
            own_inverse=False,
            note="the samples of a batch influence each other, in eval mode too",
        ),
        *refused(
            "MetropolisHastings",
            "vec 5 steps",
            lambda: flows.MetropolisHastings(DiagGaussian(D), DiagGaussianProposal(VEC, [0.5] * D), 5),
            **chain,
        ),
        *refused(
            "HamiltonianMonteCarlo",
            "vec 3 leapfrog",
            lambda: hmc(DiagGaussian(D), log_step_size=torch.full((D,), -1.0), log_mass=torch.zeros(D)),
            **chain,
        ),
    ]


def residual_rows() -> list[NormflowsCase]:
    def image() -> nn.Module:
        cnn = LipschitzCNN([4, 6, 4], [3, 3], lipschitz_const=0.5, init_zeros=False)
        return flows.Residual(cnn, reduce_memory=False)

    fixed_point = {"inverse_tol": 1e-2}  # the library iterates until the *square* of a step is below some 1e-5
    estimate = fixed_point | {"note": "the log-det is a random estimate, and has no graph in eval mode"}
    exact_note = "the length of the series is random, beyond 20 terms: deterministic to the size of the 21st"
    kept = partial(residual, reduce_memory=False)
    exact, plane = partial(kept, exact_trace=True), {"shape": (2,)}
    name = "vec reduce_memory=False"
    brute = partial(kept, 2, brute_force=True)
    backwards = partial(residual, reverse=False)
    return [
        *refused("Residual", "vec defaults (reduce_memory, geometric)", residual, BOTH, **estimate),
        *refused("Residual", name, kept, BOTH, **estimate),
        *refused("Residual", f"{name} exact_trace=True", exact, "train", **estimate),
        *nonlinear("Residual", f"{name} exact_trace=True", exact, **fixed_point, note=exact_note),
        *nonlinear(
            "Residual",
            f"{name} exact_trace n_power_series=40",
            partial(exact, n_power_series=40),
            BOTH,
            **fixed_point,
        ),
        *nonlinear("Residual", "vec D=2 brute_force reduce_memory=False", brute, BOTH, **plane, **fixed_point),
        *refused("Residual", "vec D=2 defaults", partial(residual, 2), "train", **plane, **estimate),
        *nonlinear("Residual", "vec D=2 defaults", partial(residual, 2), **plane, **fixed_point),
        *refused("Residual", "vec reverse=False (density = fixed-point inverse)", backwards, BOTH, **estimate),
        *refused("Residual", "img LipschitzCNN reduce_memory=False", image, BOTH, seen_data=True, **estimate),
    ]


def model_rows() -> list[NormflowsCase]:
    def glow() -> nn.Module:
        return nf.MultiscaleFlow([DiagGaussian((8, 1, 1)), DiagGaussian((2, 2, 2))], *glow_levels(), class_cond=False)

    config = "vec MaskedAffineFlow+LULinearPermute+ActNorm"
    return [
        *nonlinear(
            "core.MultiscaleFlow(.inverse_and_log_det)",
            "img 2-level glow 1x4x4",
            glow,
            shape=(1, 4, 4),
            seen_data=True,
            note="log_prob demands a y, of which it makes no use",
        ),
        *nonlinear(
            "core.NormalizingFlow(.inverse_and_log_det)",
            config,
            lambda: [masked(net(D, D), net(D, D)), lu_permute(), flows.ActNorm(D)],
            seen_data=True,
        ),
    ]


NORMFLOWS_CASES: tuple[NormflowsCase, ...] = (
    *container_rows(),
    *reshape_rows(),
    *mixing_rows(),
    *constant_rows(),
    *coupling_rows(),
    *glow_and_made_rows(),
    *one_way_rows(),
    *residual_rows(),
    *SPLINE_CASES,
    *model_rows(),
)
