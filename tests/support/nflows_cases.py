"""The 178 rows of the census of nflows 0.14 as test cases: a transform, its options, its mode.

A case is named "<class>: <config> (<mode>)", in the words and the order of `facts/census.csv`.
"""

from __future__ import annotations

from functools import partial

import torch
from nflows import transforms as T
from nflows.flows.autoregressive import MaskedAutoregressiveFlow
from nflows.flows.realnvp import SimpleRealNVP
from nflows.transforms.nonlinearities import CauchyCDF, CauchyCDFInverse

from case import Case
from nflows_parts import (
    COUPLED,
    EYE_FLOAT32,
    IMG,
    LEAKY,
    LINSPACE_FLOAT32,
    NO_TAILS,
    SOLVE_GONE,
    STOCHASTIC,
    TAILS,
    VEC,
    D,
    act_norm,
    autoregressive,
    broken,
    composite,
    conv_net,
    coupling,
    glow,
    inverse,
    linear,
    lu,
    lu_cached,
    mlp,
    multiscale,
    naive,
    naive_cached,
    net,
    nonlinear,
    one_by_one,
    one_by_one_cached,
    qr,
    qr_cached,
    refused,
    relu,
    svd,
    svd_cached,
    tanh,
)


def linear_rows() -> list[Case]:
    affine, batch_norm = T.PointwiseAffineTransform, partial(T.BatchNorm, D)
    shift, scale = torch.linspace(-1, 1, D), torch.linspace(0.5, 2, D)
    raises = {"own_inverse": False, "note": SOLVE_GONE}
    uncached = {"own_inverse": False, "note": SOLVE_GONE + ", until a density pass has filled the cache"}
    fresh = "FRESH (first call initialises if training)"
    return [
        *linear("IdentityTransform", "vec", T.IdentityTransform),
        *linear("PointwiseAffineTransform", "vec, tensor shift/scale", partial(affine, shift, scale)),
        *linear("PointwiseAffineTransform", "vec, scalar shift/scale", partial(affine, 0.5, 0.75)),
        *linear(
            "PointwiseAffineTransform",
            "img, per-channel (C,1,1) scale",
            lambda: affine(torch.randn(4, 1, 1), 0.5 + torch.rand(4, 1, 1)),
        ),
        *broken(
            "PointwiseAffineTransform", "vec, negative scale entries", partial(affine, shift, -scale), error=ValueError
        ),
        *linear(
            "AffineTransform",
            "vec (deprecated name; AffineScalarTransform is the same object)",
            partial(T.AffineTransform, shift, scale),
        ),
        *linear("Permutation", "vec", lambda: T.Permutation(torch.tensor([2, 0, 5, 1, 4, 3]))),
        *linear("Permutation", "img dim=1", lambda: T.Permutation(torch.tensor([2, 0, 3, 1]), dim=1)),
        *linear("Permutation", "img dim=3", lambda: T.Permutation(torch.tensor([2, 0, 3, 1]), dim=3)),
        *linear("RandomPermutation", "vec", partial(T.RandomPermutation, D)),
        *linear("ReversePermutation", "vec", partial(T.ReversePermutation, D)),
        *linear("SqueezeTransform", "img factor=2", T.SqueezeTransform, latent=(16, 2, 2)),
        *broken(
            "NaiveLinear",
            "vec, default orthogonal_initialization=True",
            partial(T.NaiveLinear, D),
            modes="train eval",
            error=RuntimeError,
            note="torch.qr is gone",
        ),
        *linear("NaiveLinear", "vec, orthogonal_initialization=False", naive, modes="train eval", **raises),
        *linear(
            "NaiveLinear",
            "vec, orthogonal_initialization=False, using_cache=True",
            naive_cached,
            modes="train",
            **raises,
        ),
        *linear("NaiveLinear", "vec, orthogonal_initialization=False, using_cache=True", naive_cached, **uncached),
        *linear("LULinear", "vec, identity_init=True", lu, modes="train eval"),
        *linear("LULinear", "vec, identity_init=False", partial(lu, identity_init=False)),
        *linear("LULinear", "vec, using_cache=True", lu_cached, modes="train"),
        *linear("LULinear", "vec, using_cache=True", lu_cached, own_inverse=False, note=EYE_FLOAT32),
        *linear("QRLinear", "vec, num_householder=3", qr, modes="train eval"),
        *linear("QRLinear", "vec, num_householder=4, using_cache", qr_cached, own_inverse=False, note=EYE_FLOAT32),
        *linear("SVDLinear", "vec, num_householder=4", svd, modes="train eval"),
        *linear("SVDLinear", "vec, num_householder=4, using_cache", svd_cached),
        *linear("HouseholderSequence", "vec, num_transforms=3", partial(T.HouseholderSequence, D, 3)),
        *linear("HouseholderSequence", "vec, num_transforms=4", partial(T.HouseholderSequence, D, 4)),
        *linear("OneByOneConvolution", "img", one_by_one, modes="train eval"),
        *linear("OneByOneConvolution", "img, using_cache, identity_init=False", one_by_one_cached, modes="train"),
        *linear(
            "OneByOneConvolution",
            "img, using_cache, identity_init=False",
            one_by_one_cached,
            own_inverse=False,
            note=EYE_FLOAT32,
        ),
        *refused("BatchNorm", "vec", batch_norm, modes="train", own_inverse=False, note=COUPLED),
        *linear("BatchNorm", "vec", batch_norm),
        *linear("BatchNorm", "vec, affine=False (argument is ignored)", partial(batch_norm, affine=False)),
        *linear("BatchNorm", "vec, FRESH running stats (running_var init 0)", batch_norm, fresh_stats=True),
        *linear("ActNorm", "vec, initialized", partial(act_norm, D), modes="train eval"),
        *linear("ActNorm", "img, initialized", partial(act_norm, *IMG), modes="train eval"),
        *linear("ActNorm", f"vec, {fresh}", partial(T.ActNorm, D), modes="train", note="its first batch sets it"),
        *linear("ActNorm", f"vec, {fresh}", partial(T.ActNorm, D)),
    ]


