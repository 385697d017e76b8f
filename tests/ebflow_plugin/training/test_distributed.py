"""Two real processes that train together."""

import pytest
import torch

from processes import load_script, run_together
from training_models import same, without_timing


def test_two_processes_train_together(tmp_path):
    """One launch, which takes seconds, for all that follows."""
    together = tmp_path / "together"
    together.mkdir()
    found = run_together("parallel_runs", together)
    script = load_script("parallel_runs")
    check_that_gradients_are_those_of_the_joined_batch(found, script)
    check_that_two_processes_train_as_one_with_the_joined_batch(found, script, tmp_path / "alone")
    check_that_second_order_losses_train_together(found, together)
    check_that_parameters_that_the_loss_does_not_see_do_no_harm(found)
    check_that_a_resumed_run_equals_an_uninterrupted_one(found)


def test_one_that_calls_alone_what_is_for_all_gets_an_error(tmp_path):
    """It would wait for ever; afterwards, all of them together can still make the call."""
    first, second = run_together("lonely_calls", tmp_path)
    assert second["found"] == []
    assert len(first["found"]) == 2
    for name, message in zip(("model.calibrate()", "model.initialize(whiten=True)"), first["found"], strict=True):
        assert message.startswith(
            f"{name} must be called by all 2 processes together, and 1 did not call it within 1 s."
        )
    assert same(first["weights"], second["weights"])


@pytest.mark.slow
def test_starts_are_the_same_in_all_processes(tmp_path):
    """ActNorms too, which began from each process's own batch."""
    first, second = run_together("gaussianising_starts", tmp_path)
    for name in ("whiten", "gaussianize"):
        assert same(first[name], second[name])
    assert first["gaussianize nll"] == second["gaussianize nll"]


def check_that_gradients_are_those_of_the_joined_batch(processes, script):
    for name, expected in script.gradients().items():
        assert sum(gradient is not None and bool(gradient.any()) for gradient in expected) >= 4
        for process in processes:
            found = process["gradients"][name]
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: name + text)


def check_that_two_processes_train_as_one_with_the_joined_batch(found, script, folder):
    """Maximum likelihood has no noise: the weights are the same, however many processes there are."""
    first, second = found
    alone = script.train(folder, "ml", 12)
    assert same(first["ml"]["weights"], second["ml"]["weights"])
    torch.testing.assert_close(first["ml"]["weights"], alone["weights"], rtol=1e-6, atol=1e-8)
    for together, expected in zip(first["ml"]["history"], alone["history"], strict=True):
        assert together["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert together["nll"] == pytest.approx(expected["nll"], rel=1e-6)


def check_that_second_order_losses_train_together(found, folder):
    first, second = found
    assert same(first["whole"]["weights"], second["whole"]["weights"])
    assert without_timing(first["whole"]["history"]) == without_timing(second["whole"]["history"])
    assert first["whole"]["noise"][0] != second["whole"]["noise"][0], "each process draws noise of its own"
    names = ["best.safetensors", "metrics.jsonl", "step-00000008.pt", "step-00000012.pt"]
    assert sorted(path.name for path in (folder / "whole").iterdir()) == names


def check_that_parameters_that_the_loss_does_not_see_do_no_harm(found):
    first, second = found
    assert same(first["blind"]["weights"], second["blind"]["weights"])
    assert not first["blind"]["weights"]["flow.idle"].any()
    assert len(first["blind"]["history"]) == 1


def check_that_a_resumed_run_equals_an_uninterrupted_one(found):
    for process in found:
        assert without_timing(process["parts"]["history"]) == without_timing(process["whole"]["history"])
        assert same(process["parts"]["weights"], process["whole"]["weights"])
        assert same(process["parts"]["best"], process["whole"]["best"])
