"""Targets without data: ``ebflow train --target double-well``, by reverse KL, judged by importance weights."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nflows import distributions, flows, transforms
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LambdaLR

import ebflow_plugin as ebf
from ebflow_examples.config import TrainConfig
from ebflow_examples.console import as_lines, note, to_json
from ebflow_examples.defaults import check
from ebflow_examples.folders import held, writable
from ebflow_examples.streams import drawing_from, stream
from ebflow_nflows import FullConv2d, FullLinear, SinhArcsinh
from ebflow_plugin.errors import InputError, UnknownNameError, suggest
from ebflow_plugin.training.events import Event
from ebflow_plugin.training.files import atomic_write

# The settings that have a meaning without data; all others are refused.
MEANT = {"log_det", "steps", "batch_size", "lr", "clip_norm", "evaluate_every", "seed", "threads"}
JUDGED, FINAL = 2000, 20_000  # samples that judge the model at an evaluation, and at the end


@dataclass(frozen=True)
class Energy:
    """An unnormalised target density.

    Attributes:
        text: What it is.
        shape: The shape of a point.
        log_density: Its logarithm, up to a constant.
        layers: Makes the steps of a flow for it, from data to noise.
        log_z: The logarithm of its integral, where it is known.
    """

    text: str
    shape: tuple[int, ...]
    log_density: Callable[[Tensor], Tensor]
    layers: Callable[[], list[nn.Module]]
    log_z: float | None = None


def double_well(x: Tensor) -> Tensor:
    """Wells at a = ±1.58, one deeper than the other; b follows a."""
    a, b = x[:, 0], x[:, 1]
    return -(a.square() - 2.5).square() + 0.3 * a - 0.5 * (b - 0.5 * a).square()


def phi4(x: Tensor) -> Tensor:
    """A lattice field on a torus: minus the sum over sites of (∇φ)² - φ² + φ⁴."""
    kinetic = sum((x - x.roll(1, dim)).square() for dim in (2, 3))
    return -(kinetic - x.square() + x.pow(4)).sum((1, 2, 3))


def _log_z_of_the_double_well() -> float:
    """Over b in closed form, over a by quadrature."""
    a = torch.linspace(-6, 6, 20_001, dtype=torch.float64)
    heights = double_well(torch.stack([a, 0.5 * a], 1)).exp()
    return math.log(float(torch.trapezoid(heights, a))) + 0.5 * math.log(2 * math.pi)


def _bent() -> list[nn.Module]:
    """Two full layers, and splines of each coordinate between them."""
    return [
        FullLinear(2),
        transforms.PiecewiseRationalQuadraticCDF([2], num_bins=10, tails="linear", tail_bound=4.0),
        FullLinear(2),
    ]


def _convolutions() -> list[nn.Module]:
    """Five circular convolutions, whose determinants are exact by FFT, and bends of each pixel between them."""
    layers = [FullConv2d(1, kernel_size=3, padding_mode="circular") for _ in range(5)]
    steps: list[nn.Module] = [step for layer in layers for step in (layer, SinhArcsinh(8))]
    return steps[:-1]


class _Network(nn.Sequential):
    """The parameters of a coupling: three circular convolutions, of which the last begins with zeros."""

    def __init__(self, n_in: int, n_out: int) -> None:
        layer = partial(nn.Conv2d, kernel_size=3, padding=1, padding_mode="circular")
        super().__init__(layer(n_in, 16), nn.Tanh(), layer(16, 16), nn.Tanh(), layer(16, n_out))
        for parameter in self[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, context: object = None) -> Tensor:
        """The parameters, from the half of the sites that the coupling leaves as they are."""
        found: Tensor = super().forward(x)
        return found


def couplings() -> list[nn.Module]:
    """Six spline couplings of the halves of a checkerboard, to compare with full convolutions."""
    spline = partial(transforms.PiecewiseRationalQuadraticCouplingTransform, num_bins=8, tails="linear", tail_bound=4.0)
    masks = [[1, -1, -1, 1], [-1, 1, 1, -1]]  # of the four channels that a block of 2 x 2 sites becomes
    squeeze = transforms.SqueezeTransform()
    return [
        squeeze,
        *(spline(masks[index % 2], _Network) for index in range(6)),
        transforms.InverseTransform(squeeze),
    ]


ENERGIES = {
    "double-well": Energy(
        "two wells of unequal depth in two dimensions", (2,), double_well, _bent, _log_z_of_the_double_well()
    ),
    "phi4": Energy("a lattice field on 8 x 8 sites, φ⁴", (1, 8, 8), phi4, _convolutions),
    "phi4-couplings": Energy("the same by couplings, to compare; --lr 3e-3", (1, 8, 8), phi4, couplings),
}


def settled(name: str, flags: dict[str, Any]) -> TrainConfig:
    """The configuration of a run on a target.

    Raises:
        UnknownNameError: If there is no such target.
        InputError: If an option is about data, and there are none.
    """
    if name not in ENERGIES:
        raise UnknownNameError(f"unknown target {name!r}. {suggest(name, ENERGIES)}")
    idle = [flag for flag in flags if flag not in MEANT]
    if idle:
        raise InputError(
            f"--{idle[0].replace('_', '-')} has no meaning with --target {name}, which has no data, a flow of its own, "
            "and is trained by reverse KL; leave it out"
        )
    config = TrainConfig(steps=1000, batch_size=256, lr=1e-2).updated(flags)
    check(replace(config, loss="ml"))  # whose log_det is that of reverse KL
    return replace(config, evaluate_every=config.evaluate_every or max(1, (config.steps or 0) // 10))


def model_of(energy: Energy, seed: int) -> ebf.EBFlow:
    """A small flow for a target."""
    with drawing_from(seed, "weights"):
        steps = transforms.CompositeTransform(energy.layers())
        return ebf.wrap(flows.Flow(steps, distributions.StandardNormal(list(energy.shape))))


def train_on(name: str, flags: dict[str, Any], out: Path, progress: bool = True) -> dict[str, Any]:
    """Trains on a target, and returns the summary that it writes into the folder, with weights and samples.

    Raises:
        InputError: If an option has no meaning.
        TrainingError: If training cannot go on.
    """
    config, energy = settled(name, flags), ENERGIES[name]
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with held(writable(out)):
        model = model_of(energy, config.seed)
        note(f"{name}: {energy.text}; {sum(p.numel() for p in model.parameters()):,} weights; into {out}")
        assert config.steps is not None
        assert config.batch_size is not None
        assert config.lr is not None
        objective = ebf.objectives.ReverseKL(
            model, energy.log_density, n=config.batch_size, log_det=config.log_det or "exact"
        )
        records, steps, lr = [], config.steps, config.lr

        def judged(event: Event) -> None:
            """Adds the effective sample size to the record, and shows it."""
            drawn = judge(model, energy, JUDGED, config.seed)
            records.append({**event.record, "effective": drawn.effective_sample_size / JUDGED})
            if progress:
                print(replace(event, record=records[-1]), file=sys.stderr, flush=True)

        started = time.monotonic()
        ebf.fit(
            objective,
            steps=steps,
            optimizer=lambda parameters: optim.Adam(parameters, lr=lr),
            scheduler=lambda made: LambdaLR(made, lambda step: 0.5 * (1.02 + math.cos(math.pi * step / steps))),
            clip_norm=config.clip_norm,
            evaluate_every=config.evaluate_every,
            callback=judged,
            progress=False,
            seed=config.seed,
        )
        seconds = time.monotonic() - started
        drawn = judge(model, energy, FINAL, config.seed, progress)
        chain = drawn.metropolis(generator=stream(config.seed, "metropolis"))
        summary = {
            "target": name,
            "steps": steps,
            "seconds": round(seconds, 2),
            "effective": drawn.effective_sample_size / FINAL,
            "acceptance": chain.acceptance,
            "pareto_k": drawn.pareto_k,
            "log_z": drawn.log_z.value,
            "log_z_error": drawn.log_z.std_error,
            "exact_log_z": energy.log_z,
        }
        atomic_write(out / "metrics.jsonl", lambda file: file.write(as_lines(records)))
        atomic_write(out / "weights.pt", lambda file: torch.save(model.state_dict(), file))
        atomic_write(out / "samples.npy", lambda file: np.save(file, chain.samples.numpy()))
        atomic_write(out / "summary.json", lambda file: file.write(f"{to_json(summary)}\n".encode()))
    return summary


def judge(model: ebf.EBFlow, energy: Energy, count: int, seed: int, progress: bool = False) -> ebf.WeightedSamples:
    """Weighted samples of a model. That they are few is no warning: the progress line shows it."""
    generator = stream(seed, "judge")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ebf.EstimateWarning)
        drawn = ebf.importance(
            model, energy.log_density, count, batch_size=5000, generator=generator, progress=progress
        )
        assert drawn.log_z is not None  # judged here, where it does not warn
    return drawn


def report(summary: dict[str, Any], out: Path) -> str:
    """What a run came to, for people."""
    error, exact = summary["log_z_error"], summary["exact_log_z"]
    trusted = f"± {error:.4f}" if math.isfinite(error) else "(not to be trusted: train longer)"
    known = "" if exact is None else f", exactly {exact:.4f}"
    return "\n".join(
        (
            f"{summary['steps']:,} steps in {summary['seconds']:.0f} s",
            f"log Z        {summary['log_z']:.4f} {trusted}{known}",
            f"effective    {summary['effective']:.2f} of the samples, Pareto k {summary['pareto_k']:.2f}",
            f"accepted     {summary['acceptance']:.2f} of the proposals of independence Metropolis",
            f"samples of the target: {out / 'samples.npy'}; weights of the model: {out / 'weights.pt'}",
        )
    )
