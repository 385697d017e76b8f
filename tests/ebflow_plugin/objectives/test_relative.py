"""The relative gradient: what `backward` leaves in the weights, against the gradient of ML times WᵀW."""

from functools import partial

import pytest
import torch
from nflows.distributions.normal import StandardNormal
from nflows.flows.base import Flow
from nflows.transforms import (
    ActNorm,
    InverseTransform,
    LULinear,
    NaiveLinear,
    PointwiseAffineTransform,
    RandomPermutation,
)

import ebflow_plugin as ebf
import nflows_small
from ebflow_nflows import FullConv2d, FullLinear, SmoothLeakyReLU
from ebflow_plugin import testing
from ebflow_plugin.objectives import ML
from randomness import randn

flow_of = partial(nflows_small.flow_of, shape=(5,))


def full(size=5):
    layer = FullLinear(size, init="orthogonal")
    with torch.no_grad():
        layer.weight.add_(0.3 * torch.randn(size, size))
        layer.bias.normal_()
    return layer


def naive():
    return NaiveLinear(5, orthogonal_initialization=False)


@pytest.fixture
def x():
    return randn(7, 5)


def gradients(loss, x):
    loss.zero_grad()
    loss(x).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in loss.model.flow.named_parameters()}


def twice():
    layer = full()
    return [layer, SmoothLeakyReLU(0.3), layer]


FLOWS = {
    "all kinds": (
        lambda: [full(), SmoothLeakyReLU(0.3), RandomPermutation(5), LULinear(5), full(), ActNorm(5)],
        (5,),
    ),
    "a layer at two places": (twice, (5,)),
    "events with several rows": (lambda: [full()], (3, 5)),
    "without bias": (lambda: [FullLinear(5, bias=False, init="orthogonal"), SmoothLeakyReLU(0.3)], (5,)),
}


@pytest.mark.parametrize("name", FLOWS)
def test_weights_get_the_relative_gradient_and_all_others_that_of_ml(name):
    make, shape = FLOWS[name]
    torch.manual_seed(0)
    model, x = ebf.wrap(flow_of(*make(), shape=shape)), randn(7, *shape)
    model.initialize(x)
    relative, plain = ML(model, log_det="relative"), ML(model)
    ours, theirs, both = (gradients(loss, x) for loss in (relative, plain, 0.5 * relative + 2.0 * plain))
    weights = {step.module.weight for step in model.plan.steps if isinstance(step.module, FullLinear)}
    assert weights
    for name, parameter in model.flow.named_parameters():
        wanted, weight = theirs[name], parameter.detach()
        if parameter in weights:
            wanted = wanted @ weight.mT @ weight
        torch.testing.assert_close(ours[name], wanted, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(both[name], 0.5 * wanted + 2.0 * theirs[name])


def test_each_sample_has_its_relative_gradient(x):
    layer = full()
    model = ebf.wrap(flow_of(layer, SmoothLeakyReLU(0.3), full()))
    ours, theirs = (
        torch.autograd.grad(ML(model, log_det=log_det).losses(x)[2], layer.weight)[0]
        for log_det in ("relative", "exact")
    )
    weight = layer.weight.detach()
    torch.testing.assert_close(ours, theirs @ weight.mT @ weight)


def test_a_frozen_weight_gets_no_gradient(x):
    layer = full()
    layer.weight.requires_grad_(False)
    model = ebf.wrap(flow_of(full(), layer))
    ML(model, log_det="relative")(x).backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None


def test_no_determinant_is_computed(x):
    model = ebf.wrap(flow_of(full(), SmoothLeakyReLU(0.3), full()))
    with testing.no_factorisation():
        ML(model, log_det="relative")(x).backward()


def test_no_product_of_two_square_matrices():
    """O(B·D²): no operation of the backward pass takes two D × D matrices."""
    size = 40
    model, x = ebf.wrap(flow_of(full(size), shape=(size,))), torch.randn(3, size, dtype=torch.float64)
    loss = ML(model, log_det="relative")

    def look(func, leaves):
        matrices = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.shape == (size, size)]
        assert "mm" not in func._schema.name or len(matrices) < 2, func

    with testing._Watch(look):
        loss(x).backward()
    weight = model.flow._transform._transforms[0].weight
    with pytest.raises(AssertionError, match="mm"), testing._Watch(look):
        weight @ weight


def test_the_value_is_that_of_ml_without_the_dense_determinants(x):
    model = ebf.wrap(flow_of(full(), PointwiseAffineTransform(0.5, 2.0), LULinear(5)))
    dense = torch.linalg.slogdet(model.flow._transform._transforms[0].weight)[1]
    torch.testing.assert_close(ML(model, log_det="relative")(x), ML(model)(x) + dense)


def test_training_finds_a_gaussian():
    mixing = torch.tensor([[1.0, 0.0], [0.8, 0.5]], dtype=torch.float64)
    x = torch.randn(4000, 2, dtype=torch.float64) @ mixing.mT
    model = ebf.wrap(Flow(FullLinear(2), StandardNormal([2])).double())
    loss, optimiser = ML(model, log_det="relative"), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(300):
        optimiser.zero_grad()
        loss(x).backward()
        optimiser.step()
    weight = model.flow._transform.weight.detach()
    torch.testing.assert_close(torch.linalg.inv(weight.mT @ weight), torch.cov(x.mT), atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("transforms", "shape", "message"),
    [
        (lambda: [full(), naive()], (5,), "1 of 2 steps.*_transforms.1.*NaiveLinear"),
        (lambda: [full(), InverseTransform(full())], (5,), "_transforms.1._transform.*FullLinear.*runs backwards"),
        (lambda: [FullConv2d(2, kernel_size=3)], (2, 4, 4), "FullConv2d.*no FullLinear"),
    ],
)
def test_where_it_is_not_defined(transforms, shape, message):
    model = ebf.wrap(flow_of(*transforms(), shape=shape))
    with pytest.raises(ebf.InputError, match=f"(?s){message}"):
        ML(model, log_det="relative")


def test_autocast_computes_the_same_in_half_precision():
    """The products of the backward pass, which runs without autocast, had two dtypes."""
    torch.manual_seed(0)
    model = ebf.wrap(Flow(FullLinear(4), StandardNormal([4])))
    x, found = torch.randn(32, 4), []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = ML(model, log_det="relative")(x)
        found.append(torch.autograd.grad(loss, model.flow._transform.weight)[0])
    assert found[1].dtype == torch.float32
    assert (found[1] - found[0]).norm() < 0.02 * found[0].norm()
