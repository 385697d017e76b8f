"""The whitening start, and the Gaussianising one."""

import math

import normflows
import pytest
import torch
from nflows import distributions, flows, transforms

import ebflow_normflows
import ebflow_plugin as ebf
from ebflow_nflows import FullConv2d, FullLinear, SmoothLeakyReLU
from ebflow_plugin.closed_form.initialization import Thinned, best_scales
from ebflow_plugin.plan.plan import Plan
from gaussian_models import D, data, linear_flow, nll, nonlinear_flow

# The whitening start


@pytest.mark.parametrize("before", [[], ["actnorm"], ["permutation"], ["actnorm", "permutation"], ["affine"]])
def test_the_first_full_layer_whitens(before):
    make = {
        "actnorm": lambda: transforms.ActNorm(D),
        "permutation": lambda: transforms.RandomPermutation(D),
        "affine": lambda: transforms.PointwiseAffineTransform(1.0, 2.0),
    }
    layers = [*(make[name]() for name in before), FullLinear(D), SmoothLeakyReLU(0.3), transforms.ActNorm(D)]
    flow = flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([D])).double()
    model = ebf.wrap(flow)
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


def test_flows_that_cannot_whiten():
    lu = flows.Flow(transforms.LULinear(D), distributions.StandardNormal([D])).double()
    with pytest.raises(ebf.InputError, match=r"_transform  LULinear.*unconstrain"):
        ebf.wrap(lu).initialize(data(), whiten=True)
    with pytest.raises(ebf.InputError, match="needs a FullLinear"):
        ebf.wrap(flows.Flow(transforms.Tanh(), distributions.StandardNormal([D])).double()).initialize(
            data(), whiten=True
        )
    with pytest.raises(ebf.SingularError, match="1 of 5 directions"):
        ebf.wrap(linear_flow()).initialize(torch.cat([data()[:, :4], data()[:, :1]], 1), whiten=True)
    ebf.wrap(ebf.unconstrain(lu)).initialize(data(), whiten=True)


# The Gaussianising start


def bent_data(n=6000, seed=0):
    """Rows whose whitened features are a Gaussian through the inverse of f(a y + b); and their entropy."""
    generator = torch.Generator().manual_seed(seed)
    bend = SmoothLeakyReLU(0.3).double()
    scale = torch.tensor([4.0, -3.0, 2.0, -6.0, 3.0], dtype=torch.float64)
    shift = torch.tensor([2.0, 0.0, -1.0, 1.0, -2.0], dtype=torch.float64)
    spread = 3.0
    noise = spread * torch.randn(n, D, dtype=torch.float64, generator=generator)
    t = bend.invert(noise)
    y = (t - shift) / scale
    log_density = (
        -0.5 * (noise / spread).square() - math.log(spread) - 0.5 * math.log(2 * math.pi)
    ).sum(1) + bend.log_det(t) + scale.abs().log().sum()  # fmt: skip
    y_spread = y.std(0)  # a symmetric mixing of features of equal spread is what symmetric whitening undoes
    mixing = torch.eye(D, dtype=torch.float64) + 0.4
    x = (y / y_spread) @ mixing
    entropy = -log_density.mean() + torch.linalg.slogdet(mixing)[1] - y_spread.log().sum()
    return x, entropy.item()


def nflows_model():
    return ebf.wrap(nonlinear_flow("identity"))


def normflows_model():
    layers = [ebflow_normflows.FullLinear(D), ebflow_normflows.SmoothLeakyReLU(0.3), ebflow_normflows.FullLinear(D)]
    base = normflows.distributions.DiagGaussian(D, trainable=False)
    return ebf.wrap(normflows.NormalizingFlow(base, layers).double())


@pytest.mark.parametrize("make", [nflows_model, normflows_model])
def test_features_that_the_nonlinearity_can_make_gaussian_become_so(make):
    x, entropy = bent_data()
    white, gaussian = make(), make()
    white.initialize(x, whiten=True)
    gaussian.initialize(x.split(700), gaussianize=True)  # a stream, gone through once
    white.calibrate(x, shrinkage=0.0)
    before = nll(gaussian, x)
    gaussian.calibrate(x, shrinkage=0.0)
    assert nll(gaussian, x) == pytest.approx(entropy, abs=0.02)
    assert nll(white, x) > entropy + 0.1
    assert before < nll(gaussian, x) + 0.1  # the next layer took in mean and scale


