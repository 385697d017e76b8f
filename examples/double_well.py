"""A flow and an energy, no data: a double well in two dimensions, whose log Z is known.

    python examples/double_well.py        # about 10 seconds on one core

Reverse KL trains on samples of the model alone, and covers what it has found. Likelihood of the same samples with their
importance weights, forward KL, spreads to what these show. The weights turn samples of the model into those of the
target: its log Z, expectations, and a chain of independence Metropolis.
"""

import math
import os
import warnings

import torch
from nflows import distributions, flows, transforms
from torch import Tensor

import ebflow_plugin as ebf
from ebflow_nflows import FullLinear

STEPS = 5 if os.environ.get("EBFLOW_SMOKE") else 300
torch.manual_seed(0)


def log_density(x: Tensor) -> Tensor:
    """The target: wells at a = ±1.58, one deeper than the other; b follows a."""
    a, b = x[:, 0], x[:, 1]
    return -(a.square() - 2.5).square() + 0.3 * a - 0.5 * (b - 0.5 * a).square()


def report(title: str) -> None:
    """What the weights of samples of the model say."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ebf.EstimateWarning)  # shown in the line
        drawn = ebf.importance(model, log_density, 10_000)
        value, spread = drawn.log_z.value, drawn.log_z.std_error
    right, error = drawn.expectation(lambda x: (x[:, 0] > 0).double())
    rates = f"effective {drawn.effective_sample_size / 10_000:.2f}, accepted {drawn.metropolis().acceptance:.2f}"
    print(f"{title:9} log Z {value:.4f} ± {spread:.4f}, right well {right:.3f} ± {error:.3f}, {rates}")


grid = torch.linspace(-6, 6, 20_001, dtype=torch.float64)
height = log_density(torch.stack([grid, 0.5 * grid], 1)).exp()
log_z = math.log(float(height.sum() * (grid[1] - grid[0])) * math.sqrt(2 * math.pi))
print(f"exact     log Z {log_z:.4f}, right well {height[grid > 0].sum() / height.sum():.3f}")

spline = transforms.PiecewiseRationalQuadraticCDF([2], num_bins=10, tails="linear", tail_bound=4.0)
steps = transforms.CompositeTransform([FullLinear(2), spline, FullLinear(2)])
model = ebf.wrap(flows.Flow(steps, distributions.StandardNormal([2])).double())
report("start")
reverse, adam = ebf.objectives.ReverseKL(model, log_density), torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(2 * STEPS):
    adam.zero_grad()
    if step < STEPS:
        reverse().backward()
    else:
        drawn = ebf.importance(model, log_density, 512)
        ebf.objectives.ML(model)(drawn.samples, weights=drawn.weights).backward()
    adam.step()
    if step + 1 in (STEPS, 2 * STEPS):
        report("reverse" if step < STEPS else "forward")
