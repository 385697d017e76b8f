"""Maximum likelihood of convolutions without determinants, beside exact likelihood and score matching."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Generator

import ebflow_plugin as ebf
from ebflow_examples.bench.contenders import objective, training_step
from ebflow_examples.bench.results import Settings, Table, compare
from ebflow_examples.bench.timing import exponent, interleaved
from ebflow_examples.models import build

__all__ = ["likelihood"]

NEW = "ML stochastic"
OBJECTIVES = (NEW, "ML", "DSM", "SSM")
TARGETS = {"ML": 0.12, "DSM": 1.0}
BATCH = 50
QUICK_SIDES, SIDES = (8, 16), (16, 32, 64)
SPREAD = 0.1  # of the kernels' entries about minus the identity, over the root of the fan-in


def likelihood(settings: Settings) -> Iterator[Table]:
    """A training step of the paper's cnn by likelihood without determinants; and how it grows with the image."""
    side = settings.choose(QUICK_SIDES[-1], 32)
    shape = (3, side, side)
    title = " x ".join(map(str, shape))
    times = settings.time(f"cnn {title} likelihood", _steps(settings, shape), seconds=5.0, least=3)
    yield Table(
        "cnn",
        f"training step by likelihood without determinants: the paper's cnn on {title}, batch {BATCH}",
        [compare(NEW, times[NEW], times[name], TARGETS.get(name)) for name in OBJECTIVES[1:]],
        "The targets are for 3 x 32 x 32. Kernels of minus the identity with noise; the number of probes is chosen "
        "for each layer and step.",
    )
    yield _growth(settings)


def _growth(settings: Settings) -> Table:
    shapes = [(3, side, side) for side in settings.choose(QUICK_SIDES, SIDES)]
    sizes = [prod(shape) for shape in shapes]
    steps = [_steps(settings, shape) for shape in shapes]
    fast, exact = (
        {
            f"{name} {size}": made[name]
            for size, made in zip(sizes, steps, strict=True)
            for name in OBJECTIVES
            if pick(name)
        }
        for pick in (lambda name: name != "ML", lambda name: name == "ML")
    )
    times = settings.time("growth with the image", fast, seconds=5.0, least=3)
    settings.progress("growth of exact likelihood", 0)
    times |= interleaved(exact, seconds=5.0, least=1, warmup=1, seed=settings.seed, device=settings.device)
    rows = []
    for name in OBJECTIVES:
        series = [times[f"{name} {size}"] for size in sizes]
        milliseconds = {f"D = {size}, ms": 1e3 * each.median for size, each in zip(sizes, series, strict=True)}
        rows.append({"objective": name, **milliseconds, "time ~ D^p": exponent(sizes, series)})
    return Table(
        "cnn",
        f"training step against D: the paper's cnn, batch {BATCH}",
        rows,
        "All sizes interleaved; exact ML, of which one step at D = 12,288 takes a minute and more, apart from them.",
    )


def _steps(settings: Settings, shape: tuple[int, ...]) -> dict[str, Callable[[], None]]:
    """Training steps of one model, away from its start; the new objective has chosen its probes."""
    x = settings.data(BATCH, *shape)
    flow = build("cnn", shape)
    generator = Generator().manual_seed(settings.seed)
    with torch.no_grad():
        for parameter in flow.parameters():
            if parameter.dim() == 4:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(SPREAD * noise / parameter[0].numel() ** 0.5)
    model = ebf.wrap(flow.to(x))
    made = {name: training_step(model, objective(name, model), x) for name in OBJECTIVES}
    for _ in range(3):
        made[NEW]()
    return made
