"""The commands, as a user types them, on small models."""

import json
import subprocess
import sys
import tomllib

import numpy as np
import pytest
import torch

from commands import ebflow, refused
from ebflow_examples import config, console, data, models, pictures, training
from ebflow_examples.cli import app
from ebflow_examples.runs import build, fingerprint
from ebflow_plugin.objectives.registration import OBJECTIVES

SMALL = ["--steps", "4", "--batch-size", "20", "--limit", "200", "--evaluate-every", "2"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits"
    ebflow("train", "--loss", "dsm", "--out", folder, *SMALL)
    return folder


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "plane"
    ebflow("train", "--data", "swirl", "--loss", "ssm", "--out", folder, "--threads", "1", *SMALL)
    return folder


@pytest.fixture
def own_models(tmp_path, monkeypatch):
    """A module of the user's in the present folder."""
    code = """
from types import SimpleNamespace
from nflows import distributions, flows, transforms

def make(layer=None):
    return flows.Flow(layer or transforms.LULinear(4), distributions.StandardNormal([4]))

def refused():
    return make(transforms.BatchNorm(4))

def splines():
    from nflows.transforms import PiecewiseRationalQuadraticCDF as Spline
    return make(transforms.CompositeTransform([transforms.LULinear(4), Spline([4], tails="linear")]))

def cube():
    from nflows.transforms import PiecewiseRationalQuadraticCDF as Spline
    return make(Spline([4]))

def needs(argument):
    return argument

holder = SimpleNamespace(flow=make())
number = 3
"""
    (tmp_path / "users_models.py").write_text(code)
    (tmp_path / "users_broken.py").write_text("import no_such_package")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("users_models", "users_broken"):
        sys.modules.pop(name, None)


def test_help_and_version_import_nothing_heavy():
    code = (
        "import sys; from ebflow_examples.cli import app; app(['train', '--help'], standalone_mode=False);"
        "print('heavy:', *{'torch', 'matplotlib', 'nflows', 'sklearn', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("heavy:")
    done = subprocess.run(
        [sys.executable, "-m", "ebflow_examples", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("ebflow ")


def test_every_command_teaches_by_example():
    listed = ebflow("--help").output
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        assert name in listed
        assert f"ebflow {name}" in ebflow(name, "--help").output


def test_what_the_help_lists_is_what_there_is():
    assert config.CHOICES["linear"] == models.LINEAR
    assert set(config.CHOICES["loss"]) <= set(OBJECTIVES)
    assert config.CHOICES["schedule"] == tuple(training.SCHEDULES)
    assert config.CHOICES["optimizer"] == tuple(training.OPTIMISERS)
    text = ebflow("train", "--help").output
    for name in (*data.NAMES, *models.MODELS, *(f"--{key.replace('_', '-')}" for key in config.settings())):
        assert name in text, name


def test_inspect_finds_models_of_the_users_own(own_models):
    assert "LULinear" in ebflow("inspect", "users_models:make").output
    assert "LULinear" in ebflow("inspect", "users_models.py:holder.flow").output
    found = json.loads(ebflow("inspect", "users_models:make", "--json").stdout)
    assert found["steps"][0]["linearity"] == "linear"
    assert "couples the samples" in ebflow("inspect", "users_models:refused", code=2).stdout


def test_inspect_builds_models_for_data_and_shapes():
    assert "784 × 784 determinant" in ebflow("inspect", "fc").output
    assert "(MaP)" in ebflow("inspect", "fc", "--data", "digits").output


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("users_models:mak", "Did you mean 'make'"),
        ("users_models:needs", "called without arguments"),
        ("users_broken:flow", "No module named 'no_such_package'"),
        ("no_such_module:flow", "cannot be imported"),
        ("no_such_file.py:flow", "there is no file"),
        ("users_models:", "is no package.module:name"),
        ("gloww", "Did you mean 'glow'"),
    ],
)
def test_inspect_says_in_a_line_what_is_wrong(own_models, target, words):
    assert words in refused("inspect", target)


def test_a_run_can_be_made_again_from_its_own_configuration(digits, tmp_path):
    again = tmp_path / "again"
    ebflow("train", "--config", digits / "config.toml", "--out", again)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (digits, again)]
    assert summaries[0]["test"] == summaries[1]["test"]
    assert summaries[0]["versions"]["torch"] == torch.__version__
    settings = tomllib.loads((again / "config.toml").read_text())
    assert (settings["model"], settings["sigma"], settings["steps"]) == ("deep", 0.2, 4)


def test_a_run_goes_on_and_flags_override_the_file(tmp_path):
    out = tmp_path / "run"
    ebflow("train", "--out", out, *SMALL, "--loss", "ml", "--schedule", "constant")
    assert "holds a run already" in refused("train", "--out", out)
    done = json.loads(ebflow("train", "--out", out, "--resume", "--steps", 6, "--json").stdout)
    assert (done["steps"], done["loss"]) == (6, "ml")
    whole = tmp_path / "whole"
    ebflow("train", "--config", out / "config.toml", "--out", whole)
    assert json.loads((whole / "summary.json").read_text())["test"] == done["test"]
    before = (out / "config.toml").read_text()
    for flag, words in (
        (["--loss", "dsm"], "begun with loss ml, and would be another run with dsm"),
        (["--activation", "relu"], "begun with activation its default, and would be another run with relu"),
        (["--alpha", "0.01"], "begun with alpha its default"),
        (["--temperature", "0.5"], "begun with temperature its default"),
        (["--no-map"], "begun with map True"),
        (["--seed", 1], "begun with seed 0, and would be another run with 1"),
        (["--data", "swirl"], "begun with data digits"),
        (["--limit", 100], "begun with limit 200"),
        (["--lr", 0.1], "begun with lr"),
        (["--calibrate", "none"], "begun with calibrate full"),
        (["--model", "cnn"], "begun with model deep"),
    ):
        assert words in " ".join(refused("train", "--out", out, "--resume", *flag).split())
    assert (out / "config.toml").read_text() == before
    assert json.loads((out / "summary.json").read_text())["steps"] == 6


def test_an_interrupted_run_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "run_trainer", interrupt)
    done = ebflow("train", "--out", tmp_path / "run", *SMALL, code=130)
    assert "--resume` begins again" in done.stderr
    (tmp_path / "run" / "step-00000010.ckpt").touch()
    done = ebflow("train", "--out", tmp_path / "run", "--fresh", *SMALL, code=130)
    assert "--resume` goes on" in done.stderr


