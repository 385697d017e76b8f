"""verify() holds on what is right (test_testing.py), and finds what is wrong."""

from functools import partial

import pytest
import torch
from nflows import distributions, flows, transforms

import ebflow_plugin as ebf
import nflows_small
from ebflow_plugin import verification
from ebflow_plugin.adapting import rules
from nflows_small import Doubled
from randomness import randn

D = 4
flow_of = partial(nflows_small.flow_of, shape=(D,), mode="eval")


@pytest.fixture
def x():
    return randn(5, D)


class WrongLogDet(transforms.Transform):
    def forward(self, inputs, context=None):
        return 2.0 * inputs.sinh(), inputs.cosh().log().sum(-1)


class BatchMean(transforms.Transform):
    def forward(self, inputs, context=None):
        return inputs - inputs.mean(0), inputs.new_zeros(len(inputs))


class Detached(transforms.Transform):
    """Its derivative is dropped, as in normflows' Residual in eval mode."""

    def forward(self, inputs, context=None):
        return inputs.sinh(), inputs.detach().cosh().log().sum(-1)


class FalseCurvature(transforms.Transform):
    """The first derivative is right, the second is not, as in UMNN."""

    def forward(self, inputs, context=None):
        return Sinh.apply(inputs), inputs.cosh().log().sum(-1)


class Sinh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sinh()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.detach().cosh()


class Once(Detached):
    """A wrong first derivative, and a second one that raises."""

    def forward(self, inputs, context=None):
        value, log_det = super().forward(inputs)
        return Identity.apply(value), log_det


class OneWay(transforms.Transform):
    """Right, and without an inverse."""

    def forward(self, inputs, context=None):
        return inputs.sinh(), inputs.cosh().log().sum(-1)


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return NotTwice.apply(grad)


class NotTwice(Identity):
    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("no second derivative")


LIES = [
    (WrongLogDet, "log-det matches autograd"),
    (BatchMean, "samples do not influence each other"),
    (Detached, "score agrees with finite differences"),
    (FalseCurvature, "second backward agrees with finite differences"),
    (Once, "score agrees with finite differences"),
]


@pytest.mark.filterwarnings("ignore:1 of")
@pytest.mark.parametrize(("cls", "claim"), LIES)
def test_a_lie_is_found(cls, claim, x):
    with pytest.raises(ebf.VerificationError, match="checks failed") as error:
        ebf.verify(flow_of(transforms.LULinear(D, identity_init=False), cls()), x)
    failed = [line for line in str(error.value).splitlines() if line.startswith("FAILED")]
    assert any(claim in line for line in failed), str(error.value)
    assert ("no second derivative" in str(error.value)) == (cls is Once)


def test_a_nonlinear_class_taught_as_linear_is_named(x):
    ebf.register_linear(OneWay)
    try:
        with pytest.raises(ebf.VerificationError, match=r"FAILED +linear step is affine +_transform._transforms.1"):
            ebf.verify(flow_of(transforms.LULinear(D), OneWay()), x)
    finally:
        rules.REGISTERED.pop(OneWay, None)


def test_a_coupling_that_starts_at_zero_is_found_out_after_its_parameters_move(x):
    """At its start it looks linear: that is why a probe must not classify."""
    coupling = transforms.AffineCouplingTransform([1, 0, 1, 0], nflows_small.smooth_net())
    flow = flow_of(coupling)
    with torch.no_grad():
        for parameter in coupling.transform_net.final_layer.parameters():
            parameter.zero_()
    with pytest.raises(ebf.VerificationError) as error:
        ebf.verify(ebf.wrap(flow, overrides={"_transform._transforms.0": "linear"}), x)
    failed = [line for line in str(error.value).splitlines() if line.startswith("FAILED")]
    assert any("linear step is affine, parameters moved" in line for line in failed)
    assert not any("linear step is affine  " in line for line in failed)


def test_the_flow_stays_as_it_is(x):
    flow = flow_of(transforms.ActNorm(D), transforms.LULinear(D, using_cache=True)).train()
    before = {name: tensor.clone() for name, tensor in flow.state_dict().items()}
    state = torch.get_rng_state()
    report = ebf.verify(flow, x)
    assert report
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in flow.state_dict().items())
    assert not flow._transform._transforms[0].initialized
    assert all(parameter.grad is None and parameter.requires_grad for parameter in flow.parameters())


def test_the_report_is_a_table(x):
    report = ebf.verify(flow_of(transforms.LULinear(D), transforms.Tanh()), x)
    text = str(report)
    assert "checks hold" in text
    assert "linear step is affine" in text
    assert "_transform._transforms.0" in text
    assert len(list(report)) == len(report.checks) > 5
    assert report.failures == ()


