"""Langevin chains, imputation and denoising, against moments that are known."""

import inspect
import math
import sys

import numpy as np
import pytest
import torch
from nflows import distributions, flows, transforms
from torch import nn

import ebflow_nflows
import ebflow_plugin as ebf
from ebflow_plugin.sampling.langevin import denoise, impute, langevin
from randomness import rng

WIDE = torch.float64


def make_gaussian(dim=3, **options):
    """A linear-Gaussian flow, with its mean and covariance."""
    generator = rng(dim)
    layer = ebflow_nflows.FullLinear(dim, dtype=WIDE)
    with torch.no_grad():
        layer.weight += 0.4 * torch.randn(dim, dim, generator=generator, dtype=WIDE)
        layer.bias.normal_(generator=generator)
    layer.requires_grad_(False)
    model = ebf.wrap(flows.Flow(layer, distributions.StandardNormal([dim])), **options)
    inverse = torch.linalg.inv(layer.weight)
    return model, -inverse @ layer.bias, inverse @ inverse.mT


class Mixture(nn.Module):
    """Two Gaussians in the plane, of a user's own."""

    weights, centres, spreads = (0.3, 0.7), (-1.5, 1.0), (0.5, 0.8)

    def log_prob(self, inputs, context=None):
        parts = [
            math.log(w) - 0.5 * ((inputs - c) / s).square().sum(1) - 2 * math.log(s)
            for w, c, s in zip(self.weights, self.centres, self.spreads, strict=True)
        ]
        return torch.logsumexp(torch.stack(parts), 0) - math.log(2 * math.pi)


def assert_moments(samples, mean, covariance, effective):
    """Within five standard errors, for samples that are worth ``effective`` independent ones."""
    spread = covariance.diagonal().sqrt()
    assert bool(((samples.mean(0) - mean).abs() < 5 * spread / effective**0.5).all()), samples.mean(0) - mean
    error = torch.cov(samples.mT) - covariance
    scale = (covariance.square() + torch.outer(spread, spread).square()).sqrt()
    assert bool((error.abs() < 5 * scale / effective**0.5).all()), error


def test_adjusted_chains_have_the_moments_of_a_gaussian():
    model, mean, covariance = make_gaussian()
    starts = torch.zeros(400, 3, dtype=WIDE)
    found = langevin(model, starts, 150, 0.05, burn_in=150, generator=rng(), thin=30)
    assert found.trajectory.shape == (5, 400, 3)
    assert torch.equal(found.trajectory[-1], found.samples)
    assert_moments(found.trajectory.flatten(0, 1), mean, covariance, 600)
    assert 0.45 < float(found.acceptance.mean()) < 0.7  # what the adaptation aims at


def test_a_large_step_is_corrected_and_not_without():
    """One dimension, E = ½x²: the unadjusted limit is N(0, 1 / (1 - α/2)), the adjusted one N(0, 1)."""
    model = ebf.wrap(flows.Flow(transforms.IdentityTransform(), distributions.StandardNormal([1])))
    starts = torch.randn(4000, 1, generator=rng(1), dtype=WIDE)
    for adjusted, variance in ((False, 1 / (1 - 0.8 / 2)), (True, 1.0)):
        found = langevin(model, starts, 40, 0.8, adjusted=adjusted, generator=rng(), adapt=False)
        assert float(found.samples.var()) == pytest.approx(variance, rel=5 * (2 / 4000) ** 0.5)
        assert torch.equal(found.step_sizes, torch.full((4000,), 0.8, dtype=WIDE))


def test_a_mixture_with_two_modes():
    mixture = Mixture()
    model = ebf.wrap(flows.Flow(transforms.IdentityTransform(), mixture))
    starts = torch.randn(1500, 2, generator=rng(1), dtype=WIDE) * 2
    found = langevin(model, starts, 250, 0.3, burn_in=100, generator=rng())
    w, c, s = (torch.tensor(t, dtype=WIDE) for t in (mixture.weights, mixture.centres, mixture.spreads))
    mean = float((w * c).sum())
    second = float((w * (c * c)).sum())
    covariance = torch.full((2, 2), second - mean**2, dtype=WIDE) + torch.eye(2, dtype=WIDE) * float((w * s * s).sum())
    assert_moments(found.samples, torch.full((2,), mean, dtype=WIDE), covariance, 1000)
    share = float((found.samples.sum(1) < -0.5).double().mean())
    assert share == pytest.approx(0.3, abs=0.06)


