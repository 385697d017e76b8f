"""The commands of ``ebflow``. They read what was typed, and call functions that are imported when they are needed."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from ebflow_examples.bench import GROUPS
from ebflow_examples.config import CHOICES, option_types
from ebflow_examples.console import REFUSED, Commands, say, say_json
from ebflow_examples.reproduce import WHATS

__all__ = ["app"]

START, RUNS, MEASURE = "Start here", "On a run folder", "Measure"

app = typer.Typer(
    name="ebflow",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 fine, 1 a run that failed, 2 bad input, 130 stopped by Ctrl-C.",
)

Target = Annotated[
    str,
    typer.Argument(
        help="package.module:name or file.py:name, an object or a function without arguments; or a built-in model: "
        "fc, cnn, glow, realnvp, maf, nsf.",
        show_default=False,
    ),
]
Folder = Annotated[Path, typer.Argument(help="Folder of a run, as `ebflow train --out` wrote it.", show_default=False)]
Weights = Annotated[str, typer.Option(help="best (by NLL), last, or average (the last moving average).")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, or auto.")]
Seed = Annotated[int, typer.Option(help="Where all randomness comes from.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Picture = Annotated[Path | None, typer.Option(help="Where the picture goes.", show_default="in the run folder")]
DataRoot = Annotated[str | None, typer.Option(help="Folder that holds MNIST and other data sets.")]
Data = Annotated[
    str | None, typer.Option(help="Data set or file; a built-in model is built for it.", show_default=False)
]
Shape = Annotated[
    str | None,
    typer.Option(help="Shape of one data point: 784, or 1,28,28.", show_default="as the model tells, or MNIST's"),
]
Library = Annotated[str, typer.Option(help="Library of a built-in model: nflows, normflows or zuko.")]
Linear = Annotated[str, typer.Option(help="Linear layers of a built-in model: full, lu, lower, upper, qr or svd.")]


def _version(wanted: bool) -> None:
    if wanted:
        say(f"ebflow {version('ebflow-plugin')}")
        raise typer.Exit


@app.callback()
def main(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Train normalizing flows by energy instead of likelihood.

    Wraps the flows of nflows, normflows and zuko, skips the determinants of their linear layers, and trains them by
    score matching. Begin with **ebflow demo**.
    """


@app.command(rich_help_panel=START)
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture and the numbers.")] = Path("runs/demo"),
    seed: Seed = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds: shows that all of it works.")] = False,
) -> None:
    """See it at work in about a minute: two models, two data sets, score matching beside maximum likelihood.

    Wraps an nflows model, shows its steps, trains it with a live display, and leaves one picture with densities,
    samples and NLL curves.

    **Examples**

    ```bash
    ebflow demo
    ebflow demo --out runs/tour --seed 1
    ```
    """
    from ebflow_examples.demo import run_demo

    run_demo(out, seed, quick)


