"""Values that are known in closed form: x ~ N(0, I) and E = ½‖scale · x‖², on vectors and on images.

Tolerances are five standard errors of the sample.
"""

import math

import pytest
import torch
from nflows.distributions.normal import StandardNormal
from nflows.flows.base import Flow
from nflows.transforms import IdentityTransform, LULinear, PointwiseAffineTransform
from torch import nn

import ebflow_plugin as ebf
from ebflow_plugin.objectives import DSM, FDSSM, ML, SM, SML, SSM, Objective
from randomness import randn, rng

SHAPES = [(1,), (3,), (8,), (1, 4, 4)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
N = 20_000


class Negated(nn.Module):
    """No density, but an energy: -½‖z‖²."""

    def log_prob(self, inputs):
        return 0.5 * inputs.flatten(1).square().sum(1)


def quadratic(shape, scale=1.0):
    transform = IdentityTransform() if scale == 1.0 else PointwiseAffineTransform(0.0, scale)
    return ebf.wrap(Flow(transform, StandardNormal(shape)).double())


def assert_mean(objective: Objective, x, expected):
    """The mean of the values is what is expected, within five standard errors."""
    with torch.no_grad():
        values = objective.losses(x)
    assert values.shape == (len(x),)
    error = (values.mean() - expected).item()
    assert abs(error) < 5 * values.std().item() / math.sqrt(len(x)) + 1e-9, f"{values.mean().item()} for {expected}"


@shapes
def test_sm(shape):
    assert_mean(SM(quadratic(shape)), randn(N, *shape), -math.prod(shape) / 2)


@shapes
@pytest.mark.parametrize("projection", ["rademacher", "gaussian", "sphere"])
@pytest.mark.parametrize("projections", [1, 5])
def test_ssm(shape, projection, projections):
    objective = SSM(quadratic(shape), projections=projections, projection=projection, generator=rng(1))
    assert_mean(objective, randn(N, *shape), -math.prod(shape) / 2)


@shapes
@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_score_matching_of_another_scale(shape, scale):
    """½‖∇E‖² has mean d·scale⁴/2, the trace is d·scale²: a wrong factor cannot hide after scale 1."""
    model, d = quadratic(shape, scale), math.prod(shape)
    for objective in (SM(model), SSM(model, generator=rng(1)), FDSSM(model, eps=0.1, generator=rng(1))):
        assert_mean(objective, randn(N, *shape), d * (0.5 * scale**4 - scale**2))


@shapes
@pytest.mark.parametrize("eps", [0.01, 0.1, 1.0])
def test_fdssm(shape, eps):
    """A second difference of a quadratic is exact, so that every ε gives the limit."""
    assert_mean(FDSSM(quadratic(shape), eps=eps, generator=rng(1)), randn(N, *shape), -math.prod(shape) / 2)


@shapes
@pytest.mark.parametrize("sigma", [0.3, 1.0, 2.0])
def test_dsm(shape, sigma):
    d = math.prod(shape)
    at_truth = DSM(quadratic(shape), sigma=sigma, generator=rng(1))
    assert_mean(at_truth, randn(N, *shape), d / 2 * (sigma**2 + 1 / sigma**2 - 1))
    blurred = quadratic(shape, 1 / math.sqrt(1 + sigma**2))
    least = d / 2 * (1 / sigma**2 - 1 / (1 + sigma**2))
    assert_mean(DSM(blurred, sigma=sigma, generator=rng(1)), randn(N, *shape), least)


@shapes
def test_dsm_has_its_minimum_at_the_blurred_energy_and_not_at_the_negated_one(shape):
    sigma, x = 0.7, randn(N, *shape)

    def value(model):
        with torch.no_grad():
            return DSM(model, sigma=sigma, generator=rng(1))(x).item()

    best = 1 / math.sqrt(1 + sigma**2)
    least = value(quadratic(shape, best))
    assert least < value(quadratic(shape, 0.9 * best))
    assert least < value(quadratic(shape, 1.1 * best))
    assert value(quadratic(shape)) < value(ebf.wrap(Flow(IdentityTransform(), Negated())))


@shapes
def test_dsm_of_a_range_of_sigmas(shape):
    d, low, high = math.prod(shape), 0.5, 2.0
    # log-uniform: E[σ²] = (high² - low²) / (2 log(high/low)), and the same for 1/σ²
    mean = (high**2 - low**2 + low**-2 - high**-2) / (2 * math.log(high / low)) - 1
    assert_mean(DSM(quadratic(shape), sigma_range=(low, high), generator=rng(1)), randn(N, *shape), d / 2 * mean)


def test_a_range_of_sigmas_is_any_pair():
    x = randn(N, 2)
    ranged = DSM(quadratic((2,)), sigma_range=[0.5, 2.0], generator=rng(1))
    assert ranged(x) == DSM(quadratic((2,)), sigma_range=(0.5, 2.0), generator=rng(1))(x)
    assert (ranged.sigma, ranged.sigma_range) == (None, (0.5, 2.0))
    assert DSM(quadratic((2,))).sigma == 1.0


def test_each_sample_has_a_sigma_of_its_own():
    """At 0 the loss is ½·noise²·(σ - 1/σ)², so that equal noise shows σ: by the range of a million it varies."""
    values = DSM(quadratic((400,)), sigma_range=(1e-3, 1e3), generator=rng(1)).losses(torch.zeros(64, 400).double())
    sigma = (2 * values / 400).sqrt()  # about σ + 1/σ
    assert sigma.min() < 30
    assert sigma.max() > 300


@shapes
def test_ml(shape):
    assert_mean(ML(quadratic(shape)), randn(N, *shape), math.prod(shape) / 2 * math.log(2 * math.pi * math.e))


@shapes
def test_ml_counts_the_determinant(shape):
    expected = math.prod(shape) * (0.5 * math.log(2 * math.pi) + 0.5 * 4.0 - math.log(2.0))
    assert_mean(ML(quadratic(shape, 2.0)), randn(N, *shape), expected)


@shapes
def test_sml_is_zero_for_the_right_model(shape):
    assert_mean(SML(quadratic(shape), generator=rng(1)), randn(N, *shape), 0.0)
    expected = math.prod(shape) / 2 * (4.0 - 1.0)  # E[½‖2x‖²] under the data, and under the model
    assert_mean(SML(quadratic(shape, 2.0), generator=rng(1)), randn(N, *shape), expected)


def test_the_gradient_of_sml_is_that_of_ml_in_expectation():
    torch.manual_seed(0)
    flow = Flow(LULinear(3, identity_init=False), StandardNormal([3])).double()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model, x = ebf.wrap(flow), randn(500, 3)
    parameters = list(model.parameters())
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(ML(model)(x), parameters)])
    objective, draws = SML(model, generator=rng(1)), []
    for _ in range(300):
        draws.append(torch.cat([g.flatten() for g in torch.autograd.grad(objective(x), parameters)]))
    drawn = torch.stack(draws)
    error = (drawn.mean(0) - wanted).abs()
    assert (error < 5 * drawn.std(0) / math.sqrt(len(drawn)) + 1e-12).all()
    assert (wanted.abs() > 10 * error).any(), "the gradient is too small to tell anything"


@pytest.mark.parametrize("name", ["sm", "ssm", "fdssm", "dsm"])
def test_the_energy_weight_adds_the_mean_energy(name):
    model, x = quadratic((3,), 1.5), randn(50, 3)
    plain = ebf.make_objective(name, model, generator=rng(1))(x)
    weighted = ebf.make_objective(name, model, generator=rng(1), energy_weight=0.25)(x)
    torch.testing.assert_close(weighted - plain, 0.25 * model.energy(x).mean())
