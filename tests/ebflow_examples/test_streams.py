"""Every random stream has a name of its own: no two purposes see the same numbers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import ebflow_plugin as ebf
from ebflow_examples import demo, profiler
from ebflow_examples.bench.results import Settings
from ebflow_examples.config import TrainConfig
from ebflow_examples.data import load
from ebflow_examples.reproduce import table2
from ebflow_examples.reproduce.common import Cell
from ebflow_examples.reproduce.timed import train_for
from ebflow_examples.runs import build, likelihood, open_run
from ebflow_examples.streams import drawing_from, stream
from ebflow_examples.training import train
from randomness import rng

SMALL = TrainConfig(
    steps=2, batch_size=20, limit=150, evaluate_every=1, loss="dsm", sigma=0.2, device="cpu", calibrate="full"
)


@pytest.fixture
def drawn(monkeypatch):
    """The noise of all dequantisations, in the order in which it is drawn, with the rows that it was added to."""
    calls = []
    real = ebf.Dequantize.dequantize

    def dequantize(self, x, generator=None):
        y, log_volume = real(self, x, generator)
        calls.append((x.detach().clone(), (y * self.levels - x).detach().double()))
        return y, log_volume

    monkeypatch.setattr(ebf.Dequantize, "dequantize", dequantize)
    return calls


def split_by_rows(calls, rows):
    """The noise that was added to some of these rows, and all other noise."""
    known = {row.numpy().tobytes() for row in rows.flatten(1)}
    there = [all(row.numpy().tobytes() in known for row in x.flatten(1)) for x, _ in calls]
    return [
        [noise for (_, noise), inside in zip(calls, there, strict=True) if inside is wanted] for wanted in (True, False)
    ]


def shared(first, second):
    """How many runs of four numbers two lists of noise have in common. Levels round, so that digits are cut."""

    def runs(parts):
        found = set()
        for part in parts:
            numbers = (part.flatten().numpy() * 1000).round().astype(np.int64)
            found |= set(zip(numbers, numbers[1:], numbers[2:], numbers[3:], strict=False))
        return found

    return len(runs(first) & runs(second))


def check(calls, test):
    of_test, others = split_by_rows(calls, test)
    assert of_test
    assert others
    assert shared(of_test, of_test) > 0
    assert shared(of_test, others) <= 2  # by chance: some 1e10 pairs of 1e12 kinds


def test_the_noise_of_the_test_is_none_of_training(tmp_path, drawn):
    train(SMALL, tmp_path, progress=False)
    check(drawn, load("digits").test)
    for weights in ("best", "last", "average"):
        drawn.clear()
        run = open_run(tmp_path, weights, "cpu")
        likelihood(run.model, run.data.test, run.config.seed)
        likelihood(run.model, run.data.validation, run.config.seed, "validation")
        check(drawn, load("digits").test)


def test_the_noise_of_the_test_is_none_of_training_in_the_demo(drawn, monkeypatch):
    demo.small_case("dsm", 2, 0)
    check(drawn, load("digits").test)


@pytest.mark.parametrize("model", ["gaussian", "fc"])
def test_the_noise_of_the_test_is_none_of_training_in_table_2(drawn, tmp_path, model):
    settings = {"data": "digits", "model": model, "loss": "dsm", "way": "ours", "seed": 0, "quick": True}
    settings |= {"margin": 1e-6, "search": False}
    table2.compute(Cell("table2", "cell", settings, seconds=0.01), tmp_path, None)
    check(drawn, load("digits").test)


@pytest.mark.parametrize("calibrate", ["none", "full"])
def test_the_first_point_of_a_curve_has_the_noise_of_the_others(calibrate):
    config = replace(SMALL, lr=1e-30, schedule="constant", ema=False, calibrate=calibrate)
    curve = train_for(build(config), 0.05, evaluations=2, validation=100).curve
    assert len(curve) > 1
    assert [nll for _, nll in curve] == pytest.approx([curve[0][1]] * len(curve), rel=1e-9)


def test_weights_rows_and_noise_come_from_different_streams():
    with drawing_from(0, "weights"):
        weights = torch.randn(100)
    data, noise = (torch.randn(100, generator=stream(0, name)) for name in ("data", "noise"))
    plain = torch.randn(100, generator=rng(0))
    for first, second in ((weights, data), (weights, noise), (data, noise), (data, plain)):
        assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.4
    assert not torch.equal(Settings().data(100), plain)
    batch = profiler.batch_for(build(replace(SMALL, data="swirl")).model, 50, None, (2,))
    assert not torch.isclose(batch.flatten(), noise).any()


def test_global_generators_are_left_as_they_were(tmp_path):
    before = torch.get_rng_state()
    train(SMALL, Path(tmp_path), progress=False)
    assert torch.equal(torch.get_rng_state(), before)
