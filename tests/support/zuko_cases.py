"""The census of zuko 1.6 as test cases: every public transform in its configurations, every flow, base densities.

A case is named "<class>: <config> (<mode>)".
"""

from __future__ import annotations

from functools import partial

import torch
import zuko
from torch import nn
from torch.distributions import transforms as torch_transforms
from zuko import transforms as T
from zuko.flows.neural import MNN, UMNN
from zuko.flows.polynomial import ShiftedSOSPTransform
from zuko.lazy import Flow, LazyDistribution, Unconditional, UnconditionalDistribution
from zuko.lazy import UnconditionalTransform as Fixed

import ebflow_zuko
from case import Case
from zuko_parts import (
    BISECTED,
    CONTEXT,
    IMG,
    RELU,
    VEC,
    D,
    affine,
    autoregressive,
    composed,
    coupling,
    elementwise,
    fixed,
    flow,
    inverse,
    linear,
    lu,
    nonlinear,
    normal,
    permutation,
    refused,
    rotation,
)

SPLINE = {"univariate": T.MonotonicRQSTransform, "shapes": [(4,), (4,), (3,)]}
ADDITIVE = {"univariate": T.AdditiveTransform, "shapes": [()]}
BERNSTEIN = {"univariate": T.BoundedBernsteinTransform, "shapes": [(6,)]}
GAUSSIAN = {"univariate": T.GaussianizationTransform, "shapes": [(3,), (3,)]}
SUM_OF_SQUARES = {"univariate": ShiftedSOSPTransform, "shapes": [(2, 3), ()]}
SMALL = {"network": {"hidden_features": (8,)}, "signal": 4}
ANGLES = {"domain": "interval"}


def linear_rows() -> list[Case]:
    cls, numbers = "UnconditionalTransform", torch_transforms.AffineTransform
    scale = torch.tensor([0.5, -2.0, 1.5, 3.0])
    held = torch_transforms.ComposeTransform([numbers(0.3, 2.0), numbers(-1.0, -0.4)])
    return [
        *linear(cls, "IdentityTransform", fixed(T.IdentityTransform)),
        *linear(cls, "AdditiveTransform", fixed(T.AdditiveTransform, VEC)),
        *linear(cls, "img AdditiveTransform, per channel", fixed(T.AdditiveTransform, (2, 1, 1))),
        *linear(cls, "MonotonicAffineTransform", affine),
        *linear(cls, "MonotonicAffineTransform, slope", fixed(T.MonotonicAffineTransform, VEC, VEC, slope=0.1)),
        *linear(
            cls,
            "MonotonicAffineTransform of a partial",
            fixed(partial(T.MonotonicAffineTransform, slope=0.1), VEC, VEC),
        ),
        *linear(cls, "img MonotonicAffineTransform, one scale", fixed(T.MonotonicAffineTransform, (), ())),
        *linear(cls, "AffineTransform, buffers", lambda: Fixed(numbers, torch.ones(D), scale, buffer=True)),
        *linear(cls, "AffineTransform, numbers", lambda: Fixed(numbers, loc=0.5, scale=-0.7)),
        *linear(cls, "AffineTransform, event_dim=1", lambda: Fixed(numbers, torch.ones(D), scale, event_dim=1)),
        *linear(cls, "PermutationTransform", permutation),
        *linear(cls, "img PermutationTransform, of the last dimension", permutation),
        *linear(cls, "RotationTransform", rotation),
        *linear(cls, "img RotationTransform, of the last dimension", rotation),
        *linear(cls, "LULinearTransform", lu()),
        *linear(cls, "LULinearTransform, buffer", lu(buffer=True)),
        *linear(cls, "img LULinearTransform, of the last dimension", lu()),
        *linear(cls, "ComposedTransform of affine maps", lambda: Fixed(T.ComposedTransform, *held.parts)),
        *linear(
            cls, "ComposeTransform of affine maps", lambda: Fixed(torch_transforms.ComposeTransform, list(held.parts))
        ),
        *linear(cls, "IndependentTransform", lambda: Fixed(torch_transforms.IndependentTransform, held, 1)),
        *linear(cls, "DependentTransform", lambda: Fixed(T.DependentTransform, numbers(0.0, 3.0), 1)),
        *linear(
            "Unconditional",
            "RotationTransform (deprecated)",
            composed(lambda: Unconditional(T.RotationTransform, torch.randn(D, D))),
        ),
        *linear("ElementWiseTransform", "MonotonicAffineTransform", elementwise()),
        *linear("ElementWiseTransform", "AdditiveTransform", elementwise(**ADDITIVE)),
        *linear("ElementWiseTransform", "AdditiveTransform context=3", elementwise(3, **ADDITIVE), **CONTEXT),
        *linear("LazyInverse", "of MonotonicAffineTransform", inverse(affine)),
        *linear("LazyInverse", "of AdditiveTransform context=3", inverse(elementwise(3, **ADDITIVE)), **CONTEXT),
        *linear("LazyInverse", "of PermutationTransform", inverse(permutation)),
        *linear("LazyInverse", "of RotationTransform", inverse(rotation)),
        *linear("LazyInverse", "of LULinearTransform", inverse(lu())),
        *linear("LazyInverse", "of LazyInverse of LULinearTransform", inverse(inverse(lu()))),
        *linear(
            "LazyComposedTransform", "Permutation+LU+Rotation+affine", composed(permutation, lu(), rotation, affine)
        ),
        *linear("FullLinear", "vec", lambda: ebflow_zuko.FullLinear(D, init="orthogonal")),
        *linear(
            "FullLinear", "img, of the last dimension", lambda: ebflow_zuko.FullLinear(D, init="orthogonal"), shape=IMG
        ),
        *linear(
            "FullConv2d",
            "img, kernel 3",
            lambda: ebflow_zuko.FullConv2d(2, kernel_size=3, init="orthogonal"),
            noise=0.05,
        ),
        *linear(
            "FullConv2d",
            "img, stride 2",
            lambda: ebflow_zuko.FullConv2d(2, kernel_size=2, stride=2),
            latent=(8, 2, 2),
            noise=0.05,
        ),
    ]


