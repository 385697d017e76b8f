"""Imputation of missing entries, chains in the units of a covariance, and denoising."""

import inspect
import math

import numpy as np
import pytest
import torch
from nflows import distributions, flows, transforms

import ebflow_plugin as ebf
from ebflow_plugin.sampling.langevin import denoise, impute, langevin
from gaussian_models import WIDE, assert_moments, gaussian, make_gaussian
from randomness import randn, rng


def assert_conditional(filled, mask, x, mean, covariance):
    """Mean and covariance of the missing entries of each row are those of a Gaussian, given the observed ones."""
    assert filled.shape == (2, 1500, 4)
    for row, (value, missing) in enumerate(zip(x, mask, strict=True)):
        observed = ~missing
        assert torch.equal(filled[row][:, observed], value[observed].expand(1500, -1))  # bit by bit
        cross = covariance[missing][:, observed] @ torch.linalg.inv(covariance[observed][:, observed])
        centre = mean[missing] + cross @ (value[observed] - mean[observed])
        spread = covariance[missing][:, missing] - cross @ covariance[observed][:, missing]
        assert_moments(filled[row][:, missing], centre, spread.reshape(len(centre), -1), 1000)


@pytest.mark.parametrize("preprocess", [(), (ebf.Rescale(-3.0, 5.0),)])
def test_imputation_has_the_exact_conditional(preprocess):
    model, mean, covariance = make_gaussian(4)
    if preprocess:
        model = ebf.wrap(model.flow, preprocess=preprocess, match_after=0)
        scale, shift = preprocess[0].scale, preprocess[0].shift
        mean, covariance = (mean - shift) / scale, covariance / scale**2
    x = mean + torch.randn(2, 4, generator=rng(1), dtype=WIDE) @ torch.linalg.cholesky(covariance).mT
    mask = torch.tensor([[True, False, True, False], [False, True, True, True]])
    filled = impute(model, x, mask, steps=300, step_size=0.02, burn_in=200, chains=1500, generator=rng())
    assert_conditional(filled, mask, x, mean, covariance)


def ill_scaled():
    """A Gaussian whose widest direction is a thousand times its narrowest."""
    turn = torch.linalg.qr(torch.randn(4, 4, generator=rng(3), dtype=WIDE)).Q
    weight = torch.tensor([100.0, 10.0, 1.0, 0.1], dtype=WIDE)[:, None] * turn
    return gaussian(weight, torch.randn(4, generator=rng(4), dtype=WIDE))


def test_a_covariance_makes_ill_scaled_chains_fast_and_keeps_the_limit():
    model, mean, covariance = ill_scaled()
    x = mean + torch.randn(2, 4, generator=rng(1), dtype=WIDE) @ torch.linalg.cholesky(covariance).mT
    mask = torch.tensor([[True, False, True, False], [False, True, True, True]])
    options = {"steps": 60, "burn_in": 40, "step_size": 0.5, "chains": 1500, "generator": rng()}
    filled = impute(model, x, mask, **options, covariance=covariance, init=torch.zeros_like(x))
    assert_conditional(filled, mask, x, mean, covariance)


def test_chains_without_a_covariance_do_not_get_there():
    model, mean, covariance = ill_scaled()
    start, options = mean.expand(1000, 4), {"steps": 60, "burn_in": 40, "step_size": 0.5}
    found = langevin(model, start, **options, generator=rng())
    assert float(found.samples.var(0).sum()) < 0.1 * float(covariance.trace())
    found = langevin(model, start, **options, covariance=covariance, generator=rng())
    assert_moments(found.samples, mean, covariance, 500)


def test_a_wrong_covariance_keeps_the_limit_of_adjusted_chains():
    model, mean, covariance = make_gaussian()
    wrong = torch.tensor([[2.0, 0.5, 0.0], [0.5, 0.4, 0.0], [0.0, 0.0, 1.0]], dtype=WIDE)
    start = mean.expand(2000, 3)
    found = langevin(model, start, 300, 0.2, burn_in=100, covariance=wrong, generator=rng())
    assert_moments(found.samples, mean, covariance, 1000)
    assert 0.3 < float(found.acceptance.mean()) < 0.9


