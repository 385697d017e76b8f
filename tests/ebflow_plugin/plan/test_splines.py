"""Splines without masks: the libraries' own values, autograd's slopes, and the way back."""

import pytest
import torch
from nflows.transforms import splines as nflows_splines
from torch.nn import functional as F
from zuko.transforms import MonotonicRQSTransform

from ebflow_plugin.plan.splines import cubic, knots, linear, quadratic, rational_quadratic, shares, within
from randomness import randn

BINS, BOUND = 5, 2.0
WIDTHS, HEIGHTS, INNER, KNOTS, FIRST, LAST = (
    randn(7, 3, size, seed=seed) for seed, size in enumerate((BINS, BINS, BINS - 1, BINS + 1, 1, 1))
)
X = 1.7 * randn(7, 3, seed=9)  # some of them outside of the bound


def rational(x, inverse):
    xs, ys = (2 * BOUND * knots(shares(each, 1e-3)) - BOUND for each in (WIDTHS, HEIGHTS))
    one = torch.tensor(1 - 1e-3, dtype=x.dtype).expm1().log()
    slopes = 1e-3 + F.softplus(torch.cat([one.expand(7, 3, 1), INNER, one.expand(7, 3, 1)], -1))
    return rational_quadratic(x, xs, ys, slopes, inverse)


OURS = {
    "rational_quadratic": rational,
    "linear": lambda x, inverse: within(x, lambda u: linear(u, shares(WIDTHS), inverse), BOUND),
    "quadratic": lambda x, inverse: within(
        x, lambda u: quadratic(u, shares(WIDTHS, 1e-3), INNER, 1e-3, inverse), BOUND
    ),
    "quadratic, free ends": lambda x, inverse: within(
        x, lambda u: quadratic(u, shares(WIDTHS, 1e-3), KNOTS, 1e-3, inverse), BOUND
    ),
    "cubic": lambda x, inverse: within(
        x, lambda u: cubic(u, shares(WIDTHS, 1e-3), shares(HEIGHTS, 1e-3), FIRST, LAST, inverse), BOUND
    ),
}
OWN = {
    "rational_quadratic": (nflows_splines.unconstrained_rational_quadratic_spline, (WIDTHS, HEIGHTS, INNER)),
    "linear": (nflows_splines.unconstrained_linear_spline, (WIDTHS,)),
    "quadratic": (nflows_splines.unconstrained_quadratic_spline, (WIDTHS, INNER)),
    "cubic": (nflows_splines.unconstrained_cubic_spline, (WIDTHS, HEIGHTS, FIRST, LAST)),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("inverse", [False, True])
def test_values_are_those_of_nflows(name, inverse):
    function, parameters = OWN[name]
    assert (X.abs() > BOUND).any()
    expected = function(X, *parameters, inverse=inverse, tail_bound=BOUND)
    # nflows inverts linear splines in single precision, and cubic ones by formulas that cancel
    tolerance = {"linear": 1e-4, "cubic": 1e-4}.get(name, 1e-10) if inverse else 1e-10
    for found, wanted in zip(OURS[name](X, inverse), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("inverse", [False, True])
def test_the_slope_is_autograds_and_the_way_back_leads_home(name, inverse):
    x = X.clone().requires_grad_()
    value, log_slope = OURS[name](x, inverse)
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    torch.testing.assert_close(log_slope, slope.log(), rtol=1e-8, atol=1e-8)
    back, log_back = OURS[name](value, not inverse)
    torch.testing.assert_close(back, x, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(log_back, -log_slope, rtol=1e-7, atol=1e-7)
    if name != "linear":  # whose slope is constant in a bin
        assert torch.autograd.grad(log_slope.sum(), x)[0].isfinite().all()


def test_values_are_those_of_zuko():
    own = MonotonicRQSTransform(WIDTHS, HEIGHTS, INNER, bound=BOUND)
    ours = rational_quadratic(X, own.horizontal, own.vertical, own.derivatives)
    for found, wanted in zip(ours, own.call_and_ladj(X), strict=True):
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        rational_quadratic(X, own.horizontal, own.vertical, own.derivatives, inverse=True)[0], own.inv(X)
    )


def test_edges_belong_to_the_interval_and_nan_passes_through():
    edges = torch.tensor([[-BOUND, BOUND, float("nan")]], dtype=torch.float64).expand(7, 3)
    for name, spline in OURS.items():
        value, _ = spline(edges, False)
        torch.testing.assert_close(value, edges, equal_nan=True, msg=name)
    outside = within(torch.tensor([-0.1, 0.5, 1.1]), lambda u: (u, torch.zeros_like(u)), None)
    assert [value.isnan().tolist() for value in outside] == [[True, False, True]] * 2


def test_single_precision_stays_finite_in_both_directions():
    x = torch.linspace(-BOUND, BOUND, 7 * 3).reshape(7, 3)
    parts = [each.float() * 5 for each in (WIDTHS, HEIGHTS, KNOTS)]
    xs, ys = (2 * BOUND * knots(shares(each, 1e-3)) - BOUND for each in parts[:2])
    y, log_slope = rational_quadratic(x, xs, ys, 1e-3 + F.softplus(parts[2]))
    back, _ = rational_quadratic(y, xs, ys, 1e-3 + F.softplus(parts[2]), inverse=True)
    assert log_slope.isfinite().all()
    assert back.isfinite().all()
