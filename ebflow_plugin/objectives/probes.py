r"""How many probes estimate a log-determinant: what is known of the noise, and of the solves, of one layer.

The number P of probes is the one that minimises the variance of the gradient times the cost of a step,

.. math:: \left(V_b + \frac{V_p}{P}\right) (C_b + P\, C_p) \to \min, \qquad
          P = \sqrt{\frac{V_p}{V_b} \cdot \frac{C_b}{C_p}},

with the variances of the batch and of one probe, and the products with the layer that the batch and a probe need; but
the probes may cost no more than the batch, as long as four of them are left. :math:`V_p` can grow a hundredfold in one
step, so it is followed in every step: it is proportional to :math:`\|s - M v\|^2`. The factor, like :math:`V_b`, is
measured from time to time, and the median of the last three measurements counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from torch import Tensor

# The noise is measured in the steps before MEASURED_FIRST, in those whose number is a power of two, and in every 64th.
MEASURED_FIRST, MEASURED_EVERY = 4, 64
MEASUREMENTS = 3  # whose median counts: one odd batch changes nothing
FIRST_PROBES = 4  # the number of probes before the noise is known, and the least where it is measured
MOST_PROBES = 64
ITERATION_PRODUCTS = 3  # that an iteration of a solve costs: a product, the preconditioner, the basis
BATCH_PRODUCTS = 3  # that a row of the batch needs: forward, backward to the input, backward to the weight
SPARE = 0.25  # the share of iterations, beyond those that an earlier solve has needed, of a solve that nobody looks at


@dataclass
class Account:
    """Statistics of the estimates of one layer.

    Attributes:
        calls: The number of estimates so far.
        noise_factors: The variance of the gradient of a probe over the squared norm of its remainder, as last measured.
        row_noises: The variance of the gradient of one row of the batch, as last measured.
        remainder: The squared norm of the remainders of the last solve, the mean of all probes.
        probes: The number of probes of the last solve.
        exact: The number of steps that used the exact log-det, since a solve did not converge.
        iterations: The iterations that the last solve has needed; 0 if there was none.
        allowed: The iterations that the next solve may make where nobody looks; 0 for all of them.
        residual: The residual of the last solve, the largest of all probes.
        fails: Whether it did not converge in all the iterations that there are, so that the exact log-det is used.
        inverse: The inverse of a dense layer, from the last step whose solve did not converge.
    """

    calls: int = 0
    noise_factors: list[float] = field(default_factory=list)
    row_noises: list[float] = field(default_factory=list)
    remainder: float = 0.0
    probes: int = FIRST_PROBES
    exact: int = 0
    iterations: int = 0
    allowed: int = 0
    residual: float = 0.0
    fails: bool = False
    inverse: Tensor | None = None

    @property
    def measures(self) -> bool:
        """Whether the noise is measured in the next step."""
        return self.calls < MEASURED_FIRST or self.calls.bit_count() == 1 or self.calls % MEASURED_EVERY == 0

    def best_probes(self, rows: int, times: int) -> int:
        """The number of probes that minimises variance times cost, by the last step and the last measurements.

        Arguments:
            rows: The number of rows of the batch.
            times: The number of equal blocks that each of them goes through; a probe goes through one.
        """
        if not self.row_noises:
            return FIRST_PROBES
        noise = median(self.noise_factors) * self.remainder * rows / median(self.row_noises)
        cost = BATCH_PRODUCTS * rows * times / (ITERATION_PRODUCTS * self.iterations + BATCH_PRODUCTS)
        most = max(FIRST_PROBES, min(cost, MOST_PROBES))
        best = max(1, math.ceil(min(math.sqrt(noise * cost), most)))
        return max(best, FIRST_PROBES) if self.measures else best

    def add_solve(self, numbers: Sequence[float], made: int, most: int, tolerance: float) -> None:
        """Adds the residual, the length of the remainders and the iterations needed, of a solve that made some."""
        self.residual, length, needed = numbers
        self.iterations, self.remainder = int(needed), math.inf if math.isnan(length) else length**2
        converged = self.residual <= tolerance
        self.fails = not converged and made >= most
        self.allowed = math.ceil((1 + SPARE) * needed) + 1 if converged else 2 * made

    def add_measurement(self, noise_factor: float, row_noise: float) -> None:
        """Adds to the last measurements, and forgets the oldest."""
        self.noise_factors = [*self.noise_factors, noise_factor][-MEASUREMENTS:]
        self.row_noises = [*self.row_noises, row_noise][-MEASUREMENTS:]
