"""A Gaussian of the matched variable, whose conditionals are known: what an imputation is held against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import ebflow_plugin as ebf
from ebflow_plugin.closed_form.moments import Moments

__all__ = ["Gaussian"]

CHUNK = 1000  # rows at a time


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
        for part in rows.split(CHUNK):
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
