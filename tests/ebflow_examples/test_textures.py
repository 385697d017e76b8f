"""Textures: their density and entropy are exact, and what stands on them (the demo, the race) is told the truth."""

import copy
import json
import math

import numpy as np
import pytest
import torch

import ebflow_plugin as ebf
from commands import ebflow
from ebflow_examples import demo
from ebflow_examples.config import TrainConfig
from ebflow_examples.data import OF_TEXTURES, load
from ebflow_examples.models import flow_for
from ebflow_examples.reproduce import common, race
from ebflow_examples.reproduce.common import CellResult, Options
from ebflow_examples.runs import Floor, build, standard_error
from ebflow_examples.textures import Textures
from ebflow_plugin.errors import InputError, TrainingError
from randomness import rng


@pytest.fixture(scope="module")
def truth():
    return Textures(side=8)


@pytest.fixture(scope="module")
def textures16():
    return load("textures16")


def matrices(truth):
    """The two convolutions as dense matrices, from what they do to unit vectors."""
    size = math.prod(truth.shape)
    units = torch.eye(size, dtype=torch.float64).reshape(-1, *truth.shape)
    return [layer.multiply(units).flatten(1).T for layer in (truth._first, truth._second)]


def test_the_density_is_the_change_of_variables(truth):
    x = truth.sample(6, rng())
    first, second = matrices(truth)
    bias = truth._first.bias.repeat_interleave(64)
    a = x.flatten(1) @ first.T + bias
    slope = 0.3 + 0.7 * torch.sigmoid(a)
    z = (0.3 * a + 0.7 * torch.nn.functional.softplus(a)) @ second.T
    expected = -0.5 * z.square().sum(1) - 96 * math.log(2 * math.pi) + slope.log().sum(1)
    expected += torch.linalg.slogdet(first)[1] + torch.linalg.slogdet(second)[1]
    torch.testing.assert_close(truth.log_prob(x), expected, rtol=1e-10, atol=1e-8)
    torch.testing.assert_close(truth.log_prob(x.flatten(1)), expected, rtol=1e-10, atol=1e-8)


def test_the_score_is_its_gradient(truth):
    x = truth.sample(4, rng()).requires_grad_()
    (expected,) = torch.autograd.grad(truth.model.log_prob(x).sum(), x)
    torch.testing.assert_close(truth.score(x.detach()), expected, rtol=1e-9, atol=1e-9)


def test_samples_have_the_density(truth):
    """Latents of samples are standard normal; by the density's own identity E[score] = 0 too."""
    x = truth.sample(4000, rng(1))
    (z,), _ = truth.model.plan.encode(x)
    assert abs(z.mean()) < 4 / math.sqrt(z.numel())
    assert abs(z.square().mean() - 1) < 4 * math.sqrt(2 / z.numel())
    score = truth.score(x).flatten(1)
    assert (score.mean(0).abs() < 5 * score.std(0) / math.sqrt(len(x))).all()


@pytest.mark.parametrize("side", [7, 8, 16])
def test_the_entropy_is_the_mean_nll_of_samples(side):
    truth = Textures(side)
    rows = truth.sample(1000, rng(2))
    nll = -truth.log_prob(rows)
    assert abs(float(nll.mean()) - truth.entropy()) < 4 * standard_error(nll)
    floor = Floor.of(truth, rows.flatten(1), nll)
    assert (floor.entropy, floor.gap, floor.gap_error) == pytest.approx((truth.entropy(), 0.0, 0.0), abs=1e-9)


def test_the_variances_in_the_entropy_are_those_of_the_inverse(truth):
    _, second = matrices(truth)
    expected = torch.linalg.inv(second).square().sum(1).sqrt().reshape(truth.shape)
    torch.testing.assert_close(truth._deviations(), expected, rtol=1e-9, atol=1e-12)


