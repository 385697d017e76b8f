"""The sinh-arcsinh layer: against its formula and autograd, and in the three libraries."""

import normflows
import pytest
import torch
import zuko
from nflows import distributions, flows

import ebflow_nflows
import ebflow_normflows
import ebflow_plugin as ebf
import ebflow_zuko
from ebflow_plugin.layers import SinhArcsinh
from randomness import rng

D = 3


def layer(cls=SinhArcsinh):
    made = cls(D).double()
    with torch.no_grad():
        made.log_tail.copy_(torch.tensor([-1.2, 0.0, 0.4]))
        made.skewness.copy_(torch.tensor([0.7, 0.0, -1.5]))
    return made


POINTS = torch.tensor([-1e6, -30.0, -1.0, -1e-3, 0.0, 0.4, 5.0, 1e8], dtype=torch.float64)[:, None].expand(-1, D)


def test_the_map_is_that_of_jones_and_pewsey():
    made = layer()
    expected = torch.sinh(made.log_tail.exp() * torch.asinh(POINTS) - made.skewness)
    torch.testing.assert_close(made.transform(POINTS), expected)
    torch.testing.assert_close(made.invert(made.transform(POINTS)), POINTS, rtol=1e-9, atol=1e-12)


def test_derivatives_are_those_of_autograd():
    made = layer()
    x = POINTS[1:-1].clone().requires_grad_()

    def derivative(y):
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    slope = derivative(made.transform(x))
    first = derivative(slope.log())
    second = derivative(first)
    for ours, theirs in zip(made.slopes(x), (slope, first, second), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(made.slope(x), slope)
    torch.testing.assert_close(made.log_det(x), slope.log().sum(1))


def nflows_flow():
    return flows.Flow(layer(ebflow_nflows.SinhArcsinh), distributions.StandardNormal([D])).double()


def normflows_flow():
    base = normflows.distributions.DiagGaussian(D, trainable=False)
    return normflows.NormalizingFlow(base, [layer(ebflow_normflows.SinhArcsinh)]).double()


def zuko_flow():
    base = zuko.lazy.UnconditionalDistribution(
        zuko.distributions.DiagNormal, torch.zeros(D).double(), torch.ones(D).double(), buffer=True
    )
    return zuko.lazy.Flow([layer(ebflow_zuko.SinhArcsinh)], base)


@pytest.mark.parametrize("make", [nflows_flow, normflows_flow, zuko_flow])
def test_every_library_has_it(make):
    flow = make()
    model = ebf.wrap(flow)
    x = torch.randn(7, D, dtype=torch.float64, generator=rng(0))
    own = flow().log_prob(x) if make is zuko_flow else flow.log_prob(x)
    made = layer()
    expected = made.log_det(x) + torch.distributions.Normal(0.0, 1.0).log_prob(made.transform(x)).sum(1)
    torch.testing.assert_close(own, expected)
    torch.testing.assert_close(model.log_prob(x), expected)
    assert model.report.count("nonlinear") == 1
    assert all(check.passed is not False for check in ebf.verify(flow, x))
    loss = ebf.make_objective("ssm", model)(x)
    gradients = torch.autograd.grad(loss, list(model.flow.parameters()))
    assert all(bool(torch.isfinite(g).all()) and bool((g != 0).any()) for g in gradients)


@pytest.mark.parametrize("dim", [-1, -2, -3])
def test_parameters_can_be_those_of_any_dimension(dim):
    made, last = SinhArcsinh(D, dim).double(), layer()
    made.load_state_dict(last.state_dict())
    x = torch.randn(5, D, D, D, dtype=torch.float64, generator=rng(0))
    moved = x.movedim(dim, -1)
    torch.testing.assert_close(made.transform(x).movedim(dim, -1), last.transform(moved))
    torch.testing.assert_close(made.invert(made.transform(x)), x)
    torch.testing.assert_close(made.log_det(x), last.log_det(moved))
    for ours, theirs in zip(made.slopes(x), last.slopes(moved), strict=True):
        torch.testing.assert_close(ours.movedim(dim, -1), theirs)


def test_every_library_has_maps_of_channels():
    shape, expected = (D, 2, 2), layer()
    base = zuko.lazy.UnconditionalDistribution(
        zuko.distributions.DiagNormal, torch.zeros(shape).double(), torch.ones(shape).double(), ndims=3, buffer=True
    )
    steps = [library.SinhArcsinh(D, dim=-3).double() for library in (ebflow_nflows, ebflow_normflows, ebflow_zuko)]
    for step in steps:
        step.load_state_dict(expected.state_dict())
    models = (
        flows.Flow(steps[0], distributions.StandardNormal(shape)),
        normflows.NormalizingFlow(normflows.distributions.DiagGaussian(shape, trainable=False), [steps[1]]).double(),
        zuko.lazy.Flow([steps[2]], base),
    )
    x = torch.randn(7, *shape, dtype=torch.float64, generator=rng(0))
    normal = torch.distributions.Normal(0.0, 1.0)
    rows = x.movedim(1, -1)
    log_prob = expected.log_det(rows) + normal.log_prob(expected.transform(rows)).flatten(1).sum(1)
    for flow in models:
        own = flow().log_prob(x) if flow is models[2] else flow.log_prob(x)
        torch.testing.assert_close(own, log_prob)
        torch.testing.assert_close(ebf.wrap(flow).log_prob(x), log_prob)
        assert all(check.passed is not False for check in ebf.verify(flow, x))


@pytest.mark.parametrize("dim", [0, 1, 1.0, True])
def test_dimensions_are_counted_from_the_end(dim):
    with pytest.raises(ebf.InputError, match="dim must be a negative integer"):
        SinhArcsinh(D, dim)


def test_other_widths_are_refused():
    with pytest.raises(ebf.InputError, match="takes 3 features"):
        layer().transform(torch.zeros(2, 4, dtype=torch.float64))
    with pytest.raises(ebf.InputError, match="takes 3 features"):
        layer().invert(torch.zeros(2, 4, dtype=torch.float64))
    with pytest.raises(ebf.InputError, match=r"SinhArcsinh\(3, dim=-3\) takes 3 features in dimension -3"):
        SinhArcsinh(D, dim=-3).transform(torch.zeros(2, 4, 3, 3))
    with pytest.raises(ebf.InputError, match="takes 3 features"):
        SinhArcsinh(D, dim=-3).transform(torch.zeros(3, 3))
