"""Random flows of each library, for property tests: a spec is drawn by hypothesis, and built with a seed.

A spec is a tree: a leaf names a layer, ``("inverse", spec)`` runs one backwards, ``("compose", [specs])`` chains them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import normflows as nf
import torch
from hypothesis import strategies as st
from nflows import distributions, flows, transforms
from normflows.flows.mixing import _LULinear
from torch import nn
from zuko import transforms as T
from zuko.lazy import Flow, LazyComposedTransform, LazyInverse, UnconditionalTransform

import ebflow_nflows
import ebflow_normflows
import ebflow_zuko
import nflows_parts
from case import perturb, seeded
from randomness import rng
from zuko_parts import autoregressive, coupling, elementwise, normal

D, SHAPE = 4, (4, 4, 4)
net, conv_net = nflows_parts.net(), nflows_parts.conv_net()


def mask(size):
    return torch.arange(size) % 2


@dataclass(frozen=True)
class Library:
    """How one library builds what a spec says."""

    name: str
    vectors: dict[str, Callable[[], nn.Module]]
    images: dict[str, Callable[[], nn.Module]]
    inverse: Callable[[nn.Module], nn.Module]
    compose: Callable[[list[nn.Module]], nn.Module]
    flow: Callable[[nn.Module, tuple[int, ...]], nn.Module]


def nflows_multiscale(shape, make):
    composite = transforms.MultiscaleCompositeTransform(2)
    hidden = composite.add_transform(make(shape[0]), shape)
    composite.add_transform(make(hidden[0]), hidden)
    return composite


NFLOWS = Library(
    name="nflows",
    vectors={
        "lu": lambda: transforms.LULinear(D, identity_init=False),
        "naive": lambda: transforms.NaiveLinear(D, orthogonal_initialization=False),
        "qr": lambda: transforms.QRLinear(D, num_householder=2),
        "svd": lambda: transforms.SVDLinear(D, num_householder=2),
        "householder": lambda: transforms.HouseholderSequence(D, 3),
        "full": lambda: ebflow_nflows.FullLinear(D, init="orthogonal"),
        "permutation": lambda: transforms.RandomPermutation(D),
        "actnorm": lambda: transforms.ActNorm(D),
        "affine": lambda: transforms.PointwiseAffineTransform(0.3, 1.7),
        "smooth": lambda: ebflow_nflows.SmoothLeakyReLU(0.4),
        "residual smooth": lambda: ebflow_nflows.SmoothLeakyReLU(0.4, residual=True),
        "leaky": lambda: transforms.LeakyReLU(0.5),
        "coupling": lambda: transforms.AffineCouplingTransform(mask(D), net),
        "additive": lambda: transforms.AdditiveCouplingTransform(mask(D), net),
        "maf": lambda: transforms.MaskedAffineAutoregressiveTransform(D, 6, num_blocks=1, activation=torch.tanh),
        "spline": lambda: transforms.PiecewiseRationalQuadraticCDF([D], tails="linear", tail_bound=3.0),
    },
    images={
        "1x1": lambda: transforms.OneByOneConvolution(SHAPE[0], identity_init=False),
        "conv": lambda: ebflow_nflows.FullConv2d(SHAPE[0], kernel_size=3, init="orthogonal"),
        "circular": lambda: ebflow_nflows.FullConv2d(SHAPE[0], kernel_size=3, padding_mode="circular"),
        "actnorm": lambda: transforms.ActNorm(SHAPE[0]),
        "permutation": lambda: transforms.ReversePermutation(SHAPE[0]),
        "squeeze": lambda: transforms.CompositeTransform(
            [transforms.SqueezeTransform(), transforms.OneByOneConvolution(4 * SHAPE[0]), Unsqueeze()]
        ),
        "coupling": lambda: transforms.AffineCouplingTransform(mask(SHAPE[0]), conv_net),
        "smooth": lambda: ebflow_nflows.SmoothLeakyReLU(0.5),
    },
    inverse=transforms.InverseTransform,
    compose=transforms.CompositeTransform,
    flow=lambda transform, shape: flows.Flow(transform, distributions.StandardNormal(shape)),
)


def Unsqueeze():
    return transforms.InverseTransform(transforms.SqueezeTransform())


def coupling_block(inputs, outputs):
    return nf.flows.AffineCouplingBlock(nf.nets.MLP([inputs, 6, outputs], init_zeros=False), scale_map="sigmoid")


NORMFLOWS = Library(
    name="normflows",
    vectors={
        "lu": lambda: nf.flows.LULinearPermute(D, identity_init=False),
        "inner lu": lambda: _LULinear(D, identity_init=False),
        "affine": lambda: nf.flows.InvertibleAffine(D, use_lu=False),
        "lu affine": lambda: nf.flows.InvertibleAffine(D),
        "full": lambda: ebflow_normflows.FullLinear(D, init="orthogonal"),
        "permute": lambda: nf.flows.Permute(D),
        "swap": lambda: nf.flows.Permute(D, mode="swap"),
        "const": lambda: nf.flows.AffineConstFlow((D,)),
        "actnorm": lambda: nf.flows.ActNorm((D,)),
        "smooth": lambda: ebflow_normflows.SmoothLeakyReLU(0.4),
        "coupling": lambda: coupling_block(D // 2, D),
        "masked": lambda: nf.flows.MaskedAffineFlow(
            mask(D).float(), nf.nets.MLP([D, 6, D]), nf.nets.MLP([D, 6, D], init_zeros=False)
        ),
        "spline": lambda: nf.flows.CoupledRationalQuadraticSpline(D, 1, 6),
    },
    images={
        "1x1": lambda: nf.flows.Invertible1x1Conv(SHAPE[0]),
        "lu 1x1": lambda: nf.flows.Invertible1x1Conv(SHAPE[0], use_lu=True),
        "conv": lambda: ebflow_normflows.FullConv2d(SHAPE[0], kernel_size=3, init="orthogonal"),
        "actnorm": lambda: nf.flows.ActNorm((SHAPE[0], 1, 1)),
        "permute": lambda: nf.flows.Permute(SHAPE[0]),
        "glow": lambda: nf.flows.GlowBlock(SHAPE[0], 4, init_zeros=False),
        "squeeze": lambda: nf.flows.Composite(
            [nf.flows.Reverse(nf.flows.Squeeze()), nf.flows.Invertible1x1Conv(4 * SHAPE[0]), nf.flows.Squeeze()]
        ),
        "smooth": lambda: ebflow_normflows.SmoothLeakyReLU(0.5),
    },
    inverse=nf.flows.Reverse,
    compose=nf.flows.Composite,
    flow=lambda transform, shape: nf.NormalizingFlow(
        nf.distributions.DiagGaussian(shape, trainable=False), [transform]
    ),
)


def fixed(maker, *tensors, **options):
    return lambda: UnconditionalTransform(maker, *(make() for make in tensors), **options)


def entries(*shape, scale=0.5):
    return lambda: scale * torch.randn(shape)


def near_identity():
    return torch.eye(D) + 0.2 * torch.randn(D, D)


ZUKO_ANYWHERE = {  # on the last dimension of vectors and images
    "permutation": fixed(T.PermutationTransform, lambda: torch.randperm(D), buffer=True),
    "rotation": fixed(T.RotationTransform, entries(D, D)),
    "lu": fixed(T.LULinearTransform, near_identity),
    "full": lambda: ebflow_zuko.FullLinear(D, init="orthogonal"),
    "shift": fixed(T.AdditiveTransform, entries(D)),
    "affine": fixed(T.MonotonicAffineTransform, entries(D), entries(D)),
    "numbers": lambda: UnconditionalTransform(T.AffineTransform, 0.3, -1.7),
    "smooth": lambda: ebflow_zuko.SmoothLeakyReLU(0.4),
    "spline": fixed(T.MonotonicRQSTransform, entries(D, 5), entries(D, 5), entries(D, 4)),
}
ZUKO = Library(
    name="zuko",
    vectors={
        **ZUKO_ANYWHERE,
        "coupling": coupling(),
        "additive": coupling(univariate=T.AdditiveTransform, shapes=[()]),
        "maf": autoregressive(),
        "elementwise": elementwise(),
    },
    images={
        **ZUKO_ANYWHERE,
        "conv": lambda: ebflow_zuko.FullConv2d(SHAPE[0], kernel_size=3, init="orthogonal"),
        "circular": lambda: ebflow_zuko.FullConv2d(SHAPE[0], kernel_size=3, padding_mode="circular"),
    },
    inverse=LazyInverse,
    compose=lambda parts: LazyComposedTransform(*parts),
    flow=lambda transform, shape: Flow(transform, normal(*shape)),
)

LIBRARIES = (NFLOWS, NORMFLOWS, ZUKO)


def specs(library: Library, images: bool):
    leaves = st.sampled_from(sorted(library.images if images else library.vectors))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(st.just("inverse"), inner),
            st.tuples(st.just("compose"), st.lists(inner, min_size=1, max_size=3)),
        ),
        max_leaves=5,
    )


def build(library: Library, images: bool, spec, seed: int) -> nn.Module:
    """The flow of a spec: float64, in eval mode, every parameter moved a little."""
    layers = library.images if images else library.vectors

    def make(spec):
        if isinstance(spec, str):
            return layers[spec]()
        kind, inner = spec
        return library.inverse(make(inner)) if kind == "inverse" else library.compose([make(part) for part in inner])

    with seeded(seed):
        transform = make(spec)
        flow = library.flow(transform, SHAPE if images else (D,)).double().eval()
        perturb(flow, 0.05)
        for module in flow.modules():
            if isinstance(getattr(module, "data_dep_init_done", None), torch.Tensor):
                module.data_dep_init_done = torch.ones((), dtype=torch.float64)
    return flow


def data(images: bool, batch: int, seed: int) -> torch.Tensor:
    generator = rng(seed)
    return torch.randn(batch, *(SHAPE if images else (D,)), dtype=torch.float64, generator=generator)
