"""What a run records and shows: metrics, callbacks, lines and the live display."""

import io
import json
import sys

import pytest
import torch

from ebflow_plugin.objectives import DSM, ML, SSM
from ebflow_plugin.training import fit, loop
from ebflow_plugin.training import progress as shown
from ebflow_plugin.training.options import Pace
from training_models import make_data, make_model

QUIET = {"progress": False}


def test_the_time_left_counts_evaluations():
    assert (
        Pace(250, 100, 100).seconds_left(100, 10.0, 60.0) == 135.0
    )  # 150 steps in 15 s, and evaluations at 200 and 250
    file = io.StringIO()
    record = {"step": 100, "loss": 0.0, "steps_per_second": 10.0}
    shown.Lines(file)(shown.Event(100, record, model=None, ema=None, steps=250, seconds_left=3735.0))
    assert file.getvalue() == "step 100/250  loss 0.0000  10.0 steps/s  1:02:15 left\n"


def test_callbacks_are_told_how_far_the_run_is():
    events = []
    result = fit(
        ML(make_model()), make_data(), steps=4, evaluate_every=2, validation=make_data(30), callbacks=[events.append],
        **QUIET,
    )  # fmt: skip
    assert [(event.step, event.steps) for event in events] == [(2, 4), (4, 4)]
    assert [event.start_nll for event in events] == [result.start_nll] * 2
    assert events[0].seconds_left > 0
    assert events[1].seconds_left == 0


def test_callbacks_see_the_metrics_and_can_stop():
    seen = []

    def stop(event):
        seen.append((event.step, event.record["loss"]))
        return event.step >= 4

    result = fit(ML(make_model()), make_data(), steps=20, evaluate_every=2, callbacks=[stop], **QUIET)
    assert [step for step, _ in seen] == [2, 4]
    assert (result.steps, result.stopped) == (4, "callback")


# What is shown.


def test_metrics_are_json_lines(tmp_path):
    x = make_data()
    result = fit(DSM(make_model()), x, steps=6, evaluate_every=2, validation=x, metrics=tmp_path / "m.jsonl", **QUIET)
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert lines == list(result.history)
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert {"step", "epoch", "loss", "nll", "bits_per_dim", "best_nll", "grad_norm", "lr", "seconds"} <= set(lines[0])
    assert set(lines[0]["condition"]) == {"_transform._transforms.1", "_transform._transforms.3"}


def test_the_recorded_loss_is_the_mean_since_the_last_record():
    x, losses = make_data(64), []

    class Spy(ML):
        def forward(self, x, context=None):
            losses.append(super().forward(x, context))
            return losses[-1]

    result = fit(Spy(make_model()), x, steps=6, batch_size=16, evaluate_every=3, **QUIET)
    means = [torch.stack(losses[:3]).mean().item(), torch.stack(losses[3:6]).mean().item()]
    assert [record["loss"] for record in result.history] == pytest.approx(means, rel=1e-5)


def test_without_a_terminal_there_are_lines(capsys):
    x = make_data()
    fit(ML(make_model()), x, steps=4, evaluate_every=2, validation=x)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "step 0/4" in lines[0]
    assert "loss" not in lines[0]
    for word in ("step 4/4", "loss", "NLL", "bits/dim", "condition", "steps/s", "left"):
        assert word in lines[-1]
    fit(ML(make_model()), x, steps=4, **QUIET)
    assert capsys.readouterr().err == ""


def test_the_live_display_shows_everything(monkeypatch):
    rich = pytest.importorskip("rich.console")
    screen = io.StringIO()
    console = rich.Console(file=screen, force_terminal=True, width=120, height=40)
    live = shown.LiveDisplay(console)
    monkeypatch.setattr(loop, "display", lambda: (live, live))
    x = make_data()
    fit(SSM(make_model()), x, steps=4, evaluate_every=2, validation=x)
    text = screen.getvalue()
    for word in ("4/4", "loss", "NLL", "bits/dim", "steps/s", "left", "_transform._transforms.1", "condition"):
        assert word in text


def test_without_rich_there_are_lines(monkeypatch):
    monkeypatch.setattr(shown, "find_spec", lambda name: None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert isinstance(shown.display()[0], shown.Lines)