def test_the_equation_of_the_paper():
    """Eq. 11: x - α∇E + sqrt(2α) z, with the noise that the generator gives."""
    model, _, _ = make_gaussian()
    x = torch.randn(5, 3, generator=rng(1), dtype=WIDE)
    found = langevin(model, x, 1, 0.1, adjusted=False, generator=rng())
    noise = torch.randn(5, 3, generator=rng(), dtype=WIDE)
    assert torch.allclose(found.samples, x + 0.1 * model.score(x) + 0.2**0.5 * noise)
    assert torch.allclose(found.energies, torch.stack([model.energy(x), model.energy(found.samples)]))
    assert torch.equal(found.acceptance, torch.ones(5, dtype=WIDE))


def test_each_chain_tunes_its_own_step():
    """Two contexts, two scales: the steps follow the scales' squares."""
    base = distributions.ConditionalDiagonalNormal([4])
    model = ebf.wrap(flows.Flow(transforms.IdentityTransform(), base))
    log_std = torch.tensor([0.0, -2.0]).repeat_interleave(50)
    context = torch.cat([torch.zeros(100, 4), log_std[:, None].expand(100, 4)], 1)
    found = langevin(model, torch.zeros(100, 4), 100, 0.3, context=context, burn_in=300, generator=rng())
    wide, narrow = found.step_sizes[:50].log().mean(), found.step_sizes[50:].log().mean()
    assert float(wide - narrow) == pytest.approx(4.0, abs=0.3)
    assert abs(float(found.acceptance.mean()) - 0.574) < 0.07


@pytest.mark.parametrize("space", ["data", "matched"])
def test_chains_in_either_space_have_the_same_limit(space):
    model, mean, covariance = make_gaussian(2, preprocess=[ebf.Rescale(0.05, 0.95), ebf.Logit()])
    truth = model.sample(100_000, generator=rng(5))
    starts = torch.full((800, 2), 0.5, dtype=WIDE)
    found = langevin(model, starts, 400, 0.005, burn_in=200, space=space, generator=rng())
    assert found.samples.shape == (800, 2)
    assert_moments(found.samples, truth.mean(0), torch.cov(truth.mT), 500)
    inside = model.preprocess(found.samples)[0]
    assert_moments(inside, mean, covariance, 400)


def test_whole_numbers_run_in_the_matched_variable():
    model, _, _ = make_gaussian(2, preprocess=[ebf.Dequantize(16), ebf.Rescale(0.05, 0.95), ebf.Logit()])
    starts = torch.randint(16, (30, 2), generator=rng())
    found = langevin(model, starts, 5, 0.1, generator=rng(), thin=2)
    assert torch.equal(found.samples, found.samples.round())
    assert found.trajectory.shape == (2, 30, 2)
    with pytest.raises(ebf.InputError, match='space="matched"'):
        langevin(model, starts, 5, 0.1, space="data")


def test_proposals_outside_of_the_support_are_refused():
    model, _, _ = make_gaussian(2, preprocess=[ebf.Logit()])
    starts = torch.full((50, 2), 0.98, dtype=WIDE)
    found = langevin(model, starts, 30, 0.05, space="data", generator=rng())
    assert bool(((found.samples > 0) & (found.samples < 1)).all())
    assert bool(torch.isfinite(found.energies).all())
    assert float(found.acceptance.mean()) < 1
    with pytest.raises(ebf.EBFlowError, match="ran away at step"):
        langevin(model, starts, 30, 0.05, space="data", adjusted=False, generator=rng())


