"""A Glow of normflows, as in its own tutorial, with 3 x 3 convolutions in the place of its 1 x 1 ones.

Likelihood without determinants makes them cheap. The new kernels are zero around the old ones, so the density is the
same at first. Neighbouring pixels are alike, so a k x k kernel trains at 1/k of the rate (`parameter_groups`). The
data are textures of known density, 3 x 16 x 16, made on the spot.

    python examples/glow_3x3.py    # some two minutes on one core
"""

import os
import time
import warnings

import normflows as nf
import torch

import ebflow_plugin as ebf
from ebflow_examples.data import load

warnings.filterwarnings("ignore", ".*torch.lu is deprecated")  # in normflows
SECONDS = 0.5 if os.environ.get("EBFLOW_SMOKE") else 60.0  # CPU seconds of training, for each model
DATA = load("textures16")


def glow() -> nf.MultiscaleFlow:
    """Two levels of four blocks, from noise to data, as in the tutorial of normflows."""
    torch.manual_seed(0)
    shapes = [(24, 4, 4), (6, 8, 8)]  # of the noise of each level
    bases = [nf.distributions.DiagGaussian(shape, trainable=False) for shape in shapes]
    flows = [[*(nf.flows.GlowBlock(channels, 32) for _ in range(4)), nf.flows.Squeeze()] for channels in (24, 12)]
    return nf.MultiscaleFlow(bases, flows, [nf.flows.Merge()], class_cond=False)


def train(model: ebf.EBFlow, log_det: str) -> int:
    """Adam, at a rate that falls to zero in so many seconds; returns the number of steps."""
    objective = ebf.objectives.ML(model, log_det=log_det)
    optimizer = torch.optim.Adam(ebf.parameter_groups(model, 3e-3))
    began, share, steps = time.process_time(), 0.0, 0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: max(0.0, 1.0 - share))
    while share < 1.0:
        optimizer.zero_grad()
        objective(DATA.train[torch.randint(len(DATA.train), (64,))]).backward()
        optimizer.step()
        schedule.step()
        share, steps = (time.process_time() - began) / SECONDS, steps + 1
    return steps


assert DATA.truth is not None
floor = -DATA.truth.log_prob(DATA.test.double()).mean().item()
for name, flow, log_det in (("1 x 1", glow(), "exact"), ("3 x 3", ebf.unconstrain(glow(), kernel_size=3), "auto")):
    model = ebf.wrap(flow)
    model.initialize(DATA.train[:256])
    start = -model.log_prob(DATA.test).mean().item() - floor
    steps = train(model, log_det)
    above = -model.log_prob(DATA.test).mean().item() - floor
    print(f"{name}: {start:.1f} -> {above:.1f} nats above the best possible, {steps} steps in {SECONDS:.1f} s")
