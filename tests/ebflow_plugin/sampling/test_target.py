"""Importance sampling of a target: its log Z, expectations and chains, against what is known of them."""

import math
from functools import partial

import pytest
import torch
from nflows import distributions, flows, transforms

import ebflow_plugin as ebf
import gaussian_models
from ebflow_nflows import FullLinear
from ebflow_plugin.objectives import ML, ReverseKL
from randomness import randn, rng


def gaussian(scale, mean=(0.0, 0.0)):
    """N(mean, diag(scale²))."""
    weight = torch.diag(1 / torch.tensor(scale, dtype=torch.float64))
    model, _, _ = gaussian_models.gaussian(weight, -weight @ torch.tensor(mean, dtype=torch.float64))
    model.flow.requires_grad_(True)
    return model


def normal(x):
    """A standard normal density times e³."""
    return 3.0 - 0.5 * x.square().sum(1) - 0.5 * x.shape[1] * math.log(2 * math.pi)


def double_well(x):
    """Wells at x = ±1.58, one deeper than the other; y follows x."""
    a, b = x[:, 0], x[:, 1]
    return -(a.square() - 2.5).square() + 0.3 * a - 0.5 * (b - 0.5 * a).square()


def log_z_of_the_double_well():
    grid = torch.linspace(-6, 6, 20_001, dtype=torch.float64)
    values = double_well(torch.stack([grid, 0.5 * grid], 1)).exp()
    return float((values.sum() * (grid[1] - grid[0]) * (2 * torch.pi) ** 0.5).log())


def coverage(model, seeds, n):
    truth, drawn = log_z_of_the_double_well(), []
    for seed in seeds:
        estimate = ebf.importance(model, double_well, n, generator=rng(seed)).log_z
        assert estimate.reliable
        drawn.append(abs(estimate.value - truth) < 2 * estimate.std_error)
    return sum(drawn) / len(drawn)


def test_the_log_z_of_a_double_well_lies_within_its_error():
    """95.4 % of 400 seeds within two errors, up to two binomial errors of 1.05 %."""
    assert 0.933 < coverage(gaussian((1.8, 1.4)), range(400), 1000) < 0.975


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*unreliable")
def test_the_log_z_of_a_double_well_by_a_trained_flow():
    """Reverse KL, then forward KL on weighted samples. Two thousand estimates, each judged by its own error."""
    torch.manual_seed(0)
    spline = transforms.PiecewiseRationalQuadraticCDF([2], num_bins=10, tails="linear", tail_bound=4.0)
    steps = transforms.CompositeTransform([FullLinear(2), spline, FullLinear(2)])
    model = ebf.wrap(flows.Flow(steps, distributions.StandardNormal([2])).double())
    reverse, forward = ReverseKL(model, double_well, 256), ML(model)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(600):
        adam.zero_grad()
        if step < 300:
            loss = reverse()
        else:
            drawn = ebf.importance(model, double_well, 512)
            loss = forward(drawn.samples, weights=drawn.weights)
        loss.backward()
        adam.step()
    found = ebf.importance(model, double_well, 2_000_000, batch_size=50_000, generator=rng())
    assert found.effective_sample_size > 1_800_000
    assert found.metropolis(generator=rng()).acceptance > 0.85
    truth = log_z_of_the_double_well()
    groups = zip(found.samples.split(1000), found.log_weights.split(1000), strict=True)
    parts = [ebf.WeightedSamples(*group).log_z for group in groups]
    covered = [abs(part.value - truth) < 2 * part.std_error for part in parts if part.reliable]
    assert len(covered) > 0.95 * len(parts)
    assert sum(covered) / len(covered) >= 0.95, f"{sum(covered)} of {len(covered)}"


def test_a_model_that_equals_the_target_has_equal_weights():
    found = ebf.importance(gaussian((1.0, 1.0)), normal, 500, generator=rng())
    assert found.log_z.value == pytest.approx(3.0, abs=1e-12)
    assert found.log_z.std_error < 1e-12
    assert found.effective_sample_size == pytest.approx(500)
    assert found.metropolis(generator=rng()).acceptance == 1.0
    assert "WeightedSamples(500, effective 500.0, log Z Estimate(3" in repr(found)


