"""Objectives in a real Trainer of Lightning, on the CPU."""

import importlib.util
import math
import sys
import warnings
from pathlib import Path

import normflows as nf
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from nflows import distributions, flows
from torch.utils.data import DataLoader, TensorDataset

import ebflow_plugin as ebf
from ebflow_nflows import FullLinear
from ebflow_plugin.errors import InputError, TrainingError
from ebflow_plugin.lightning import (
    AveragedWeights,
    ConditionGuard,
    DataDependentStart,
    ExactNLL,
    FiniteGuard,
    LitObjective,
)
from ebflow_plugin.objectives import DSM, FDSSM, ML, SM, SML, SSM
from gaussian_models import nll
from lightning_models import QUIET, train
from nflows_small import coupling_model
from processes import load_script, run_together
from randomness import rng
from training_models import adam, make_data, make_model, same, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`.*"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty.*"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval.*"),
]


def test_a_run_is_the_plain_loop_and_logs_the_exact_likelihood():
    model, twin = make_model(actnorm=False), make_model(actnorm=False)
    x, held_out = make_data(96), make_data(101, seed=1)
    trainer = train(LitObjective(ML(model), adam(0.01)), x, held_out, callbacks=[ExactNLL(), ConditionGuard()])
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
    for batch in x.split(32):
        optimizer.zero_grad()
        ML(twin)(batch).backward()
        optimizer.step()
    torch.testing.assert_close(weights(model), weights(twin), rtol=1e-5, atol=1e-7)
    found = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert found["val_nll"] == pytest.approx(nll(model, held_out), rel=1e-6)
    assert found["val_loss"] == pytest.approx(nll(model, held_out), rel=1e-5)
    assert found["val_bits_per_dim"] == pytest.approx(found["val_nll"] / 4 / math.log(2), rel=1e-6)
    values = [torch.linalg.svdvals(layer.weight) for layer in model.modules() if isinstance(layer, FullLinear)]
    assert found["condition"] == pytest.approx(max((v[0] / v[-1]).item() for v in values), rel=1e-3)


@pytest.mark.parametrize(
    "make",
    [SM, SSM, DSM, FDSSM, ML, SML, lambda model: 0.9 * SSM(model) + 0.1 * ML(model)],
    ids=["SM", "SSM", "DSM", "FDSSM", "ML", "SML", "sum"],
)
def test_every_objective_trains(make):
    seed_everything(0, verbose=False)
    model, x = make_model(), make_data(256)
    objective = make(model)
    trainer = train(LitObjective(objective, adam(0.02)), x, x, epochs=4, callbacks=[ExactNLL(), FiniteGuard()])
    start = make_model()
    start.initialize(x[:32])
    assert trainer.callback_metrics["val_nll"] < nll(start, x) - 0.05
    assert all(term.generator is None for _, term in objective.pairs())


def run(epochs, folder, ckpt_path=None):
    """A run with an ActNorm, shuffled data, noise, averaged weights and a schedule."""
    seed_everything(0, verbose=False)
    model = make_model()
    module = LitObjective(
        0.5 * SSM(model) + 0.5 * DSM(model), adam(0.01), lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5)
    )
    callbacks = [ExactNLL(calibrate="full"), AveragedWeights(0.9), ModelCheckpoint(dirpath=folder)]
    x, held_out = make_data(100), make_data(60, seed=1)
    trainer = train(module, x, held_out, epochs, 16, ckpt_path, True, callbacks=callbacks, enable_checkpointing=True)
    return model, trainer


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole, trainer = run(3, tmp_path / "whole")
    _, first = run(2, tmp_path / "parts")
    resumed, second = run(3, tmp_path / "parts", first.checkpoint_callback.best_model_path)
    assert same(weights(whole), weights(resumed))
    assert trainer.callback_metrics == second.callback_metrics
    assert trainer.global_step == second.global_step == 21


def test_the_statistics_of_an_objective_resume_too(tmp_path):
    """The number of probes of likelihood without determinants depends on what it measured."""

    def run(epochs, ckpt_path=None):
        seed_everything(0, verbose=False)
        model = ebf.wrap(flows.Flow(FullLinear(4, init="orthogonal"), distributions.StandardNormal([4])))
        module = LitObjective(ML(model, log_det="stochastic"), adam(0.01))
        trainer = train(module, make_data(96), None, epochs, 16, ckpt_path)
        return module, trainer

    _, first = run(2)
    first.save_checkpoint(tmp_path / "first.ckpt")
    (whole, _), (resumed, _) = run(3), run(3, tmp_path / "first.ckpt")
    assert whole.objective.state() == resumed.objective.state()
    assert whole.objective.state()["_transform"]["calls"] == 18
    assert same(weights(whole.objective.model), weights(resumed.objective.model))


@pytest.mark.parametrize("order", [1, -1])
def test_validation_has_the_averaged_weights_calibrated_for_its_duration(order):
    model, x, held_out = make_model(), make_data(100), make_data(60, seed=1)
    callbacks = [ExactNLL(calibrate="full"), AveragedWeights(0.9)][::order]
    trainer = train(LitObjective(ML(model), adam(0.01)), x, held_out, 2, callbacks=callbacks)
    found = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert not model.calibration.ready
    # At its end the callback leaves the averaged weights in the model.
    assert found["val_nll_uncalibrated"] == pytest.approx(nll(model, held_out), rel=1e-5)
    assert found["val_loss"] == pytest.approx(nll(model, held_out), rel=1e-5)
    model.calibrate(x)
    assert found["val_nll"] == pytest.approx(nll(model, held_out), rel=1e-5)
    assert found["val_nll"] < found["val_nll_uncalibrated"] - 0.1


def test_bfloat16():
    seed_everything(0, verbose=False)
    found = []
    for precision in ("32-true", "bf16-mixed"):
        model, x = coupling_model(), make_data(128)
        callbacks = [ExactNLL(), FiniteGuard(), ConditionGuard()]
        trainer = train(LitObjective(SSM(model), adam(0.01)), x, x, 2, precision=precision, callbacks=callbacks)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert trainer.callback_metrics["val_nll"].item() == pytest.approx(nll(model, x), rel=1e-6)
        found.append(trainer.callback_metrics["val_nll"].item())
    assert found[0] != found[1]
    assert found[0] == pytest.approx(found[1], rel=0.05)


def test_gradients_are_clipped_and_accumulated():
    model, x = make_model(actnorm=False), 100 * make_data(64)
    before = weights(model)
    sgd = LitObjective(ML(model), lambda p: torch.optim.SGD(p, lr=1.0))
    trainer = train(sgd, x, gradient_clip_val=0.5, accumulate_grad_batches=2)
    moved = sum((weights(model)[name] - before[name]).square().sum() for name in before)
    assert moved.sqrt() == pytest.approx(0.5, rel=1e-4)
    assert trainer.global_step == 1


def test_a_model_with_a_context():
    model = coupling_model(context=2)
    x, context = make_data(100), torch.randn(100, 2, generator=rng(0))
    pairs = TensorDataset(x, context)
    trainer = train(LitObjective(SSM(model), adam(0.02)), pairs, pairs, 3, callbacks=[ExactNLL()])
    with torch.no_grad():
        expected = -model.log_prob(x, context).mean().item()
    assert trainer.callback_metrics["val_nll"].item() == pytest.approx(expected, rel=1e-5)


def test_integers_and_several_validation_sets():
    model = ebf.wrap(
        flows.Flow(FullLinear(4), distributions.StandardNormal([4])),
        preprocess=[ebf.Dequantize(8, noise="smooth"), ebf.Rescale(0.05, 0.95), ebf.Logit()],
    )
    x = torch.randint(8, (60, 4), generator=rng(0))
    trainer = Trainer(max_epochs=1, callbacks=[ExactNLL(), ConditionGuard()], enable_checkpointing=False, **QUIET)
    loaders = [DataLoader(x[:30], batch_size=20), DataLoader(x, batch_size=20)]
    module = LitObjective(SSM(model))
    trainer.fit(module, DataLoader(x, batch_size=20), loaders)
    names = [f"val_nll/dataloader_idx_{place}" for place in range(2)]
    first, second = (trainer.callback_metrics[name].item() for name in names)
    assert first != second
    trainer.validate(module, loaders, verbose=False)  # with the same noise
    assert [trainer.callback_metrics[name].item() for name in names] == [first, second]


@pytest.mark.parametrize("callbacks", [[], [DataDependentStart()]])
def test_actnorms_start_from_the_first_batch(callbacks):
    x = make_data(64)
    model, twin = make_model(), make_model()
    train(LitObjective(DSM(model), lambda p: torch.optim.SGD(p, lr=0.0)), x, callbacks=callbacks)
    twin.initialize(x[:32])
    assert same(weights(model), weights(twin))


def test_validation_data_start_nothing():
    """Lightning looks at them before the first step; normflows' ActNorm starts from whatever comes first."""
    flow = nf.NormalizingFlow(nf.distributions.DiagGaussian(4), [nf.flows.ActNorm(4)])
    x = 5 * make_data(64) + 3
    module = LitObjective(DSM(ebf.wrap(flow)), lambda p: torch.optim.SGD(p, lr=0.0))
    train(module, x, 100 * x, size=64, callbacks=[ExactNLL(calibrate="full")])
    torch.testing.assert_close(flow.flows[0].s.exp().flatten(), x.std(0), rtol=1e-4, atol=1e-4)


def test_there_are_no_training_data_to_calibrate_on():
    trainer = Trainer(callbacks=[ExactNLL(calibrate="full")], enable_checkpointing=False, **QUIET)
    with pytest.raises(InputError, match="no training data"):
        trainer.validate(LitObjective(ML(make_model())), DataLoader(make_data(8), batch_size=8), verbose=False)


class Spoil(Callback):
    """Makes one layer's gradient not finite."""

    def on_after_backward(self, trainer, module):
        if trainer.global_step == 1:
            module.objective.model.flow._transform._transforms[3].bias.grad[0] = float("nan")


def test_what_is_not_finite_is_named():
    with pytest.raises(
        TrainingError, match=r"step 2: a gradient is not finite\n.*bias of .*_transforms\.3  FullLinear"
    ) as error:
        train(LitObjective(ML(make_model())), make_data(128), callbacks=[Spoil(), FiniteGuard()])
    assert "clip gradients" in str(error.value)
    x = make_data(96)
    x[70, 1] = float("inf")
    with pytest.raises(
        TrainingError, match=r"step 3: the loss is not finite\n(.*\n)*.*the batch holds NaN or inf in 1 of"
    ):
        train(LitObjective(ML(make_model())), x, callbacks=[FiniteGuard()])


def test_layers_near_a_singular_one_are_told():
    model = make_model()
    with torch.no_grad():
        model.flow._transform._transforms[1].weight[0] *= 1e-5
    module = LitObjective(SSM(model), lambda p: torch.optim.SGD(p, lr=0.0))
    with pytest.warns(
        ebf.ConditioningWarning, match=r"1 of 2 full layers are close to singular(.*\n)*.*_transforms\.1"
    ):
        train(module, make_data(64), epochs=2, callbacks=[ConditionGuard(every=1)])


def test_a_schedule_by_the_likelihood():
    def plateau(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)

    module = LitObjective(ML(make_model()), scheduler=plateau)
    x = make_data(64)
    trainer = train(module, x, x, epochs=3, callbacks=[ExactNLL()])
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-6)


def test_the_users_own_generator_is_used_and_stays():
    generator = rng(3)
    objective = DSM(make_model(), generator=generator)
    before = generator.get_state()
    train(LitObjective(objective), make_data(64))
    assert objective.generator is generator
    assert not torch.equal(generator.get_state(), before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LitObjective(make_model()), "LitObjective needs an objective, such as ebf.objectives.SSM"),
        (lambda: LitObjective(SSM(make_model()), conditioning=-1.0), "conditioning must be a number, at least 0"),
        (lambda: AveragedWeights(1.0), "decay must be a number, at least 0 and below 1"),
        (lambda: ExactNLL(calibrate="half"), "unknown calibrate 'half'. Valid names: diagonal, full."),
        (lambda: ConditionGuard(every=0), "every must be an integer"),
        (lambda: FiniteGuard(every=0), "every must be an integer"),
    ],
)
def test_what_cannot_be(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two gloo processes found; one launch, which takes seconds, for all that follows."""
    return run_together("lightning_runs", tmp_path_factory.mktemp("together"))


@pytest.mark.slow
def test_two_processes_train_as_one_with_the_joined_batch(found):
    """Every objective, those with second derivatives too: under DDP, and sharded (FSDP2)."""
    first, second = found
    script = load_script("lightning_runs")
    start = script.started_model().state_dict()
    for name, make in script.OBJECTIVES.items():
        with warnings.catch_warnings():
            expected = script.steps(make)
        assert not same(expected, start)
        for process in (first, second):
            torch.testing.assert_close(process[name], expected, rtol=1e-9, atol=1e-10)
            if f"sharded {name}" in process:
                torch.testing.assert_close(process[f"sharded {name}"], expected, rtol=1e-9, atol=1e-10)
    for name in ("ssm", "ml"):  # a process counts by the weights of its rows
        expected = script.steps(script.OBJECTIVES[name], weighted=True)
        assert not same(expected, script.steps(script.OBJECTIVES[name]))
        for process in (first, second):
            torch.testing.assert_close(process[f"weighted {name}"], expected, rtol=1e-9, atol=1e-10)
    assert same(first["sml"], second["sml"])
    assert "sharded ssm" in first


@pytest.mark.slow
def test_two_processes_start_once_draw_their_own_noise_and_evaluate_each_row_once(found):
    first, second = found
    assert same(first["run"]["weights"], second["run"]["weights"])
    assert first["run"]["noise"] != second["run"]["noise"]
    assert first["run"]["val_nll"] == second["run"]["val_nll"] == pytest.approx(first["run"]["nll"], rel=1e-6)


@pytest.mark.slow
def test_two_processes_go_on_as_if_they_were_never_interrupted(found):
    for process in found:
        assert same(process["run"]["weights"], process["resumed"]["weights"])
        assert process["run"]["noise"] == process["resumed"]["noise"]


def test_without_lightning_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    path = Path(ebf.__file__).parent / "training" / "lightning.py"
    spec = importlib.util.spec_from_file_location("without_lightning", path)
    with pytest.raises(ImportError, match=r"pip install ebflow-plugin\[lightning\]"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_penalty_keeps_layers_from_becoming_singular():
    """DSM of data in a plane, which no density fits."""
    found = []
    for conditioning in (0.0, 100.0):
        seed_everything(0, verbose=False)
        flow = flows.Flow(FullLinear(4), distributions.StandardNormal([4]))
        x = make_data(200) @ torch.diag(torch.tensor([1.0, 1.0, 1.0, 3e-3]))
        module = LitObjective(DSM(ebf.wrap(flow), sigma=0.05), adam(0.05), conditioning=conditioning)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ebf.ConditioningWarning)
            trainer = train(module, x, epochs=20, callbacks=[ConditionGuard(every=5)])
        found.append(trainer.callback_metrics["condition"].item())
    assert found[1] < 0.7 * found[0]
