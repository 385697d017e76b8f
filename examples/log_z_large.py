"""Log Z where sampling fails and where a matrix does not fit: Lanczos beside the other ways.

    python examples/log_z_large.py        # about 10 seconds on one core

First W = I + 0.03 G, far enough from I that importance sampling from N(0, I) is lost (it says so) with 20,000
energies, where Lanczos takes 2,000 products. Then a convolution with D = 49,152, whose dense matrix nobody can hold.
"""

import os
import time
import warnings

import torch
from nflows import distributions, flows

import ebflow_plugin as ebf
from ebflow_nflows import FullConv2d, FullLinear

SIDE = 16 if os.environ.get("EBFLOW_SMOKE") else 128
generator = torch.Generator().manual_seed(0)


@torch.no_grad()
def show(model: ebf.EBFlow, method: str, **options: object) -> None:
    """Prints log Z, with the standard error of an estimate, how it was found, and how long it took."""
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = model.log_z(method=method, **options)
    error = f" ± {found.std_error:.3f}" if isinstance(found, ebf.Estimate) else ""
    warned = "   (warned)" if caught else ""
    print(f"{method:11} {float(found):9.3f}{error:10} {time.perf_counter() - start:5.2f} s{warned}", flush=True)


linear = FullLinear(200, bias=False, dtype=torch.float64)
linear.weight.data += 0.03 * torch.randn(200, 200, generator=generator, dtype=torch.float64)
model = ebf.wrap(flows.Flow(linear, distributions.StandardNormal([200])))
print("log Z of W = I + 0.03 G, D = 200")
show(model, "exact")
show(model, "importance", samples=20_000, generator=generator)
show(model, "lanczos", probes=31, iterations=32, generator=generator)

conv = FullConv2d(3, kernel_size=3)
conv.weight.data += 0.1 * torch.randn(conv.weight.shape, generator=generator) / 27**0.5
model = ebf.wrap(flows.Flow(conv, distributions.StandardNormal([3, SIDE, SIDE])))
dim = 3 * SIDE**2
print(f"\nlog Z of a 3 x 3 convolution, D = 3 x {SIDE} x {SIDE} = {dim:,}: dense, {dim**2 * 8 / 1e9:.3g} GB")
show(model, "lanczos", generator=generator)  # for any linear map
show(model, "exact")  # by the band structure of zero padding, which few maps have
