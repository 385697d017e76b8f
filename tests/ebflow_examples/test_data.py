"""Data sets: the exact densities, where each row goes, and what is said when data are missing or no good."""

import io
import math
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.distributions import Normal

from ebflow_examples import images, synthetic
from ebflow_examples.data import NAMES, data_root, load
from ebflow_examples.runs import Floor
from ebflow_examples.synthetic import PLANE, Autoregressive
from ebflow_plugin.errors import InputError, UnknownNameError
from randomness import rng

SHARED = data_root(os.environ.get("EBFLOW_DATA") or Path(__file__).parents[3] / "shared" / "data")
needs_shared = pytest.mark.skipif(not (SHARED / "MNIST").is_dir(), reason="set EBFLOW_DATA to a folder with MNIST")


def tabulated(spacing=0.08):
    """A grid around a set, shape (rows, columns, 2), and its spacing."""
    axis = torch.arange(-14.0, 14.0, spacing, dtype=torch.float64)
    return torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1), spacing


# --- exact densities ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANE)
def test_densities_integrate_to_one_and_have_their_entropy(name):
    """The entropy once more from the log-density itself, and from samples."""
    truth = PLANE[name]()
    grid, spacing = tabulated()
    log_prob = truth.log_prob(grid.reshape(-1, 2))
    assert float(log_prob.exp().sum()) * spacing**2 == pytest.approx(1.0, abs=1e-10)
    entropy = -float((log_prob.exp() * log_prob).sum()) * spacing**2
    assert truth.entropy() == pytest.approx(entropy, abs=1e-9)
    assert truth.entropy(0.03) == pytest.approx(truth.entropy(), abs=1e-11)
    surprise = -truth.log_prob(truth.sample(20_000, rng(1)))
    assert float(surprise.mean()) == pytest.approx(entropy, abs=4 * float(surprise.std()) / 20_000**0.5)
    assert truth.entropy() == pytest.approx({"sine": 4.4796, "swirl": 4.1394, "checkerboard": 4.6840}[name], abs=1e-4)


@pytest.mark.parametrize("name", PLANE)
def test_samples_fall_where_the_density_is(name):
    """A χ² test of 40,000 samples in 14 × 14 cells, against the density summed over each cell."""
    truth, count, cells = PLANE[name](), 40_000, 14
    grid, spacing = tabulated(spacing=0.1)
    side = len(grid) // cells
    mass = truth.log_prob((grid + spacing / 2).reshape(-1, 2)).exp().reshape(len(grid), -1) * spacing**2
    expected = count * mass.unfold(0, side, side).unfold(1, side, side).sum((-1, -2)).flatten()
    x = truth.sample(count, rng(2))
    found, _ = torch.histogramdd(x.flip(1), [cells, cells], range=[-14.0, 14.0, -14.0, 14.0])
    seen = expected > 5
    statistic = float(((found.flatten() - expected).square() / expected)[seen].sum())
    freedom = int(seen.sum())
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)
    assert float(found.flatten()[~seen].sum()) == pytest.approx(float(expected[~seen].sum()), abs=15)


