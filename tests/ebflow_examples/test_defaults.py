"""What is chosen: for few rows, a run without a calibration; in the plane, noise that shrinks."""

import json

import numpy as np
import pytest
import torch

import ebflow_plugin as ebf
from commands import ebflow, refused_at_length
from ebflow_examples.config import TrainConfig
from ebflow_examples.defaults import CALIBRATION_ROWS, NoisedML, objective_of, settle
from ebflow_examples.runs import build
from ebflow_plugin.errors import InputError


@pytest.mark.parametrize("count", [10, 12, 19, 23])
@pytest.mark.parametrize("dim", [1, 8])
def test_a_run_of_few_rows_does_without_a_calibration_and_says_so(tmp_path, count, dim):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((count, dim)))
    flags = ["--data", tmp_path / "rows.npy", "--out", tmp_path / "run", "--steps", 2]
    done = ebflow("train", *flags)
    tenth = count // 10
    if (count, dim) != (10, 8):  # nor is there a start in closed form that a calibration would go with
        words = f"few rows: {count - 2 * tenth} to train on, {tenth} to choose the best weights by, {tenth} to test;"
        assert f"{words} too few to calibrate, which needs 20" in done.stderr
    assert 'calibrate = "none"' in (tmp_path / "run" / "config.toml").read_text()
    for weights in ("best", "last", "average"):
        ebflow("eval", tmp_path / "run", "--weights", weights)
    ebflow("train", "--out", tmp_path / "run", "--resume", "--steps", 3)


def test_images_of_which_few_are_taken_are_few_rows_too(tmp_path):
    assert (
        "few rows: 7 to train on, 179 to choose"
        in ebflow("train", "--limit", 7, "--steps", 2, "--out", tmp_path).stderr
    )


def test_as_many_rows_as_a_calibration_needs_are_not_few(tmp_path):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((24, 2)))
    done = ebflow("train", "--data", tmp_path / "rows.npy", "--out", tmp_path / "run", "--steps", 2)
    assert "few rows" not in done.stderr
    assert 'calibrate = "full"' in (tmp_path / "run" / "config.toml").read_text()
    model = build(TrainConfig(data=str(tmp_path / "rows.npy"), model="fc", device="cpu")).model
    rows = torch.randn(CALIBRATION_ROWS, 2)
    model.calibrate(rows)
    with pytest.raises(InputError, match=f"at least {CALIBRATION_ROWS} data points"):
        model.calibrate(rows[1:])


def test_a_calibration_that_too_few_rows_are_asked_for_is_refused_before_the_work(tmp_path):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((15, 2)))
    flags = ["--data", tmp_path / "rows.npy", "--out", tmp_path / "run", "--calibrate", "full"]
    assert "needs at least 20 training rows, and" in refused_at_length("train", *flags)
    assert not (tmp_path / "run" / "config.toml").exists()
    assert "has 1 row to train on" in refused_at_length("train", *flags[:4], "--limit", 1)


@pytest.mark.parametrize("loss", [None, "dsm", "ssm", "fdssm"])
def test_score_matching_in_the_plane_has_noise_that_shrinks_and_matched_latents(loss):
    run = settle(build(TrainConfig(data="swirl", loss=loss, device="cpu")))
    config, objective = run.config, objective_of(run.model, run.config)
    assert (config.loss, config.steps, config.batch_size, config.lr) == (loss or "dsm", 8000, 256, 2e-3)
    if loss in ("ssm", "fdssm"):
        assert objective.weights == (0.9, 0.1)
        objective, likelihood = objective.terms
        assert likelihood.noise.option == objective.noise.option
    assert objective.noise.option == ebf.objectives.NoiseSchedule(end=0.375, steps=4800)
    assert objective.latent_weight == 1.0
    # The noise of the set is the last of the schedule: the points are those before it.
    assert torch.equal(run.data.train, run.data.clean)


def test_noise_shrinks_for_its_share_of_the_steps_that_there_are():
    def chosen(**options):
        return settle(build(TrainConfig(data="sine", loss="dsm", device="cpu", limit=2000, **options))).config

    assert chosen(steps=50).shrink == 30
    assert chosen(epochs=10, batch_size=100).shrink == 120
    assert chosen(steps=1).shrink == 1
    assert chosen(steps=50, shrink=7, latent_weight=0.0).to_dict()["shrink"] == 7


