"""Run folders: what ``ebflow train`` leaves after, and how the other commands read it.

A run folder holds ``config.toml`` (what was asked for, and what was chosen), ``metrics.jsonl``, the last two
checkpoints, ``best.ckpt`` and ``summary.json``. Weights are read by ``weights_only`` alone, without Lightning.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass, replace
from math import log, prod, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

import ebflow_plugin as ebf
from ebflow_examples.config import TrainConfig, read_toml, settings
from ebflow_examples.data import DataSet, load
from ebflow_examples.models import flow_for, preprocessing
from ebflow_examples.streams import drawing_from, stream
from ebflow_examples.synthetic import Truth
from ebflow_plugin.errors import InputError, suggest
from ebflow_plugin.training.files import latest, read_first, weights_of, write_weights

LARGE = 1024  # features from which on full matrices and their determinants take long

CONFIG, SUMMARY, DATA = "config.toml", "summary.json", "data.sha256"
WEIGHTS = ("best", "last", "average")
SPLITS = ("train", "validation", "test")
BATCH = 500  # rows at a time for evaluation


@dataclass(frozen=True)
class Run:
    """A model with its data.

    Attributes:
        config: What the run was told.
        data: In the shape that the model takes.
        model: The wrapped flow.
        image_shape: The shape of one image (C, H, W), if the data are images.
        path: The folder.
        facts: What is known about the weights.
        step: The training step that the weights are of; None if none were read.
    """

    config: TrainConfig
    data: DataSet
    model: ebf.EBFlow
    image_shape: tuple[int, ...] | None = None
    path: Path = Path()
    facts: str = ""
    step: int | None = None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def split(self, name: str) -> Tensor:
        """A part of the data, on the device of the model."""
        if name not in SPLITS:
            raise InputError(f"unknown split {name!r}. {suggest(name, SPLITS)}")
        rows: Tensor = getattr(self.data, name)
        return rows.to(self.device)

    def as_images(self, rows: Tensor) -> Tensor:
        """Rows of the data as images with shape (N, C, H, W) and values in [0, 1]."""
        if self.image_shape is None:
            raise InputError(f"{self.config.data} has no images, but rows of shape {self.data.event_shape}")
        return self.data.pixels(rows).reshape(-1, *self.image_shape)

    def generator(self, seed: int, name: str) -> Generator:
        """The generator of a stream, on the device of the model."""
        return stream(seed, name, device=self.device)


@dataclass(frozen=True)
class Likelihood:
    """The exact NLL of some rows, in nats, with its standard error over the rows; and bits per dimension."""

    nll: float
    nll_error: float
    bits_per_dim: float
    bits_error: float
    rows: int

    @classmethod
    def of(cls, values: Tensor, dim: int) -> Likelihood:
        """Sums up the NLLs of rows of ``dim`` entries."""
        nll, error, bit = float(values.mean()), standard_error(values), log(2.0) * dim
        return cls(nll, error, nll / bit, error / bit, len(values))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Floor:
    """The entropy of data whose density is known, in nats, and how far the NLL of a model is above it.

    The gap is that of :func:`above_truth`, which has less of an error than NLL - entropy.
    """

    entropy: float
    gap: float
    gap_error: float

    @classmethod
    def of(cls, truth: Truth | None, rows: Tensor, values: Tensor) -> Floor | None:
        """Compares the NLLs of rows with the truth; None if there is none, or its entropy is not known."""
        entropy = None if truth is None else truth.entropy()
        if truth is None or entropy is None:
            return None
        return cls(entropy, *above_truth(truth, rows, values))


def build(config: TrainConfig) -> Run:
    """Makes the data and the model of a configuration, with the weights that its seed gives."""
    original = load(
        config.data,
        root=config.data_root,
        download=config.download,
        seed=config.seed,
        limit=config.limit,
        header=config.header,
    )
    config = replace(config, header=original.header)  # so that the run reads the file alike ever after
    if config.model is None:
        config = replace(config, model=usual_model(original))
    assert config.model is not None
    with drawing_from(config.seed, "weights"):
        flow, data = flow_for(config.model, original, linear=config.linear, **config.model_options)
    if config.standardize is None:
        config = replace(config, standardize=data.own_rows)
    steps = preprocessing(data, config.alpha, bool(config.standardize), config.temperature, config.dequantize)
    model = ebf.wrap(flow, preprocess=steps, match_after=_matched(config, len(steps)))
    model.to(choose_device(config.device))
    shape = original.event_shape if len(original.event_shape) == 3 else None
    return Run(config, data, model, shape)


def usual_model(data: DataSet) -> str:
    """The model of data for which none is named. On large images full matrices are slow, and have too many numbers."""
    if data.event_shape == (2,):
        return "glow"
    if data.name.startswith("textures") and data.truth is not None:
        return "cnn"
    return "conv" if len(data.event_shape) == 3 and prod(data.event_shape) >= LARGE else "deep"


def _matched(config: TrainConfig, steps: int) -> str | None:
    """Where the matched variable begins: a temperature is its unit, and no step that ``auto`` would stand after."""
    if not config.map:
        return None
    return "auto" if config.temperature is None else f"preprocess.{steps - 1}"


def choose_device(name: str) -> torch.device:
    """The device of this name; ``auto`` takes the GPU if there is one, and under torchrun that of this process.

    Example:
        >>> choose_device("cpu")
        device(type='cpu')
    """
    local = os.environ.get("LOCAL_RANK")
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device(f"cuda:{local}" if local else "cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        raise InputError(f"the device {name!r} cannot be used: {reason}. Try --device auto.") from None
    return torch.device(f"cuda:{local}") if device == torch.device("cuda") and local else device


def holds_run(path: Path) -> bool:
    """Whether a folder holds a run, finished or not."""
    return (path / CONFIG).is_file()


def open_run(
    path: Path,
    weights: str = "best",
    device: str = "auto",
    data_root: str | None = None,
) -> Run:
    """Reads a run folder: its data, and its model with the weights that are asked for.

    Arguments:
        path: The folder.
        weights: ``"best"`` by NLL; ``"last"``; or ``"average"``, the last moving average. The last two are calibrated
            on the training data, as the run was told to do at its evaluations.
        device: Where the model goes.
        data_root: Where the data are, if not where they were.

    Raises:
        InputError: If it is no run folder; it says what is missing.
    """
    if weights not in WEIGHTS:
        raise InputError(f"unknown weights {weights!r}. {suggest(weights, WEIGHTS)}")
    if not path.is_dir():
        raise InputError(f"there is no folder {path}; `ebflow train --out {path}` makes one")
    if not holds_run(path):
        raise InputError(f"{path} is no run of ebflow: it has no {CONFIG}; `ebflow train --out FOLDER` makes a run")
    told = {"device": device, "data_root": data_root}
    run = build(run_configuration(path).updated({name: value for name, value in told.items() if value is not None}))
    check_data(path, fingerprint(run.data))
    facts, step = _load(run, path, weights)
    return replace(run, path=path, facts=facts, step=step)


def run_configuration(path: Path) -> TrainConfig:
    """Reads the configuration of a run folder.

    Raises:
        InputError: If it is not whole: a run's own file has every setting that the run had.
    """
    told = read_toml(path / CONFIG)
    needed = [name for name, each in settings().items() if each.default is not None]
    missing = [name for name in (*needed, "model", "loss") if name not in told]
    if missing:
        raise InputError(
            f"{path / CONFIG} is not whole: it lacks {', '.join(missing)}. It says what the weights in {path} mean; "
            "put it back from a copy, or begin anew with `ebflow train --fresh`."
        )
    return TrainConfig().updated(told)


def fingerprint(data: DataSet) -> str:
    """A checksum of all rows and of how they are split."""
    found = hashlib.sha256()
    for name in SPLITS:
        rows: Tensor = getattr(data, name)
        found.update(f"{name} {tuple(rows.shape)} {rows.dtype};".encode())
        found.update(rows.contiguous().numpy().tobytes())
    return found.hexdigest()


def check_data(path: Path, found: str) -> None:
    """Refuses to go on with other rows, or another split, than a run was begun with: it would test what it trained on.

    Raises:
        InputError: If the rows differ, or nobody knows.
    """
    file = path / DATA
    if not file.is_file():
        raise InputError(
            f"{path} does not say which rows it was trained on: {DATA} is missing, or it is of an earlier version, "
            "which split the data in another way. `ebflow train --fresh` trains again."
        )
    if file.read_text(encoding="utf-8", errors="replace").strip() != found:
        raise InputError(
            f"the data are not those that {path} was trained on: the rows, their order, or their split changed. Put "
            "the old file back, or begin another run."
        )


def _load(run: Run, path: Path, weights: str) -> tuple[str, int]:
    """Loads the weights of a run into its model, and returns which they are, and their step."""
    if weights == "best":
        step = int(ebf.load_best(run.model, path)["step"])
        return f"best weights, step {step}" + (": the start, nothing was learnt" if step == 0 else ""), step
    files = latest(path)
    if not files:
        raise InputError(f"{path} holds no checkpoint yet; `ebflow train --out {path} --resume` goes on with it")
    state = read_first(files)
    own = "current_model_state"  # beside the average, if there is one
    if weights == "average" and own not in state:
        raise InputError(f"{path} was trained without an average; take --weights last")
    key = own if weights == "last" and own in state else "state_dict"
    write_weights(run.model, weights_of(state, key), f"the weights in {path}")
    kind = run.config.calibration
    if kind is not None:
        with drawing_from(run.config.seed, "calibration"):  # the noise of the dequantisation
            run.model.calibrate(run.split("train"), kind)
    step = int(state["global_step"])
    return f"{weights} weights, step {step}{'' if kind is None else ', calibrated'}", step


def likelihood(model: ebf.EBFlow, rows: Tensor, seed: int = 0, split: str = "test") -> Likelihood:
    """The exact NLL of rows, the same each time: the noise of a dequantisation is that of the seed and the split."""
    return Likelihood.of(nll_of_rows(model, rows, seed, split), rows[0].numel())


@torch.no_grad()
def nll_of_rows(model: ebf.EBFlow, rows: Tensor, seed: int = 0, split: str = "test") -> Tensor:
    """The exact NLL of each row, in double precision."""
    generator = stream(seed, split, device=rows.device)
    parts = []
    for batch in rows.split(BATCH):
        parts.append(-model.log_prob(batch, generator=generator).double())
    return torch.cat(parts)


def above_truth(truth: Truth, rows: Tensor, nlls: Tensor) -> tuple[float, float]:
    """How far a model is above the truth: the mean of log p(x) of the truth less that of the model, in nats.

    It is the Kullback-Leibler divergence, estimated on rows that both see, and so with little error, which is the
    second number. Zero is the least, which no model can do better than.
    """
    apart = nlls.detach().cpu().double() + truth.log_prob(rows.cpu().double())
    return float(apart.mean()), standard_error(apart)


def standard_error(values: Tensor) -> float:
    """The standard error of the mean of some values; infinite for a single one, which tells nothing of it."""
    return float(values.std()) / sqrt(len(values)) if len(values) > 1 else float("inf")
