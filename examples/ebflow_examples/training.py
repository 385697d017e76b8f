"""``ebflow train``: from a configuration to a run folder."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR

import ebflow_plugin as ebf
from ebflow_examples.config import TrainConfig, read_toml, to_toml
from ebflow_examples.console import note, to_json
from ebflow_examples.data import NAMES
from ebflow_examples.runs import CONFIG, SUMMARY, Run, build, holds_run, likelihood
from ebflow_plugin.errors import InputError, SingularError
from ebflow_plugin.inputs import positive, whole
from ebflow_plugin.training.checkpoints import atomic_write

__all__ = ["configuration", "first_process", "free_folder", "objective_of", "report", "settle", "train"]

STEPS = {True: 1000, False: 500}  # of images, and of other rows, whose models are deeper
OPTIMISERS: dict[str, Callable[..., optim.Optimizer]] = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "rmsprop": optim.RMSprop,
    "sgd": optim.SGD,
}
# What weights do not tell, though they mean something else with it; and what is usual.
UNSEEN = {"activation": "silu", "alpha": "its default", "map": True}
SCHEDULES: dict[str, Callable[[float], float]] = {  # the learning rate, as a share of --lr, by the share of the run
    "constant": lambda share: 1.0,
    "cosine": lambda share: 0.5 * (1.0 + cos(pi * min(1.0, share))),
    "multistep": lambda share: 0.1 ** ((share >= 0.5) + (share >= 0.75)),
}


def configuration(
    flags: dict[str, Any], file: Path | None = None, out: Path | None = None, resume: bool | None = None
) -> TrainConfig:
    """Puts together what a run is told: defaults, under the run's own file on resuming, the file, and the flags.

    Raises:
        InputError: If there is nothing to resume, or a run is in the way; or a value is no good.
    """
    config, begun = TrainConfig(), None
    if resume and out is None:
        raise InputError("--resume needs the folder of the run: --out runs/NAME")
    if out is not None and holds_run(out):
        if resume is None and first_process():  # the others may come when it has begun
            raise InputError(f"{out} holds a run already: --resume goes on with it, --fresh replaces it")
        if resume:
            config = begun = config.updated(read_toml(out / CONFIG))
    elif resume and not flags and file is None:
        raise InputError(f"{out} holds no run to go on with: it has no {CONFIG}. Leave out --resume to begin one.")
    if file is not None:
        config = config.updated(read_toml(file))
    config = config.updated(flags)
    for name, usual in UNSEEN.items() if begun is not None else ():
        before, now = (usual if getattr(each, name) is None else getattr(each, name) for each in (begun, config))
        if before != now:
            raise InputError(
                f"{out} was begun with {name} {before}, and its weights mean something else with {now}: leave {name} "
                "out, or begin another run with --fresh or another --out"
            )
    return config


def first_process() -> bool:
    """Whether this process writes and speaks, among those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def free_folder(config: TrainConfig, base: Path = Path("runs")) -> Path:
    """A folder that holds no run yet, named after the run."""
    if "RANK" in os.environ:
        raise InputError("processes under torchrun need to agree on the folder: pass --out runs/NAME")
    name = "-".join(part for part in (Path(config.data).stem, config.model, config.loss) if part)
    paths = (base / (name if number == 1 else f"{name}-{number}") for number in range(1, 100_000))
    return next(path for path in paths if not holds_run(path))


def settle(run: Run) -> Run:
    """Chooses what the configuration left open, and runs the whitening start where it is wanted and possible."""
    config, images = run.config, run.data.levels is not None
    if config.lr is not None:
        positive("lr", config.lr)
    for name in ("batch_size", "steps", "epochs"):
        if getattr(config, name) is not None:
            whole(name, getattr(config, name))
    chosen: dict[str, Any] = {}
    if config.data_root is not None:  # the file is read from other folders too
        chosen["data_root"] = str(Path(config.data_root).expanduser().absolute())
    if config.data not in NAMES:
        chosen["data"] = str(Path(config.data).expanduser().absolute())
    if config.whiten is not False or config.gaussianize:
        chosen["whiten"], chosen["gaussianize"] = _started(run)
    if config.lr is None:
        chosen["lr"] = 1e-4 if chosen.get("whiten", config.whiten) else 3e-3
    if config.batch_size is None:
        chosen["batch_size"] = min(100 if images else 500, len(run.data.train))
    if config.steps is None and config.epochs is None:
        chosen["steps"] = STEPS[images]
    if config.calibrate is None:
        chosen["calibrate"] = "full" if images else "none"
    if config.clip_norm is None and not images:
        chosen["clip_norm"] = 10.0
    if config.sigma is None and config.loss == "dsm":
        chosen["sigma"] = (1.0 if run.data.levels == 256 else 0.2) if images else 0.1
    if config.eps is None and config.loss == "fdssm":
        chosen["eps"] = 1.0 if images else 0.1
    return replace(run, config=replace(config, **chosen))


def _started(run: Run) -> tuple[bool, bool]:
    """Runs the start that is asked for, or the best that the model allows for images: whether it whitens, and bends."""
    config = run.config
    asked = bool(config.whiten or config.gaussianize)
    if not asked and run.data.levels is None:
        return False, False
    for gaussianize in (True, False):
        if config.gaussianize not in (None, gaussianize):
            continue
        try:
            run.model.initialize(run.split("train"), whiten=True, gaussianize=gaussianize)
        except (InputError, SingularError):  # the model does not allow it, or there are too few rows
            if config.gaussianize or (asked and not gaussianize):
                raise
        else:
            return True, gaussianize
    return False, False


