"""The contracts of DESIGN.md, on every case of every library."""

import copy
import re

import pytest
import torch

import ebflow_plugin as ebf
from autograd_oracle import assert_derivatives
from cases import CASES, NFLOWS_CASES, NORMFLOWS_CASES, REFUSED, SUPPORTED, ZUKO_CASES, Case, first_of_each_class
from ebflow_plugin import testing
from ebflow_plugin.adapting import InitialisedAffineStep

# The inverse of a full matrix is the density direction here, so that energy() needs one solve; a rotation of zuko is
# the exponential of a matrix.
NEEDS_A_SOLVE = re.compile("of NaiveLinear|Rotation|flows.GF|zuko .* base: vec")

# Parameters that no score depends on: a location where the density is an exponential or flat, what normflows reads of
# its Residual only to estimate log-dets, and a spline where all data are outside of it.
UNSEEN = re.compile("Laplace base|normflows Residual|zuko BoxUniform base|all x outside")


def test_the_census_is_complete():
    assert (len(NFLOWS_CASES), len(NORMFLOWS_CASES), len(ZUKO_CASES)) == (178, 148, 134)
    assert len({str(case) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", SUPPORTED, ids=str)
def test_every_contract(case: Case):
    """On one flow: each assertion names the contract that it is of."""
    flow, x, context = case.build(), case.x(), case.context()
    report = ebf.describe(flow)
    assert all(row.known for row in report), [row for row in report if not row.known]
    linear = all(row.linearity == "linear" for row in report)
    assert ("linear" if linear else "nonlinear") == case.expect, "4: the classification differs from the census"

    testing.check_untouched(flow, x, context)  # starts its ActNorms
    model, tolerance = ebf.wrap(flow), max(case.own_tol, 1e-9)
    if case.own_log_prob:
        own = lambda: case.own(flow, x.clone(), context)  # noqa: E731
        testing.check_invariant(flow, x, context, own=own, tolerance=tolerance)
        plain = case.build()
        if any(isinstance(step, InitialisedAffineStep) for step in model.plan.steps):  # else the first call decides
            ebf.wrap(plain).initialize(x, context)
        assert torch.equal(own(), case.own(plain, x, context)), "2: the flow's own log_prob changed by wrapping"
    else:
        testing.check_invariant(flow, x, context, own=lambda: model.log_prob(x, context), tolerance=tolerance)

    none, condition = (None if context is None else context[:rows] for rows in (0, 3))
    assert model.energy(x[:0], none).shape == model.log_prob(x[:0], none).shape == (0,), "an empty batch"
    assert model.score(x[:0], none).shape == x[:0].shape, "the score of an empty batch"
    point = x[:3].clone().requires_grad_()
    score = model.score(point, condition)
    (gradient,) = torch.autograd.grad(model.energy(point, condition).sum(), point)
    assert torch.allclose(score, -gradient, rtol=1e-10), "the score is not the negative gradient of the energy"
    if score.requires_grad:
        (product,) = torch.autograd.grad((score * torch.ones_like(point)).sum(), point, allow_unused=True)
        assert product is None or torch.isfinite(product).all(), "a second derivative is not finite"
    assert_derivatives(model, model.preprocess(x[:3])[0], condition)

    if case.own_inverse:
        testing.check_inverse(flow, x, context, tolerance=max(case.inverse_tol, 1e-6))
    if NEEDS_A_SOLVE.search(str(case)):
        with pytest.raises(AssertionError, match=r"solve|lu_factor|matrix_exp"):
            testing.check_no_determinant(flow, x, context)
    else:
        testing.check_no_determinant(flow, x, context)
    testing.check_copies(flow, x, context)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refusals_name_the_step_the_reason_and_the_fix(case: Case):
    with pytest.raises(
        ebf.UnsupportedStepError, match=r"steps cannot be wrapped \(adapter '.*'\)\n  \S+  \w+ \(.*\): "
    ):
        ebf.wrap(case.build())
    assert any(row.linearity == "refused" for row in ebf.describe(case.build()))


@pytest.mark.parametrize("case", [case for case in REFUSED if "(train)" in case.name], ids=str)
def test_train_mode_is_refused_after_wrapping_too(case: Case):
    flow = case.build().eval()
    try:
        model = ebf.wrap(flow)
    except ebf.UnsupportedStepError:
        pytest.skip("refused in eval mode as well")
    x, context = case.x(), case.context()
    model.energy(x, context)
    with pytest.raises(ebf.UnsupportedStepError, match=r"eval\(\)"):
        model.train().energy(x, context)


@pytest.mark.parametrize(
    "case",
    first_of_each_class(case for case in SUPPORTED if case.own_log_prob and case.dim <= 32),  # small Jacobians
    ids=str,
)
@pytest.mark.filterwarnings("ignore::ebflow_plugin.UnseenParameterWarning")
def test_verify_holds(case: Case):
    before = copy.deepcopy(case.build().state_dict())
    flow = case.build()
    report = ebf.verify(flow, case.x(), case.context())
    assert report
    unmeasured = [check for check in report if not check.passed]
    unseen = [check for check in unmeasured if check.detail.startswith("score matching cannot see")]
    assert bool(unseen) == bool(UNSEEN.search(str(case))), str(report)
    assert all(check.detail == "the step has no inverse" for check in unmeasured if check not in unseen), str(report)
    after = flow.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
