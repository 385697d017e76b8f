"""Langevin chains, against moments that are known."""

import math
import sys

import pytest
import torch
from nflows import distributions, flows, transforms
from torch import nn

import ebflow_nflows
import ebflow_plugin as ebf
from ebflow_plugin.sampling.langevin import denoise, impute, langevin
from gaussian_models import WIDE, assert_moments, make_gaussian
from randomness import rng


class Mixture(nn.Module):
    """Two Gaussians in the plane, of a user's own."""

    weights, centres, spreads = (0.3, 0.7), (-1.5, 1.0), (0.5, 0.8)

    def log_prob(self, inputs, context=None):
        parts = [
            math.log(w) - 0.5 * ((inputs - c) / s).square().sum(1) - 2 * math.log(s)
            for w, c, s in zip(self.weights, self.centres, self.spreads, strict=True)
        ]
        return torch.logsumexp(torch.stack(parts), 0) - math.log(2 * math.pi)


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
    with pytest.raises(ebf.EBFlowError, match="diverged at step"):
        langevin(model, starts, 30, 0.05, space="data", adjusted=False, generator=rng())


def test_seeds_batches_and_bars():
    model, _, _ = make_gaussian()
    starts = torch.zeros(10, 3, dtype=WIDE)
    first, second, third = (langevin(model, starts, 5, 0.1, generator=rng(k)).samples for k in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert torch.equal(langevin(model, starts, 5, 0.1, generator=rng(), progress=True).samples, first)
    parts = langevin(model, starts, 6, 0.1, generator=rng(), batch_size=4, thin=3)
    assert torch.allclose(parts.samples, langevin(model, starts, 6, 0.1, generator=rng()).samples)
    assert parts.samples.shape == (10, 3)
    assert parts.trajectory.shape == (2, 10, 3)
    assert parts.energies.shape == (7, 10)
    assert parts.acceptance.shape == parts.step_sizes.shape == (10,)
    assert torch.allclose(model.energy(parts.samples), parts.energies[-1])
    assert "10 chains, 6 steps" in repr(parts)


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