def test_observed_entries_survive_preprocessing_bit_by_bit():
    model, _, _ = make_gaussian(3, preprocess=[ebf.Rescale(0.05, 0.95), ebf.Logit()])
    x = torch.rand(5, 3, generator=rng(), dtype=WIDE)
    mask = torch.tensor([True, False, False]).expand(5, 3)
    for space in ("data", "matched"):
        filled = impute(model, x, mask, steps=20, step_size=0.01, space=space, chains=2, generator=rng())
        assert torch.equal(filled[..., 1:], x[:, None, 1:].expand(5, 2, 2))
        assert not torch.equal(filled[..., 0], x[:, None, 0].expand(5, 2))
        assert bool((filled[:, 0, 0] != filled[:, 1, 0]).any())


def test_whole_numbers_can_be_imputed():
    model, _, _ = make_gaussian(3, preprocess=[ebf.Dequantize(16), ebf.Rescale(0.05, 0.95), ebf.Logit()])
    x = torch.randint(16, (6, 3), generator=rng())
    mask = torch.tensor([True, False, False]).expand(6, 3)
    filled = impute(model, x, mask, steps=50, step_size=0.2, chains=20, generator=rng())
    assert torch.equal(filled[..., 1:], x[:, None, 1:].expand(6, 20, 2).to(WIDE))
    assert torch.equal(filled, filled.round().clamp(0, 15))
    assert float(filled[..., 0].std(1).min()) > 0


def test_missing_entries_can_start_elsewhere():
    model, _, _ = make_gaussian()
    x = torch.tensor([[math.nan, 1.0, 2.0]], dtype=WIDE)
    mask = torch.isnan(x)
    with pytest.raises(ebf.InputError, match="pass finite values as init="):
        impute(model, x, mask, steps=1, step_size=0.1)
    filled = impute(model, x, mask, steps=0, step_size=0.1, init=torch.full_like(x, 7.0))
    assert filled.tolist() == [[[7.0, 1.0, 2.0]]]
    same = impute(model, filled[:, 0], torch.zeros_like(mask), steps=3, step_size=0.1)
    assert torch.equal(same, filled)  # nothing is missing


def test_preprocessing_that_mixes_entries_is_refused():
    layer = transforms.ReversePermutation(3)
    flow = flows.Flow(transforms.CompositeTransform([layer, transforms.LULinear(3)]), distributions.StandardNormal([3]))
    model = ebf.wrap(flow, match_after=0)
    x, mask = torch.zeros(2, 3), torch.tensor([True, False, False]).expand(2, 3)
    with pytest.raises(ebf.InputError, match="mixes entries"):
        impute(model, x, mask, steps=1, step_size=0.1)
    filled = impute(model, x, mask, steps=3, step_size=0.1, space="data")
    assert torch.equal(filled[..., 1:], torch.zeros(2, 1, 2))


IMPUTE_ERRORS = [
    ({"mask": torch.zeros(2, 3)}, "mask must be a tensor of bool, True where an entry is missing, got torch.float32"),
    ({"mask": [True]}, "mask must be a tensor of bool.*got list"),
    ({"mask": torch.zeros(2, dtype=torch.bool)}, r"mask must have the shape of x, \(2, 3\), .* got \(2,\)"),
    ({"chains": 0}, "chains must be"),
    ({"step_size": -1.0}, "step_size must be"),
    ({"init": torch.zeros(1, 3, dtype=WIDE)}, "init must have the shape of x"),
    ({"x": torch.full((2, 3), math.inf, dtype=WIDE)}, "x holds 6 NaN or inf"),
]


@pytest.mark.parametrize(("options", "message"), IMPUTE_ERRORS)
def test_errors_of_impute(options, message):
    model, _, _ = make_gaussian()
    x = torch.zeros(2, 3, dtype=WIDE)
    options = {"x": x, "mask": torch.zeros(2, 3, dtype=torch.bool), "steps": 1, "step_size": 0.1, **options}
    with pytest.raises(ebf.InputError, match=message):
        impute(model, **options)


def test_imputation_with_a_context():
    base = distributions.ConditionalDiagonalNormal([2])
    model = ebf.wrap(flows.Flow(transforms.IdentityTransform(), base))
    context = torch.tensor([[5.0, 5.0, -2.0, -2.0], [-5.0, -5.0, -2.0, -2.0]])
    x, mask = torch.zeros(2, 2), torch.tensor([[True, False]]).expand(2, 2)
    filled = impute(model, x, mask, steps=200, step_size=0.01, burn_in=100, chains=50, context=context, generator=rng())
    assert torch.allclose(filled[..., 0].mean(1), torch.tensor([5.0, -5.0]), atol=0.2)


