"""The data of a start and of a calibration: where they are, in which mode they are read, what their weights count."""

import copy

import normflows
import pytest
import torch
from nflows import distributions, flows, transforms

import ebflow_nflows
import ebflow_normflows
import ebflow_plugin as ebf
import ebflow_zuko
from chains import flow_in
from ebflow_nflows import FullConv2d, FullLinear, SinhArcsinh
from ebflow_plugin.closed_form.moments import Moments, batches
from ebflow_plugin.objectives import ML
from gaussian_models import nll
from randomness import randn, rng

D = 3


def skewed(n=300):
    return torch.randn(n, D, dtype=torch.float64, generator=rng()).exp() + 1.0


def model_in(library, before=(), between=(), after=()):
    layers = [*before, library.FullLinear(D), library.SinhArcsinh(D), *between, library.FullLinear(D), *after]
    return ebf.wrap(flow_in(library, layers, [D]))


def nflows_model(context=None):
    conditional = transforms.MaskedAffineAutoregressiveTransform(D, 8, context_features=2)
    return model_in(ebflow_nflows, [transforms.ActNorm(D)], after=[] if context is None else [conditional])


MAKES = {
    "nflows": nflows_model,
    "normflows": lambda: model_in(ebflow_normflows, between=[normflows.flows.ActNorm((D,))]),
    "zuko": lambda: model_in(ebflow_zuko),
}
CALLS = {
    "initialize": lambda model, data: model.initialize(*(data if isinstance(data, tuple) else (data,))),
    "whiten": lambda model, data: model.initialize(data, whiten=True),
    "gaussianize": lambda model, data: model.initialize(data, gaussianize=True),
    "calibrate": lambda model, data: model.calibrate(data),
    "diagonal": lambda model, data: model.calibrate(data, "diagonal"),
}


def test_a_flow_without_storage_takes_batches_of_the_cpu():
    x, *_ = next(batches([torch.zeros(2, D)], lambda x, _: (x, None), torch.device("meta")))
    assert x.is_meta
    nflows_model().to("meta").initialize(skewed(5))


# Modes


@pytest.mark.parametrize("made", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_each_call_works_in_each_mode(make, call, mode, made):
    x = skewed()
    expected = make()
    CALLS[call](expected, x)
    with made():
        model = make()
    with mode():
        CALLS[call](model, x.clone())
    assert nll(model, x) == pytest.approx(nll(expected, x), abs=1e-9)
    if made is torch.enable_grad:  # and what it wrote can be trained
        ebf.objectives.ML(model)(x).backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("first", [True, False])
def test_processes_without_rows_have_nothing_to_merge(first, monkeypatch):
    rows = skewed(20)
    one, other = Moments(), Moments()
    one.add(rows)

    def gather(every, mine):
        every[:] = [(0, 0, other.mean, other.scatter), mine][:: 1 if first else -1]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    one.reduce()
    assert one.count == 20
    torch.testing.assert_close(one.covariance(), torch.cov(rows.T))


# Weighted rows in moments, calibrations and starts: against duplicated rows, and what is refused


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
