"""A training step of the flows that people have: the library's own likelihood, ours, and ours compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import normflows as nf
import torch
import zuko
from nflows import distributions, transforms
from nflows.flows import Flow
from nflows.nn import nets
from torch import Tensor, nn
from torch.nn import functional as F

import ebflow_plugin as ebf
from ebflow_examples.bench.contenders import objective, training_step
from ebflow_examples.bench.results import Settings, Table
from ebflow_examples.bench.timing import ratio
from ebflow_examples.models import build

ROWS, IMAGES = 200, 16


def flows(settings: Settings) -> Iterator[Table]:
    """Each model: the library's own step of maximum likelihood, and ours as shares of it, compiled and not."""
    cases = settings.choose([("nflows NSF", 10), ("zuko MAF", 10)], [(name, 10) for name in MODELS] + SIZES)
    rows = [_likelihood(settings, name, settings.data(ROWS, dim)) for name, dim in cases]
    if not settings.quick:
        rows += [_likelihood(settings, name, settings.data(IMAGES, 3, 16, 16)) for name in IMAGE_MODELS]
    about = f"training step of likelihood, {ROWS} rows or {IMAGES} images: shares of theirs"
    yield Table("flows", about, rows, NOTE)
    models = settings.choose(("RealNVP of nflows, D = 10",), tuple(SCORED))
    rows = [_scores(settings, name) for name in models]
    yield Table("flows", "training step of score matching, compiled: shares of the same step uncompiled", rows, NOTE)


NOTE = (
    "Loss, gradients, Adam; all columns of a row interleaved in one run. Below 1, ours or the compiled one is faster. "
    "A compiled step is one graph of torch.compile; compiling takes a minute or two, once, and is not counted."
)


def _likelihood(settings: Settings, name: str, x: Tensor) -> dict[str, Any]:
    """The times of one model."""
    flow = (MODELS | IMAGE_MODELS)[name](tuple(x.shape[1:])).to(x)
    ebf.wrap(flow).initialize(x)  # ActNorms
    steps = {"theirs": training_step(flow, own_step(flow), x), **_steps("ML", flow, x, "ours", "ours, compiled")}
    times = settings.time(f"{name} {tuple(x.shape)}", steps, seconds=1.5)
    own = times.pop("theirs")
    shares = {label: ratio(each, own) for label, each in times.items()}
    size = " x ".join(map(str, x.shape[1:]))
    return {"model": f"{name}, {size}", "theirs, ms": 1e3 * own.median, **shares}


def _scores(settings: Settings, name: str) -> dict[str, Any]:
    """Steps of score matching of one model, compiled over uncompiled."""
    flow, x = SCORED[name](settings)
    flow = flow.to(x)
    ebf.wrap(flow).initialize(x)
    row: dict[str, Any] = {"model": name}
    for loss in ("DSM", "SSM"):
        steps = _steps(loss, flow, x, loss, f"{loss}, compiled")
        plain, compiled = settings.time(f"{name} {loss}", steps, seconds=1.5).values()
        row |= {f"{loss}, ms": 1e3 * plain.median, f"{loss}, compiled": ratio(compiled, plain)}
    return row


def _steps(loss: str, flow: nn.Module, x: Tensor, *labels: str) -> dict[str, Callable[[], None]]:
    """A step of an objective, and the compiled one, by label."""
    found = {}
    for label, compiled in zip(labels, (False, True), strict=True):
        model = ebf.wrap(flow)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ebf.BiasWarning)  # what SSM would learn is not the question here
            made = objective(loss, model)
        step = training_step(model, made.compile() if compiled else made, x)
        step()  # compiles it
        found[label] = step
    return found


def own_step(flow: nn.Module) -> Callable[[Tensor], Tensor]:
    """Maximum likelihood as users of the library write it."""
    if isinstance(flow, Flow):
        return lambda x: -flow.log_prob(x).mean()
    if isinstance(flow, nf.MultiscaleFlow):
        return lambda x: -flow.log_prob(x, None).mean()
    if isinstance(flow, nf.NormalizingFlow):
        return flow.forward_kld
    return lambda x: -flow().log_prob(x).mean()


def _masks(dim: int, count: int) -> Iterator[Tensor]:
    for index in range(count):
        mask = torch.ones(dim)
        mask[index % 2 :: 2] = -1
        yield mask


def _network(hidden: int, **options: Any) -> Callable[[int, int], nn.Module]:
    return lambda inputs, outputs: nets.ResidualNet(inputs, outputs, hidden_features=hidden, num_blocks=2, **options)


def _nflows(steps: list[nn.Module], dim: int) -> nn.Module:
    return Flow(transforms.CompositeTransform(steps), distributions.StandardNormal([dim]))