def elementwise_rows() -> list[Case]:
    gated = {"note": "affine in x, but its log-det depends on the context"}
    wrong = {**gated, "own_log_prob": False}
    rq_cdf = partial(T.PiecewiseRationalQuadraticCDF, VEC, **NO_TAILS)
    linear_cdf = partial(T.PiecewiseLinearCDF, VEC, **NO_TAILS)
    table = [
        *nonlinear("Tanh", "vec", T.Tanh),
        *nonlinear("LogTanh", "vec cut_point=1", T.LogTanh),
        *nonlinear("LeakyReLU", "vec slope=0.01", T.LeakyReLU, **LEAKY),
        *nonlinear("LeakyReLU", "vec slope=0.5", partial(T.LeakyReLU, 0.5), **LEAKY),
        *nonlinear("Sigmoid", "vec T=1", T.Sigmoid),
        *nonlinear("Sigmoid", "vec T=2 learn_temperature", partial(T.Sigmoid, 2, learn_temperature=True)),
        *nonlinear("Logit", "vec", T.Logit, domain="unit"),
        *nonlinear("Logit", "img", T.Logit, domain="unit"),
        *nonlinear("GatedLinearUnit", "vec, context (N,1)", T.GatedLinearUnit, context_shape=(1,), **wrong),
        *nonlinear("GatedLinearUnit", "vec, context (N,D)", T.GatedLinearUnit, context_shape=VEC, **wrong),
        *nonlinear(
            "GatedLinearUnit", "vec D=1, context (N,1)", T.GatedLinearUnit, shape=(1,), context_shape=(1,), **gated
        ),
        *nonlinear("CauchyCDF", "vec", CauchyCDF),
        *nonlinear("CauchyCDFInverse", "vec", CauchyCDFInverse, domain="unit"),
        *nonlinear(
            "CompositeCDFTransform",
            "vec Sigmoid o RQ-CDF o Sigmoid^-1",
            lambda: T.CompositeCDFTransform(T.Sigmoid(), rq_cdf()),
        ),
        *nonlinear(
            "CompositeCDFTransform",
            "vec CauchyCDF o Linear-CDF o CauchyCDF^-1",
            lambda: T.CompositeCDFTransform(CauchyCDF(), linear_cdf()),
            inverse_tol=1e-3,
            note=LINSPACE_FLOAT32,
        ),
    ]
    for kind in ("Linear", "Quadratic", "Cubic", "RationalQuadratic"):
        cls, cdf, facts = f"Piecewise{kind}CDF", getattr(T, f"Piecewise{kind}CDF"), spline_facts(kind)
        table += [
            *nonlinear(cls, "vec tails=None", partial(cdf, VEC, **NO_TAILS), domain="unit", **facts),
            *nonlinear(cls, "vec tails=linear bound=2", partial(cdf, VEC, **TAILS), **facts),
            *nonlinear(cls, "img tails=linear bound=2", partial(cdf, IMG, **TAILS), **facts),
        ]
    return table


