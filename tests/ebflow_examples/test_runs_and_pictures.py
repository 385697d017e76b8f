"""What is under the commands: configurations, likelihoods, masks, chains, and where the points of a picture are."""

import tomllib
from dataclasses import replace
from math import log, pi

import pytest
import torch
from nflows import distributions, flows, transforms

import ebflow_plugin as ebf
from ebflow_examples import plots
from ebflow_examples.config import TrainConfig, settings, to_toml
from ebflow_examples.console import exit_code, table
from ebflow_examples.data import DataSet
from ebflow_examples.defaults import objective_of, settle
from ebflow_examples.pictures import impute_rows, missing
from ebflow_examples.runs import Run, build, likelihood
from ebflow_examples.training import SCHEDULES, configuration, free_folder
from ebflow_plugin.errors import InputError, SingularError, TrainingError, UnknownNameError
from randomness import rng


def gaussian_images(count=40, levels=8):
    """A run on images of 2 x 2 pixels, with an untrained model."""
    rows = torch.randint(levels, (count, 4), generator=rng(0)).float()
    flow = flows.Flow(transforms.LULinear(4), distributions.StandardNormal([4]))
    model = ebf.wrap(flow, preprocess=[ebf.Dequantize(levels), ebf.Rescale(0.05, 0.95), ebf.Logit()])
    return Run(TrainConfig(), DataSet("noise", rows, rows, rows, levels=levels), model, (1, 2, 2))


def test_a_configuration_survives_its_file():
    config = TrainConfig(data='C:\\a "quoted" folder\n', sigma=1e-7, ema=False, whiten=True, steps=3, lr=3e-4)
    read = TrainConfig().updated(tomllib.loads(to_toml(config)))
    assert read == config


def test_every_setting_has_a_help_text_and_says_how_none_is_chosen():
    for name, each in settings().items():
        assert each.kind in (str, int, float, bool), name
        assert each.help.endswith("."), name
        assert bool(each.auto) == (each.default is None), name


def test_of_steps_and_epochs_the_later_word_holds():
    config = TrainConfig(epochs=3).updated({"steps": 5})
    assert (config.steps, config.epochs) == (5, None)
    config = config.updated({"epochs": 2})
    assert (config.steps, config.epochs) == (None, 2)


@pytest.mark.parametrize(
    ("values", "error"),
    [({"lr": "1"}, InputError), ({"steps": 1.5}, InputError), ({"steps": True}, InputError), ({"ema": 1}, InputError),
     ({"loss": "lss"}, UnknownNameError), ({"nothing": 1}, UnknownNameError)],
)  # fmt: skip
def test_a_configuration_refuses_what_does_not_fit(values, error):
    with pytest.raises(error):
        TrainConfig().updated(values)


def test_flags_come_before_the_file_and_the_file_before_the_run(tmp_path):
    run, file = tmp_path / "run", tmp_path / "own.toml"
    run.mkdir()
    begun = TrainConfig(model="fc", loss="ml", seed=1, clip_norm=1.0, patience=1, steps=1)
    (run / "config.toml").write_text(to_toml(begun))
    file.write_text("clip_norm = 2.0\npatience = 2\n")
    config = configuration({"clip_norm": 3.0}, file, run, resume=True)
    assert (config.clip_norm, config.patience, config.seed, config.loss) == (3.0, 2, 1, "ml")


def test_a_new_run_gets_a_folder_of_its_own(tmp_path, monkeypatch):
    first = free_folder(TrainConfig(), tmp_path)
    first.mkdir()
    (first / "config.toml").touch()
    assert [first.name, free_folder(TrainConfig(), tmp_path).name] == ["digits", "digits-2"]
    assert free_folder(TrainConfig(model="fc", loss="dsm"), tmp_path).name == "digits-fc-dsm"
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(InputError, match="agree on the folder"):
        free_folder(TrainConfig(), tmp_path)


def test_what_is_left_open_is_chosen_by_the_data():
    assert settle(build(TrainConfig(limit=300))).config.loss == "ml"
    run = settle(build(TrainConfig(limit=300, loss="dsm")))
    chosen = run.config
    assert (chosen.model, chosen.sigma, chosen.batch_size, chosen.calibrate, chosen.whiten) == (
        "deep", 0.2, 200, "full", True,
    )  # fmt: skip
    assert objective_of(run.model, chosen).sigma == 0.2
    assert chosen.gaussianize is True
    asked = settle(build(TrainConfig(loss="fdssm", gaussianize=False)))
    assert (asked.config.lr, asked.config.eps, asked.config.sigma) == (1e-4, 1.0, None)
    u, _ = asked.model.preprocess(asked.data.train, rng(0))
    white = asked.model.flow._transform._transforms[0](u)[0]
    assert (white.T.cov() - torch.eye(64)).abs().mean() < 0.05  # the noise of the dequantisation is another one
    assert settle(build(TrainConfig(linear="lu", limit=100))).config.whiten is False
    assert settle(build(TrainConfig(whiten=False, gaussianize=True, limit=300))).config.whiten is True
    with pytest.raises(InputError, match="whitening start needs a FullLinear"):
        settle(build(TrainConfig(whiten=True, linear="lu", limit=100)))


