"""SSM through couplings: their networks in closed form against autograd's double backward, in every library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ebflow_plugin as ebf
from ebflow_examples.bench.results import Settings, Table, compare
from ebflow_plugin.plan.derivatives import derivatives

__all__ = ["MODELS", "couplings", "step"]

FEATURES, BLOCKS, HIDDEN = 2, 10, 64


def couplings(settings: Settings) -> Iterator[Table]:
    """Loss and backward of SSM for ten couplings of two features, in batches of several sizes."""
    rows = []
    for name, make in MODELS.items():
        if find_spec(name.split()[0]) is None:
            continue
        model = ebf.wrap(make().to(settings.device))
        for batch in settings.choose((50, 500), (50, 500, 2048)):
            x = settings.data(batch, FEATURES)
            ours, other = (step(model, x, closed) for closed in (True, False))
            what = f"{name}, {batch} rows"
            times = settings.time(what, {"closed form": ours, "double backward": other}, seconds=0.5, least=7)
            rows.append(compare(what, times["closed form"], times["double backward"]))
    title = f"loss and backward of SSM, {BLOCKS} affine couplings, D = {FEATURES}, two layers of {HIDDEN}"
    yield Table("couplings", title, rows, "Both in one process, with the same model, data and directions.")


def step(model: ebf.EBFlow, x: Tensor, closed: bool) -> Callable[[], Tensor]:
    """Loss and backward of SSM, as :class:`~ebflow_plugin.objectives.SSM` computes it."""
    direction = torch.sign(torch.randn(x.shape, generator=torch.Generator().manual_seed(0))).to(x)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def run() -> Tensor:
        found = derivatives(model.plan, x, directions=[direction], closed=closed)
        loss = (0.5 * found.gradient.square().sum(1) - found.curvatures[0]).mean()
        torch.autograd.grad(loss, parameters, allow_unused=True)
        return loss

    return run


def network(inputs: int, outputs: int, activation: Callable[[], nn.Module] = nn.SiLU) -> nn.Module:
    """Two hidden layers."""
    layers = (nn.Linear(inputs, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, outputs))
    return nn.Sequential(layers[0], activation(), layers[1], activation(), layers[2])


def _nflows() -> Any:
    distributions, flows, nets, transforms = (
        import_module(f"nflows.{name}") for name in ("distributions", "flows", "nn.nets", "transforms")
    )

    def residual(inputs: int, outputs: int) -> Any:
        return nets.ResidualNet(inputs, outputs, hidden_features=HIDDEN, num_blocks=1, activation=F.silu)

    masks = [(torch.arange(FEATURES) + block) % 2 for block in range(BLOCKS)]
    parts = [transforms.AffineCouplingTransform(mask, residual) for mask in masks]
    return flows.Flow(transforms.CompositeTransform(parts), distributions.StandardNormal([FEATURES]))


def _normflows(make: Callable[[Any], nn.Module]) -> Any:
    nf = import_module("normflows")
    parts = [part for _ in range(BLOCKS) for part in (make(nf), nf.flows.Permute(FEATURES, mode="swap"))]
    return nf.NormalizingFlow(nf.distributions.DiagGaussian(FEATURES), parts)


def _masked(nf: Any) -> Any:
    return nf.flows.MaskedAffineFlow(torch.arange(FEATURES) % 2.0, *(network(FEATURES, FEATURES) for _ in range(2)))


def _zuko(activation: type[nn.Module]) -> Any:
    flows = import_module("zuko.flows")
    return flows.RealNVP(FEATURES, transforms=BLOCKS, hidden_features=(HIDDEN, HIDDEN), activation=activation)


MODELS: dict[str, Callable[[], Any]] = {
    "nflows AffineCouplingTransform": _nflows,
    "normflows AffineCouplingBlock": lambda: _normflows(lambda nf: nf.flows.AffineCouplingBlock(network(1, 2))),
    "normflows AffineCouplingBlock, MLP (ReLU)": lambda: _normflows(
        lambda nf: nf.flows.AffineCouplingBlock(nf.nets.MLP([1, HIDDEN, HIDDEN, 2]))
    ),
    "normflows MaskedAffineFlow": lambda: _normflows(_masked),
    "zuko RealNVP": lambda: _zuko(nn.SiLU),
    "zuko RealNVP, ReLU": lambda: _zuko(nn.ReLU),
}
