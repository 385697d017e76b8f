"""The results as text, Markdown, JSON and a picture."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from ebflow_examples.bench.results import Table
from ebflow_examples.bench.timing import Spread
from ebflow_examples.console import Grid, markdown

NOTES = (
    "Ratios are of medians, ours over the other; in brackets the 90 % bootstrap interval over the rounds. "
    "Below 1, ours is faster."
)


def as_text(table: Table) -> str:
    """A table for the terminal."""
    words = sum(isinstance(value, str) for value in table.rows[0].values())
    shown = Grid(f"{table.group}: {table.title}", *cells(table), words).screen()
    return f"{shown}\n{table.note}".rstrip()


def as_markdown(tables: Iterable[Table], about: dict[str, Any]) -> str:
    """All tables for a Markdown file."""
    parts = ["# Benchmark", f"{', '.join(f'{key} {value}' for key, value in about.items())}.", NOTES]
    for table in tables:
        parts += [f"## {table.group}: {table.title}", markdown(*cells(table)), *([table.note] if table.note else [])]
    return "\n\n".join(parts) + "\n"


def cells(table: Table) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of a table as text; columns without any value are left out."""
    keys = [key for key in table.rows[0] if any(row[key] is not None for row in table.rows)]
    return keys, [[cell(row[key]) for key in keys] for row in table.rows]


def cell(value: Any) -> str:
    """A cell as text.

    Example:
        >>> cell(Spread(0.784, 0.7612, 0.81)), cell(12.3456), cell(None)
        ('0.78 [0.76, 0.81]', '12.3', '')
    """
    if value is None:
        return ""
    if isinstance(value, Spread):
        return f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def machine(device: torch.device, threads: int) -> dict[str, Any]:
    """Where and when the numbers come from."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    return {
        "device": name,
        "cores": os.cpu_count(),
        "threads": threads,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "load at the start": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "date": datetime.now(UTC).date().isoformat(),
    }


def processor() -> str:
    """The name of the processor, as well as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def draw(table: Table, path: Path) -> None:
    """Draws step time against D, with its exponents over all sizes and over the last doubling."""
    from ebflow_examples import plots  # and with it matplotlib

    columns = [key for key in table.rows[0] if key.startswith("D = ")]
    sizes = [int(key.removeprefix("D = ").removesuffix(", ms")) for key in columns]
    with plots.figure(path, 7.0, 5.0) as figure:
        axes = figure.subplots()
        for row, marker in zip(table.rows, cycle("osD^v"), strict=False):
            fit, last = (row[f"exponent, {over}"].value for over in ("all sizes", "last doubling"))
            label = f"{row['objective']}: $D^{{{fit:.2f}}}$, last doubling $D^{{{last:.2f}}}$"
            style = "--" if row["objective"] in ("ML", "SML") else "-"
            axes.loglog(sizes, [row[key] for key in columns], style, marker=marker, label=label)
        axes.minorticks_off()
        axes.set_xticks(sizes, [str(size) for size in sizes])
        plots.plain_log(axes.yaxis)
        axes.set(xlabel="D", ylabel="milliseconds a training step", title=table.title)
        axes.grid(alpha=0.3)
        axes.legend(title=f"time ~ $D^p$ over D = {sizes[0]} … {sizes[-1]}")