def test_expectations_and_their_errors():
    """z-scores of means and second moments of a normal density, by a wider one."""
    model, scores = gaussian((1.3, 1.5), (0.2, 0.0)), []
    for seed in range(100):
        found = ebf.importance(model, normal, 400, generator=rng(seed))
        for function, exact in ((lambda x: x, torch.zeros(2)), (lambda x: x.square(), torch.ones(2))):
            mean, error = found.expectation(function)
            assert mean.shape == error.shape == (2,)
            scores.append((mean - exact) / error)
    scores = torch.cat(scores)
    assert abs(float(scores.mean())) < 4 / math.sqrt(len(scores))
    assert 0.8 < float(scores.std()) < 1.2


def test_independence_metropolis_samples_the_target():
    found = ebf.importance(gaussian((1.3, 1.5), (0.2, 0.0)), normal, 40_000, generator=rng())
    chain = found.metropolis(generator=rng(1))
    assert chain.samples.shape == (40_000, 2)
    assert 0.5 < chain.acceptance < 0.95
    # The errors are those of some 10,000 independent samples.
    torch.testing.assert_close(chain.samples.mean(0), torch.zeros(2).double(), rtol=0, atol=0.04)
    torch.testing.assert_close(chain.samples.T.cov(), torch.eye(2).double(), rtol=0, atol=0.06)
    moved = (chain.samples[1:] != chain.samples[:-1]).any(1).double().mean()
    assert float(moved) == pytest.approx(chain.acceptance, abs=1e-4)


def test_what_cannot_be_trusted_is_called_unreliable():
    narrow = gaussian((0.3, 0.3))
    found = ebf.importance(narrow, normal, 2000, generator=rng())
    found.weights.sum()  # nothing is judged yet, so that training on the weights does not warn
    with pytest.warns(ebf.EstimateWarning, match=r"effective sample size|heavy tail"):
        assert not found.reliable
    assert not found.reliable
    assert found.pareto_k > 0.7
    assert math.isinf(found.log_z.std_error)
    assert bool(found.expectation(lambda x: x)[1].isinf().all())


def test_samples_of_the_target_show_a_mode_that_the_model_misses():
    """A narrow model in one of two equal wells: its weights look fine, and the other well shows that they are not."""

    def wells(x):
        return torch.logaddexp(normal(x - 6.0), normal(x + 6.0))

    model = gaussian((1.2, 1.2), (6.0, 6.0))
    alone = ebf.importance(model, wells, 2000, generator=rng())
    assert alone.reliable  # which is why reference exists
    assert alone.log_z.value == pytest.approx(3.0, abs=0.1)  # and not 3 + log 2
    reference = randn(2000, 2, seed=3) + torch.where(torch.arange(2000) % 2 == 0, 6.0, -6.0)[:, None]
    judged = ebf.importance(model, wells, 2000, reference=reference, generator=rng())
    with pytest.warns(ebf.EstimateWarning, match="unreliable"):
        assert not judged.reliable
    good = ebf.importance(gaussian((1.2, 1.2)), normal, 2000, reference=randn(2000, 2), generator=rng())
    assert good.reliable


def test_a_target_with_a_smaller_support():
    """A half plane: weights of zero outside of it."""

    def half(x):
        return torch.where(x[:, 0] > 0, normal(x), -math.inf)

    found = ebf.importance(gaussian((1.2, 1.2)), half, 4000, batch_size=300, generator=rng())
    assert abs(found.log_z.value - (3.0 - math.log(2))) < 4 * found.log_z.std_error
    assert bool((found.metropolis(generator=rng()).samples[:, 0] > 0).all())
    assert float(found.expectation(lambda x: x[:, 0].log())[0]) == pytest.approx(-0.6352, abs=0.1)
    with pytest.raises(ebf.InputError, match="misses the target's support"):
        ebf.importance(gaussian((1.0, 1.0)), lambda x: x.sum(1) - math.inf, 10)


