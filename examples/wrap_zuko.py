"""Wrap a zuko flow with a context, train it by score matching, and compare with the density that is known.

    python examples/wrap_zuko.py          # about 30 seconds on one core, on data made here

The flow is zuko's own MAF with full linear layers between: x given c, where both lie on a noisy curve. Beside the loss
stands the exact NLL of validation data, which score matching itself never computes.
"""

import os

import torch
import zuko
from torch import nn
from zuko.flows import MaskedAutoregressiveTransform
from zuko.lazy import Flow, UnconditionalDistribution

import ebflow_plugin as ebf
from ebflow_zuko import FullLinear

STEPS = 4 if os.environ.get("EBFLOW_SMOKE") else 800
torch.manual_seed(0)


def mean_of(c: torch.Tensor) -> torch.Tensor:
    """Where x lies for a context: three features of one number."""
    return torch.cat([c, c.square(), torch.sin(2 * c)], dim=1)


def draw(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws pairs (x, c): c ~ N(0, 1), x ~ N(mean(c), 0.3²)."""
    c = torch.randn(n, 1)
    return mean_of(c) + 0.3 * torch.randn(n, 3), c


train, validation, test = draw(20_000), draw(2_000), draw(5_000)
layers: list[nn.Module] = []
for _ in range(3):  # networks with tanh: SSM needs a score without jumps, and zuko has ReLU by default
    layers += [FullLinear(3, init="orthogonal"), MaskedAutoregressiveTransform(3, context=1, activation=nn.Tanh)]
base = UnconditionalDistribution(zuko.distributions.DiagNormal, torch.zeros(3), torch.ones(3), buffer=True)
flow = Flow(layers, base)

model = ebf.wrap(flow)  # the one call; `flow` stays as it is, and shares its parameters
print(model.report)
x, c = test
print(f"\n{len(ebf.verify(model, x[:8], c[:8]).checks)} checks of this model hold on its own data\n", flush=True)
with torch.no_grad():
    before = -model.log_prob(x, c).mean()
adam = torch.optim.Adam(model.parameters(), lr=3e-3)
ssm = ebf.objectives.SSM(model)
result = ebf.fit(ssm, train, steps=STEPS, batch_size=512, optimizer=adam, validation=validation, ema=True)
result.load_best(model)
with torch.no_grad():
    after, own = -model.log_prob(x, c).mean(), -flow(c).log_prob(x).mean()  # the same density, by either
known = -torch.distributions.Normal(mean_of(c), 0.3).log_prob(x).sum(1).mean()
print(
    f"exact test NLL {before:.3f} -> {after:.3f} nats (zuko's own log_prob: {own:.3f}), of the true density {known:.3f}"
)
