"""What a run of fit() records and shows: metrics, the callback, lines."""

import pytest
import torch

from ebflow_plugin.objectives import DSM, ML
from ebflow_plugin.training import Event, fit
from training_models import make_data, make_model

QUIET = {"progress": False}


def test_a_line_has_the_time_left():
    record = {"step": 100, "loss": 0.0, "steps_per_second": 10.0}
    event = Event(100, record, model=None, steps=250, seconds_left=3735.0)
    assert str(event) == "step 100/250  loss 0.0000  10.0 steps/s  1:02:15 left"


def test_the_callback_is_told_how_far_the_run_is_and_can_stop():
    events = []

    def stop(event):
        events.append(event)
        return event.step >= 4

    result = fit(ML(make_model()), make_data(), steps=20, evaluate_every=2, callback=stop, **QUIET)
    assert [(event.step, event.steps) for event in events] == [(2, 20), (4, 20)]
    assert [event.record for event in events] == result.history
    assert all(event.seconds_left > 0 for event in events)
    assert (result.steps, result.stopped) == (4, "callback")


def test_a_record_has_all_that_was_measured():
    x = make_data()
    result = fit(DSM(make_model()), x, steps=6, evaluate_every=2, validation=x, ema=True, **QUIET)
    assert [record["step"] for record in result.history] == [2, 4, 6]
    names = {
        "step",
        "epoch",
        "loss",
        "nll",
        "bits_per_dim",
        "best_nll",
        "grad_norm",
        "lr",
        "seconds",
        "steps_per_second",
    }
    assert set(result.history[0]) == names
    best = min(result.start_nll, *(record["nll"] for record in result.history))
    assert result.history[-1]["best_nll"] == result.best_nll == best
    assert fit(ML(make_model()), x, epochs=3, batch_size=100, evaluate_every=1, **QUIET).history[-1]["epoch"] == 2


def test_the_recorded_loss_is_the_mean_since_the_last_record():
    x, losses = make_data(64), []

    class Spy(ML):
        def forward(self, x, context=None):
            losses.append(super().forward(x, context))
            return losses[-1]

    result = fit(Spy(make_model()), x, steps=6, batch_size=16, evaluate_every=3, **QUIET)
    means = [torch.stack(losses[:3]).mean().item(), torch.stack(losses[3:6]).mean().item()]
    assert [record["loss"] for record in result.history] == pytest.approx(means, rel=1e-5)


def test_there_is_a_line_for_the_start_and_each_evaluation(capsys):
    x = make_data()
    fit(ML(make_model()), x, steps=4, evaluate_every=2, validation=x)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("step 0/4  NLL ")
    assert "loss" not in lines[0]
    for word in ("step 4/4", "loss", "NLL", "bits/dim", "steps/s", "left"):
        assert word in lines[-1]
    fit(ML(make_model()), x, steps=4, **QUIET)
    assert capsys.readouterr().err == ""