@pytest.mark.parametrize(
    ("options", "sigma"),
    [
        ({"loss": "dsm", "shrink": 0}, 0.375),
        ({"loss": "dsm", "sigma": 0.1}, 0.1),
        ({"loss": "ssm", "shrink": 0}, None),
        ({"loss": "sm"}, None),
        ({"loss": "ml"}, None),
    ],
)
def test_what_is_said_about_noise_holds(options, sigma):
    run = settle(build(TrainConfig(data="swirl", device="cpu", **options)))
    assert objective_of(run.model, run.config).state() == {}
    assert run.config.sigma == sigma
    assert run.config.latent_weight is None
    assert run.config.steps == 500
    assert torch.equal(run.data.train, run.data.clean) == (sigma == 0.375)


@pytest.mark.parametrize("sigma", [None, 0.375, ebf.objectives.NoiseSchedule(start=2.0, end=0.375, steps=3)])
def test_likelihood_beside_score_matching_is_that_of_points_with_noise(sigma):
    run = build(TrainConfig(data="swirl", model="glow", device="cpu", limit=50))
    x, added = run.data.train, 2.0 if isinstance(sigma, ebf.objectives.NoiseSchedule) else sigma or 0.0
    run.model.initialize(x)
    noised = x + added * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    likelihood = NoisedML(run.model, sigma)
    value = likelihood(x, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(value, -run.model.log_prob(noised).mean())
    assert likelihood.state().get("noise_step", 1) == 1


@pytest.mark.parametrize("loss", ["ssm", "dsm", "fdssm"])
def test_the_recipe_of_the_plane_can_be_compiled(loss):
    small = {"limit": 50, "steps": 5, "blocks": 1, "hidden": 8}  # tracing a block takes a second
    run = settle(build(TrainConfig(data="swirl", model="glow", loss=loss, device="cpu", **small)))
    x, plain, compiled = run.data.train[:8], objective_of(run.model, run.config), objective_of(run.model, run.config)
    compiled.compile(backend="eager")
    for _ in range(2):  # σ is another in the second step
        one, other = (each(x, generator=torch.Generator().manual_seed(1)) for each in (plain, compiled))
        torch.testing.assert_close(one, other)
    assert compiled.state() == plain.state()


def test_noise_shrinks_for_other_data_if_it_is_asked_for(tmp_path):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((200, 3)))
    told = TrainConfig(
        data=str(tmp_path / "rows.npy"), loss="ssm", sigma=0.2, shrink=4, latent_weight=0.5, device="cpu"
    )
    run = settle(build(told))
    assert objective_of(run.model, run.config).noise.option == ebf.objectives.NoiseSchedule(end=0.2, steps=4)
    plain = settle(build(TrainConfig(data=str(tmp_path / "rows.npy"), loss="dsm", device="cpu")))
    assert objective_of(plain.model, plain.config).noise.option == 0.1


def test_a_run_with_shrinking_noise_goes_on_with_the_schedule_that_it_began_with(tmp_path):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((500, 2)))
    told = ["--data", tmp_path / "rows.npy", "--model", "fc", "--loss", "dsm", "--sigma", 0.2, "--shrink", 6]
    ebflow("train", *told, "--schedule", "constant", "--steps", 4, "--out", tmp_path / "parts")
    parts = ebflow("train", "--out", tmp_path / "parts", "--resume", "--steps", 8, "--json")
    again = ["--config", tmp_path / "parts" / "config.toml", "--out", tmp_path / "whole", "--json"]
    whole = ebflow("train", *again)
    found, expected = json.loads(parts.stdout), json.loads(whole.stdout)
    assert (found["steps"], found["test"], found["coverage"]) == (8, expected["test"], expected["coverage"])


def test_a_longer_run_in_the_plane_keeps_the_schedule_that_was_chosen_for_it():
    run = settle(build(TrainConfig(data="sine", loss="dsm", device="cpu", limit=300, steps=50)))
    assert settle(build(run.config.updated({"steps": 500}))).config.shrink == 30


def test_likelihood_takes_its_log_determinants_as_told():
    model = ebf.wrap(build(TrainConfig(model="cnn", limit=50, blocks=1)).model.flow)
    made = objective_of(model, TrainConfig(loss="ml", log_det="stochastic"))
    assert (type(made), made.log_det) == (ebf.objectives.ML, "stochastic")
    assert objective_of(model, TrainConfig(loss="ml")).log_det == "exact"
