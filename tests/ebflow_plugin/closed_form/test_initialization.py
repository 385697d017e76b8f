"""The whitening start, and the Gaussianising one."""

import copy

import pytest
import torch
from nflows import distributions, flows, transforms
from nflows.distributions.uniform import BoxUniform

import ebflow_plugin as ebf
from ebflow_nflows import FullConv2d, FullLinear, SmoothLeakyReLU
from ebflow_plugin.closed_form import initialization
from gaussian_models import D, data, linear_flow, nll
from nflows_small import flow_of
from randomness import rng

# The whitening start


@pytest.mark.parametrize("before", [[], ["actnorm"], ["permutation"], ["actnorm", "permutation"], ["affine"]])
def test_the_first_full_layer_whitens(before):
    make = {
        "actnorm": lambda: transforms.ActNorm(D),
        "permutation": lambda: transforms.RandomPermutation(D),
        "affine": lambda: transforms.PointwiseAffineTransform(1.0, 2.0),
    }
    layers = [*(make[name]() for name in before), FullLinear(D), SmoothLeakyReLU(0.3), transforms.ActNorm(D)]
    model = ebf.wrap(flow_of(*layers, shape=(D,)))
    x = data()
    model.initialize([x[:150], x[150:]], whiten=True)
    seen = {}
    model.plan.encode(x, visit=lambda step, value: seen.update({step.class_name: value}))
    white = seen["SmoothLeakyReLU"]
    assert torch.allclose(white.mean(0), torch.zeros(D, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(torch.cov(white.T), torch.eye(D, dtype=torch.float64), atol=1e-8)
    assert layers[-1].initialized  # from the whitened first batch
    assert nll(model, x) < 1e3


@pytest.mark.parametrize("options", [{}, {"padding_mode": "circular"}, {"stride": 2, "kernel_size": 4}])
def test_a_convolution_whitens_each_cell(options):
    layer = FullConv2d(2, **{"kernel_size": 3, **options})
    shape = layer.output_shape((2, 4, 4))
    flow = flows.Flow(layer, distributions.StandardNormal(shape)).double()
    images = torch.randn(300, 2, 4, 4, dtype=torch.float64) * torch.tensor([[[3.0]], [[0.5]]]) + 2.0
    model = ebf.wrap(flow)
    model.initialize(images, whiten=True)
    (latents,), _ = model.plan.encode(images)
    rows = latents.movedim(1, -1).flatten(0, -2)
    assert torch.allclose(torch.cov(rows.T), torch.eye(shape[0], dtype=torch.float64), atol=1e-6)
    assert torch.isfinite(model.log_z())


@pytest.mark.parametrize("tail", ["none", "lu", "actnorm"])
def test_a_linear_model_is_fitted_to_its_base(tail):
    """If only linear steps and a Gaussian base follow, the model is the best Gaussian, whatever these are."""
    layers = {"none": [], "lu": [transforms.LULinear(D, identity_init=False)], "actnorm": [transforms.ActNorm(D)]}
    base = distributions.DiagonalNormal([D])
    torch.nn.init.constant_(base.mean_, 1.5)
    torch.nn.init.constant_(base.log_std_, 0.7)
    flow = flows.Flow(transforms.CompositeTransform([FullLinear(D), *layers[tail]]), base).double()
    model, x = ebf.wrap(flow), data()
    model.initialize([x[:150], x[150:]], whiten=True)
    gaussian = torch.distributions.MultivariateNormal(x.mean(0), torch.cov(x.T))
    torch.testing.assert_close(model.log_prob(x), gaussian.log_prob(x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_is_fitted_to_its_base(stride):
    """Channels with Gaussians of their own: the likelihood is that of a standard normal base."""
    images = torch.randn(300, 2, 4, 4, dtype=torch.float64, generator=rng(0)) * torch.tensor([[[3.0]], [[0.5]]]) + 2.0
    found = []
    for mean, std in ((0.0, 1.0), (1.5, 0.2)):
        layer = FullConv2d(2, kernel_size=3 if stride == 1 else 4, stride=stride)
        shape = layer.output_shape((2, 4, 4))
        means = mean * torch.arange(1.0, shape[0] + 1)[:, None, None].expand(shape)
        normal = torch.distributions.Normal(means.double(), torch.full(shape, std, dtype=torch.float64))
        model = ebf.wrap(flows.Flow(layer, torch.distributions.Independent(normal, 3)).double())
        model.initialize(images, whiten=True)
        found.append(nll(model, images))
    assert found[1] == pytest.approx(found[0], abs=1e-8)


def test_before_nonlinear_steps_and_other_bases_it_only_whitens():
    box = BoxUniform(torch.full((D,), -9.0), torch.full((D,), 9.0))
    normal = distributions.DiagonalNormal([D])
    torch.nn.init.constant_(normal.mean_, 1.5)
    for after, base in (([], box), ([SmoothLeakyReLU(0.3)], normal)):
        flow = flows.Flow(transforms.CompositeTransform([FullLinear(D), *after]), base).double()
        x = data()
        ebf.wrap(flow).initialize(x, whiten=True)
        white = flow._transform._transforms[0](x)[0]
        torch.testing.assert_close(white.mean(0), torch.zeros(D, dtype=torch.float64))
        torch.testing.assert_close(torch.cov(white.T), torch.eye(D, dtype=torch.float64))


def test_processes_with_contexts_of_their_own_aim_alike(monkeypatch):
    """The secants of conditional steps depend on the context: those of the first process count."""
    conditional = transforms.MaskedAffineAutoregressiveTransform(D, 8, context_features=2)
    layers = transforms.CompositeTransform([FullLinear(D), conditional])
    first = ebf.wrap(flows.Flow(layers, distributions.StandardNormal([D])).double())
    second, sent = copy.deepcopy(first), []
    base = torch.zeros(D, dtype=torch.float64), torch.ones(D, dtype=torch.float64)
    own, other = torch.randn(2, 20, 2, dtype=torch.float64, generator=rng(1))
    monkeypatch.setattr(initialization, "broadcast", lambda *tensors: sent.append(tensors) or tensors)
    assert initialization.fit_to_base(first.plan, 0, base, data(20), own)
    monkeypatch.setattr(initialization, "broadcast", lambda *tensors: sent[0])
    assert initialization.fit_to_base(second.plan, 0, base, data(20), other)
    assert torch.equal(first.plan.steps[0].module.weight, second.plan.steps[0].module.weight)


def test_flows_that_cannot_whiten():
    lu = flows.Flow(transforms.LULinear(D), distributions.StandardNormal([D])).double()
    with pytest.raises(ebf.InputError, match=r"_transform  LULinear.*unconstrain"):
        ebf.wrap(lu).initialize(data(), whiten=True)
    with pytest.raises(ebf.InputError, match="needs a FullLinear"):
        ebf.wrap(flow_of(transforms.Tanh(), shape=(D,))).initialize(data(), whiten=True)
    with pytest.raises(ebf.SingularError, match="1 of 5 directions"):
        ebf.wrap(linear_flow()).initialize(torch.cat([data()[:, :4], data()[:, :1]], 1), whiten=True)
    ebf.wrap(ebf.unconstrain(lu)).initialize(data(), whiten=True)


# Errors that say what is the case


def test_scales_that_are_far_apart_are_whitened():
    """Standard deviations from 1000 to 0.001: C has a condition of 1e12, its correlations have one of about 2."""
    scales = torch.tensor([1000.0, 1.0, 0.03, 0.001], dtype=torch.float64)
    mix = torch.eye(4, dtype=torch.float64) + 0.2
    x = torch.randn(500, 4, dtype=torch.float64, generator=rng(0)) @ mix * scales + scales
    flow = flows.Flow(FullLinear(4), distributions.StandardNormal([4])).double()
    model = ebf.wrap(flow)
    model.initialize(x, whiten=True)
    white = flow._transform(x)[0]
    assert torch.allclose(torch.cov(white.T), torch.eye(4, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(white.mean(0), torch.zeros(4, dtype=torch.float64), atol=1e-6)


def test_a_full_layer_that_cannot_whiten_is_said_to_be_there():
    def refused(transform, message):
        flow = flows.Flow(transform, distributions.StandardNormal([D])).double()
        before = {name: tensor.clone() for name, tensor in flow.state_dict().items()}
        with pytest.raises(ebf.InputError, match=message):
            ebf.wrap(flow).initialize(data(), whiten=True)
        assert all(torch.equal(before[name], tensor) for name, tensor in flow.state_dict().items())

    refused(transforms.InverseTransform(FullLinear(D)), "FullLinear.*data pass through its inverse")
    refused(FullLinear(D, bias=False), "FullLinear.*needs a bias")
    refused(torch.nn.utils.parametrizations.weight_norm(FullLinear(D)), "it computes its weight")
    late = transforms.CompositeTransform([transforms.LULinear(D), FullLinear(D)])
    refused(late, r"LULinear \(nflows.transforms.lu\) comes first\.$")