def test_a_run_that_diverges_fails_with_another_exit_code(tmp_path):
    done = ebflow("train", "--out", tmp_path / "run", *SMALL, "--lr", "1e30", "--schedule", "constant", code=1)
    assert "is not finite" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--loss", "smm"], "Did you mean 'sm'"),
        (["--data", "digitz"], "Did you mean 'digits'"),
        (["--model", "glo"], "Did you mean 'glow'"),
        (["--lr", "-1"], "lr must be a positive number"),
        (["--batch-size", "0"], "batch_size must be an integer"),
        (["--steps", "2", "--epochs", "2"], "choose one"),
        (["--device", "cuda:99"], "cannot be used"),
        (["--resume"], "--resume needs the folder"),
        (["--alpha", "0.7"], "alpha must lie between"),
        (["--config", "nowhere.toml"], "cannot be read"),
    ],
)
def test_train_says_in_a_line_what_is_wrong(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert words in refused("train", *arguments)
    assert not list(tmp_path.rglob("config.toml"))


@pytest.mark.parametrize(
    ("text", "words"),
    [('losss = "ssm"', "Did you mean 'loss'"), ("lr = 'fast'", "lr must be a number"), ("lr = ", "is no TOML file")],
)
def test_a_configuration_says_in_a_line_what_is_wrong(tmp_path, text, words):
    (tmp_path / "run.toml").write_text(text)
    assert words in refused("train", "--config", tmp_path / "run.toml")


def test_eval_agrees_with_the_summary_and_reads_all_weights(digits):
    summary = json.loads((digits / "summary.json").read_text())
    found = json.loads(ebflow("eval", digits, "--json").stdout)
    assert found["nll"] == pytest.approx(summary["test"]["nll"], rel=1e-6)
    assert found["bits_per_dim"] == pytest.approx(found["nll"] / 64 / np.log(2))
    assert "± " in ebflow("eval", digits, "--weights", "last", "--split", "validation").stdout
    assert "average weights, step 4, calibrated" in ebflow("eval", digits, "--weights", "average").stdout
    assert "entropy" not in found


def test_eval_prints_the_gap_to_a_known_entropy(plane):
    found = json.loads(ebflow("eval", plane, "--json").stdout)
    known = data.load("swirl")
    true_nll = -float(known.truth.log_prob(known.test.double()).mean())
    assert found["entropy"] == pytest.approx(4.1394, abs=1e-4)
    assert found["gap"] == pytest.approx(found["nll"] - true_nll, abs=1e-5)
    assert found["gap"] == pytest.approx(found["nll"] - found["entropy"], abs=4 * found["nll_error"])
    assert 0 < found["gap_error"] < found["gap"]
    lines = ebflow("eval", plane).stdout.splitlines()
    assert lines[3] == "entropy   4.1394 nats, the least that any model can have"
    assert lines[4].startswith(f"gap       {found['gap']:.4f} ± {found['gap_error']:.4f} nats: ")


def test_pictures_of_images(digits, tmp_path):
    ebflow("sample", digits, "-n", 5)
    assert np.load(digits / "samples.npy").shape == (5, 64)
    assert (digits / "samples.png").exists()
    done = ebflow("impute", digits, "-n", 2, "--steps", 12, "--mask", "random", "--out", tmp_path / "strip.png")
    assert "mean training image" in done.stdout
    assert (tmp_path / "strip.png").exists()
    assert "two dimensions" in refused("density", digits)


def test_pictures_of_the_plane(plane, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "GRID", 6)
    ebflow("density", plane, "--out", tmp_path)
    assert (tmp_path / "density.png").exists()
    ebflow("sample", plane, "-n", 50)
    assert np.load(plane / "samples.npy").shape == (50, 2)
    assert "pixels are imputed" in refused("impute", plane)


def test_a_folder_that_is_no_run_says_what_is_missing(tmp_path):
    assert "there is no folder" in refused("eval", tmp_path / "nowhere")
    assert "has no config.toml" in refused("sample", tmp_path)
    for text, words in (("", "is empty"), ('data = "digits"\nmodel = "fc"\n', "is not whole: it lacks linear")):
        (tmp_path / "config.toml").write_text(text)
        assert words in " ".join(refused("eval", tmp_path).split())
        assert words in " ".join(refused("train", "--out", tmp_path, "--resume", "--steps", 3).split())
    run = build(config.TrainConfig(model="fc", loss="ml"))
    (tmp_path / "config.toml").write_text(config.to_toml(run.config))
    assert "does not say which rows" in refused("eval", tmp_path)
    (tmp_path / "data.sha256").write_text(fingerprint(run.data))
    assert "holds no best weights" in refused("eval", tmp_path)
    assert "holds no checkpoint" in refused("eval", tmp_path, "--weights", "last")


def test_profile_measures_every_objective_and_says_which_to_use(own_models):
    found = json.loads(
        ebflow("profile", "users_models:splines", "--seconds", "0.1", "--batch-size", 8, "--json").stdout
    )
    costs = {cost["objective"]: cost for cost in found["costs"]}
    assert costs["dsm"]["milliseconds"] > 0
    assert costs["dsm"]["megabytes"] > 0
    assert costs["dsm"]["usable"]
    assert "score jumps" in costs["ssm"]["remark"]
    assert costs["ml relative"]["milliseconds"] is None
    assert "NLL, samples: use ml" in found["recommendation"]  # no determinant is large here
    assert "Score, denoising: use dsm" in found["recommendation"]
    assert "ssm" not in found["recommendation"].replace("fdssm", "")  # biased on this model
    done = ebflow("profile", "users_models:cube", "--seconds", "0.1", code=2)  # takes [0, 1] alone
    assert "dsm: refused: InputOutsideDomain" in done.stderr
    assert "batch-size must be at least 1" in refused("profile", "fc", "--shape", 4, "--batch-size", 0)


def test_few_images_train(tmp_path):
    rows = np.random.default_rng(0).integers(0, 256, (60, 1, 8, 8), dtype=np.uint8)
    np.save(tmp_path / "few.npy", rows)
    done = ebflow("train", "--data", tmp_path / "few.npy", "--steps", 2, "--out", tmp_path / "run", "--json")
    assert json.loads(done.stdout)["steps"] == 2
    refused = ebflow("sample", tmp_path / "run", "--out", tmp_path / "picture.txt", code=2)
    assert "picture.txt" in refused.stderr
    assert not (tmp_path / "picture.npy").exists()


def test_json_is_strict():
    text = console.to_json({"a": float("nan"), "b": [1.0, float("-inf")]})
    assert json.loads(text, parse_constant=pytest.fail) == {"a": None, "b": [1.0, None]}