def spline_facts(kind: str) -> dict[str, object]:
    return {"inverse_tol": 1e-3, "note": LINSPACE_FLOAT32} if kind == "Linear" else {}


def coupling_rows() -> list[Case]:
    table, context = [], {"context_shape": (3,)}
    for cls in ("AffineCouplingTransform", "AdditiveCouplingTransform"):
        of = partial(coupling, getattr(T, cls))
        normed, dropped = partial(of, net(relu, use_batch_norm=True)), partial(of, net(dropout_probability=0.3))
        table += [
            *nonlinear(cls, "vec net=relu", partial(of, net(relu))),
            *nonlinear(cls, "vec net=tanh", of),
            *nonlinear(cls, "img net=tanh", partial(of, conv_net(), 4)),
            *nonlinear(cls, "vec net=tanh context=3", partial(of, net(context_features=3)), **context),
            *refused(cls, "vec net=relu use_batch_norm", normed, modes="train", note=COUPLED),
            *nonlinear(cls, "vec net=relu use_batch_norm", normed),
            *refused(cls, "vec net=tanh dropout=0.3", dropped, modes="train", own_inverse=False, note=STOCHASTIC),
            *nonlinear(cls, "vec net=tanh dropout=0.3", dropped),
            *broken(cls, "vec net=MLP (nflows.nn.nets.MLP)", partial(of, mlp), error=TypeError),
        ]
    unconditional = {"unconditional_transform": lambda features: T.PiecewiseRationalQuadraticCDF([features], **TAILS)}
    table += nonlinear(
        "AffineCouplingTransform",
        "vec net=tanh unconditional_transform=RQ-CDF",
        partial(coupling, T.AffineCouplingTransform, **unconditional),
    )
    for kind in ("Linear", "Quadratic", "Cubic", "RationalQuadratic"):
        cls, facts = f"Piecewise{kind}CouplingTransform", spline_facts(kind)
        bare = partial(coupling, getattr(T, cls))
        of = partial(bare, **TAILS)
        table += [
            *nonlinear(cls, "vec net=relu tails=linear bound=2", partial(of, net(relu)), **facts),
            *nonlinear(cls, "vec net=tanh tails=linear bound=2", of, **facts),
            *nonlinear(cls, "vec net=tanh tails=None", partial(bare, **NO_TAILS), domain="unit", **facts),
            *nonlinear(
                cls,
                "vec net=tanh tails=linear apply_unconditional_transform",
                partial(of, apply_unconditional_transform=True),
                **facts,
            ),
            *nonlinear(
                cls, "vec net=tanh tails=linear context=3", partial(of, net(context_features=3)), **context, **facts
            ),
            *nonlinear(cls, "img net=tanh tails=linear", partial(of, conv_net(), 4), **facts),
        ]
    return table


