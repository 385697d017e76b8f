"""Log Z without a factorisation: the paper's Table A.3, and the same budget spent better.

    python examples/log_z.py              # about 20 seconds on one core

The paper has p_u = q = N(0, I) and g(x) = W x, and does not say what W is. With W = I + 0.003 G, G standard normal,
importance sampling has errors of the paper's size. Each figure is a mean over 100 runs; the paper's look like single
ones. Lanczos knows one thing more than products with W: the sum of the squares of W's entries, which takes O(D^2) once
and takes out the variance that is linear in the spectrum. The last row of each block shows it without.
"""

import os

import torch
from nflows import distributions, flows

import ebflow_plugin as ebf
from ebflow_nflows import FullLinear
from ebflow_plugin.log_z.lanczos import log_abs_det

REPEATS = 2 if os.environ.get("EBFLOW_SMOKE") else 100
PAPER = {50: (0.004211, 0.099940, 0.355314), 100: (0.003503, 0.034608, 0.076239), 200: (0.002332, 0.015411, 0.011175)}
torch.manual_seed(0)
generator = torch.Generator().manual_seed(0)


def near_identity(dim: int) -> ebf.EBFlow:
    """The paper's model, with W = I + 0.003 G."""
    layer, seeded = FullLinear(dim, bias=False, dtype=torch.float64), torch.Generator().manual_seed(dim)
    layer.weight.data += 0.003 * torch.randn(dim, dim, generator=seeded, dtype=torch.float64)
    return ebf.wrap(flows.Flow(layer, distributions.StandardNormal([dim])))


def estimate(model: ebf.EBFlow, method: str, budget: int) -> torch.Tensor:
    """Estimates log Z from a budget of energies, gradients of the energy, or products with W and its transpose."""
    if method == "lanczos, products alone":
        layer = model.flow._transform
        return -log_abs_det(layer.transform, (len(layer.weight),), layer.weight, iterations=3, probes=budget // 6).value
    annealed = {"steps": 5, "chains": budget // 5, "leapfrogs": 1, "step_size": 0.4}
    spent = {"importance": {"samples": budget}, "ais": annealed, "lanczos": {"iterations": 3, "probes": budget // 6}}
    return model.log_z(method=method, generator=generator, **spent[method])


def error_rate(model: ebf.EBFlow, method: str, budget: int) -> float:
    """The mean of |d - d_est| / |d| over the runs, d the determinant, which is 1 / Z here."""
    with torch.no_grad():
        runs = [(model.log_z() - estimate(model, method, budget)).exp() for _ in range(REPEATS)]
    return (torch.stack(runs) - 1.0).abs().mean().item()


models = {dim: near_identity(dim) for dim in (50, 100, 200)}
print(f"Table A.3: error rate of |det W| with M evaluations, W = I + 0.003 G, mean over {REPEATS} runs")
print(f"{'':32}" + "".join(f"{f'D = {dim}':>12}" for dim in models))
for budget, paper in PAPER.items():
    print(f"{f'M = {budget}, importance (paper)':32}" + "".join(f"{rate:12.6f}" for rate in paper))
    for method in ("importance", "ais", "lanczos", "lanczos, products alone"):
        rates = [error_rate(model, method, budget) for model in models.values()]
        print(f"{f'M = {budget}, {method}':32}" + "".join(f"{rate:12.6f}" for rate in rates), flush=True)
