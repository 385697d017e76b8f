"""Samples and imputation: runs that go on, weight decay, and chains against a conditional that is known."""

from dataclasses import replace

import pytest
import torch

from ebflow_examples.config import TrainConfig
from ebflow_examples.defaults import settle
from ebflow_examples.gaussian import Gaussian
from ebflow_examples.reproduce import common, fig4, fig5
from ebflow_examples.reproduce.common import Options
from ebflow_examples.runs import build
from ebflow_examples.training import optimizer_for
from randomness import rng


def quick_cells(what, made):
    options = Options(what=what, budget=1.0, data="digits", quick=True)
    return [replace(cell, seconds=0.2) for cell in made.cells(options)]


@pytest.mark.parametrize("cell", quick_cells("fig4", fig4), ids=lambda cell: cell.settings["objective"])
def test_samples_of_a_run_that_goes_on_are_those_of_the_run(cell, tmp_path):
    stage = common.workplace(cell, tmp_path) / "stage0"
    stage.mkdir()
    (stage / "steps.txt").write_text("5\n")
    found = fig4.compute(cell, tmp_path, None)
    assert found["steps"] == 5
    assert found["seconds"] > 0
    assert found["nll"] < found["raw_nll"]  # a calibration of a model that is hardly trained
    grids = {path.name: path.read_bytes() for path in tmp_path.glob("*.npy")}
    assert {f"{cell.name}-{kind}.npy" for kind in ("warm", "cool", "data")} == set(grids)
    again = fig4.compute(cell, tmp_path, None)  # from its last checkpoint
    assert again["nll"] == found["nll"]
    assert again["seconds"] == found["seconds"]
    assert all((tmp_path / name).read_bytes() == grid for name, grid in grids.items())


def test_a_fresh_run_and_one_that_is_told_otherwise_begin_anew(tmp_path, monkeypatch):
    """The checkpoints of the run before are not gone on from."""
    options = Options("fig4", budget=1.0, data="digits", quick=True, out=tmp_path, only=("ml",))
    monkeypatch.setattr(fig4, "_step_seconds", lambda run: pace)
    began = []
    train = fig4._train
    monkeypatch.setattr(fig4, "_train", lambda run, *given: began.append(given[1].exists()) or train(run, *given))

    def steps(options):
        (found,) = common.run(options, fig4)
        return found.result["steps"]

    pace = common.QUICK_SECONDS / 4
    assert steps(options) == 4
    assert steps(options) == 4  # it is kept
    assert began == [False]
    pace = common.QUICK_SECONDS / 3
    assert steps(replace(options, fresh=True)) == 3
    (options.folder / "glow-ml-seed0.json").unlink()  # a run that was stopped goes on
    assert steps(options) == 3
    assert began == [False, False, True]
    monkeypatch.setattr(common, "QUICK_SECONDS", 2 * common.QUICK_SECONDS)
    assert steps(options) == 6  # it has another time
    assert began == [False, False, True, False]


def test_processor_time_settles_the_number_of_steps(tmp_path):
    (cell, _) = quick_cells("fig4", fig4)
    run = settle(build(fig4.recipe(cell, None)))
    before = [parameter.clone() for parameter in run.model.parameters()]
    pace = fig4._step_seconds(run)
    assert 0 < pace < 1
    assert all(map(torch.equal, before, run.model.parameters()))  # a copy was timed
    result, taken = fig4._train(run, 4 * pace, tmp_path, 20)
    assert int((tmp_path / "steps.txt").read_text()) == result.steps
    assert 2 <= result.steps <= 20
    assert taken > 0


def test_weight_decay_is_of_full_linear_layers_alone():
    run = build(TrainConfig(data="digits", model="glow", blocks=1, hidden=8, weight_decay=0.1, lr=1e-3))
    parameters = list(run.model.parameters())
    plain, decaying = optimizer_for(run)(parameters).param_groups
    assert (plain["weight_decay"], decaying["weight_decay"]) == (0.0, 0.1)
    names = {id(parameter): name for name, parameter in run.model.flow.named_parameters()}
    assert len(decaying["params"]) == 2  # a block at each of two levels
    assert all(names[id(each)].endswith("weight") and each.shape[2:] == (1, 1) for each in decaying["params"])
    assert len(plain["params"]) + 2 == len(parameters)
    without = replace(run, config=replace(run.config, weight_decay=0.0))
    assert [group["weight_decay"] for group in optimizer_for(without)(parameters).param_groups] == [0.0]


def test_the_conditional_of_a_gaussian():
    generator = rng(0)
    mix = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    gaussian = Gaussian(torch.arange(5, dtype=torch.float64), mix @ mix.mT + torch.eye(5, dtype=torch.float64))
    u = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    missing = torch.tensor([True, False, True, False, False])
    centre, spread = gaussian.conditional(u, missing)
    # By the precision: the conditional of a Gaussian has its block of the precision, and the mode of the joint density.
    precision = torch.linalg.inv(gaussian.covariance)
    block, cross = precision[missing][:, missing], precision[missing][:, ~missing]
    torch.testing.assert_close(spread, torch.linalg.inv(block))
    expected = gaussian.mean[missing] - (u - gaussian.mean)[:, ~missing] @ cross.mT @ torch.linalg.inv(block)
    torch.testing.assert_close(centre, expected)
    drawn = gaussian.draw(u.repeat_interleave(20_000, 0), missing, generator).unflatten(0, (3, 20_000))
    assert torch.equal(drawn[..., ~missing], u[:, None, ~missing].expand(3, 20_000, 3))
    error = (drawn[..., missing].mean(1) - centre).abs() / (spread.diagonal() / 20_000).sqrt()
    assert float(error.max()) < 5
    torch.testing.assert_close(torch.cov(drawn[0][:, missing].mT), spread, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("kind", fig5.MASKS)
def test_chains_of_a_gaussian_model_have_its_exact_conditional(kind, monkeypatch):
    """One full layer, whitened, is a Gaussian: chains that began elsewhere must end where the closed form is."""
    run = build(TrainConfig(data="digits", model="fc", layers=1, whiten=True, gaussianize=False))
    run = settle(run)
    gaussian = Gaussian.of(run.model, run.split("train"), run.generator(0, "gaussian"))
    truth = run.split("test")[:6]
    mask = fig5._mask(run, kind, len(truth))
    monkeypatch.setattr(fig5, "CHAINS", 60)
    impute = fig5.ebf.impute
    monkeypatch.setattr(fig5.ebf, "impute", lambda *args, init, **options: impute(*args, init=16 - init, **options))
    guesses = fig5._guesses(run, gaussian, truth, mask, burn_in=60, steps=60)
    for name, guess in guesses.items():
        if name != "mean":
            torch.testing.assert_close(guess[~mask], truth.float()[~mask], rtol=0, atol=1e-4)
    difference = (guesses["chains"] - guesses["gaussian"])[mask]
    spread = (guesses["draw"] - guesses["gaussian"])[mask].square().mean().sqrt()  # about the deviation of a draw
    error = float(spread) * (1 / 60 + 1 / fig5.DRAWS) ** 0.5
    assert float(difference.square().mean().sqrt()) == pytest.approx(error, rel=0.35)
    assert abs(float(difference.mean())) < error
