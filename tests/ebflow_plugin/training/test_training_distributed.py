"""Two real processes that train together. All objectives under DDP, and sharded: test_lightning.py."""

import atexit

import pytest
import torch
from torch import distributed

import ebflow_plugin as ebf
from ebflow_plugin.lightning import trainer
from processes import load_script, run_together
from training_models import make_model, same


def test_two_processes_train_as_one(tmp_path):
    """One launch, which takes seconds, for all that follows."""
    together = tmp_path / "together"
    together.mkdir()
    first, second = run_together("parallel_runs", together)
    # Maximum likelihood has no noise: the weights are the same, however many processes there are.
    alone = load_script("parallel_runs").train(tmp_path / "alone", "ml")
    assert same(first["ml"]["weights"], second["ml"]["weights"])
    torch.testing.assert_close(first["ml"]["weights"], alone["weights"], rtol=1e-6, atol=1e-8)
    assert len(alone["rows"]) == 3
    for found, expected in zip(first["ml"]["rows"], alone["rows"], strict=True):
        assert found == pytest.approx(expected, rel=1e-6)
    names = ["best.ckpt", "step-00000008.ckpt", "step-00000012.ckpt"]
    assert sorted(path.name for path in (together / "ml").iterdir()) == names
    best = [ebf.load_best(make_model(dtype=torch.float64), folder) for folder in (together / "ml", tmp_path / "alone")]
    assert best[0]["step"] == best[1]["step"]
    assert best[0]["nll"] == pytest.approx(best[1]["nll"], rel=1e-6)
    # Losses with second derivatives: each process has noise of its own, and all of them the same weights.
    assert same(first["whole"]["weights"], second["whole"]["weights"])
    assert first["whole"]["rows"] == second["whole"]["rows"]
    assert first["whole"]["noise"] != second["whole"]["noise"]
    # Parameters that the loss does not depend on do no harm.
    assert same(first["blind"]["weights"], second["blind"]["weights"])
    assert not first["blind"]["weights"]["flow.idle"].any()
    # Reverse KL, on samples of each process's own, has the mean of their gradients.
    assert same(first["reverse"], second["reverse"])
    torch.testing.assert_close(first["reverse"], load_script("parallel_runs").without_data([0, 1]))
    # A resumed run equals an uninterrupted one.
    for process in (first, second):
        assert process["part"] is None
        assert process["parts"]["rows"] == process["whole"]["rows"]
        assert same(process["parts"]["weights"], process["whole"]["weights"])
    # One that calls alone what is for all gets an error: it would wait for ever. After that all can make the call.
    lonely, other = first["alone"], second["alone"]
    assert other["found"] == []
    assert len(lonely["found"]) == 2
    for name, message in zip(("model.calibrate()", "model.initialize(whiten=True)"), lonely["found"], strict=True):
        assert message.startswith(
            f"{name} must be called by all 2 processes together, and 1 did not call it within 1 s."
        )
    assert same(lonely["weights"], other["weights"])


@pytest.mark.slow
def test_starts_are_the_same_in_all_processes(tmp_path):
    """ActNorms too, which began from each process's own batch."""
    first, second = run_together("gaussianising_starts", tmp_path)
    for name in ("whiten", "gaussianize"):
        assert same(first[name], second[name])
    assert first["gaussianize nll"] == second["gaussianize nll"]


def test_a_process_ends_its_group_before_it_exits(tmp_path, monkeypatch):
    """Threads of a group that is left alive abort the process at its end, now and then."""
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    trainer(steps=1, accelerator="cpu")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    for function in at_exit:
        function()
    assert not distributed.is_initialized()
    at_exit[-1]()  # of a process without a group
