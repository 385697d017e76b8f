"""Log Z without a factorisation: the paper's Table A.3, and the same budget spent better.

    python examples/log_z.py              # about 20 seconds on one core

The paper has p_u = q = N(0, I) and g(x) = W x, and does not say what W is. With W = I + 0.003 G, G standard normal,
importance sampling has errors of the paper's size. Each figure is a mean over 100 runs. Lanczos knows the sum of the
squares of W's entries too, which takes out variance: the last row of each block shows it without.
"""

import os

import torch
from nflows import distributions, flows

import ebflow_plugin as ebf
from ebflow_nflows import FullLinear
from ebflow_plugin.linalg.operators import DenseOperator
from ebflow_plugin.log_z.lanczos import log_abs_det

REPEATS = 2 if os.environ.get("EBFLOW_SMOKE") else 100
PAPER = {50: (0.004211, 0.099940, 0.355314), 100: (0.003503, 0.034608, 0.076239), 200: (0.002332, 0.015411, 0.011175)}
generator = torch.Generator().manual_seed(0)


def near_identity(dim: int) -> ebf.EBFlow:
    """The paper's model, with W = I + 0.003 G."""
    layer, seeded = FullLinear(dim, bias=False, dtype=torch.float64), torch.Generator().manual_seed(dim)
    layer.weight.data += 0.003 * torch.randn(dim, dim, generator=seeded, dtype=torch.float64)
    return ebf.wrap(flows.Flow(layer, distributions.StandardNormal([dim])))


class ProductsAlone(DenseOperator):
    """W, of which nothing but products is known."""

    def sum_of_squares(self) -> None: ...  # noqa: D102


def estimate(model: ebf.EBFlow, method: str, budget: int) -> float:
    """Estimates log Z from a budget of energies, or products with W and its transpose."""
    if method == "lanczos, products alone":
        return -log_abs_det(ProductsAlone(model.flow._transform.weight), iterations=3, probes=budget // 6).value
    spent = {"importance": {"samples": budget}, "lanczos": {"iterations": 3, "probes": budget // 6}}
    return model.log_z(method=method, generator=generator, **spent[method]).value


def error_rate(model: ebf.EBFlow, method: str, budget: int) -> float:
    """The mean of |d - d_est| / |d| over the runs, d the determinant, which is 1 / Z here."""
    with torch.no_grad():
        runs = [(model.log_z() - estimate(model, method, budget)).expm1().abs() for _ in range(REPEATS)]
    return torch.stack(runs).mean().item()


models = {dim: near_identity(dim) for dim in (50, 100, 200)}
print(f"Table A.3: error rate of |det W| with M evaluations, W = I + 0.003 G, mean over {REPEATS} runs")
print(f"{'':32}" + "".join(f"{f'D = {dim}':>12}" for dim in models))
for budget, paper in PAPER.items():
    print(f"{f'M = {budget}, importance (paper)':32}" + "".join(f"{rate:12.6f}" for rate in paper))
    for method in ("importance", "lanczos", "lanczos, products alone"):
        rates = [error_rate(model, method, budget) for model in models.values()]
        print(f"{f'M = {budget}, {method}':32}" + "".join(f"{rate:12.6f}" for rate in rates), flush=True)
