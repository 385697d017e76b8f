"""Training by the clock: what is learnt and told, the best weights, and starts that objectives share."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

import ebflow_plugin as ebf
from ebflow_examples.config import TrainConfig
from ebflow_examples.reproduce.timed import train_for
from ebflow_examples.runs import build, likelihood


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


def test_the_compiler_takes_no_time_of_a_run(monkeypatch):
    made, seen = ebf.objectives.Objective.compile, []

    def compile_slowly(objective):
        def backend(graph, inputs):
            began = time.process_time()
            while time.process_time() < began + 0.5:
                pass
            seen.append(objective)
            return graph

        made(objective, backend=backend)

    monkeypatch.setattr(ebf.objectives.Objective, "compile", compile_slowly)
    config = TrainConfig(data="digits", model="fc", loss="ml", device="cpu", limit=300, calibrate="none", compile=True)
    run = build(replace(config, lr=1e-3, whiten=False, gaussianize=False))
    trained = train_for(run, 0.2, evaluations=1, validation=None)
    assert [objective.model for objective in seen] == [run.model]
    assert trained.seconds < 0.5
    assert trained.result.steps > 1
