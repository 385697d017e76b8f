r"""Fixed preprocessing in front of a flow, and where the matched variable begins (MaP).

Logit and similar steps have derivatives that explode at the edges of their domain. Score matching of the variable
*after* them, :math:`x_k = g_k \circ \dots \circ g_1(x)` with :math:`g_k` the last such step, trains well where score
matching of x does not (Section 4.2 and Table 3 of the paper). The density of x is the same either way: ``log_prob``
includes the log-dets of the preprocessing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log, pi, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ebflow_plugin.errors import InputError, UnknownNameError, suggest
from ebflow_plugin.linalg.memo import transformed
from ebflow_plugin.linalg.random import gaussian_like, uniform_like
from ebflow_plugin.options import at_least, is_number, one_of
from ebflow_plugin.plan.elementwise import ElementwiseMap, ElementwiseStep, logit_map, sigmoid_map
from ebflow_plugin.plan.linear import ElementwiseAffineStep
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import Shape, Step
from ebflow_plugin.plan.values import summed


class Dequantize(nn.Module):
    r"""Dequantises integers 0 to ``levels - 1``: v = (x + u) / levels, with noise u in (0, 1) drawn at each call.

    With q the density of u, the mean of :math:`\log p(v) - D \log(\text{levels}) - \log q(u)` over u is a lower bound
    on the log-probability of the integers, and ``log_prob`` returns it for the u that it draws: ``-log_prob`` in bits
    is what papers report (q = 1 for uniform noise; variational dequantisation otherwise). Different noises yield
    different bounds on the same quantity.

    - ``"uniform"``: the tightest bound for a density that is flat inside each level. The density of v jumps at every
      level, which biases SM and SSM, since they integrate by parts over the data; not DSM, ML and SML.
    - ``"smooth"``: u is the sigmoid of a standard normal variable, so that q and all of its derivatives vanish at the
      ends of each level and the density of v has no jumps. Its bound is looser, by 0.19 nats for each dimension where
      the model's density is flat inside a level.

    Other values, such as 8-bit pixels for 32 levels, or grey levels in [0, 1], would yield a plausible number. They
    raise an error: on the CPU in every call; on another device, where the check synchronises, in the first call (and so
    before the first step of :func:`~ebflow_plugin.fit`). After that they become NaN there: ``fit`` stops and reports
    them, in the training data as in the validation data.

    Arguments:
        levels: The number of values; 256 for 8-bit images.
        noise: ``"uniform"`` or ``"smooth"``.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> flow = flows.Flow(transforms.LULinear(4), distributions.StandardNormal([4]))
        >>> model = ebf.wrap(flow, preprocess=[ebf.Dequantize(16), ebf.Rescale(0.05, 0.95), ebf.Logit()])
        >>> model.bits_per_dim(torch.randint(16, (3, 4))).shape
        torch.Size([3])
        >>> model.sample(2).max() <= 15
        tensor(True)
        >>> Dequantize(16, noise="smooth")
        Dequantize(levels=16, noise='smooth')
    """

    def __init__(self, levels: int = 256, noise: str = "uniform") -> None:
        super().__init__()
        self.levels = at_least(2, "levels", levels)
        self.noise = one_of("noise", noise, ("uniform", "smooth"))
        self._checked = False  # whether a batch on another device than the CPU was checked

    def dequantize(self, x: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draws v. Returns it, and -D·log(levels) - log q(u), the logarithm of its volume, with shape ``(B,)``."""
        if not (x.is_meta or transformed()) and (x.device.type == "cpu" or not self._checked):
            self.refuse(x)
            self._checked = True
        noise, log_volume = (_uniform_noise if self.noise == "uniform" else _smooth_noise)(x, generator)
        top = 1.0 - torch.finfo(x.dtype).eps / 2  # (255 + u) / 256 can round to 1, where a logit is infinite
        unit = ((x + noise) / self.levels).clamp(max=top)
        return unit.masked_fill(self.odd(x), float("nan")), log_volume - prod(x.shape[1:]) * log(self.levels)

    def quantize(self, v: Tensor) -> Tensor:
        """The integers of which v are dequantised values."""
        return torch.floor(v * self.levels).clamp(0, self.levels - 1)

    def odd(self, x: Tensor) -> Tensor:
        """Where x is no integer from 0 to ``levels - 1``. NaN, which stays NaN, does not count."""
        return ((x < 0) | (x >= self.levels) | (x != x.floor())) & ~x.isnan()

    def refuse(self, x: Tensor) -> None:
        """Raises if x holds anything but integers from 0 to ``levels - 1``. Synchronises with the device.

        Example:
            >>> Dequantize(32).refuse(torch.tensor([[3.0, 200.0]]))
            Traceback (most recent call last):
            ebflow_plugin.errors.InputError: x holds 1 of 2 values that are no integers from 0 to 31, ...
        """
        odd = self.odd(x)
        count = int(odd.sum())
        if count:
            first = odd.nonzero()[0].tolist()
            raise InputError(
                f"x holds {count} of {x.numel()} values that are no integers from 0 to {self.levels - 1}, which "
                f"Dequantize({self.levels}) takes; the first is {x[tuple(first)].item():g} at {first}. Pass the number "
                "of levels of the data, or convert the data: (x * levels).floor() for x in [0, 1), "
                "x * levels // 256 for 8 bits."
            )

    def extra_repr(self) -> str:
        return f"levels={self.levels}" + (f", noise={self.noise!r}" if self.noise != "uniform" else "")


