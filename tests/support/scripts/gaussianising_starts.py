"""What one of two processes finds of the starts on its own rows. Usage: torchrun … gaussianising_starts.py folder."""

import sys
from pathlib import Path

import torch
from nflows import distributions, flows, transforms
from torch import distributed

import ebflow_plugin as ebf
from ebflow_nflows import FullLinear, SinhArcsinh


def rows(rank, world):
    noise = torch.randn(4000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).sinh()
    return (noise @ (torch.eye(3).double() + 0.4) + 5.0)[rank::world]


def start(rank=0, world=1):
    found = {}
    for name in ("whiten", "gaussianize"):
        layers = [transforms.ActNorm(3), FullLinear(3), SinhArcsinh(3), transforms.ActNorm(3), FullLinear(3)]
        flow = flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([3])).double()
        report = ebf.wrap(flow).initialize(rows(rank, world).split(300), **{name: True})
        found[name] = {key: value.detach() for key, value in flow.state_dict().items()}
        found[f"{name} nll"] = None if report is None else report.nll
    return found


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.save(start(rank, distributed.get_world_size()), Path(sys.argv[1]) / f"found-{rank}.pt")
    distributed.destroy_process_group()
