"""A training step of the paper's convolutional model, against plain torch, in two memory formats."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import ebflow_plugin as ebf
from ebflow_examples.architectures import CNN_KERNEL
from ebflow_examples.bench import plain
from ebflow_examples.bench.contenders import ALPHA, BATCH, objective, plain_loss, training_step
from ebflow_examples.bench.likelihood import likelihood
from ebflow_examples.bench.results import Settings, Table, compare
from ebflow_examples.models import build

__all__ = ["cnn"]

LAYOUTS = {"": torch.contiguous_format, " channels_last": torch.channels_last}


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
