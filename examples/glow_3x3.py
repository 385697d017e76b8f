"""A Glow of normflows, as in its own tutorial, made better: 3 x 3 convolutions in the place of its 1 x 1 ones.

Likelihood without determinants makes them cheap. The new kernels are zero around the old ones, so the density is the
same at first; neighbouring pixels are alike, so kernels train at a tenth of the rate. Digits of 8 x 8 pixels.
"""

import os
import time
import warnings

import normflows as nf
import torch

import ebflow_plugin as ebf
from ebflow_examples.data import load

warnings.filterwarnings("ignore", ".*torch.lu is deprecated")  # in normflows
SECONDS = (
    0.5 if os.environ.get("EBFLOW_SMOKE") else float(os.environ.get("S", "60"))
)  # CPU seconds of training, for each model
DATA = load("digits")


def glow() -> nf.NormalizingFlow:
    """Eight blocks on squares of 2 x 2 pixels, from noise to data."""
    torch.manual_seed(0)
    blocks = [nf.flows.GlowBlock(4, 32, scale_map="sigmoid") for _ in range(8)]
    return nf.NormalizingFlow(nf.distributions.DiagGaussian((4, 4, 4), trainable=False), [*blocks, nf.flows.Squeeze()])


def train(model: ebf.EBFlow, log_det: str) -> int:
    """Adam with a cosine, for so many seconds; returns the number of steps."""
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


for name, flow, log_det in (("1 x 1", glow(), "exact"), ("3 x 3", ebf.unconstrain(glow(), kernel_size=3), "auto")):
    model = ebf.wrap(flow, preprocess=[ebf.Dequantize(DATA.levels), ebf.Rescale(-0.5, 0.5)])
    model.initialize(DATA.train[:256])
    start = -model.log_prob(DATA.test).mean().item()
    steps = train(model, log_det)
    nll = -model.log_prob(DATA.test).mean().item()
    print(f"{name}: exact test NLL {start:.2f} -> {nll:.2f} nats after {steps} steps in {SECONDS:.1f} s")
