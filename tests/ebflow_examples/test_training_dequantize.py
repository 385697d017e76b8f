"""`ebflow train --dequantize`: which noise a run has, and that it keeps it."""

from dataclasses import replace

import pytest
import torch

from ebflow_examples.config import TrainConfig
from ebflow_examples.runs import build, open_run, run_configuration
from ebflow_examples.training import configuration, train
from ebflow_plugin.errors import BiasWarning, InputError, UnknownNameError

SMALL = TrainConfig(
    data="digits", loss="ml", steps=2, batch_size=20, limit=150, evaluate_every=1, device="cpu", whiten=False,
    calibrate="none", ema=False,
)  # fmt: skip


def test_noise_is_uniform_unless_asked_for():
    assert repr(build(SMALL).model.preprocessing[0]) == "Dequantize(levels=17)"
    smooth = build(replace(SMALL, dequantize="smooth")).model.preprocessing[0]
    assert repr(smooth) == "Dequantize(levels=17, noise='smooth')"
    with pytest.raises(UnknownNameError, match="unknown dequantize 'rough'"):
        SMALL.updated({"dequantize": "rough"})


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    smooth = replace(SMALL, dequantize="smooth")
    through = train(replace(smooth, steps=4, schedule="constant"), tmp_path / "through", progress=False)
    train(replace(smooth, schedule="constant"), tmp_path / "parts", progress=False)
    assert run_configuration(tmp_path / "parts").dequantize == "smooth"
    config = configuration({"steps": 4}, None, tmp_path / "parts", resume=True)
    parts = train(config, tmp_path / "parts", resume=True, progress=False)
    assert parts["test"] == through["test"]
    one, two = (open_run(tmp_path / name, "last").model for name in ("through", "parts"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert one.preprocessing[0].noise == "smooth"


def test_the_noise_says_what_a_run_is(tmp_path):
    train(replace(SMALL, dequantize="smooth"), tmp_path, progress=False)
    with pytest.raises(InputError, match="was begun with dequantize smooth"):
        configuration({"dequantize": "uniform"}, None, tmp_path, resume=True)


def test_sliced_score_matching_warns_of_uniform_noise_alone(tmp_path):
    train(replace(SMALL, loss="ssm", dequantize="smooth"), tmp_path / "smooth", progress=False)
    with pytest.warns(BiasWarning, match="density of the data, which jumps"):
        train(replace(SMALL, loss="ssm"), tmp_path / "uniform", progress=False)
