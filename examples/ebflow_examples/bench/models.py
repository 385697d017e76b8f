"""A training step of the paper's models against plain torch; and of convolutions by likelihood without determinants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Generator, Tensor

import ebflow_plugin as ebf
from ebflow_examples.architectures import CNN_KERNEL
from ebflow_examples.bench import plain
from ebflow_examples.bench.contenders import ALPHA, BATCH, DIM, objective, plain_loss, training_step
from ebflow_examples.bench.results import Settings, Table, compare, milliseconds
from ebflow_examples.bench.timing import exponent, interleaved
from ebflow_examples.models import build

# Of likelihood without determinants.
NEW = "ML stochastic"
OBJECTIVES = (NEW, "ML", "DSM", "SSM")
NEW_BATCH = 50
QUICK_SIDES, SIDES = (8, 16), (16, 32, 64)
SPREAD = 0.1  # of the kernels' entries about minus the identity, over the root of the fan-in


def fc(settings: Settings) -> Iterator[Table]:
    """A training step of the paper's fc model, ours against plain torch, for each objective."""
    x, rows = settings.data(BATCH, DIM), []
    for name in ("SSM", "DSM", "FDSSM", "ML"):
        times = settings.time(f"fc {name}", _pair("fc", name, x), seconds=2.0)
        rows.append(compare(name, times[name], times[f"plain {name}"]))
    yield Table(
        "fc",
        f"training step of the paper's fc model, D = {DIM}, batch {BATCH}",
        rows,
        "Loss, backward and Adam (fused on the CPU); plain is hand-written torch with autograd's double backward.",
    )


def cnn(settings: Settings) -> Iterator[Table]:
    """A training step of the paper's cnn against plain torch, in two memory formats; ML without determinants."""
    for shape in settings.choose([(1, 28, 28)], [(1, 28, 28), (3, 32, 32)]):
        title = " x ".join(map(str, shape))
        x, rows = settings.data(BATCH, *shape), []
        for name in ("SSM", "DSM", "FDSSM"):
            other = f"{name} channels_last"
            steps = _pair("cnn", name, x) | _pair("cnn", name, x, other, torch.channels_last)
            times = settings.time(f"cnn {title} {name}", steps, seconds=2.0)
            pairs = ((name, f"plain {name}"), (other, f"plain {other}"), (other, f"plain {name}"))
            rows += [compare(ours, times[ours], times[theirs]) for ours, theirs in pairs]
        yield Table(
            "cnn",
            f"training step of the paper's cnn on {title}, batch {BATCH}",
            rows,
            f"Six {CNN_KERNEL} x {CNN_KERNEL} convolutions. ML is left out: by hand it is a determinant of D x D for "
            "each.",
        )
    yield from likelihood(settings)


def _pair(
    kind: str, name: str, x: Tensor, label: str = "", layout: torch.memory_format = torch.contiguous_format
) -> dict[str, Callable[[], None]]:
    """A training step of ours and one by hand, of the same model, by label."""
    flow = build(kind, tuple(x.shape[1:]), alpha=ALPHA).to(x).to(memory_format=layout)
    hand = plain.model(kind, tuple(x.shape[1:]), ALPHA).to(x).to(memory_format=layout)
    plain.copy_parameters(flow, hand)
    ours, images, label = ebf.wrap(flow), x.to(memory_format=layout) if x.dim() == 4 else x, label or name
    return {
        label: training_step(ours, objective(name, ours), images),
        f"plain {label}": training_step(hand, plain_loss(name, hand), images),
    }


def likelihood(settings: Settings) -> Iterator[Table]:
    """A training step of the paper's cnn by likelihood without determinants, and how it grows with the image."""
    shapes = [(3, side, side) for side in settings.choose(QUICK_SIDES, SIDES)]
    sizes = [prod(shape) for shape in shapes]
    steps = {
        f"{name} {size}": step
        for size, shape in zip(sizes, shapes, strict=True)
        for name, step in _steps(settings, shape).items()
    }
    exact = {f"ML {size}": steps.pop(f"ML {size}") for size in sizes}
    times = settings.time("growth with the image", steps, seconds=5.0, least=3)
    settings.progress("growth of exact likelihood", 0)
    times |= interleaved(exact, seconds=5.0, least=1, warmup=1, seed=settings.seed, device=settings.device)
    rows = []
    for name in OBJECTIVES:
        series = [times[f"{name} {size}"] for size in sizes]
        rows.append({"objective": name, **milliseconds(sizes, series), "time ~ D^p": exponent(sizes, series)})
    yield Table(
        "cnn",
        f"training step against D: the paper's cnn, batch {NEW_BATCH}",
        rows,
        "All sizes interleaved; exact ML, of which one step at D = 12,288 takes a minute and more, apart from them. "
        "Kernels of minus the identity with noise; the number of probes is chosen for each layer and step.",
    )


def _steps(settings: Settings, shape: tuple[int, ...]) -> dict[str, Callable[[], None]]:
    """Training steps of one model, away from its start; the new objective has chosen its probes."""
    x = settings.data(NEW_BATCH, *shape)
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
