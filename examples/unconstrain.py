"""Give a trained flow full linear layers in the place of its LU ones, with the same density, and go on training.

    python examples/unconstrain.py        # about 15 seconds on one core; scikit-learn's digits, D = 64

LU factors are there to make the determinant cheap. Score matching needs no determinant, so that they only cost: time,
since L and U are built anew at each step, and freedom, since no leading minor of the matrix can change its sign.
"""

import os
import time

import torch
from nflows import distributions, flows, transforms
from sklearn.datasets import load_digits

import ebflow_plugin as ebf
from ebflow_nflows import SmoothLeakyReLU

STEPS = 3 if os.environ.get("EBFLOW_SMOKE") else 500
torch.manual_seed(0)

digits = torch.tensor(load_digits().data, dtype=torch.float32)[torch.randperm(1797)]
train, test = digits[:1500], digits[1500:]
layers = [transforms.LULinear(64), SmoothLeakyReLU(0.3), transforms.LULinear(64)]
flow = flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([64]))


def wrap(flow: flows.Flow) -> ebf.EBFlow:
    """The model of images whose pixels are integers 0 to 16, by noise without jumps, which would bias SSM."""
    return ebf.wrap(flow, preprocess=[ebf.Dequantize(17, noise="smooth"), ebf.Rescale(0.05, 0.95), ebf.Logit()])


def train_by_ssm(flow: flows.Flow, label: str) -> None:
    """Trains, and prints the exact NLL of the test images."""
    model, start = wrap(flow), time.perf_counter()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    ssm = ebf.objectives.SSM(model)
    result = ebf.fit(ssm, train, steps=STEPS, batch_size=100, optimizer=adam, progress=False, ema=True)
    seconds = time.perf_counter() - start
    with result.ema.applied(), torch.no_grad():
        nll = -model.log_prob(test).mean()
    print(f"{label:34} NLL {nll:8.3f}   {1000 * seconds / STEPS:6.2f} ms a step", flush=True)


train_by_ssm(flow, f"LU, {STEPS} steps")
changes: list[ebf.Replaced] = []
full = ebf.unconstrain(flow, changes=changes)  # a copy; `flow` stays as it is
for path, old, new in changes:
    print(f"  {path}: {old} -> {new}")
x = torch.randn(100, 64)
with torch.no_grad():
    difference = (full.log_prob(x) - flow.log_prob(x)).abs().max() / flow.log_prob(x).abs().max()
print(f"  largest relative difference of log_prob {difference:.1e}")
train_by_ssm(flow, f"LU, {STEPS} steps more")
train_by_ssm(full, f"full, {STEPS} steps from the same")