def nflows_nsf(shape: tuple[int, ...]) -> nn.Module:
    """The NSF that sbi builds by default: five rational-quadratic couplings of ten bins, with LU layers."""
    (dim,), steps = shape, []
    for mask in _masks(dim, 5):
        coupling = transforms.PiecewiseRationalQuadraticCouplingTransform(
            mask, _network(50, activation=F.relu), num_bins=10, tails="linear", tail_bound=3.0
        )
        steps += [coupling, transforms.LULinear(dim, identity_init=True)]
    return _nflows(steps, dim)


def nflows_realnvp(shape: tuple[int, ...]) -> nn.Module:
    """Eight affine couplings."""
    (dim,) = shape
    return _nflows([transforms.AffineCouplingTransform(mask, _network(64)) for mask in _masks(dim, 8)], dim)


def nflows_maf(shape: tuple[int, ...]) -> nn.Module:
    """Five masked affine autoregressive layers with permutations."""
    (dim,), steps = shape, []
    for _ in range(5):
        layer = transforms.MaskedAffineAutoregressiveTransform(dim, 64, num_blocks=2, activation=torch.tanh)
        steps += [layer, transforms.RandomPermutation(dim)]
    return _nflows(steps, dim)


def _normflows(steps: list[nn.Module], dim: int) -> nn.Module:
    return nf.NormalizingFlow(nf.distributions.DiagGaussian(dim, trainable=False), steps)


def normflows_nsf(shape: tuple[int, ...]) -> nn.Module:
    """Five coupled rational-quadratic splines with LU layers, as in its tutorial."""
    (dim,), steps = shape, []
    for _ in range(5):
        steps += [nf.flows.CoupledRationalQuadraticSpline(dim, 2, 50), nf.flows.LULinearPermute(dim)]
    return _normflows(steps, dim)


def normflows_autoregressive_nsf(shape: tuple[int, ...]) -> nn.Module:
    """Five autoregressive rational-quadratic splines with LU layers."""
    (dim,), steps = shape, []
    for _ in range(5):
        steps += [nf.flows.AutoregressiveRationalQuadraticSpline(dim, 2, 50), nf.flows.LULinearPermute(dim)]
    return _normflows(steps, dim)


def normflows_realnvp(shape: tuple[int, ...]) -> nn.Module:
    """Eight masked affine couplings with ActNorms, as in its tutorial."""
    (dim,), steps = shape, []
    for mask in _masks(dim, 8):
        scale, shift = (nf.nets.MLP([dim, 64, 64, dim], init_zeros=True) for _ in range(2))
        steps += [nf.flows.MaskedAffineFlow((mask > 0).float(), shift, scale), nf.flows.ActNorm(dim)]
    return _normflows(steps, dim)


def normflows_glow(shape: tuple[int, ...]) -> nn.Module:
    """Two levels of four GlowBlocks, as in its tutorial."""
    channels, height, width = shape
    bases, merges, steps = [], [], []
    for level in range(2):
        wide = channels * 2 ** (3 - level)
        steps.append([*(nf.flows.GlowBlock(wide, 32) for _ in range(4)), nf.flows.Squeeze()])
        size = height // 2 ** (2 - level), width // 2 ** (2 - level)
        bases.append(nf.distributions.DiagGaussian((wide if level == 0 else wide // 2, *size)))
        if level:
            merges.append(nf.flows.Merge())
    return nf.MultiscaleFlow(bases, steps, merges)


MODELS: dict[str, Callable[[tuple[int, ...]], nn.Module]] = {
    "nflows NSF": nflows_nsf,
    "nflows RealNVP": nflows_realnvp,
    "nflows MAF": nflows_maf,
    "normflows NSF, coupled": normflows_nsf,
    "normflows NSF, autoregressive": normflows_autoregressive_nsf,
    "normflows RealNVP": normflows_realnvp,
    "zuko NSF": lambda shape: zuko.flows.NSF(shape[0], transforms=5, hidden_features=(50, 50)),
    "zuko MAF": lambda shape: zuko.flows.MAF(shape[0], transforms=5, hidden_features=(64, 64)),
}
SIZES = [(name, dim) for dim in (2, 64) for name in ("nflows NSF", "nflows RealNVP", "nflows MAF")]
IMAGE_MODELS: dict[str, Callable[[tuple[int, ...]], nn.Module]] = {
    "nflows Glow": lambda shape: build("glow", shape, levels=2, blocks=4, hidden=32),
    "normflows Glow": normflows_glow,
}
SCORED: dict[str, Callable[[Settings], tuple[nn.Module, Tensor]]] = {
    "RealNVP of nflows, D = 10": lambda settings: (nflows_realnvp((10,)), settings.data(ROWS, 10)),
    "Glow of ten blocks, D = 2": lambda settings: (build("glow", (2,)), settings.data(500, 2)),
    "fc, D = 784": lambda settings: (build("fc", (784,)), settings.data(100, 784)),
}
