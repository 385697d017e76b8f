"""A lattice field without data: φ⁴ on 8 × 8 sites by full circular convolutions, and by couplings in equal time.

    python examples/phi4.py               # about 3 minutes on one core; with SEED=1 before it, from another seed

Each full layer mixes its neighbourhood everywhere, and its log-determinant is exact by FFT. A coupling transforms half
of a checkerboard by the other half. Independence Metropolis, with samples of the flow as proposals, then samples the
field exactly; Hamiltonian Monte Carlo is the judge.
"""

import os
import time
import warnings

import torch
from nflows import distributions, flows, transforms
from torch import Tensor

import ebflow_plugin as ebf
from ebflow_examples.energies import couplings, phi4
from ebflow_nflows import FullConv2d, SinhArcsinh

SMALL = bool(os.environ.get("EBFLOW_SMOKE"))
SECONDS, CHAINS, SWEEPS = (1, 50, 20) if SMALL else (60, 500, 1000)
L = 8
torch.manual_seed(int(os.environ.get("SEED", "0")))
warnings.simplefilter("ignore", ebf.EstimateWarning)  # an unreliable estimate has the error inf in its line


def action(field: Tensor) -> Tensor:
    """The sum over sites of (∇φ)² - φ² + φ⁴, on a torus."""
    return -phi4(field)


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


full = [FullConv2d(1, kernel_size=3, padding_mode="circular") for _ in range(5)]
mixing = [step for layer in full for step in (layer, SinhArcsinh(L))][:-1]
for name, steps, rate in (("full", mixing, 1e-2), ("couplings", couplings(), 3e-3)):
    model = ebf.wrap(flows.Flow(transforms.CompositeTransform(steps), distributions.StandardNormal([1, L, L])))
    objective = ebf.objectives.ReverseKL(model, phi4, n=128)
    adam, start, count = torch.optim.Adam(model.parameters()), time.process_time(), 0
    while (spent := (time.process_time() - start) / SECONDS) < 1:
        adam.param_groups[0]["lr"], count = rate * max(0.02, 1 - spent), count + 1
        adam.zero_grad()
        objective().backward()
        adam.step()
    drawn = ebf.importance(model, phi4, 20_000, batch_size=5000)
    mean, error = drawn.expectation(action)
    rates = f"accepted {drawn.metropolis().acceptance:.3f}, effective {drawn.effective_sample_size / 20_000:.3f}"
    print(f"{name:9} {rates}, mean action {mean:.3f} ± {error:.3f}, log Z {drawn.log_z}, {count} steps", flush=True)
print("HMC       mean action {:.3f} ± {:.3f}".format(*hamiltonian()))