class Rescale(nn.Module):
    """Maps the interval ``source`` to the interval from ``low`` to ``high``, elementwise.

    Arguments:
        low: The image of the lower end of ``source``.
        high: The image of its upper end.
        source: The interval of the data; [0, 1] after a :class:`Dequantize`.

    Example:
        >>> Rescale(-1.0, 1.0, source=(0.0, 255.0)).scale
        0.00784313725490196
    """

    def __init__(self, low: float, high: float, source: tuple[float, float] = (0.0, 1.0)) -> None:
        super().__init__()
        pair = isinstance(source, (tuple, list)) and len(source) == 2
        if not pair or not all(map(is_number, (low, high, *source))) or not low < high or not source[0] < source[1]:
            raise InputError(
                f"Rescale needs finite numbers low < high, and such a pair for source, got {low!r}, {high!r} and "
                f"source={source!r}"
            )
        self.scale = float((high - low) / (source[1] - source[0]))
        self.shift = float(low - source[0] * self.scale)

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}, shift={self.shift:g}"


class Standardize(nn.Module):
    """(x - mean) / std for each feature, so that data in any units are of order one. The density is still that of x.

    The matched variable begins after it, so that the noise of DSM and the finite difference of FDSSM are in units of
    each feature's standard deviation. Mean and standard deviation are buffers, and part of a state dict.

    Arguments:
        mean: The mean of each feature, with the shape of one data point.
        std: The standard deviation of each feature, with the same shape, above zero.

    Raises:
        InputError: If they are not finite, differ in shape, or a standard deviation is not above zero.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> metres_and_millimetres = torch.tensor([1.0, 1000.0]) * torch.randn(500, 2)
        >>> flow = flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2]))
        >>> model = ebf.wrap(flow, preprocess=[ebf.Standardize.of(metres_and_millimetres)])
        >>> model.log_prob(metres_and_millimetres).shape
        torch.Size([500])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        if not (isinstance(mean, Tensor) and isinstance(std, Tensor)) or mean.shape != std.shape or not mean.dim():
            shapes = [tuple(part.shape) if isinstance(part, Tensor) else part for part in (mean, std)]
            raise InputError(f"Standardize needs mean and std with the shape of one data point, got {shapes}")
        if not mean.is_floating_point() or not std.is_floating_point():
            raise InputError(f"Standardize needs floating-point numbers, got {mean.dtype} and {std.dtype}")
        bad = ~(mean.isfinite() & std.isfinite() & (std > 0)).flatten()
        if bad.any():
            places = bad.nonzero().flatten().tolist()
            listed = ", ".join(map(str, places[:10])) + (", …" if len(places) > 10 else "")
            raise InputError(
                f"Standardize needs finite means and standard deviations above 0; those of {len(places)} features are "
                f"not: {listed} (counted from 0). A feature that is constant has no density: leave it out."
            )
        self.register_buffer("mean", mean.detach().clone())
        self.register_buffer("std", std.detach().clone())

    @classmethod
    def of(cls, rows: Tensor) -> Standardize:
        """Creates it from the mean and standard deviation of data with shape (N, *), N at least 2."""
        if not isinstance(rows, Tensor) or rows.dim() < 2 or len(rows) < 2:
            raise InputError("Standardize.of needs data with shape (N, *) and N at least 2")
        wide = rows.detach().double()
        dtype = rows.dtype if rows.is_floating_point() else torch.get_default_dtype()
        std = torch.where((wide == wide[:1]).all(0), 0.0, wide.std(0))  # rounding can leave a std of equal numbers
        return cls(wide.mean(0).to(dtype), std.to(dtype))

    def extra_repr(self) -> str:
        return f"features={tuple(self.mean.shape)}, std {float(self.std.min()):.3g} to {float(self.std.max()):.3g}"


class Logit(nn.Module):
    """log(x) - log(1 - x), elementwise, for x in (0, 1).

    Input outside (0, 1) becomes NaN, and its edges become infinite: put a :class:`Rescale` before it.

    Example:
        >>> Logit()
        Logit()
    """


def _uniform_noise(x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    return uniform_like(x, generator), x.new_zeros(len(x))


def _smooth_noise(x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Draws u = sigmoid(t), t standard normal, and computes -log q(u) = t²/2 + log(2π)/2 + log u + log(1 - u)."""
    t = gaussian_like(x, generator)
    log_volume = 0.5 * t.square() + 0.5 * log(2.0 * pi) + F.logsigmoid(t) + F.logsigmoid(-t)
    return torch.sigmoid(t), summed(log_volume)