def test_nan_and_single_points_are_refused(x):
    flow = flow_of(transforms.LULinear(D))
    with pytest.raises(ebf.InputError, match="at least two data points, got 1"):
        ebf.verify(flow, x[:1])
    x[3, 2] = float("nan")
    with pytest.raises(ebf.InputError, match=r"x holds 1 NaN or inf in 1 of 5 rows, the first at \[3, 2\]"):
        ebf.verify(flow, x)


def test_float32_models_are_checked_in_float64(x):
    flow = flow_of(transforms.LULinear(D), transforms.Tanh()).float()
    assert all(check.passed for check in ebf.verify(flow, x.float()))


def test_a_flow_that_does_not_run_in_float64_says_so(x):
    class Single(transforms.Transform):
        def forward(self, inputs, context=None):
            return inputs @ torch.eye(D), inputs.new_zeros(len(inputs))

    with pytest.warns(UserWarning, match="not known"):
        report = ebf.verify(flow_of(Single()).float(), x.float())
    assert any(check.passed is None and "does not run in float64" in check.detail for check in report)


class WrongInverse(Doubled):
    def inverse(self, inputs, context=None):
        return inputs / 2.1, super().inverse(inputs)[1]


class Halved(Doubled):
    def forward(self, inputs, context=None):
        outputs, log_det = super().forward(inputs)
        return outputs, log_det / 2


def test_a_wrong_inverse_of_a_taught_class_is_found(x):
    ebf.register_linear(Doubled, apply=lambda module, x: 2.0 * x, invert=lambda module, y: y / 2.1)
    try:
        with pytest.raises(ebf.VerificationError, match=r"FAILED +inverse undoes the step +_transform._transforms.0"):
            ebf.verify(flow_of(Doubled()), x)
        ebf.register_linear(Doubled, apply=lambda module, x: 2.0 * x, invert=lambda module, y: y / 2.0, force=True)
        assert all(check.passed for check in ebf.verify(flow_of(Doubled()), x))
    finally:
        rules.REGISTERED.pop(Doubled, None)


@pytest.mark.filterwarnings("ignore:1 of")
def test_a_wrong_inverse_of_an_unknown_class_is_found(x):
    with pytest.raises(ebf.VerificationError, match=r"FAILED +inverse undoes the step "):
        ebf.verify(flow_of(WrongInverse()), x)


@pytest.mark.filterwarnings("ignore:1 of")
@pytest.mark.parametrize("shape", [(129,), (300,), (3, 10, 10)])
def test_a_wrong_log_det_of_a_large_event_is_found(shape):
    x = randn(3, *shape)
    base = distributions.StandardNormal(shape)
    with pytest.raises(ebf.VerificationError, match=r"FAILED +log-det matches autograd"):
        ebf.verify(flows.Flow(Halved(), base).double(), x)
    assert all(check.passed for check in ebf.verify(flows.Flow(Doubled(), base).double(), x))


def test_a_context_reaches_every_row_of_a_jacobian():
    """A Jacobian is taken many rows at a time, all with the context of the one point."""
    coupling = transforms.AffineCouplingTransform([0, 1] * 65, nflows_small.smooth_net(context=2))
    flow = flow_of(coupling, shape=(130,), noise=0.3)
    assert all(check.passed for check in ebf.verify(flow, randn(3, 130), randn(3, 2, seed=1)))


def test_parameters_that_no_score_depends_on_are_told_and_are_no_failure(x):
    flow = flow_of(transforms.LULinear(D), base=nflows_small.Level([D]))
    with pytest.warns(ebf.UnseenParameterWarning, match="cannot see 1 trainable parameters(?s:.*)_distribution.level"):
        report = ebf.verify(flow, x)
    (check,) = (check for check in report if "every trainable parameter" in check.name)
    assert (check.passed, check.detail) == (None, "score matching cannot see _distribution.level")
    flow._distribution.level.requires_grad_(False)
    assert all(check.passed for check in ebf.verify(flow, x))


@pytest.mark.filterwarnings("ignore:1 of")
def test_what_was_not_measured_is_listed(monkeypatch):
    monkeypatch.setattr(verification, "_JACOBIAN_LIMIT", 8)
    x = torch.randn(3, 9, dtype=torch.float64)
    report = ebf.verify(flows.Flow(Halved(), distributions.StandardNormal([9])).double(), x)
    (first, second) = (check for check in report if check.passed is None)
    assert (first.name, first.detail) == ("log-det matches autograd", "a Jacobian of 9 × 9 is too large")
    assert second.name.endswith("parameters moved")
    assert str(report).endswith("2 could not be measured")

    report = ebf.verify(flows.Flow(OneWay(), distributions.StandardNormal([3])).double(), x[:, :3])
    assert any(check.passed is None and check.detail == "the step has no inverse" for check in report)
