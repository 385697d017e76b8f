"""``ebflow profile``, ``bench`` and ``reproduce``: the commands that measure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ebflow_examples.bench import GROUPS
from ebflow_examples.cli.options import Data, DataRoot, Device, Header, Json, Linear, Seed, Shape, Target
from ebflow_examples.console import say, say_json
from ebflow_examples.reproduce import WHATS


def profile(
    target: Target,
    data: Data = None,
    header: Header = None,
    shape: Shape = None,
    context: Annotated[
        str | None,
        typer.Option(help="Shape of the context of one data point.", show_default="none, or as an sbi estimator tells"),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows in a batch.")] = 100,
    seconds: Annotated[float, typer.Option(help="How long to time, about.")] = 20.0,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Each objective also as one graph; compiling takes minutes.")
    ] = False,
    linear: Linear = "full",
    device: Device = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="as torch chooses")] = None,
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Measure a training step with every objective on a model: milliseconds, peak memory, and which to use.

    Beside them the library's own likelihood. They take turns in one run, so that they compare on a busy machine too.

    **Examples**

    ```bash
    ebflow profile my_package.models:make_flow --batch-size 256
    ebflow profile my_package.models:make_flow --compile
    ebflow profile fc --shape 3072
    ebflow profile glow --data swirl --json
    ```
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch comes in: its profiler is talkative
    from ebflow_examples.profiler import measure
    from ebflow_examples.targets import find_target, parse_shape

    found = measure(
        find_target(
            target,
            data=data,
            shape=parse_shape(shape),
            linear=linear,
            data_root=data_root,
            header=header,
            context=parse_shape(context, "--context"),
        ),
        batch_size=batch_size,
        seconds=seconds,
        device=device,
        threads=threads,
        compiled=compiled,
    )
    if as_json:
        say_json(found.to_dict())
    else:
        say(str(found))


def bench(
    only: Annotated[
        list[str] | None, typer.Argument(help=f"Groups: {', '.join(GROUPS)}.", show_default="all of them")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="About a minute, with smaller sizes.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the tables and the picture.")] = Path("runs/bench"),
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    device: Annotated[str, typer.Option(help="Where to measure.")] = "cpu",
    seed: Seed = 0,
) -> None:
    """Measure this project: ours against plain torch and against the libraries, each ratio from one run.

    **Examples**

    ```bash
    ebflow bench --quick
    ebflow bench fc growth --out runs/fc
    ```
    """
    from ebflow_examples import bench

    bench.main(quick=quick, only=only or (), out=out, threads=threads, device=device, seed=seed)


def reproduce(
    what: Annotated[str, typer.Argument(help=f"One of {', '.join(WHATS)}.", show_default=False)],
    budget: Annotated[float | None, typer.Option(help="Minutes for each.", show_default="2 to 90")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Seconds of CPU for each cell.", show_default="by budget")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds.", show_default="3")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes side by side, one thread each.")] = 1,
    data: Annotated[str, typer.Option(help="Images: mnist, cifar10-jpeg, or digits as a small stand-in.")] = "mnist",
    margin: Annotated[
        float | None, typer.Option(help="Pixels are kept so far from 0 and 1.", show_default="1e-6")
    ] = None,
    data_root: DataRoot = None,
    only: Annotated[list[str] | None, typer.Option(help="Only cells with this word: ours, fc, dsm, seed0, …")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/reproduce"),
    quick: Annotated[bool, typer.Option("--quick", help="A moment for each cell: shows that all of it works.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Compute again what is there.")] = False,
    kept: Annotated[bool, typer.Option("--kept", help="Show what is there, and compute nothing.")] = False,
) -> None:
    """Reproduce a table or a figure of the paper, beside its own numbers: a table, JSON, a picture and Markdown.

    What was computed is kept: a run that was stopped goes on. `report` puts RESULTS.md together.

    **Examples**

    ```bash
    ebflow reproduce table1 --jobs 2
    ebflow reproduce table2 --data-root ~/data --budget 60 --only fc
    ebflow reproduce all --data digits --quick
    ```
    """
    from ebflow_examples import reproduce

    reproduce.main(
        what, budget=budget, seeds=seeds, jobs=jobs, data=data, data_root=data_root, only=tuple(only or ()), out=out,
        quick=quick, fresh=fresh, seconds=seconds, margin=margin, kept=kept,
    )  # fmt: skip
