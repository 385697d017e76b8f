"""The linear classes of nflows: where each stores its parameters, in its own forward direction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ebflow_plugin.adapting import (
    ElementwiseAffineStep,
    Factor,
    InitialisedAffineStep,
    MatrixStep,
    MixingStep,
    OrthogonalStep,
    PackedLUStep,
    SqueezeStep,
)
from ebflow_plugin.errors import InputError


class PointwiseAffineStep(ElementwiseAffineStep):
    """PointwiseAffineTransform: buffers ``_scale`` and ``_shift``."""

    def scale_shift(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.module._scale, self.module._shift

    def log_scale(self) -> Tensor:
        return torch.log(torch.abs(self.module._scale))


class BatchNormStep(ElementwiseAffineStep):
    """BatchNorm, which is an affine map only in eval mode."""

    reason = "affine per feature in eval mode"

    def refusal(self) -> str | None:
        if self.module.training:
            return "couples the samples of a batch in training mode; put the model in eval()"
        return None

    def scale_shift(self, x: Tensor) -> tuple[Tensor, Tensor]:
        t = self.module
        scale = t.weight / torch.sqrt(t.running_var + t.eps)
        return scale, t.bias - t.running_mean * scale

    def log_scale(self) -> Tensor:
        t = self.module
        return torch.log(t.weight) - 0.5 * torch.log(t.running_var + t.eps)


class ActNormStep(InitialisedAffineStep):
    """ActNorm: ``log_scale`` and ``shift`` per feature or channel, from the first batch in training mode."""

    def flag(self) -> Tensor:
        return self.module.initialized

    @torch.no_grad()
    def start(self, x: Tensor) -> None:
        """As nflows does, only in the forward direction; but the flag stays on its device."""
        if self.inverted:
            return
        t, rows = self.module, x.movedim(1, -1).reshape(-1, x.shape[1])
        std = rows.std(dim=0)
        t.log_scale.copy_(-torch.log(std))
        t.shift.copy_(-(rows / std).mean(dim=0))
        t.initialized.fill_(True)

    def apply(self, x: Tensor) -> Tensor:
        if self.module.training and not self.inverted:
            self.initialize_if_due(x)
        return super().apply(x)

    def scale_shift(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.dim() not in (2, 4):
            raise InputError(f"{self.where} acts on vectors or images, not on events with {x.dim() - 1} dimensions")
        broadcast = (-1, *[1] * (x.dim() - 2))
        return self.module.scale.reshape(broadcast), self.module.shift.reshape(broadcast)

    def log_scale(self) -> Tensor:
        return self.module.log_scale


class NflowsSqueezeStep(SqueezeStep):
    """SqueezeTransform."""

    @property
    def factor(self) -> int:  # type: ignore[override]
        """The side of the squares of pixels that become channels."""
        return self.module.factor


class NaiveLinearStep(MatrixStep):
    """NaiveLinear, whose own inverse raises on current torch."""

    def weight(self) -> Tensor:
        return self.module._weight


class OneByOneConvolutionStep(PackedLUStep):
    """OneByOneConvolution: a fixed permutation of the channels, then LU factors."""

    reason = "1 × 1 convolution held as LU factors"
    images = True

    def order(self) -> Tensor:
        return self.module.permutation._permutation


class HouseholderStep(OrthogonalStep, MixingStep):
    """HouseholderSequence: a product of reflections, with log-det 0. O(K·D)."""

    reason = "orthogonal"

    def factors(self) -> list[Factor]:
        return [Factor.reflections(self.module.q_vectors)]

    def log_diagonal(self) -> Tensor:
        return self.module.q_vectors.new_zeros(self.module.features)


class QRLinearStep(MixingStep):
    """QRLinear: y = Q R x + b."""

    reason = "matrix held as QR factors"

    def factors(self) -> list[Factor]:
        upper = self.module._create_upper()
        return [Factor.triangular(upper, True), Factor.reflections(self.module.orthogonal.q_vectors)]

    def log_diagonal(self) -> Tensor:
        return self.module.log_upper_diag


class SVDLinearStep(MixingStep):
    """SVDLinear: y = U S V x + b."""

    reason = "matrix held as SVD factors"

    def factors(self) -> list[Factor]:
        t = self.module
        right, left = Factor.reflections(t.orthogonal_2.q_vectors), Factor.reflections(t.orthogonal_1.q_vectors)
        return [right, Factor.diagonal(t.diagonal), left]

    def log_diagonal(self) -> Tensor:
        return torch.log(self.module.diagonal)


class SplitStep(OrthogonalStep):
    """One split of a MultiscaleCompositeTransform: the first half is done, the second is transformed further."""

    n_out = 2
    reason = "splits off latents"
    reshapes = True

    def apply(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.chunk(x, chunks=2, dim=self.module._split_dim)

    def invert(self, y: tuple[Tensor, ...]) -> Tensor:
        return torch.cat(y, dim=self.module._split_dim)


class CollectStep(OrthogonalStep):
    """The end of a MultiscaleCompositeTransform: the latents of all levels as one flat vector."""

    reason = "joins the latents"
    reshapes = True

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        self.n_in = len(module._transforms)
        super().__init__(module, path, inverted)

    def apply(self, x: Any) -> Tensor:
        parts = (x,) if isinstance(x, Tensor) else x
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    def invert(self, y: Tensor) -> tuple[Tensor, ...]:
        shapes = [torch.Size(shape) for shape in self.module._output_shapes]
        parts = y.split([shape.numel() for shape in shapes], dim=1)
        return tuple(part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True))
