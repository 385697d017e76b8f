"""Fig. 5: missing pixels by Langevin steps on an energy, beside the exact conditional of a Gaussian.

The model is the best of MNIST that there is in minutes: full layers that a Gaussianising start fits, without a gradient
step. The Gaussian is what its first layer alone is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ebflow_plugin as ebf
from ebflow_examples import plots
from ebflow_examples.config import TrainConfig
from ebflow_examples.console import Grid
from ebflow_examples.defaults import settle
from ebflow_examples.pictures import missing
from ebflow_examples.reproduce.common import Cell, CellResult, Options
from ebflow_examples.reproduce.output import Report
from ebflow_examples.runs import Run, build, likelihood, standard_error
from ebflow_examples.streams import stream
from ebflow_plugin.closed_form.moments import Moments

MINUTES = 10.0
LAYERS = 4
MASKS = {"left": "the left half", "random": "three quarters, at random"}
SHARES = {"left": 0.5, "random": 0.75}
SHOWN, CHAINS, DRAWS = 10, 16, 200
IMAGES, BURN_IN, STEPS = 10, 100, 100
# What the missing pixels are taken to be, in the order of the table.
GUESSES = {
    "mean": "the mean training image",
    "gaussian": "Gaussian, exact conditional mean",
    "gaussian_draw": "Gaussian, one draw",
    "chains": f"the model, mean of {CHAINS} chains",
    "draw": "the model, one chain",
}
# The rows of the picture.
LABELS = {
    "truth": "image",
    "observed": "observed",
    "gaussian": "Gaussian: exact\nconditional mean",
    "chains": f"the model: mean\nof {CHAINS} chains",
    "draw": "the model:\none chain",
}


def cells(options: Options) -> list[Cell]:
    """One: a picture needs one seed."""
    settings = {"data": options.data, "model": "deep", "layers": LAYERS, "seed": 0, "quick": options.quick}
    return [Cell("fig5", "deep-seed0", settings, timed=False)]


def compute(cell: Cell, folder: Path, data_root: str | None) -> dict[str, Any]:
    """Starts the model in closed form, and fills in the missing pixels of test images."""
    settings, quick = cell.settings, cell.settings["quick"]
    told = {name: settings[name] for name in ("data", "model", "layers", "seed")}
    run = settle(build(TrainConfig(data_root=data_root, device="cpu", gaussianize=True, **told)))
    found: dict[str, Any] = {"nll": likelihood(run.model, run.data.test[: 50 if quick else 2000], 0).nll}
    gaussian = Gaussian.of(run.model, run.split("train"), run.generator(0, "gaussian"))
    truth = run.split("test")[: 4 if quick else IMAGES]
    for kind in MASKS:
        mask = _mask(run, kind, len(truth))
        guesses = _guesses(run, gaussian, truth, mask, 10 if quick else BURN_IN, 10 if quick else STEPS)
        for name, guess in guesses.items():
            errors = (guess - truth).where(mask, 0.0).square().sum(1) / mask.sum(1)
            error = float(errors.mean().sqrt())
            found[f"{kind}_{name}"] = [error, 0.5 * standard_error(errors) / error]
        shown = {"truth": truth, "observed": truth.float().masked_fill(mask, 0.4 * (run.data.levels or 256)), **guesses}
        pictures = torch.stack([run.as_images(shown[name][:SHOWN].float()) for name in LABELS])
        np.save(folder / f"{cell.name}-{kind}.npy", pictures.numpy())
    return found


@dataclass(frozen=True)
class Gaussian:
    """The density that the whitening start of a fully-connected flow has.

    Attributes:
        mean: With shape ``(D,)``, in double precision.
        covariance: With shape ``(D, D)``.
    """

    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, model: ebf.EBFlow, rows: Tensor, generator: torch.Generator | None = None) -> Gaussian:
        """Fits the matched variable of rows of the data, flattened; by maximum likelihood."""
        moments = Moments()
        for part in rows.split(1000):
            moments.add(model.preprocess(part, generator)[0].flatten(1))
        return cls(moments.mean, moments.covariance(unbiased=False))

    def conditional(self, u: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
        r"""Mean and covariance of the missing entries given the others.

        .. math::
            m_M + C_{MO} C_{OO}^{-1} (u_O - m_O), \qquad C_{MM} - C_{MO} C_{OO}^{-1} C_{OM}

        Arguments:
            u: Rows with shape ``(B, D)``; their missing entries are not looked at.
            missing: True where an entry is missing, for all rows, with shape ``(D,)``.

        Returns:
            Means with shape ``(B, M)`` and one covariance with shape ``(M, M)``.

        Example:
            >>> pair = Gaussian(torch.zeros(2), torch.tensor([[4.0, 1.0], [1.0, 1.0]]))
            >>> pair.conditional(torch.tensor([[0.0, 2.0]]), torch.tensor([True, False]))
            (tensor([[2.]]), tensor([[3.]]))
        """
        seen = ~missing
        cross = self.covariance[missing][:, seen]
        gain = torch.linalg.solve(self.covariance[seen][:, seen], cross.mT).mT
        centre = self.mean[missing] + (u[:, seen].to(self.mean) - self.mean[seen]) @ gain.mT
        return centre, self.covariance[missing][:, missing] - gain @ cross.mT

    def draw(self, u: Tensor, missing: Tensor, generator: torch.Generator) -> Tensor:
        """Rows with their missing entries drawn from the conditional, with shape ``(B, D)``."""
        centre, spread = self.conditional(u, missing)
        factor = torch.linalg.cholesky(0.5 * (spread + spread.mT))
        noise = torch.randn(centre.shape, generator=generator, dtype=factor.dtype)
        filled = u.clone()
        filled[:, missing] = (centre + noise @ factor.mT).to(u)
        return filled


def _mask(run: Run, kind: str, count: int) -> Tensor:
    """True where pixels are missing; flat, the same for all images."""
    assert run.image_shape is not None
    mask = missing(kind, run.image_shape, 1, SHARES[kind], stream(0, "masks"))
    return mask.flatten(1).expand(count, -1).to(run.device)


def _guesses(run: Run, gaussian: Gaussian, truth: Tensor, mask: Tensor, burn_in: int, steps: int) -> dict[str, Tensor]:
    """What the missing pixels are taken to be, as rows of the data.

    Chains begin at exact draws from the Gaussian. Each of them, and each draw, has its own dequantisation of the
    observed pixels.
    """
    model = run.model
    u, _ = model.preprocess(truth.repeat_interleave(DRAWS, 0), run.generator(0, "observed"))
    drawn = gaussian.draw(u, mask[0], run.generator(0, "exact"))
    levels = model.to_data(drawn).unflatten(0, (len(truth), DRAWS)).float()
    starts = levels[:, :CHAINS].flatten(0, 1).to(truth)
    rows, hidden = truth.repeat_interleave(CHAINS, 0), mask.repeat_interleave(CHAINS, 0)
    filled = ebf.impute(
        model, rows, hidden, init=starts, burn_in=burn_in, steps=steps, step_size=0.1,
        covariance=gaussian.covariance, generator=run.generator(0, "chains"),
    ).unflatten(0, (len(truth), CHAINS))[:, :, 0].float()  # fmt: skip
    return {
        "mean": run.split("train").float().mean(0).expand_as(truth),
        "gaussian": levels.mean(1),
        "gaussian_draw": levels[:, 0],
        "chains": filled.mean(1),
        "draw": filled[:, 0],
    }


def report(options: Options, found: Sequence[CellResult], path: Path) -> Report:
    """The errors of the missing pixels, and the pictures."""
    (each,) = found
    with plots.figure(path, 13.0, 3.7) as figure:
        for place, (kind, words) in enumerate(MASKS.items(), start=1):
            pictures = torch.from_numpy(np.load(options.folder / f"{each.cell.name}-{kind}.npy"))
            axes = figure.add_subplot(1, len(MASKS), place)
            plots.images(axes, pictures.flatten(0, 1), pictures.shape[1], f"missing: {words}")
            for row, label in enumerate(LABELS.values() if place == 1 else ()):
                height = pictures.shape[-2] + plots.GAP
                axes.text(-5, (row + 0.5) * height, label, ha="right", va="center", fontsize=8)
    lines = [
        [words, *("{:.1f} ± {:.1f}".format(*each[f"{kind}_{name}"]) for kind in MASKS)]
        for name, words in GUESSES.items()
    ]
    rows = [{"guess": name, **{kind: each[f"{kind}_{name}"] for kind in MASKS}} for name in GUESSES]
    notes = [
        f"{each['layers']} full layers, Gaussianised; NLL {each['nll']:.1f}. {IMAGES} test images, root mean square "
        "error of the missing pixels and its standard error over images. Rows of the picture: the image, what is "
        f"observed, the exact conditional mean of the Gaussian of the whitening start (the mean of {DRAWS} exact "
        f"draws), the mean of {CHAINS} chains, and one of them. Chains begin at such draws and take {BURN_IN + STEPS} "
        "adjusted steps in the units of the Gaussian's conditional covariance. A draw has a larger error than the mean "
        "of all that is possible: twice the variance, if the model were true. The paper shows faces and gives no "
        "numbers.",
    ]
    head = ("the missing pixels are", *MASKS.values())
    grid = Grid(f"deep on {options.data}: root mean square error in grey levels", head, lines)
    return Report([grid], rows, notes, [path])