def test_schedules_begin_at_one_and_fall():
    assert [SCHEDULES["cosine"](share) for share in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 0.5, 0.0])
    assert [SCHEDULES["multistep"](share) for share in (0.0, 0.5, 0.75)] == pytest.approx([1.0, 0.1, 0.01])


def test_the_likelihood_is_that_of_a_gaussian_with_its_error():
    identity = flows.Flow(transforms.IdentityTransform(), distributions.StandardNormal([2]))
    rows = torch.randn(1200, 2, generator=rng(0))
    found = likelihood(ebf.wrap(identity), rows)
    values = 0.5 * rows.double().square().sum(1) + log(2 * pi)
    assert found.nll == pytest.approx(float(values.mean()), rel=1e-6)
    assert found.nll_error == pytest.approx(float(values.std()) / 1200**0.5, rel=1e-5)
    assert found.bits_per_dim == pytest.approx(found.nll / 2 / log(2))
    assert found.rows == 1200


def test_the_likelihood_of_dequantised_data_is_the_same_each_time():
    run = gaussian_images()
    assert likelihood(run.model, run.data.test, 3) == likelihood(run.model, run.data.test, 3)
    assert likelihood(run.model, run.data.test, 3) != likelihood(run.model, run.data.test, 4)


def test_masks_cover_the_side_that_they_name():
    chance = rng(0)
    shape = (3, 4, 6)
    assert missing("right", shape, 2, 0.5, chance)[..., 3:].all()
    assert not missing("right", shape, 2, 0.5, chance)[..., :3].any()
    assert missing("top", shape, 1, 0.25, chance)[:, :, :1].all()
    assert missing("bottom", shape, 1, 0.25, chance).float().mean() == 0.25
    drawn = missing("random", (3, 50, 50), 2, 0.3, chance)
    assert abs(float(drawn.float().mean()) - 0.3) < 0.03
    assert torch.equal(drawn[:, 0], drawn[:, 2])


def test_an_imputation_keeps_what_is_observed_and_shows_one_and_the_same_chain():
    run = gaussian_images()
    long, short = (impute_rows(run, 3, "left", share=0.5, steps=steps) for steps in (60, 100))
    for state in (*long.states.values(), *short.states.values()):
        assert torch.equal(state[~long.mask], long.truth[~long.mask])
    assert list(long.states) == [0, 10, 50, 60]
    assert torch.equal(long.states[0], short.states[0])
    assert torch.equal(long.states[10], short.states[10])  # both are still tuning their step size
    assert not torch.equal(long.states[60], long.states[0])
    with pytest.raises(InputError, match="has none"):
        impute_rows(replace(run, image_shape=None), 3, "left", share=0.5, steps=5)


def test_the_points_of_a_panel_lie_where_a_picture_shows_them():
    points = plots.Panel((0.0, 10.0), (3.0, 16.0)).points(3)
    picture = points.reshape(3, 3, 2)  # [row from below, column]
    assert picture[0, :, 0].tolist() == [0.5, 1.5, 2.5]
    assert picture[:, 0, 1].tolist() == [11.0, 13.0, 15.0]


def test_a_grid_of_images_has_them_row_by_row():
    pictures = torch.arange(3.0).reshape(3, 1, 1, 1).expand(3, 1, 2, 2) / 2
    sheet = plots.tiled(pictures, columns=2)
    assert sheet.shape == (5, 5)
    assert (sheet[0, 0], sheet[0, 3], sheet[3, 0], sheet[0, 2]) == (0.0, 0.5, 1.0, 1.0)


def test_tables_line_up():
    lines = table(("name", "ms", "remark"), [("a", "1.5", "fine"), ("longer", "10", "")], remarks=True).splitlines()
    assert lines[0] == "name     ms  remark"
    assert lines[2] == "a       1.5  fine"


def test_exit_codes_tell_failed_runs_from_bad_input():
    found = [exit_code(kind("why")) for kind in (TrainingError, SingularError, InputError, UnknownNameError, KeyError)]
    assert found == [1, 1, 2, 2, None]
