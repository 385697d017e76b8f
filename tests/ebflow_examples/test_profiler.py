"""What `ebflow profile` measures, and which objective it recommends by that."""

import pytest
import torch

import ebflow_plugin as ebf
from ebflow_examples.models import build
from ebflow_examples.profiler import Cost, Profile, profile
from randomness import rng


def advice(**milliseconds):
    costs = [
        Cost(name.replace("_", " "), value, value, value, 1.0, usable=value is not None)
        for name, value in milliseconds.items()
    ]
    return Profile(tuple(costs), (100, 8), "cpu", 1, 5).recommendation.splitlines()


@pytest.mark.parametrize(
    ("measured", "first", "second"),
    [
        (
            {"dsm": 2.0, "ssm": 4.0, "ml": 2.5, "ml_stochastic": 6.0},
            "use ml. Its determinants are cheap",
            "use dsm, 1.2",
        ),
        (
            {"dsm": 50.0, "ssm": 100.0, "ml": 500.0, "ml_stochastic": 60.0},
            "use ml (ebflow train --loss ml --log-det stochastic), 8.3 times as many steps a second as ml (the same",
            "use dsm, 10.0 times as many steps a second as ml",
        ),
        (
            {"dsm": 30.0, "ml": 90.0, "ml_stochastic": 50.0, "ml_relative": 25.0},
            "use ml (ebflow train --loss ml --log-det relative), 3.6 times as many steps a second as ml (other steps",
            "use dsm, 3.0",
        ),
        (
            {"dsm": 30.0, "ml_relative": 25.0},
            "use ml (ebflow train --loss ml --log-det relative), the cheapest likelihood that works",
            "use dsm; it learns",
        ),
        ({"ml": 90.0}, "use ml. Its determinants", "no score matching is right"),
        ({"fdssm": 9.0, "ssm": 5.0}, "no likelihood works", "use ssm. Follow"),
    ],
)
def test_advice_follows_from_the_measurements(measured, first, second):
    likelihood, score = advice(**measured)
    assert likelihood.startswith("NLL, samples: ")
    assert score.startswith("Score, denoising: ")
    assert first in likelihood
    assert second in score


def test_sliced_score_matching_is_named_where_it_is_right():
    assert "Without noise: ssm, a step 2.0 times as long" in advice(dsm=50.0, ssm=100.0, ml=500.0)[1]
    assert "ssm" not in advice(dsm=50.0, ssm=None, ml=500.0)[1]


def test_profile_has_a_row_for_it():
    model = ebf.wrap(build("cnn", (1, 8, 8)))
    x = torch.randn(6, 1, 8, 8, generator=rng(0))
    found = profile(model, x, seconds=0.1, objectives=("dsm", "ml", "ml stochastic"))
    assert [cost.objective for cost in found.costs] == ["dsm", "ml", "ml stochastic", "the library's ml"]
    assert all(cost.milliseconds and cost.usable for cost in found.costs)


def test_the_librarys_own_likelihood_is_left_out_where_it_sees_other_data():
    model = ebf.wrap(build("fc", (4,)), preprocess=[ebf.Rescale(0.0, 2.0)])
    found = profile(model, torch.randn(6, 4, generator=rng(0)), seconds=0.1, objectives=("ml",))
    assert [cost.objective for cost in found.costs] == ["ml"]


@pytest.mark.slow
def test_each_objective_is_timed_compiled_too():
    model = ebf.wrap(build("fc", (4,)))
    x = torch.randn(6, 4, generator=rng(0))
    found = profile(model, x, seconds=0.1, objectives=("ml", "ml stochastic"), compiled=True)
    assert [cost.objective for cost in found.costs] == ["ml", "ml compiled", "ml stochastic", "the library's ml"]
    assert all(cost.milliseconds and cost.usable for cost in found.costs)
