"""``ebflow eval``, ``sample``, ``impute`` and ``density``: the commands on a run folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebflow_examples.cli.options import DataRoot, Device, Folder, Json, Picture, Seed, Weights
from ebflow_examples.console import say, say_json

if TYPE_CHECKING:  # torch is imported by the commands that need it
    from ebflow_examples.runs import Run


def evaluate(
    run: Folder,
    split: Annotated[str, typer.Option(help="test, validation or train.")] = "test",
    weights: Weights = "best",
    device: Device = "auto",
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Compute the exact NLL and bits/dim of a run, with standard errors over the rows.

    For data whose entropy is known (sine, swirl, checkerboard, textures) also that, and the gap of the NLL to it.

    **Examples**

    ```bash
    ebflow eval runs/swirl
    ebflow eval runs/swirl --weights last --split validation --json
    ```
    """
    from ebflow_examples.runs import Floor, Likelihood, nll_of_rows, open_run

    opened = open_run(run, weights, device, data_root)
    rows = opened.split(split)
    values = nll_of_rows(opened.model, rows, opened.config.seed, split)
    found = Likelihood.of(values, rows[0].numel())
    floor = Floor.of(opened.data.truth, rows, values)
    if as_json:
        known = {} if floor is None else asdict(floor)
        say_json({"run": str(run), "split": split, "weights": opened.facts, **found.to_dict(), **known})
        return
    say(f"{opened.config.data}, {found.rows:,} {split} rows; {opened.facts}")
    say(f"NLL       {found.nll:.4f} ± {found.nll_error:.4f} nats")
    say(f"bits/dim  {found.bits_per_dim:.4f} ± {found.bits_error:.4f}")
    if floor is not None:
        say(f"entropy   {floor.entropy:.4f} nats, the least that any model can have")
        say(f"gap       {floor.gap:.4f} ± {floor.gap_error:.4f} nats: log p of the truth less the model's, row by row")


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

    opened, path = _opened(run, weights, device, data_root, out, "samples.png")
    numbers = draw_samples(opened, count, path, temperature=temperature, seed=seed)
    say(f"{count} samples ({opened.facts}): {path} and {numbers}")
    left_out = unseen_features(opened)
    if left_out:
        say(left_out)


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

    opened, path = _opened(run, weights, device, data_root, out, "imputation.png")
    found = impute_rows(opened, count, mask, share=share, steps=steps, seed=seed)
    draw_imputation(opened, found, path)
    unit = "units of the data" if opened.data.levels is None else f"grey levels of {opened.data.levels}"
    say(f"root mean square error of the missing pixels, in {unit}:")
    say(f"  noise, the start of the chains     {found.start_error:.2f}")
    say(f"  the mean training image            {found.mean_error:.2f}")
    say(f"  the chains after {steps:,} steps{'':{max(1, 12 - len(f'{steps:,}'))}}{found.error:.2f}")
    say("A chain ends at one draw from what is possible, not at its mean, which would have a smaller error.")
    say(f"{len(found.truth)} images ({opened.facts}): {path}")


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

    opened, path = _opened(run, weights, device, data_root, out, "density.png")
    draw_density(opened, path, seed)
    say(f"density ({opened.facts}): {path}")


def _opened(
    run: Path, weights: str, device: str, data_root: str | None, out: Path | None, picture: str
) -> tuple[Run, Path]:
    """Reads a run folder, and says where its picture goes: into it, if nobody says otherwise."""
    from ebflow_examples.runs import open_run

    return open_run(run, weights, device, data_root), _png(out, run / picture)


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
