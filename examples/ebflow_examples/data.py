"""Data sets by name, or from the user's own files, split into training, validation and test data."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Generator, Tensor

from ebflow_examples import images, synthetic, tables
from ebflow_examples.console import first_process, note
from ebflow_examples.streams import stream
from ebflow_examples.synthetic import Truth
from ebflow_plugin.errors import InputError, UnknownNameError, suggest

NAMES = {
    "sine": "2-D, a sine wave 16 long, smoothed by a Gaussian of 0.375; its density is known",
    "swirl": "2-D, a spiral of one turn and a half, smoothed by a Gaussian of 0.375; its density is known",
    "checkerboard": "2-D, squares of side 3, smoothed by a Gaussian of 0.375; its density is known",
    "autoregressive10": "10-D, each entry a bimodal function of the one before (Eq. A7); its density is known",
    "textures": "3 x 32 x 32 real-valued images of stripes and grain; their density and entropy are known",
    "textures16": "the same of 3 x 16 x 16",
    "digits": "1,797 handwritten digits of 8 x 8 pixels, 17 grey levels; comes with scikit-learn",
    "mnist": "handwritten digits of 28 x 28 pixels, from the data root",
    "kmnist": "cursive Japanese characters of 28 x 28 pixels, from the data root",
    "cifar10": "photographs of 3 x 32 x 32 pixels, from the data root",
    "cifar10-jpeg": f"CIFAR-10 out of {images.CIFAR_JPEG} in the data root; JPEG changed its pixels",
}
LEVELS = ("digits", "mnist", "kmnist", "cifar10", "cifar10-jpeg")  # those that are images with grey levels
SIZES = (50_000, 5_000, 10_000)  # of data made on the spot: training, validation, test
OF_TEXTURES = (1_500, 250, 500)  # each costs two solves with the true flow; some four seconds in all


@dataclass(frozen=True)
class DataSet:
    """Data in three parts.

    Attributes:
        name: What it was asked for by.
        train: Shape (N, *), float32. Images have shape (N, C, H, W), and hold whole grey levels, 0 to ``levels - 1``,
            or, without levels, any numbers.
        validation: The same, to choose by.
        test: The same, to report on.
        levels: How many grey levels there are; None for continuous data.
        truth: The exact density and score, where they are known.
        clean: The training rows before the noise that smooths them, where there is one: for an objective that adds it.
        header: Whether the first line of a .csv file was taken for names; None for other data.

    Example:
        >>> digits = load("digits")
        >>> digits.event_shape, digits.flattened().event_shape, digits.levels
        ((1, 8, 8), (64,), 17)
    """

    name: str
    train: Tensor
    validation: Tensor
    test: Tensor
    levels: int | None = None
    truth: Truth | None = None
    clean: Tensor | None = None
    header: bool | None = None

    @property
    def event_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.train.shape[1:])

    @property
    def own_rows(self) -> bool:
        """Whether these are rows of numbers of the user's: in units that nobody knows, and of unknown density."""
        return self.levels is None and self.truth is None

    def pixels(self, rows: Tensor) -> Tensor:
        """Pixels as pictures show them, in [0, 1]: levels from black to white; of other numbers, nearly all of them."""
        if self.levels is not None:
            return rows / (self.levels - 1)
        pixels = self.train[:100].flatten()
        low, high = torch.quantile(pixels[:: max(1, len(pixels) // 100_000)], torch.tensor([0.003, 0.997])).tolist()
        return ((rows - low) / (high - low)).clamp(0.0, 1.0)

    def flattened(self) -> DataSet:
        """The same with images as vectors, shape (N, D)."""
        parts = {name: getattr(self, name).flatten(1) for name in ("train", "validation", "test")}
        return replace(self, **parts)


def load(
    name: str,
    *,
    root: str | Path | None = None,
    download: bool = False,
    seed: int = 0,
    limit: int | None = None,
    header: bool | None = None,
) -> DataSet:
    """Loads a data set. Of a .csv file it says what was taken for the header.

    Arguments:
        name: One of :data:`NAMES`, or the path of a folder of images or of a .npy, .npz or .csv file.
        root: Where the data sets that have to be downloaded are, as torchvision keeps them; by default
            $EBFLOW_DATA, or the folder ``data``.
        download: Whether to download what is missing.
        seed: What decides what is drawn and which rows go into which part. The density of the synthetic sets does not
            depend on it.
        limit: The largest number of training rows; by default all.
        header: Whether the first line of a .csv file holds names; by default as it looks.

    Raises:
        InputError: The data are missing or no good; the message says what to do.
        UnknownNameError: There is no such name, and no such file.

    Example:
        >>> swirl = load("swirl", limit=1000)
        >>> swirl.train.shape, swirl.truth.score(swirl.test[:5]).shape
        (torch.Size([1000, 2]), torch.Size([5, 2]))
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1, got {limit}")
    generator = stream(seed, "data")
    place = data_root(root)
    makers: dict[str, Callable[[], DataSet]] = {
        "autoregressive10": lambda: _drawn(name, synthetic.Autoregressive(10), generator),
        "digits": lambda: _split(name, images.digits(), generator, levels=17),
        "mnist": lambda: _held_out(name, images.mnist("MNIST", place, download), 10_000, generator),
        "kmnist": lambda: _held_out(name, images.mnist("KMNIST", place, download), 10_000, generator),
        "cifar10": lambda: _held_out(name, images.cifar10(place, download), 5_000, generator),
        "cifar10-jpeg": lambda: _held_out(name, images.cifar10_jpeg(place), 5_000, generator),
        **{plane: lambda: _smoothed(name, generator) for plane in synthetic.PLANE},
        **{texture: lambda: _textures(name, generator) for texture in ("textures", "textures16")},
    }
    if header is not None and (name in makers or Path(name).suffix != ".csv"):
        raise InputError(f"a header is the first line of a .csv file, and {name} is none: leave out --[no-]header")
    data = makers[name]() if name in makers else _own(name, generator, header)
    if limit is None:
        return data
    return replace(data, train=data.train[:limit], clean=None if data.clean is None else data.clean[:limit])


def data_root(root: str | Path | None = None) -> Path:
    """The folder of the data sets that have to be downloaded: as given, else $EBFLOW_DATA, else ``data``."""
    return Path(root or os.environ.get("EBFLOW_DATA") or "data").expanduser()


def _smoothed(name: str, generator: Generator) -> DataSet:
    """A two-dimensional set, with its training rows before and after the noise."""
    truth = synthetic.PLANE[name]()
    clean = truth.clean(SIZES[0], generator)
    train = truth.noised(clean, generator)
    validation, test = (truth.sample(size, generator) for size in SIZES[1:])
    return DataSet(name, train.float(), validation.float(), test.float(), truth=truth, clean=clean.float())


def _drawn(name: str, truth: Truth, generator: Generator, sizes: Sequence[int] = SIZES) -> DataSet:
    train, validation, test = (truth.sample(size, generator).float() for size in sizes)
    return DataSet(name, train, validation, test, truth=truth)


def _textures(name: str, generator: Generator) -> DataSet:
    from ebflow_examples.textures import SIDES, Textures  # which needs a flow library

    return _drawn(name, Textures(SIDES[name]), generator, OF_TEXTURES)


def _own(name: str, generator: Generator, header: bool | None) -> DataSet:
    """A user's own folder or file."""
    path = Path(name).expanduser()
    if path.is_dir():
        return _split(name, images.folder(path), generator, levels=256)
    if path.suffix not in tables.SUFFIXES:
        what = "is no .npy, .npz or .csv file" if path.is_file() else "is no folder or file either"
        raise UnknownNameError(f"unknown data {name!r}, which {what}. {suggest(name, NAMES)}")
    if not path.is_file():
        raise InputError(f"{name} is not there: looked for {path.absolute()}")
    if path.suffix == ".csv":
        table = tables.read_csv(path, header)
        if first_process():
            note(table.remark)
        return replace(_split(name, table.rows, generator, levels=None), header=table.header)
    parts = tables.read(path)
    levels = 256 if parts[0].dtype == torch.uint8 else None
    if len(parts) == 1:
        return _split(name, parts[0], generator, levels)
    train, validation, test = (part.float() for part in parts)
    return DataSet(name, train, validation, test, levels)


def _split(name: str, rows: Tensor, generator: Generator, levels: int | None) -> DataSet:
    """80 % for training and 10 % each for validation and test, in random order."""
    if len(rows) < 10:
        raise InputError(f"{name} has {len(rows)} rows or images; at least 10 are needed, to split off 10 % twice")
    tenth = len(rows) // 10
    shuffled = rows[torch.randperm(len(rows), generator=generator)].float()
    train, validation, test = shuffled.split([len(rows) - 2 * tenth, tenth, tenth])
    return DataSet(name, train, validation, test, levels)


def _held_out(name: str, parts: tuple[Tensor, Tensor], validation: int, generator: Generator) -> DataSet:
    """The test part as it comes, and the rest split at random."""
    rest, test = parts
    order = torch.randperm(len(rest), generator=generator)
    train, held_out = rest[order[validation:]], rest[order[:validation]]
    return DataSet(name, train.float(), held_out.float(), test.float(), levels=256)
