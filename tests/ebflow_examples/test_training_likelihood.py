"""Likelihood without determinants on the command line: the benchmark, train, profile and Table 2."""

import torch

import ebflow_plugin as ebf
from ebflow_examples import profiler
from ebflow_examples.bench import models, report
from ebflow_examples.bench.results import Settings
from ebflow_examples.bench.timing import interleaved
from ebflow_examples.config import TrainConfig
from ebflow_examples.models import build
from ebflow_examples.reproduce import table2
from ebflow_examples.reproduce.common import Options
from ebflow_examples.training import objective_of
from randomness import rng


def test_the_benchmark_has_every_objective_in_both_tables(monkeypatch):
    monkeypatch.setattr(models, "QUICK_SIDES", (4, 8))
    monkeypatch.setattr(models, "NEW_BATCH", 4)
    monkeypatch.setattr(Settings, "time", lambda self, what, steps, **how: interleaved(steps, seconds=0, least=2))
    step, growth = models.likelihood(Settings())
    assert [row["against"] for row in step.rows] == ["ML", "DSM", "SSM"]
    assert [row["target"] and row["target"].limit for row in step.rows] == [0.12, 1.0, None]
    assert [row["objective"] for row in growth.rows] == ["ML stochastic", "ML", "DSM", "SSM"]
    for row in growth.rows:
        assert row["D = 48, ms"] > 0
        assert row["D = 192, ms"] > 0
    assert "time ~ D^p" in report.as_text(growth)


def test_train_and_table_2_make_the_objective():
    model = ebf.wrap(build("cnn", (1, 8, 8)))
    made = objective_of(model, TrainConfig(loss="ml", log_det="stochastic"))
    assert (type(made), made.log_det) == (ebf.objectives.ML, "stochastic")
    assert objective_of(model, TrainConfig(loss="ml")).log_det == "exact"
    words = {"ml_stochastic", "seed0"}
    cells = [cell for cell in table2.cells(Options("table2", 1.0, seeds=1)) if words <= set(cell.name.split("-"))]
    assert [cell.name for cell in cells] == ["cnn-ours-ml_stochastic-seed0"]
    config = table2.recipe(cells[0], None)
    assert (config.loss, config.log_det) == ("ml", "stochastic")
    assert table2.recipe(table2.cell_of(Options("table2", 1.0), "table2", "ours", "cnn", "ml", 0), None).log_det is None


def test_profile_has_a_row_for_it():
    model = ebf.wrap(build("cnn", (1, 8, 8)))
    x = torch.randn(6, 1, 8, 8, generator=rng(0))
    found = profiler.profile(model, x, seconds=0.1, objectives=("dsm", "ml", "ml stochastic"))
    assert [cost.objective for cost in found.costs] == ["dsm", "ml", "ml stochastic"]
    assert all(cost.milliseconds and cost.usable for cost in found.costs)
