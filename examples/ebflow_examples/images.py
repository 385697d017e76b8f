"""Images: those that scikit-learn ships, those that torchvision knows, and folders of image files.

All come as whole grey levels in uint8, with shape (N, C, H, W).
"""

from __future__ import annotations

import io
import tarfile
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ebflow_plugin.errors import InputError

CIFAR_JPEG = "cifar10-jpeg.tar.gz"


def digits() -> Tensor:
    """The 1,797 handwritten digits of scikit-learn: 8 x 8, levels 0 to 16, shape (1797, 1, 8, 8)."""
    from sklearn.datasets import load_digits

    return torch.from_numpy(load_digits().images.astype(np.uint8))[:, None]


def mnist(kind: str, root: Path, download: bool) -> tuple[Tensor, Tensor]:
    """MNIST or KMNIST (the name in capitals) as torchvision keeps them below ``root``: 60,000 and 10,000 images."""
    train, test = (part.data[:, None] for part in _torchvision(kind, root, f"{kind}/raw", download))
    return train, test


def cifar10(root: Path, download: bool) -> tuple[Tensor, Tensor]:
    """CIFAR-10 as torchvision keeps it below ``root``: 50,000 and 10,000 images."""
    parts = _torchvision("CIFAR10", root, "cifar-10-batches-py", download)
    train, test = (torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous() for part in parts)
    return train, test


def cifar10_jpeg(root: Path) -> tuple[Tensor, Tensor]:
    """CIFAR-10 from an archive of JPEG files, train/CLASS/*.jpg and test/CLASS/*.jpg: 50,000 and 10,000 images."""
    archive = root / CIFAR_JPEG
    if not archive.is_file():
        raise InputError(
            f"cifar10-jpeg is not there: looked for {archive}. Give the folder that has it as the data root."
        )
    return _unpacked(archive, archive.stat().st_mtime_ns)


@lru_cache(maxsize=1)  # decoding takes 20 s, and `ebflow reproduce` asks for each of its cells
def _unpacked(archive: Path, changed: int) -> tuple[Tensor, Tensor]:
    """The images of an archive that was last changed at some time; nobody may write into them."""
    parts: dict[str, list[Tensor]] = {"train": [], "test": []}
    try:
        with tarfile.open(archive) as files:
            for member in files:
                part = parts.get(member.name.partition("/")[0])
                content = files.extractfile(member)
                if part is not None and content is not None:
                    part.append(_pixels(io.BytesIO(content.read()), member.name))
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise InputError(f"{archive} is damaged: {error}. Copy it again.") from error
    if not all(parts.values()):
        raise InputError(f"{archive} has no images in train/CLASS or none in test/CLASS")
    return torch.stack(parts["train"]), torch.stack(parts["test"])


def folder(path: Path) -> Tensor:
    """Reads all images below a folder: RGB, or grey if all of them are grey."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMG_EXTENSIONS)
    if not files:
        raise InputError(f"{path} has no images; known are {', '.join(IMG_EXTENSIONS)}")
    pictures = [_pixels(file, file) for file in files]
    for file, picture in zip(files, pictures, strict=True):
        if picture.shape[1:] != pictures[0].shape[1:]:
            (height, width), (other_height, other_width) = pictures[0].shape[1:], picture.shape[1:]
            raise InputError(
                f"the images differ in size: {files[0]} has {height} x {width} pixels, {file} has {other_height} x "
                f"{other_width}; resize them first"
            )
    channels = max(len(picture) for picture in pictures)
    return torch.stack([picture.expand(channels, -1, -1) for picture in pictures])


def _pixels(file: Any, name: object) -> Tensor:
    """Decodes an image file: (1, H, W) if it is grey, (3, H, W) otherwise."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            pixels = np.array(image if image.mode == "L" else image.convert("RGB"))
    except OSError as error:
        raise InputError(f"{name} is no image that can be read: {error}") from error
    return torch.from_numpy(np.atleast_3d(pixels)).permute(2, 0, 1)


def _torchvision(name: str, root: Path, place: str, download: bool) -> tuple[Any, Any]:
    """The two parts of a data set of torchvision, or where it was looked for and how to get it."""
    from torchvision import datasets

    dataset = getattr(datasets, name)
    try:
        return dataset(root, train=True, download=download), dataset(root, train=False, download=download)
    except (RuntimeError, OSError) as error:
        if download:
            raise InputError(f"{name} could not be downloaded to {root / place}: {error}") from error
        hint = ""
        if name == "CIFAR10" and (root / CIFAR_JPEG).is_file():
            hint = (
                " The JPEG copy of it is there: ask for cifar10-jpeg (JPEG changed its pixels, and with them the NLL)."
            )
        raise InputError(
            f"{name} is not there: looked for {root / place}. Download it (ebflow train --download, or "
            f"load(..., download=True)), or give the folder that has it as the data root.{hint}"
        ) from error
