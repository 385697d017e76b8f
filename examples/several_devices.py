"""Train in Lightning, on one device or several; a run that was killed or stopped goes on when it is started again.

    python examples/several_devices.py                                    # about 20 seconds on one core
    torchrun --nproc-per-node 2 examples/several_devices.py               # the same in two processes

`trainer` is a Trainer of Lightning with checkpoints that survive a kill at any moment, averaged weights, the exact NLL
and guards; `Loader` knows its place in the data, and gives each process its part of every batch.
"""

import logging
import os

import torch
from lightning.pytorch import seed_everything
from nflows import distributions, flows, transforms
from nflows.nn import nets

import ebflow_plugin as ebf
from ebflow_plugin.lightning import LitObjective, Loader, trainer

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
STEPS = 4 if os.environ.get("EBFLOW_SMOKE") else 400
FOLDER = "runs/several_devices"
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
seed_everything(0, verbose=False)  # each process makes the same data and the same model

corner = torch.randn(12_000, 2)
x = torch.stack([2.0 * corner[:, 0], corner[:, 0].square() + 0.5 * corner[:, 1]], dim=1)  # a banana
train, validation, test = x[:9_000], x[9_000:10_000], x[10_000:]

layers: list[transforms.Transform] = []
for mask in ([0, 1], [1, 0]) * 2:
    coupling = transforms.AffineCouplingTransform(mask, lambda i, o: nets.ResidualNet(i, o, 32, None, 1, torch.tanh))
    layers += [transforms.ActNorm(2), transforms.LULinear(2), coupling]
flow = flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([2]))
model = ebf.wrap(flow)

module = LitObjective(ebf.objectives.SSM(model), lambda parameters: torch.optim.Adam(parameters, lr=3e-3))
run = trainer(
    FOLDER,
    steps=STEPS,
    ema=True,
    devices=WORLD,
    strategy="ddp_find_unused_parameters_true" if WORLD > 1 else "auto",
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    enable_progress_bar=False,
)
loaders = Loader(train, 256 // WORLD), Loader(validation, 500, shuffle=False)
run.fit(module, *loaders, ckpt_path=run.checkpoint_callback.last)  # None if there is no checkpoint yet

if RANK == 0:
    best = ebf.load_best(model, FOLDER)
    with torch.no_grad():
        nll = -model.cpu().log_prob(test).mean().item()
    print(f"processes: {WORLD}, rows of a batch in each: {256 // WORLD}")
    print(f"best exact validation NLL {best['nll']:.4f} at step {best['step']} of {run.global_step}")
    print(f"exact test NLL {nll:.4f}; start the script again, with more STEPS, and it goes on")