def univariate_rows() -> list[Case]:
    cls, lazy = "UnconditionalTransform", "ElementWiseTransform"
    unit = {"domain": "unit"}
    table = [
        *nonlinear(cls, "CosTransform", fixed(T.CosTransform), **unit),
        *nonlinear(cls, "SinTransform", fixed(T.SinTransform), domain="interval"),
        *nonlinear(cls, "SoftclipTransform", fixed(T.SoftclipTransform, bound=3.0)),
        *nonlinear("LazyInverse", "of SoftclipTransform", inverse(fixed(T.SoftclipTransform)), domain="interval"),
        *nonlinear(cls, "CircularShiftTransform", fixed(T.CircularShiftTransform), domain="interval"),
        *nonlinear(cls, "SignedPowerTransform", fixed(T.SignedPowerTransform, VEC, scale=0.2)),
        *nonlinear(cls, "ExpTransform", fixed(T.ExpTransform)),
        *nonlinear("LazyInverse", "of ExpTransform", inverse(fixed(T.ExpTransform)), **unit),
        *nonlinear(cls, "SigmoidTransform", fixed(T.SigmoidTransform)),
        *nonlinear("LazyInverse", "of SigmoidTransform (logit)", inverse(fixed(T.SigmoidTransform)), **unit),
        *nonlinear(cls, "TanhTransform", fixed(T.TanhTransform)),
        *nonlinear("LazyInverse", "of TanhTransform", inverse(fixed(T.TanhTransform)), domain="interval"),
        *nonlinear(cls, "SoftplusTransform", fixed(T.SoftplusTransform)),
        *nonlinear(cls, "PowerTransform", fixed(T.PowerTransform, exponent=torch.tensor(2.0), buffer=True), **unit),
        *nonlinear(cls, "MonotonicTransform of a function", lambda: Fixed(T.MonotonicTransform, torch.sinh)),
        *nonlinear(
            cls, "UnconstrainedMonotonicTransform", lambda: Fixed(T.UnconstrainedMonotonicTransform, torch.cosh)
        ),
        *nonlinear(cls, "MonotonicRQSTransform", fixed(T.MonotonicRQSTransform, (D, 5), (D, 5), (D, 4))),
        *nonlinear(cls, "BernsteinTransform", fixed(T.BernsteinTransform, (D, 5))),
        *nonlinear(cls, "BoundedBernsteinTransform", fixed(T.BoundedBernsteinTransform, (D, 5))),
        *nonlinear(cls, "GaussianizationTransform", fixed(T.GaussianizationTransform, (D, 3), (D, 3), scale=0.5)),
        *nonlinear(cls, "SOSPolynomialTransform", fixed(T.SOSPolynomialTransform, (D, 2, 3))),
        *nonlinear("SmoothLeakyReLU", "vec", lambda: ebflow_zuko.SmoothLeakyReLU(0.3)),
        *nonlinear("SmoothLeakyReLU", "img, residual", lambda: ebflow_zuko.SmoothLeakyReLU(0.3, residual=True)),
        *nonlinear(lazy, "MonotonicAffineTransform context=3", elementwise(3), **CONTEXT),
        *nonlinear(lazy, "features=1, from a coupling", lambda: zuko.flows.NICE(1, 3, **RELU), shape=(1,), **CONTEXT),
        *nonlinear(
            lazy,
            "MNN",
            lambda: elementwise(univariate=MNN(4, hidden_features=(8,)), shapes=[(4,)])(),
        ),
        *nonlinear(
            lazy,
            "UMNN",
            lambda: elementwise(univariate=UMNN(4, hidden_features=(8,)), shapes=[(4,), ()])(),
        ),
    ]
    kinds = {"MonotonicRQSTransform": SPLINE, "BoundedBernsteinTransform": BERNSTEIN, "SOSPolynomial": SUM_OF_SQUARES}
    for name, options in {**kinds, "GaussianizationTransform": GAUSSIAN}.items():
        facts = {} if options is SPLINE else {**BISECTED, "domain": "interval"}  # within the bounds of the bisection
        table += nonlinear(lazy, name, elementwise(**options))
        table += nonlinear(lazy, f"{name} context=3", elementwise(3, **options), **CONTEXT)
        if options in (SPLINE, GAUSSIAN):
            table += nonlinear("LazyInverse", f"of elementwise {name}", inverse(elementwise(**options)), **facts)
    return table


