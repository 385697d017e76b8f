"""Cells of an experiment: how they share a budget, are kept, chosen and computed side by side."""

import json
from dataclasses import replace

import pytest
import torch

import ebflow_examples.reproduce.common as common
from ebflow_examples import reproduce
from ebflow_examples.reproduce import experiment, table2
from ebflow_examples.reproduce.common import Cell, CellResult, Options
from ebflow_examples.reproduce.output import grouped, remarks
from ebflow_examples.reproduce.provenance import commit
from ebflow_plugin.errors import InputError, TrainingError


class Counted:
    """An experiment that counts what it computes."""

    MINUTES = 1.0

    def __init__(self, names=("a-one", "a-two", "b-one"), fails=()):
        self.names, self.fails, self.computed = names, fails, []

    def cells(self, options):
        return [Cell("counted", name, {"seed": 0, "name": name}) for name in self.names]

    def compute(self, cell, folder, data_root):
        self.computed.append((cell.name, torch.get_num_threads()))
        if cell.name in self.fails:
            raise TrainingError("step 3: the loss is not finite\nmore")
        return {"nll": float(len(self.computed))}


@pytest.fixture
def counted():
    return Counted()


def test_cells_share_the_budget_and_are_kept(counted, tmp_path):
    options = Options("counted", budget=2.0, out=tmp_path)
    threads = torch.get_num_threads()
    first = common.run(options, counted)
    assert [each.cell.seconds for each in first] == [30.0] * 3  # three quarters of two minutes
    assert counted.computed == [(name, 1) for name in counted.names]
    assert torch.get_num_threads() == threads
    again = common.run(options, counted)
    assert again == first
    assert len(counted.computed) == 3
    (tmp_path / "cells" / "counted" / "a-two.json").unlink()
    assert common.run(options, counted)[1].result == {"nll": 4.0}
    common.run(replace(options, budget=4.0), counted)  # more time: other cells
    assert len(counted.computed) == 7
    common.run(replace(options, budget=4.0, fresh=True), counted)
    assert len(counted.computed) == 10


def test_cells_take_so_many_seconds_if_asked_to(counted, tmp_path):
    options = Options("counted", budget=2.0, seconds=7.0, margin=0.05, out=tmp_path)
    assert [each.cell.seconds for each in common.run(options, counted)] == [7.0] * 3
    assert options.command == "ebflow reproduce counted --seconds 7 --seeds 3 --margin 0.05"
    with pytest.raises(InputError, match="budget and seconds are both given"):
        reproduce.main("tableA3", budget=1.0, seconds=1.0, out=tmp_path)


def test_what_is_kept_can_be_shown_alone(counted, tmp_path):
    options = Options("counted", budget=2.0, out=tmp_path, kept=True)
    with pytest.raises(InputError, match="leave out --kept"):
        common.run(options, counted)
    common.run(replace(options, kept=False), counted)
    (tmp_path / "cells" / "counted" / "a-two.json").unlink()
    assert [each.cell.name for each in common.run(options, counted)] == ["a-one", "b-one"]
    assert len(counted.computed) == 3
    assert options.command == "ebflow reproduce counted --budget 2 --seeds 3 --kept"


class Searching(Counted):
    """An experiment whose one cell takes the best of three learning rates, each tried for a quarter of its time."""

    def __init__(self):
        super().__init__()
        self.nlls = {1e-4: 3.0, 1e-3: 1.0, 1e-2: 2.0}
        self.more = {}

    def cells(self, options):
        tries = [Cell("counted", f"dsm-rate{rate:f}", {"seed": 0, "lr": rate}, part=0.25) for rate in self.nlls]
        chosen = Cell("counted", "dsm-seed1", {"seed": 1}, best_of=tuple(cell.name for cell in tries))
        return [*tries, chosen]

    def compute(self, cell, folder, data_root):
        super().compute(cell, folder, data_root)
        return {"validation_nll": self.nlls[cell.settings["lr"]], **self.more.get(cell.settings["lr"], {})}


def test_a_cell_takes_the_best_rate_of_those_that_were_tried(tmp_path):
    searching = Searching()
    options = Options("counted", budget=7 / 3, out=tmp_path, only=("seed1",))  # those that it needs come with it
    found = common.run(options, searching)
    assert [each.cell.seconds for each in found] == [15.0, 15.0, 15.0, 60.0]
    assert found[-1]["lr"] == 1e-3
    common.run(options, searching)
    assert len(searching.computed) == 4  # all are kept
    searching.nlls = {1e-4: 0.5, 1e-3: 1.0, 1e-2: 2.0}
    (tmp_path / "cells" / "counted" / "dsm-rate0.000100.json").unlink()
    assert common.run(options, searching)[-1]["lr"] == 1e-4  # another rate is another cell
    searching.fails = ("dsm-rate0.000100",)
    assert common.run(replace(options, fresh=True), searching)[-1]["lr"] == 1e-3
    searching.fails = tuple(f"dsm-rate{rate:f}" for rate in searching.nlls)
    assert "failed at every rate" in common.run(replace(options, fresh=True), searching)[-1].failed


def test_a_search_can_name_its_judge(tmp_path):
    searching = Searching()
    searching.more = {rate: {"judge": "fisher", "fisher": 1 / rate} for rate in searching.nlls}
    assert common.run(Options("counted", budget=7 / 3, out=tmp_path), searching)[-1]["lr"] == 1e-2


