"""coverage(): a planted far mode and missing data are seen, a good model is let alone."""

import math
import warnings

import normflows as nf
import pytest
import torch
from nflows import distributions, flows, transforms

import ebflow_plugin as ebf
from ebflow_plugin.covering import _nearest
from nflows_small import coupling_model
from randomness import randn, rng

SEEDS = [pytest.param(range(5), id="5 seeds"), pytest.param(range(5, 50), id="the other 45", marks=pytest.mark.slow)]


def mixture(places, weights):
    """Gaussians of the plane, as a model and as data."""
    base = nf.distributions.GaussianMixture(len(places), 2, loc=places, weights=weights, trainable=False)
    return ebf.wrap(nf.NormalizingFlow(base, [nf.flows.AffineConstFlow((2,))]))


def rows_of(model, seed, n=2000):
    return model.sample(n, generator=rng(1000 + seed))


def report(model, data, seed):
    """The report, and whether it warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ebf.CoverageWarning)
        found = ebf.coverage(model, data, generator=rng(seed))
    return found, [str(each.message) for each in caught]


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_planted_far_mode_warns(seeds):
    model, truth = mixture([[0.0, 0.0], [60.0, 60.0]], [0.7, 0.3]), mixture([[0.0, 0.0]], [1.0])
    for seed in seeds:
        found, (message,) = report(model, rows_of(truth, seed), seed)
        assert not found
        assert abs(found.outside - 0.3) < 0.08  # five standard errors, and the one in a hundred
        assert "train with noise that shrinks" in found.advice
        assert f"{found.outside:.0%} of the model's samples are far from the data" in message


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_good_model_does_not_warn(seeds):
    model = mixture([[0.0, 0.0], [6.0, 6.0]], [0.5, 0.5])
    for seed in seeds:
        found, messages = report(model, rows_of(model, seed), seed)
        assert found, seed
        assert not messages
        assert max(found.outside, found.missed) < 0.04
        assert abs(found.latent_distance) < 0.05
        assert found.advice.startswith("nothing to do")


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_good_curved_model_does_not_warn(seeds):
    """Data from the model itself, whose density is far from a Gaussian."""
    model = coupling_model().double().eval()
    for seed in seeds:
        assert not report(model, rows_of(model, seed), seed)[1], seed


@pytest.mark.parametrize("seeds", SEEDS)
def test_data_where_the_model_has_no_mass_warn(seeds):
    truth, model = mixture([[0.0, 0.0], [9.0, 9.0]], [0.6, 0.4]), mixture([[0.0, 0.0]], [1.0])
    for seed in seeds:
        found, (_,) = report(model, rows_of(truth, seed), seed)
        assert abs(found.missed - 0.4) < 0.08
        assert found.outside < 0.04
        assert found.latent_distance > 1
        assert "add LatentMatch(model)" in found.advice


def test_nearest_neighbours():
    points, reference = randn(7, 3, seed=1), randn(5, 3, seed=2)
    expected = torch.stack([min((point - other).norm() for other in reference) for point in points])
    torch.testing.assert_close(_nearest(points, reference), expected)
    points[3, 1], points[5, 0] = math.nan, math.inf
    assert _nearest(points, reference).isinf().nonzero().flatten().tolist() == [3, 5]
    assert _nearest(points, points[3:4]).isinf().all()


def test_the_same_seed_gives_the_same_report_that_prints_as_text():
    model = mixture([[0.0, 0.0]], [1.0])
    data = rows_of(model, 0, 300)
    first, second = (ebf.coverage(model, data, rows=100, generator=rng(3)) for _ in range(2))
    assert first == second
    assert first.rows == 100
    lines = str(first).splitlines()
    assert len(lines) == 4
    assert lines[-1] == first.advice
    assert f"{first.outside:.3f}" in lines[0]


def test_a_context_has_a_sample_for_each_row():
    flow = flows.Flow(
        transforms.IdentityTransform(), distributions.ConditionalDiagonalNormal([2], torch.nn.Linear(3, 4))
    )
    model, context = ebf.wrap(flow.double()), randn(400, 3)
    x = model.sample(1, context, generator=rng(0)).squeeze(1)
    assert report(model, (x, context), 1)[0]


def test_images_are_compared_after_their_preprocessing():
    flow = flows.Flow(transforms.LULinear(4), distributions.StandardNormal([4]))
    model = ebf.wrap(flow, preprocess=[ebf.Dequantize(256), ebf.Rescale(0.05, 0.95), ebf.Logit()])
    assert report(model, model.sample(400, generator=rng(0)), 1)[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [(torch.zeros(39, 2), "at least 40 rows, got 39"), (torch.full((50, 2), math.nan), "holds 100 NaN or inf")],
)
def test_refusals(data, message):
    with pytest.raises(ebf.InputError, match=message):
        ebf.coverage(mixture([[0.0, 0.0]], [1.0]), data)
