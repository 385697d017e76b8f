"""Ctrl-C ends a run with a checkpoint of its last step."""

import signal
import threading

import pytest

import ebflow_plugin as ebf
from ebflow_plugin.training import fit
from ebflow_plugin.training.interrupts import Interrupts
from training_models import make_data, make_model, same, weights


@pytest.fixture(autouse=True)
def default_handler():
    """Python's own handler, which processes of pytest-xdist do not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run(folder, interrupt_at=None, presses=1):
    def callback(event):
        if event.step == interrupt_at:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)

    model = make_model()
    result = fit(
        ebf.objectives.DSM(model, sigma=0.5), make_data(50), steps=12, batch_size=8, checkpoint=folder,
        checkpoint_every=5, evaluate_every=2, ema=True, progress=False, callbacks=[callback],
    )  # fmt: skip
    return result, model


def test_the_last_step_is_saved_and_the_run_goes_on_from_there(tmp_path, capsys):
    _, whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt, match="stopped after step 8; .*resume=True"):
        run(tmp_path / "parts", interrupt_at=8)
    assert "Ctrl-C again stops at once" in capsys.readouterr().err
    assert (tmp_path / "parts" / "step-00000008.pt").is_file()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    result, resumed = run(tmp_path / "parts")
    assert result.steps == 12
    assert same(weights(resumed), weights(whole))


def test_a_second_one_stops_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, interrupt_at=8, presses=2)
    assert not (tmp_path / "step-00000008.pt").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_a_folder_there_is_nothing_to_wait_for(capsys):
    with pytest.raises(KeyboardInterrupt):
        run(None, interrupt_at=8)
    assert capsys.readouterr().err == ""


def test_a_handler_of_ones_own_stays():
    heard = []

    def mine(*_):
        heard.append("it")

    signal.signal(signal.SIGINT, mine)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
    assert (heard, interrupts.asked) == (["it"], False)
    assert signal.getsignal(signal.SIGINT) is mine


def test_other_threads_are_left_alone():
    def work():
        with Interrupts() as interrupts:
            found.append(interrupts.asked)

    found = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
