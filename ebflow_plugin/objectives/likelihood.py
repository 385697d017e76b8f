r"""Maximum likelihood, by the determinant (ML) and by samples (SML)."""

from __future__ import annotations

import torch
from torch import Tensor

from ebflow_plugin.objectives.base import Objective

__all__ = ["ML", "SML"]


class ML(Objective):
    r"""Maximum likelihood: the negative log-likelihood of the data, in data space (Eq. 2).

    .. math:: L = \mathbb{E}[-\log p(x)] = \mathbb{E}[E(x)] + \log Z

    Cost: one energy, and the determinant of every linear layer with its gradient, :math:`O(D^3)` for a dense one.
    Use it where that is affordable, to finish what score matching began, or as the baseline. Its value is the one to
    compare models by: the log-det of a preprocessing is part of it.

    Arguments:
        model: What :func:`~ebflow_plugin.wrap` returns.
        options: ``generator``, ``energy_weight`` and ``reduction`` of :class:`Objective`.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> x = torch.randn(5, 2)
        >>> torch.allclose(ML(model)(x), -model.log_prob(x).mean())
        True
    """

    in_data_space = True

    def per_sample(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        core = self.model.core
        energy = core.energy(x, context)
        return energy + core.log_z(tuple(x.shape[1:])), energy


class SML(Objective):
    r"""Maximum likelihood by samples of the model, without a determinant (Eq. 4).

    .. math:: L = \mathbb{E}_{p_x}[E(x)] - \mathbb{E}_{\mathrm{sg}(p)}[E(x)]

    In expectation its gradient is that of maximum likelihood; its value is no likelihood, and hovers around zero near
    the optimum. The samples are drawn by the inverse of the flow, one for each row of the batch, and no gradient
    flows through them.

    Cost: the inverse of the flow for B samples (a solve in every linear layer, :math:`O(D^3)` for a dense one), and
    one energy of 2B samples. Use it for flows whose inverse is cheap, or to check ML.

    Arguments:
        model: What :func:`~ebflow_plugin.wrap` returns. All of its steps need an inverse.
        options: ``generator``, ``energy_weight`` and ``reduction`` of :class:`Objective`. With ``reduction="none"``
            each row of the data is paired with one sample.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> SML(model, generator=torch.Generator().manual_seed(0))(torch.randn(5, 2)).backward()
    """

    def per_sample(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        core = self.model.core
        if context is None:
            drawn = core.sample(x.shape[0], generator=self.generator)
        else:
            drawn = core.sample(1, context, generator=self.generator).squeeze(1)
            context = torch.cat([context, context])
        energy, imagined = core.energy(torch.cat([x, drawn.to(x)]), context).chunk(2)
        return energy - imagined, energy
