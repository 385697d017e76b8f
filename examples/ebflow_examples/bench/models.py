"""A training step of the paper's models against plain torch; and of convolutions by likelihood without determinants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Generator

import ebflow_plugin as ebf
from ebflow_examples.architectures import CNN_KERNEL
from ebflow_examples.bench import plain
from ebflow_examples.bench.contenders import ALPHA, BATCH, DIM, objective, plain_loss, training_step
from ebflow_examples.bench.results import Settings, Table, compare, milliseconds
from ebflow_examples.bench.timing import exponent, interleaved
from ebflow_examples.models import build

TARGETS = {"SSM": 0.80, "DSM": 1.05, "FDSSM": 1.05}
LAYOUTS = {"": torch.contiguous_format, " channels_last": torch.channels_last}
# Of likelihood without determinants.
NEW = "ML stochastic"
OBJECTIVES = (NEW, "ML", "DSM", "SSM")
NEW_TARGETS = {"ML": 0.12, "DSM": 1.0}
NEW_BATCH = 50
QUICK_SIDES, SIDES = (8, 16), (16, 32, 64)
SPREAD = 0.1  # of the kernels' entries about minus the identity, over the root of the fan-in


def fc(settings: Settings) -> Iterator[Table]:
    """A training step of the paper's fc model, ours against plain torch, for each objective."""
    x, rows = settings.data(BATCH, DIM), []
    for name in ("SSM", "DSM", "FDSSM", "ML"):
        ours, by_hand = ebf.wrap(build("fc", (DIM,), alpha=ALPHA).to(x)), plain.FullyConnected(DIM, ALPHA).to(x)
        plain.copy_parameters(ours, by_hand)
        contenders = {
            name: training_step(ours, objective(name, ours), x),
            f"plain {name}": training_step(by_hand, plain_loss(name, by_hand), x),
        }
        times = settings.time(f"fc {name}", contenders, seconds=2.0)
        rows.append(compare(name, times[name], times[f"plain {name}"], TARGETS.get(name)))
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
            steps = {}
            for label, layout in LAYOUTS.items():
                images = x.to(memory_format=layout)
                flow = build("cnn", shape, alpha=ALPHA).to(x).to(memory_format=layout)
                by_hand = plain.Convolutional(shape[0], ALPHA, CNN_KERNEL).to(x).to(memory_format=layout)
                plain.copy_parameters(flow, by_hand)
                ours = ebf.wrap(flow)
                steps[name + label] = training_step(ours, objective(name, ours), images)
                steps[f"plain {name}{label}"] = training_step(by_hand, plain_loss(name, by_hand), images)
            times = settings.time(f"cnn {title} {name}", steps, seconds=2.0)
            last = times[f"{name} channels_last"]
            rows += [
                compare(name, times[name], times[f"plain {name}"]),
                compare(last.name, last, times[f"plain {name} channels_last"]),
                compare(last.name, last, times[f"plain {name}"]),
            ]
        yield Table(
            "cnn",
            f"training step of the paper's cnn on {title}, batch {BATCH}",
            rows,
            f"Six {CNN_KERNEL} x {CNN_KERNEL} convolutions. ML is left out: by hand it is a determinant of D x D for "
            "each.",
        )
    yield from likelihood(settings)


def likelihood(settings: Settings) -> Iterator[Table]:
    """A training step of the paper's cnn by likelihood without determinants; and how it grows with the image."""
    side = settings.choose(QUICK_SIDES[-1], 32)
    shape = (3, side, side)
    title = " x ".join(map(str, shape))
    times = settings.time(f"cnn {title} likelihood", _steps(settings, shape), seconds=5.0, least=3)
    yield Table(
        "cnn",
        f"training step by likelihood without determinants: the paper's cnn on {title}, batch {NEW_BATCH}",
        [compare(NEW, times[NEW], times[name], NEW_TARGETS.get(name)) for name in OBJECTIVES[1:]],
        "The targets are for 3 x 32 x 32. Kernels of minus the identity with noise; the number of probes is chosen "
        "for each layer and step.",
    )
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
        "All sizes interleaved; exact ML, of which one step at D = 12,288 takes a minute and more, apart from them.",
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
