"""Matched latents: the energy distance from the base, against closed forms."""

import math

import normflows as nf
import pytest
import torch
from nflows.distributions.normal import StandardNormal
from nflows.flows.base import Flow
from nflows.transforms import IdentityTransform, PointwiseAffineTransform

import ebflow_plugin as ebf
from ebflow_plugin.closed_form.calibration import flatten
from ebflow_plugin.errors import InputError
from ebflow_plugin.objectives import DSM, FDSSM, SM, SSM, LatentMatch, score_matching
from ebflow_plugin.objectives.latent_match import energy_distance
from nflows_small import coupling_model
from randomness import randn, rng
from training_models import make_data, make_model


def absolute(mean, std):
    """E|a| of a Gaussian a."""
    return std * math.sqrt(2 / math.pi) * math.exp(-((mean / std) ** 2) / 2) + mean * math.erf(
        mean / std / math.sqrt(2)
    )


def expected(mean, std):
    """The energy distance of N(mean, std²) from N(0, 1)."""
    return 2 * absolute(mean, math.hypot(std, 1.0)) - absolute(0.0, std * math.sqrt(2)) - absolute(0.0, math.sqrt(2))


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.5, 1.0), (0.0, 2.0), (-1.0, 0.3)])
def test_closed_form(mean, std):
    model = ebf.wrap(Flow(PointwiseAffineTransform(mean, std), StandardNormal([1])).double())
    small = torch.stack(
        [LatentMatch(model)(rows, generator=rng(k)) for k, rows in enumerate(randn(40_000, 1).split(10))]
    )
    # Unbiased in batches of ten, which a plain mean over all pairs of rows would not be.
    assert abs(small.mean() - expected(mean, std)) < 5 * small.std() / math.sqrt(len(small))


def test_noise_is_added_to_the_data():
    model = ebf.wrap(Flow(IdentityTransform(), StandardNormal([1])).double())
    values = LatentMatch(model, sigma=2.0).losses(randn(4000, 1), generator=rng(1))
    assert abs(values.mean() - expected(0.0, math.sqrt(5.0))) < 0.05


def test_gradients_are_those_of_the_definition():
    rows, others = randn(30, 2, seed=1), randn(30, 2, seed=2)

    def plain(rows):
        def apart(a, b):
            return torch.stack([(one - two).norm() for one in a for two in b if one is not two]).sum()

        rows = list(rows)
        pairs = 2 * apart(rows, list(others)) / 900 - apart(rows, rows) / 870
        return pairs - apart(list(others), list(others)) / 870

    point, twin = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    ours, theirs = energy_distance(point, others).mean(), plain(twin.unbind())
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, point), torch.autograd.grad(theirs, twin))


def test_it_moves_the_latents_to_a_base_that_is_no_gaussian():
    base = nf.distributions.GaussianMixture(2, 1, loc=[[-4.0], [4.0]], trainable=False)
    flow = nf.NormalizingFlow(base, [nf.flows.AffineConstFlow((1,))])
    model = ebf.wrap(flow)
    x = model.sample(2000, generator=rng(0)) * 3.0
    objective = LatentMatch(model, generator=rng(1))
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    before = objective(x).item()
    for batch in x[torch.randint(2000, (150, 200), generator=rng(2))]:
        optimizer.zero_grad()
        objective(batch).backward()
        optimizer.step()
    assert objective(x).item() < 0.02 * before
    (latents,), _ = model.plan.encode(x)
    assert latents.std().item() == pytest.approx(x.std().item() / 3.0, rel=0.1)


def test_the_same_seed_gives_the_same_value_and_no_determinant_is_needed(monkeypatch):
    model, x = make_model(actnorm=False, dtype=torch.float64), make_data(9, dtype=torch.float64)
    for name in ("det", "slogdet", "lu_factor", "lu_factor_ex", "qr", "inv", "solve"):
        monkeypatch.setattr(torch.linalg, name, None)
    first, second = (LatentMatch(model, generator=rng(4))(x) for _ in range(2))
    assert torch.equal(first, second)
    first.backward()


def test_one_row_has_no_distance():
    with pytest.raises(InputError, match="it needs two at least"):
        LatentMatch(make_model(actnorm=False))(make_data(1))


@pytest.mark.parametrize("kind", [SM, SSM, DSM, FDSSM])
def test_the_option_of_score_matching_is_the_term_at_its_own_points(kind):
    for model in (make_model(actnorm=False, dtype=torch.float64), coupling_model().double()):
        x = randn(7, model.plan.event_shape[0])
        seen = []

        def distance(plan, latents, context, generator, seen=seen):
            seen.append(latents)
            return 10.0 * flatten(latents).square().sum(1)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(score_matching, "base_distance", distance)
            plain = kind(model)(x, generator=rng(1))
            both = kind(model, latent_weight=0.5)
            value = both(x, generator=rng(1))
        (latents,) = seen
        if kind in (SM, SSM, FDSSM):  # they match the score at the data
            torch.testing.assert_close(latents, model.plan.encode(x)[0])
        else:
            noised = x + randn(*x.shape, seed=1)
            torch.testing.assert_close(latents, model.plan.encode(noised)[0])
        expected = plain + 5.0 * flatten(latents).square().sum(1).mean()
        torch.testing.assert_close(value, expected)
        options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
        found, wanted = (torch.autograd.grad(total, list(model.parameters()), **options) for total in (value, expected))
        torch.testing.assert_close(found, wanted)
        assert both.describe().endswith("latent_weight=0.5)")


def test_the_option_adds_the_value_of_the_term():
    """SM draws nothing, so that both draw the same samples of the base."""
    model, x = make_model(actnorm=False, dtype=torch.float64), make_data(9, dtype=torch.float64)
    both, alone, term = SM(model, latent_weight=2.0), SM(model), LatentMatch(model)
    torch.testing.assert_close(both(x, generator=rng(2)), alone(x) + 2.0 * term(x, generator=rng(2)))
