"""Fig. 4: what it draws, and of which weights."""

from dataclasses import replace

import pytest
import torch

from ebflow_examples.reproduce import fig4
from ebflow_examples.reproduce.common import Options
from ebflow_examples.runs import likelihood


@pytest.mark.parametrize("place", [0, 1], ids=["ml", "dsm"])
def test_images_are_drawn_of_the_weights_with_the_best_nll(place, tmp_path, monkeypatch):
    cell = replace(fig4.cells(Options("fig4", 1.0, data="digits", quick=True))[place], seconds=0.5)
    runs, made = [], fig4.train_for
    monkeypatch.setattr(fig4, "train_for", lambda *told, **more: runs.append(made(*told, **more)) or runs[-1])
    own = {**fig4.OWN, "ml": {"loss": "ml", "lr": 0.3}}  # wild, so that the last weights are not the best
    monkeypatch.setattr(fig4, "OWN", own)
    found = fig4.compute(cell, tmp_path, None)
    (trained,) = runs
    assert found["steps"] == trained.result.steps > 0
    assert trained.result.best_step < trained.result.steps or place == 1
    for name, value in trained.run.model.flow.state_dict().items():
        assert torch.equal(value, trained.result.best_state[f"flow.{name}"])
    assert found["nll"] == likelihood(trained.run.model, trained.run.data.test[:50], 0).nll
    assert found["nll"] < found["raw_nll"]  # a calibration of a model that is hardly trained
    assert {f"{cell.name}-{kind}.npy" for kind in ("warm", "cool", "data")} == {p.name for p in tmp_path.glob("*.npy")}
    weight = trained.run.config.energy_weight
    assert weight == (0.0 if place == 0 else fig4.ENERGY * 64)  # for each pixel
