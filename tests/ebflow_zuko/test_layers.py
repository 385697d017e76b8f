"""FullLinear, FullConv2d and SmoothLeakyReLU as zuko LazyTransforms, with and without the wrapper."""

import pytest
import torch
from zuko.lazy import Flow, LazyTransform

import ebflow_plugin as ebf
from case import perturb
from ebflow_plugin import testing
from ebflow_zuko import FullConv2d, FullLinear, SmoothLeakyReLU
from zuko_parts import normal

LAYERS = {
    "vectors": (lambda: FullLinear(5, init="orthogonal"), (5,)),
    "rows of a matrix": (lambda: FullLinear(3, init="orthogonal"), (2, 3)),
    "images": (lambda: FullConv2d(2, kernel_size=3, init="orthogonal"), (2, 4, 4)),
    "strided": (lambda: FullConv2d(1, kernel_size=4, stride=2, init="orthogonal"), (1, 6, 6)),
    "activation": (lambda: SmoothLeakyReLU(0.3), (5,)),
    "residual": (lambda: SmoothLeakyReLU(0.3, residual=True), (2, 3, 3)),
}
layers = pytest.mark.parametrize("name", LAYERS)


def flow_of(name):
    make, shape = LAYERS[name]
    layer = make()
    latent = layer.output_shape(shape) if hasattr(layer, "output_shape") else shape
    flow = Flow([layer], normal(*latent)).double()
    perturb(flow, 0.1)
    return flow, torch.randn(3, *shape, dtype=torch.float64)


@layers
def test_a_plain_zuko_flow_takes_them(name):
    flow, x = flow_of(name)
    assert isinstance(flow.transform.transforms[0], LazyTransform)
    distribution = flow()
    assert distribution.event_shape == x.shape[1:]
    z, log_det = distribution.transform.call_and_ladj(x)
    whole = log_det.flatten(1).sum(1) if log_det.dim() > 1 else log_det
    for row in range(3):
        jacobian = torch.autograd.functional.jacobian(lambda v: distribution.transform(v).flatten(), x[row : row + 1])
        expected = torch.linalg.slogdet(jacobian.reshape(x[0].numel(), -1))[1]
        assert torch.allclose(whole[row], expected)
    back, minus = distribution.transform.inv.call_and_ladj(z)
    assert torch.allclose(back, x, atol=1e-9)
    assert torch.allclose(minus, -log_det)
    assert torch.allclose(distribution.log_prob(x), distribution.base.log_prob(z) + whole)
    (-distribution.log_prob(x.requires_grad_()).mean()).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in flow.parameters())
    samples, log_prob = flow().rsample_and_log_prob((2, 4))
    assert samples.shape == (2, 4, *x.shape[1:])
    assert torch.allclose(log_prob, flow().log_prob(samples))


@layers
def test_the_contract_holds(name):
    flow, x = flow_of(name)
    testing.check_flow(flow, x)
    assert ebf.wrap(flow).sample(2).shape == (2, *x.shape[1:])


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "strided"])
def test_inside_of_an_inverse(name):
    make, shape = LAYERS[name]
    flow = Flow([make().inv], normal(*shape)).double()
    x = torch.randn(3, *shape, dtype=torch.float64)
    testing.check_invariant(flow, x)
    testing.check_inverse(flow, x)


def test_a_flow_with_a_context_takes_them():
    flow, x = flow_of("vectors")
    context = torch.randn(3, 2, dtype=torch.float64)
    assert torch.allclose(ebf.wrap(flow).log_prob(x, context), flow(context).log_prob(x))


def test_the_report_counts_their_determinants():
    flow = Flow([FullLinear(5), SmoothLeakyReLU(), FullLinear(5)], normal(5))
    closed = "second derivatives in closed form"
    assert ebf.describe(flow).summary == f"2 of 3 steps linear; energy() skips 2 determinants of 5 × 5; {closed}"
    conv = Flow(FullConv2d(2, kernel_size=3), normal(2, 4, 4))
    assert ebf.describe(conv).summary == f"1 of 1 steps linear; energy() skips 1 determinant of 32 × 32; {closed}"
