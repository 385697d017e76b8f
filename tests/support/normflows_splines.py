"""The rows of the census of normflows 1.7.3 that are rational-quadratic splines."""

from __future__ import annotations

from functools import partial

import normflows as nf
import torch
from normflows.distributions import UniformGaussian
from normflows.flows.neural_spline.autoregressive import MaskedPiecewiseRationalQuadraticAutoregressive
from normflows.flows.neural_spline.coupling import PiecewiseRationalQuadraticCDF, PiecewiseRationalQuadraticCoupling
from normflows.nets.resnet import ConvResidualNet, ResidualNet
from torch import nn

from normflows_parts import CONTEXT, VEC, D, NormflowsCase, nonlinear, rqs


def public_rows() -> list[NormflowsCase]:
    """The four public classes."""
    coupled, auto = "CoupledRationalQuadraticSpline", "AutoregressiveRationalQuadraticSpline"
    inside, context = {"domain": "interval"}, {"context_shape": (CONTEXT,)}
    found = []
    for name, activation in (("relu", nn.ReLU), ("tanh", nn.Tanh)):
        make, circular = partial(rqs, activation=activation), f"vec net={name} ind_circ=[0,3] x inside bound"
        found += nonlinear(coupled, f"vec net={name} tails=linear", partial(make, "Coupled"))
        found += nonlinear(auto, f"vec net={name}", partial(make, "Autoregressive"))
        for kind, cls in (("CircularCoupled", coupled), ("CircularAutoregressive", auto)):
            found += nonlinear(f"Circular{cls}", circular, partial(make, kind, [0, 3]), **inside)
    for kind, cls in (("CircularCoupled", coupled), ("CircularAutoregressive", auto)):
        found += nonlinear(
            f"Circular{cls}",
            "vec net=tanh ind_circ=[0,3] x in R^D (outside bound)",
            partial(rqs, kind, [0, 3], tail_bound=1.0),
            own_log_prob=False,
            own_inverse=False,
            note="gives 0 and a log-det of 0 for every coordinate outside the bound: no density there",
        )
    return [
        *found,
        *nonlinear(coupled, "vec net=tanh context=3", partial(rqs, "Coupled", num_context_channels=CONTEXT), **context),
        *nonlinear(
            coupled,
            "vec net=tanh tails=circular x inside bound",
            partial(rqs, "Coupled", tails="circular"),
            **inside,
        ),
        *nonlinear(
            coupled,
            "vec net=tanh tails=None on [0,1]",
            lambda: nf.NormalizingFlow(
                UniformGaussian(D, list(range(D))), [nf.transforms.Shift(), rqs("Coupled", tails=None)]
            ),
            domain="unit",
            note="a Gaussian base would sample outside [0, 1], where such a spline raises",
        ),
        *nonlinear(
            coupled,
            "vec all x outside tail_bound",
            partial(rqs, "Coupled", tail_bound=0.04),
            domain="unit",
            note="the identity wherever x is drawn from, and nonlinear all the same",
        ),
        *nonlinear(
            auto,
            "vec net=tanh context=3 permute_mask",
            partial(rqs, "Autoregressive", num_context_channels=CONTEXT, permute_mask=True),
            **context,
        ),
        *nonlinear(
            f"Circular{coupled}",
            "vec net=tanh ctx=3 tensor tail_bound",
            lambda: rqs(
                "CircularCoupled", [0, 3], num_context_channels=CONTEXT, tail_bound=torch.tensor([1.5, 2.0, 2.5] * 2)
            ),
            **inside,
            **context,
        ),
    ]


def inner_rows() -> list[NormflowsCase]:
    """The classes inside the public ones, which run the other way round."""

    def vec_net(n_in: int, n_out: int) -> nn.Module:
        return ResidualNet(n_in, n_out, hidden_features=8, num_blocks=1, activation=torch.tanh)

    def img_net(n_in: int, n_out: int) -> nn.Module:
        return ConvResidualNet(n_in, n_out, hidden_channels=6, num_blocks=1, activation=torch.tanh)

    tails, mask = {"num_bins": 4, "tails": "linear", "tail_bound": 3.0}, torch.tensor([0, 1, 0, 1, 0, 1])
    coupling = partial(PiecewiseRationalQuadraticCoupling, **tails)
    made = partial(MaskedPiecewiseRationalQuadraticAutoregressive, D, 8, num_blocks=1, activation=torch.tanh, **tails)
    inner = "inner class tails=linear"
    return [
        *nonlinear(
            "PiecewiseRationalQuadraticCDF", f"vec {inner}", partial(PiecewiseRationalQuadraticCDF, VEC, **tails)
        ),
        *nonlinear("PiecewiseRationalQuadraticCoupling", f"vec {inner} net=tanh", partial(coupling, mask, vec_net)),
        *nonlinear("PiecewiseRationalQuadraticCoupling", f"img {inner} net=tanh", partial(coupling, mask[:4], img_net)),
        *nonlinear("MaskedPiecewiseRationalQuadraticAutoregressive", f"vec {inner} net=tanh", made),
    ]


SPLINE_CASES: tuple[NormflowsCase, ...] = (*public_rows(), *inner_rows())
