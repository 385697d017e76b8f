"""Training by the clock: what is learnt and told, the best weights, and starts that objectives share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ebflow_examples.config import TrainConfig
from ebflow_examples.defaults import settle
from ebflow_examples.reproduce.timed import step_seconds, train_for
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


def test_a_copy_tells_how_long_a_step_takes():
    run = settle(build(TrainConfig(data="digits", model="fc", loss="ml", device="cpu", limit=300)))
    before = [parameter.clone() for parameter in run.model.parameters()]
    assert 0 < step_seconds(run) < 1
    assert all(map(torch.equal, before, run.model.parameters()))