def objective_of(model: ebf.EBFlow, config: TrainConfig) -> ebf.objectives.Objective:
    """The objective of a configuration."""
    options: dict[str, Any] = {"energy_weight": config.energy_weight}
    for name, loss in (("sigma", "dsm"), ("eps", "fdssm"), ("projections", "ssm")):
        value = getattr(config, name)
        if config.loss == loss and value is not None:
            options[name] = value
    return ebf.objective(config.loss, model, **options)


def train(config: TrainConfig, out: Path, resume: bool = False, progress: bool = True) -> dict[str, Any]:
    """Trains, and gives the summary that it writes into the folder.

    Raises:
        TrainingError: If training cannot go on.
        KeyboardInterrupt: On Ctrl-C, saying how to go on.
    """
    first = first_process()
    if config.threads is not None:
        torch.set_num_threads(whole("threads", config.threads))
    run = settle(build(config))
    config, model = run.config, run.model
    objective = objective_of(model, config)
    if first:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"the folder {out} cannot be made: {error.strerror or error}") from None
        kept = (out / CONFIG).read_bytes() if resume and holds_run(out) else None
        atomic_write(out / CONFIG, lambda file: file.write(to_toml(config).encode()))  # other processes read it
        (out / SUMMARY).unlink(missing_ok=True)
        note(_headline(run, out))
    started = time.monotonic()
    try:
        result = ebf.fit(objective, run.data.train, **_fit_options(run, out, resume, progress))
    except InputError:
        if first and kept is not None:  # what cannot go on with this run does not describe it
            (out / CONFIG).write_bytes(kept)
        elif first:
            (out / CONFIG).unlink()
        raise
    except KeyboardInterrupt:
        saved = any(out.glob("step-*.pt"))
        what = "goes on from the last checkpoint" if saved else "begins again: there is no checkpoint yet"
        raise KeyboardInterrupt(f"`ebflow train --out {out} --resume` {what}.") from None
    if first and kept is not None and config.steps is not None and result.steps > config.steps:
        (out / CONFIG).write_bytes(kept)  # the run was longer than that already: nothing was done
    last = result.history[-1]
    if result.best_state is not None:
        result.load_best(model)
    summary = {
        "data": config.data,
        "model": config.model,
        "loss": config.loss,
        "steps": result.steps,
        "stopped": result.stopped,
        "validation": {
            "nll_before": result.start_nll,
            "nll_last": last["nll"],
            "nll_best": result.best_nll,
            "best_step": result.best_step,
        },
        "test": likelihood(model, run.split("test"), config.seed).to_dict(),
        "seconds": round(time.monotonic() - started, 2),
        "training_seconds": round(last["seconds"], 2),
        "steps_per_second": round(result.steps / last["seconds"], 2) if last["seconds"] else None,
        "device": str(run.device),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
    if first:
        (out / SUMMARY).write_text(to_json(summary) + "\n", encoding="utf-8")
    return summary


def report(summary: dict[str, Any], out: Path) -> str:
    """What a run came to, for people."""
    validation, test = summary["validation"], summary["test"]
    before = validation["nll_before"]  # calibrated as the others; none if the first step still had to start an ActNorm
    two = summary["data"] in ("sine", "swirl", "checkerboard")
    return "\n".join(
        (
            f"{summary['steps']:,} steps in {summary['training_seconds']:.0f} s "
            f"({summary['steps_per_second']} steps/s), stopped by {summary['stopped']}",
            f"validation NLL  {'' if before is None else f'{before:.4f} -> '}{validation['nll_best']:.4f} "
            f"at step {validation['best_step']} (last {validation['nll_last']:.4f})",
            f"test NLL        {test['nll']:.4f} ± {test['nll_error']:.4f} nats of the best weights",
            f"test bits/dim   {test['bits_per_dim']:.4f} ± {test['bits_error']:.4f}",
            f"next: ebflow {'density' if two else 'sample'} {out}",
        )
    )


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    libraries = {name: version(name) for name in ("ebflow-plugin", "nflows", "normflows")}
    return {"python": platform.python_version(), "torch": torch.__version__, **libraries}


def _headline(run: Run, out: Path) -> str:
    config, data = run.config, run.data
    start = "Gaussianising start" if config.gaussianize else "whitening start" if config.whiten else "plain start"
    weights = sum(parameter.numel() for parameter in run.model.parameters())
    return (
        f"{config.data}: {len(data.train):,} rows of shape {data.event_shape}; {config.model} of {config.library}, "
        f"{weights:,} weights, {start}; {config.loss.upper()} on {run.device}; into {out}"
    )


def _fit_options(run: Run, out: Path, resume: bool, progress: bool) -> dict[str, Any]:
    config = run.config
    assert config.lr is not None
    assert config.batch_size is not None
    batches = max(1, len(run.data.train) // (config.batch_size * int(os.environ.get("WORLD_SIZE", "1"))))
    total = config.steps or (config.epochs or 1) * batches
    make, rate, schedule = OPTIMISERS[config.optimizer], config.lr, SCHEDULES[config.schedule]

    def optimizer(parameters: list[nn.Parameter]) -> optim.Optimizer:
        return make(parameters, lr=rate)

    def scheduler(made: optim.Optimizer) -> LambdaLR:
        return LambdaLR(made, lambda step: schedule(step / total))

    return {
        "optimizer": optimizer,
        "scheduler": None if config.schedule == "constant" else scheduler,
        "steps": config.steps,
        "epochs": config.epochs,
        "batch_size": config.batch_size,
        "validation": run.data.validation,
        "evaluate_every": config.evaluate_every,
        "patience": config.patience,
        "ema": ebf.EMA(run.model, decay=config.ema_decay) if config.ema else None,
        "clip_norm": config.clip_norm,
        "checkpoint": out,
        "resume": resume,
        "calibrate": config.calibration,
        "progress": progress,
        "seed": config.seed,
    }
