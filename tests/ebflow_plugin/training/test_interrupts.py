"""Ctrl-C ends a run with a checkpoint of its last step."""

import signal
import threading

import pytest
import torch

import ebflow_plugin as ebf
from ebflow_plugin.errors import TrainingError
from ebflow_plugin.training import fit
from ebflow_plugin.training.interrupts import Interrupts
from ebflow_plugin.training.loop import CHECK_EVERY
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
    with pytest.raises(KeyboardInterrupt, match="stopped after step 7; .*resume=True"):
        run(tmp_path / "parts", interrupt_at=6)
    assert "Ctrl-C again stops at once" in capsys.readouterr().err
    assert (tmp_path / "parts" / "step-00000007.pt").is_file()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    result, resumed = run(tmp_path / "parts")
    assert result.steps == 12
    assert same(weights(resumed), weights(whole))


def test_a_second_one_stops_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, interrupt_at=8, presses=2)
    assert not list(tmp_path.glob("step-0000000[89].pt"))
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


def test_a_handler_that_came_later_stays():
    def mine(*_):
        pass

    with Interrupts():
        signal.signal(signal.SIGINT, mine)
    assert signal.getsignal(signal.SIGINT) is mine


def test_one_inside_of_another_passes_the_word_on():
    with Interrupts() as outer:
        with Interrupts() as inner:
            pass
        assert signal.getsignal(signal.SIGINT) == outer._stop
        with Interrupts() as inner:
            signal.raise_signal(signal.SIGINT)
        assert (inner.asked, outer.asked) == (True, True)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_reader_that_is_gone_does_no_harm(monkeypatch):
    def broken(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", broken)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
    assert interrupts.asked


def test_forked_workers_do_not_listen(monkeypatch, capsys):
    with Interrupts() as interrupts:
        monkeypatch.setattr("os.getpid", lambda: -1)
        signal.raise_signal(signal.SIGINT)
        monkeypatch.undo()
    assert not interrupts.asked
    assert capsys.readouterr().err == ""


def test_what_fails_because_of_it_is_it(tmp_path):
    """The terminal sends Ctrl-C to the workers of a loader too, and they die first."""

    def callback(event):
        if event.step == 8:
            signal.raise_signal(signal.SIGINT)
            raise RuntimeError("DataLoader worker exited unexpectedly")

    model = make_model()
    with pytest.raises(KeyboardInterrupt, match="stopped in step 8; .* the last checkpoint") as caught:
        fit(
            ebf.objectives.DSM(model, sigma=0.5), make_data(50), steps=12, batch_size=8, checkpoint=tmp_path,
            evaluate_every=2, progress=False, callbacks=[callback],
        )  # fmt: skip
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_steps_that_nobody_looked_at_are_not_saved(tmp_path, monkeypatch):
    """On a GPU the loss is looked at now and then. A checkpoint with NaN in it would be the end of the run."""
    monkeypatch.setitem(CHECK_EVERY, "cpu", 10)
    model = make_model()
    objective = ebf.objectives.DSM(model, sigma=0.5)
    calls = []

    def forward(module, arguments):
        calls.append(None)
        if len(calls) == 13:
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))
        if len(calls) == 14:
            signal.raise_signal(signal.SIGINT)

    objective.register_forward_pre_hook(forward)
    with pytest.raises(TrainingError, match="not finite"):
        fit(objective, make_data(50), steps=40, batch_size=8, checkpoint=tmp_path, checkpoint_every=5, progress=False)
    assert sorted(path.name for path in tmp_path.glob("step-*.pt"))[-1] == "step-00000010.pt"


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
