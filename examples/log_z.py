"""Log Z without a factorisation: the paper's Table A.3, the same budget spent better, and D = 49,152 in a second.

The table of the paper has p_u = q = N(0, I) and g(x) = W x, and does not say what W is. With W = I + 0.003 G, G
standard normal, importance sampling has errors of the paper's size. Each figure here is a mean over 100 runs; the
paper's look like single ones.

Lanczos knows one thing more than products with W: the sum of the squares of W's entries, which takes O(D^2) once and
takes out the variance that is linear in the spectrum. The last row of each block shows it without.

Runs in about half a minute on a CPU.
"""

import os
import time
import warnings

import torch
from nflows import distributions, flows

import ebflow_plugin as ebf
from ebflow_nflows import FullConv2d, FullLinear
from ebflow_plugin.lanczos import log_abs_det

SMOKE = bool(os.environ.get("EBFLOW_SMOKE"))
REPEATS = 2 if SMOKE else 100
PRODUCTS = "lanczos, products alone"
DIMS, BUDGETS = (50, 100, 200), (50, 100, 200)
PAPER = {
    50: (0.004211, 0.099940, 0.355314),
    100: (0.003503, 0.034608, 0.076239),
    200: (0.002332, 0.015411, 0.011175),
}


def near_identity(dim: int, spread: float) -> ebf.EBFlow:
    """The paper's model, with W = I + spread · G."""
    layer = FullLinear(dim, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight += spread * torch.randn(
            dim, dim, generator=torch.Generator().manual_seed(dim), dtype=torch.float64
        )
    return ebf.wrap(flows.Flow(layer, distributions.StandardNormal([dim])))


def options(method: str, budget: int) -> dict[str, object]:
    """How to spend a budget of energies, gradients of the energy, or products with W and its transpose."""
    if method == "lanczos":
        return {"iterations": 3, "probes": budget // 6}
    if method == "ais":
        return {"steps": 5, "chains": budget // 5, "leapfrogs": 1, "step_size": 0.4}
    return {"samples": budget}


def error_rate(model: ebf.EBFlow, method: str, budget: int, generator: torch.Generator) -> float:
    """The mean of |d - d_est| / |d| over the runs, d the determinant, which is 1 / Z here."""
    with torch.no_grad():
        exact = model.log_z()
    if method == PRODUCTS:
        layer, chosen = model.flow._transform, options("lanczos", budget)
        found = (log_abs_det(layer.transform, (len(layer.weight),), layer.weight, **chosen) for _ in range(REPEATS))
        runs = [-run.value for run in found]
    else:
        runs = [model.log_z(method=method, generator=generator, **options(method, budget)) for _ in range(REPEATS)]
    return sum(abs(float((exact - run).exp()) - 1.0) for run in runs) / REPEATS


torch.manual_seed(0)
generator = torch.Generator().manual_seed(0)
models = {dim: near_identity(dim, 0.003) for dim in DIMS}
methods = ("importance", "ais", "lanczos", PRODUCTS)

print("Table A.3: error rate of |det W| with M evaluations, W = I + 0.003 G")
print(f"{'':32}" + "".join(f"{f'D = {dim}':>12}" for dim in DIMS))
for budget in BUDGETS:
    print(f"{f'M = {budget}, importance (paper)':32}" + "".join(f"{rate:12.6f}" for rate in PAPER[budget]))
    for method in methods:
        rates = [error_rate(models[dim], method, budget, generator) for dim in DIMS]
        print(f"{f'M = {budget}, {method}':32}" + "".join(f"{rate:12.6f}" for rate in rates))

print("\nlog Z where W is far from I (W = I + 0.03 G, D = 200): 20,000 evaluations, 2,000 for Lanczos")
hard = near_identity(200, 0.03)
with torch.no_grad():
    print(f"exact       {hard.log_z():8.3f}")
settings: dict[str, dict[str, object]] = {
    "importance": {"samples": 20_000},
    "ais": {"steps": 100, "chains": 50, "leapfrogs": 4, "step_size": 0.2},
    "lanczos": {"probes": 31, "iterations": 32},
}
for method, chosen in settings.items():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = hard.log_z(method=method, generator=generator, **chosen)
    size = f"   effective sample size {value.effective_sample_size:.1f}" if value.effective_sample_size else ""
    print(f"{method:11} {value:8.3f} ± {value.std_error:.3f}{size}{'   (warned)' if caught else ''}")

side = 16 if SMOKE else 128
conv = FullConv2d(3, kernel_size=3)
with torch.no_grad():
    conv.weight += 0.1 * torch.randn(conv.weight.shape, generator=generator) / 27**0.5
model = ebf.wrap(flows.Flow(conv, distributions.StandardNormal([3, side, side])))
dim = 3 * side * side
print(f"\nA 3 x 3 convolution, D = 3 x {side} x {side} = {dim:,}: the dense matrix needs {dim**2 * 8 / 1e9:.3g} GB")
for method in ("lanczos", "exact"):
    start = time.perf_counter()
    with torch.no_grad():
        value = model.log_z(method=method, **({"generator": generator} if method == "lanczos" else {}))
    note = "by the band structure of zero padding, which few maps have" if method == "exact" else "any linear map"
    print(f"{method:11} {value:8.3f} ± {value.std_error:.3f}   {time.perf_counter() - start:5.2f} s   {note}")
