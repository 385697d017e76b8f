"""Table 1's recipes: which cells there are, their data, and their objectives."""

from dataclasses import replace

import pytest
import torch

import ebflow_plugin as ebf
from ebflow_examples.config import TrainConfig
from ebflow_examples.defaults import objective_of, settle
from ebflow_examples.reproduce import table1, timed
from ebflow_examples.reproduce.common import Options
from ebflow_examples.runs import build
from ebflow_examples.synthetic import PLANE, SMOOTHING


def settings(name, quick=False):
    found = table1.cells(Options("table1", budget=1.0, seeds=2, quick=quick))
    return next(cell for cell in found if cell.name == name).settings


def test_every_score_matching_objective_has_the_papers_rates_and_our_recipe():
    found = {cell.name: cell for cell in table1.cells(Options("table1", budget=1.0, seeds=2))}
    for data in PLANE:
        for loss in ("ssm", "dsm", "fdssm"):
            for seed in range(2):
                by_kl, by_fisher, ours = (found[f"{data}-{loss}-{way}-seed{seed}"] for way in ("kl", "fisher", "ours"))
                assert by_kl.best_of == by_fisher.best_of != ()
                assert (by_kl.judge, by_fisher.judge) == ("validation_nll", "validation_fisher")
                assert by_kl.timed
                assert not ours.timed
                assert not ours.best_of  # one rate, which was not searched for
        assert f"{data}-ml-ours-seed0" in found
        assert f"{data}-ml-fisher-seed0" not in found


@pytest.mark.parametrize("loss", ["ssm", "dsm", "fdssm", "ml"])
def test_our_recipe_is_what_ebflow_train_does_by_itself(loss):
    """But for likelihood, whose recipe here is that of score matching, so that they compare."""
    ours = settle(build(table1.recipe(settings(f"swirl-{loss}-ours-seed1"))))
    own = TrainConfig(data="swirl", loss=loss, seed=1, device="cpu", model="glow")
    if loss == "ml":
        own = replace(own, steps=8000, batch_size=256, lr=2e-3)
    train = settle(build(own))
    assert ours.config == replace(train.config, compile=True)
    assert torch.equal(ours.data.train, train.data.train)
    assert torch.equal(ours.data.train, ours.data.clean) == (loss != "ml")


@pytest.mark.parametrize("loss", ["ssm", "dsm", "fdssm"])
def test_shrinking_noise_is_added_to_the_points_before_theirs(loss, monkeypatch):
    made, objectives = timed.objective_of, []
    monkeypatch.setattr(timed, "objective_of", lambda *told: objectives.append(made(*told)) or objectives[-1])
    weights = []
    for _ in range(2):
        run = build(table1.recipe(settings(f"swirl-{loss}-ours-seed0", quick=True)))
        run, result = timed.train_by_steps(run)
        assert isinstance(result.ema, ebf.EMA)
        assert (result.steps, run.config.shrink) == (3, 2)
        weights.append(torch.cat([parameter.flatten() for parameter in run.model.parameters()]))
    assert torch.equal(*weights)  # a seed is a result, whatever the clock says
    objective = objectives[0]
    if loss != "dsm":  # whose gradients have heavy tails
        assert objective.weights == (0.9, 0.1)
        objective = objective.terms[0]
    assert objective.noise.option.end == SMOOTHING
    assert objective.latent_weight == 1.0
    assert objective.noise.step == 3
    clean = run.data.clean
    assert objective.state()["noise_start"] == pytest.approx(0.5 * clean.var(0).mean().sqrt().item(), rel=0.25)


@pytest.mark.parametrize(("loss", "sigma"), [("ssm", None), ("dsm", SMOOTHING), ("fdssm", None), ("ml", None)])
def test_the_papers_recipe_has_no_shrinking_noise(loss, sigma):
    run = settle(build(table1.recipe({**settings(f"swirl-{loss}-kl-seed0"), "lr": 1e-3})))
    objective = objective_of(run.model, run.config)
    assert (run.config.schedule, run.config.lr, run.config.batch_size) == ("constant", 1e-3, 250)
    assert objective.state() == {}
    assert getattr(objective, "latent_weight", 0.0) == 0.0
    assert getattr(objective, "sigma", None) == sigma
    # DSM alone adds the noise of the data itself.
    assert torch.equal(run.data.train, run.data.clean) == (loss == "dsm")
