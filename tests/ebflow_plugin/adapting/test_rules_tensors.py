"""Classes registered as linear whose tensors are not their own parameters."""

import math

import pytest
import torch
from nflows import distributions, flows, transforms
from torch import nn
from torch.nn import functional as F

import ebflow_plugin as ebf
from ebflow_nflows import FullLinear
from ebflow_plugin.adapting.rules import REGISTERED
from nflows_small import flow_of
from randomness import randn

D = 3


class Base(transforms.Transform):
    def matrix(self, inputs):
        raise NotImplementedError

    def forward(self, inputs, context=None):
        weight = self.matrix(inputs)
        return F.linear(inputs, weight), torch.linalg.slogdet(weight)[1].expand(len(inputs))

    def inverse(self, inputs, context=None):
        weight = self.matrix(inputs)
        log_det = -torch.linalg.slogdet(weight)[1].expand(len(inputs))
        return inputs @ torch.linalg.inv(weight).T, log_det


class Borrowed(Base):
    """The transpose of another layer's weight, which it does not hold as a parameter."""

    def __init__(self, other):
        super().__init__()
        self.other = [other]

    def matrix(self, inputs):
        return self.other[0].weight.T


class Scaled(Base):
    """A plain number."""

    def __init__(self, factor=2.0):
        super().__init__()
        self.factor = factor
        self.register_buffer("count", torch.zeros(()))

    def matrix(self, inputs):
        return self.factor * torch.eye(D, dtype=inputs.dtype)


class Whitening(Base):
    """Buffers alone."""

    def __init__(self):
        super().__init__()
        self.register_buffer("map", torch.eye(D) + 0.3 * torch.ones(D, D))

    def matrix(self, inputs):
        return self.map


class Attribute(Base):
    """A plain tensor."""

    def __init__(self):
        super().__init__()
        self.map = torch.eye(D, dtype=torch.float64) + 0.3

    def matrix(self, inputs):
        return self.map


@pytest.fixture(autouse=True)
def taught():
    for cls in (Borrowed, Scaled, Whitening, Attribute):
        ebf.register_linear(cls)
    yield
    for cls in (Borrowed, Scaled, Whitening, Attribute):
        REGISTERED.pop(cls, None)


def random_flow(*layers):
    flow = flow_of(*layers, shape=(D,))
    for parameter in flow.parameters():
        nn.init.normal_(parameter)
    return flow


@pytest.fixture
def x():
    return randn(5, D)


def borrowed():
    layer = FullLinear(D)
    return random_flow(layer, transforms.Tanh(), Borrowed(layer))


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize(
    "make",
    [borrowed, lambda: random_flow(Scaled()), lambda: random_flow(Whitening()), lambda: random_flow(Attribute())],
)
def test_log_prob_is_the_flows_own(make, inverted, x):
    flow = make()
    if inverted:
        layers = flow._transform._transforms
        layers[-1] = transforms.InverseTransform(layers[-1])
    model = ebf.wrap(flow, strict=True)
    with torch.no_grad():
        assert torch.allclose(model.log_prob(x), flow.log_prob(x), rtol=1e-10)
        assert model.log_z().dtype == torch.float64
    assert ebf.verify(model, x)


def assert_trained(model, x, weight):
    """Our density and its gradient in a weight are the flow's own."""
    with torch.no_grad():
        assert torch.allclose(model.log_prob(x), model.flow.log_prob(x))
    (ours,) = torch.autograd.grad(model.log_prob(x).sum(), weight, retain_graph=True)
    (theirs,) = torch.autograd.grad(model.flow.log_prob(x).sum(), weight)
    assert torch.allclose(ours, theirs)


def test_a_borrowed_weight_is_never_stale_and_gets_its_gradient(x):
    flow = borrowed()
    model = ebf.wrap(flow)
    with torch.no_grad():
        model.log_prob(x)
        flow._transform._transforms[0].weight.mul_(0.5)
    assert_trained(model, x, flow._transform._transforms[0].weight)


def test_a_borrowed_weight_alone_gets_its_gradient(x):
    """No linear step has a parameter here."""
    layer = nn.Linear(D, D).double()
    flow = random_flow(Borrowed(layer))
    flow.outside = layer
    assert_trained(ebf.wrap(flow), x, layer.weight)


def test_a_plain_number_is_never_stale(x):
    flow = random_flow(Scaled(), transforms.LULinear(D))
    model = ebf.wrap(flow)
    with torch.no_grad():
        model.log_prob(x)
        flow._transform._transforms[0].factor = 5.0
        assert torch.allclose(model.log_prob(x), flow.log_prob(x))


def test_a_weight_that_became_a_plain_tensor_is_never_stale(x):
    flow = random_flow(FullLinear(D))
    model, layer = ebf.wrap(flow), flow._transform._transforms[0]
    with torch.no_grad():
        model.log_prob(x)
    weight = nn.Parameter(layer.weight.detach().clone())
    del layer.weight
    for factor in (2.0, 3.0):
        layer.weight = factor * weight
        assert_trained(model, x, weight)


def test_the_numbers_of_the_preprocessing_are_never_stale():
    rescale = ebf.Rescale(0.0, 2.0)
    model = ebf.wrap(random_flow(transforms.LULinear(D)), preprocess=rescale)
    with torch.no_grad():
        before = model.log_z()
        rescale.scale = 6.0
        assert torch.allclose(model.log_z(), before - D * math.log(3.0))


def test_verify_in_float32_and_a_fixed_whitening_as_preprocessing():
    flow = flow_of(Whitening, transforms.LULinear(D), shape=(D,)).float()
    assert ebf.verify(flow, torch.randn(5, D))
    assert ebf.verify(flows.Flow(Whitening(), distributions.StandardNormal([D])), torch.randn(5, D))
