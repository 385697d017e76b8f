"""Data sets by name: where each row goes, and what is said when data are missing."""

import io
import math
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ebflow_examples import images
from ebflow_examples.data import NAMES, data_root, load
from ebflow_examples.synthetic import PLANE
from ebflow_plugin.errors import InputError, UnknownNameError
from randomness import rng

SHARED = data_root(os.environ.get("EBFLOW_DATA") or Path(__file__).parents[3] / "shared" / "data")
needs_shared = pytest.mark.skipif(not (SHARED / "MNIST").is_dir(), reason="set EBFLOW_DATA to a folder with MNIST")


@pytest.mark.parametrize("name", [*PLANE, "autoregressive10"])
def test_synthetic_data(name):
    data = load(name, limit=100)
    features = 10 if name == "autoregressive10" else 2
    assert data.event_shape == (features,)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [100, 5_000, 10_000]
    assert data.train.dtype == torch.float32
    assert data.levels is None
    assert data.truth.log_prob(data.test[:20]).isfinite().all()
    assert data.truth.score(data.test[:20]).isfinite().all()


def test_the_truth_fits_the_data_it_comes_with():
    """The mean log-density of test data and of fresh draws agree, to their standard error."""
    data = load("swirl", limit=10)
    inside = data.truth.log_prob(data.test[:400])
    fresh = data.truth.log_prob(data.truth.sample(400, rng(9)))
    error = math.hypot(inside.std().item(), fresh.std().item()) / 20
    assert abs(inside.mean().item() - fresh.mean().item()) < 4 * error


def test_seeds_draw_other_data_of_the_same_truth():
    first, again, other = load("sine", seed=1), load("sine", seed=1), load("sine", seed=2)
    assert torch.equal(first.train, again.train)
    assert torch.equal(first.test, again.test)
    assert not torch.equal(first.train, other.train)
    assert torch.equal(first.truth.centres, other.truth.centres)


def test_limit_takes_the_first_training_rows_alone():
    whole, few = load("digits"), load("digits", limit=7)
    assert torch.equal(few.train, whole.train[:7])
    assert torch.equal(few.test, whole.test)
    with pytest.raises(InputError, match="limit must be at least 1"):
        load("digits", limit=0)


def test_digits():
    data = load("digits")
    assert data.event_shape == (1, 8, 8)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [1439, 179, 179]
    assert data.levels == 17
    whole = torch.cat([data.train, data.validation, data.test])
    assert torch.equal(whole, whole.round())
    assert whole.min() == 0
    assert whole.max() == 16
    flat = data.flattened()
    assert flat.event_shape == (64,)
    assert flat.levels == 17
    assert torch.equal(flat.test, data.test.reshape(179, 64))


def test_splits_share_no_row_and_lose_none(tmp_path):
    rows = np.arange(57, dtype=np.float64)[:, None]
    np.save(tmp_path / "rows.npy", rows)
    data = load(str(tmp_path / "rows.npy"), seed=3)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [47, 5, 5]
    whole = torch.cat([data.train, data.validation, data.test]).flatten()
    assert sorted(whole.tolist()) == rows.flatten().tolist()
    assert not torch.equal(load(str(tmp_path / "rows.npy"), seed=4).train, data.train)
    assert torch.equal(load(str(tmp_path / "rows.npy"), seed=3).train, data.train)


@needs_shared
def test_mnist_is_split_as_in_the_paper():
    data = load("mnist", root=SHARED)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [50_000, 10_000, 10_000]
    assert data.event_shape == (1, 28, 28)
    assert data.levels == 256
    assert data.test.max() == 255
    raw = np.frombuffer((SHARED / "MNIST/raw/t10k-images-idx3-ubyte").read_bytes()[16:], dtype=np.uint8)
    assert data.test.sum().item() == pytest.approx(raw.sum(dtype=np.int64), rel=1e-5)


def test_missing_cifar10_names_the_jpeg_copy(tmp_path):
    (tmp_path / images.CIFAR_JPEG).touch()
    with pytest.raises(InputError, match="looked for .*cifar-10-batches-py.* ask for cifar10-jpeg"):
        load("cifar10", root=tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / images.CIFAR_JPEG).is_file(), reason="needs the CIFAR-10 archive in EBFLOW_DATA")
def test_the_jpeg_copy_of_cifar10():
    data = load("cifar10-jpeg", root=SHARED)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [45_000, 5_000, 10_000]
    assert data.event_shape == (3, 32, 32)


def jpeg_archive(path, names):
    with tarfile.open(path, "w:gz") as archive:
        for place, name in enumerate(names):
            file = io.BytesIO()
            Image.new("RGB", (32, 32), (place, 0, 0)).save(file, "JPEG", quality=100)
            member = tarfile.TarInfo(name)
            member.size = file.tell()
            file.seek(0)
            archive.addfile(member, file)


def test_a_small_jpeg_archive(tmp_path):
    jpeg_archive(tmp_path / images.CIFAR_JPEG, ["test/cat/0.jpg", "train/cat/0.jpg", "train/dog/1.jpg"])
    train, test = images.cifar10_jpeg(tmp_path)
    assert train.shape == (2, 3, 32, 32)
    assert test.shape == (1, 3, 32, 32)
    assert train.dtype == torch.uint8
    assert train.float().mean((2, 3))[1, 0] > train.float().mean((2, 3))[0, 0]


def test_a_damaged_or_empty_jpeg_archive(tmp_path):
    path = tmp_path / images.CIFAR_JPEG
    jpeg_archive(path, ["train/cat/0.jpg"])
    with pytest.raises(InputError, match="none in test/CLASS"):
        images.cifar10_jpeg(tmp_path)
    path.write_bytes(path.read_bytes()[:400])
    with pytest.raises(InputError, match="is damaged"):
        images.cifar10_jpeg(tmp_path)
    path.unlink()
    with pytest.raises(InputError, match=f"looked for {path}"):
        images.cifar10_jpeg(tmp_path)


@pytest.mark.parametrize(("name", "place"), [("mnist", "MNIST/raw"), ("kmnist", "KMNIST/raw"), ("cifar10", "cifar-10")])
def test_missing_data_say_where_they_were_looked_for_and_how_to_get_them(tmp_path, name, place):
    with pytest.raises(InputError, match=f"looked for {tmp_path}/{place}.*--download.*data root"):
        load(name, root=tmp_path)


def test_nothing_is_downloaded_unasked(tmp_path, monkeypatch):
    from torchvision.datasets import mnist

    def refuse(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(mnist, "download_and_extract_archive", refuse)
    with pytest.raises(InputError, match="is not there"):
        load("mnist", root=tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="could not be downloaded to .*no network"):
        load("mnist", root=tmp_path, download=True)


def test_the_data_root(monkeypatch):
    monkeypatch.delenv("EBFLOW_DATA", raising=False)
    assert data_root() == Path("data")
    monkeypatch.setenv("EBFLOW_DATA", "/somewhere")
    assert data_root() == Path("/somewhere")
    assert data_root("/here") == Path("/here")


def test_unknown_names():
    with pytest.raises(UnknownNameError, match="unknown data 'swril', .*no folder or file.*Did you mean 'swirl'"):
        load("swril")
    assert all(len(about) < 110 for about in NAMES.values())
