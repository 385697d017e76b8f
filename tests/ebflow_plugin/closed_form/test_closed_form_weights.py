"""Weighted rows in moments, calibrations and starts: against duplicated rows, and what is refused."""

import copy

import pytest
import torch
from nflows import distributions, flows, transforms

import ebflow_plugin as ebf
from ebflow_nflows import FullConv2d, FullLinear, SinhArcsinh
from ebflow_plugin.closed_form.moments import Moments
from ebflow_plugin.objectives import ML
from randomness import randn, rng

ROWS = 600
COUNTS = torch.randint(0, 4, (ROWS,), generator=rng(7))


def model_of(*layers):
    torch.manual_seed(0)
    steps = layers or (FullLinear(3), SinhArcsinh(3), FullLinear(3))
    return ebf.wrap(flows.Flow(transforms.CompositeTransform(list(steps)), distributions.DiagonalNormal([3])).double())


def rows():
    return randn(ROWS, 3).sinh() @ randn(3, 3, seed=1) + 2.0


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_weighted_moments_are_those_of_duplicated_rows(diagonal, scale):
    x, weighted, repeated = rows(), Moments(diagonal), Moments(diagonal)
    for part, counts in zip(x.split(170), COUNTS.split(170), strict=True):
        weighted.add(part, scale * counts)
        repeated.add(part.repeat_interleave(counts, 0))
    torch.testing.assert_close(weighted.mean, repeated.mean)
    torch.testing.assert_close(weighted.covariance(unbiased=False), repeated.covariance(unbiased=False))
    assert weighted.count == pytest.approx(float(COUNTS.sum()) ** 2 / float(COUNTS.square().sum()))
    merged, other = Moments(diagonal), Moments(diagonal)
    merged.add(x[:100], scale * COUNTS[:100])
    other.add(x[100:], scale * COUNTS[100:])
    merged.merge(other)
    torch.testing.assert_close(merged.covariance(), weighted.covariance())


def broken(x):
    """The same rows, with NaN where the weight is zero."""
    return torch.where((COUNTS == 0)[:, None], torch.nan, x)


FORMS = {
    "whole": lambda x, w: (x, None, w),
    "batches": lambda x, w: [(a, None, b) for a, b in zip(x.split(97), w.split(97), strict=True)],
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@forms
@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_a_calibration_counts_the_weights(form, kind):
    x, model = rows(), model_of()
    twin = copy.deepcopy(model)
    model.calibrate(form(broken(x), 1e-3 * COUNTS), kind)
    twin.calibrate(x.repeat_interleave(COUNTS, 0)[torch.randperm(int(COUNTS.sum()), generator=rng())], kind)
    # The shrinkage is chosen by other held-out rows; the mean is that of all of them.
    torch.testing.assert_close(model.calibration.mean, twin.calibration.mean)
    close = {"rtol": 0.05, "atol": 0.02} if kind == "full" else {}
    torch.testing.assert_close(model.calibration.to_base, twin.calibration.to_base, **close)


@forms
def test_a_whitening_start_counts_the_weights(form):
    x, model = rows(), model_of(FullLinear(3))
    model.initialize(form(broken(x), 0.1 * COUNTS), whiten=True)
    latents = model.core.encode(x.repeat_interleave(COUNTS, 0))[0][0]
    torch.testing.assert_close(latents.mean(0), torch.zeros(3).double(), atol=1e-9, rtol=0)
    torch.testing.assert_close(latents.T.cov(), torch.eye(3).double(), atol=5e-3, rtol=0)


def test_a_whitening_start_of_a_convolution_counts_the_weights():
    x = randn(200, 2, 4, 4).cumsum(1) + 1.0
    counts = COUNTS[:200]
    steps = [FullConv2d(2, kernel_size=3)]
    model = ebf.wrap(flows.Flow(transforms.CompositeTransform(steps), distributions.StandardNormal([2, 4, 4])).double())
    model.initialize((x, None, counts), whiten=True)
    latents = model.core.encode(x.repeat_interleave(counts, 0))[0][0].movedim(1, -1).reshape(-1, 2)
    torch.testing.assert_close(latents.mean(0), torch.zeros(2).double(), atol=1e-9, rtol=0)


@forms
def test_a_gaussianising_start_counts_the_weights(form):
    """Of a mixture whose second part has no weight: the start is that of the first part alone."""
    first = rows()
    x = torch.stack([first, first.flip(0) * 3 - 20], 1).flatten(0, 1)
    weights = torch.tensor([0.5, 0.0]).double().repeat(ROWS)
    model, alone = model_of(), model_of()
    report, expected = model.initialize(form(x, weights), gaussianize=True), alone.initialize(first, gaussianize=True)
    assert report.nll == pytest.approx(expected.nll, abs=1e-9)
    torch.testing.assert_close(model.log_prob(first), alone.log_prob(first))


def test_a_gaussianising_start_is_judged_by_weighted_rows():
    x = torch.cat([rows(), randn(ROWS, 3, seed=5)])[torch.randperm(2 * ROWS, generator=rng(2))]
    weights = (x[:, 0] - x[:, 0].min() + 0.1).double()
    model = model_of()
    report = model.initialize((x, None, weights), gaussianize=True)
    held = torch.arange(len(x)) % 5 == 4
    value = -(weights[held] * model.log_prob(x[held]).detach()).sum() / weights[held].sum()
    assert report.nll == pytest.approx(float(value), abs=0.1)  # the last whitening was fitted to all rows since then


def test_an_actnorm_counts_the_weights():
    x = rows()
    model, twin = (model_of(transforms.ActNorm(3)) for _ in range(2))
    model.initialize(broken(x), weights=COUNTS)
    twin.initialize(x.repeat_interleave(COUNTS, 0))
    for name, value in twin.flow.state_dict().items():
        torch.testing.assert_close(model.flow.state_dict()[name], value, rtol=0.02, atol=0.02)


def test_bad_weights_are_refused():
    x, model = rows(), model_of()
    bad = COUNTS.double()
    bad[5] = -1.0
    bad[6] = torch.nan
    for call in (
        lambda w: model.calibrate((x, None, w)),
        lambda w: model.initialize((x, None, w), whiten=True),
        lambda w: model.initialize((x, None, w), gaussianize=True),
        lambda w: model.initialize(x, weights=w),
        lambda w: ebf.fit(ML(model), (x, None, w), steps=1),
    ):
        with pytest.raises(ebf.InputError, match=r"at least 0, finite, and not all 0, got 2 of \d+ that are not"):
            call(bad)
        with pytest.raises(ebf.InputError, match=r"have 600 and 5 rows|one for each row of x, got \(5,\)"):
            call(torch.ones(5))
    with pytest.raises(ebf.InputError, match="no row of a weight above 0"):
        model.calibrate((x, None, torch.zeros(ROWS)))
    with pytest.raises(ebf.InputError, match="cannot weight them"):
        ebf.coverage(model, (x, None, COUNTS))
