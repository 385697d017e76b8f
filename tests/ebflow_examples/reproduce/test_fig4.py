"""Fig. 4: runs that go on or begin anew, and the number of their steps."""

from dataclasses import replace

import pytest
import torch

import ebflow_plugin as ebf
from ebflow_examples.defaults import settle
from ebflow_examples.reproduce import common, fig4
from ebflow_examples.reproduce.common import Options
from ebflow_examples.runs import build


def quick_cells(what, made):
    options = Options(what=what, budget=1.0, data="digits", quick=True)
    return [replace(cell, seconds=0.2) for cell in made.cells(options)]


@pytest.mark.parametrize("cell", quick_cells("fig4", fig4), ids=lambda cell: cell.settings["objective"])
def test_samples_of_a_run_that_goes_on_are_those_of_the_run(cell, tmp_path):
    stage = common.workplace(cell, tmp_path) / "stage0"
    stage.mkdir()
    (stage / "steps.txt").write_text("5\n")
    found = fig4.compute(cell, tmp_path, None)
    assert found["steps"] == 5
    assert found["seconds"] > 0
    assert found["nll"] < found["raw_nll"]  # a calibration of a model that is hardly trained
    grids = {path.name: path.read_bytes() for path in tmp_path.glob("*.npy")}
    assert {f"{cell.name}-{kind}.npy" for kind in ("warm", "cool", "data")} == set(grids)
    again = fig4.compute(cell, tmp_path, None)  # from its last checkpoint
    assert again["nll"] == found["nll"]
    assert again["seconds"] == found["seconds"]
    assert all((tmp_path / name).read_bytes() == grid for name, grid in grids.items())


def test_a_fresh_run_and_one_that_is_told_otherwise_begin_anew(tmp_path, monkeypatch):
    """The checkpoints of the run before are not gone on from."""
    options = Options("fig4", budget=1.0, data="digits", quick=True, out=tmp_path, only=("ml",))
    monkeypatch.setattr(fig4, "step_seconds", lambda run: pace)
    began = []
    train = fig4._train
    monkeypatch.setattr(fig4, "_train", lambda run, *given: began.append(given[1].exists()) or train(run, *given))

    def steps(options):
        (found,) = common.run(options, fig4)
        return found.result["steps"]

    pace = common.QUICK_SECONDS / 4
    assert steps(options) == 4
    assert steps(options) == 4  # it is kept
    assert began == [False]
    pace = common.QUICK_SECONDS / 3
    assert steps(replace(options, fresh=True)) == 3
    (options.folder / "glow-ml-seed0.json").unlink()  # a run that was stopped goes on
    assert steps(options) == 3
    assert began == [False, False, True]
    monkeypatch.setattr(common, "QUICK_SECONDS", 2 * common.QUICK_SECONDS)
    assert steps(options) == 6  # it has another time
    assert began == [False, False, True, False]


def test_processor_time_settles_the_number_of_steps(tmp_path):
    (cell, _) = quick_cells("fig4", fig4)
    run = settle(build(fig4.recipe(cell, None)))
    before = [parameter.clone() for parameter in run.model.parameters()]
    pace = fig4.step_seconds(run)
    assert 0 < pace < 1
    assert all(map(torch.equal, before, run.model.parameters()))  # a copy was timed
    result, taken = fig4._train(run, 4 * pace, tmp_path, 20)
    assert int((tmp_path / "steps.txt").read_text()) == result.steps
    assert 2 <= result.steps <= 20
    assert taken > 0


def test_what_is_drawn_from_are_the_weights_with_the_best_nll(tmp_path):
    (cell, _) = quick_cells("fig4", fig4)
    run = settle(build(fig4.recipe(cell, None)))
    wild = replace(run, config=run.config.updated({"lr": 0.3}))
    (tmp_path / "steps.txt").write_text("6\n")
    result, _ = fig4._train(wild, 1.0, tmp_path, 20)
    assert result.best_step < 6
    drawn = {name: value.clone() for name, value in run.model.state_dict().items()}
    assert ebf.load_best(run.model, tmp_path)["step"] == result.best_step
    assert all(torch.equal(value, drawn[name]) for name, value in run.model.state_dict().items())
