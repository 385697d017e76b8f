"""The configuration of a training run: one dataclass that is the flags of ``ebflow train``, and a TOML file.

None stands for *chosen for the data and the model*; a run's own ``config.toml`` holds what was chosen. Nothing heavy is
imported here: the help text of the CLI comes from its docstring.
"""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

CHOICES: dict[str, tuple[str, ...]] = {
    "activation": ("silu", "tanh", "softplus", "relu", "leaky_relu"),
    "linear": ("full", "lu", "lower", "upper", "qr", "svd"),
    "loss": ("ssm", "dsm", "fdssm", "sm", "ml", "sml"),
    "log_det": ("exact", "stochastic", "relative", "auto"),
    "optimizer": ("adam", "adamw", "rmsprop", "sgd"),
    "schedule": ("constant", "cosine", "multistep"),
    "calibrate": ("full", "diagonal", "none"),
    "dequantize": ("uniform", "smooth"),
}

NOISED = ("ssm", "dsm", "fdssm")  # that can add noise to the data, and let it shrink
LOSS_OPTIONS: dict[str, tuple[str, ...]] = {  # and the losses that have each
    "sigma": NOISED,
    "shrink": NOISED,
    "latent_weight": (*NOISED, "sm"),
    "ml_weight": NOISED,
    "eps": ("fdssm",),
    "projections": ("ssm",),
    "log_det": ("ml",),
}


