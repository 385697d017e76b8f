"""The optimiser of a run, what is said about its mass, and what importing the commands takes."""

import json
import subprocess
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from commands import ebflow
from ebflow_examples.config import TrainConfig
from ebflow_examples.defaults import settle
from ebflow_examples.runs import build
from ebflow_examples.training import covered, optimizer_for


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
    assert (plain["lr"], kernels["lr"]) == (1e-3, 1e-3 / 3)
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


def rows_of(tmp_path, dim=2, count=500):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((count, dim)))
    return tmp_path / "rows.npy"


def gaussian_run(tmp_path, loss, **shape):
    return settle(build(TrainConfig(data=str(rows_of(tmp_path, **shape)), model="fc", loss=loss, device="cpu")))


@pytest.mark.parametrize("loss", ["sm", "ssm", "dsm", "fdssm"])
def test_mass_far_from_the_data_is_told_after_score_matching(tmp_path, loss):
    run = gaussian_run(tmp_path, loss)
    good = covered(run)
    assert good["fine"]
    assert good["rows"] == len(run.data.test) // 2
    with torch.no_grad():
        next(run.model.flow.parameters()).mul_(0.1)  # samples are spread ten times as far
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is printed, and warns of nothing
        found = covered(run)
    assert not found["fine"]
    assert found["outside"] > 0.5
    assert "mass lies where there are no data" in found["advice"]


@pytest.mark.parametrize(("loss", "shape"), [("ml", {}), ("dsm", {"dim": 17}), ("dsm", {"count": 390})])
def test_coverage_is_not_asked_for_where_it_says_nothing(tmp_path, loss, shape):
    assert covered(gaussian_run(tmp_path, loss, **shape)) is None


def test_a_run_prints_coverage_beside_the_nll(tmp_path):
    told = ["--data", rows_of(tmp_path), "--model", "fc", "--out", tmp_path / "run", "--limit", 300]
    good = ebflow("train", *told, "--loss", "dsm", "--steps", 2).stdout
    assert "test NLL" in good
    assert "nothing to do: the samples lie where the data lie\n" in good
    bad = ebflow("train", *told, "--loss", "dsm", "--steps", 4, "--lr", 5, "--no-ema", "--no-whiten", "--fresh").stdout
    share = json.loads((tmp_path / "run" / "summary.json").read_text())["coverage"]["outside"]
    assert f"coverage        {share:.1%} of the samples are far from the data" in bad
    assert "(here: more --steps, --shrink, --latent-weight 1, or --loss ml)" in bad
    assert "coverage  " not in ebflow("train", *told, "--loss", "ml", "--steps", 2, "--fresh").stdout
