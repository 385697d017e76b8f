"""The contracts of DESIGN.md, on every case of every library."""

import copy
import re

import pytest
import torch

import ebflow_plugin as ebf
from cases import CASES, NFLOWS_CASES, NORMFLOWS_CASES, REFUSED, SUPPORTED, ZUKO_CASES, Case, first_of_each_class
from ebflow_plugin import testing
from ebflow_plugin.adapting import InitialisedAffineStep
from exemptions import asking

every_case = pytest.mark.parametrize("case", SUPPORTED, ids=str)

# The inverse of a full matrix is the density direction here, so that energy() needs one solve; a rotation of zuko is
# the exponential of a matrix.
NEEDS_A_SOLVE = [
    case for case in SUPPORTED if re.search(r"of NaiveLinear|Rotation|flows.GF|zuko .* base: vec", str(case))
]

# What the meta device says where a library's code decides by values; which classes do stands in exemptions.py.
DECIDES_BY_VALUE = re.compile(r"Tensor.item\(\) cannot be called on meta tensors|nonzero|data-dependent")

# Parameters that no score depends on: a location where the density is an exponential or flat, and what normflows reads
# of its Residual only to estimate log-dets.
UNSEEN = re.compile("Laplace base|normflows Residual|zuko BoxUniform base")


def test_the_census_is_complete():
    assert (len(NFLOWS_CASES), len(NORMFLOWS_CASES), len(ZUKO_CASES)) == (178, 148, 134)
    assert len({str(case) for case in CASES}) == len(CASES)


@every_case
def test_invariant(case: Case):
    flow, x, context = case.build(), case.x(), case.context()
    ebf.wrap(flow).initialize(x, context)
    if not case.own_log_prob:
        model = ebf.wrap(flow)
        expected = -model.energy(x, context) - model.log_z(case.event_shape)
        assert torch.allclose(model.log_prob(x, context), expected, rtol=1e-9)
        return
    testing.check_invariant(
        flow, x, context, own=lambda: case.own(flow, x.clone(), context), tolerance=max(case.own_tol, 1e-9)
    )


@every_case
def test_classification(case: Case):
    report = ebf.describe(case.build())
    assert all(row.known for row in report), [row for row in report if not row.known]
    assert ("linear" if all(row.linearity == "linear" for row in report) else "nonlinear") == case.expect


@every_case
def test_nothing_of_the_users_changes(case: Case):
    testing.check_untouched(case.build(), case.x(), case.context())


@pytest.mark.parametrize("case", [case for case in SUPPORTED if case.own_log_prob], ids=str)
def test_the_flows_own_log_prob_is_bit_equal_after_wrapping(case: Case):
    x, context = case.x(), case.context()
    plain, wrapped = case.build(), case.build()
    model = ebf.wrap(wrapped)
    if any(isinstance(step, InitialisedAffineStep) for step in model.plan.steps):  # else the first call decides
        for flow in (plain, wrapped):
            ebf.wrap(flow).initialize(x, context)
    model.score(x, context)
    model.log_prob(x, context)
    assert torch.equal(case.own(wrapped, x, context), case.own(plain, x, context))


@pytest.mark.parametrize("case", [case for case in SUPPORTED if case not in NEEDS_A_SOLVE], ids=str)
def test_energy_computes_no_determinant(case: Case):
    testing.check_no_determinant(case.build(), case.x(), case.context())


@pytest.mark.parametrize("case", NEEDS_A_SOLVE, ids=str)
def test_a_density_direction_that_needs_a_solve_asks_for_no_log_det(case: Case):
    with pytest.raises(AssertionError, match=r"solve|lu_factor|matrix_exp"):
        testing.check_no_determinant(case.build(), case.x(), case.context())


@pytest.mark.parametrize("case", [case for case in SUPPORTED if case.own_inverse], ids=str)
def test_inverse(case: Case):
    testing.check_inverse(case.build(), case.x(), case.context(), tolerance=max(case.inverse_tol, 1e-6))


@every_case
def test_copies(case: Case):
    testing.check_copies(case.build(), case.x(), case.context())


@every_case
def test_devices(case: Case):
    try:
        testing.check_devices(case.build(), case.x(), case.context())
    except (RuntimeError, NotImplementedError) as error:
        exempt = asking(ebf.wrap(case.build()))
        if not (DECIDES_BY_VALUE.search(str(error)) and exempt):
            raise
        pytest.skip(f"{', '.join(sorted(exempt))} of the library: decides by value")


@every_case
def test_score_is_the_gradient_and_second_derivatives_exist(case: Case):
    flow, x, context = case.build(), case.x(3), case.context(3)
    model = ebf.wrap(flow)
    model.initialize(x, context)
    point = x.clone().requires_grad_()
    score = model.score(point, context)
    (gradient,) = torch.autograd.grad(model.energy(point, context).sum(), point)
    assert torch.allclose(score, -gradient, rtol=1e-10)
    if score.requires_grad:
        (product,) = torch.autograd.grad((score * torch.ones_like(x)).sum(), point, allow_unused=True)
        assert product is None or torch.isfinite(product).all()


@every_case
def test_batches_of_none_and_of_one(case: Case):
    flow, x, context = case.build(), case.x(), case.context()
    model = ebf.wrap(flow)
    model.initialize(x, context)
    none = None if context is None else context[:0]
    assert model.energy(x[:0], none).shape == model.log_prob(x[:0], none).shape == (0,)
    assert model.score(x[:0], none).shape == x[:0].shape
    one = None if context is None else context[:1]
    assert torch.allclose(model.log_prob(x[:1], one), model.log_prob(x, context)[:1], rtol=1e-8)


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