def test_a_cell_can_name_the_judge_of_its_rate(tmp_path, monkeypatch):
    searching = Searching()
    searching.more = {rate: {"fisher": 1 / rate} for rate in searching.nlls}
    cells = searching.cells
    monkeypatch.setattr(searching, "cells", lambda options: [replace(cell, judge="fisher") for cell in cells(options)])
    assert common.run(Options("counted", budget=7 / 3, out=tmp_path), searching)[-1]["lr"] == 1e-2


class Tossing(Searching):
    """Each rate is tried with two seeds, of which the first misleads."""

    def cells(self, options):
        rates = {f"dsm-rate{rate:f}": rate for rate in self.nlls}
        run = Cell("counted", "dsm-seed1", {"seed": 1})
        return common.with_rates([run], lambda run: (rates, 0.25), options.quick)

    def compute(self, cell, folder, data_root):
        found = super().compute(cell, folder, data_root)
        lucky = cell.settings["lr"] == 1e-4 and cell.settings["seed"] == 0
        return {"validation_nll": found["validation_nll"] - 2.5 * lucky}


def test_a_rate_is_judged_by_two_seeds(tmp_path):
    tossing = Tossing()
    options = Options("counted", budget=1.0, out=tmp_path)
    found = common.run(options, tossing)
    assert [(each["lr"], each["seed"]) for each in found[:-1]] == [
        (rate, seed) for rate in tossing.nlls for seed in (0, 1)
    ]
    assert found[-1]["lr"] == 1e-3
    quick = common.run(replace(options, out=tmp_path / "quick", quick=True), tossing)
    assert len(quick) == 4
    assert quick[-1]["lr"] == 1e-4  # a moment for each cell, and the toss of a coin
    tossing.fails = ("dsm-rate0.001000-again",)  # a rate that diverges with one seed of two is none to take
    assert common.run(replace(options, fresh=True), tossing)[-1]["lr"] == 1e-4


def test_a_search_of_few_steps_is_told():
    few, many = (CellResult(Cell("a", "b", {"search": True, "loss": "ml"}), {"steps": steps}) for steps in (29, 30))
    assert "fewer than 30 steps: ML (29)" in remarks([few, many], "")[0]
    assert remarks([many], "") == []


# --- the code that a cell is of


def test_a_cell_of_another_recipe_is_computed_again_and_says_its_commit(counted, tmp_path, capsys, monkeypatch):
    options = Options("counted", budget=2.0, out=tmp_path)
    first = common.run(options, counted)
    assert {each.facts["commit"] for each in first} == {commit()}
    monkeypatch.setattr(common, "recipe", lambda made, data: "other")
    capsys.readouterr()
    shown = common.run(replace(options, kept=True), counted)
    assert shown == first  # of the code that they were computed by
    assert len(counted.computed) == 3
    again = common.run(options, counted)
    said = capsys.readouterr().err
    assert f"3 cells are of other code or data than this (commit {commit()}), and are computed again" in said
    assert len(counted.computed) == 6
    assert again[0].cell.recipe != first[0].cell.recipe
    assert "cells are of other code or data than this" in remarks(first, again[0].cell.recipe)[0]
    assert remarks(again, again[0].cell.recipe) == []
    monkeypatch.setattr(common, "recipe", lambda made, data: "third")
    common.run(options, counted)
    assert len(counted.computed) == 9


def test_a_cell_of_the_time_before_recipes_is_none_of_this_one(counted, tmp_path):
    options = Options("counted", budget=2.0, out=tmp_path)
    common.run(options, counted)
    path = options.folder / "a-two.json"
    content = json.loads(path.read_text())
    del content["cell"]["recipe"], content["facts"]["commit"]
    path.write_text(json.dumps(content))
    (other,) = [each for each in common.run(replace(options, kept=True), counted) if each.cell.recipe == ""]
    assert common.commits([other]) == "commit of an unknown commit"
    common.run(options, counted)
    assert len(counted.computed) == 4


def test_starts_of_another_recipe_are_not_gone_on_with(tmp_path):
    cell = Cell("table2", "fc", {"data": "digits", "model": "fc", "seed": 0}, recipe="a")
    assert table2.start_file(cell, tmp_path) != table2.start_file(replace(cell, recipe="b"), tmp_path)


def test_only_some_cells(counted, tmp_path):
    options = Options("counted", budget=2.0, out=tmp_path, only=("one", "b"))
    assert [each.cell.name for each in common.run(options, counted)] == ["b-one"]
    assert options.command == "ebflow reproduce counted --budget 2 --seeds 3 --only one --only b"
    with pytest.raises(InputError, match="no cell of counted has all of these words in its name: three"):
        common.run(replace(options, only=("three",)), counted)


def test_a_run_that_fails_is_a_result(counted, tmp_path):
    counted.fails = ("a-two",)
    found = common.run(Options("counted", budget=2.0, out=tmp_path), counted)
    assert [bool(each.failed) for each in found] == [False, True, False]
    assert grouped(found, "name") == {("a-one",): [found[0]], ("b-one",): [found[2]]}


@pytest.mark.slow
def test_cells_side_by_side(tmp_path):
    options = Options("tableA3", budget=1.0, out=tmp_path, quick=True, jobs=2, only=("lanczos", "M50"))
    found = common.run(options, experiment("tableA3"))
    alone = common.run(replace(options, jobs=1, fresh=True), experiment("tableA3"))
    assert [each.result for each in found] == [each.result for each in alone]
    assert [each.facts["threads"] for each in found] == [1, 1, 1]
