"""Files: complete or not there, and read without running what is in them. Checkpoints of runs: test_resuming.py."""

import random

import pytest
import torch

import ebflow_plugin as ebf
from ebflow_plugin.errors import InputError
from ebflow_plugin.training.files import atomic_write, load_best
from training_models import make_model, same, weights


@pytest.fixture
def folder(tmp_path):
    """A folder with best weights, as a run leaves them."""
    model = make_model(seed=1)
    state = {f"objective.model.{name}": value for name, value in model.state_dict().items()}
    ours = {"prefix": "objective.model.", "nll": 1.5}
    torch.save({"state_dict": state, "global_step": 7, "ebflow_plugin": ours}, tmp_path / "best.ckpt")
    return tmp_path


def test_best_weights_are_loaded_with_their_step(folder):
    model = make_model()
    assert load_best(model, str(folder)) == {"step": 7, "nll": 1.5}
    assert same(weights(model), weights(make_model(seed=1)))
    with pytest.raises(InputError, match="belong to another model"):
        load_best(make_model(6), folder)
    with pytest.raises(InputError, match="folder must be a path, got 3"):
        load_best(model, 3)


def test_no_flipped_byte_of_a_tensor_goes_unseen(folder):
    path, model, draw = folder / "best.ckpt", make_model(), random.Random(0)
    whole = path.read_bytes()
    load_best(model, folder)
    before, refused = weights(model), 0
    for _ in range(100):
        content = bytearray(whole)
        for _ in range(draw.choice([1, 20])):
            content[draw.randrange(len(content))] ^= draw.randrange(1, 256)
        path.write_bytes(bytes(content))
        try:
            load_best(model, folder)
        except InputError as error:
            refused += 1
            assert "best.ckpt" in str(error)
            assert len(str(error).splitlines()) == 1
        assert same(weights(model), before)  # a zip file has bytes that mean nothing
    assert refused > 50


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    atomic_write(path, lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        atomic_write(path, fail)
    assert path.read_bytes() == b"old"
    assert [child.name for child in tmp_path.iterdir()] == ["file"]


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