def test_bad_targets_are_refused():
    model = gaussian((1.0, 1.0))
    bad = {
        r"log_density is NaN or inf at 20 of 20 samples": lambda x: x.sum(1) * math.nan,
        r"log_density is NaN or inf at 20 of 20 ": lambda x: x.sum(1) + math.inf,
        r"must return shape \(20,\), one value for each sample, got \(20, 2\)": lambda x: x,
        r"must return shape \(20,\), one value for each sample, got ndarray": lambda x: x.sum(1).numpy(),
    }
    for message, function in bad.items():
        with pytest.raises(ebf.InputError, match=message):
            ebf.importance(model, function, 20)
    with pytest.raises(ebf.InputError, match="n must be an integer, at least 2, got 1"):
        ebf.importance(model, normal, 1)
    with pytest.raises(ebf.InputError, match="importance needs an EBFlow"):
        ebf.importance(model.flow, normal, 10)
    whole = ebf.wrap(model.flow, preprocess=[ebf.Dequantize(256)])
    with pytest.raises(ebf.InputError, match="importance needs a model with a density"):
        ebf.importance(whole, normal, 10)


def test_forward_kl_on_weighted_samples_finds_the_target():
    """The bridge: likelihood of the model's own samples, with their weights."""
    torch.manual_seed(0)
    model = gaussian((2.0, 2.0), (1.0, 0.0))
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(150):
        adam.zero_grad()
        drawn = ebf.importance(model, normal, 500, generator=rng(step))
        ML(model)(drawn.samples, weights=drawn.weights).backward()
        adam.step()
    assert ebf.importance(model, normal, 2000, generator=rng()).effective_sample_size > 1950


@pytest.mark.filterwarnings("ignore:.*unreliable")
def test_a_bridge_of_powers_finds_a_well_that_reverse_kl_drops():
    """Wells at ±4, sixteen of their widths apart; from the same start, which is nearer to one."""

    def wells(x):
        return torch.logaddexp(normal(2 * (x - 4.0)) + math.log(0.3), normal(2 * (x + 4.0)) + math.log(0.7))

    def start():
        torch.manual_seed(0)
        spline = transforms.PiecewiseRationalQuadraticCDF([2], num_bins=12, tails="linear", tail_bound=8.0)
        rotation = FullLinear(2)
        with torch.no_grad():
            rotation.weight.copy_(math.sqrt(0.5) * torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
            rotation.bias.fill_(0.5)
        steps = transforms.CompositeTransform([rotation, spline, FullLinear(2)])
        return ebf.wrap(flows.Flow(steps, distributions.StandardNormal([2])).double())

    adam, exact = partial(torch.optim.Adam, lr=2e-2), 3.0 - 2 * math.log(2)
    model = start()
    ebf.fit(ReverseKL(model, wells), steps=150, optimizer=adam, clip_norm=10.0, progress=False)
    dropped = ebf.importance(model, wells, 2000, generator=rng())
    assert bool((dropped.samples[:, 0] < 0).all())
    assert dropped.log_z.value == pytest.approx(exact + math.log(0.7), abs=0.03)  # and no weight shows it
    model = start()
    for power in (0.02, 0.02, 0.1, 0.3, 1.0, 1.0):
        drawn = ebf.importance(model, lambda x, power=power: power * wells(x), 4000, generator=rng())
        data = drawn.samples, None, drawn.weights
        ebf.fit(ML(model), data, steps=60, batch_size=256, optimizer=adam, progress=False)
    found = ebf.importance(model, wells, 4000, generator=rng())
    share, error = found.expectation(lambda x: (x[:, 0] > 0).double())
    assert abs(float(share) - 0.3) < 4 * float(error) < 0.1
    assert abs(found.log_z.value - exact) < 4 * found.log_z.std_error < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_perfect_model_is_reliable(dtype):
    """Its weights differ by rounding alone, and a tail fitted to rounding errors can be of any shape."""
    for seed in range(60):
        torch.manual_seed(seed)
        model = ebf.wrap(flows.Flow(transforms.LULinear(3), distributions.StandardNormal([3])).to(dtype))
        with torch.no_grad():
            weight, bias = model.flow._transform.weight().double(), model.flow._transform.bias.double()

        def target(x, weight=weight, bias=bias):
            return (-0.5 * (x.double() @ weight.T + bias).square().sum(1)).to(x.dtype)

        found = ebf.importance(model, target, 1000, generator=rng(seed))
        assert found.reliable, seed
