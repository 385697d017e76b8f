"""An objective of your own: denoising score matching with noise in pairs, which stays steady where DSM does not.

    python examples/own_objective.py      # about 15 seconds on one core, on data made here

DSM with a small sigma blurs little, and is nearly all noise: its variance grows with D / sigma^2. With x + sigma v and
x - sigma v together the large terms cancel. The expectation is the same but for the constant D / (2 sigma^2), there is
still no second derivative in x, and a step takes two scores. An Objective has the options of all others.
"""

import copy
import os

import torch
from nflows import distributions, flows, transforms
from torch import Generator, Tensor

import ebflow_plugin as ebf
from ebflow_nflows import FullLinear, SmoothLeakyReLU

STEPS, D, SIGMA = 4 if os.environ.get("EBFLOW_SMOKE") else 600, 10, 0.05
torch.manual_seed(0)


@ebf.register_objective("paired_dsm")
class PairedDSM(ebf.objectives.Objective):
    """(|s(x+)|^2 + |s(x-)|^2) / 4 + (s(x+) - s(x-)) v / (2 sigma), with x± = x ± sigma v and s the score."""

    def __init__(self, model: ebf.EBFlow, *, sigma: float, **common: object) -> None:
        super().__init__(model, **common)
        self.sigma = sigma

    def per_sample(self, plan: ebf.Plan, u: Tensor, context: Tensor | None, generator: Generator | None) -> Tensor:
        """The loss of each sample of u, the variable after the preprocessing, whose density the plan is of."""
        v = torch.randn(u.shape, generator=generator, dtype=u.dtype).to(u.device)
        ahead, after = (plan.score(u + move, context) for move in (self.sigma * v, -self.sigma * v))
        squares, slopes = ahead.square() + after.square(), (ahead - after) * v
        return (squares / 4 + slopes / (2 * self.sigma)).flatten(1).sum(1)


def make_model() -> ebf.EBFlow:
    """The paper's kind of flow."""
    steps = [FullLinear(D, init="orthogonal"), SmoothLeakyReLU(0.3), FullLinear(D, init="orthogonal")]
    return ebf.wrap(flows.Flow(transforms.CompositeTransform(steps), distributions.StandardNormal([D])))


with torch.no_grad():
    teacher, start = make_model(), make_model()
    train, test = teacher.sample(20_000), teacher.sample(5_000)
    truth = teacher.log_prob(test)
start.initialize(train, whiten=True)
for name, constant in (("dsm", D / (2 * SIGMA**2)), ("paired_dsm", 0.0)):
    model = copy.deepcopy(start)
    values = ebf.make_objective(name, model, sigma=SIGMA).losses(train).detach() - constant
    print(f"{name:10} loss {values.mean():7.3f} ± {values.std() / len(values) ** 0.5:.3f} at the start")
    before, adam = truth - model.log_prob(test), torch.optim.Adam(model.parameters(), lr=3e-3)
    objective = ebf.make_objective(name, model, sigma=SIGMA)
    ebf.fit(objective, train, steps=STEPS, optimizer=adam, ema=True, progress=False).ema.copy_to(model)
    after = truth - model.log_prob(test)
    print(f"{'':10} KL to the density of the data {before.mean():.3f} -> {after.mean():.3f}", flush=True)
