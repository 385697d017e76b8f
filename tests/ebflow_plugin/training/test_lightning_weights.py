"""Averaged and calibrated weights in Lightning: what is validated is what is saved."""

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint, WeightAveraging

import ebflow_plugin as ebf
from ebflow_plugin.errors import InputError
from ebflow_plugin.lightning import AtomicCheckpointIO, AveragedWeights, ExactNLL, LitObjective
from ebflow_plugin.objectives import DSM, ML
from gaussian_models import nll
from lightning_models import train
from nflows_small import coupling_model
from training_models import adam, make_data, make_model, same, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`.*"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty.*"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval.*"),
]


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("kind", [None, "full", "diagonal"])
def test_what_is_selected_is_what_is_saved(tmp_path, averaged, kind):
    """Lightning's own ModelCheckpoint too: its file has the weights that had the NLL in its name."""
    model, x, held_out = make_model(), 3 * make_data(100), 3 * make_data(60, seed=1)
    callbacks = [ExactNLL(calibrate=kind), ModelCheckpoint(dirpath=tmp_path, monitor="val_nll")]
    callbacks += [AveragedWeights(0.9)] if averaged else []
    options = {"enable_checkpointing": True, "plugins": [AtomicCheckpointIO()]}
    trainer = train(LitObjective(DSM(model), adam(0.05)), x, held_out, 3, callbacks=callbacks, **options)
    selected = trainer.checkpoint_callback.best_model_score.item()
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    assert saved["ebflow_plugin"]["nll"] == pytest.approx(selected, rel=1e-6)
    fresh = make_model()
    fresh.load_state_dict({name.removeprefix("objective.model."): t for name, t in saved["state_dict"].items()})
    assert fresh.calibration.ready == (kind is not None)
    assert nll(fresh, held_out) == pytest.approx(selected, rel=1e-5)


def test_a_resumed_run_trains_without_the_calibration_of_its_checkpoint(tmp_path):
    def run(epochs, ckpt_path=None):
        seed_everything(0, verbose=False)
        model = make_model()
        module, x = LitObjective(DSM(model), adam(0.05)), make_data(100)
        callbacks = [ExactNLL(calibrate="full"), ModelCheckpoint(dirpath=tmp_path, save_top_k=-1)]
        options = {"enable_checkpointing": True, "plugins": [AtomicCheckpointIO()], "ckpt_path": ckpt_path}
        return model, train(module, x, x, epochs, callbacks=callbacks, **options)

    whole, _ = run(3)
    _, first = run(2)
    resumed, second = run(3, first.checkpoint_callback.best_model_path)
    assert second.global_step == 12
    assert same(weights(whole), weights(resumed))
    assert not resumed.calibration.ready


def test_a_checkpoint_of_another_objective_or_model_is_refused(tmp_path):
    first = train(LitObjective(DSM(make_model(), sigma=0.5)), make_data(64))
    first.save_checkpoint(tmp_path / "a.ckpt")
    for other, words in ((DSM(make_model(), sigma=0.25), r"objective: DSM\(sigma=0.5.* there, DSM\(sigma=0.25"),
                         (DSM(make_model(6), sigma=0.5), r"model: .*weight \(4, 4\)")):  # fmt: skip
        size = 6 if "model" in words else 4
        with pytest.raises(InputError, match=f"(?s)is of another run.*{words}"):
            train(LitObjective(other), make_data(64, size), ckpt_path=tmp_path / "a.ckpt")


def test_averages_leave_integer_buffers_alone_and_warm_up():
    """Lightning's own callback makes another coupling of a mask [1, 3]: it is refused."""
    model = coupling_model()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert any(not buffer.is_floating_point() for buffer in buffers.values())
    x = make_data(128)
    start = nll(model, x)
    train(LitObjective(ML(model), adam(0.01)), x, x, 3, callbacks=[ExactNLL(), AveragedWeights(0.9)])
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert nll(model, x) < start
    for corrupting in (EMAWeightAveraging(decay=0.9), WeightAveraging()):
        with pytest.raises(InputError, match=r"averages integer buffers.*AveragedWeights\(decay\)"):
            train(LitObjective(ML(coupling_model())), x, callbacks=[corrupting])


def test_the_average_is_that_of_ema():
    """From the started weights on, with the same warm-up."""
    x = make_data(320)
    model, twin = make_model(), make_model()
    train(LitObjective(ML(model), adam(0.05)), x, callbacks=[AveragedWeights(0.99)])
    twin.initialize(x[:32])
    ema, optimizer = ebf.EMA(twin, 0.99), torch.optim.Adam(twin.parameters(), lr=0.05)
    for batch in x.split(32):
        optimizer.zero_grad()
        ML(twin)(batch).backward()
        optimizer.step()
        ema.update()
    ema.copy_to()
    torch.testing.assert_close(weights(model), weights(twin), rtol=1e-5, atol=1e-6)


def test_log_z_follows_the_weights_that_validation_swaps():
    """A swap through .data would leave what is cached as it was."""
    model, x, found = make_model(), make_data(64), []

    class Look(Callback):
        def on_validation_batch_end(self, trainer, module, *rest):
            found.append((model.log_z().item(), torch.linalg.slogdet(layer.weight)[1].item()))

    layer = model.flow._transform._transforms[1]
    with torch.no_grad():
        model.flow._transform._transforms[3].weight.copy_(torch.eye(4))
    model.flow._transform._transforms[3].requires_grad_(False)
    model.flow._transform._transforms[0].requires_grad_(False)
    train(LitObjective(ML(model), adam(0.05)), x, x, 3, callbacks=[ExactNLL(), AveragedWeights(0.5), Look()])
    scale = model.flow._transform._transforms[0].log_scale.sum().item()
    assert len({z for z, _ in found}) > 3
    for log_z, log_det in found[2:]:  # after the sanity check
        assert log_z == pytest.approx(-log_det - scale, abs=1e-4)
