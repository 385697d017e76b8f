"""The linear classes of normflows: where each stores its parameters.

Each step describes the module's own ``forward``, unless its docstring names the inverse: a 1 × 1 convolution stores the
matrix of its *inverse*. :func:`ebflow_normflows.adapter.backwards` inverts those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ebflow_plugin.adapting import (
    ElementwiseAffineStep,
    Factor,
    InitialisedAffineStep,
    MatrixStep,
    OrthogonalStep,
    PermutationStep,
    Shape,
    TranslationStep,
    TriangularStep,
)
from ebflow_plugin.errors import InputError


class AffineConstStep(ElementwiseAffineStep):
    """AffineConstFlow: ``s`` is the log of the scale, ``t`` the shift."""

    def scale_shift(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.exp(self.module.s), self.module.t

    def log_scale(self) -> Tensor:
        return self.module.s

    def library_flaw(self, shape: Shape) -> str | None:
        if len(shape) + 1 == self.module.s.dim():
            return None
        return f"counts the dimensions of its parameters, {tuple(self.module.s.shape[1:])}, alone in its log-det"


class ActNormStep(InitialisedAffineStep, AffineConstStep):
    """ActNorm: an AffineConstFlow that is initialised from the first batch, in training and in eval mode.

    normflows initialises it even from the *noise* that ``sample()`` draws. Here only data initialise it.
    """

    def flag(self) -> Tensor:
        return self.module.data_dep_init_done

    def samples(self, x: Tensor) -> Tensor:
        shared: list[int] = self.module.batch_dims
        own = [dim for dim in range(x.dim()) if dim not in shared]
        return x.permute(*shared, *own).reshape(-1, max(1, self.module.s.numel()))

    def encode(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, None]:
        self.initialize_if_due(x)
        return super().encode(x, context)[0], None

    @torch.no_grad()
    def start(self, x: Tensor) -> None:
        module, dims = self.module, self.module.batch_dims
        mean, log_std = x.mean(dims, keepdim=True), torch.log(x.std(dims, keepdim=True) + 1e-6)
        if mean.shape != module.s.shape:
            raise InputError(
                f"{self.where} has one scale for each entry of {tuple(module.s.shape[1:])}, and cannot start from "
                f"events {tuple(x.shape[1:])}: build it with the event shape, 1 where positions share a scale"
            )
        log_scale, shift = (log_std, mean) if self.inverted else (-log_std, -mean * torch.exp(-log_std))
        # In place: normflows would assign new tensors, with the flag on the CPU in float32 for any model.
        module.s.copy_(log_scale)
        module.t.copy_(shift)
        module.data_dep_init_done.fill_(1.0)


class ShiftStep(TranslationStep):
    """transforms.Shift, which subtracts, and whose own methods write into their input."""

    def shift(self, x: Tensor, context: Tensor | None) -> Tensor:
        return -torch.as_tensor(self.module.shift).to(x, non_blocking=True)


class ShuffleStep(PermutationStep):
    """Permute with mode ``shuffle``."""

    def order(self) -> tuple[Tensor, int]:
        return self.module.perm, 1


class SwapStep(OrthogonalStep):
    """Permute with mode ``swap``: the lower half of the channels moves after the upper one."""

    reason = "permutation"

    def apply(self, x: Tensor) -> Tensor:
        return self._roll(x, -(self.module.num_channels // 2))

    def invert(self, y: Tensor) -> Tensor:
        return self._roll(y, self.module.num_channels // 2)

    def _roll(self, x: Tensor, places: int) -> Tensor:
        if x.shape[1] != self.module.num_channels:  # normflows would drop or repeat channels
            raise InputError(f"{self.where} swaps {self.module.num_channels} channels, got {tuple(x.shape)}")
        return torch.roll(x, places, dims=1)


class ConvolutionStep(MatrixStep):
    """The inverse of an Invertible1x1Conv with ``use_lu=False``: y = W x for each pixel."""

    reason = "1 × 1 convolution, full matrix"
    images = True

    def weight(self) -> Tensor:
        return self.module.W


class LUConvolutionStep(TriangularStep):
    """The inverse of an Invertible1x1Conv with ``use_lu=True``: y = P L U x for each pixel."""

    reason = "1 × 1 convolution held as LU factors"
    images = True

    def lower_upper(self) -> tuple[Tensor, Tensor]:
        module = self.module
        lower = torch.tril(module.L, diagonal=-1) + module.eye
        return lower, torch.triu(module.U, diagonal=1) + torch.diag(module.sign_S * torch.exp(module.log_S))

    def log_diagonal(self) -> Tensor:
        return self.module.log_S

    def row_order(self) -> Tensor:
        return self.module.P.argmax(1)


class VectorStep(MatrixStep):
    """The inverse of an InvertibleAffine with ``use_lu=False``: y = x W, with x as a row."""

    transposed = True

    def weight(self) -> Tensor:
        return self.module.W


class LUVectorStep(LUConvolutionStep):
    """The inverse of an InvertibleAffine with ``use_lu=True``: y = x P L U, with x as a row.

    normflows multiplies the factors first, which is O(D³); here two products with triangular matrices take O(B·D²).
    """

    reason = "matrix held as LU factors"
    images = False

    def order(self) -> Tensor:
        return self.module.P.argmax(0)

    def factors(self) -> list[Factor]:
        lower, upper = self.lower_upper()
        matrices = Factor.triangular(lower.mT, True), Factor.triangular(upper.mT, False)
        return [Factor.permutation(self.order()), *matrices]


class SplitStep(OrthogonalStep):
    """Split, and the inverse of Merge: halves of the channels, or the two colours of a checkerboard."""

    n_out = 2
    reason = "splits the features"
    reshapes = True

    def apply(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return halves(x, self.module.mode)

    def invert(self, y: tuple[Tensor, Tensor]) -> Tensor:
        return joined(*y, self.module.mode)


class LevelStep(SplitStep):
    """The inverse of a merge of a MultiscaleFlow: the second half is done, the first is transformed further.

    The latter comes last, since a plan continues with the last tensor of its stack.
    """

    reason = "splits off latents"

    def apply(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rest, done = super().apply(x)
        return done, rest

    def invert(self, y: tuple[Tensor, Tensor]) -> Tensor:
        done, rest = y
        return super().invert((rest, done))


def halves(x: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Splits a batch as ``normflows.flows.Split(mode)`` does, on its device.

    Example:
        >>> halves(torch.arange(4).reshape(1, 4), "checkerboard")
        (tensor([[1, 3]]), tensor([[0, 2]]))
    """
    if "checkerboard" in mode:
        even, odd = x[..., 0::2], x[..., 1::2]
        light = _light(even, mode)
        return torch.where(light, odd, even), torch.where(light, even, odd)
    first, second = x.chunk(2, dim=1)
    return (second, first) if _flipped(mode) else (first, second)


def joined(first: Tensor, second: Tensor, mode: str) -> Tensor:
    """The inverse of :func:`halves`.

    Example:
        >>> joined(*halves(torch.arange(4).reshape(1, 4), "channel_inv"), "channel_inv")
        tensor([[0, 1, 2, 3]])
    """
    if "checkerboard" in mode:
        light = _light(first, mode)
        return torch.stack([torch.where(light, second, first), torch.where(light, first, second)], dim=-1).flatten(-2)
    return torch.cat([second, first] if _flipped(mode) else [first, second], dim=1)


def _flipped(mode: str) -> bool:
    if mode not in ("channel", "channel_inv"):
        raise InputError(f"normflows has no split mode {mode!r}")
    return mode == "channel_inv"


def _light(half: Tensor, mode: str) -> Tensor:
    """The rows in which the first colour of a checkerboard has the odd columns: the other indices have an even sum."""
    parity = torch.zeros((), dtype=torch.long, device=half.device)
    for size in half.shape[1:-1]:
        parity = parity[..., None] + torch.arange(size, device=half.device)
    return ((parity % 2 == 0) != ("inv" in mode))[..., None]