def autoregressive_rows() -> list[Case]:
    kinds = ("Affine", "PiecewiseQuadratic", "PiecewiseRationalQuadratic")
    affine, quadratic, rq = (f"Masked{kind}AutoregressiveTransform" for kind in kinds)
    table = []
    for word, activation in (("relu", relu), ("tanh", tanh)):
        table += nonlinear(affine, f"vec net={word}", partial(autoregressive, getattr(T, affine), activation))
        for kind in ("Linear", "Cubic"):
            cls = f"MaskedPiecewise{kind}AutoregressiveTransform"
            make = partial(autoregressive, getattr(T, cls), activation, **NO_TAILS)
            table += nonlinear(cls, f"vec net={word}", make, domain="unit", **spline_facts(kind))
        for cls in (quadratic, rq):
            make = partial(autoregressive, getattr(T, cls), activation)
            table += nonlinear(cls, f"vec net={word} tails=linear bound=2", partial(make, **TAILS))
            table += nonlinear(cls, f"vec net={word} tails=None", partial(make, **NO_TAILS), domain="unit")
    of, of_rq = partial(autoregressive, getattr(T, affine)), partial(autoregressive, getattr(T, rq), **TAILS)
    feedforward = partial(of, use_residual_blocks=False, random_mask=True)
    normed, context = partial(of, relu, use_batch_norm=True), {"context_shape": (3,)}
    return [
        *table,
        *nonlinear(affine, "vec net=tanh context=3", partial(of, context_features=3), **context),
        *nonlinear(affine, "vec net=tanh feedforward blocks random_mask", feedforward),
        *refused(affine, "vec net=relu use_batch_norm", normed, modes="train", note=COUPLED),
        *nonlinear(affine, "vec net=relu use_batch_norm", normed),
        *nonlinear(rq, "vec net=tanh tails=linear context=3", partial(of_rq, context_features=3), **context),
    ]


def inverse_rows() -> list[Case]:
    cls = "InverseTransform"
    naive_facts, cached_facts = ({"own_log_prob": False, "note": note} for note in (SOLVE_GONE, EYE_FLOAT32))
    table = [
        *linear(cls, "vec of LULinear", inverse(lu), modes="train eval"),
        *linear(cls, "vec of NaiveLinear(orth init False)", inverse(naive), modes="train eval", **naive_facts),
        *linear(cls, "vec of NaiveLinear(orth False, using_cache)", inverse(naive_cached), **naive_facts),
        *linear(cls, "vec of LULinear(using_cache)", inverse(lu_cached), **cached_facts),
        *linear(cls, "vec of QRLinear", inverse(qr), modes="train eval"),
        *linear(cls, "vec of QRLinear(using_cache)", inverse(qr_cached), **cached_facts),
        *linear(cls, "vec of SVDLinear", inverse(svd), modes="train eval"),
        *linear(cls, "vec of SVDLinear(using_cache)", inverse(svd_cached)),
        *linear(cls, "img of OneByOneConvolution", inverse(one_by_one)),
        *refused(
            cls, "vec of BatchNorm", inverse(T.BatchNorm, D), modes="train", own_log_prob=False, own_inverse=False
        ),
        *linear(cls, "vec of BatchNorm", inverse(T.BatchNorm, D)),
        *linear(cls, "vec of ActNorm(initialized)", inverse(act_norm, D)),
        *linear(cls, "img of SqueezeTransform", inverse(T.SqueezeTransform), latent=(1, 8, 8)),
        *nonlinear(
            cls,
            "vec of MaskedAffineAutoregressive net=tanh (IAF)",
            inverse(autoregressive, T.MaskedAffineAutoregressiveTransform),
        ),
        *nonlinear(cls, "vec of AffineCoupling net=tanh", inverse(coupling, T.AffineCouplingTransform)),
        *nonlinear(cls, "vec of AdditiveCoupling net=tanh", inverse(coupling, T.AdditiveCouplingTransform)),
    ]
    for kind in ("Linear", "Quadratic", "Cubic", "RationalQuadratic"):
        make = inverse(coupling, getattr(T, f"Piecewise{kind}CouplingTransform"), **TAILS)
        facts = spline_facts(kind) | ({"own_tol": 1e-4} if kind == "Linear" else {})  # its inverse is the density's
        table += nonlinear(cls, f"vec of Piecewise{kind}Coupling net=tanh tails=linear", make, **facts)
    return [
        *table,
        *nonlinear(cls, "vec of LeakyReLU(0.5)", inverse(T.LeakyReLU, 0.5), **LEAKY),
        *nonlinear(cls, "vec of LogTanh", inverse(T.LogTanh)),
        *nonlinear(cls, "vec of Tanh", inverse(T.Tanh), domain="interval"),
    ]


