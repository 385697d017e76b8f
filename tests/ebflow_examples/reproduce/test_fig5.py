"""Fig. 5: chains against a conditional that is known."""

import pytest
import torch

from ebflow_examples.config import TrainConfig
from ebflow_examples.defaults import settle
from ebflow_examples.reproduce import fig5
from ebflow_examples.reproduce.fig5 import Gaussian
from ebflow_examples.runs import build
from randomness import rng


@pytest.mark.parametrize("kind", fig5.MASKS)
def test_chains_of_a_gaussian_model_have_its_exact_conditional(kind, monkeypatch):
    """One full layer, whitened, is a Gaussian: chains that began elsewhere must end where the closed form is."""
    run = build(TrainConfig(data="digits", model="fc", layers=1, whiten=True, gaussianize=False))
    run = settle(run)
    gaussian = Gaussian.of(run.model, run.split("train"), run.generator(0, "gaussian"))
    truth = run.split("test")[:6]
    mask = fig5._mask(run, kind, len(truth))
    monkeypatch.setattr(fig5, "CHAINS", 60)
    impute = fig5.ebf.impute
    monkeypatch.setattr(fig5.ebf, "impute", lambda *args, init, **options: impute(*args, init=16 - init, **options))
    guesses = fig5._guesses(run, gaussian, truth, mask, burn_in=60, steps=60)
    for name, guess in guesses.items():
        if name != "mean":
            torch.testing.assert_close(guess[~mask], truth.float()[~mask], rtol=0, atol=1e-4)
    difference = (guesses["chains"] - guesses["gaussian"])[mask]
    spread = (guesses["draw"] - guesses["gaussian"])[mask].square().mean().sqrt()  # about the deviation of a draw
    error = float(spread) * (1 / 60 + 1 / fig5.DRAWS) ** 0.5
    assert float(difference.square().mean().sqrt()) == pytest.approx(error, rel=0.35)
    assert abs(float(difference.mean())) < error


def test_the_conditional_of_a_gaussian():
    generator = rng(0)
    mix = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    gaussian = Gaussian(torch.arange(5, dtype=torch.float64), mix @ mix.mT + torch.eye(5, dtype=torch.float64))
    u = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    missing = torch.tensor([True, False, True, False, False])
    centre, spread = gaussian.conditional(u, missing)
    # By the precision: the conditional of a Gaussian has its block of the precision, and the mode of the joint density.
    precision = torch.linalg.inv(gaussian.covariance)
    block, cross = precision[missing][:, missing], precision[missing][:, ~missing]
    torch.testing.assert_close(spread, torch.linalg.inv(block))
    expected = gaussian.mean[missing] - (u - gaussian.mean)[:, ~missing] @ cross.mT @ torch.linalg.inv(block)
    torch.testing.assert_close(centre, expected)
    drawn = gaussian.draw(u.repeat_interleave(20_000, 0), missing, generator).unflatten(0, (3, 20_000))
    assert torch.equal(drawn[..., ~missing], u[:, None, ~missing].expand(3, 20_000, 3))
    error = (drawn[..., missing].mean(1) - centre).abs() / (spread.diagonal() / 20_000).sqrt()
    assert float(error.max()) < 5
    torch.testing.assert_close(torch.cov(drawn[0][:, missing].mT), spread, rtol=0.1, atol=0.05)
