"""ebflow reproduce: every table and figure in a moment, beside the numbers of the paper."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.text import Text
from typer.testing import CliRunner

import ebflow_examples.reproduce.common as common
import ebflow_examples.reproduce.output as output
from ebflow_examples import plots, reproduce
from ebflow_examples.cli import app
from ebflow_examples.data import load
from ebflow_examples.plots import NEAREST, apart, curves, joined
from ebflow_examples.reproduce import EXPERIMENTS, OWN_DATA, paper, table2
from ebflow_examples.reproduce.common import Cell, CellResult, Options
from ebflow_examples.reproduce.output import Mean, beside, mean
from ebflow_examples.reproduce.provenance import commit
from ebflow_plugin.errors import InputError, UnknownNameError
from randomness import rng

SECONDS = 0.05  # of training in a cell: a few steps
FIVE = {"ml", "sml", "ssm", "dsm", "fdssm"}
# To save time, some cells of an experiment; the others differ in their data, objective or seed.
SOME = {
    "table1": ("swirl",),
    "table2": ("fc",),
    "fig4": ("dsm",),
    "race": ("dsm",),
    "glow": ("long",),
}
# The paper's experiments have the paper's noise, which biases SSM, and it says so.
pytestmark = pytest.mark.filterwarnings("ignore:SSM integrates by parts over the density of the data")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """All experiments once, in the order of the paper, with the least that there is."""
    folder = tmp_path_factory.mktemp("reproduce")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "QUICK_SECONDS", SECONDS)
        for what in EXPERIMENTS:
            data = {} if what in OWN_DATA else {"data": "digits"}
            reproduce.main(what, quick=True, out=folder, only=SOME.get(what, ()), **data)
    return folder


def content(out, what):
    return json.loads((out / f"{what}.json").read_text())


def numbers(value):
    if isinstance(value, dict):
        return [number for each in value.values() for number in numbers(each)]
    if isinstance(value, list):
        return [number for each in value for number in numbers(each)]
    return [value] if isinstance(value, float) else []


@pytest.mark.parametrize("what", EXPERIMENTS)
def test_every_experiment_leaves_json_markdown_and_a_picture(out, what):
    found = content(out, what)
    assert found["what"] == what
    assert f"ebflow reproduce {what}" in found["command"]
    assert "--quick" in found["command"]
    assert found["rows"]
    assert all(math.isfinite(number) for number in numbers(found["rows"]))
    text = (out / f"{what}.md").read_text()
    assert text.startswith(f"## {EXPERIMENTS[what]}\n\n`{found['command']}`")
    assert (out / f"{what}.png").read_bytes().startswith(b"\x89PNG")
    assert f"![{what}]({what}.png)" in text
    for cell in found["cells"]:
        assert not cell["failed"]
        assert cell["facts"]["versions"]["torch"]
        assert cell["cell"]["settings"]["seed"] == 0
        if cell["cell"]["timed"]:
            assert cell["cell"]["seconds"] == SECONDS
            assert cell["result"]["steps"] >= 1
            assert cell["result"]["seconds"] >= SECONDS


def test_the_results_are_put_together_in_the_order_of_the_paper(out):
    text = (out / output.RESULTS).read_text()
    places = [text.index(f"## {title}") for title in EXPERIMENTS.values()]
    assert places == sorted(places)


def test_the_tables_have_their_cells(out):
    plane = content(out, "table1")["rows"]
    assert {(row["loss"], row["recipe"], row["metric"]) for row in plane} == {
        (loss, recipe, metric)
        for metric in ("fisher", "kl", "nll", "mass")
        for loss, recipe in (
            *((loss, "kl") for loss in FIVE),
            *((loss, "fisher") for loss in FIVE - {"ml", "sml"}),
            *((loss, "ours") for loss in FIVE - {"sml"}),
        )
    }
    images = content(out, "table2")["rows"]
    assert {(row["way"], row["loss"]) for row in images} == {
        *(("paper", loss) for loss in FIVE),
        *(("ours", loss) for loss in (*FIVE, "ml_relative")),
    }
    ablation = content(out, "table3")["rows"]
    assert {(row["model"], row["loss"], row["ema"], row["map"]) for row in ablation} == {
        (model, loss, ema, after)
        for model in ("fc", "cnn")
        for loss in ("ssm", "dsm", "fdssm")
        for ema in (False, True)
        for after in (False, True)
    }
    assert [row["linear"] for row in content(out, "figA4")["rows"]] == ["full", "lower", "upper", "lu"]
    assert {(row["M"], row["D"]) for row in content(out, "tableA3")["rows"]} == {
        (budget, dim) for budget in (50, 100, 200) for dim in (50, 100, 200)
    }


@pytest.mark.parametrize("what", OWN_DATA)
def test_experiments_with_data_of_their_own_take_no_others(what, tmp_path):
    with pytest.raises(InputError, match=f"{what} has data of its own; leave out --data"):
        reproduce.main(what, quick=True, data="digits", out=tmp_path)


OF_IMAGES = [what for what in EXPERIMENTS if what not in OWN_DATA]
NO_IMAGES = ["autoregressive10", "textures", "rows.npy", "rows.csv", "vectors.npy"]


@pytest.mark.parametrize(
    ("what", "data"),
    [*((what, "swirl") for what in [*OF_IMAGES, "all"]), *(("table2", data) for data in NO_IMAGES)],
)
def test_data_that_are_no_images_are_refused_by_what_the_user_gave(what, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", np.zeros((40, 3)))
    np.savetxt("rows.csv", np.zeros((40, 3)), delimiter=",")
    np.save("vectors.npy", np.zeros((40, 3), dtype=np.uint8))
    with pytest.raises(InputError, match=f"are of images with grey levels, and {data} has none") as refusal:
        reproduce.main(what, quick=True, data=data, out=tmp_path / "out")
    assert "alpha" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_few_images_and_margins_that_cannot_be_are_refused_before_any_work(tmp_path):
    np.save(tmp_path / "few.npy", np.zeros((20, 8, 8), dtype=np.uint8))
    with pytest.raises(InputError, match="has 16 images to train on; models are calibrated, which needs 20"):
        reproduce.main("table2", quick=True, data=str(tmp_path / "few.npy"), out=tmp_path / "out")
    with pytest.raises(InputError, match=r"margin must be below 0.5, got 0.7"):
        reproduce.main("table2", quick=True, data="digits", margin=0.7, out=tmp_path / "out")
    with pytest.raises(InputError, match="race has data of its own, which have no margin; leave out --margin"):
        reproduce.main("race", quick=True, margin=0.1, out=tmp_path / "out")


def test_every_experiment_shows_the_commit_of_its_cells(out):
    for what in EXPERIMENTS:
        found = content(out, what)
        assert {cell["facts"]["commit"] for cell in found["cells"]} == {commit()}
        assert found["code"] == f"commit {commit()}"
        assert f"; commit {commit()}." in (out / f"{what}.md").read_text()


def test_divergences_are_those_of_the_truth(out):
    for cell in content(out, "table1")["cells"]:
        if not cell["cell"]["settings"]["search"]:
            result = cell["result"]
            assert result["nll"] == pytest.approx(result["entropy"] + result["kl"])
            assert result["kl"] > 0
            assert result["fisher"] > 0
            assert 0 < result["mass"] < 1.5  # of a grid of 12 x 12 points
            assert result["entropy"] == pytest.approx(4.1394, abs=1e-4)


def test_the_papers_recipe_has_the_best_rate_by_each_divergence(out):
    cells = {cell["cell"]["name"]: cell for cell in content(out, "table1")["cells"]}
    judges = {"kl": "validation_nll", "fisher": "validation_fisher"}
    for loss, way in [*((loss, "kl") for loss in FIVE), *((loss, "fisher") for loss in FIVE - {"ml", "sml"})]:
        judge = judges[way]
        tried = {
            each["cell"]["settings"]["lr"]: each["result"][judge]
            for name, each in cells.items()
            if name.startswith(f"swirl-{loss}-rate")
        }
        assert len(tried) == 2
        assert cells[f"swirl-{loss}-{way}-seed0"]["result"]["recipe"]["lr"] == min(tried, key=tried.get)
        assert f"{min(tried.values()):.3f}" in (out / "table1.md").read_text()


def test_importance_sampling_is_worse_than_lanczos_and_of_the_size_of_the_papers(out):
    rows = {(row["method"], row["M"], row["D"]): row["error"] for row in content(out, "tableA3")["rows"]}
    for budget, errors in paper.LOG_Z.items():
        for dim in errors:
            assert rows["lanczos", budget, dim] < rows["importance", budget, dim] < 1.0


def test_the_gaussian_that_every_model_must_beat_stands_beside_them(out):
    found = {cell["cell"]["name"]: cell for cell in content(out, "table2")["cells"]}  # though only fc was asked for
    data = load("digits").flattened()
    logits = [
        torch.logit((1 - 2e-6) * (part + torch.rand(part.shape, generator=rng(1))) / 17 + 1e-6)
        for part in (data.train.double(), data.test[:100].double())
    ]
    centre, spread = logits[0].mean(0), torch.cov(logits[0].T)
    normal = torch.distributions.MultivariateNormal(centre, spread)
    expected = -float(normal.log_prob(logits[1]).mean())
    assert found["gaussian"]["result"]["nll_logits"] == pytest.approx(expected, rel=0.05)  # other noise, and shrinkage
    text = (out / "table2.md").read_text()
    assert f"{found['gaussian']['result']['nll']:.1f}" in text
    assert "are the same quantity" in text


def test_each_objective_has_the_rate_that_was_best_on_validation_data(out):
    cells = {cell["cell"]["name"]: cell for cell in content(out, "table2")["cells"]}
    for loss in (*FIVE, "ml_relative"):
        tried = {
            each["cell"]["settings"]["lr"]: each["result"]["validation_nll"]
            for name, each in cells.items()
            if name.startswith(f"fc-ours-{loss}-rate")
        }
        assert len(tried) == 2
        chosen = cells[f"fc-ours-{loss}-seed0"]
        assert chosen["result"]["recipe"]["lr"] == min(tried, key=tried.get)
        assert f"{min(tried.values()):.1f}**" in (out / "table2.md").read_text()
    assert cells["fc-paper-dsm-seed0"]["result"]["recipe"]["lr"] == 1e-4


def test_raw_and_calibrated_likelihoods_are_of_the_same_weights(out):
    for cell in content(out, "table2")["cells"]:
        if cell["cell"]["timed"] and not cell["cell"]["settings"]["search"]:
            result = cell["result"]
            assert result["nll"] < result["raw_nll"]  # the rows of quick runs are few, but no fit is that bad


@pytest.mark.parametrize(
    ("data", "model", "loss", "expected"),
    [
        ("mnist", "fc", "dsm", {"temperature": 0.5, "sigma": 1.0, "layers": 2}),
        ("mnist", "cnn", "dsm", {"temperature": 0.75, "sigma": 0.1, "residual": True}),
        ("mnist", "fc", "fdssm", {"eps": 1.0, "clip_norm": 5.0}),
        ("cifar10-jpeg", "cnn", "fdssm", {"temperature": 0.75, "eps": 0.1, "energy_weight": 0.001}),
    ],
)
def test_the_papers_way_is_that_of_its_code(data, model, loss, expected):
    cell = table2.cell_of(Options("table2", 1.0, data=data), "table2", "paper", model, loss, 0)
    made = table2.recipe(cell, None).to_dict()
    assert expected.items() <= made.items()
    assert (made["alpha"], made["optimizer"], made["lr"], made["whiten"]) == (1e-6, "rmsprop", 1e-4, False)


def test_likelihood_without_determinants_is_a_row_of_the_cnn():
    words = {"ml_stochastic", "seed0"}
    cells = [cell for cell in table2.cells(Options("table2", 1.0, seeds=1)) if words <= set(cell.name.split("-"))]
    assert [cell.name for cell in cells] == ["cnn-ours-ml_stochastic-seed0"]
    config = table2.recipe(cells[0], None)
    assert (config.loss, config.log_det) == ("ml", "stochastic")
    assert table2.recipe(table2.cell_of(Options("table2", 1.0), "table2", "ours", "cnn", "ml", 0), None).log_det is None


def test_the_margin_and_large_images(tmp_path):
    options = Options("table2", 1.0, data="cifar10-jpeg", margin=0.05)
    cell = table2.cell_of(options, "table2", "ours", "cnn", "dsm", 0)
    made = table2.recipe(replace(cell, settings={**cell.settings, "lr": 1e-3}), None)
    assert (made.alpha, made.calibrate, made.lr) == (0.05, "diagonal", 1e-3)
    assert made.temperature is None


def test_labels_of_a_race_do_not_lie_on_one_another(tmp_path):
    curve, lower = [(1.0, 5.0), (9.0, 3.0)], [(1.0, 5.0), (8.0, 2.9)]
    with plots.figure(tmp_path / "race.png", 9.0, 5.0) as figure:
        axes = figure.subplots()
        curves(axes, {"ml": [curve], "dsm": [curve, lower]}, lambda loss, end: f"{loss}\n{end:.2f}", 14)
        figure.draw_without_rendering()
        first, second = (Text.get_window_extent(text).extents[1::2] for text in axes.texts)  # without the lines to them
    assert [text.get_text() for text in axes.texts] == ["ml\n3.00", "dsm\n3.08"]
    assert first[1] < second[0]


@pytest.mark.parametrize("log", [False, True])
def test_labels_are_apart_on_the_scale_of_the_axis(log):
    places = apart({"a": 10.0, "b": 10.0, "c": 10.0, "d": 900.0}, 10.0, 1000.0, log)
    ups = [math.log(value) if log else value for value in places.values()]
    least = NEAREST * (math.log(100.0) if log else 990.0)
    assert [high - low for low, high in pairwise(ups)][:2] == pytest.approx([least, least])
    assert places["a"] == pytest.approx(10.0)
    assert places["d"] == pytest.approx(900.0)


def test_ours_starts_calibrated_and_the_papers_way_does_not(out):
    rows = {(row["way"], row["loss"]): row for row in content(out, "table2")["rows"]}
    assert rows["ours", "dsm"]["start_nll"]["mean"] < rows["paper", "dsm"]["start_nll"]["mean"] - 100


# -- numbers --


def test_the_interval_is_students():
    found = mean([1.0, 2.0, 4.0])
    assert found.mean == pytest.approx(7 / 3)
    assert found.interval == pytest.approx(4.302653 * (7 / 3) ** 0.5 / 3**0.5, rel=1e-6)
    assert math.isnan(mean([1.0]).interval)
    assert beside(Mean(1.0, 0.5).text(), (2.0, 0.1)) == "1.00 ± 0.50 (2.00 ± 0.10)"


def test_curves_are_joined_where_all_of_them_are():
    x, (first, second) = joined([[(0.0, 0.0), (10.0, 10.0)], [(1.0, 3.0), (5.0, 7.0)]])
    assert (x[0], x[-1]) == (1.0, 5.0)
    assert first == pytest.approx(x)
    assert second == pytest.approx([value + 2.0 for value in x])


def test_the_papers_numbers_are_complete():
    for metrics in paper.PLANE.values():
        assert all(set(by_loss) == FIVE for by_loss in metrics.values())
    for numbers_of in (paper.IMAGES, paper.THROUGHPUT):
        assert set(numbers_of) == {"mnist", "cifar10"}
        assert all(set(by_loss) == FIVE for models in numbers_of.values() for by_loss in models.values())
    assert set(paper.RELATED) == FIVE | {"ml_relative"}
    assert all(set(rows) == {"neither", "ema", "ema_map"} for rows in paper.ABLATION.values())
    assert paper.ABLATION["fc"]["ema_map"]["dsm"] == paper.IMAGES["mnist"]["fc"]["dsm"]


# -- the command --


def test_the_command(tmp_path):
    runner = CliRunner()
    words = ["reproduce", "tableA3", "--quick", "--only", "lanczos", "--out", str(tmp_path)]
    done = runner.invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "Relative error of |det W|" in done.output
    assert (tmp_path / "RESULTS.md").is_file()
    for words in (["reproduce", "table9"], ["reproduce", "table1", "--budget", "-1"]):
        done = runner.invoke(app, words)
        assert done.exit_code == 2
        assert "error:" in done.output
    with pytest.raises(UnknownNameError, match="Did you mean 'table1'"):
        reproduce.main("tabel1")


def test_found_gives_settings_and_results():
    found = CellResult(Cell("a", "b", {"loss": "ml"}), {"nll": 1.0})
    assert (found["loss"], found["nll"]) == ("ml", 1.0)
    assert Path(Options("a", 1.0).folder) == Path("runs/reproduce/cells/a")
