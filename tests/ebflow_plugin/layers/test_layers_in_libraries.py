"""The layers as those of each library, in its own flows, with and without the wrapper."""

import normflows as nf
import pytest
import torch
from nflows.transforms import InverseTransform, Transform
from zuko.lazy import LazyTransform

import ebflow_nflows
import ebflow_normflows
import ebflow_plugin as ebf
import ebflow_zuko
from case import perturb
from chains import LIBRARIES, flow_in
from ebflow_plugin import testing
from randomness import randn

LAYERS = {
    "vectors": (lambda library: library.FullLinear(5, init="orthogonal"), (5,)),
    "images": (lambda library: library.FullConv2d(2, kernel_size=3, init="orthogonal"), (2, 4, 4)),
    "strided": (lambda library: library.FullConv2d(1, kernel_size=4, stride=2, init="orthogonal"), (1, 6, 6)),
    "activation": (lambda library: library.SmoothLeakyReLU(0.3), (5,)),
    "residual": (lambda library: library.SmoothLeakyReLU(0.3, residual=True), (2, 3, 3)),
    "tails": (lambda library: library.SinhArcsinh(3), (3,)),
    "tails of channels": (lambda library: library.SinhArcsinh(3, dim=-3), (3, 2, 2)),
}
KINDS = {ebflow_nflows: Transform, ebflow_normflows: nf.flows.Flow, ebflow_zuko: LazyTransform}
CLOSED = "second derivatives in closed form"

in_each_library = pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.__name__)
every_layer = pytest.mark.parametrize("name", LAYERS)


def flow_with(library, name):
    """The layer, a flow of it alone, and data."""
    make, shape = LAYERS[name]
    layer = make(library)
    perturb(layer, 0.1)
    latent = layer.output_shape(shape) if hasattr(layer, "output_shape") else shape
    return layer, flow_in(library, [layer], latent), randn(3, *shape)


def directions(library, layer):
    """From data to noise and back, with the log-dets, as the library calls them."""
    if library is ebflow_nflows:
        return layer.forward, layer.inverse
    if library is ebflow_normflows:
        return layer.inverse, layer.forward
    return layer().call_and_ladj, layer().inv.call_and_ladj


def drawn(library, flow):
    if library is ebflow_zuko:
        samples, log_prob = flow().rsample_and_log_prob((2,))
        torch.testing.assert_close(log_prob, flow().log_prob(samples))
        assert flow().event_shape == samples.shape[1:]
        return samples
    return flow.float().sample(2) if library is ebflow_nflows else flow.sample(2)[0]


def summed(log_det):
    return log_det.flatten(1).sum(1) if log_det.dim() > 1 else log_det  # zuko has one for each element


@in_each_library
@every_layer
def test_a_plain_flow_takes_them(library, name):
    layer, flow, x = flow_with(library, name)
    assert isinstance(layer, KINDS[library])
    encode, decode = directions(library, layer)
    z, log_det = encode(x)
    jacobians = [torch.autograd.functional.jacobian(lambda v: encode(v)[0].flatten(), one[None]) for one in x]
    expected = torch.stack([torch.linalg.slogdet(one.reshape(x[0].numel(), -1))[1] for one in jacobians])
    torch.testing.assert_close(summed(log_det), expected)
    back, minus = decode(z)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-9)
    torch.testing.assert_close(minus, -log_det)
    own = ebf.wrap(flow).adapter.own_log_prob(flow, x, None)
    normal = torch.distributions.Normal(0.0, 1.0)
    torch.testing.assert_close(own, normal.log_prob(z).flatten(1).sum(1) + expected)
    assert drawn(library, flow).shape == (2, *x.shape[1:])


@in_each_library
@every_layer
def test_the_contract_holds(library, name):
    _, flow, x = flow_with(library, name)
    testing.check_flow(flow, x)
    model = ebf.wrap(flow)
    assert model.sample(2).shape == (2, *x.shape[1:])
    assert all(check.passed is not False for check in ebf.verify(flow, x))
    for objective in ("ssm", "ml"):
        loss, parameters = ebf.make_objective(objective, model)(x), list(flow.parameters())
        gradients = torch.autograd.grad(loss, parameters) if parameters else ()
        assert all(bool(torch.isfinite(g).all()) and bool((g != 0).any()) for g in gradients)


@in_each_library
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "strided"])  # whose inverse takes another shape
def test_inside_of_an_inverse(library, name):
    layer, _, x = flow_with(library, name)
    turned = {ebflow_nflows: InverseTransform, ebflow_normflows: nf.flows.Reverse, ebflow_zuko: lambda layer: layer.inv}
    flow = flow_in(library, [turned[library](layer)], x.shape[1:])
    testing.check_invariant(flow, x)
    testing.check_inverse(flow, x)


@in_each_library
def test_the_report_counts_their_determinants(library):
    layers = [library.FullLinear(5), library.SmoothLeakyReLU(), library.FullLinear(5), library.FullLinear(5)]
    report = ebf.describe(flow_in(library, layers, (5,)))
    assert report.summary == f"3 of 4 steps linear; energy() skips 3 determinants of 5 × 5; {CLOSED}"
    assert report.rows[0].log_det_cost == "5 × 5 determinant"
    images = flow_in(library, [library.FullConv2d(2, kernel_size=3)], (2, 4, 4))
    assert ebf.describe(images).summary == f"1 of 1 steps linear; energy() skips 1 determinant of 32 × 32; {CLOSED}"
