"""Training by the clock: seconds that count, and a judge that is asked at its moments."""

from __future__ import annotations

import pytest
import torch
from nflows import distributions, flows

import ebflow_plugin as ebf
from ebflow_examples import clock
from ebflow_nflows import FullLinear
from randomness import rng


@pytest.fixture
def now(monkeypatch):
    """The time, in a list, which the test sets."""
    time = [100.0]
    monkeypatch.setattr("ebflow_examples.clock.time.process_time", lambda: time[0])
    return time


def test_the_judge_is_asked_at_its_moments_and_costs_no_time(now):
    model = ebf.wrap(flows.Flow(FullLinear(2), distributions.StandardNormal([2])))
    asked, rates = [], []

    def judge(step):
        asked.append(step)
        now[0] += 1000.0
        return -float(step)

    class Stepped(torch.optim.SGD):
        def step(self):
            rates.append(self.param_groups[0]["lr"])
            now[0] += 1.0  # a second each
            super().step()

    trained = clock.train(
        ebf.objectives.ML(model), torch.randn(20, 2, generator=rng()), 16.0, judge,
        optimizer=lambda parameters: Stepped(parameters, lr=1e-3), moments=[0.0625, 0.25, 0.5625, 1.0],
        schedule=lambda share: 1.0 - share, batch_size=5,
    )  # fmt: skip
    assert asked == [0, 1, 4, 9, 16]
    assert trained.curve == [(float(step), -float(step)) for step in asked]
    assert trained.result.steps == 16
    assert rates == pytest.approx([1e-3 * (1 - step / 16) for step in range(16)])  # the schedule follows the clock
