"""The contracts of DESIGN.md on every case of every library, and that each check of ebflow_plugin.testing can fail."""

import copy
import re
from functools import partial

import pytest
import torch
from nflows import transforms
from torch import nn

import ebflow_plugin as ebf
import nflows_small
from autograd_oracle import assert_derivatives
from cases import CASES, NFLOWS_CASES, NORMFLOWS_CASES, REFUSED, SUPPORTED, ZUKO_CASES, Case, first_of_each_class
from ebflow_nflows.steps import NflowsStep, UnknownStep
from ebflow_plugin import testing
from ebflow_plugin.adapting import InitialisedAffineStep
from randomness import randn

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


# Each check of ebflow_plugin.testing can fail


D = 3
flow_of = partial(nflows_small.flow_of, shape=(D,), mode="eval")


@pytest.fixture
def x():
    return randn(4, D)


pytestmark = pytest.mark.filterwarnings("ignore:1 of")


class Bad(transforms.Transform):
    """A transform with one fault at a time."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.weight = nn.Parameter(torch.eye(D))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs, context=None):
        if self.fault == "determinant":
            return inputs @ self.weight, torch.linalg.slogdet(self.weight)[1].expand(len(inputs))
        if self.fault == "writes x":
            inputs += 1.0
        if self.fault == "counts":
            self.calls += 1.0
        if self.fault == "device":
            return inputs + torch.zeros(D), inputs.new_zeros(len(inputs))
        if self.fault == "random":
            return inputs + torch.randn_like(inputs), inputs.new_zeros(len(inputs))
        return inputs, inputs.new_zeros(len(inputs))

    def inverse(self, inputs, context=None):
        shift = 0.1 if self.fault == "inverse" else 0.0
        return inputs + shift, inputs.new_zeros(len(inputs))


@pytest.mark.parametrize(
    ("check", "fault", "message"),
    [
        (testing.check_no_determinant, "determinant", "_linalg_slogdet was called"),
        (testing.check_untouched, "counts", "calls changed"),
        (testing.check_inverse, "inverse", r"decode\(encode\(x\)\) is x"),
        (testing.check_invariant, "random", "log_prob equals the flow's own: largest"),
        (testing.check_copies, "random", "another log_prob"),
    ],
)
def test_a_fault_is_found(check, fault, message, x):
    flow = flow_of(transforms.LULinear(D), Bad(fault))
    with pytest.raises((AssertionError, RuntimeError), match=message):
        check(flow, x)
    check(flow_of(transforms.LULinear(D), Bad("none")), x)


def test_writing_into_x_is_found_where_no_copy_is_given(x, monkeypatch):
    testing.check_untouched(flow_of(Bad("writes x")), x)  # an unknown class gets a copy
    monkeypatch.setattr(UnknownStep, "call_forward", NflowsStep.call_forward)
    with pytest.raises((AssertionError, RuntimeError), match="x was written into|leaf"):
        testing.check_untouched(flow_of(Bad("writes x")), x)


def test_mixed_devices_are_found(x):
    with pytest.raises((AssertionError, RuntimeError), match="mixes meta with cpu|same device|meta"):
        testing.check_devices(flow_of(Bad("device")), x)
    testing.check_devices(flow_of(Bad("none")), x)


def test_scalars_of_the_cpu_may_join():
    with testing.one_device(torch.device("meta")):
        torch.ones(2, device="meta") * torch.tensor(2.0)
        torch.zeros(2) + torch.ones(2)  # nothing of the watched device in it
    with (
        pytest.raises(AssertionError, match=r"mixes meta with cpu \(shape \(2,\)\)"),
        testing.one_device(torch.device("meta")),
    ):
        torch.ones(2, device="meta") * torch.ones(2)


@pytest.mark.parametrize(
    "routine",
    [
        torch.linalg.slogdet,
        torch.slogdet,
        torch.logdet,
        torch.det,
        torch.linalg.det,
        torch.inverse,
        torch.linalg.inv,
        torch.linalg.lu_factor,
        torch.linalg.lu,
        torch.linalg.qr,
        torch.linalg.svd,
        torch.linalg.eigh,
        torch.linalg.cholesky,
        torch.linalg.pinv,
        torch.matrix_exp,
        lambda a: torch.linalg.solve(a, a),
        lambda a: torch.linalg.lstsq(a, a),
    ],
)
def test_no_factorisation_watches_every_routine(routine):
    matrix = torch.eye(3, dtype=torch.float64)
    routine(matrix)
    with testing.no_factorisation(), pytest.raises(AssertionError, match="was called"):
        routine(matrix)


def test_no_factorisation_lets_products_and_triangular_solves_pass():
    matrix = torch.eye(3)
    with testing.no_factorisation():
        torch.relu(matrix @ matrix)
        torch.linalg.solve_triangular(matrix, matrix, upper=True)


def test_check_flow_runs_all_of_it(x):
    testing.check_flow(flow_of(transforms.LULinear(D), transforms.Tanh()), x)
    with pytest.raises(AssertionError):
        testing.check_flow(flow_of(transforms.LULinear(D), Bad("inverse")), x)


def test_linear_steps_are_not_asked_for_their_log_det(x, monkeypatch):
    model = ebf.wrap(flow_of(transforms.LULinear(D)))
    step = type(model.plan.steps[0])
    encode = step.encode
    monkeypatch.setattr(step, "encode", lambda self, x, c: (self.log_abs_det((D,)), encode(self, x, c))[1])
    with pytest.raises(AssertionError, match="computes the log-det of linear step _transform._transforms.0"):
        testing.check_no_determinant(model.flow, x)
