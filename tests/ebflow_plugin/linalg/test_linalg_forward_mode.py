"""Derivatives in the weights of linear layers by forward mode and by torch.func, against those by reverse mode."""

from functools import partial

import normflows
import pytest
import torch
from nflows import transforms
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jvp, vmap

import ebflow_nflows
import ebflow_normflows
import ebflow_plugin as ebf
from chains import flow_in
from randomness import rng

WIDE = torch.float64


full_conv = partial(ebflow_nflows.FullConv2d, kernel_size=3, init="normal")
FLOWS = {
    "FullLinear": (ebflow_nflows, lambda: ebflow_nflows.FullLinear(5, init="normal"), (5,)),
    "NaiveLinear": (ebflow_nflows, lambda: transforms.NaiveLinear(4, orthogonal_initialization=False), (4,)),
    "conv, a band": (ebflow_nflows, lambda: full_conv(2), (2, 12, 12)),
    "conv, dense": (ebflow_nflows, lambda: full_conv(1), (1, 4, 4)),
    "conv, fourier": (ebflow_nflows, lambda: full_conv(2, padding_mode="circular"), (2, 4, 4)),
    "InvertibleAffine": (ebflow_normflows, lambda: normflows.flows.InvertibleAffine(3, use_lu=False), (3,)),
    "FullLinear of normflows": (ebflow_normflows, lambda: ebflow_normflows.FullLinear(3, init="normal"), (3,)),
}


class LogProb(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner.log_prob(x)


def function_of_weights(name, wrapped):
    torch.manual_seed(0)
    library, layer, shape = FLOWS[name]
    flow = flow_in(library, [layer()], shape)
    module = LogProb(ebf.wrap(flow) if wrapped else flow)
    x = torch.randn(3, *shape, dtype=WIDE)
    weights = {key: p.detach() for key, p in module.named_parameters() if p.dim() >= 2 and "q0" not in key}
    assert weights
    tangents = {key: torch.randn_like(p) for key, p in weights.items()}
    named = dict(module.named_parameters())
    slopes = torch.autograd.grad(module(x).sum(), [named[key] for key in weights])
    expected = sum((slope * tangents[key]).sum() for key, slope in zip(weights, slopes, strict=True))
    with torch.no_grad():
        module(x)  # so that something is kept
    return (lambda given: functional_call(module, given, (x,)).sum()), weights, tangents, expected


def along(gradient, tangents):
    return sum((gradient[key] * tangents[key]).sum() for key in tangents)


def by_duals(function, weights, tangents):
    with forward_ad.dual_level():
        duals = {key: forward_ad.make_dual(weights[key], tangents[key]) for key in weights}
        return forward_ad.unpack_dual(function(duals)).tangent


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("name", FLOWS)
def test_forward_mode_agrees_with_reverse_mode(name, wrapped):
    function, weights, tangents, expected = function_of_weights(name, wrapped)
    torch.testing.assert_close(jvp(function, (weights,), (tangents,))[1], expected)
    torch.testing.assert_close(by_duals(function, weights, tangents), expected)
    with torch.no_grad():  # which is about reverse mode alone
        torch.testing.assert_close(by_duals(function, weights, tangents), expected)
    torch.testing.assert_close(along(grad(function)(weights), tangents), expected)
    if sum(weight.numel() for weight in weights.values()) < 40:
        torch.testing.assert_close(along(jacfwd(function)(weights), tangents), expected)


@pytest.mark.parametrize("name", FLOWS)
def test_second_derivatives_agree_with_differences(name):
    function, weights, tangents, _ = function_of_weights(name, True)

    def slope(given):
        return jvp(function, (given,), (tangents,))[1]

    step = 1e-5
    ends = [slope({key: weights[key] + sign * step * tangents[key] for key in weights}) for sign in (1, -1)]
    expected = (ends[0] - ends[1]) / (2 * step)
    torch.testing.assert_close(jvp(slope, (weights,), (tangents,))[1], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(along(grad(slope)(weights), tangents), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FLOWS)
def test_many_weights_at_once(name):
    function, weights, _, _ = function_of_weights(name, True)
    factors = torch.tensor([1.0, 1.5, 0.5], dtype=WIDE)
    many = vmap(lambda factor: function({key: weight * factor for key, weight in weights.items()}))(factors)
    each = [function({key: weight * factor for key, weight in weights.items()}) for factor in factors]
    torch.testing.assert_close(many, torch.stack(each))


def test_an_inverse_in_forward_mode():
    layer = ebflow_nflows.FullLinear(4, init="normal", dtype=WIDE, generator=rng(0))
    weight, tangent = layer.weight.detach(), torch.randn(4, 4, dtype=WIDE)
    y = torch.randn(2, 4, dtype=WIDE)

    class Inverse(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, y):
            return self.layer.invert(y)

    module = Inverse()
    found = jvp(lambda w: functional_call(module, {"layer.weight": w}, (y,)), (weight,), (tangent,))[1]
    inverse = torch.linalg.inv(weight)
    torch.testing.assert_close(found, -(y @ inverse.mT) @ tangent.mT @ inverse.mT)
