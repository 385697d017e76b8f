"""unconstrain() and smooth(): a copy of a flow with some of its modules replaced.

Both walk the flow as :func:`~ebflow_plugin.wrap` does, and return a flow that is ready to be wrapped. They append each
replacement to the caller's list.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ebflow_plugin.adapting.adapter import Adapter
from ebflow_plugin.adapting.discovery import find_flow
from ebflow_plugin.errors import EBFlowWarning, InputError, UnknownNameError, suggest, warn
from ebflow_plugin.layers import FullConv2d
from ebflow_plugin.linalg.geometry import Setting
from ebflow_plugin.options import integer, one_of
from ebflow_plugin.plan.linear import PermutationStep
from ebflow_plugin.plan.matrices import FullConvStep, MixingStep
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.smoothness import kinked_parts
from ebflow_plugin.plan.step import LinearStep, Step

KERNEL_PADDINGS = ("zeros", "circular")


class Replaced(NamedTuple):
    """One replacement: the path, the old class and the new one.

    Example:
        >>> path, old, new = Replaced("_transform", "LULinear", "FullLinear")
    """

    path: str
    old: str
    new: str


def unconstrain(
    flow: Any,
    kernel_size: int | None = None,
    *,
    padding_mode: str = "zeros",
    in_place: bool = False,
    changes: list[Replaced] | None = None,
) -> nn.Module:
    """Replaces constrained linear layers by full, unconstrained ones with the same map; log_prob does not change.

    LU, QR, SVD and Householder layers, and 1 × 1 convolutions parametrised by LU factors, become a ``FullLinear`` or a
    ``FullConv2d``. A permutation directly before them is merged into them. An existing flow, even a trained one, thus
    gets unconstrained linear layers, whose determinants score matching never computes.

    With a ``kernel_size`` every 1 × 1 convolution, full ones too, gets a kernel of that size: zeros around the old
    weight, which training can change. Train it with :class:`ML(log_det="auto") <ebflow_plugin.objectives.ML>`, which
    needs no determinants of convolutions, and with :func:`~ebflow_plugin.parameter_groups`: at the rate of the model
    such kernels diverge.

    Arguments:
        flow: A flow, or an object that holds one, as for :func:`~ebflow_plugin.wrap`.
        kernel_size: The odd height and width of the kernels of what are 1 × 1 convolutions; 1 × 1 by default. Where the
            feature map is known to be smaller than the kernel they stay 1 × 1, with a warning.
        padding_mode: How these pad an image: ``"zeros"`` or ``"circular"``.
        in_place: Edits the given flow instead of a copy. Optimisers that hold its old parameters must be recreated.
        changes: A list, to which each replacement is appended: its path, old class and new class.

    Returns:
        The flow with full layers.

    Raises:
        InputError: If the kernel is even, or there is no 1 × 1 convolution that can have it.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> flow = flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2]))
        >>> changes = []
        >>> full = ebf.unconstrain(flow, changes=changes)
        >>> changes
        [Replaced(path='_transform', old='LULinear', new='FullLinear')]
        >>> x = torch.randn(3, 2)
        >>> torch.allclose(full.log_prob(x), flow.log_prob(x))
        True
    """
    size = 1 if kernel_size is None else integer("kernel_size", kernel_size)
    if size % 2 == 0:
        raise InputError(f"kernel_size={size} is even, so no tap is its middle: use {size - 1} or {size + 1}")
    one_of("padding_mode", padding_mode, KERNEL_PADDINGS)
    target, adapter, changes = _begin(flow, in_place, changes)
    full_layers: dict[tuple[int, ...], nn.Module] = {}
    dropped: list[str] = []
    plan = adapter.plan(target)
    units = list(_units(adapter, target, [step for step in plan.steps if step.known], size > 1))
    kept = _refuse_small_maps(plan, units, size) if size > 1 else set()
    for unit in units:
        if unit.key not in full_layers:  # a layer that is used twice stays one layer
            full = _full(adapter, unit)
            full_layers[unit.key] = full if unit.key in kept else _widened(full, size, padding_mode, plan.in_use)
        full = full_layers[unit.key]
        old = target.get_submodule(unit.path)
        new = full if unit.inverted == adapter.inverted else adapter.inverse_of(full)
        _put(target, unit.path, new.train(old.training))
        name = type(full).__name__
        changes.append(Replaced(unit.path, " after ".join(s.class_name for s in reversed(unit.steps)), name))
        dropped.extend(unit.dropped)
    for path in sorted(dropped, key=lambda path: int(path.rpartition(".")[2]), reverse=True):
        parent, _, place = path.rpartition(".")
        del target.get_submodule(parent)[int(place)]  # type: ignore[operator]
    return target


class _Unit(NamedTuple):
    """Steps that one full layer replaces."""

    steps: list[LinearStep]  # in density order
    path: str  # the module to replace
    inverted: bool  # whether data pass through its inverse
    dropped: list[str]  # members of a sequence that are merged into the layer, and removed
    size: tuple[int, bool]  # the number of features, and whether they are channels

    @property
    def key(self) -> tuple[int, ...]:
        """Units of the same layers have the same key."""
        return tuple(id(step.module) for step in self.steps)


def _units(adapter: Adapter, flow: nn.Module, steps: list[Step], pointwise: bool) -> Iterator[_Unit]:
    """Finds the constrained steps, each with the other steps of its module and the permutation directly before it.

    With ``pointwise``, the full 1 × 1 convolutions too.
    """
    places = [(adapter.unit(flow, step.path, step.inverted), step) for step in steps]
    before: Step | None = None
    for path, group in groupby(places, key=lambda placed: placed[0][0]):
        (_, inverted), _ = first = next(group)
        together = [step for _, step in (first, *group)]
        sizes = [
            _features(adapter, step) or ((_channels(step), True) if pointwise and _channels(step) else None)
            for step in together
        ]
        members, dropped = [step for step in together if isinstance(step, LinearStep)], []
        if size := next(filter(None, sizes), None):
            if isinstance(before, PermutationStep) and _neighbours(flow, before.path, path):
                members.insert(0, before)
                dropped.append(before.path)
            yield _Unit(members, path, inverted, dropped, size)
        before = together[-1]


def _features(adapter: Adapter, step: Step) -> tuple[int, bool] | None:
    """The number of features of a constrained layer, and whether they are channels; None for other steps."""
    features = adapter.constrained.get(step.class_name)
    return None if features is None else features(step.module)


def _channels(step: Step) -> int:
    """The number of channels of a 1 × 1 convolution; 0 for other steps."""
    if isinstance(step, FullConvStep):
        setting: Setting = step.module.setting
        return setting.in_channels if setting.kernel_size == setting.stride == (1, 1) else 0
    return step.features if isinstance(step, MixingStep) and step.images else 0


def _neighbours(flow: nn.Module, first: str, second: str) -> bool:
    """Whether two modules are adjacent in one list of transforms."""
    (parent, _, here), (other, _, there) = first.rpartition("."), second.rpartition(".")
    if parent != other or not (here.isdigit() and there.isdigit()) or abs(int(here) - int(there)) != 1:
        return False
    return isinstance(flow.get_submodule(parent), nn.ModuleList)


def _full(adapter: Adapter, unit: _Unit) -> nn.Module:
    """A full layer with the map of the steps, obtained from the images of the unit vectors in float64."""
    steps, (features, images) = unit.steps, unit.size
    tensors = chain.from_iterable(chain(step.module.parameters(), step.module.buffers()) for step in steps)
    anchor = next(tensor for tensor in tensors if tensor.is_floating_point())
    exact = [type(step)(copy.deepcopy(step.module).double(), step.path, step.inverted) for step in steps]
    with torch.no_grad():
        probe = torch.cat([torch.eye(features), torch.zeros(1, features)]).to(anchor.device, torch.float64)
        value: Tensor = probe[:, :, None, None] if images else probe
        for step in exact:
            value, _ = step.encode(value, None)
        rows = value.flatten(1)
        bias = rows[-1]
        weight = (rows[:-1] - bias).T
        full = adapter.full_layer(features, images).to(anchor.device, anchor.dtype)
        kernel, offset = full.get_parameter("weight"), full.get_parameter("bias")
        kernel.copy_(weight.reshape(kernel.shape))
        offset.copy_(bias)
    trainable = any(parameter.requires_grad for step in steps for parameter in step.module.parameters())
    return full.requires_grad_(trainable)


def _refuse_small_maps(plan: Plan, units: Sequence[_Unit], size: int) -> set[tuple[int, ...]]:
    """The keys of the units that stay 1 × 1, since their feature map is known to be smaller than the kernel."""
    reached = {} if plan.event_shape is None else dict(plan.shapes(plan.event_shape))
    images = [unit for unit in units if unit.size[1]]
    small = {
        unit.key: f"{unit.steps[0].where} has {height} x {width} pixels"
        for unit in images
        if unit.steps[0] in reached
        for _, height, width in reached[unit.steps[0]]
        if min(height, width) < size
    }
    wide = any(isinstance(step, FullConvStep) and not _channels(step) for step in plan.steps)
    if not wide and all(unit.key in small for unit in images):
        why = f", but too small ones: {next(iter(small.values()))}" if small else ""
        raise InputError(f"kernel_size={size}: the flow has no 1 × 1 convolution that can have such a kernel{why}")
    if small:
        warn(f"kernel_size={size}: these convolutions stay 1 × 1: {'; '.join(small.values())}", EBFlowWarning)
    return set(small)


def _widened(full: nn.Module, size: int, padding_mode: str, in_use: bool) -> nn.Module:
    """The same map with a larger kernel, zero around the old one; layers that are no convolutions as they are."""
    if not isinstance(full, FullConv2d) or size == 1:
        return full
    old = full.weight
    wide = type(full)(old.shape[1], kernel_size=size, padding_mode=padding_mode, device=old.device, dtype=old.dtype)
    with torch.no_grad():
        wide.weight.copy_(F.pad(old, [size // 2] * 4))
        wide.get_parameter("bias").copy_(full.get_parameter("bias"))
    wide.widened_in_use = in_use
    return wide.requires_grad_(old.requires_grad)


def smooth(
    flow: Any,
    activation: str = "silu",
    *,
    sharpness: float = 10.0,
    in_place: bool = False,
    changes: list[Replaced] | None = None,
) -> nn.Module:
    """Replaces ReLU-like activations in the networks of a flow by smooth ones, so that its score is continuous.

    SM and SSM integrate by parts: at a kink the score jumps, the second derivative misses the jump, and the objective
    is biased. The density changes with the activation, but only little for a high sharpness.

    Arguments:
        flow: A flow, or an object that holds one, as for :func:`~ebflow_plugin.wrap`.
        activation: ``"silu"`` or ``"softplus"``, each with the given sharpness β: x·sigmoid(βx), log(1 + exp(βx))/β.
            A leaky ReLU of slope s becomes s·x + (1 - s)·activation(x).
        sharpness: β; the higher, the closer to the old activation.
        in_place: Edits the given flow instead of a copy.
        changes: A list, to which each replacement is appended: its path, old and new activation.

    Returns:
        The flow with smooth activations.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> transform = transforms.MaskedAffineAutoregressiveTransform(2, hidden_features=4, num_blocks=1)
        >>> flow = flows.Flow(transform, distributions.StandardNormal([2]))
        >>> [str(row.smoothness) for row in ebf.describe(flow)]
        ['score jumps']
        >>> [str(row.smoothness) for row in ebf.describe(ebf.smooth(flow))]
        ['smooth']
    """
    if activation not in Smooth.kinds:
        raise UnknownNameError(f"unknown activation {activation!r}. {suggest(activation, Smooth.kinds)}")
    if not sharpness > 0:
        raise InputError(f"sharpness must be above 0, got {sharpness!r}")
    target, adapter, changes = _begin(flow, in_place, changes)
    plan = adapter.plan(target)
    networks = {id(part.module): part for part in plan.parts() if isinstance(part.module, nn.Module)}
    for part in networks.values():
        for inner, name in list(kinked_parts(part.module)):
            owner, _, leaf = inner.rpartition(".")
            old = getattr(part.module.get_submodule(owner), leaf) if leaf else part.module
            slope = _slope(old)
            if slope is None or not leaf:
                continue
            new = Smooth(activation, sharpness, slope)
            _put(part.module, inner, new)
            changes.append(Replaced(f"{part.path}.{inner}", name, repr(new)))
    return target


class Smooth(nn.Module):
    """A smooth replacement of ReLU and LeakyReLU.

    Example:
        >>> Smooth("softplus", sharpness=100.0, slope=0.1)(torch.tensor([-2.0, 2.0]))
        tensor([-0.2000,  2.0000])
    """

    kinds = ("silu", "softplus")

    def __init__(self, kind: str = "silu", sharpness: float = 10.0, slope: float = 0.0) -> None:
        super().__init__()
        self.kind, self.sharpness, self.slope = kind, sharpness, slope

    def forward(self, x: Tensor) -> Tensor:
        """Applies the activation elementwise."""
        if self.kind == "silu":
            y = x * torch.sigmoid(self.sharpness * x)
        else:
            y = F.softplus(self.sharpness * x, threshold=40.0) / self.sharpness
        return y if not self.slope else self.slope * x + (1.0 - self.slope) * y

    def extra_repr(self) -> str:
        return f"{self.kind!r}, sharpness={self.sharpness:g}, slope={self.slope:g}"


def _slope(activation: Any) -> float | None:
    """The slope of a ReLU or LeakyReLU below zero; None for activations that smooth() does not replace."""
    if isinstance(activation, nn.LeakyReLU):
        return float(activation.negative_slope)
    if isinstance(activation, nn.ReLU) or activation in (F.relu, F.relu_, torch.relu, torch.relu_):
        return 0.0
    return 0.01 if activation in (F.leaky_relu, F.leaky_relu_) else None


def _begin(flow: Any, in_place: bool, changes: list[Replaced] | None) -> tuple[nn.Module, Adapter, list[Replaced]]:
    """The flow to edit, its adapter, and the list of replacements."""
    if changes is not None and not isinstance(changes, list):
        raise InputError(f"changes must be a list, to which replacements are appended, got {changes!r}")
    found = find_flow(flow)
    if not in_place:
        found.adapter.release(found.flow)
    target = found.flow if in_place else copy.deepcopy(found.flow)
    return target, found.adapter, [] if changes is None else changes


def _put(root: nn.Module, path: str, value: nn.Module) -> None:
    """Replaces a module, or an activation held as a plain attribute."""
    parent, _, name = path.rpartition(".")
    owner = root.get_submodule(parent)
    if isinstance(owner, (nn.ModuleList, nn.Sequential)):
        owner[int(name)] = value
    else:
        if name in vars(owner):  # a plain function, as in nflows' networks: torch refuses a submodule of the same name
            delattr(owner, name)
        setattr(owner, name, value)