@dataclass(frozen=True)
class TrainConfig:
    """What ``ebflow train`` is told. Field names are the keys of the TOML file, and the flags with ``_`` for ``-``.

    The help of the flags is read from here, their panels are these sections; in brackets, how None is chosen.

    What:
        data: Data set, or a .npy, .npz or .csv file, or a folder of images.
        model: Model. [deep; glow in two dimensions]
        linear: Linear layers of the model.
        layers: Full linear layers of the model (deep, fc). [4 for deep, 2 for fc]
        blocks: Blocks of the model (cnn, glow, realnvp, maf, nsf). [as the model has]
        kernel: Size of the convolutions (cnn, glow on images). [7 for cnn, 1 for glow]
        hidden: Width of the networks inside of couplings. [as the model has]
        activation: Activation of these networks. [silu, which is smooth]
        residual: cnn: a residual nonlinearity after each convolution but the last, as the authors have. [no]

    Loss:
        loss: Objective. [what makes the model better: ml (relative where layers are large) for deep, fc and own rows,
            else dsm]
        sigma: DSM, SSM, FDSSM: standard deviation of the noise, in the matched variable (of standardised rows: in their
            deviations). [0.375 for sine, swirl and checkerboard, as they have it; else none, but for DSM 1 for 256 grey
            levels, 0.2 for other images, 0.1 otherwise]
        shrink: DSM, SSM, FDSSM: steps in which the noise shrinks to --sigma, from half of the data's deviation; 0 for
            none. [60 % of the run for sine, swirl and checkerboard, else 0]
        latent_weight: Score matching: weight of the distance of the latents from the base. For few dimensions. [1 where
            noise shrinks by itself, else 0]
        ml_weight: DSM, SSM, FDSSM: this share of the loss is likelihood, of the same points with noise. [0.1 for SSM
            and FDSSM where noise shrinks by itself, else 0]
        eps: FDSSM: length of the finite difference. [1 for images, 0.1 otherwise]
        projections: SSM: directions for each sample. [1]
        log_det: ML: how gradients of log-determinants are taken. [exact]
        energy_weight: Weight of the mean energy as a regulariser.
        map: Match the variable after preprocessing (MaP), not the pixels.

    Optimiser:
        steps: Steps in all. [1000 for images, 8000 where noise shrinks, else 500]
        epochs: Passes over the data, instead of --steps. [what --steps says]
        batch_size: Rows in a batch. [100 for images, 256 where noise shrinks, else 500]
        lr: Learning rate. [1e-4 from a whitening start, 1e-3 if of rows, 2e-3 where noise shrinks, else 3e-3]
        optimizer: Optimiser.
        schedule: Learning rate over the run; multistep: a tenth at 1/2 and at 3/4.
        weight_decay: Weight decay of the matrices and kernels of full linear layers.
        clip_norm: Largest norm of the gradient. [none; 10 for rows that are no images]
        compile: Compile the loss and its gradients into one graph: a minute, once.
        ema: Average the weights, and evaluate the average.
        ema_decay: Decay of the average.

    Start and finish:
        whiten: Start the first full layer as the whitening map of the data. [for images and rows of your own, where the
            model allows it]
        gaussianize: Whiten, and make each feature as Gaussian as the nonlinearity after it can. [where --whiten is, if
            the model allows it]
        calibrate: Fit the base to the latents in closed form at each evaluation. [full for images and whitened rows,
            else none]
        evaluate_every: Steps between two evaluations. [20 in a run, fewer where each goes through many rows]
        patience: Stop after so many evaluations without a better NLL. [never]

    Machine and data:
        device: cpu, cuda, cuda:1, mps, or auto.
        threads: CPU threads. [as torch chooses]
        seed: Where all randomness comes from.
        data_root: Folder that holds MNIST and other data sets. [$EBFLOW_DATA, or data]
        download: Let torchvision download a missing data set.
        header: The first line of a .csv file holds names, or is data. [names if none of its cells is a number, which is
            said]
        limit: Use so many training rows at most. [all]
        standardize: Take each column in units of its standard deviation; NLL stays that of the data. [for rows of your
            own]
        dequantize: Noise that makes grey levels continuous. Jumps of uniform noise bias SSM; smooth noise has a looser
            bound. [uniform]
        alpha: Images are squeezed to alpha … 1 - alpha before the logit. [1e-6; 0.05 for CIFAR-10]
        temperature: What the logits of images are divided by: the unit of --sigma and --eps. [1]

    Example:
        >>> TrainConfig(loss="ml").updated({"lr": 1e-3}).lr
        0.001
    """

    data: str = "digits"
    model: str | None = None
    linear: str = "full"
    layers: int | None = None
    blocks: int | None = None
    kernel: int | None = None
    hidden: int | None = None
    activation: str | None = None
    residual: bool | None = None

    loss: str | None = None
    sigma: float | None = None
    shrink: int | None = None
    latent_weight: float | None = None
    ml_weight: float | None = None
    eps: float | None = None
    projections: int | None = None
    log_det: str | None = None
    energy_weight: float = 0.0
    map: bool = True

    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    optimizer: str = "adam"
    schedule: str = "cosine"
    weight_decay: float = 0.0
    clip_norm: float | None = None
    compile: bool = False
    ema: bool = True
    ema_decay: float = 0.999

    whiten: bool | None = None
    gaussianize: bool | None = None
    calibrate: str | None = None
    evaluate_every: int | None = None
    patience: int | None = None

    device: str = "auto"
    threads: int | None = None
    seed: int = 0
    data_root: str | None = None
    download: bool = False
    header: bool | None = None
    limit: int | None = None
    standardize: bool | None = None
    dequantize: str | None = None
    alpha: float | None = None
    temperature: float | None = None

    @property
    def model_options(self) -> dict[str, Any]:
        """What is said about the inside of the model."""
        names = ("layers", "blocks", "kernel", "hidden", "activation", "residual")
        told = {name: getattr(self, name) for name in names}
        return {name: value for name, value in told.items() if value is not None}

    def updated(self, values: Mapping[str, Any]) -> TrainConfig:
        """The same with other values.

        Raises:
            UnknownNameError: If there is no such key.
            InputError: If a value is of the wrong type, or none of those to choose from.
        """
        types = settings()
        for name, value in values.items():
            _check(name, value, types)
        if values.get("data") not in (None, self.data):  # another file has another first line
            values = {"header": None, **values}
        if values.get("loss") not in (None, self.loss):  # options of the earlier loss mean nothing to the later one
            values = {**{name: None for name, having in LOSS_OPTIONS.items() if values["loss"] not in having}, **values}
        if values.get("epochs") is not None and values.get("steps") is not None:
            raise _input_error("steps and epochs are both given; choose one")
        if values.get("epochs") is not None:  # the later word holds
            return replace(self, **{"steps": None, **values})
        if values.get("steps") is not None:
            return replace(self, **{"epochs": None, **values})
        return replace(self, **values)

    @property
    def calibration(self) -> str | None:
        """What ``EBFlow.calibrate`` is told; None for nothing."""
        return None if self.calibrate == "none" else self.calibrate

    def to_dict(self) -> dict[str, Any]:
        """The values that are not None, in the order of the fields."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}


class Setting(NamedTuple):
    """What there is to know about a field of :class:`TrainConfig`.

    Attributes:
        kind: Its type, without None.
        default: Its default.
        panel: Where the help of the command has it.
        help: What it means.
        auto: How None is chosen.
    """

    kind: type
    default: Any
    panel: str
    help: str
    auto: str


def settings() -> dict[str, Setting]:
    """All settings by name, with what the docstring of the configuration says about them."""
    text, told = f"{inspect.cleandoc(TrainConfig.__doc__ or '')}\n", {}
    for panel, section in re.findall(r"^(\w.*):\n((?: .*\n)+)", text, re.MULTILINE):
        for name, words in re.findall(r"^ {4}(\w+): (.+?)(?=^ {4}\w|\Z)", section, re.MULTILINE | re.DOTALL):
            meaning, _, auto = " ".join(words.split()).partition(" [")
            told[name] = panel, meaning, auto.removesuffix("]")
    hints, found = get_type_hints(TrainConfig), {}
    for each in fields(TrainConfig):
        kind = next(kind for kind in (*get_args(hints[each.name]), hints[each.name]) if kind is not type(None))
        found[each.name] = Setting(kind, each.default, *told.get(each.name, ("", "", "")))
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """Reads the values of a configuration file; :meth:`TrainConfig.updated` checks them.

    Raises:
        InputError: If it cannot be read, is no TOML, or says nothing.
    """
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise _input_error(f"the configuration {path} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _input_error(f"{path} is no TOML file ({error}); it should hold lines such as: loss = 'ssm'") from None
    if not told:
        raise _input_error(f"{path} is empty; it should hold lines such as: loss = 'ssm'")
    return told


def to_toml(config: TrainConfig) -> str:
    """A configuration as the text of a TOML file, with the meaning of each key after it."""
    lines = ["# A run of ebflow. `ebflow train --config THIS_FILE` runs it again.\n"]
    known, panel = settings(), ""
    for name, value in config.to_dict().items():
        setting = known[name]
        if setting.panel != panel:
            panel = setting.panel
            lines.append(f"\n# {panel}\n")
        lines.append(f"{name} = {_toml(value)}  # {setting.help}\n")
    return "".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # a basic string of TOML is escaped as in JSON
    return repr(value)


def _check(name: str, value: Any, types: Mapping[str, Setting]) -> None:
    from ebflow_plugin.errors import UnknownNameError, suggest

    if name not in types:
        raise UnknownNameError(f"there is no setting {name!r}. {suggest(name, types)}")
    if value is None:
        return
    wanted = types[name].kind
    fits = isinstance(value, (int, float) if wanted is float else wanted)
    if not fits or (isinstance(value, bool) and wanted is not bool):
        words = {float: "a number", int: "an integer", bool: "true or false", str: "a text in quotes"}
        raise _input_error(f"{name} must be {words[wanted]}, got {value!r}")
    if name in CHOICES and value not in CHOICES[name]:
        raise UnknownNameError(f"unknown {name} {value!r}. {suggest(str(value), CHOICES[name])}")


def _input_error(message: str) -> Exception:
    from ebflow_plugin.errors import InputError

    return InputError(message)