@pytest.mark.parametrize("truth", [*(make() for make in PLANE.values()), Autoregressive(5, 0.7, 1.5)])
def test_score_is_the_gradient_of_the_density(truth):
    x = truth.sample(20, rng(1))
    if not isinstance(truth, Autoregressive):
        x = torch.cat([x, torch.tensor([[60.0, -80.0], [0.0, 0.0]], dtype=torch.float64)])
    x.requires_grad_()
    (expected,) = torch.autograd.grad(truth.log_prob(x).sum(), x)
    assert expected.isfinite().all()
    torch.testing.assert_close(truth.score(x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", PLANE)
def test_twice_the_nodes_along_a_curve_change_nothing(name, monkeypatch):
    truth = PLANE[name]()
    monkeypatch.setattr(synthetic, "ORDER", 2 * synthetic.ORDER)
    finer = PLANE[name].__wrapped__()
    x = truth.sample(500, rng(3))
    torch.testing.assert_close(truth.log_prob(x), finer.log_prob(x), rtol=0, atol=1e-10)
    torch.testing.assert_close(truth.score(x), finer.score(x), rtol=0, atol=1e-9)


def test_a_smoothed_interval_far_from_it():
    """log k from its definition, an integral over the interval, where Φ(b) - Φ(a) itself is 0 in double precision."""
    offset = torch.tensor([-20.0, -0.3, 0.0, 7.0, 15.0], dtype=torch.float64)
    nodes, weights = synthetic._nodes(torch.linspace(-1.0, 1.0, 101, dtype=torch.float64))
    gaussian = -0.5 * ((offset[:, None] - nodes) / 0.4).square() - math.log(0.4 * math.sqrt(2 * math.pi))
    expected = torch.logsumexp(gaussian + (weights / 2).log(), 1)
    torch.testing.assert_close(synthetic._log_kernel(offset, 2.0, 0.4), expected, rtol=1e-10, atol=1e-10)


def test_chunks_do_not_matter(monkeypatch):
    truth = synthetic.checkerboard()
    x = truth.sample(33, rng(1))
    whole = truth.log_prob(x), truth.score(x)
    monkeypatch.setattr(synthetic, "CHUNK", 56)  # seven rows at a time
    torch.testing.assert_close(truth.log_prob(x), whole[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(truth.score(x), whole[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_densities_have_the_type_of_their_input(dtype):
    x = torch.zeros(3, 2, dtype=dtype)
    truth = synthetic.sine()
    assert truth.log_prob(x).dtype == truth.score(x).dtype == dtype
    assert truth.score(x).shape == x.shape
    assert truth.log_prob(x[:0]).shape == (0,)


def test_sine_swirl_and_checkerboard_lie_where_the_authors_put_them():
    x, y = synthetic.sine().clean(2000, rng()).T
    assert x.abs().max() <= 8
    rest = y - 4 * torch.sin(3 * x / 4)
    assert float(rest.mean()) == pytest.approx(0, abs=0.1)
    assert float(rest.std()) == pytest.approx(1, abs=0.1)
    points = synthetic.swirl().clean(2000, rng()) * 3 / 2.5
    angle = torch.linspace(0, 3 * math.pi, 3000, dtype=torch.float64)
    curve = torch.stack([angle * angle.cos() + 1, 2 - angle * angle.sin()], dim=1)
    above = curve[None] - points[:, None]  # by how much a point of the curve is to the right, and higher
    inside = (above > -0.01) & (above < 0.51)
    assert inside.all(-1).any(1).all()
    assert torch.hypot(*(points - torch.tensor([1.0, 2.0])).T).max() < 3 * math.pi + 0.8
    x, y = synthetic.checkerboard().clean(2000, rng()).T / 3
    assert ((x.floor() + y.floor()) % 2 == 0).all()
    assert torch.stack([x, y]).abs().max() <= 2
    assert len({(i, j) for i, j in zip(x.floor().tolist(), y.floor().tolist(), strict=True)}) == 8


@pytest.mark.parametrize("name", PLANE)
def test_clean_rows_are_the_training_rows_without_their_noise(name):
    data = load(name, limit=20_000)
    noise = data.train - data.clean
    assert noise.mean(0).abs().max() < 0.02
    torch.testing.assert_close(torch.cov(noise.T), 0.375**2 * torch.eye(2), rtol=0, atol=0.005)
    assert load("autoregressive10", limit=5).clean is None


def test_autoregressive_follows_eq_a7():
    chain = Autoregressive(4, shape=0.5, distance=2.0)
    x = chain.sample(50, rng())
    u = torch.randn(50, 4, generator=rng(), dtype=torch.float64)
    torch.testing.assert_close(x[:, 0], u[:, 0])
    for i in (2, 3, 4):  # the paper counts from 1
        torch.testing.assert_close(x[:, i - 1], torch.tanh(u[:, i - 1] * 0.5) * (x[:, i - 2] + 2.0 * 2**i))
    assert Floor.of(chain, x, -chain.log_prob(x)) is None  # no formula has its entropy


def test_density_of_the_chain_is_that_of_its_jacobian():
    chain = Autoregressive(4, shape=0.5, distance=2.0)

    def forward(u):
        columns = [u[0]]
        for i in (2, 3, 4):
            columns.append(torch.tanh(u[i - 1] * 0.5) * (columns[-1] + 2.0 * 2**i))
        return torch.stack(columns)

    for u in torch.randn(5, 4, generator=rng(3), dtype=torch.float64):
        jacobian = torch.autograd.functional.jacobian(forward, u)
        expected = Normal(0.0, 1.0).log_prob(u).sum() - torch.linalg.slogdet(jacobian)[1]
        torch.testing.assert_close(chain.log_prob(forward(u)[None])[0], expected)


def test_density_of_the_chain_integrates_to_one_and_ends_at_its_support():
    chain = Autoregressive(2)
    line = torch.linspace(-6, 6, 401, dtype=torch.float64)
    tall = torch.linspace(-10, 10, 4001, dtype=torch.float64)
    grid = torch.cartesian_prod(line, tall)
    density = chain.log_prob(grid).exp().reshape(401, 4001)
    total = torch.trapezoid(torch.trapezoid(density, tall, dim=1), line)
    assert total.item() == pytest.approx(1, abs=2e-3)
    assert chain.log_prob(torch.tensor([[0.0, 4.5]])).item() == -math.inf


@pytest.mark.parametrize("truth", [synthetic.sine(), Autoregressive(3)])
def test_densities_refuse_other_shapes(truth):
    with pytest.raises(InputError, match="takes rows of"):
        truth.log_prob(torch.zeros(4, 5))


# --- load ----------------------------------------------------------------------------------------------------------


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


# --- files -----------------------------------------------------------------------------------------------------------


def image_folder(path, count=10, size=(6, 4), mode="RGB"):
    path.mkdir(parents=True, exist_ok=True)
    for place in range(count):
        Image.new(mode, size, place if mode == "L" else (place, 0, 255)).save(path / f"{place}.png")
    return path


def test_a_folder_of_images(tmp_path):
    image_folder(tmp_path / "a" / "b")
    (tmp_path / "notes.txt").write_text("not an image")
    data = load(str(tmp_path))
    assert data.event_shape == (3, 4, 6)
    assert data.levels == 256
    assert sorted(torch.cat([data.train, data.validation, data.test])[:, 0, 0, 0].tolist()) == list(range(10))
    assert (data.train[:, 2] == 255).all()


def test_grey_images_stay_grey_unless_others_have_colour(tmp_path):
    image_folder(tmp_path / "grey", mode="L")
    assert load(str(tmp_path)).event_shape == (1, 4, 6)
    image_folder(tmp_path / "colour", count=1)
    assert load(str(tmp_path)).event_shape == (3, 4, 6)


def test_images_of_several_sizes(tmp_path):
    image_folder(tmp_path / "a")
    image_folder(tmp_path / "b", count=1, size=(9, 4))
    with pytest.raises(InputError, match="differ in size: .*a/0.png has 4 x 6 pixels, .*b/0.png has 4 x 9"):
        load(str(tmp_path))


def test_folders_that_are_no_good(tmp_path):
    with pytest.raises(InputError, match="has no images"):
        load(str(tmp_path))
    image_folder(tmp_path, count=3)
    with pytest.raises(InputError, match="has 3 rows or images; at least 10"):
        load(str(tmp_path))
    (tmp_path / "broken.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"broken\.png is no image"):
        load(str(tmp_path))


def save(path, array):
    np.save(path, array)
    return str(path)


@pytest.mark.parametrize(
    ("shape", "event"), [((12, 4, 6), (1, 4, 6)), ((12, 3, 4, 6), (3, 4, 6)), ((12, 4, 6, 3), (3, 4, 6))]
)
def test_bytes_are_images(tmp_path, shape, event):
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    data = load(save(tmp_path / "x.npy", array))
    assert data.event_shape == event
    assert data.levels == 256
    assert data.train.dtype == torch.float32
    whole = torch.cat([data.train, data.validation, data.test])
    assert whole.sum().item() == array.sum()


def test_bytes_of_vectors_are_grey_levels_too(tmp_path):
    data = load(save(tmp_path / "x.npy", np.zeros((12, 5), dtype=np.uint8)))
    assert data.levels == 256
    assert data.event_shape == (5,)


def test_an_npz_file(tmp_path):
    parts = {name: np.full((size, 2), size) for size, name in enumerate(("train", "validation", "test"), start=3)}
    np.savez(tmp_path / "x.npz", **parts)
    data = load(str(tmp_path / "x.npz"))
    assert [len(part) for part in (data.train, data.validation, data.test)] == [3, 4, 5]
    np.savez(tmp_path / "one.npz", np.zeros((20, 2)))
    assert load(str(tmp_path / "one.npz")).event_shape == (2,)
    np.savez(tmp_path / "two.npz", a=np.zeros((20, 2)), b=np.zeros((20, 2)))
    with pytest.raises(InputError, match="has the arrays a, b; it should have one, or train"):
        load(str(tmp_path / "two.npz"))
    np.savez(tmp_path / "differ.npz", **{**parts, "test": np.zeros((5, 3))})
    with pytest.raises(InputError, match="differ in their shapes"):
        load(str(tmp_path / "differ.npz"))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([[1.0, np.nan]] * 12), "12 values that are NaN or infinite, the first in row 0, column 1"),
        (np.full((12, 2), np.inf), "24 values that are NaN or infinite"),
        (np.zeros(12), r"shape \(12,\) and type float64; wanted are rows"),
        (np.zeros((12, 3, 4, 5)), "images as uint8"),
        (np.zeros((12, 5, 4, 6), dtype=np.uint8), "1 or 3 channels"),
        (np.zeros((0, 3)), "is empty"),
        (np.array([["a", "b"]] * 12), "not numbers"),
        (np.zeros((12, 2), dtype=complex), "not numbers"),
        (np.zeros((9, 2)), "has 9 rows or images; at least 10"),
    ],
)
def test_arrays_that_are_no_good(tmp_path, array, message):
    with pytest.raises(InputError, match=message):
        load(save(tmp_path / "x.npy", array))


def test_files_that_are_no_good(tmp_path):
    with pytest.raises(InputError, match=r"is not there: looked for .*gone\.npy"):
        load(str(tmp_path / "gone.npy"))
    (tmp_path / "x.npy").write_bytes(b"no array")
    with pytest.raises(InputError, match="cannot be read as a NumPy file"):
        load(str(tmp_path / "x.npy"))
    (tmp_path / "x.xlsx").write_bytes(b"")
    with pytest.raises(UnknownNameError, match=r"is no \.npy, \.npz or \.csv file"):
        load(str(tmp_path / "x.xlsx"))


@pytest.mark.parametrize("head", ["", "x,y\n", ",y\n"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_csv_file(tmp_path, head, delimiter):
    text = head + "".join(f"{row},{row / 2}\n" for row in range(12)) + "\n"
    (tmp_path / "x.csv").write_text(text.replace(",", delimiter))
    data = load(str(tmp_path / "x.csv"))
    whole = torch.cat([data.train, data.validation, data.test])
    assert whole.shape == (12, 2)
    assert torch.equal(whole[:, 1], whole[:, 0] / 2)
    assert data.levels is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x,name\n1,a\n", r"column 'name' has 'a' in data row 0 \(counted from 0\), which is no number"),
        ("1,2\n3,b\n", "column '1' has 'b' in data row 1"),
        ("x,y\n1,2\n1\n", "data row 1 has 1 cells, but there are 2 columns"),
        ("x,y\n" + "1,\n" * 12, "12 values that are NaN or infinite, the first in row 0, column 1"),
        ("x,y\n", "is empty"),
        ("", "is empty"),
        ("\x00\xff", "no number|is no text"),
    ],
)
def test_csv_files_that_are_no_good(tmp_path, text, message):
    (tmp_path / "x.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=message):
        load(str(tmp_path / "x.csv"))
