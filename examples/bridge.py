"""Four wells, of which reverse KL finds one: an annealed bridge of weighted likelihood finds them all.

    python examples/bridge.py             # about 40 seconds on one core

Reverse KL stays with the modes that the model has samples in, and so does likelihood of its weighted samples. The
bridge begins with a flat power of the target, f^0.02, which a wide model covers. Samples of the model are weighted for
the next power, and the model is fitted to them by likelihood (forward KL), until the power is one.
"""

import math
import os
import warnings
from functools import partial

import torch
from nflows import distributions, flows, transforms
from nflows.nn.nets import ResidualNet
from torch import Tensor

import ebflow_plugin as ebf
from ebflow_nflows import FullLinear

STEPS, ROWS = (2, 200) if os.environ.get("EBFLOW_SMOKE") else (100, 8192)
POWERS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.0)
CENTRES = torch.tensor([[4.0, 0.0], [0.0, 4.0], [-4.0, 0.0], [0.0, -4.0]], dtype=torch.float64)
SHARES = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
adam = partial(torch.optim.Adam, lr=5e-3)
warnings.simplefilter("ignore", ebf.EstimateWarning)  # an unreliable estimate has the error inf in its line


def log_density(x: Tensor) -> Tensor:
    """Normal densities of width ½ around four centres, of unequal shares: its log Z is zero."""
    distances = (x[:, None] - CENTRES).square().sum(2)
    return torch.logsumexp(SHARES.log() - 2.0 * distances - math.log(0.5 * math.pi), 1)


def new_model() -> ebf.EBFlow:
    """Two spline couplings between full layers."""
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    network = partial(ResidualNet, hidden_features=32, activation=torch.tanh)
    coupling = partial(transforms.PiecewiseRationalQuadraticCouplingTransform, tails="linear", tail_bound=6.0)
    steps = [FullLinear(2), *(coupling(mask, network, num_bins=12) for mask in ([1, -1], [-1, 1])), FullLinear(2)]
    return ebf.wrap(flows.Flow(transforms.CompositeTransform(steps), distributions.StandardNormal([2])).double())


def bridge(model: ebf.EBFlow, *powers: float) -> None:
    """Fits a model to its own samples, weighted for powers of the target."""
    for power in powers:
        drawn = ebf.importance(model, lambda x, power=power: power * log_density(x), ROWS)
        data = (drawn.samples, None, drawn.weights)
        ebf.fit(ebf.objectives.ML(model), data, steps=STEPS, batch_size=512, optimizer=adam, progress=False)


def report(title: str, model: ebf.EBFlow) -> None:
    """The log Z that samples of the model find, and the share of each well among them."""
    drawn = ebf.importance(model, log_density, ROWS)
    wells = torch.cdist(drawn.samples, CENTRES).argmin(1).bincount(minlength=4) / ROWS
    shares, z = " ".join(f"{share:.3f}" for share in wells.tolist()), drawn.log_z
    print(f"{title:18} log Z {z.value:6.3f} ± {z.std_error:.3f}, wells {shares}, Pareto k {drawn.pareto_k:.2f}")


print(f"{'exact':18} log Z  0.000, wells 0.400 0.300 0.200 0.100")
model = new_model()
ebf.fit(ebf.objectives.ReverseKL(model, log_density), steps=4 * STEPS, optimizer=adam, clip_norm=10.0, progress=False)
report("reverse KL", model)
bridge(model, 1.0, 1.0)
report("  and forward KL", model)
model = new_model()
bridge(model, *POWERS)
report("bridge, forward KL", model)
