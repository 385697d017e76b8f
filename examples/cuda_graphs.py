"""A training step as a CUDA graph: one launch in the place of hundreds, for DSM and for SSM.

Small flows on a GPU are bound by the launches of their kernels (`ebflow bench launches` counts them). No step of ours
waits for the device, and so it can be captured. It needs CUDA: on other machines this script trains without graphs, and
says so. No time was measured on CUDA by us.

    python examples/cuda_graphs.py        # seconds on one core, without CUDA
"""

from collections.abc import Callable

import torch
from nflows import distributions, flows, transforms
from torch import Tensor

import ebflow_plugin as ebf
from ebflow_nflows import FullLinear, SmoothLeakyReLU

STEPS, ROWS, WARM_UP = 20, 64, 3
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build() -> ebf.EBFlow:
    """A flow of two dense layers, on the device."""
    steps = [FullLinear(8), SmoothLeakyReLU(0.3), FullLinear(8)]
    return ebf.wrap(flows.Flow(transforms.CompositeTransform(steps), distributions.StandardNormal([8])).to(device))


def step_of(objective: ebf.objectives.Objective, x: Tensor) -> Callable[[], Tensor]:
    """Loss, gradients and the optimiser's step on the batch in x; as a CUDA graph where there is CUDA."""
    optimizer = torch.optim.Adam(objective.parameters(), lr=0.01, capturable=device.type == "cuda")

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = objective(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if device.type != "cuda":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # the first steps allocate, and look once at what the flow is
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # draws from the global generator, which graphs know how to advance
        loss = step()

    return lambda: (graph.replay(), loss)[1]


print("CUDA graphs" if device.type == "cuda" else "no CUDA here: the same steps without graphs")
torch.manual_seed(0)
data = torch.randn(1000, 8, device=device) @ torch.randn(8, 8, device=device)
for objective in (ebf.objectives.DSM(build(), sigma=0.5), ebf.objectives.SSM(build())):
    x = data[:ROWS].clone()  # a graph reads its batch from the same memory each time
    step = step_of(objective, x)
    losses = []
    for _ in range(STEPS):
        x.copy_(data[torch.randint(len(data), (ROWS,), device=device)])
        losses.append(step().clone())
    first, last = torch.stack(losses)[[0, -1]].tolist()
    print(f"{type(objective).__name__}: loss {first:.2f} -> {last:.2f} in {STEPS} steps")
