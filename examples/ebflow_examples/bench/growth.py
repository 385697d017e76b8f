"""How the time of a training step grows with D."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import ebflow_plugin as ebf
from ebflow_examples.bench.contenders import objective, training_step
from ebflow_examples.bench.results import Settings, Table, milliseconds
from ebflow_examples.bench.timing import exponent, ratio
from ebflow_examples.models import build

OBJECTIVES = ("SSM", "DSM", "FDSSM", "ML", "SML")
BATCH = 64


def growth(settings: Settings) -> Iterator[Table]:
    """Step time against D, with its exponents."""
    sizes: tuple[int, ...] = settings.choose((256, 512, 1024), (256, 512, 1024, 2048, 4096))
    steps = {f"{name} {size}": step for size in sizes for name, step in _steps(settings, size).items()}
    times = settings.time("growth with D", steps, seconds=8.0, least=3)
    rows = []
    for name in OBJECTIVES:
        series = [times[f"{name} {size}"] for size in sizes]
        rows.append(
            {
                "objective": name,
                **milliseconds(sizes, series),
                f"over DSM, D = {sizes[-1]}": ratio(series[-1], times[f"DSM {sizes[-1]}"]),
                "exponent, all sizes": exponent(sizes, series),
                "exponent, last doubling": exponent(sizes[-2:], series[-2:]),
            }
        )
    yield Table(
        "growth",
        f"training step against D: two FullLinear layers, batch {BATCH}",
        rows,
        "All sizes and objectives interleaved. The exponent is the p of time ~ D^p: by least squares over "
        f"D = {sizes[0]} … {sizes[-1]}, and from D = {sizes[-2]} to D = {sizes[-1]} alone, which is closer to how it "
        "grows from there on.",
    )


def _steps(settings: Settings, size: int) -> dict[str, Callable[[], None]]:
    """A training step for each objective, all of one model: five would not fit into memory for the largest D."""
    x = settings.data(BATCH, size)
    model = ebf.wrap(build("fc", (size,), init="normal").to(x))
    return {name: training_step(model, objective(name, model), x) for name in OBJECTIVES}
