"""Training by ML without determinants: metrics, and where it ends. Resumed runs are in test_resuming.py."""

import pytest
import torch
from nflows import distributions, flows, transforms

import ebflow_plugin as ebf
from ebflow_nflows import FullConv2d, FullLinear, SmoothLeakyReLU
from ebflow_plugin.objectives import ML
from ebflow_plugin.training import fit
from ebflow_plugin.training.events import describe
from randomness import rng
from training_models import adam


def test_metrics_show_the_solves_and_the_exact_nll():
    noise = torch.randn(60, 2, 6, 6, generator=rng(0))
    x = noise + 0.5 * noise.roll(1, 3)
    steps = [FullConv2d(2, kernel_size=3), SmoothLeakyReLU(0.5), FullConv2d(2, kernel_size=3)]
    model = ebf.wrap(flows.Flow(transforms.CompositeTransform(steps), distributions.StandardNormal([2, 6, 6])))
    objective = ML(model, log_det="stochastic")
    result = fit(objective, x, steps=12, batch_size=20, validation=x, optimizer=adam(1e-2), progress=False)
    last = result.history[-1]
    assert set(last["log_det"]) == {"_transform._transforms.0", "_transform._transforms.2"}
    for layer in last["log_det"].values():
        assert layer["probes"] >= 1
        assert 1 <= layer["iterations"] <= 50
        assert 0 <= layer["residual"] <= 0.01
        assert layer["exact"] == 0
    assert last["exact_log_dets"] == 0
    with torch.no_grad():
        assert last["nll"] == pytest.approx(-model.log_prob(x).mean().item(), rel=1e-5)
    assert result.best_nll < result.start_nll


def test_what_did_not_converge_is_counted_in_words():
    assert describe({"loss": 1.0, "exact_log_dets": 3})[-1] == "3 log-dets exact (no convergence)"


def test_training_comes_to_where_exact_likelihood_does():
    x = torch.randn(400, 6, generator=rng(1)) @ torch.linspace(0.3, 2.0, 36).reshape(6, 6)
    x = x + torch.randn(400, 6, generator=rng(2))
    found = {}
    for way in ("exact", "stochastic"):
        model = ebf.wrap(flows.Flow(FullLinear(6), distributions.StandardNormal([6])))
        options = {"optimizer": adam(2e-2), "progress": False}
        result = fit(ML(model, log_det=way), x, steps=300, batch_size=100, validation=x, ema=True, **options)
        found[way] = result.history[-1]["nll"]
    assert found["stochastic"] == pytest.approx(found["exact"], abs=0.05)
