"""Wrap an nflows model, look at its steps, train it by score matching, and see the exact NLL fall.

    python examples/wrap_nflows.py        # about 40 seconds on one core, on data made here; a picture in runs/

Beside the loss stands the exact NLL of validation data, which score matching itself never computes.
"""

import math
import os
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from nflows import distributions, flows, transforms
from nflows.nn import nets

import ebflow_plugin as ebf

STEPS, SIDE = 4 if os.environ.get("EBFLOW_SMOKE") else 600, 4.5
torch.manual_seed(0)


def swirl(n: int) -> torch.Tensor:
    """The paper's Swirl: a spiral with Gaussian noise of 0.375 around it."""
    angle = math.pi * torch.rand(n).sqrt()
    return torch.stack([-angle * angle.cos(), angle * angle.sin()], dim=1) + 0.375 * torch.randn(n, 2)


def draw(panel: plt.Axes, model: ebf.EBFlow, title: str) -> float:
    """Draws the density, exactly normalised, and gives the NLL of the test data."""
    line = torch.linspace(-SIDE, SIDE, 200)
    with torch.no_grad():
        nll = -model.log_prob(test).mean().item()
        density = model.log_prob(torch.cartesian_prod(line, line)).exp().reshape(200, 200).T.numpy()
    panel.imshow(density, origin="lower", extent=(-SIDE, SIDE, -SIDE, SIDE), cmap="magma")
    panel.set(title=f"{title}: NLL {nll:.3f}")
    return nll


train, test, layers = swirl(20_000), swirl(5_000), []
for mask in ([0, 1], [1, 0]) * 3:  # networks with tanh: SSM needs a score without jumps
    coupling = transforms.AffineCouplingTransform(mask, lambda i, o: nets.ResidualNet(i, o, 32, None, 1, torch.tanh))
    layers += [transforms.ActNorm(2), transforms.LULinear(2), coupling]
flow = flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([2]))

model = ebf.wrap(flow)  # the one call; `flow` stays as it is, and shares its parameters
print(model.report)
model.initialize(train[:2_000])  # ActNorm
print(f"\n{len(ebf.verify(model, test[:8]).checks)} checks of this model hold on its own data\n", flush=True)
figure, (first, second, data) = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
before, ssm = draw(first, model, "before"), ebf.objectives.SSM(model)
adam = torch.optim.Adam(model.parameters(), lr=3e-3)
result = ebf.fit(ssm, train[2_000:], steps=STEPS, batch_size=512, optimizer=adam, validation=train[:2_000], ema=True)
result.load_best(model)
after = draw(second, model, f"{STEPS} steps of SSM")
data.hist2d(*test.T.numpy(), bins=60, range=[(-SIDE, SIDE)] * 2, cmap="magma")
data.set(title="test data", aspect="equal")
Path("runs").mkdir(exist_ok=True)
figure.savefig("runs/wrap_nflows.png", dpi=100)
print(f"exact test NLL {before:.3f} -> {after:.3f} nats; the picture is in runs/wrap_nflows.png")
