"""FullLinear, FullConv2d and SmoothLeakyReLU as nflows Transforms, with and without the wrapper."""

import copy

import pytest
import torch
from nflows import distributions, flows, transforms

import ebflow_plugin as ebf
from ebflow_nflows import FullConv2d, FullLinear, SmoothLeakyReLU
from ebflow_plugin import testing
from ebflow_plugin.adapting.rules import REGISTERED

CLOSED = "second derivatives in closed form"


def vectors():
    return FullLinear(5, init="orthogonal"), (5,)


def images():
    return FullConv2d(2, kernel_size=3, init="orthogonal"), (2, 4, 4)


def strided():
    return FullConv2d(1, kernel_size=4, stride=2, init="orthogonal"), (1, 6, 6)


def activation():
    return SmoothLeakyReLU(0.3), (5,)


def residual():
    return SmoothLeakyReLU(0.3, residual=True), (2, 3, 3)


LAYERS = [vectors, images, strided, activation, residual]


def flow_of(make, plain=True):
    torch.manual_seed(0)
    layer, shape = make()
    out = layer.output_shape(shape) if hasattr(layer, "output_shape") else shape
    flow = flows.Flow(layer, distributions.StandardNormal(out)).double()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return flow, torch.randn(3, *shape, dtype=torch.float64)


@pytest.mark.parametrize("make", LAYERS)
def test_a_plain_nflows_flow_takes_them(make):
    flow, x = flow_of(make)
    assert isinstance(flow._transform, transforms.Transform)
    outputs, log_det = flow._transform(x)
    assert log_det.shape == (3,)
    for row in range(3):
        jacobian = torch.autograd.functional.jacobian(lambda v: flow._transform(v)[0].flatten(), x[row : row + 1])
        expected = torch.linalg.slogdet(jacobian.reshape(x[0].numel(), -1))[1]
        assert torch.allclose(log_det[row], expected)
    back, minus = flow._transform.inverse(outputs)
    assert torch.allclose(back, x, atol=1e-9)
    assert torch.allclose(minus, -log_det)
    (-flow.log_prob(x.requires_grad_()).mean()).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in flow.parameters())
    assert flow.float().sample(2).shape == (2, *x.shape[1:])


@pytest.mark.parametrize("make", LAYERS)
def test_the_contract_holds(make):
    flow, x = flow_of(make)
    testing.check_flow(flow, x)
    assert ebf.wrap(flow).sample(2).shape == (2, *x.shape[1:])


@pytest.mark.parametrize("make", LAYERS)
def test_inside_of_an_inverse(make):
    layer, shape = make()
    if make is strided:
        pytest.skip("the inverse of a strided layer takes another shape")
    flow = flows.Flow(transforms.InverseTransform(layer), distributions.StandardNormal(shape)).double()
    x = torch.randn(3, *shape, dtype=torch.float64)
    testing.check_invariant(flow, x)
    testing.check_inverse(flow, x)


def test_copies_keep_no_factorisation():
    flow, x = flow_of(vectors)
    with torch.no_grad():
        flow._transform.inverse(x)
        copied = copy.deepcopy(flow)
        copied._transform.weight.mul_(2.0)
        assert not torch.allclose(copied._transform.inverse(x)[0], flow._transform.inverse(x)[0])


def test_the_report_counts_their_determinants():
    layers = [FullLinear(5), SmoothLeakyReLU(), FullLinear(5), FullLinear(5)]
    flow = flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([5]))
    report = ebf.describe(flow)
    assert report.summary == "3 of 4 steps linear; energy() skips 3 determinants of 5 × 5; " + CLOSED
    assert report.rows[0].log_det_cost == "5 × 5 determinant"
    conv = flows.Flow(FullConv2d(2, kernel_size=3), distributions.StandardNormal([2, 4, 4]))
    assert ebf.describe(conv).summary == "1 of 1 steps linear; energy() skips 1 determinant of 32 × 32; " + CLOSED


@pytest.mark.parametrize(
    ("options", "shape", "said", "size"),
    [
        ({"kernel_size": 1}, (4, 14, 14), "1 determinant of 4 × 4", 4),
        ({"kernel_size": 3}, (4, 14, 14), "1 banded determinant of 784 × 784", 784),
        ({"kernel_size": 3, "padding_mode": "circular"}, (4, 5, 5), "25 determinants of 4 × 4", 4),
        ({"kernel_size": 1, "groups": 2}, (4, 5, 5), "2 determinants of 2 × 2", 2),
        ({"kernel_size": 3}, (4, 3, 3), "1 determinant of 36 × 36", 36),
    ],
)
def test_the_determinants_of_convolutions_are_those_that_are_computed(options, shape, said, size, monkeypatch):
    layer = FullConv2d(shape[0], **options)
    flow = flows.Flow(layer, distributions.StandardNormal(shape))
    assert f"energy() skips {said};" in ebf.describe(flow).summary
    seen = []
    slogdet = torch.linalg.slogdet
    monkeypatch.setattr(torch.linalg, "slogdet", lambda matrix: seen.append(matrix.shape[-1]) or slogdet(matrix))
    layer.log_det(shape)
    assert "banded" in said or set(seen) == {size}


def test_the_report_never_denies_a_determinant_that_a_row_names():
    class Unseen(transforms.Transform):
        def forward(self, inputs, context=None):
            return inputs, inputs.new_zeros(len(inputs))

    layers = transforms.CompositeTransform([Unseen(), FullConv2d(2, kernel_size=3)])
    report = ebf.describe(flows.Flow(layers, distributions.StandardNormal([2, 4, 4])))
    assert report.rows[1].log_det_cost == "D × D determinant"
    assert "energy() skips 1 determinant of D × D;" in report.summary
    ebf.register_linear(Unseen, cost="256 × 256 determinant")
    try:
        report = ebf.describe(flows.Flow(Unseen(), distributions.StandardNormal([256])))
        assert "no dense determinant" not in report.summary
    finally:
        REGISTERED.pop(Unseen, None)