def test_the_search_finds_the_best_of_a_fine_grid():
    x, _ = bent_data(2000)
    model = nflows_model()
    model.initialize(x, whiten=True)
    (y,), _ = Plan(model.plan.steps[:1], model.plan.base).encode(x)
    bend = model.plan.steps[1]

    def value(feature, scale, shift):
        t = scale * y[:, feature] + shift
        return 0.5 * bend.module.transform(t).var().log() - bend.module.slope(t).log().mean() - abs(scale).log()

    scale, shift = best_scales(bend, y)
    for feature in range(D):
        grid = [
            value(feature, torch.tensor(a), torch.tensor(b))
            for a in (*torch.linspace(-9, -0.5, 25).tolist(), *torch.linspace(0.5, 9, 25).tolist())
            for b in torch.linspace(-8, 8, 33).tolist()
        ]
        assert value(feature, scale[feature], shift[feature]) <= min(grid) + 1e-3


def test_what_cannot_be_made_gaussian():
    with pytest.raises(ebf.InputError, match=r"elementwise nonlinearity.*nothing stands there"):
        ebf.wrap(linear_flow()).initialize(data(), gaussianize=True)
    layers = [FullLinear(D), transforms.Logit()]
    flow = flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([D])).double()
    before = {name: tensor.clone() for name, tensor in flow.state_dict().items()}
    with pytest.raises(ebf.InputError, match="no finite log-det"):
        ebf.wrap(flow, match_after=None).initialize(data(), gaussianize=True)
    assert before.keys() == flow.state_dict().keys()
    layers = [FullLinear(D, bias=False), SmoothLeakyReLU(0.3)]
    flow = flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([D])).double()
    with pytest.raises(ebf.InputError, match="needs a FullLinear with a bias"):
        ebf.wrap(flow).initialize(data(), gaussianize=True)
    layers = [FullConv2d(2, kernel_size=1), SmoothLeakyReLU(0.3)]
    flow = flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([2, 4, 4]))
    with pytest.raises(ebf.InputError, match="FullConv2d.*Keep whiten=True alone"):
        ebf.wrap(flow).initialize(torch.randn(20, 2, 4, 4), gaussianize=True)


def test_what_few_rows_suggest_is_judged_by_other_rows():
    generator = torch.Generator().manual_seed(0)
    train, test = torch.zeros(2, 6, D, dtype=torch.float64).cauchy_(generator=generator)
    found = []
    for options in ({"whiten": True}, {"gaussianize": True}):
        model = nflows_model()
        model.initialize(train, **options)
        model.calibrate(train.repeat(10, 1), "diagonal")
        found.append(nll(model, test))
    white, gaussian = found
    assert gaussian < 1.5 * white


@pytest.mark.parametrize("sizes", [[1] * 37, [5, 1, 30, 1], [100]])
def test_thinned_rows_are_evenly_spread(sizes):
    rows, thinned = torch.arange(sum(sizes))[:, None], Thinned(4)
    for part in rows.split(sizes):
        thinned.add(part)
    kept = thinned.rows().flatten().tolist()
    assert kept == list(range(0, len(rows), thinned.stride))
    assert 4 < len(kept) <= 9


# Errors that say what is the case


def test_scales_that_are_far_apart_are_whitened():
    """Standard deviations from 1000 to 0.001: C has a condition of 1e12, its correlations have one of about 2."""
    scales = torch.tensor([1000.0, 1.0, 0.03, 0.001], dtype=torch.float64)
    mix = torch.eye(4, dtype=torch.float64) + 0.2
    x = torch.randn(500, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) @ mix * scales + scales
    flow = flows.Flow(FullLinear(4), distributions.StandardNormal([4])).double()
    model = ebf.wrap(flow)
    model.initialize(x, whiten=True)
    white = flow._transform(x)[0]
    assert torch.allclose(torch.cov(white.T), torch.eye(4, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(white.mean(0), torch.zeros(4, dtype=torch.float64), atol=1e-6)


def test_what_has_no_variance_is_told_apart():
    model = ebf.wrap(linear_flow())
    x = data()
    constant = x.clone()
    constant[:, 1] = 3.0
    with pytest.raises(ebf.SingularError, match=r"features \[1\] of what reaches .*FullLinear.* are constant over"):
        model.initialize(constant, whiten=True)
    dependent = x.clone()
    dependent[:, 1] = dependent[:, 0] - 2.0 * dependent[:, 2]
    with pytest.raises(ebf.SingularError, match=f"linearly dependent(?s:.*)1 of {D} directions"):
        model.initialize(dependent, whiten=True)


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


def test_gaussianizing_leaves_the_first_layer_alone_where_it_is_tied_to_the_next():
    tied = FullLinear(D)
    layers = [tied, SmoothLeakyReLU(0.3), tied]
    flow = flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([D])).double()
    alone = flows.Flow(
        transforms.CompositeTransform([FullLinear(D), SmoothLeakyReLU(0.3)]), distributions.StandardNormal([D])
    )
    ebf.wrap(flow).initialize(data(), gaussianize=True)
    ebf.wrap(alone.double()).initialize(data(), gaussianize=True)
    assert torch.equal(tied.weight, alone._transform._transforms[0].weight)
