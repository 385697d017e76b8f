"""Training by the clock: seconds that count, evaluations on the way, and starts that objectives share."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ebflow_examples.config import TrainConfig
from ebflow_examples.reproduce.timed import Clock, Evaluations, train_for
from ebflow_examples.runs import build, likelihood
from ebflow_plugin.errors import TrainingError
from ebflow_plugin.training import Event


def test_a_start_is_computed_once_for_all_objectives(tmp_path: Path) -> None:
    """Another objective of the same model begins with the kept weights, and counts the seconds that they took."""
    file = tmp_path / "start-digits.safetensors"
    first, second, alone = (
        train_for(
            build(TrainConfig(data="digits", model="fc", loss=loss, lr=1e-5, limit=300, device="cpu")),
            0.1, evaluations=1, validation=50, start_file=kept,
        )
        for loss, kept in (("ml", file), ("dsm", file), ("dsm", None))
    )  # fmt: skip
    assert second.curve[0][1] == first.curve[0][1] == alone.curve[0][1]
    assert second.run.config == alone.run.config
    facts = json.loads(safe_open(file, "pt").metadata()["start"])
    assert facts["gaussianize"] is True
    assert second.start >= facts["seconds"] > 0


def test_a_clock_counts_cpu_seconds_up_to_the_last_step(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("ebflow_examples.reproduce.timed.time.process_time", lambda: now[0])
    clock = Clock(10.0)
    clock.go()
    assert clock.share == 0.0
    now[0] = 104.0
    assert clock.tick() == pytest.approx(0.4)
    now[0] = 107.0  # what comes after the last step is no training
    clock.stop()
    now[0] = 150.0  # a long evaluation
    assert clock.share == pytest.approx(0.4)
    clock.go()
    now[0] = 156.0
    assert clock.tick() == pytest.approx(1.0)


def test_evaluations_come_at_their_moments_and_keep_the_best(monkeypatch):
    run = build(TrainConfig(data="digits", loss="ml", device="cpu", calibrate="none", whiten=False, lr=0.1))
    clock = Clock(16.0)
    looks = Evaluations(run, clock, 4, None, 50, None)
    assert looks.moments == [0.0625, 0.25, 0.5625, 1.0]
    nlls = iter([5.0, 3.0, 4.0, 6.0, 7.0])
    monkeypatch.setattr("ebflow_examples.reproduce.timed.evaluate", lambda *given: (next(nlls), 0.0, 9.0))
    looks.look(0)
    ended = []
    for step in range(1, 17):  # a second each
        with torch.no_grad():
            next(run.model.parameters()).fill_(step)
        monkeypatch.setattr(Clock, "used", property(lambda self, step=step: float(step)))
        ended.append(looks(Event(step, {}, run.model, None)))
    assert ended == [False] * 15 + [True]
    assert [(step, nll) for _, step, nll, _ in looks.found] == [(0, 5.0), (1, 3.0), (4, 4.0), (9, 6.0), (16, 7.0)]
    nll, step, state = looks.best
    assert (nll, step) == (3.0, 1)
    assert all((state[name] == 1).all() for name, _ in list(run.model.named_parameters())[:1])  # a copy of then
    monkeypatch.setattr("ebflow_examples.reproduce.timed.evaluate", lambda *given: (math.nan, 0.0, 0.0))
    with pytest.raises(TrainingError, match="step 3: the NLL of the validation data is not a number"):
        looks.look(3)


def test_training_for_a_while_learns_and_tells_what_it_did():
    run = build(TrainConfig(data="digits", loss="ml", device="cpu", lr=3e-3, whiten=False, calibrate="none"))
    trained = train_for(run, 1.0, evaluations=4, validation=100)
    assert trained.seconds >= 1.0
    assert trained.curve[0][0] == trained.start > 0
    assert trained.curve[-1][1] < trained.curve[0][1] - 1.0
    times = [seconds for seconds, _ in trained.curve]
    assert times == sorted(times)
    assert trained.result.history[-1]["lr"] < 1e-4  # the schedule followed the clock
    trained.result.load_best(run.model)
    assert likelihood(run.model, run.data.validation[:100]).nll == pytest.approx(trained.result.best_nll, rel=0.05)
    assert trained.facts()["recipe"]["loss"] == "ml"
