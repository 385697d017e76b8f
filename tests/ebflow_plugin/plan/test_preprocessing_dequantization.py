"""Noise that makes integers continuous: uniform, or smooth inside of each level, and the bound that either leaves."""

import copy
import math
import pickle

import pytest
import torch
from nflows import distributions, flows, transforms
from torch.distributions import Normal

import ebflow_plugin as ebf
from ebflow_plugin.objectives import ML
from matched import log_prob as core_log_prob
from randomness import rng

D = 3
LEVELS = 8


def model_of(noise, levels=LEVELS, shape=(D,)):
    torch.manual_seed(0)
    flow = flows.Flow(transforms.LULinear(shape[-1]), distributions.StandardNormal(shape)).double()
    steps = [ebf.Dequantize(levels, noise=noise), ebf.Rescale(0.05, 0.95), ebf.Logit()]
    return ebf.wrap(flow, preprocess=steps)


def integers(rows=6, levels=LEVELS):
    return torch.randint(levels, (rows, D), generator=rng(1))


def log_density(u):
    """The density of a logit-normal number, from torch's own distributions."""
    base = torch.distributions.TransformedDistribution(
        Normal(torch.zeros((), dtype=u.dtype), 1.0), [torch.distributions.SigmoidTransform()]
    )
    return base.log_prob(u)


def test_uniform_noise_is_what_it_was_bit_for_bit():
    model, x = model_of("uniform"), integers()
    u, log_det = model.preprocess(x, rng(3))
    noise = torch.rand(6, D, dtype=torch.float64, generator=rng(3))
    squeezed = (x + noise) / LEVELS * model.preprocessing[1].scale + model.preprocessing[1].shift
    assert torch.equal(u, torch.log(squeezed) - torch.log1p(-squeezed))
    expected = -(torch.log(squeezed) + torch.log1p(-squeezed)).sum(1)
    constants = D * (math.log(0.9) - math.log(LEVELS))
    assert torch.allclose(log_det, expected + constants, rtol=0, atol=1e-12)


def test_smooth_noise_is_counted():
    model, x = model_of("smooth"), integers()
    u, log_det = model.preprocess(x, rng(3))
    unit = (torch.sigmoid(u) - 0.05) / 0.9
    noise = unit * LEVELS - x
    assert ((noise > 0) & (noise < 1)).all()
    jacobian = (math.log(0.9 / LEVELS) - torch.nn.functional.logsigmoid(u) - torch.nn.functional.logsigmoid(-u)).sum(1)
    assert torch.allclose(log_det, jacobian - log_density(noise).sum(1))


@pytest.mark.parametrize("noise", ["uniform", "smooth"])
def test_its_volume_is_part_of_the_energy(noise):
    model, x = model_of(noise), integers()
    plain = ebf.wrap(model.flow, preprocess=list(model.preprocessing[1:]))
    v, log_volume = model.dequantize.dequantize(x.double(), rng(5))
    torch.testing.assert_close(model.energy(x, generator=rng(5)), plain.energy(v) - log_volume)
    assert model.log_z((D,)) == plain.log_z((D,))
    assert torch.equal(model.dequantize.quantize(v), x.double())
    assert plain.dequantize is None


@pytest.mark.parametrize("noise", ["uniform", "smooth"])
def test_one_density_in_every_call(noise):
    model, x = model_of(noise), integers()
    log_prob = model.log_prob(x, generator=rng(5))
    assert torch.allclose(log_prob, -model.energy(x, generator=rng(5)) - model.log_z((D,)))
    u, log_det = model.preprocess(x, rng(5))
    assert torch.allclose(log_prob, core_log_prob(model.core, u) + log_det)
    assert torch.equal(log_prob, model.log_prob(x, generator=rng(5)))
    assert not torch.equal(log_prob, model.log_prob(x, generator=rng(6)))
    assert torch.allclose(ML(model, generator=rng(5))(x), -log_prob.mean())


def one_dimensional(noise, mean=0.3, std=1.2):
    """A model of one pixel whose probabilities are known: the logit of v is Gaussian."""
    shift, scale = (torch.tensor(value, dtype=torch.float64) for value in (-mean / std, 1 / std))
    flow = flows.Flow(transforms.PointwiseAffineTransform(shift, scale), distributions.StandardNormal([1]))
    return ebf.wrap(flow, preprocess=[ebf.Dequantize(4, noise=noise), ebf.Rescale(1e-6, 1 - 1e-6), ebf.Logit()])


