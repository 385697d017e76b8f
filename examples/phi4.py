"""A lattice field without data: φ⁴ on 8 × 8 sites by full circular convolutions, against Hamiltonian Monte Carlo.

    python examples/phi4.py               # about 90 seconds on one core

Each layer of the flow mixes its neighbourhood everywhere, and its log-determinant is exact by FFT. Independence
Metropolis, with samples of the flow as proposals, then samples the field exactly.
"""

import os
import time
import warnings

import torch
from nflows import distributions, flows, transforms
from torch import Tensor

import ebflow_plugin as ebf
from ebflow_nflows import FullConv2d, SinhArcsinh

SMALL = bool(os.environ.get("EBFLOW_SMOKE"))
SECONDS, CHAINS, SWEEPS = (1, 50, 20) if SMALL else (60, 500, 1000)
L, MASS, COUPLING = 8, -1.0, 1.0
torch.manual_seed(0)


def action(field: Tensor) -> Tensor:
    """The sum over sites of (∇φ)² + m² φ² + λ φ⁴, on a torus."""
    kinetic = sum((field - field.roll(1, dim)).square() for dim in (2, 3))
    return (kinetic + MASS * field.square() + COUPLING * field.pow(4)).sum((1, 2, 3))


def hamiltonian(steps: int = 10, size: float = 0.1) -> tuple[float, float]:
    """The mean action and its error, by Hamiltonian Monte Carlo in many chains from the same start."""
    slope, field, means = torch.func.grad(lambda point: action(point).sum()), 0.1 * torch.randn(CHAINS, 1, L, L), []
    for sweep in range(SWEEPS):
        moved, momentum = field, torch.randn_like(field)
        before = action(field) + 0.5 * momentum.square().sum((1, 2, 3))
        for _ in range(steps):
            momentum = momentum - 0.5 * size * slope(moved)
            moved = moved + size * momentum
            momentum = momentum - 0.5 * size * slope(moved)
        after = action(moved) + 0.5 * momentum.square().sum((1, 2, 3))
        field = torch.where((torch.rand(CHAINS) < (before - after).exp())[:, None, None, None], moved, field)
        means += [action(field)] if sweep >= SWEEPS // 5 else []
    each = torch.stack(means).mean(0)  # of independent chains
    return float(each.mean()), float(each.std()) / CHAINS**0.5


layers = [FullConv2d(1, kernel_size=3, padding_mode="circular") for _ in range(5)]
steps = [step for layer in layers for step in (layer, SinhArcsinh(L))][:-1]
model = ebf.wrap(flows.Flow(transforms.CompositeTransform(steps), distributions.StandardNormal([1, L, L])))
objective = ebf.objectives.ReverseKL(model, lambda x: -action(x), n=128)
adam, start = torch.optim.Adam(model.parameters()), time.process_time()
while (spent := (time.process_time() - start) / SECONDS) < 1:
    adam.param_groups[0]["lr"] = 1e-2 * max(0.02, 1 - spent)
    adam.zero_grad()
    objective().backward()
    adam.step()
with warnings.catch_warnings():
    warnings.simplefilter("ignore", ebf.EstimateWarning)  # of the small mode
    drawn = ebf.importance(model, lambda x: -action(x), 20_000, batch_size=5000)
    mean, error = drawn.expectation(action)
print(
    f"flow  accepted {drawn.metropolis().acceptance:.2f}, effective {drawn.effective_sample_size / 20_000:.2f}, ",
    end="",
)
print(f"mean action {mean:.3f} ± {error:.3f}, log Z {drawn.log_z}")
print("HMC   mean action {:.3f} ± {:.3f}".format(*hamiltonian()))
