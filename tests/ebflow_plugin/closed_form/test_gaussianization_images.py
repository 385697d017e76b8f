"""The Gaussianising start of chains of convolutions."""

import copy
import math

import normflows
import pytest
import torch
from nflows import transforms

import ebflow_nflows
import ebflow_normflows
import ebflow_plugin as ebf
import ebflow_zuko
from chains import flow_in, harmful_marginals
from ebflow_nflows import FullConv2d, SinhArcsinh, SmoothLeakyReLU
from ebflow_plugin.closed_form import gaussianization
from gaussian_models import nll
from randomness import rng

SHAPE = (2, 6, 6)


def heavy(rows=600, shape=SHAPE, seed=0):
    """Smooth images with heavy tails."""
    noise = torch.randn(rows, *shape, dtype=torch.float64, generator=rng(seed))
    return (noise + noise.roll(1, -1) + 0.5 * noise.roll(1, -2)).sinh() + 0.3 * noise.flip(1)


def chain_of(library, squeeze, features=2):
    bends = [library.SinhArcsinh(features, dim=-3), library.SinhArcsinh(4 * features, dim=-3)]
    return [
        library.FullConv2d(features, kernel_size=1, groups=features),
        bends[0],
        library.FullConv2d(features, kernel_size=3, padding_mode="circular"),
        squeeze,
        library.FullConv2d(4 * features, kernel_size=1),
        bends[1],
        library.FullConv2d(4 * features, kernel_size=3),
    ]


def nflows_model(base=None):
    return flow_in(ebflow_nflows, chain_of(ebflow_nflows, transforms.SqueezeTransform()), [8, 3, 3], base)


def normflows_model():
    return flow_in(ebflow_normflows, chain_of(ebflow_normflows, normflows.flows.Squeeze()), [8, 3, 3])


@pytest.mark.parametrize("make", [nflows_model, normflows_model])
def test_layer_by_layer_held_out_images_become_more_likely(make):
    x, test = heavy(), heavy(2000, seed=1)
    model = ebf.wrap(make())
    report = model.initialize(x.split(128), gaussianize=True)
    found = [layer.nll for layer in report.layers]
    bends = [layer.fitted_features for layer in report.layers]
    assert (bends[0], bends[1], bends[3]) == (2, None, None)
    assert found[1] < found[0] - 1.0
    assert found[2] <= found[1] + 1e-6
    assert found[3] < found[2] - 0.5
    assert report.kept
    assert report.nll == pytest.approx(nll(model, test), abs=3.0)
    assert report.nll == pytest.approx(nll(model, x[4::5]), abs=1.5)


def test_zuko_has_such_chains():
    layers = [
        ebflow_zuko.FullConv2d(2, kernel_size=1),
        ebflow_zuko.SinhArcsinh(2, dim=-3),
        ebflow_zuko.FullConv2d(2, kernel_size=3),
    ]
    model = ebf.wrap(flow_in(ebflow_zuko, layers, SHAPE))
    report = model.initialize(heavy(), gaussianize=True)
    assert report.nll < report.layers[0].nll - 1.0
    assert report.nll == pytest.approx(nll(model, heavy()[4::5]), abs=0.5)


def test_a_loader_is_as_good_as_a_tensor():
    x, models = heavy(), [ebf.wrap(nflows_model()) for _ in range(2)]
    one, two = models[0].initialize(x, gaussianize=True), models[1].initialize(x.split(1000), gaussianize=True)
    assert one == two


def test_the_base_that_is_there_is_fitted_to():
    normal = torch.distributions.Normal(torch.full((8, 3, 3), 1.5).double(), torch.full((8, 3, 3), 2.0).double())
    base = torch.distributions.Independent(normal, 3)
    x, plain, other = heavy(), ebf.wrap(nflows_model()), ebf.wrap(nflows_model(base))
    expected, report = (model.initialize(x, gaussianize=True) for model in (plain, other))
    assert report.nll == pytest.approx(expected.nll, abs=0.1)
    assert nll(other, x) < nll(plain, x) + 0.1


