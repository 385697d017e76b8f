"""Damaged weights, full disks, and who may read the files of a run."""

import os
import random
import resource
import signal
import stat

import pytest
import torch

import ebflow_plugin as ebf
from ebflow_plugin.errors import EBFlowError, InputError, TrainingError, WriteError
from ebflow_plugin.objectives import DSM
from ebflow_plugin.training import checkpoints, fit
from ebflow_plugin.training.checkpoints import CheckpointFolder, atomic_write, load_best
from training_models import checkpointed_run, make_data, make_model, same, weights


@pytest.fixture
def formats(monkeypatch, request):
    """Best weights with, and without, the safetensors package."""
    if request.param == "best.pt":
        monkeypatch.setattr(checkpoints, "find_spec", lambda name: None)
    return request.param


both = pytest.mark.parametrize("formats", ["best.safetensors", "best.pt"], indirect=True)


@both
def test_no_flipped_byte_of_the_best_weights_goes_unseen(tmp_path, formats):
    _, model = checkpointed_run(tmp_path)
    path = tmp_path / formats
    whole, draw = path.read_bytes(), random.Random(0)
    load_best(model, tmp_path)
    before = weights(model)
    for _ in range(60):
        content = bytearray(whole)
        for _ in range(draw.choice([1, 20])):
            content[draw.randrange(len(content))] ^= draw.randrange(1, 256)
        path.write_bytes(bytes(content))
        try:
            load_best(model, tmp_path)
        except InputError as error:
            assert formats in str(error)
        else:  # a zip file has bytes that mean nothing
            assert formats == "best.pt"
        assert same(weights(model), before)


def test_every_byte_of_the_best_weights_counts(tmp_path):
    _, model = checkpointed_run(tmp_path)
    path = tmp_path / "best.safetensors"
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        content = bytearray(whole)
        content[place] ^= 0x01
        path.write_bytes(bytes(content))
        with pytest.raises(InputError, match="damaged"):
            load_best(model, tmp_path)


@both
@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "gone"])
def test_lost_best_weights_do_not_stop_a_run_that_can_go_on(tmp_path, formats, damage):
    _, expected = checkpointed_run(tmp_path / "whole")
    first, _ = checkpointed_run(tmp_path / "parts", steps=12)
    path = tmp_path / "parts" / formats
    content = bytearray(path.read_bytes())
    content[-400 if formats == "best.safetensors" else content.index(b"data/0") + 200] ^= 0xFF
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"truncated": content[: len(content) // 2], "empty": b"", "flipped": bytes(content)}[damage])
    with pytest.warns(
        ebf.ResumeWarning, match="best weights so far are lost.*continues, and the best are those from step 12"
    ):
        result, model = checkpointed_run(tmp_path / "parts")
    assert result.steps == 20
    assert same(weights(model), weights(expected))
    later = {record["step"]: record["nll"] for record in result.history if record["step"] >= 12}
    assert result.best_nll == min(later.values())
    assert later[result.best_step] == result.best_nll
    assert first.best_nll is not None
    result.load_best(model)
    assert load_best(model, tmp_path / "parts")["nll"] == result.best_nll


def test_a_finished_run_has_best_weights_again(tmp_path):
    checkpointed_run(tmp_path)
    (tmp_path / "best.safetensors").write_bytes(b"")
    with pytest.warns(ebf.ResumeWarning, match="best weights so far are lost"):
        result, model = checkpointed_run(tmp_path)
    assert result.best_step == 20
    assert load_best(model, tmp_path)["step"] == 20


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_the_umask_says_who_may_read_the_files(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        checkpointed_run(tmp_path)
    finally:
        os.umask(before)
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(found) == 4
    assert set(found.values()) == {mode}


@pytest.fixture
def full_disk():
    """Lets no file grow beyond a size, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_one_short_error_and_harms_nothing(tmp_path, full_disk):
    checkpointed_run(tmp_path, steps=8)
    names = sorted(path.name for path in tmp_path.iterdir())
    full_disk(3000)
    with pytest.raises(WriteError, match=r"cannot be written: File too large. Make room") as caught:
        checkpointed_run(tmp_path)
    full_disk(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert len(str(caught.value).splitlines()) == 1
    assert isinstance(caught.value, EBFlowError)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    result, model = checkpointed_run(tmp_path)
    _, expected = checkpointed_run(tmp_path / "whole")
    assert result.steps == 20
    assert same(weights(model), weights(expected))


def test_metrics_on_a_full_disk(tmp_path, full_disk):
    full_disk(700)
    with pytest.raises(WriteError, match=r"metrics.jsonl cannot be written: File too large"):
        checkpointed_run(None, metrics=tmp_path / "metrics.jsonl")


def test_a_failure_is_told_even_where_its_state_cannot_be_saved(tmp_path, full_disk):
    x = make_data(50)
    model = make_model(actnorm=False)

    def break_it(event):
        full_disk(3000)
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))

    with pytest.raises(TrainingError, match=r"(?s)is not finite.*The state could not be saved: .*File too large"):
        fit(DSM(model), x, steps=20, evaluate_every=4, checkpoint_every=20, checkpoint=tmp_path, callbacks=[break_it],
            progress=False)  # fmt: skip


def test_a_folder_that_is_gone_is_named(tmp_path):
    with pytest.raises(ebf.WriteError, match=r"gone/a.txt cannot be written: No such file or directory"):
        atomic_write(tmp_path / "gone" / "a.txt", lambda file: file.write(b""))


def test_other_errors_stay_what_they_are(tmp_path):
    try:
        (tmp_path / "none").read_text()
    except OSError:  # which is handled already, and has nothing to do with what follows
        with pytest.raises(ZeroDivisionError):
            atomic_write(tmp_path / "a.txt", lambda file: 1 / 0)
    assert not list(tmp_path.iterdir())
    assert CheckpointFolder(tmp_path).load_best() is None
