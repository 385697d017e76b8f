"""How the time of a training step grows with D, and its memory with depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ebflow_plugin as ebf
from ebflow_examples.bench.contenders import objective, training_step
from ebflow_examples.bench.memory import METHOD, peak_bytes
from ebflow_examples.bench.results import Settings, Table, goal, milliseconds
from ebflow_examples.bench.timing import exponent, ratio
from ebflow_examples.models import build

OBJECTIVES = ("SSM", "DSM", "FDSSM", "ML", "SML")
BATCH = 64
TARGETS = {"SSM": 2.1, "DSM": 2.1, "FDSSM": 2.1}
DEPTHS = (2, 4, 8, 16)
MEMORY_DIM = 256


def growth(settings: Settings) -> Iterator[Table]:
    """Step time against D with its exponents; peak memory of a step against depth."""
    sizes: tuple[int, ...] = settings.choose((256, 512, 1024), (256, 512, 1024, 2048, 4096))
    yield _time_against_size(settings, sizes)
    yield _memory_against_depth(settings)


def _time_against_size(settings: Settings, sizes: tuple[int, ...]) -> Table:
    steps = {f"{name} {size}": step for size in sizes for name, step in _steps(settings, size).items()}
    times = settings.time("growth with D", steps, seconds=8.0, least=3)
    rows = []
    for name in OBJECTIVES:
        series = [times[f"{name} {size}"] for size in sizes]
        fitted = exponent(sizes, series)
        rows.append(
            {
                "objective": name,
                **milliseconds(sizes, series),
                f"over DSM, D = {sizes[-1]}": ratio(series[-1], times[f"DSM {sizes[-1]}"]),
                "exponent, all sizes": fitted,
                "exponent, last doubling": exponent(sizes[-2:], series[-2:]),
                "target": goal(fitted, TARGETS.get(name)),
            }
        )
    return Table(
        "growth",
        f"training step against D: two FullLinear layers, batch {BATCH}",
        rows,
        "All sizes and objectives interleaved. The exponent is the p of time ~ D^p: by least squares over "
        f"D = {sizes[0]} … {sizes[-1]}, and from D = {sizes[-2]} to D = {sizes[-1]} alone, which is closer to how it "
        "grows from there on.",
    )


def _memory_against_depth(settings: Settings) -> Table:
    rows: list[dict[str, Any]] = [{"objective": name} for name in OBJECTIVES]
    for depth in DEPTHS:
        for row in rows:
            name = row["objective"]
            settings.progress(f"memory of {name}, {depth} layers", 0)
            peak = peak_bytes(partial(_step, settings, name, depth), settings.device)
            row[f"{depth} layers, MB"] = peak / 2**20
    for row in rows:
        first, last = (row[f"{depth} layers, MB"] for depth in (DEPTHS[0], DEPTHS[-1]))
        row["a layer, MB"] = (last - first) / (DEPTHS[-1] - DEPTHS[0])
    weights = MEMORY_DIM**2 * 4 / 2**20
    return Table(
        "growth",
        f"peak memory of a training step against depth: FullLinear layers, D = {MEMORY_DIM}, batch {BATCH}",
        rows,
        f"Weights, gradients and Adam's state are part of it, {4 * weights:.2f} MB a layer. Measured: {METHOD}.",
    )


def _steps(settings: Settings, size: int) -> dict[str, Callable[[], None]]:
    """A training step for each objective, all of one model: five would not fit into memory for the largest D."""
    x = settings.data(BATCH, size)
    model = ebf.wrap(build("fc", (size,), init="normal").to(x))
    return {name: training_step(model, objective(name, model), x) for name in OBJECTIVES}


def _step(settings: Settings, name: str, layers: int) -> Callable[[], None]:
    """A training step of a deep model. Its layers begin as minus the identity, and so stay well-conditioned."""
    x = settings.data(BATCH, MEMORY_DIM)
    model = ebf.wrap(build("fc", (MEMORY_DIM,), layers=layers).to(x))
    return training_step(model, objective(name, model), x)
