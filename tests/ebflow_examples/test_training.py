"""The optimiser of a run, and what importing the commands takes."""

import subprocess
import sys
from dataclasses import replace

from ebflow_examples.config import TrainConfig
from ebflow_examples.runs import build
from ebflow_examples.training import optimizer_for


def test_weight_decay_is_of_full_linear_layers_alone():
    run = build(TrainConfig(data="digits", model="glow", blocks=1, hidden=8, weight_decay=0.1, lr=1e-3))
    parameters = list(run.model.parameters())
    plain, decaying = optimizer_for(run)(parameters).param_groups
    assert (plain["weight_decay"], decaying["weight_decay"]) == (0.0, 0.1)
    names = {id(parameter): name for name, parameter in run.model.flow.named_parameters()}
    assert len(decaying["params"]) == 2  # a block at each of two levels
    assert all(names[id(each)].endswith("weight") and each.shape[2:] == (1, 1) for each in decaying["params"])
    assert len(plain["params"]) + 2 == len(parameters)
    without = replace(run, config=replace(run.config, weight_decay=0.0))
    assert [group["weight_decay"] for group in optimizer_for(without)(parameters).param_groups] == [0.0]


def test_kernels_have_a_rate_of_their_own_but_in_the_tables_of_the_paper():
    run = build(TrainConfig(data="digits", model="glow", blocks=1, hidden=8, kernel=3, weight_decay=0.1, lr=1e-3))
    parameters = list(run.model.parameters())
    plain, kernels = optimizer_for(run)(parameters).param_groups
    assert (plain["lr"], kernels["lr"]) == (1e-3, 1e-4)
    assert (plain["weight_decay"], kernels["weight_decay"]) == (0.0, 0.1)
    assert [tuple(each.shape[2:]) for each in kernels["params"]] == [(3, 3), (3, 3)]
    assert len(plain["params"]) + 2 == len(parameters)
    assert [group["lr"] for group in optimizer_for(run, one_rate=True)(parameters).param_groups] == [1e-3, 1e-3]


def test_lightning_is_imported_when_a_run_begins_and_by_nothing_else():
    """It takes seconds: not for --help, demo, inspect, eval, or fit()."""
    code = """
import sys
import torch
from nflows import distributions, flows, transforms
import ebflow_plugin as ebf
import ebflow_examples.cli, ebflow_examples.demo, ebflow_examples.pictures, ebflow_examples.runs
import ebflow_examples.targets, ebflow_examples.training
import ebflow_examples.reproduce.fig4, ebflow_examples.reproduce.timed
model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
x = torch.randn(20, 2)
ebf.fit(ebf.objectives.SSM(model), x, steps=2, validation=x, ema=True, progress=False).load_best(model)
print("lightning" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
