"""``ebflow train --target``: targets without data."""

import json
import math

import numpy as np
import pytest
import torch

from commands import ebflow, refused
from ebflow_examples import energies
from ebflow_examples.energies import ENERGIES
from randomness import randn

QUICK = ["--steps", "20", "--batch-size", "32", "--evaluate-every", "10"]


@pytest.mark.parametrize("name", ENERGIES)
def test_a_run_leaves_its_judgement_samples_and_weights(tmp_path, monkeypatch, name):
    monkeypatch.setattr(energies, "FINAL", 500)
    monkeypatch.setattr(energies, "JUDGED", 200)
    done = ebflow("train", "--target", name, "--out", tmp_path, *QUICK)
    lines = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["10/20", "20/20"]
    assert all("  effective 0." in line for line in lines)
    assert "accepted" in done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 0 < summary["effective"] < 1
    assert summary["exact_log_z"] == ENERGIES[name].log_z
    assert np.load(tmp_path / "samples.npy").shape == (500, *ENERGIES[name].shape)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    model = energies.model_of(ENERGIES[name], 0)
    model.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))


def test_the_known_log_z_is_that_of_a_wide_proposal():
    proposal = torch.distributions.Normal(torch.zeros(2).double(), 2.0)
    x = proposal.sample((200_000,))
    logs = energies.double_well(x) - proposal.log_prob(x).sum(1)
    found = float(torch.logsumexp(logs, 0)) - math.log(len(x))
    assert found == pytest.approx(ENERGIES["double-well"].log_z, abs=0.02)


def test_the_lattice_has_the_symmetries_of_its_action():
    x = randn(3, 1, 8, 8)
    for other in (-x, x.roll(3, 2), x.flip(3), x.mT):
        torch.testing.assert_close(energies.phi4(other), energies.phi4(x))
    site = torch.zeros(1, 1, 8, 8, dtype=torch.float64)
    site[0, 0, 7, 0] = 2.0  # four bonds of 4, minus 4, plus 16
    assert float(energies.phi4(site)) == -(4 * 4 - 4 + 16)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["double-wel"], "Did you mean 'double-well'"),
        (["phi4", "--sigma", "1"], "--sigma has no meaning with --target phi4"),
        (["phi4", "--data", "swirl"], "--data has no meaning with --target phi4"),
        (["phi4", "--resume"], "leave --config and --resume out"),
        (["phi4", "--steps", "0"], "steps must be an integer"),
        (["phi4", "--lr", "-1"], "lr must be a positive number"),
    ],
)
def test_what_has_no_meaning_is_refused_in_a_line(tmp_path, arguments, words):
    assert words in refused("train", "--target", *arguments, "--out", tmp_path / "new")
    assert not (tmp_path / "new").exists()
