"""The paper's models and objectives in plain torch, as one would write them by hand: what ours are timed against.

No wrapper and no flow library: torch's own layers, the activation in closed form, a diagonal base, and
autograd's double backward. Each model holds its parameters in the order of our flow, so that :func:`copy_parameters`
makes the two the same function; the tests compare the losses.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, pi, prod, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebflow_examples.architectures import CNN_KERNEL

Energy = Callable[[Tensor], Tensor]


class FullyConnected(nn.Module):
    """Two full layers with a smooth leaky ReLU between them (the paper's FC-based model)."""

    def __init__(self, dim: int, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha
        self.first, self.last = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """E(x), with shape ``(B,)``."""
        z, log_det = activate(self.first(x), self.alpha)
        return gaussian_energy(self.last(z)) - log_det

    def log_z(self) -> Tensor:
        """-Σ log|det W|."""
        return -torch.linalg.slogdet(self.first.weight)[1] - torch.linalg.slogdet(self.last.weight)[1]


class Convolutional(nn.Module):
    """Three blocks of convolution, smooth leaky ReLU and convolution, squeezed in between (the CNN-based model)."""

    def __init__(self, channels: int, alpha: float, kernel: int = 3) -> None:
        super().__init__()
        self.alpha = alpha
        widths = [channels * 4**block for block in range(3) for _ in range(2)]
        self.layers = nn.ModuleList([nn.Conv2d(width, width, kernel, padding=kernel // 2) for width in widths])

    def forward(self, x: Tensor) -> Tensor:
        """E(x), with shape ``(B,)``."""
        total: Tensor | float = 0.0
        for block in range(3):
            if block > 0:
                x = F.pixel_unshuffle(x, 2)
            x, log_det = activate(self.layers[2 * block](x), self.alpha)
            x = self.layers[2 * block + 1](x)
            total = total + log_det
        return gaussian_energy(x) - total


def model(kind: str, shape: tuple[int, ...], alpha: float) -> FullyConnected | Convolutional:
    """The paper's ``fc`` or ``cnn``."""
    return FullyConnected(shape[0], alpha) if kind == "fc" else Convolutional(shape[0], alpha, CNN_KERNEL)


def activate(x: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """The smooth leaky ReLU and its log-det (Table A.2)."""
    slope = alpha + (1 - alpha) * torch.sigmoid(x)
    return alpha * x + (1 - alpha) * F.softplus(x), slope.log().flatten(1).sum(1)


def gaussian_energy(z: Tensor) -> Tensor:
    """-log of the standard normal density."""
    return 0.5 * z.square().flatten(1).sum(1) + 0.5 * prod(z.shape[1:]) * log(2 * pi)


def ssm(energy: Energy, x: Tensor, v: Tensor) -> Tensor:
    """Sliced score matching (Eq. 5) by double backward."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(energy(x).sum(), x, create_graph=True)
    (product,) = torch.autograd.grad((gradient * v).sum(), x, create_graph=True)
    return (0.5 * gradient.square() - product * v).sum() / len(x)


def dsm(energy: Energy, x: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """Denoising score matching (Eq. 7)."""
    noised = (x + sigma * noise).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(energy(noised).sum(), noised, create_graph=True)
    return 0.5 * (gradient - noise / sigma).square().sum() / len(x)


def fdssm(energy: Energy, x: Tensor, direction: Tensor, eps: float) -> Tensor:
    """Sliced score matching by finite differences (Eq. 6), with directions of length √D, scaled by D/ε²."""
    size = prod(x.shape[1:])
    step = direction * (eps / sqrt(size))
    here, ahead, after = energy(torch.cat([x, x + step, x - step])).chunk(3)
    return (2 * here - ahead - after + 0.125 * (ahead - after).square()).mean() * (size / eps**2)


def ml(model: FullyConnected, x: Tensor) -> Tensor:
    """Maximum likelihood (Eq. 2)."""
    return model(x).mean() + model.log_z()


def rademacher(x: Tensor) -> Tensor:
    """Entries of +1 and -1."""
    return torch.empty_like(x).bernoulli_(0.5).mul_(2.0).sub_(1.0)


def sphere(x: Tensor) -> Tensor:
    """For each sample a direction, uniformly, with length √D."""
    drawn = torch.randn_like(x).flatten(1)
    return (drawn * (sqrt(drawn.shape[1]) / drawn.norm(dim=1, keepdim=True))).view_as(x)


@torch.no_grad()
def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Copies the parameters of a model to another one that has the same ones in the same order."""
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        mine.copy_(theirs)
