"""log_prob and samples of trained flows, against the libraries' own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ebflow_plugin as ebf
from ebflow_examples.bench.contenders import naive_fc, quiet
from ebflow_examples.bench.results import Settings, Table, compare
from ebflow_examples.models import build

__all__ = ["inference"]

POINTS = 10_000


def inference(settings: Settings) -> Iterator[Table]:
    """log_prob and sampling of 10,000 points, log Z and factorisations kept, as a ratio to the library's own."""
    dim: int = settings.choose(32, 784)
    x = settings.data(POINTS, dim)

    flows: dict[str, Any] = {
        "nflows, LULinear": build("fc", (dim,), linear="lu"),
        "nflows, FullLinear": build("fc", (dim,), init="orthogonal"),
        "nflows, NaiveLinear": naive_fc(dim),
        "normflows, LULinearPermute": build("fc", (dim,), library="normflows", linear="lu"),
        "normflows, FullLinear": build("fc", (dim,), library="normflows", init="orthogonal"),
    }
    rows = []
    for label, flow in flows.items():
        model = ebf.wrap(flow.to(x).eval())
        times = settings.time(
            f"log_prob, {label}", {"ours": quiet(model.log_prob, x), label: quiet(flow.log_prob, x)}, seconds=0.7
        )
        rows.append(compare("log_prob", times["ours"], times[label]))
        if "NaiveLinear" in label:  # its inverse calls torch.solve, which is gone
            continue
        times = settings.time(
            f"sample, {label}",
            {"ours": quiet(model.sample, POINTS), label: quiet(flow.sample, POINTS)},
            seconds=0.7,
        )
        rows.append(compare("sample", times["ours"], times[label]))
    yield Table(
        "inference",
        f"{POINTS:,} points, D = {dim}: two linear layers with a smooth leaky ReLU between them",
        rows,
        "Against the library's own log_prob and sample of the same flow. nflows 0.14 cannot sample a NaiveLinear on "
        "current torch.",
    )
