"""The evidence of a Bayesian regression by a flow, against its exact value.

    python examples/evidence.py           # about 10 seconds on one core

Polynomials of degree 1 to 4 with Gaussian priors and noise: posterior and evidence are Gaussian integrals, so both are
known. The flow, w = A z + b, sees the joint density of data and coefficients alone, as it would for any likelihood.
"""

import os
import warnings

import torch
from nflows import distributions, flows, transforms
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

import ebflow_plugin as ebf
from ebflow_nflows import FullLinear

STEPS, NOISE = 10 if os.environ.get("EBFLOW_SMOKE") else 400, 0.3
torch.manual_seed(0)
t = torch.linspace(-1, 1, 20, dtype=torch.float64)
y = 1.0 - 2.0 * t + 1.5 * t**3 + NOISE * torch.randn(20, dtype=torch.float64)  # the truth has degree 3
zero, one = torch.tensor([0.0, 1.0], dtype=torch.float64)

print(f"{'degree':8}{'exact evidence':>15}{'by the flow':>22}{'effective':>12}{'posterior mean':>17}")
for degree in (1, 2, 3, 4):
    design = t[:, None] ** torch.arange(degree + 1)

    def log_joint(w: Tensor, design: Tensor = design) -> Tensor:
        """The joint density of the data and the coefficients w."""
        likelihood = Normal(w @ design.mT, NOISE * one).log_prob(y).sum(1)
        return likelihood + Normal(zero, one).log_prob(w).sum(1)

    covariance = NOISE**2 * torch.eye(20, dtype=torch.float64) + design @ design.mT
    exact = MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y)
    mean = design.mT @ torch.linalg.solve(covariance, y)

    layer = transforms.InverseTransform(FullLinear(degree + 1))
    model = ebf.wrap(flows.Flow(layer, distributions.StandardNormal([degree + 1])).double())
    objective = ebf.objectives.ReverseKL(model, log_joint, n=64)
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 1e-3, STEPS)
    for _ in range(STEPS):
        adam.zero_grad()
        objective().backward()
        adam.step()
        schedule.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ebf.EstimateWarning)  # of the small mode
        drawn = ebf.importance(model, log_joint, 10_000)
        estimate = f"{drawn.log_z.value:.5f} ± {drawn.log_z.std_error:.5f}"
    off = (drawn.expectation(lambda w: w)[0] - mean).abs().max()
    share = drawn.effective_sample_size / 10_000
    print(f"{degree:<8}{exact:15.5f}{estimate:>22}{share:12.2f}{f'off by {off:.4f}':>17}", flush=True)
