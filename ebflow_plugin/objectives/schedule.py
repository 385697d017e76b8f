r"""Noise added to the matched variable: constant, or shrinking while a model trains.

Score matching looks at the score where there are points, and nowhere else. With little noise the model's mass can leave
through thin jets to where there are no data, while the loss falls. Wide noise closes these ways, and noise that shrinks
ends with the density that was wanted:

.. math:: \sigma_t = \sigma_\text{start} \left(\frac{\sigma_\text{end}}{\sigma_\text{start}}\right)^{\min(1,\, t/T)}

The *t*-th loss that is differentiated in training mode has :math:`\sigma_t`, from t = 0 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from ebflow_plugin.closed_form.moments import Moments
from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg.memo import transformed
from ebflow_plugin.linalg.random import gaussian_like
from ebflow_plugin.options import integer, positive

START = 0.5  # of the standard deviation of the data


@dataclass(frozen=True, kw_only=True)
class NoiseSchedule:
    r"""Noise that shrinks geometrically over the first steps of a run, and then stays: the ``sigma`` of an objective.

    The step is the objective's own count of the losses that it computed in training mode with gradients enabled (under
    gradient accumulation, those of each part). It is a part of ``objective.state()``, so that an own loop,
    :func:`~ebflow_plugin.fit`, Lightning and a resumed run follow the same schedule. In eval mode σ is ``end``, so that
    the losses of validation data can be compared.

    Two fifths of a run, at least, should be left for the last σ. ActNorms start from the data without this noise, as
    ever: with the default start it would change their scales by no more than an eighth.

    Arguments:
        end: The last σ, in the units of the matched variable. The model learns the density of data with this noise.
        steps: The number of steps until then.
        start: The first σ, at least ``end``. By default half of the standard deviation of the matched variable (the
            root mean square over its entries), found on the first batch: of all processes, in a distributed run.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> schedule = NoiseSchedule(start=1.0, end=0.25, steps=2)
        >>> [schedule.sigma(step) for step in range(4)]
        [1.0, 0.5, 0.25, 0.25]
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> objective = ebf.objectives.DSM(model, sigma=schedule)
        >>> objective(torch.randn(5, 2)).backward()
        >>> objective.state()
        {'noise_step': 1, 'noise_start': 1.0}
    """

    end: float
    steps: int
    start: float | None = None

    def __post_init__(self) -> None:
        positive("end", self.end)
        integer("steps", self.steps)
        if self.start is not None and positive("start", self.start) < self.end:
            raise InputError(f"noise shrinks: start must be at least end={self.end!r}, got {self.start!r}")

    def sigma(self, step: int, start: Any = None) -> Any:
        """The σ of a step, counted from 0; ``start``, a number or a tensor, is the one that was found in the data."""
        first = self.start if start is None else start
        if first is None:
            raise InputError("the start of this schedule is found in data; pass start=")
        return first * (self.end / first) ** min(1.0, step / self.steps)


class AddedNoise:
    """The noise of one objective, and its place in the schedule.

    Arguments:
        option: σ, or a schedule of it.

    Attributes:
        sigma: The σ of the current loss. A tensor under a schedule, so that a compiled loss does not depend on its
            value.
    """

    sigma: Tensor | float
    start: Tensor | float | None

    def __init__(self, option: float | NoiseSchedule) -> None:
        self.option: float | NoiseSchedule
        self.step, self.start = 0, None
        if isinstance(option, NoiseSchedule):
            self.option, self.start, self.sigma = option, option.start, option.end
        else:
            self.option = self.sigma = positive("sigma", option)

    @property
    def growth(self) -> Tensor | float:
        """σ over its last value: what other lengths grow by."""
        return self.sigma / self.option.end if isinstance(self.option, NoiseSchedule) else 1.0

    def begin(self, u: Tensor, training: bool) -> None:
        """Chooses σ for a loss of a batch, and counts it if it may be differentiated. Not a part of a compiled loss."""
        if not isinstance(self.option, NoiseSchedule):
            return
        sigma: Tensor | float = self.option.end
        if training:
            if self.start is None:
                self.start = _start(u, self.option.end)
            elif isinstance(self.start, Tensor):
                self.start = self.start.to(u.device)
            sigma = self.option.sigma(self.step, self.start)
            self.step += torch.is_grad_enabled()
        if isinstance(sigma, Tensor):
            self.sigma = sigma.to(u.dtype)
        else:  # full() passes the number to the device without waiting for it
            self.sigma = torch.full((), sigma, dtype=u.dtype, device=u.device)

    def add(self, u: Tensor, generator: Generator | None) -> Tensor:
        """The batch with noise of the current σ."""
        return u + self.sigma * gaussian_like(u, generator)

    def metrics(self) -> dict[str, Any]:
        """The σ of a schedule; empty for a constant one."""
        return {"sigma": float(self.sigma)} if isinstance(self.option, NoiseSchedule) else {}

    def state(self) -> dict[str, Any]:
        """The place in a schedule; empty for a constant σ."""
        if not isinstance(self.option, NoiseSchedule):
            return {}
        return {"noise_step": self.step, "noise_start": None if self.start is None else float(self.start)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        if isinstance(self.option, NoiseSchedule):
            self.step, found = int(state.get("noise_step", 0)), state.get("noise_start")
            if self.option.start is None:  # a tensor, as it was found: the arithmetic stays the same
                self.start = None if found is None else torch.tensor(found, dtype=torch.float64, device="cpu")

    def __repr__(self) -> str:
        return f"sigma={self.option}"


def _start(u: Tensor, end: float) -> Tensor:
    """Half of the standard deviation of a batch, of all processes; at least the last σ."""
    if transformed():
        raise InputError(
            "the start of a NoiseSchedule is found in the first batch, which cannot be read inside a transform of "
            "torch.func or torch.compile; pass NoiseSchedule(start=…)"
        )
    moments = Moments(diagonal=True)
    moments.add(u.flatten(1))
    moments.reduce()
    if moments.count < 2:
        raise InputError(
            "the start of a NoiseSchedule is found in the first batch, which has one row and so no standard "
            "deviation; pass NoiseSchedule(start=…)"
        )
    return (START * moments.covariance().mean().sqrt()).clamp(min=end)