@app.command("inspect", rich_help_panel=START)
def inspect_target(
    target: Target,
    data: Data = None,
    shape: Shape = None,
    library: Library = "nflows",
    linear: Linear = "full",
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Show what wrapping a flow finds: its steps, which are linear, and what training by energy skips.

    Exit code 2 if a step cannot be part of an energy; the table says why.

    **Examples**

    ```bash
    ebflow inspect my_package.models:make_flow
    ebflow inspect model.py:flow --json
    ebflow inspect glow --data swirl --library normflows
    ```
    """
    from ebflow_examples.targets import find_target, parse_shape

    report = find_target(
        target, data=data, shape=parse_shape(shape), library=library, linear=linear, data_root=data_root
    ).report()
    if as_json:
        say_json(
            {"steps": report.to_dicts(), "base": report.base, "adapter": report.adapter, "summary": report.summary}
        )
    else:
        say(str(report))
    if report.count("refused"):
        raise typer.Exit(REFUSED)


def train(
    config: Annotated[
        Path | None, typer.Option(help="TOML file with the settings below; flags override it.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Run folder.", show_default="runs/DATA-MODEL-LOSS, as far as given"),
    ] = None,
    resume: Annotated[
        bool | None,
        typer.Option("--resume/--fresh", help="Go on with the run in --out, or replace it.", show_default=False),
    ] = None,
    as_json: Json = False,
    **flags: Any,
) -> None:
    """Train a model: exact NLL beside the loss, checkpoints, the best weights by NLL.

    Without flags: scikit-learn's digits, the paper's fully-connected model, about a minute. Score matching: --loss dsm.
    Data: sine, swirl, checkerboard, autoregressive10, digits, mnist, kmnist, cifar10, cifar10-jpeg, or a file or folder
    of yours. Models: fc, cnn, glow, realnvp, maf, nsf. The settings go into the folder as config.toml.

    **Examples**

    ```bash
    ebflow train
    ebflow train --data swirl --loss ssm --out runs/swirl
    ebflow train --data mnist --data-root ~/data --epochs 5
    ebflow train --out runs/swirl --resume --steps 5000
    ebflow train --config runs/swirl/config.toml --seed 1
    torchrun --nproc-per-node 4 -m ebflow_examples train --data mnist --out runs/mnist
    ```
    """
    from ebflow_examples.training import configuration, first_process, free_folder, report, train

    given = {name: value for name, value in flags.items() if value is not None}
    settings = configuration(given, config, out, resume)
    folder = free_folder(settings) if out is None else out
    summary = train(settings, folder, resume=bool(resume))
    if not first_process():
        return
    if as_json:
        say_json({"out": str(folder), **summary})
    else:
        say(report(summary, folder))


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command one flag for each field of the configuration, in the place of its ``**flags``."""
    signature = inspect.signature(command, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    flags = []
    for name, (kind, each) in option_types().items():
        text = each.metadata["help"]
        if name in CHOICES:
            text += f" One of {', '.join(CHOICES[name])}."
        default = each.default
        shown = each.metadata["auto"] if default is None else str(default)
        spelled = name.replace("_", "-")
        names = [f"--{spelled}/--no-{spelled}"] if kind is bool else [f"--{spelled}"]
        if kind is bool and default is not None:
            shown = names[0].split("/")[not default].removeprefix("--")
        option = typer.Option(*names, help=text, show_default=shown, rich_help_panel=each.metadata["panel"])
        annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
        flags.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own] + flags
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


app.command("train", rich_help_panel=START)(_with_settings(train))


@app.command("eval", rich_help_panel=RUNS)
def evaluate(
    run: Folder,
    split: Annotated[str, typer.Option(help="test, validation or train.")] = "test",
    weights: Weights = "best",
    device: Device = "auto",
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Compute the exact NLL and bits/dim of a run, with standard errors over the rows.

    **Examples**

    ```bash
    ebflow eval runs/swirl
    ebflow eval runs/swirl --weights last --split validation --json
    ```
    """
    from ebflow_examples.runs import likelihood, open_run

    opened = open_run(run, weights, device, data_root)
    found = likelihood(opened.model, opened.split(split), opened.config.seed, split)
    if as_json:
        say_json({"run": str(run), "split": split, "weights": opened.facts, **found.to_dict()})
        return
    say(f"{opened.config.data}, {found.rows:,} {split} rows; {opened.facts}")
    say(f"NLL       {found.nll:.4f} ± {found.nll_error:.4f} nats")
    say(f"bits/dim  {found.bits_per_dim:.4f} ± {found.bits_error:.4f}")


@app.command(rich_help_panel=RUNS)
def sample(
    run: Folder,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many.")] = 64,
    temperature: Annotated[float, typer.Option(help="Below 1: samples that are more likely, and less varied.")] = 1.0,
    seed: Seed = 0,
    weights: Weights = "best",
    out: Picture = None,
    device: Device = "auto",
    data_root: DataRoot = None,
) -> None:
    """Draw samples by the inverse of the flow: a grid of images or points of the plane, and the numbers as .npy.

    **Examples**

    ```bash
    ebflow sample runs/digits-dsm
    ebflow sample runs/swirl -n 5000 --out swirl.png
    ```
    """
    from ebflow_examples.pictures import draw_samples, unseen_features
    from ebflow_examples.runs import open_run

    opened = open_run(run, weights, device, data_root)
    path = _png(out, run / "samples.png")
    numbers = draw_samples(opened, count, path, temperature=temperature, seed=seed)
    say(f"{count} samples ({opened.facts}): {path} and {numbers}")
    left_out = unseen_features(opened)
    if left_out:
        say(left_out)


@app.command(rich_help_panel=RUNS)
def impute(
    run: Folder,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many test images.")] = 6,
    mask: Annotated[str, typer.Option(help="What is missing: left, right, top, bottom or random.")] = "left",
    share: Annotated[float, typer.Option(help="Share of the pixels that is missing.")] = 0.5,
    steps: Annotated[int, typer.Option(min=1, help="Langevin steps.")] = 1000,
    seed: Seed = 0,
    weights: Weights = "best",
    out: Picture = None,
    device: Device = "auto",
    data_root: DataRoot = None,
) -> None:
    """Fill in missing pixels by Langevin steps on the energy, from noise: no determinant, no inverse, no training.

    **Examples**

    ```bash
    ebflow impute runs/digits-dsm
    ebflow impute runs/digits-dsm --mask random --share 0.7 --steps 3000
    ```
    """
    from ebflow_examples.pictures import draw_imputation, impute_rows
    from ebflow_examples.runs import open_run

    opened = open_run(run, weights, device, data_root)
    path = _png(out, run / "imputation.png")
    found = impute_rows(opened, count, mask, share=share, steps=steps, seed=seed)
    draw_imputation(opened, found, path)
    say(f"root mean square error of the missing pixels, in grey levels of {opened.data.levels}:")
    say(f"  noise, the start of the chains     {found.start_error:.2f}")
    say(f"  the mean training image            {found.mean_error:.2f}")
    say(f"  the chains after {steps:,} steps{'':{max(1, 12 - len(f'{steps:,}'))}}{found.error:.2f}")
    say("A chain ends at one draw from what is possible, not at its mean, which would have a smaller error.")
    say(f"{len(found.truth)} images ({opened.facts}): {path}")


@app.command(rich_help_panel=RUNS)
def density(
    run: Folder,
    seed: Seed = 0,
    weights: Weights = "best",
    out: Picture = None,
    device: Device = "auto",
    data_root: DataRoot = None,
) -> None:
    """Draw the density of a two-dimensional run beside the true one, and samples.

    **Examples**

    ```bash
    ebflow train --data checkerboard --loss ssm --out runs/board
    ebflow density runs/board
    ```
    """
    from ebflow_examples.pictures import draw_density
    from ebflow_examples.runs import open_run

    opened = open_run(run, weights, device, data_root)
    path = _png(out, run / "density.png")
    draw_density(opened, path, seed)
    say(f"density ({opened.facts}): {path}")


@app.command(rich_help_panel=MEASURE)
def profile(
    target: Target,
    data: Data = None,
    shape: Shape = None,
    context: Annotated[
        str | None,
        typer.Option(help="Shape of the context of one data point.", show_default="none, or as an sbi estimator tells"),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows in a batch.")] = 100,
    seconds: Annotated[float, typer.Option(help="How long to time, about.")] = 20.0,
    library: Library = "nflows",
    linear: Linear = "full",
    device: Device = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="as torch chooses")] = None,
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Measure a training step with every objective on a model: milliseconds, peak memory, and which to use.

    The objectives take turns in one run, so that they compare on a busy machine too.

    **Examples**

    ```bash
    ebflow profile my_package.models:make_flow --batch-size 256
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
            library=library,
            linear=linear,
            data_root=data_root,
            context=parse_shape(context, "--context"),
        ),
        batch_size=batch_size,
        seconds=seconds,
        device=device,
        threads=threads,
    )
    if as_json:
        say_json(found.to_dict())
    else:
        say(str(found))


@app.command(rich_help_panel=MEASURE)
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

    raise typer.Exit(bench.main(quick=quick, only=only or (), out=out, threads=threads, device=device, seed=seed))


@app.command(rich_help_panel=MEASURE)
def reproduce(
    what: Annotated[str, typer.Argument(help=f"One of {', '.join(WHATS)}.", show_default=False)],
    budget: Annotated[float | None, typer.Option(help="Minutes for each.", show_default="2 to 90")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds.", show_default="3")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes side by side, one thread each.")] = 1,
    data: Annotated[str, typer.Option(help="Images: mnist, or digits as a small stand-in.")] = "mnist",
    data_root: DataRoot = None,
    only: Annotated[list[str] | None, typer.Option(help="Only cells with this word: ours, fc, dsm, seed0, …")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/reproduce"),
    quick: Annotated[bool, typer.Option("--quick", help="A moment for each cell: shows that all of it works.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Compute again what is there.")] = False,
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
        quick=quick, fresh=fresh,
    )  # fmt: skip


def _png(out: Path | None, default: Path) -> Path:
    """Where a picture goes; a folder gets the usual name."""
    if out is None:
        return default
    if out.is_dir():
        return out / default.name
    if out.suffix not in ("", ".png", ".pdf", ".svg", ".jpg"):
        from ebflow_plugin.errors import InputError

        raise InputError(f"a picture is a .png, .pdf, .svg or .jpg file, not {out.name}")
    return out if out.suffix else out.with_suffix(".png")