def container_rows() -> list[Case]:
    together, levels = "CompositeTransform", "MultiscaleCompositeTransform"
    half, affine = (3,), T.AffineCouplingTransform
    permutation, couple = partial(T.RandomPermutation, D), partial(coupling, T.AdditiveCouplingTransform)
    return [
        *linear(
            together,
            "vec LU+ReversePermutation+ActNorm(init) (all linear)",
            composite(lu, partial(T.ReversePermutation, D), partial(act_norm, D)),
        ),
        *nonlinear(together, "vec Perm+LU+AdditiveCoupling tanh", composite(permutation, lu, couple)),
        *nonlinear(
            together,
            "vec LU+LeakyReLU+LU+LogTanh+LU (g-NN style)",
            composite(lu, T.LeakyReLU, lu, T.LogTanh, lu),
            **LEAKY,
        ),
        *linear(together, "vec empty list", composite()),
        *linear(
            levels,
            "vec 2 levels LULinear (all linear)",
            lambda: multiscale((T.LULinear(D), VEC), (T.LULinear(3), half)),
        ),
        *nonlinear(
            levels,
            "vec 2 levels AffineCoupling",
            lambda: multiscale((coupling(affine), VEC), (coupling(affine, size=3), half)),
        ),
        *linear(
            levels,
            "img squeeze+actnorm+1x1conv x2 (all linear; output flattened)",
            partial(glow, couple=False),
            latent=(64,),
            noise=0.1,
        ),
        *nonlinear(levels, "img glow-like 2 levels", glow, latent=(64,), noise=0.1),
    ]


def flow_rows() -> list[Case]:
    sizes = {"features": D, "hidden_features": 8, "num_layers": 2, "num_blocks_per_layer": 1, "activation": tanh}
    nvp, maf = "flows.SimpleRealNVP(._transform)", "flows.MaskedAutoregressiveFlow(._transform)"
    make_nvp, make_maf = partial(SimpleRealNVP, **sizes), partial(MaskedAutoregressiveFlow, **sizes)
    between, within = {"batch_norm_between_layers": True}, {"batch_norm_within_layers": True}
    train = {"modes": "train", "note": COUPLED}
    return [
        *nonlinear(nvp, "vec, activation=tanh", make_nvp),
        *nonlinear(nvp, "vec, use_volume_preserving tanh", partial(make_nvp, use_volume_preserving=True)),
        *refused(nvp, "vec, batch_norm_between_layers", partial(make_nvp, **between), own_inverse=False, **train),
        *nonlinear(nvp, "vec, batch_norm_between_layers", partial(make_nvp, **between)),
        *refused(nvp, "vec, batch_norm_within_layers", partial(make_nvp, **within), **train),
        *nonlinear(nvp, "vec, batch_norm_within_layers", partial(make_nvp, **within)),
        *nonlinear(maf, "vec, tanh", make_maf),
        *refused(maf, "vec, batch_norm_between_layers", partial(make_maf, **between), own_inverse=False, **train),
        *nonlinear(maf, "vec, batch_norm_between_layers", partial(make_maf, **between)),
    ]


NFLOWS_CASES: tuple[Case, ...] = (
    *linear_rows(),
    *elementwise_rows(),
    *coupling_rows(),
    *autoregressive_rows(),
    *inverse_rows(),
    *container_rows(),
    *flow_rows(),
)
