"""Divergences from a density that is known, in closed form."""

import pytest
import torch
from nflows import distributions, flows

import ebflow_nflows
import ebflow_plugin as ebf
from ebflow_examples.divergences import fisher_divergence, kl_divergence
from randomness import rng

D = 3
WIDE = torch.float64


def make_model():
    """N(m, C), by a linear flow."""
    generator = rng(1)
    layer = ebflow_nflows.FullLinear(D, dtype=WIDE)
    with torch.no_grad():
        layer.weight += 0.3 * torch.randn(D, D, generator=generator, dtype=WIDE)
        layer.bias.normal_(generator=generator)
    layer.requires_grad_(False)
    inverse = torch.linalg.inv(layer.weight)
    model = ebf.wrap(flows.Flow(layer, distributions.StandardNormal([D])))
    return model, torch.distributions.MultivariateNormal(-inverse @ layer.bias, inverse @ inverse.mT)


TRUTH = torch.distributions.MultivariateNormal(
    torch.tensor([0.5, -0.5, 1.0], dtype=WIDE), torch.eye(D, dtype=WIDE) * 0.7
)


def draw(n, number=0):
    noise = torch.randn(n, D, generator=rng(number), dtype=WIDE)
    return TRUTH.mean + 0.7**0.5 * noise


def true_score(x):
    return -(x - TRUTH.mean) / 0.7


def exact_fisher(q):
    precision = torch.linalg.inv(q.covariance_matrix)
    slope = precision - torch.eye(D, dtype=WIDE) / 0.7  # the difference of two linear scores, at x - mean
    offset = precision @ (TRUTH.mean - q.mean)
    return 0.5 * float(0.7 * slope.square().sum() + offset.square().sum())


def test_the_fisher_divergence_of_gaussians():
    model, q = make_model()
    x = draw(20_000)
    found = fisher_divergence(model, x, true_score(x))
    assert abs(float(found) - exact_fisher(q)) < 4 * found.std_error < 0.1 * exact_fisher(q)
    assert float(fisher_divergence(model, x, true_score(x), batch_size=999)) == pytest.approx(found.value)
    assert float(fisher_divergence(model, x, model.score(x).detach())) == 0.0


def test_the_kl_divergence_of_gaussians():
    model, q = make_model()
    x = draw(20_000)
    exact = float(torch.distributions.kl_divergence(TRUTH, q))
    found = kl_divergence(model, x, TRUTH.log_prob(x))
    assert abs(float(found) - exact) < 4 * found.std_error < 0.1 * exact
    assert float(kl_divergence(model, x, TRUTH.log_prob(x), batch_size=999)) == pytest.approx(found.value)


def test_error_bars_are_honest():
    model, q = make_model()
    exact = float(torch.distributions.kl_divergence(TRUTH, q)), exact_fisher(q)
    scores = []
    for number in range(100):
        x = draw(200, number)
        runs = kl_divergence(model, x, TRUTH.log_prob(x)), fisher_divergence(model, x, true_score(x))
        scores.append([(float(run) - truth) / run.std_error for run, truth in zip(runs, exact, strict=True)])
    scores = torch.tensor(scores)
    assert bool((scores.mean(0).abs() < 0.4).all())
    assert bool(((scores.var(0) > 0.6) & (scores.var(0) < 1.7)).all())


@pytest.mark.parametrize("function", [fisher_divergence, kl_divergence])
def test_errors(function):
    model, _ = make_model()
    x = draw(5)
    with pytest.raises(ValueError, match=r"must have shape \(5"):
        function(model, x, torch.zeros(4, dtype=WIDE))