def conditioned_rows() -> list[Case]:
    one, two = "GeneralCouplingTransform", "MaskedAutoregressiveTransform"
    adjacency = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 1, 1]], dtype=torch.bool)
    table = []
    for cls, of in ((one, coupling), (two, autoregressive)):
        table += [
            *nonlinear(cls, "affine tanh", of(), modes="train eval"),
            *nonlinear(cls, "affine relu", of(activation=nn.ReLU)),
            *nonlinear(cls, "affine tanh context=3", of(3), **CONTEXT),
            *nonlinear(cls, "additive tanh", of(**ADDITIVE)),
            *nonlinear(cls, "MonotonicRQSTransform", of(**SPLINE)),
            *nonlinear(cls, "SOSPolynomialTransform tanh", of(**SUM_OF_SQUARES)),
            *nonlinear("LazyInverse", f"of {cls} affine tanh", inverse(of())),
        ]

    def umnn():
        return autoregressive(univariate=UMNN(4, hidden_features=(8,)), shapes=[(4,), ()])()

    return [
        *table,
        *nonlinear(one, "mask, normalize", coupling(mask=[True, True, False, True], normalize=True)),
        *nonlinear(
            "LazyInverse", f"of {one} SOSPolynomialTransform tanh", inverse(coupling(**SUM_OF_SQUARES)), **BISECTED
        ),
        *nonlinear(two, "passes=2", autoregressive(passes=2)),
        *nonlinear(two, "passes=1 context=3", autoregressive(3, passes=1), **CONTEXT),
        *nonlinear(two, "order", autoregressive(order=torch.tensor([2, 0, 3, 1]))),
        *nonlinear(two, "adjacency, residual", autoregressive(adjacency=adjacency, residual=True)),
        *nonlinear(two, "UMNN tanh", umnn, modes="train eval"),
        *refused("FFJTransform", "exact", lambda: zuko.flows.FFJTransform(D, **RELU), modes="train eval"),
        *refused("FFJTransform", "exact=False", lambda: zuko.flows.FFJTransform(D, exact=False, **RELU)),
    ]