@pytest.mark.parametrize("sigma", [0.5, torch.tensor([0.5, 1.0, 2.0], dtype=WIDE)])
def test_denoising_gives_the_posterior_mean(sigma):
    """Of N(m, C) + σ·noise, whose own density is N(m, C + σ²): its posterior mean is linear."""
    model, mean, covariance = make_gaussian()
    x = torch.randn(3, 3, generator=rng(), dtype=WIDE)
    each = torch.as_tensor(sigma, dtype=WIDE).expand(3)
    clean = denoise(model, x, sigma)
    for row in range(3):
        expected = x[row] - each[row] ** 2 * torch.linalg.solve(covariance, x[row] - mean)
        assert torch.allclose(clean[row], expected)
    assert not clean.requires_grad
    assert torch.allclose(denoise(model, x, sigma, batch_size=2), clean)


def test_denoising_in_the_matched_variable():
    model, mean, covariance = make_gaussian(2, preprocess=[ebf.Logit()])
    x = torch.rand(4, 2, generator=rng(), dtype=WIDE)
    u = torch.logit(x)
    expected = torch.sigmoid(u - 0.25 * torch.linalg.solve(covariance, (u - mean).mT).mT)
    assert torch.allclose(denoise(model, x, 0.5), expected)
    assert torch.allclose(denoise(model, x, 0.01, space="data"), x + 1e-4 * model.score(x))


def test_everything_that_moves_by_the_score_has_the_same_space_by_default():
    assert {inspect.signature(f).parameters["space"].default for f in (langevin, impute, denoise)} == {"matched"}


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, torch.tensor([1.0, 2.0]), torch.tensor(0.0)])
def test_errors_of_denoise(sigma):
    model, _, _ = make_gaussian()
    with pytest.raises(ebf.InputError, match="sigma must be"):
        denoise(model, torch.zeros(3, 3, dtype=WIDE), sigma)


def test_a_mask_of_one_row_holds_for_all():
    (model, _, _), x = make_gaussian(4), randn(3, 4)
    mask = torch.tensor([True, False, True, False])
    runs = [
        ebf.impute(model, x, given, steps=4, step_size=0.1, generator=rng(0))
        for given in (mask, mask[None], mask.expand(3, 4))
    ]
    assert torch.equal(runs[0], runs[2])
    assert torch.equal(runs[1], runs[2])
    with pytest.raises(ebf.InputError, match=r"mask must have the shape of x, \(3, 4\), or of one of its rows"):
        ebf.impute(model, x, mask[:3], steps=4, step_size=0.1)


def test_arrays_are_refused_and_no_rows_are_fine():
    (model, _, _), x = make_gaussian(4), randn(3, 4)
    array, options = np.zeros((3, 4)), {"steps": 1, "step_size": 0.1}
    for call, message in (
        (lambda: ebf.denoise(model, array, 0.1), "x must be a tensor, got ndarray"),
        (lambda: ebf.impute(model, array, x > 0, **options), "x must be a tensor, got ndarray"),
        (lambda: ebf.impute(model, x, x > 0, **options, init=array), "init must be a tensor, got ndarray"),
        (lambda: ebf.langevin(model, x, **options, generator=0), "generator must be a torch.Generator"),
    ):
        with pytest.raises(ebf.InputError, match=message):
            call()
    assert ebf.denoise(model, x[:0], 0.1).shape == (0, 4)
    assert ebf.denoise(model, x[:0], 0.1, batch_size=2).shape == (0, 4)


def test_imputation_is_langevin_with_a_mask():
    model, _, _ = make_gaussian()
    x, mask = randn(5, 3), torch.tensor([True, False, True])
    chains = ebf.langevin(model, x, 20, 0.1, mask=mask, generator=rng(), thin=1)
    filled = ebf.impute(model, x, mask, steps=20, step_size=0.1, generator=rng())
    assert torch.equal(filled[:, 0], chains.samples)
    assert torch.equal(chains.trajectory[..., 1], x[:, 1].expand(20, 5))
    assert bool((chains.samples[:, [0, 2]] != x[:, [0, 2]]).all())
    with pytest.raises(ebf.InputError, match="mask must have the shape"):
        ebf.langevin(model, x, 2, 0.1, mask=mask[:2])