class RescaleStep(ElementwiseAffineStep):
    """A :class:`Rescale` in front of a flow."""

    def scale_shift(self, x: Tensor) -> tuple[float, float]:
        return self.module.scale, self.module.shift

    def log_scale(self) -> float:
        return log(self.module.scale)


class StandardizeStep(ElementwiseAffineStep):
    """The inverse of a :class:`Standardize`, y * std + mean: the difference x - mean is exact where it is small."""

    match_after = True  # only after it do all features have the same scale, so that one noise level fits them

    def scale_shift(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.module.std.to(x), self.module.mean.to(x)

    def log_scale(self) -> Tensor:
        return self.module.std.log()

    def log_abs_det(self, shape: Shape) -> Tensor | float:
        if tuple(shape) != tuple(self.module.std.shape):
            raise InputError(f"{self.where} is for data of shape {tuple(self.module.std.shape)}, got {tuple(shape)}")
        return super().log_abs_det(shape)


class LogitStep(ElementwiseStep):
    """A :class:`Logit` in front of a flow."""

    match_after = True

    def forward_map(self, x: Tensor, context: Tensor | None) -> ElementwiseMap:
        return logit_map(x)

    def inverse_map(self, y: Tensor, context: Tensor | None) -> ElementwiseMap:
        return sigmoid_map(y)


_STEPS: dict[type, tuple[type[Step], bool]] = {  # and whether the step describes the inverse
    Rescale: (RescaleStep, False),
    Logit: (LogitStep, False),
    Standardize: (StandardizeStep, True),
}


def preprocessing_steps(modules: Sequence[Any]) -> tuple[Step, ...]:
    """The steps of ``wrap(..., preprocess=modules)``. A :class:`Dequantize`, which is random, is none of them.

    Example:
        >>> [step.path for step in preprocessing_steps([Dequantize(), Rescale(0.1, 0.9), Logit()])]
        ['preprocess.1', 'preprocess.2']
    """
    steps = []
    for place, module in enumerate(modules):
        if isinstance(module, Dequantize):
            if place:
                raise InputError("Dequantize must come first: it takes the integers of the data")
        elif type(module) in _STEPS:
            step, inverted = _STEPS[type(module)]
            steps.append(step(module, f"preprocess.{place}", inverted))
        else:
            valid = ", ".join(cls.__name__ for cls in (Dequantize, *_STEPS))
            raise InputError(
                f"preprocess[{place}] is {type(module).__name__}; valid: {valid}. Put other maps in the flow."
            )
    return tuple(steps)


def boundary(plan: Plan, match_after: str | int | None, dequantized: bool = False) -> int:
    """The number of leading steps of a plan that are preprocessing: the matched variable begins after them.

    Arguments:
        plan: The whole plan.
        match_after: ``"auto"`` for the longest leading run of steps without parameters that ends in a numerically
            sensitive one; the path or the index of the last preprocessing step; None for no preprocessing. It does not
            matter whether parameters are frozen: a flow that is frozen, or fine-tuned only in its last layer, has the
            same objective.
        dequantized: Whether a :class:`Dequantize` comes before the plan. It is always preprocessing, and has index 0.

    Raises:
        InputError: If the prefix returns more than one tensor.
        UnknownNameError: If the flow has no such step.
    """
    if match_after is None:
        return 0
    if match_after == "auto":
        count = 0
        for place, step in enumerate(plan.steps):
            if any(True for _ in _parameters(step)) or step.n_in != 1 or step.n_out != 1:
                break
            if step.match_after:
                count = place + 1
        return count
    before = ["preprocess.0"] if dequantized else []
    paths = [*before, *(step.path for step in plan.steps)]
    if isinstance(match_after, int) and not isinstance(match_after, bool):
        if not 0 <= match_after < len(paths):
            raise InputError(f"match_after is {match_after}, but the flow has the steps 0 to {len(paths) - 1}")
        last = match_after
    else:
        inside = [
            place for place, path in enumerate(paths) if path == match_after or path.startswith(f"{match_after}.")
        ]
        if not inside:
            raise UnknownNameError(f"match_after names no step {match_after!r}. {suggest(str(match_after), paths)}")
        last = inside[-1]
    count = last + 1 - len(before)
    if any(step.n_in != 1 or step.n_out != 1 for step in plan.steps[:count]):
        raise InputError(f"match_after={match_after!r} is after a split: the matched variable must be one tensor")
    return count


def refuse_trainable(prefix: Plan) -> None:
    """Raises if the preprocessing has trainable parameters, which would never be trained.

    Called for each loss, since a user may unfreeze parameters at any time.

    Raises:
        InputError: If a step has such parameters; the message lists all of these steps.
    """
    trainable = [step.where for step in prefix.steps if any(p.requires_grad for p in _parameters(step))]
    if trainable:
        raise InputError(
            f"match_after puts {len(trainable)} steps with trainable parameters in front of the matched variable, "
            "where they would never be trained\n  " + "\n  ".join(trainable) + "\nChoose an earlier step, or freeze "
            "them with requires_grad_(False)."
        )


def _parameters(step: Step) -> Iterator[nn.Parameter]:
    return step.module.parameters() if isinstance(step.module, nn.Module) else iter(())
