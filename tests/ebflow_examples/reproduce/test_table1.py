"""Table 1's two recipes of score matching: which cells there are, their data, and their objectives."""

import pytest
import torch

from ebflow_examples.defaults import objective_of, settle
from ebflow_examples.reproduce import table1, timed
from ebflow_examples.reproduce.common import Options
from ebflow_examples.runs import build
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
                assert ours.part <= paper.part
                assert ours.settings["lr"] == table1.SHRINKING_RATE
        assert f"{data}-ml-shrinking-seed0" not in found


@pytest.mark.parametrize("loss", ["ssm", "dsm", "fdssm"])
def test_shrinking_noise_is_added_to_the_points_before_theirs(loss, monkeypatch):
    made, objectives = timed.objective_of, []
    monkeypatch.setattr(timed, "objective_of", lambda *told: objectives.append(made(*told)) or objectives[-1])
    settings = cells()[f"swirl-{loss}-shrinking-seed0"].settings
    trained = timed.train_for(build(table1.recipe(settings)), 0.3, evaluations=1, validation=50)
    clean = trained.run.data.clean
    assert torch.equal(trained.run.data.train, clean)
    probed, objective = objectives
    assert probed.model is not objective.model
    assert objective.model is trained.run.model
    if loss != "dsm":  # whose gradients have heavy tails
        assert objective.weights == (0.9, 0.1)
        objective = objective.terms[0]
    assert objective.noise.option.end == SMOOTHING
    assert objective.noise.option.steps == trained.run.config.shrink < 1000  # what 0.3 s have room for, not a whole run
    assert objective.latent_weight == 1.0
    assert objective.noise.step > 0
    assert objective.state()["noise_start"] == pytest.approx(0.5 * clean.var(0).mean().sqrt().item(), rel=0.15)


@pytest.mark.parametrize(("loss", "sigma"), [("ssm", None), ("dsm", SMOOTHING), ("fdssm", None), ("ml", None)])
def test_the_papers_recipe_has_no_shrinking_noise(loss, sigma):
    run = settle(build(table1.recipe({**cells()[f"swirl-{loss}-seed0"].settings, "lr": 1e-3})))
    objective = objective_of(run.model, run.config)
    assert (run.config.schedule, run.config.lr, run.config.batch_size) == ("constant", 1e-3, 250)
    assert objective.state() == {}
    assert getattr(objective, "latent_weight", 0.0) == 0.0
    assert getattr(objective, "sigma", None) == sigma
    # DSM alone adds the noise of the data itself.
    assert torch.equal(run.data.train, run.data.clean) == (loss == "dsm")
