"""Run folders under other data, damage, full disks and two processes; own rows in any units; what a run admits."""

import errno
import json
import os
import resource
import stat
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer

from commands import ebflow, refused_at_length
from ebflow_examples import console, demo, folders, plots, tables, training
from ebflow_examples.config import TrainConfig
from ebflow_examples.data import load
from ebflow_examples.defaults import usual_loss
from ebflow_examples.pictures import draw_samples, unseen_features
from ebflow_examples.reproduce.common import Cell, CellResult
from ebflow_examples.reproduce.output import remarks
from ebflow_examples.runs import build, open_run
from ebflow_plugin.errors import InputError
from ebflow_plugin.training.files import atomic_write

SMALL = ["--steps", "4", "--batch-size", "20", "--limit", "200", "--evaluate-every", "2", "--loss", "ml"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A finished run, which tests leave as it is."""
    folder = tmp_path_factory.mktemp("kept") / "run"
    ebflow("train", "--out", folder, *SMALL)
    return folder


@pytest.fixture
def run(kept, tmp_path):
    """A copy of it."""
    for file in kept.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != folders.LOCK}


# --- what a run is


def test_a_file_that_changed_is_not_gone_on_with(tmp_path):
    rows = np.random.default_rng(0).standard_normal((200, 3))
    file, out = tmp_path / "rows.npy", tmp_path / "run"
    np.save(file, rows)
    ebflow("train", "--data", file, "--out", out, "--steps", 2)
    ebflow("train", "--data", file, "--out", out, "--resume", "--steps", 3)
    before = content(out)
    np.save(file, rows[::-1])
    assert "the data are not those" in refused_at_length("train", "--out", out, "--resume", "--steps", 4)
    assert "the data are not those" in refused_at_length("eval", out)
    assert content(out) == before


def test_a_refused_run_leaves_the_folder_as_it_was(run, monkeypatch):
    before = content(run)

    def refuse(*arguments, **options):
        raise InputError("no")

    monkeypatch.setattr(training, "run_trainer", refuse)
    for way in ("--resume", "--fresh"):
        assert "error: no" in refused_at_length("train", "--out", run, way, *SMALL)
        assert content(run) == before


def test_of_two_losses_the_later_word_holds_and_drops_the_options_of_the_other():
    config = TrainConfig(loss="dsm", sigma=0.3)
    assert config.updated({"loss": "ml"}).sigma is None
    assert config.updated({"loss": "ssm"}).sigma == 0.3  # which has it too
    assert config.updated({"loss": "dsm"}).sigma == 0.3
    assert config.updated({"loss": "fdssm", "eps": 0.5}).eps == 0.5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--loss", "ml", "--sigma", 1], "sigma is an option of ssm, dsm, fdssm, and does nothing with loss ml"),
        (["--loss", "ml", "--latent-weight", 1], "latent_weight is an option of"),
        (["--loss", "ssm", "--shrink", 5], "shrink needs a sigma, to which the noise shrinks"),
        (["--loss", "dsm", "--ml-weight", 1.5], "ml_weight is a share of the loss, from 0 to 1, got 1.5"),
        (["--loss", "dsm", "--shrink", -1], "shrink must be at least 0, got -1"),
        (["--loss", "dsm", "--eps", 1], "eps is an option of fdssm"),
        (["--projections", 2], "projections is an option of ssm, and does nothing with the loss that is chosen"),
        (["--data", "swirl", "--alpha", 0.1], "alpha is of images"),
        (["--standardize"], "standardize is for rows of numbers"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(tmp_path, flags, words):
    assert words in refused_at_length("train", "--out", tmp_path / "run", *flags)
    assert not (tmp_path / "run").exists()


# --- one process at a time


def test_a_running_run_is_left_alone_until_its_process_ends(run):
    code = f"from pathlib import Path\nfrom ebflow_examples.folders import held\nwith held(Path({str(run)!r})):\n"
    code += "    print('held', flush=True)\n    input()\n"
    before = content(run)
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        for way in ("--resume", "--fresh"):
            assert "another process is training into" in refused_at_length("train", "--out", run, way, *SMALL)
        assert content(run) == before
        ebflow("eval", run)
        process.kill()
    ebflow("train", "--out", run, "--resume", "--steps", 5)


def test_a_lock_is_let_go_of_by_an_error(tmp_path):
    with pytest.raises(KeyError), folders.held(tmp_path):
        raise KeyError
    with folders.held(tmp_path), pytest.raises(InputError, match="another process"), folders.held(tmp_path):
        pass


# --- damage


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_damaged_weights_are_not_evaluated(run, damage):
    path = run / "best.ckpt"
    good = path.read_bytes()
    middle = len(good) // 2
    other = bytes(255 - byte for byte in good[middle : middle + 20])
    damaged = {"truncated": good[:middle], "empty": b"", "flipped": good[:middle] + other + good[middle + 20 :]}
    path.write_bytes(damaged[damage])
    assert "best.ckpt" in refused_at_length("eval", run)


def test_a_full_disk_is_told_in_a_line(tmp_path):
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, {resource.RLIM_INFINITY}))\n"
    code = limit + "import sys; from ebflow_examples.__main__ import main; sys.argv[0] = 'ebflow'; main()"
    command = [sys.executable, "-c", code, "train", "--out", str(tmp_path / "run"), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "File too large" in last
    assert "Traceback" not in done.stderr
    assert console.exit_code(OSError(28, "No space left on device")) == 1


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_run_files_honour_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        atomic_write(tmp_path / "file", lambda file: file.write(b"1"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask


def test_objects_in_numpy_files_are_refused_in_a_line(tmp_path):
    words = np.array([{"a": 1}, None], dtype=object)
    np.savez(tmp_path / "one.npz", words)
    np.savez(tmp_path / "three.npz", train=words, validation=words, test=words)
    np.save(tmp_path / "one.npy", words)
    for name in ("one.npz", "three.npz", "one.npy"):
        with pytest.raises(InputError, match="cannot be read"):
            tables.read(tmp_path / name)
    rows = np.zeros((3, 2))
    np.savez(tmp_path / "beside.npz", train=rows, validation=rows, test=rows, names=words)
    assert len(tables.read(tmp_path / "beside.npz")) == 3


def test_a_folder_that_cannot_be_written_to_is_found_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(demo, "_tour", lambda *arguments: pytest.fail("the work began"))
    for command in (["demo"], ["bench", "fc"], ["reproduce", "table1"]):
        assert "cannot be written to" in refused_at_length(*command, "--quick", "--out", tmp_path / "file" / "inside")


def test_without_its_extra_the_command_says_what_to_install():
    code = (
        "import sys, importlib.util as util\nreal = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'typer' else real(name, *more)\n"
        "sys.modules['typer'] = None\nfrom ebflow_examples.__main__ import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ebflow needs typer, which the extra [examples] has: pip install")
    assert len(done.stderr.splitlines()) == 1
    missing = ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
    assert console.exit_code(missing) == 1
    assert "[examples]" in console._words(missing)
    assert console.exit_code(ModuleNotFoundError("x", name="of_the_users")) is None


# --- own rows in any units


def own(tmp_path, rows, **options):
    np.save(tmp_path / "rows.npy", rows)
    config = TrainConfig(data=str(tmp_path / "rows.npy"), device="cpu", steps=60, **options)
    return training.train(config, tmp_path / "run", progress=False)


@pytest.mark.parametrize("loss", [None, "dsm", "ssm"])
def test_a_gaussian_with_scales_from_a_thousand_to_a_thousandth_has_its_entropy(tmp_path, loss):
    scales = np.array([1000.0, 1.0, 0.1, 0.001])
    rows = 3.0 * scales + scales * np.random.default_rng(0).standard_normal((4000, 4))
    found = own(tmp_path, rows, loss=loss)
    entropy = 0.5 * 4 * np.log(2 * np.pi * np.e) + np.log(scales).sum()
    assert abs(found["test"]["nll"] - entropy) < 4 * found["test"]["nll_error"]
    opened = open_run(tmp_path / "run", device="cpu")
    drawn = opened.model.sample(4000)
    assert np.allclose(drawn.std(0).numpy() / scales, 1.0, atol=0.15)


def test_the_breast_cancer_table_is_better_than_its_whitened_gaussian(tmp_path):
    found = own(tmp_path, load_breast_cancer().data[:, :10])
    assert found["test"]["nll"] < -6.0
    assert found["learnt"]


def test_the_scales_of_the_data_do_not_change_what_is_learnt(tmp_path):
    rows = np.random.default_rng(0).gamma(2.0, size=(500, 3)).astype(np.float32)
    found = []
    for factor in (1.0, 2.0**20):
        (tmp_path / str(factor)).mkdir()
        found.append(own(tmp_path / str(factor), factor * rows, loss="dsm")["test"]["nll"] - 3 * np.log(factor))
    assert found[0] == pytest.approx(found[1], abs=1e-3)


@pytest.mark.parametrize(
    ("column", "words"), [(np.full(50, 7.0), "constant has no density"), (1e9 + np.arange(50.0), "take off their mean")]
)
def test_columns_without_a_scale_are_named(tmp_path, column, words):
    rows = np.random.default_rng(0).standard_normal((50, 3))
    rows[:, 1] = column
    np.save(tmp_path / "rows.npy", rows)
    assert words in refused_at_length("train", "--data", tmp_path / "rows.npy", "--out", tmp_path / "run")


# --- what a run admits


def test_a_run_that_made_the_model_worse_says_so_everywhere(tmp_path):
    out = tmp_path / "run"
    flags = ["--steps", 2, "--limit", 300, "--batch-size", 20, "--lr", 0.3, "--schedule", "constant", "--loss", "dsm"]
    done = ebflow("train", "--model", "fc", "--out", out, *flags)
    assert "NOTHING WAS LEARNT" in done.stdout
    assert "Try --loss ml or a smaller --lr or a smaller --sigma." in done.stdout
    assert "best weights, step 0" in done.stdout
    summary = json.loads((out / "summary.json").read_text())
    assert summary["learnt"] is False
    assert summary["validation"]["best_step"] == 0
    assert "step 0: the start, nothing was learnt" in ebflow("eval", out).stdout
    opened = open_run(out, device="cpu")
    titles = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "save_images", lambda path, images, columns, title: titles.append(title))
        draw_samples(opened, 4, tmp_path / "samples.png")
        draw_samples(open_run(out, "last", "cpu"), 4, tmp_path / "samples.png")
    assert "fc, untrained (step 0)" in titles[0]
    assert "fc by DSM, step 2" in titles[1]


def test_advice_names_options_of_the_loss_alone():
    summary = {"loss": "ml", "validation": {"nll_before": 1.0, "nll_last": 2.0}}
    assert training._nothing(summary).endswith("Try a smaller --lr.")
    assert training._nothing({**summary, "loss": "ssm"}).endswith("Try --loss ml or a smaller --lr.")


@pytest.mark.parametrize(
    ("command", "words"), [("train", "`--resume` goes on"), ("reproduce", "the same command goes on"), ("sample", "")]
)
def test_a_full_disk_names_options_of_the_command_alone(command, words):
    text = console._words(OSError(errno.ENOSPC, "No space left on device"), command)
    assert words in text
    assert ("--resume" in text) == (command == "train")


def test_tables_name_the_cells_that_learnt_nothing():
    cells = [
        CellResult(Cell("table2", name, {}), {"best_step": step}) for name, step in (("a", 0), ("b", 5), ("c", None))
    ]
    (note,) = remarks(cells, "")
    assert note.endswith("nothing was learnt: a.")
    assert remarks(cells[1:], "") == []


@pytest.mark.parametrize(
    ("config", "loss"),
    [
        (TrainConfig(limit=300, steps=40), "ml"),
        # From its start in closed form there are hundredths of a nat to gain, which forty steps do not show.
        (TrainConfig(limit=300, steps=150, model="cnn", blocks=2), "dsm"),
    ],
)
def test_the_loss_that_is_chosen_makes_the_model_better(tmp_path, config, loss):
    summary = training.train(replace(config, device="cpu"), tmp_path / "run", progress=False)
    assert summary["loss"] == loss
    assert summary["learnt"]
    assert summary["validation"]["nll_best"] < summary["validation"]["nll_before"]


def test_determinants_of_very_large_layers_are_not_chosen():
    data = load("digits")
    run = build(TrainConfig(limit=50))
    wide = replace(data.flattened(), train=torch.zeros(2, 3072))

    assert usual_loss(replace(run, data=wide)) == ("ml", "relative")
    assert usual_loss(run) == ("ml", None)


# --- pictures


def test_points_outside_of_a_picture_are_shown_at_its_edge_and_counted(tmp_path):
    rows = torch.tensor([[0.0, 0.0], [9.0, 0.5], [float("nan"), -9.0], [0.5, 0.5]])
    with plots.figure(tmp_path / "a.png", 3, 3) as figure:
        axes = figure.subplots()
        plots.scatter(axes, rows, plots.Panel((-1.0, -1.0), (1.0, 1.0)), "points")
        inside, edge = (each.get_offsets() for each in axes.collections)
        assert len(inside) == 2
        assert edge.tolist() == [[1.0, 0.5], [1.0, -1.0]]
        assert [text.get_text() for text in axes.texts] == ["2 of 4 outside, at the edge"]


def test_a_picture_of_features_in_different_units_has_a_range_for_each():
    rows = torch.randn(500, 2) * torch.tensor([1000.0, 0.001])
    panel = plots.Panel.around(rows)
    assert panel.high[0] - panel.low[0] > 1e5 * (panel.high[1] - panel.low[1])
    square = plots.Panel.around(torch.randn(500, 2) * torch.tensor([2.0, 1.0]))
    assert square.high[0] - square.low[0] == pytest.approx(square.high[1] - square.low[1])


def test_features_that_a_picture_leaves_out_are_told(tmp_path):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((100, 5)))
    ebflow("train", "--data", tmp_path / "rows.npy", "--out", tmp_path / "run", "--steps", 2)
    assert "features 1 and 2 of 5" in ebflow("sample", tmp_path / "run").stdout
    assert unseen_features(build(TrainConfig(data="swirl", limit=10))) == ""


# --- profile


def test_an_estimator_of_sbi_is_profiled_with_its_context(tmp_path, monkeypatch):
    pytest.importorskip("sbi")
    (tmp_path / "estimators.py").write_text(
        "import torch\nfrom sbi.neural_nets import posterior_nn\n"
        "def maf():\n    return posterior_nn('maf', num_transforms=2)(torch.randn(50, 3), torch.randn(50, 2))\n"
        "def bare():\n    return maf().net\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    short = ["--seconds", 0.05, "--batch-size", 8, "--json"]
    for target, more in (("estimators.py:maf", []), ("estimators.py:bare", ["--context", 2])):
        costs = {
            each["objective"]: each for each in json.loads(ebflow("profile", target, *more, *short).stdout)["costs"]
        }
        assert costs["dsm"]["milliseconds"] > 0
        assert costs["ml"]["milliseconds"] > 0
    assert "--context" in refused_at_length("profile", "estimators.py:bare", *short)
    sys.modules.pop("estimators", None)


def test_own_rows_are_standardised_wherever_a_built_in_model_meets_them(tmp_path):
    np.save(tmp_path / "rows.npy", 1000.0 * np.random.default_rng(0).standard_normal((50, 3)))
    assert "Standardize" in ebflow("inspect", "fc", "--data", tmp_path / "rows.npy").stdout