@pytest.mark.parametrize("bend", ["sinh", "leaky"])
def test_bends_that_harm_are_made_straight(bend, monkeypatch):
    """Through a squeeze too: the model is what the first layer alone makes it."""

    def make():
        map_of = (lambda c: SinhArcsinh(c, dim=-3)) if bend == "sinh" else (lambda c: SmoothLeakyReLU(0.3))
        return [
            FullConv2d(2, kernel_size=3),
            map_of(2),
            transforms.ActNorm(2),
            transforms.SqueezeTransform(),
            FullConv2d(8, kernel_size=3),
            map_of(8),
            FullConv2d(8, kernel_size=1),
        ]

    x = torch.randn(800, *SHAPE, dtype=torch.float64, generator=rng()).cumsum(-1)
    monkeypatch.setattr(gaussianization, "fit_marginals", harmful_marginals)
    model = ebf.wrap(flow_in(ebflow_nflows, make(), [8, 3, 3]))
    report = model.initialize(x, gaussianize=True)
    assert [layer.fitted_features for layer in report.layers] == [0, 0, None]
    alone = ebf.wrap(flow_in(ebflow_nflows, [FullConv2d(2, kernel_size=3)], SHAPE))
    alone.initialize(x, whiten=True)
    assert nll(model, x) == pytest.approx(nll(alone, x), abs=0.1)


def test_a_model_that_is_better_than_its_start_stays_as_it_was():
    flow = nflows_model()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, dtype=torch.float64, generator=rng(1)))
        for step in flow._transform._transforms:
            if isinstance(step, SinhArcsinh):
                step.log_tail.fill_(-0.7)
    model = ebf.wrap(flow)
    x, before = model.sample(100, generator=rng(2)), copy.deepcopy(flow.state_dict())
    report = model.initialize(x, gaussianize=True)
    assert not report.kept
    assert all(torch.equal(before[name], tensor) for name, tensor in flow.state_dict().items())


@pytest.mark.parametrize("rows", [10, 15, 40])
def test_few_images_end_finite_and_no_worse_than_before(rows):
    x, model = heavy(rows), ebf.wrap(nflows_model())
    report = model.initialize(x, gaussianize=True)
    assert math.isfinite(report.nll)
    assert report.nll <= report.before
    assert math.isfinite(model.log_z().item())


def test_what_cannot_start():
    constant, dependent = heavy(), heavy()
    constant[:, 1] = 0.5
    dependent[:, 1] = dependent[:, 0]
    plain = [FullConv2d(2, kernel_size=3), SinhArcsinh(2, dim=-3), FullConv2d(2, kernel_size=3)]
    flow = flow_in(ebflow_nflows, plain, SHAPE)
    before = copy.deepcopy(flow.state_dict())
    model = ebf.wrap(flow)
    with pytest.raises(ebf.SingularError, match=r"features \[1\].*constant"):
        model.initialize(constant, gaussianize=True)
    with pytest.raises(ebf.SingularError, match="linearly dependent"):
        model.initialize(dependent, gaussianize=True)
    with pytest.raises(ebf.InputError, match="at least 10 data points"):
        model.initialize(heavy(1), gaussianize=True)
    with pytest.raises(ebf.InputError, match="NaN"):
        model.initialize(heavy() * float("nan"), gaussianize=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in flow.state_dict().items())


def test_the_papers_cnn_starts_too():
    """Convolutions that follow each other through a squeeze, without a nonlinearity between."""
    layers = [
        FullConv2d(2, kernel_size=3),
        SmoothLeakyReLU(0.3),
        FullConv2d(2, kernel_size=3),
        transforms.SqueezeTransform(),
        FullConv2d(8, kernel_size=3),
        SmoothLeakyReLU(0.3),
        FullConv2d(8, kernel_size=3),
    ]
    model, x = ebf.wrap(flow_in(ebflow_nflows, layers, [8, 3, 3])), heavy()
    report = model.initialize(x, gaussianize=True)
    assert len(report.layers) == 4
    assert report.kept
    assert report.layers[1].fitted_features is None
    assert report.nll == pytest.approx(nll(model, x[4::5]), abs=1.5)
