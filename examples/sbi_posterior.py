"""Train sbi's posterior estimator by score matching on a simulator whose posterior is known.

    pip install sbi && python examples/sbi_posterior.py   # about 30 seconds on one core

The simulator is linear and Gaussian: theta ~ N(0, I), x = A theta + noise, so that the posterior is N(m(x), S). The
estimator is sbi's MAF of zuko ("maf" is that of nflows), trained by SSM on pairs (theta, x); sbi then samples from it.
Score matching wants a smooth posterior: a prior that ends at a border (BoxUniform) makes the density jump there.
"""

import os
import sys

import torch

import ebflow_plugin as ebf

try:
    from sbi.inference.posteriors import DirectPosterior
    from sbi.neural_nets import posterior_nn
except ImportError as error:
    print(f"skipped: {error}; pip install sbi")
    sys.exit(0)

STEPS, NOISE = 5 if os.environ.get("EBFLOW_SMOKE") else 800, 0.5
torch.manual_seed(0)

A = torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, -0.5], [0.3, 0.0, 1.0], [1.0, 1.0, 1.0]])
S = torch.linalg.inv(torch.eye(3) + A.T @ A / NOISE**2)


def simulate(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws parameters from the prior, and what the simulator makes of them."""
    theta = torch.randn(n, 3)
    return theta, theta @ A.T + NOISE * torch.randn(n, 4)


def true_posterior(x: torch.Tensor) -> torch.distributions.MultivariateNormal:
    """The posterior of a batch of observations."""
    return torch.distributions.MultivariateNormal(x @ A @ S / NOISE**2, S)


train, test = simulate(10_000), simulate(2_000)
estimator = ebf.smooth(posterior_nn("zuko_maf", num_transforms=3)(*train))  # sbi's own network, without its ReLUs
model = ebf.wrap(estimator)
print(model.report, end="\n\n", flush=True)
truth = true_posterior(test[1]).log_prob(test[0])

print(f"KL to the true posterior, before: {(truth - model.log_prob(*test)).mean():.3f}", flush=True)
objective = ebf.objectives.SSM(model)
ebf.fit(objective, train, steps=STEPS, batch_size=256, validation=simulate(2_000), ema=True).load_best(model)
print(f"KL to the true posterior, after:  {(truth - model.log_prob(*test)).mean():.3f}")

observed = torch.tensor([[1.0, -0.5, 0.5, 1.5]])
prior = torch.distributions.MultivariateNormal(torch.zeros(3), torch.eye(3))
samples = DirectPosterior(estimator, prior).sample((5_000,), x=observed, show_progress_bars=False)
for name, found, known in (
    ("mean", samples.mean(0), true_posterior(observed).mean[0]),
    ("std", samples.std(0), S.diagonal().sqrt()),
):
    print(f"posterior {name:4}", *(f"{value:7.3f}" for value in found), "  known", *(f"{v:7.3f}" for v in known))
