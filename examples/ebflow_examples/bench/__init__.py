"""``ebflow bench``: ours against plain torch and against the libraries, interleaved.

A command line calls::

    from ebflow_examples import bench
    bench.GROUPS                                  # group -> one line, for --list and --help
    bench.main(quick=True, only=["fc"], out=Path("runs/bench"), threads=1, device="cpu", seed=0)

It prints a table after each group, shows progress on the standard error, and writes ``bench.json``, ``bench.md`` and,
if the group ``growth`` is among them, ``growth.png`` into ``out``. Importing this package imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from ebflow_examples.console import note, say, to_json

__all__ = ["GROUPS", "group", "main"]

GROUPS = {
    "fc": "a training step of the paper's fc model against plain torch",
    "cnn": "the same for the paper's cnn, contiguous and channels_last",
    "wrapper": "energy() and log_prob() against a loop over the same modules",
    "growth": "step time against D",
    "launches": "how many kernels a training step launches, ours and by hand",
    "flows": "the flows that people have: the library's own likelihood, ours, and ours compiled",
}


def group(name: str) -> Callable[[Any], Iterator[Any]]:
    """What measures a group: a function of its name."""
    module = "models" if name in ("fc", "cnn") else name
    measure: Callable[[Any], Iterator[Any]] = getattr(import_module(f"ebflow_examples.bench.{module}"), name)
    return measure


def main(
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    out: Path = Path("runs/bench"),
    threads: int = 1,
    device: str = "cpu",
    seed: int = 0,
) -> None:
    """Runs the benchmark.

    Arguments:
        quick: About a minute for all groups, with smaller sizes; else up to twelve minutes.
        only: Groups to run; all by default.
        out: The folder for ``bench.json``, ``bench.md`` and ``growth.png``.
        threads: How many threads torch uses.
        device: Where to measure.
        seed: Decides data, weights, noise, and the order of the contenders.

    Raises:
        UnknownNameError: For a group that does not exist.
        InputError: For a device that is not there, or less than one thread.
    """
    import torch

    from ebflow_examples.bench import report
    from ebflow_examples.bench.results import Settings, Table
    from ebflow_examples.folders import writable
    from ebflow_examples.runs import choose_device
    from ebflow_examples.streams import drawing_from
    from ebflow_plugin.errors import UnknownNameError, suggest
    from ebflow_plugin.options import integer

    for name in only:
        if name not in GROUPS:
            raise UnknownNameError(f"unknown group {name!r}. {suggest(name, GROUPS)}")
    integer("threads", threads)
    where = choose_device(device)
    writable(out)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    about = report.machine(where, threads)
    tables: list[Table] = []
    try:
        with drawing_from(seed, "bench"), _progress() as show:
            settings = Settings(quick=quick, seed=seed, device=where, progress=show)
            for name in dict.fromkeys(only) or GROUPS:
                for table in group(name)(settings):
                    tables.append(table)
                    say(report.as_text(table) + "\n")
    finally:
        torch.set_num_threads(before)
    say(report.NOTES)
    options = {"quick": quick, "only": list(only), "threads": threads, "device": device, "seed": seed}
    content = {"machine": about, "options": options, "tables": tables}
    (out / "bench.json").write_text(f"{to_json(content)}\n")
    (out / "bench.md").write_text(report.as_markdown(tables, about))
    written = ["bench.json", "bench.md"]
    for table in tables:
        if "exponent, all sizes" in table.rows[0]:
            report.draw(table, out / "growth.png")
            written.append("growth.png")
    note(f"written: {', '.join(str(out / name) for name in written)}", "bold green")


@contextmanager
def _progress() -> Iterator[Any]:
    """A line on the standard error that says what is being measured."""
    from rich.console import Console

    with Console(stderr=True).status("bench") as status:
        yield lambda what, rounds: status.update(f"{what}: {f'{rounds} rounds' if rounds else 'warming up'}")
