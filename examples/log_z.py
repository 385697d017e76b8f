"""Log Z without a factorisation: importance sampling, as in the paper, beside Lanczos.

    python examples/log_z.py              # about 10 seconds on one core

First W = I + s G with G standard normal. With s = 0.003 importance sampling from N(0, I) has errors of the size of
the paper's Table A.3 (`ebflow reproduce tableA3`); with s = 0.03 it is lost with 20,000 energies, and says so, where
Lanczos takes 2,000 products. Lanczos knows the sum of the squares of W's entries too, which takes out variance;
"products alone" is without. Then a convolution with D = 49,152, whose dense matrix nobody can hold.
"""

import os
import time
import warnings

import torch
from nflows import distributions, flows

import ebflow_plugin as ebf
from ebflow_nflows import FullConv2d, FullLinear
from ebflow_plugin.linalg.dense import Dense
from ebflow_plugin.log_z.lanczos import log_abs_det

SIDE = 16 if os.environ.get("EBFLOW_SMOKE") else 128
LANCZOS = {"probes": 31, "iterations": 32}
generator = torch.Generator().manual_seed(0)


class ProductsAlone(Dense):
    """W, of which nothing but products is known."""

    def sum_of_squares(self) -> None: ...  # noqa: D102


@torch.no_grad()
def show(model: ebf.EBFlow, method: str, **options: object) -> None:
    """Prints log Z, with the standard error of an estimate, how it was found, and how long it took."""
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if method == "products alone":
            found = log_abs_det(ProductsAlone(model.flow._transform.weight), **options)
            value, error = -float(found.value), float(found.std_error)
        else:
            found = model.log_z(method=method, **options)
            value, error = float(found), found.std_error if isinstance(found, ebf.Estimate) else 0.0
    print(f"{method:14} {value:9.4f} ± {error:.4f} {time.perf_counter() - start:6.2f} s{'  (warned)' * bool(caught)}")


for scale in (0.003, 0.03):
    linear = FullLinear(200, bias=False, dtype=torch.float64)
    linear.weight.data += scale * torch.randn(200, 200, generator=generator, dtype=torch.float64)
    model = ebf.wrap(flows.Flow(linear, distributions.StandardNormal([200])))
    print(f"log Z of W = I + {scale} G, D = 200")
    show(model, "exact")
    show(model, "importance", samples=20_000, generator=generator)
    show(model, "lanczos", generator=generator, **LANCZOS)
    show(model, "products alone", generator=generator, **LANCZOS)

conv = FullConv2d(3, kernel_size=3)
conv.weight.data += 0.1 * torch.randn(conv.weight.shape, generator=generator) / 27**0.5
model = ebf.wrap(flows.Flow(conv, distributions.StandardNormal([3, SIDE, SIDE])))
dim = 3 * SIDE**2
print(f"\nlog Z of a 3 x 3 convolution, D = 3 x {SIDE} x {SIDE} = {dim:,}: dense, {dim**2 * 8 / 1e9:.3g} GB")
show(model, "lanczos", generator=generator)  # for any linear map
show(model, "exact")  # by the band structure of zero padding, which few maps have