def test_a_density_needs_images_of_its_shape(truth):
    with pytest.raises(InputError, match=r"takes images of shape \(3, 8, 8\), got \(2, 3, 9, 9\)"):
        truth.log_prob(torch.zeros(2, 3, 9, 9))
    with pytest.raises(InputError, match="at least 7 pixels"):
        Textures(6)


def test_the_data_set(textures16):
    assert textures16.event_shape == (3, 16, 16)
    assert tuple(map(len, (textures16.train, textures16.validation, textures16.test))) == OF_TEXTURES
    assert textures16.levels is None
    assert not textures16.own_rows
    assert textures16.train.dtype == torch.float32
    assert abs(textures16.train.mean()) < 0.1
    again, other = load("textures16"), load("textures16", seed=1)
    assert torch.equal(again.test, textures16.test)
    assert not torch.equal(other.test, textures16.test)
    shown = textures16.pixels(textures16.test)
    assert shown.min() == 0
    assert shown.max() == 1
    assert 0.4 < shown.mean() < 0.6


def test_nothing_is_drawn_from_the_global_generator(truth):
    before = torch.random.get_rng_state()
    truth.sample(2, rng())
    Textures(8)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_built_in_model_can_be_the_truth(textures16):
    """The same steps; with its weights the gap to the floor is nothing but rounding."""
    flow, data = flow_for("cnn", textures16)
    model = ebf.wrap(flow.double())
    assert [row.class_name for row in model.report] == [row.class_name for row in data.truth.model.report]
    flow.load_state_dict(data.truth.model.flow.state_dict())
    gap, error = race.gap(model, data, data.test[:50].double())
    assert abs(gap) < 1e-8
    assert error < 1e-8


def test_a_run_on_textures_has_a_model_for_them():
    run = build(TrainConfig(data="textures16", device="cpu"))
    assert run.config.model == "cnn"
    assert len(run.model.plan.steps) == 3
    assert run.as_images(run.data.test[:2]).shape == (2, 3, 16, 16)


@pytest.mark.parametrize("option", [{"alpha": 0.1}, {"dequantize": "smooth"}])
def test_options_of_grey_levels_are_refused(option):
    with pytest.raises(InputError, match="is of images with grey levels, and textures16 has none"):
        build(TrainConfig(data="textures16", device="cpu", **option))


def test_a_race_gets_nearer_to_the_floor(textures16):
    _, found = race.run(race.CONTENDERS["dsm"], textures16, textures16.test[:50], 1.0, 3e-3, 0)
    curve = found["curve"]
    assert curve[0][0] == 0.0
    assert curve[-1] == (found["seconds"], found["above_floor"])
    assert found["seconds"] >= 1.0
    assert 0 < curve[-1][1] < 0.7 * curve[0][1]
    assert found["steps"] > 1
    _, first = race.run(race.CONTENDERS["ml"], textures16, textures16.test[:50], 0.01, 1e-2, 0)
    assert first["curve"][0] == curve[0]  # all start at the same model


def test_a_race_that_fails_says_so(textures16):
    with pytest.raises(TrainingError) as failed:
        race.run(race.CONTENDERS["dsm"], textures16, textures16.test[:5], 5.0, 1e30, 0)
    assert failed.value.__notes__ == ["It was DSM, with a rate of 1e+30."]


def test_the_demo(tmp_path):
    words = ebflow("demo", "--quick", "--out", tmp_path).stdout
    rows = json.loads((tmp_path / "demo.json").read_text())
    assert [row["objective"] for row in rows] == list(demo.RACE)
    assert "nats above the floor" in words
    assert (tmp_path / "demo.png").stat().st_size > 50_000
    assert "After as many steps the test NLL is" in words
    assert "banded 768 × 768 determinant" in words
    for row in rows:
        assert f"{row['above_floor']:,.0f} ± {row['error']:.0f}" in words
        assert row["start"] == rows[0]["start"]
    assert len(words.splitlines()) < 50


def row(objective, above, steps, spread=1.0):
    name = race.CONTENDERS[objective].name
    return {"objective": objective, "name": name, "above_floor": above, "steps": steps, "spread": spread}


