"""``ebflow train``: from a configuration to a run folder. Lightning trains; it is imported when a run begins."""

from __future__ import annotations

import logging
import os
import platform
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from importlib.metadata import version
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR

import ebflow_plugin as ebf
from ebflow_examples.clock import SCHEDULES
from ebflow_examples.config import TrainConfig, read_toml, to_toml
from ebflow_examples.console import first_process, note, to_json
from ebflow_examples.data import NAMES
from ebflow_examples.defaults import check, length, objective_of, settle
from ebflow_examples.folders import held, writable
from ebflow_examples.runs import (
    CONFIG,
    DATA,
    SUMMARY,
    Run,
    build,
    check_data,
    fingerprint,
    holds_run,
    likelihood,
    run_configuration,
)
from ebflow_examples.synthetic import PLANE
from ebflow_plugin.covering import FEW, FEWEST
from ebflow_plugin.errors import CoverageWarning, InputError
from ebflow_plugin.layers import FullConv2d, FullLinear
from ebflow_plugin.training.batches import Loader
from ebflow_plugin.training.files import BEST, atomic_write, latest
from ebflow_plugin.training.fitting import VALIDATION_BATCH
from ebflow_plugin.training.optimizers import fusible

OPTIMISERS: dict[str, Callable[..., optim.Optimizer]] = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "rmsprop": optim.RMSprop,
    "sgd": optim.SGD,
}
# What may be another when a run goes on. All else says what the run is: its data and split, its model, its objective.
GOES_ON = {
    "steps", "epochs", "batch_size", "clip_norm", "evaluate_every", "patience", "device", "threads", "data_root",
    "download", "compile",
}  # fmt: skip


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
            config = begun = run_configuration(out)
    elif resume and not flags and file is None:
        raise InputError(f"{out} holds no run to go on with: it has no {CONFIG}. Leave out --resume to begin one.")
    if file is not None:
        config = config.updated(read_toml(file))
    config = config.updated(flags)
    if begun is not None:
        _refuse_another_run(begun, config, out)
    check(config)
    return config


def _refuse_another_run(begun: TrainConfig, now: TrainConfig, out: Path | None) -> None:
    """Refuses what would make another run of a run: other rows in its test data, or weights that mean other things."""
    now = replace(now, data=begun.data if _path(now.data) == _path(begun.data) else now.data)
    for each in fields(TrainConfig):
        before, asked = getattr(begun, each.name), getattr(now, each.name)
        if each.name not in GOES_ON and before != asked:
            shown = ["its default" if value is None else value for value in (before, asked)]
            raise InputError(
                f"{out} was begun with {each.name} {shown[0]}, and would be another run with {shown[1]}: leave "
                f"{each.name} out, or begin another run with --fresh or another --out"
            )


def _path(data: str) -> str:
    return data if data in NAMES else str(Path(data).expanduser().absolute())


def free_folder(config: TrainConfig, base: Path = Path("runs")) -> Path:
    """A folder that holds no run yet, named after the run."""
    if "RANK" in os.environ:
        raise InputError("processes under torchrun need to agree on the folder: pass --out runs/NAME")
    name = "-".join(part for part in (Path(config.data).stem, config.model, config.loss) if part)
    paths = (base / (name if number == 1 else f"{name}-{number}") for number in range(1, 100_000))
    return next(path for path in paths if not holds_run(path))


