"""The Gaussian of matched data, and its conditionals."""

import torch

from ebflow_examples.gaussian import Gaussian
from randomness import rng


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