class Scaled(LazyDistribution):
    """A user's own base density: a Gaussian whose scale depends on the context."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(3, D)

    def forward(self, c: torch.Tensor | None = None) -> torch.distributions.Distribution:
        return zuko.distributions.DiagNormal(torch.zeros_like(self.scale.bias), torch.exp(self.scale(c)))


def student_t(freedom: torch.Tensor) -> torch.distributions.Distribution:
    return torch.distributions.Independent(torch.distributions.StudentT(freedom), 1)


def flow_rows() -> list[Case]:
    table = []
    options = {
        "NSF": {"bins": 4},
        "NCSF": {"bins": 4},
        "GF": {"components": 3},
        "NAF": SMALL,
        "UNAF": SMALL,
        "SOSPF": {"degree": 2, "polynomials": 2},
        "BPF": {"degree": 6},
        "MAF": {},
        "NICE": {},
        "RealNVP": {},
    }
    for name, extra in options.items():
        facts = ANGLES if name == "NCSF" else {}
        make = partial(flow, name, **extra)
        if name == "GF":  # its elementwise transforms have networks with a context alone
            table += nonlinear(f"flows.{name}", "no context", lambda: zuko.flows.GF(D, transforms=2, components=3))
        else:
            table += nonlinear(f"flows.{name}", "no context", make(), **facts)
        table += nonlinear(f"flows.{name}", "context=3", make(3), **CONTEXT, **facts)
    return [
        *table,
        *nonlinear(
            "flows.MAF", "randperm passes=2 relu", flow("MAF", randperm=True, passes=2, **RELU, activation=None)
        ),
        *nonlinear("flows.RealNVP", "randmask", flow("RealNVP", randmask=True)),
        *refused("flows.CNF", "no context", lambda: zuko.flows.CNF(D, **RELU)),
    ]


def base_rows() -> list[Case]:
    def on(base, context=0):
        return lambda: Flow([lu()(), coupling(context)(), rotation()], base())

    def uniform():
        return UnconditionalDistribution(
            zuko.distributions.BoxUniform, -9 * torch.ones(D), 9 * torch.ones(D), buffer=True
        )

    def plain():
        return UnconditionalDistribution(torch.distributions.Normal, torch.zeros(D), torch.ones(D))

    def student():
        return UnconditionalDistribution(student_t, 5 + torch.ones(D))

    def trained():
        return UnconditionalDistribution(zuko.distributions.DiagNormal, torch.zeros(D), 2 + torch.ones(D))

    mixture = zuko.mixtures.GMM
    return [
        *nonlinear("BoxUniform base", "vec", on(uniform)),
        *nonlinear("Normal base", "vec, entries without an event dimension", on(plain)),
        *nonlinear("DiagNormal base", "vec, trainable", on(trained)),
        *nonlinear("StudentT base", "vec, of a function", on(student)),
        *nonlinear("GMM base", "vec", on(partial(mixture, D))),
        *nonlinear("GMM base", "vec, context=3", on(partial(mixture, D, 3, **RELU), 3), **CONTEXT),
        *nonlinear("Scaled base", "vec, the user's own, context=3", on(Scaled, 3), **CONTEXT),
        *nonlinear("Flow base", "vec, a flow on a flow", lambda: Flow(coupling()(), on(partial(normal, D))())),
        *linear("GMM", "full", partial(mixture, D, components=3)),
        *linear("GMM", "diagonal, tied", partial(mixture, D, components=3, covariance_type="diagonal", tied=True)),
        *linear("GMM", "spherical, context=3", partial(mixture, D, 3, covariance_type="spherical", **RELU), **CONTEXT),
    ]


ZUKO_CASES: tuple[Case, ...] = (
    *linear_rows(),
    *univariate_rows(),
    *conditioned_rows(),
    *flow_rows(),
    *base_rows(),
)
