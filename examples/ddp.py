"""Train on several processes with torchrun: the script is the same for one process and for many.

    torchrun --nproc-per-node 2 examples/ddp.py           # about 25 seconds on two cores
    python examples/ddp.py                                # the same in one process

`ebf.fit` sees torchrun's environment, shards the data, averages the gradients (of second-order losses too), starts
ActNorm once for all, and shows its progress in the first process. `batch_size` is per process. On GPUs, move first:
flow.to(f"cuda:{os.environ['LOCAL_RANK']}").
"""

import os

import torch
from nflows import distributions, flows, transforms
from nflows.nn import nets
from torch import distributed

import ebflow_plugin as ebf

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
STEPS = 4 if os.environ.get("EBFLOW_SMOKE") else 400
torch.manual_seed(0)  # each process makes the same data; fit gives each its share of them

corner = torch.randn(12_000, 2)
x = torch.stack([2.0 * corner[:, 0], corner[:, 0].square() + 0.5 * corner[:, 1]], dim=1)  # a banana
train, validation, test = x[:9_000], x[9_000:10_000], x[10_000:]

torch.manual_seed(RANK)  # another start in each process, to see that the first one's is given to all
layers: list[transforms.Transform] = []
for mask in ([0, 1], [1, 0]) * 2:
    coupling = transforms.AffineCouplingTransform(mask, lambda i, o: nets.ResidualNet(i, o, 32, None, 1, torch.tanh))
    layers += [transforms.ActNorm(2), transforms.LULinear(2), coupling]
flow = flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([2]))
model = ebf.wrap(flow)

adam = torch.optim.Adam(model.parameters(), lr=3e-3)
ssm = ebf.objectives.SSM(model)
result = ebf.fit(ssm, train, optimizer=adam, steps=STEPS, batch_size=256 // WORLD, validation=validation, ema=True)
result.load_best(model)

with torch.no_grad():
    mine = -model.log_prob(test).mean().item()
found = [mine] * WORLD
if WORLD > 1:  # the process group that fit made is still open
    distributed.all_gather_object(found, mine)
if RANK == 0:
    print(f"processes: {WORLD}, rows of a batch in each: {256 // WORLD}")
    first = result.history[0]
    print(
        f"exact validation NLL {first['nll']:.4f} at step {first['step']}, {result.best_nll:.4f} at {result.best_step}"
    )
    print(f"exact test NLL {mine:.4f}")
    print(f"the same in every process: {len(set(found)) == 1}")