def test_seeds_batches_and_bars():
    model, _, _ = make_gaussian()
    starts = torch.zeros(10, 3, dtype=WIDE)
    first, second, third = (langevin(model, starts, 5, 0.1, generator=rng(k)).samples for k in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert torch.equal(langevin(model, starts, 5, 0.1, generator=rng(), progress=True).samples, first)
    parts = langevin(model, starts, 6, 0.1, generator=rng(), batch_size=4, thin=3)
    assert parts.samples.shape == (10, 3)
    assert parts.trajectory.shape == (2, 10, 3)
    assert parts.energies.shape == (7, 10)
    assert parts.acceptance.shape == parts.step_sizes.shape == (10,)
    assert torch.allclose(model.energy(parts.samples), parts.energies[-1])
    assert "10 chains, 6 steps" in repr(parts)


def test_no_tensor_is_made_without_a_device():
    flow = flows.Flow(ebflow_nflows.FullLinear(2, dtype=WIDE), Mixture())  # a base of nflows makes tensors of its own
    model = ebf.wrap(flow, preprocess=[ebf.Rescale(0.05, 0.95), ebf.Logit()])
    x, generator = torch.full((4, 2), 0.5, dtype=WIDE), rng()
    mask = x > x.mean(0) - 1
    with torch.device("meta"):  # where a tensor lands that does not say where it belongs
        for space in ("data", "matched"):
            found = langevin(model, x, 3, 0.01, burn_in=3, space=space, generator=generator, thin=1)
            filled = impute(model, x, mask, steps=3, step_size=0.01, space=space, generator=generator)
            for tensor in (found.samples, found.trajectory, found.energies, found.step_sizes, filled):
                assert tensor.device.type == "cpu"
            assert denoise(model, x, 0.1, space=space).device.type == "cpu"


def test_images_keep_their_shape():
    layer = ebflow_nflows.FullConv2d(2, kernel_size=3, init="normal", generator=rng())
    model = ebf.wrap(flows.Flow(layer, distributions.StandardNormal([2, 4, 4])))
    x = torch.zeros(3, 2, 4, 4)
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask[:, :, :2] = True
    assert langevin(model, x, 2, 0.1, burn_in=2, thin=1).trajectory.shape == (2, 3, 2, 4, 4)
    filled = impute(model, x, mask, steps=3, step_size=0.1, chains=2)
    assert filled.shape == (3, 2, 2, 4, 4)
    assert torch.equal(filled[:, :, :, 2:], torch.zeros(3, 2, 2, 2, 4))


def test_a_bar_without_rich_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    model, _, _ = make_gaussian()
    with pytest.raises(ebf.InputError, match="pip install rich"):
        langevin(model, torch.zeros(1, 3, dtype=WIDE), 1, 0.1, progress=True)


def test_chains_carry_no_graph_and_leave_the_start_alone():
    model, _, _ = make_gaussian()
    model.flow.requires_grad_(True)
    starts = torch.zeros(4, 3, dtype=WIDE, requires_grad=True)
    found = langevin(model, starts, 3, 0.1, generator=rng())
    assert not found.samples.requires_grad
    assert not found.energies.requires_grad
    assert torch.equal(starts, torch.zeros(4, 3, dtype=WIDE))
    with torch.inference_mode():
        assert langevin(model, starts, 3, 0.1, generator=rng()).samples.shape == (4, 3)


LANGEVIN_ERRORS = [
    ({"step_size": 0.0}, "step_size must be a positive number"),
    ({"step_size": float("inf")}, "step_size must be"),
    ({"steps": -1}, "steps must be an integer"),
    ({"burn_in": 1.5}, "burn_in must be"),
    ({"thin": 0}, "thin must be"),
    ({"batch_size": 0}, "batch_size must be"),
    ({"space": "date"}, "unknown space 'date'. Did you mean 'data'"),
    ({"x0": torch.zeros(3, dtype=WIDE)}, "x must have shape"),
    ({"x0": torch.zeros(0, 3, dtype=WIDE)}, "no rows"),
    ({"x0": torch.full((2, 3), math.nan, dtype=WIDE)}, "x0 holds 6 NaN or inf"),
    ({"x0": torch.full((2, 3), 1e200, dtype=WIDE)}, "energy is NaN or inf at 2 of 2 starts"),
    ({"x0": torch.zeros(2, 3)}, "x is torch.float32"),
    ({"covariance": torch.eye(2)}, "covariance must have shape \\(3, 3\\), got \\(2, 2\\)"),
    ({"covariance": -torch.eye(3)}, "symmetric and positive definite"),
    ({"covariance": torch.ones(3, 3).tril() + torch.eye(3)}, "symmetric and positive definite"),
    ({"covariance": torch.full((3, 3), math.nan)}, "covariance holds 9 NaN"),
]


@pytest.mark.parametrize(("options", "message"), LANGEVIN_ERRORS)
def test_errors_of_langevin(options, message):
    model, _, _ = make_gaussian()
    options = {"x0": torch.zeros(2, 3, dtype=WIDE), "steps": 2, "step_size": 0.1, **options}
    with pytest.raises(ebf.InputError, match=message):
        langevin(model, **options)


def test_a_bare_flow_is_refused():
    model, _, _ = make_gaussian()
    x = torch.zeros(1, 3, dtype=WIDE)
    for call in (
        lambda: langevin(model.flow, x, 1, 0.1),
        lambda: impute(model.flow, x, x > 0, steps=1, step_size=0.1),
        lambda: denoise(model.flow, x, 0.1),
    ):
        with pytest.raises(ebf.InputError, match="wrap it first"):
            call()


def conditional(mean, covariance, observed, value):
    """Mean and covariance of the other entries of a Gaussian, given the observed ones."""
    missing = ~observed
    cross = covariance[missing][:, observed] @ torch.linalg.inv(covariance[observed][:, observed])
    centre = mean[missing] + cross @ (value[observed] - mean[observed])
    return centre, covariance[missing][:, missing] - cross @ covariance[observed][:, missing]


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
    assert filled.shape == (2, 1500, 4)
    for row in range(2):
        observed = ~mask[row]
        assert torch.equal(filled[row][:, observed], x[row, observed].expand(1500, -1))  # bit by bit
        centre, spread = conditional(mean, covariance, observed, x[row])
        assert_moments(filled[row][:, mask[row]], centre, spread.reshape(len(centre), -1), 1000)


def ill_scaled():
    """A Gaussian whose widest direction is a thousand times its narrowest."""
    layer = ebflow_nflows.FullLinear(4, dtype=WIDE)
    turn = torch.linalg.qr(torch.randn(4, 4, generator=rng(3), dtype=WIDE)).Q
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([100.0, 10.0, 1.0, 0.1], dtype=WIDE)[:, None] * turn)
        layer.bias.normal_(generator=rng(4))
    layer.requires_grad_(False)
    inverse = torch.linalg.inv(layer.weight)
    model = ebf.wrap(flows.Flow(layer, distributions.StandardNormal([4])))
    return model, -inverse @ layer.bias, inverse @ inverse.mT