def test_the_words_of_the_demo_follow_from_its_numbers():
    words = demo._finding([row("ml", 500.0, 20), row("dsm", 250.0, 200, 4.0), row("ml_stochastic", 1000.0, 100)])
    assert "DSM takes 10.0 times as many steps as exact ML, and ends 2.0 times as near to the floor." in words
    assert "ML without determinants takes 5.0 times as many steps as exact ML, and ends 2.0 times as far" in words
    assert "DSM gets them right last" in words
    assert "gets them right last" not in demo._finding([row("ml", 500.0, 20), row("dsm", 250.0, 200, 1.1)])
    assert "gets them right last" not in demo._finding([row("ml", 500.0, 20, 9.0), row("dsm", 250.0, 200, 4.0)])


def test_the_small_case_says_which_is_better():
    nll = torch.linspace(1, 2, 50, dtype=torch.float64)
    said = demo._verdict(nll, nll + 1.0, 1.5)
    assert "ML is better by 1.00 ± 0.00 nats" in said
    assert "1.5 times as fast" in said
    assert "no more than chance" in demo._verdict(nll, nll, 1.0)


def test_the_race_chooses_rates_on_validation_images_with_two_seeds(tmp_path, monkeypatch, textures16):
    calls = []

    def run(contender, data, rows, seconds, rate, seed):
        calls.append((rate, seconds, seed, rows))
        if rate == 1e-2:
            raise TrainingError("diverged")
        above = 1000 * abs(rate - 3e-3) + 1
        if (rate, seed, seconds) == (1e-3, 0, 2.0):
            above = 0.5  # by chance, with one seed
        model = copy.deepcopy(data.truth.model).float()
        return model, {"above_floor": above, "error": 0.1, "steps": 7, "seconds": seconds, "curve": [(0.0, 9.0)]}

    monkeypatch.setattr(race, "run", run)
    monkeypatch.setattr(race, "load", lambda name, seed: textures16)
    options = Options("race", 1.0, seeds=2, out=tmp_path, seconds=10.0, only=("dsm",))
    found = {each.cell.name: each for each in common.run(options, race)}
    searches = [(rate, 2.0, seed) for rate in race.RATES for seed in (0, 1)]
    assert [call[:3] for call in calls] == [*searches, (3e-3, 10.0, 0), (3e-3, 10.0, 1)]
    assert all(torch.equal(call[3], textures16.validation[:100]) for call in calls[:6])
    assert all(torch.equal(call[3], textures16.test[:250]) for call in calls[6:])
    assert found["dsm-rate0.01"].failed == "diverged"
    assert [found[f"dsm-seed{seed}"]["lr"] for seed in (0, 1)] == [3e-3, 3e-3]
    assert np.load(options.folder / "dsm-seed0.npy").shape == (race.SAMPLES, 3, 16, 16)


def test_the_report_of_the_race(tmp_path):
    options = Options("race", 1.0, seeds=2, out=tmp_path, quick=True)
    options.folder.mkdir(parents=True)
    found = []
    runs = [cell for cell in race.cells(options) if not cell.settings["search"]]
    for place, cell in enumerate(runs):
        above = 10.0 * (place % 5 + 1)
        curve = [(0.0, 100.0), (2.0, above)]
        result = {"above_floor": above, "error": 0.1, "lr": 1e-3, "steps": 5, "seconds": 2.0, "spread": 1.0}
        np.save(options.folder / f"{cell.name}.npy", np.zeros((race.SAMPLES, 3, 16, 16), dtype=np.float32))
        found.append(CellResult(cell, {**result, "curve": curve}))
    made = race.report(options, found, tmp_path / "race.png")
    assert [line[0] for line in made.grids[0].rows] == [each.name for each in race.CONTENDERS.values()]
    assert made.grids[0].rows[0][3:6] == ["78", "55", "10.0 ± 0.0"]
    assert abs(made.rows[0]["floor"] - Textures(16).entropy()) < 1e-9
    assert (tmp_path / "race.png").is_file()
