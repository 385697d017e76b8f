"""Training by ML without determinants: metrics, resumed runs, and where it ends."""

import json
import warnings

import pytest
import torch
from nflows import distributions, flows, transforms

import ebflow_plugin as ebf
from ebflow_nflows import FullConv2d, FullLinear, SmoothLeakyReLU
from ebflow_plugin.objectives import ML
from ebflow_plugin.training import fit
from ebflow_plugin.training.progress import describe
from randomness import rng
from training_models import CrashError, crash_at, same, weights, without_timing


def images(rows=60):
    noise = torch.randn(rows, 2, 6, 6, generator=rng(0))
    return noise + 0.5 * noise.roll(1, 3)


def convolutional():
    steps = [FullConv2d(2, kernel_size=3), SmoothLeakyReLU(0.5), FullConv2d(2, kernel_size=3)]
    return ebf.wrap(flows.Flow(transforms.CompositeTransform(steps), distributions.StandardNormal([2, 6, 6])))


def dense():
    """A layer for which two iterations are not enough, so that it keeps an inverse."""
    layer = FullLinear(6)
    with torch.no_grad():
        layer.weight.copy_(torch.diag(torch.logspace(0, -4, 6)))
    return ebf.wrap(flows.Flow(layer, distributions.StandardNormal([6])))


def run(make, x, folder, callbacks=(), **options):
    model = make()
    objective = ML(model, log_det="stochastic", **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*did not converge|.*close to singular")
        result = fit(
            objective,
            x,
            steps=12,
            batch_size=20,
            validation=x,
            evaluate_every=2,
            checkpoint_every=2,
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
            checkpoint=folder,
            resume=True,
            callbacks=callbacks,
            progress=False,
        )
    return result, model


@pytest.mark.parametrize(
    ("make", "x", "options"),
    [(convolutional, images(), {}), (dense, torch.randn(60, 6), {"iterations": 2, "probes": 3})],
    ids=["chosen probes", "kept inverse"],
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, make, x, options):
    expected, model = run(make, x, tmp_path / "whole", **options)
    for step in (4, 8):
        with pytest.raises(CrashError):
            run(make, x, tmp_path / "parts", [crash_at(step)], **options)
    result, resumed = run(make, x, tmp_path / "parts", **options)
    assert without_timing(result.history) == without_timing(expected.history)
    assert same(weights(resumed), weights(model))
    if make is dense:
        assert expected.history[-1]["exact_log_dets"] >= 1


def test_metrics_show_the_solves_and_the_exact_nll(tmp_path):
    x = images()
    result, model = run(convolutional, x, tmp_path)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    shown = last["log_det"]
    assert set(shown) == {"_transform._transforms.0", "_transform._transforms.2"}
    for layer in shown.values():
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
        options = {"optimizer": lambda parameters: torch.optim.Adam(parameters, lr=2e-2), "progress": False}
        result = fit(ML(model, log_det=way), x, steps=300, batch_size=100, validation=x, ema=True, **options)
        found[way] = result.history[-1]["nll"]
    assert found["stochastic"] == pytest.approx(found["exact"], abs=0.05)
