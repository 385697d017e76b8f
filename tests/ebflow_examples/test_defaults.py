"""What is chosen for few rows: a run without a calibration."""

import numpy as np
import pytest
import torch

from commands import ebflow, refused_at_length
from ebflow_examples.config import TrainConfig
from ebflow_examples.defaults import CALIBRATION_ROWS
from ebflow_examples.runs import build
from ebflow_plugin.errors import InputError


@pytest.mark.parametrize("count", [10, 12, 19, 23])
@pytest.mark.parametrize("dim", [1, 8])
def test_a_run_of_few_rows_does_without_a_calibration_and_says_so(tmp_path, count, dim):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((count, dim)))
    flags = ["--data", tmp_path / "rows.npy", "--out", tmp_path / "run", "--steps", 2]
    done = ebflow("train", *flags)
    tenth = count // 10
    if (count, dim) != (10, 8):  # nor is there a start in closed form that a calibration would go with
        words = f"few rows: {count - 2 * tenth} to train on, {tenth} to choose the best weights by, {tenth} to test;"
        assert f"{words} too few to calibrate, which needs 20" in done.stderr
    assert 'calibrate = "none"' in (tmp_path / "run" / "config.toml").read_text()
    for weights in ("best", "last", "average"):
        ebflow("eval", tmp_path / "run", "--weights", weights)
    ebflow("train", "--out", tmp_path / "run", "--resume", "--steps", 3)


def test_images_of_which_few_are_taken_are_few_rows_too(tmp_path):
    assert (
        "few rows: 7 to train on, 179 to choose"
        in ebflow("train", "--limit", 7, "--steps", 2, "--out", tmp_path).stderr
    )


def test_as_many_rows_as_a_calibration_needs_are_not_few(tmp_path):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((24, 2)))
    done = ebflow("train", "--data", tmp_path / "rows.npy", "--out", tmp_path / "run", "--steps", 2)
    assert "few rows" not in done.stderr
    assert 'calibrate = "full"' in (tmp_path / "run" / "config.toml").read_text()
    model = build(TrainConfig(data=str(tmp_path / "rows.npy"), model="fc", device="cpu")).model
    rows = torch.randn(CALIBRATION_ROWS, 2)
    model.calibrate(rows)
    with pytest.raises(InputError, match=f"at least {CALIBRATION_ROWS} data points"):
        model.calibrate(rows[1:])


def test_a_calibration_that_too_few_rows_are_asked_for_is_refused_before_the_work(tmp_path):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((15, 2)))
    flags = ["--data", tmp_path / "rows.npy", "--out", tmp_path / "run", "--calibrate", "full"]
    assert "needs at least 20 training rows, and" in refused_at_length("train", *flags)
    assert not (tmp_path / "run" / "config.toml").exists()
    assert "has 1 row to train on" in refused_at_length("train", *flags[:4], "--limit", 1)