def test_a_covariance_makes_ill_scaled_chains_fast_and_keeps_the_limit():
    model, mean, covariance = ill_scaled()
    x = mean + torch.randn(2, 4, generator=rng(1), dtype=WIDE) @ torch.linalg.cholesky(covariance).mT
    mask = torch.tensor([[True, False, True, False], [False, True, True, True]])
    options = {"steps": 60, "burn_in": 40, "step_size": 0.5, "chains": 1500, "generator": rng()}
    filled = impute(model, x, mask, **options, covariance=covariance, init=torch.zeros_like(x))
    for row in range(2):
        observed = ~mask[row]
        assert torch.equal(filled[row][:, observed], x[row, observed].expand(1500, -1))
        centre, spread = conditional(mean, covariance, observed, x[row])
        assert_moments(filled[row][:, mask[row]], centre, spread.reshape(len(centre), -1), 1000)


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
    with pytest.raises(ebf.InputError, match="pass finite ones in init="):
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


def small_model():
    torch.manual_seed(0)
    return ebf.wrap(flows.Flow(transforms.LULinear(4), distributions.StandardNormal([4])).requires_grad_(False))


def test_a_mask_of_one_row_holds_for_all():
    model, x = small_model(), torch.randn(3, 4)
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
    model, x = small_model(), torch.randn(3, 4)
    array = np.zeros((3, 4), dtype=np.float32)
    with pytest.raises(ebf.InputError, match="x must be a tensor, got ndarray"):
        ebf.denoise(model, array, 0.1)
    with pytest.raises(ebf.InputError, match="x must be a tensor, got ndarray"):
        ebf.impute(model, array, x > 0, steps=1, step_size=0.1)
    with pytest.raises(ebf.InputError, match="init must be a tensor, got ndarray"):
        ebf.impute(model, x, x > 0, steps=1, step_size=0.1, init=array)
    with pytest.raises(ebf.InputError, match="generator must be a torch.Generator"):
        ebf.langevin(model, x, steps=1, step_size=0.1, generator=0)
    assert ebf.denoise(model, x[:0], 0.1).shape == (0, 4)
    assert ebf.denoise(model, x[:0], 0.1, batch_size=2).shape == (0, 4)