def test_the_bound_by_quadrature():
    """E_u[log p(v) - log 4 - log q(u)] for each of four levels, by quadrature over u and by the mean of many draws.

    And below the log-probability of the level, the integral of the same density: Jensen.
    """
    mean, std = 0.3, 1.2
    grid = torch.linspace(-9.0, 9.0, 20_001, dtype=torch.float64)  # of t, u = sigmoid(t)
    weight = Normal(0.0, 1.0).log_prob(grid).exp()
    u = torch.sigmoid(grid)
    model = one_dimensional("smooth", mean, std)
    x = torch.arange(4).repeat_interleave(40_000)[:, None]
    drawn = model.log_prob(x, generator=rng(0)).reshape(4, -1)
    for level in range(4):
        squeezed = 1e-6 + (1 - 2e-6) * (level + u) / 4
        logit = torch.logit(squeezed)
        log_p = Normal(mean, std).log_prob(logit) - squeezed.log() - (-squeezed).log1p() + math.log((1 - 2e-6) / 4)
        bound = torch.trapezoid(weight * (log_p - log_density(u)), grid)
        error = drawn[level].std() / math.sqrt(drawn.shape[1])
        assert abs(drawn[level].mean() - bound) < 4 * error
        edges = torch.logit(1e-6 + (1 - 2e-6) * torch.tensor([level, level + 1], dtype=torch.float64) / 4)
        low, high = Normal(mean, std).cdf(edges)
        assert bound < (high - low).log()


def test_the_density_has_no_jumps_left():
    """Near the ends of a level the noise has next to no weight; uniform noise has all of it."""
    x = torch.zeros(200_000, 1)
    for noise, share in (("uniform", 0.02), ("smooth", 0.0)):
        model = ebf.wrap(
            flows.Flow(transforms.IdentityTransform(), distributions.StandardNormal([1])),
            preprocess=[ebf.Dequantize(4, noise=noise)],
        )
        u = model.preprocess(x, rng(0))[0] * 4
        found = float(((u < 0.01) | (u > 0.99)).float().mean())
        assert abs(found - share) < 0.002


def test_integration_by_parts_holds_on_smooth_data_alone():
    """E[s·(log q)' + s'] = 0 for the score s = -v of a model, over what the noise makes of one level: SSM rests on it.

    Inside of a level (log q)' is zero for uniform noise, so that s' = -1 is left over.
    """
    rows, found = 400_000, {}
    for noise in ("uniform", "smooth"):
        flow = flows.Flow(transforms.IdentityTransform(), distributions.StandardNormal([1])).double()
        model = ebf.wrap(flow, preprocess=[ebf.Dequantize(4, noise=noise)])
        v = model.preprocess(torch.zeros(rows, 1), rng(0))[0].requires_grad_()
        log_q = log_density(v * 4).sum() if noise == "smooth" else 0 * v.sum()
        (slope,) = torch.autograd.grad(log_q, v)
        terms = (model.core.score(v.detach()) * slope - 1.0).detach()
        found[noise] = float(terms.mean()), float(terms.std()) / math.sqrt(rows)
    assert found["uniform"] == (-1.0, 0.0)
    mean, error = found["smooth"]
    assert abs(mean) < 4 * error < 0.05


def test_images_integers_and_single_precision():
    torch.manual_seed(0)
    flow = flows.Flow(transforms.IdentityTransform(), distributions.StandardNormal([1, 4, 4]))
    model = ebf.wrap(flow, preprocess=[ebf.Dequantize(256, noise="smooth"), ebf.Rescale(1e-6, 1 - 1e-6), ebf.Logit()])
    x = torch.full((2000, 1, 4, 4), 255)
    x[::2] = 0
    u, log_det = model.preprocess(x.float())
    assert u.isfinite().all()
    assert log_det.isfinite().all()
    assert torch.equal(model.to_data(u), x.float())


def test_samples_do_not_depend_on_the_noise():
    x = [model_of(noise).sample(50, generator=rng(2)) for noise in ("uniform", "smooth")]
    assert torch.equal(*x)


@pytest.mark.parametrize("noise", ["uniform", "smooth"])
def test_it_says_what_it_is(noise):
    model = model_of(noise)
    ending = {"uniform": ")", "smooth": ", noise='smooth')"}[noise]
    assert repr(model.preprocessing[0]) == f"Dequantize(levels={LEVELS}{ending}"
    assert ("smooth noise" in str(model.report)) is (noise == "smooth")
    assert model.report.rows[0].linearity == "linear"
    assert not model.preprocessing[0].state_dict()


def test_a_change_of_the_noise_is_seen_and_copied():
    model, x = model_of("uniform"), integers()
    before = model.log_prob(x, generator=rng(0))
    model.preprocessing[0].noise = "smooth"
    after = model.log_prob(x, generator=rng(0))
    assert not torch.allclose(before, after)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied.log_prob(x, generator=rng(0)), after)
    with pytest.raises(ebf.InputError, match="unknown noise 'gaussian'. Valid names: smooth, uniform"):
        ebf.Dequantize(4, noise="gaussian")
