"""When fit() evaluates, what an evaluation costs, and what the displays are told of it."""

import io

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ebflow_plugin as ebf
from ebflow_plugin.objectives import ML
from ebflow_plugin.training import fit
from ebflow_plugin.training import progress as shown
from ebflow_plugin.training.batches import batches
from ebflow_plugin.training.evaluation import evaluate, evaluate_calibrated
from training_models import coupling_model, make_data, make_model

QUIET = {"progress": False}


def evaluated_at(steps, rows, validation, **options):
    result = fit(ML(make_model()), make_data(rows), steps=steps, validation=make_data(validation), **QUIET, **options)
    return [record["step"] for record in result.history]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ((40, 64, 32), [*range(2, 41, 2)]),  # 20 in a run
        ((40, 64, 160), [*range(5, 41, 5)]),  # an evaluation has 160 rows, as 5 steps have
        ((40, 64, 3200), [14, 28, 40]),  # but 3 in a run
        ((4, 64, 3200), [2, 4]),
    ],
)
def test_an_evaluation_has_no_more_rows_than_the_steps_before_it(case, expected):
    assert evaluated_at(*case, batch_size=32) == expected
    assert evaluated_at(*case, batch_size=8, accumulate=4) == expected
    assert evaluated_at(*case, batch_size=32, evaluate_every=1) == [*range(1, case[0] + 1)]


def test_calibrating_makes_evaluations_rarer():
    assert evaluated_at(40, 128, 32, batch_size=32, calibrate=True) == [*range(5, 41, 5)]


def test_loaders_are_counted_too():
    loader = DataLoader(TensorDataset(make_data(64)), batch_size=32)
    held_out = DataLoader(TensorDataset(make_data(160)), batch_size=16)
    result = fit(ML(make_model()), loader, steps=40, validation=held_out, **QUIET)
    assert [record["step"] for record in result.history] == [*range(5, 41, 5)]


def test_checkpoints_are_not_rarer_for_it(tmp_path):
    fit(
        ML(make_model()),
        make_data(64),
        steps=39,
        batch_size=32,
        validation=make_data(3200),
        checkpoint=tmp_path,
        **QUIET,
    )
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000038.pt", "step-00000039.pt"]


@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_both_likelihoods_come_from_one_pass(kind):
    """Through the flow, and equal to those of the model with and without its calibration."""
    model = ebf.wrap(
        coupling_model().flow.double(), preprocess=[ebf.Dequantize(8), ebf.Rescale(0.05, 0.95), ebf.Logit()]
    )
    x = torch.randint(8, (200, 4), generator=torch.Generator().manual_seed(0))
    source = batches(x, 64, shuffle=False)
    before, _ = evaluate(model, source, seed=3)
    model.calibrate(x, kind)
    after, bits = evaluate(model, source, seed=3)
    assert after < before - 0.1
    passes = []
    hook = model.flow._transform.transform_net.register_forward_pre_hook(lambda *args: passes.append(1))
    found = evaluate_calibrated(model, source, seed=3)
    hook.remove()
    assert len(passes) == len(source)
    assert found == pytest.approx((after, bits, before), rel=1e-12)


def test_the_time_left_counts_evaluations():
    file = io.StringIO()
    display = shown.PlainDisplay(file)
    display.start(0, 250, 100)
    display.record({"step": 100, "loss": 0.0, "steps_per_second": 10.0, "evaluation_seconds": 60.0})
    assert "0:02:15 left" in file.getvalue()  # 150 steps in 15 s, and evaluations at 200 and 250


def test_displays_are_told_how_long_an_evaluation_took(monkeypatch):
    class Kept(shown.NoDisplay):
        def start(self, step, total, every=0):
            self.every, self.told = every, []

        def record(self, record):
            self.told.append(record)

    display = Kept()
    monkeypatch.setattr("ebflow_plugin.training.fitting.display", lambda *args: display)
    result = fit(ML(make_model()), make_data(), steps=4, evaluate_every=2, validation=make_data(30))
    assert display.every == 2
    assert [record["step"] for record in display.told] == [0, 2, 4]
    assert all(record["evaluation_seconds"] > 0 for record in display.told)
    assert all("evaluation_seconds" not in record for record in result.history)
