"""Table 1's two recipes of score matching: which cells there are, their data, and their objectives."""

import pytest
import torch

from ebflow_examples.reproduce import table1
from ebflow_examples.reproduce.common import Options
from ebflow_examples.reproduce.timed import train_for
from ebflow_examples.synthetic import PLANE, SMOOTHING


def cells(seeds=2):
    return {cell.name: cell for cell in table1.cells(Options("table1", budget=1.0, seeds=seeds))}


def test_every_score_matching_objective_has_both_recipes():
    found = cells()
    for data in PLANE:
        for loss in ("ssm", "dsm", "fdssm"):
            for seed in range(2):
                paper, ours = found[f"{data}-{loss}-seed{seed}"], found[f"{data}-{loss}-shrinking-seed{seed}"]
                assert (paper.settings["recipe"], ours.settings["recipe"]) == ("paper", "shrinking")
                assert paper.best_of
                assert not ours.best_of  # one rate, which was not searched for
                assert ours.part == paper.part
        assert f"{data}-ml-shrinking-seed0" not in found


@pytest.mark.parametrize("loss", ["ssm", "dsm", "fdssm"])
def test_shrinking_noise_is_added_to_the_points_before_theirs(loss):
    run = table1.started(cells()[f"swirl-{loss}-shrinking-seed0"].settings)
    assert torch.equal(run.data.train, run.data.clean)
    asked = []

    def objective(model, steps):
        asked.append((steps, table1.shrinking(loss, model, steps)))
        return asked[-1][1]

    train_for(run, 0.3, evaluations=1, validation=50, objective=objective)
    (_, probed), (steps, trained) = asked
    assert trained.noise.option.end == SMOOTHING
    assert trained.noise.option.steps == max(1, round(0.6 * steps))
    assert trained.latent_weight == 1.0
    assert trained.noise.step > 0
    assert trained.state()["noise_start"] == pytest.approx(0.5 * run.data.clean.var(0).mean().sqrt().item(), rel=0.15)
    assert probed.model is not run.model
