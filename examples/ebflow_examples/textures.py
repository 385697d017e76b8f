r"""Images made on the spot, whose density and entropy are known exactly, so that there is a floor for every model.

Noise passes the inverse of a small convolutional flow,

.. math:: z = W_2 f(W_1 x + b), \qquad z \sim N(0, I)

with two 7 × 7 convolutions near minus the identity (the start of the paper's models), zeros around the image, and the
paper's smooth leaky ReLU f. Each convolution is one minus a part of some waves: its inverse enhances them, stripes in
the brightness and softer ones in two pairs of colours. The flow is the built-in ``cnn`` with one block, which can
therefore learn the density exactly, and D is that of CIFAR-10: a determinant costs more than all else of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from nflows import distributions, flows, transforms
from torch import Generator, Tensor

import ebflow_plugin as ebf
from ebflow_nflows import FullConv2d, SmoothLeakyReLU
from ebflow_plugin.errors import InputError

SIDES = {"textures": 32, "textures16": 16}  # the data sets, and the pixels on a side of their images
KERNEL, ALPHA = 7, 0.3
CHUNK = 512  # columns of an inverse at a time
NODES = 64  # of the quadrature


@dataclass(frozen=True)
class Wave:
    """What a pair of convolutions does to one combination of the colours.

    Attributes:
        colours: The combination, of red, green and blue.
        scale: By how much the first convolution scales it.
        share: How much of the wave each of them takes away; the inverse multiplies it by 1 / (1 - share).
        angle: Its direction, in radians.
        length: Its length, in pixels.
    """

    colours: tuple[float, float, float]
    scale: float
    share: float
    angle: float
    length: float


WAVES = (
    Wave((1.0, 1.0, 1.0), 1.0, 0.75, 0.6, 6.0),
    Wave((1.0, -1.0, 0.0), 2.0, 0.7, 2.2, 8.0),
    Wave((1.0, 1.0, -2.0), 2.0, 0.7, 0.2, 8.0),
)
WIDTH = 2.2  # of the waves' envelope, in pixels


class Textures:
    r"""The density of the textures.

    A sample costs two solves with a band of the convolutions, once factorised; the log-density one pass of the flow.

    Arguments:
        side: The number of pixels on a side; images have shape (3, side, side).

    Attributes:
        model: The true flow as an :class:`~ebflow_plugin.EBFlow`, in double precision, without gradients.

    Example:
        >>> truth = Textures(side=8)
        >>> images = truth.sample(5, torch.Generator().manual_seed(0))
        >>> images.shape, truth.log_prob(images).shape, truth.score(images).shape
        (torch.Size([5, 3, 8, 8]), torch.Size([5]), torch.Size([5, 3, 8, 8]))
    """

    def __init__(self, side: int = 32) -> None:
        if side < KERNEL:
            raise InputError(f"textures need at least {KERNEL} pixels on a side, got {side}")
        self.shape = (3, side, side)
        self._first, self._second = (FullConv2d(3, kernel_size=KERNEL, dtype=torch.float64) for _ in range(2))
        self._bend = SmoothLeakyReLU(ALPHA)
        with torch.no_grad():
            self._first.weight.copy_(-_kernel([wave.scale for wave in WAVES]))
            self._second.weight.copy_(-_kernel([1.0 for _ in WAVES]))
            assert self._first.bias is not None
            self._first.bias.copy_(self._latent_mean())  # so that the images are near zero in the mean
        layers = transforms.CompositeTransform([self._first, self._bend, self._second])
        flow = flows.Flow(layers, distributions.StandardNormal(self.shape)).double().requires_grad_(False)
        self.model = ebf.wrap(flow)

    def log_prob(self, x: Tensor) -> Tensor:
        """The log-density of images with shape (B, 3, side, side), or of their rows: shape (B,)."""
        return self.model.log_prob(self._images(x)).to(x.dtype)

    def score(self, x: Tensor) -> Tensor:
        """Its gradient, with the shape of ``x``."""
        return self.model.score(self._images(x)).detach().reshape(x.shape).to(x.dtype)

    def sample(self, count: int, generator: Generator | None = None) -> Tensor:
        """Draws images, shape (count, 3, side, side), in double precision."""
        return self.model.sample(count, generator=generator, batch_size=CHUNK)

    def entropy(self) -> float:
        r"""The entropy in nats: the NLL of the density itself, and the least that any model can have.

        .. math:: H = \frac{D}{2} \log 2\pi e - \log|\det W_1| - \log|\det W_2| - \sum_i E[\log f'(a_i)]

        where :math:`f(a) = W_2^{-1} z` is Gaussian, so that each mean is an integral over one Gaussian number with a
        variance from the rows of :math:`W_2^{-1}`: by Gauss and Hermite, exact to rounding. O(D) solves.
        """
        size = math.prod(self.shape)
        nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(NODES))
        bent = self._bend.invert(self._deviations().flatten()[:, None] * nodes)
        slopes = self._bend.slope(bent).log() @ (weights / weights.sum())
        return 0.5 * size * math.log(2 * math.pi * math.e) + float(self.model.log_z(self.shape) - slopes.sum())

    def _deviations(self) -> Tensor:
        """The standard deviation of each entry of W₂⁻¹ z, shape (3, side, side): the root of the rows' squares."""
        size = math.prod(self.shape)
        total = torch.zeros(self.shape, dtype=torch.float64)
        for start in range(0, size, CHUNK):
            units = torch.eye(size, dtype=torch.float64)[start : start + CHUNK].reshape(-1, *self.shape)
            total += self._second.invert(units).square().sum(0)  # its bias is zero
        return total.sqrt()

    def _latent_mean(self) -> Tensor:
        """The mean of f⁻¹(W₂⁻¹ z) by colour, for a W₂⁻¹ z with the variance that it has away from the edges."""
        kernel = self._second.weight.detach()
        response = torch.fft.fft2(kernel, s=(64, 64)).permute(2, 3, 0, 1)
        variance = torch.linalg.inv(response).abs().square().sum(-1).mean((0, 1))
        nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(NODES))
        return self._bend.invert(variance.sqrt()[:, None] * nodes) @ (weights / weights.sum())

    def _images(self, x: Tensor) -> Tensor:
        if x.dim() < 2 or x[0].numel() != math.prod(self.shape):
            raise InputError(f"this density takes images of shape {self.shape}, got {tuple(x.shape)}")
        return x.double().reshape(-1, *self.shape)


def _kernel(scales: list[float]) -> Tensor:
    """One minus a share of a wave, in each combination of colours: shape (3, 3, 7, 7)."""
    reach = torch.arange(KERNEL, dtype=torch.float64) - KERNEL // 2
    down, across = torch.meshgrid(reach, reach, indexing="ij")
    here = ((down == 0) & (across == 0)).double()
    result = torch.zeros(3, 3, KERNEL, KERNEL, dtype=torch.float64)
    for wave, scale in zip(WAVES, scales, strict=True):
        crests = torch.cos((across * math.cos(wave.angle) + down * math.sin(wave.angle)) * 2 * math.pi / wave.length)
        envelope = torch.exp(-(down.square() + across.square()) / (2 * WIDTH**2))
        taps = here - wave.share * crests * envelope / (crests.square() * envelope).sum()
        colours = torch.tensor(wave.colours, dtype=torch.float64)
        colours = colours / colours.norm()
        result += scale * torch.einsum("o,i,hw->oihw", colours, colours, taps)
    return result