def train(config: TrainConfig, out: Path, resume: bool = False, progress: bool = True) -> dict[str, Any]:
    """Trains, and gives the summary that it writes into the folder.

    Raises:
        TrainingError: If training cannot go on.
        KeyboardInterrupt: On Ctrl-C, saying how to go on.
    """
    check(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    run = build(config)
    with held(writable(out)) if first_process() else nullcontext():
        return _train(run, out, resume, progress)


def _train(run: Run, out: Path, resume: bool, progress: bool) -> dict[str, Any]:
    first = first_process()
    mark = fingerprint(run.data)
    if first and resume and holds_run(out):
        check_data(out, mark)
    run = settle(run)
    config, model = run.config, run.model
    objective = objective_of(model, config)
    if config.compile:
        objective.compile()
    kept = {name: (out / name).read_bytes() if (out / name).is_file() else None for name in (CONFIG, DATA, SUMMARY)}
    if first:
        atomic_write(out / DATA, lambda file: file.write(f"{mark}\n".encode()))
        atomic_write(out / CONFIG, lambda file: file.write(to_toml(config).encode()))  # other processes read it
        (out / SUMMARY).unlink(missing_ok=True)
        note(_headline(run, out))
    started = time.monotonic()
    try:
        trained = run_trainer(run, objective, out, resume, progress)
    except InputError:
        if first:  # what cannot go on with this run does not describe it
            _put_back(out, kept)
        raise
    except KeyboardInterrupt:
        what = "goes on from the last checkpoint" if latest(out) else "begins again: there is no checkpoint yet"
        raise KeyboardInterrupt(f"`ebflow train --out {out} --resume` {what}.") from None
    if first and resume and config.steps is not None and trained["steps"] > config.steps:
        _put_back(out, kept)  # the run was longer than that already: nothing was done
    ebf.load_best(model, out)
    summary = {
        "data": config.data,
        "model": config.model,
        "loss": config.loss,
        **trained,
        "test": likelihood(model, run.split("test"), config.seed).to_dict(),
        "coverage": covered(run) if first else None,
        "seconds": round(time.monotonic() - started, 2),
        "device": str(run.device),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
    if first:
        atomic_write(out / SUMMARY, lambda file: file.write(f"{to_json(summary)}\n".encode()))
    return summary


def covered(run: Run) -> dict[str, Any] | None:
    """What score matching cannot see, on test data; None for other objectives, many dimensions, or too few rows.

    See :func:`ebflow_plugin.coverage`. In many dimensions its shares say little, and an inverse may take long.
    """
    rows = run.split("test")
    if run.config.loss in ("ml", "sml") or prod(rows.shape[1:]) > FEW or len(rows) < FEWEST:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CoverageWarning)  # what it says is printed
        found = ebf.coverage(run.model, rows, generator=run.generator(run.config.seed, "coverage"))
    return {**asdict(found), "fine": bool(found), "advice": found.advice}


def _put_back(out: Path, kept: dict[str, bytes | None]) -> None:
    """Restores the old content of files of a run folder."""
    for name, content in kept.items():
        if content is None:
            (out / name).unlink(missing_ok=True)
        else:
            (out / name).write_bytes(content)


def report(summary: dict[str, Any], out: Path) -> str:
    """What a run came to, for people."""
    validation, test, coverage = summary["validation"], summary["test"], summary["coverage"]
    best, before = validation["best_step"], validation["nll_before"]
    # Calibrated as the others; none if the first step still had to start an ActNorm.
    start = "" if before is None else f"{before:.4f} -> "
    lines = [] if summary["learnt"] else [_nothing(summary)]
    lines += [
        f"{summary['steps']:,} steps in {summary['training_seconds']:.0f} s "
        f"({summary['steps_per_second']} steps/s), stopped by {summary['stopped']}",
        f"validation NLL  {start}{validation['nll_best']:.4f} at step {best} (last {validation['nll_last']:.4f})",
        f"test NLL        {test['nll']:.4f} ± {test['nll_error']:.4f} nats of the best weights, step {best}",
        f"test bits/dim   {test['bits_per_dim']:.4f} ± {test['bits_error']:.4f}",
    ]
    if coverage is not None:  # what score matching does not see in its loss, and what to do about it
        flags = "" if coverage["fine"] else " (here: more --steps, --shrink, --latent-weight 1, or --loss ml)"
        lines += [
            f"coverage        {coverage['outside']:.1%} of the samples are far from the data, "
            f"{coverage['missed']:.1%} of the data far from the samples (usual: 1%)",
            f"                {coverage['advice']}{flags}",
        ]
    return "\n".join([*lines, f"next: ebflow {'density' if summary['data'] in PLANE else 'sample'} {out}"])


def _nothing(summary: dict[str, Any]) -> str:
    loss, found = summary["loss"], summary["validation"]
    tries = {"--loss ml": loss != "ml", "a smaller --lr": True, "a smaller --sigma": loss == "dsm"}
    return (
        f"NOTHING WAS LEARNT: {loss.upper()} made the model worse than its start (validation NLL "
        f"{found['nll_before']:.4f} before, {found['nll_last']:.4f} at the end). All below is of the start, step 0. "
        f"Try {' or '.join(words for words, fits in tries.items() if fits)}."
    )


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    libraries = {name: version(name) for name in ("ebflow-plugin", "nflows", "normflows", "zuko")}
    return {"python": platform.python_version(), "torch": torch.__version__, **libraries}


def _headline(run: Run, out: Path) -> str:
    config, data = run.config, run.data
    start = "Gaussianising start" if config.gaussianize else "whitening start" if config.whiten else "plain start"
    weights = sum(parameter.numel() for parameter in run.model.parameters())
    units = ""
    if config.standardize:
        also = {"dsm": ", and so does --sigma", "fdssm": ", and so does --eps"}.get(config.loss or "", "")
        units = (
            f"\nstandardised: the model sees each column in units of its standard deviation{also}; NLL and samples "
            "are in the units of the data"
        )
    return (
        f"{config.data}: {len(data.train):,} rows of shape {data.event_shape}; {config.model} of nflows, "
        f"{weights:,} weights, {start}; {str(config.loss).upper()} on {run.device}; into {out}{units}"
    )


def optimizer_for(run: Run, one_rate: bool = False) -> Callable[[list[nn.Parameter]], optim.Optimizer]:
    """What makes the optimiser of a configuration: its weight decay is that of full linear layers alone.

    Arguments:
        run: The model, and its configuration.
        one_rate: Whether kernels have the rate of all others, as in the paper, in place of 1/k of it.
    """
    config, model = run.config, run.model
    layers = (module for module in model.flow.modules() if isinstance(module, (FullLinear, FullConv2d)))
    decaying = {id(layer.weight) for layer in layers} if config.weight_decay else set()

    def optimizer(parameters: list[nn.Parameter]) -> optim.Optimizer:
        assert config.lr is not None
        groups = [{"params": parameters, "lr": config.lr}] if one_rate else ebf.parameter_groups(model, config.lr)
        split = []
        for group, decays in product(groups, (False, True)):
            kept = [each for each in group["params"] if (id(each) in decaying) == decays]
            if kept:
                split.append({**group, "params": kept, "weight_decay": config.weight_decay if decays else 0.0})
        fused = {} if config.optimizer == "rmsprop" else {"fused": fusible(parameters)}
        return OPTIMISERS[config.optimizer](split, lr=config.lr, **fused)

    return optimizer


def run_trainer(
    run: Run,
    objective: ebf.objectives.Objective,
    out: Path,
    resume: bool,
    progress: bool,
) -> dict[str, Any]:
    """Trains the model of a settled run in Lightning, with its checkpoints and best weights in a folder.

    Arguments:
        run: The model with its data.
        objective: The loss.
        out: The folder.
        resume: Whether to go on from the last checkpoint there, if there is one; if not, those that are there go.
        progress: Whether to show it.

    Returns:
        Its part of the summary.

    Raises:
        KeyboardInterrupt: On Ctrl-C before the first step; later the process exits, with 130.
    """
    from lightning.fabric.utilities.warnings import PossibleUserWarning

    from ebflow_examples.records import Records
    from ebflow_plugin.lightning import Checkpoints, ConditionGuard, ExactNLL, LitObjective, trainer

    config, world = run.config, int(os.environ.get("WORLD_SIZE", "1"))
    assert config.batch_size is not None
    loader = Loader(run.data.train, config.batch_size, seed=config.seed)
    steps = length(config, len(run.data.train))
    schedule = SCHEDULES[config.schedule]
    scheduler = None if config.schedule == "constant" else lambda made: LambdaLR(made, lambda n: schedule(n / steps))
    held_out = Loader(run.data.validation, max(config.batch_size, VALIDATION_BATCH), shuffle=False, name="validation")
    if not resume and first_process():
        for old in (*latest(out), out / BEST):
            old.unlink(missing_ok=True)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    records = Records(out, progress)
    made = trainer(
        out,
        steps=steps,
        evaluate_every=config.evaluate_every,
        patience=config.patience,
        ema=config.ema_decay if config.ema else False,
        calibrate=config.calibration,
        clip_norm=config.clip_norm,
        callbacks=[records, ConditionGuard(every=steps + 1)],  # at evaluations alone
        hint=f"`ebflow train --out {out} --resume` goes on from the last checkpoint.",
        enable_progress_bar=False,
        **_devices(run.device, world),
    )
    state = torch.get_rng_state()
    torch.manual_seed(config.seed)
    pieces: list[Any] = made.callbacks  # type: ignore[attr-defined]
    kept = next(piece for piece in pieces if isinstance(piece, Checkpoints))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=PossibleUserWarning)  # Lightning's, about its own inner life
            made.fit(
                LitObjective(objective, optimizer_for(run), scheduler),
                loader,
                held_out,
                ckpt_path=kept.last if resume else None,
            )
    except SystemExit as stop:
        if stop.code == 1:  # Lightning's for a Ctrl-C before the first step
            raise KeyboardInterrupt from None
        raise
    finally:
        torch.set_rng_state(state)
    last, steps = records.history[-1], made.global_step  # with those before a resume
    return {
        "steps": steps,
        "stopped": kept.stopped,
        "validation": {
            "nll_before": next(piece.start_nll for piece in pieces if isinstance(piece, ExactNLL)),
            "nll_last": last["nll"],
            "nll_best": kept.best_nll,
            "best_step": kept.best_step,
        },
        "learnt": kept.best_step != 0,
        "training_seconds": round(last["seconds"], 2),
        "steps_per_second": round(steps / last["seconds"], 2) if last["seconds"] else None,
    }


def _devices(device: torch.device, world: int) -> dict[str, Any]:
    """The options of Lightning's Trainer for a device, or for all processes that torchrun started."""
    accelerator = {"cuda": "gpu"}.get(device.type, device.type)
    if world > 1:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        # Score matching leaves some parameters without a gradient.
        strategy = "ddp_find_unused_parameters_true"
        return {"accelerator": accelerator, "devices": local, "num_nodes": world // local, "strategy": strategy}
    return {"accelerator": accelerator, "devices": [device.index or 0] if accelerator == "gpu" else 1}
