"""Training by the clock: seconds that count, and a judge that is asked at its moments."""

from __future__ import annotations

import pytest
import torch
from nflows import distributions, flows

import ebflow_plugin as ebf
from ebflow_examples import clock
from ebflow_examples.clock import Clock
from ebflow_nflows import FullLinear
from randomness import rng


@pytest.fixture
def now(monkeypatch):
    """The time, in a list, which the test sets."""
    time = [100.0]
    monkeypatch.setattr("ebflow_examples.clock.time.process_time", lambda: time[0])
    return time


def test_a_clock_counts_cpu_seconds_up_to_the_last_step(now):
    made = Clock(10.0)
    made.go()
    assert made.share == 0.0
    now[0] = 104.0
    assert made.tick() == pytest.approx(0.4)
    now[0] = 107.0  # what comes after the last step is no training
    made.stop()
    now[0] = 150.0  # a long evaluation
    assert made.share == pytest.approx(0.4)
    made.go()
    now[0] = 156.0
    assert made.tick() == pytest.approx(1.0)


def test_the_judge_is_asked_at_its_moments_and_costs_no_time(now):
    model = ebf.wrap(flows.Flow(FullLinear(2), distributions.StandardNormal([2])))
    asked, ticks, rates = [], [], []

    def judge(step):
        asked.append(step)
        now[0] += 1000.0
        return -float(step)

    def tick(used, step):
        ticks.append((used, step))

    class Stepped(torch.optim.SGD):
        def step(self):
            rates.append(self.param_groups[0]["lr"])
            now[0] += 1.0  # a second each
            super().step()

    trained = clock.train(
        ebf.objectives.ML(model), torch.randn(20, 2, generator=rng()), 16.0, judge,
        optimizer=lambda parameters: Stepped(parameters, lr=1e-3), moments=[0.0625, 0.25, 0.5625, 1.0],
        schedule=lambda share: 1.0 - share, batch_size=5, tick=tick,
    )  # fmt: skip
    assert asked == [0, 1, 4, 9, 16]
    assert trained.curve == [(float(step), -float(step)) for step in asked]
    assert (trained.result.steps, trained.seconds) == (16, 16.0)
    assert ticks == [(float(step), step) for step in range(1, 17)]
    assert rates == pytest.approx([1e-3 * (1 - step / 16) for step in range(16)])  # the schedule follows the clock
