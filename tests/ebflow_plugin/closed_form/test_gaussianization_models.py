"""The Gaussianising start fits the whole model: its base, and the steps after the last full layer."""

import copy
import math
from functools import partial

import normflows
import pytest
import torch
import zuko
from nflows import distributions, transforms
from nflows.distributions.uniform import BoxUniform

import ebflow_plugin as ebf
from chains import LIBRARIES, flow_in, zuko_normal
from ebflow_nflows import SinhArcsinh, SmoothLeakyReLU
from ebflow_plugin.closed_form import gaussianization
from gaussian_models import data, nll
from randomness import rng

D = 4
MEAN, STD = torch.tensor([1.5, -2.0, 0.3, 40.0]), torch.tensor([2.0, 0.1, 1.0, 7.0])


def heavy(n=3000, seed=0, shape=(D,)):
    mixing = torch.eye(D, dtype=torch.float64) + 0.4
    rows = torch.randn(n, D, dtype=torch.float64, generator=rng(seed)).sinh() @ mixing + 2.0
    return rows.reshape(n, *shape)


def flow_of(library, base=None, tail=(), features=D):
    layers = [library.FullLinear(features), library.SinhArcsinh(features), library.FullLinear(features), *tail]
    return flow_in(library, layers, [features], base)


nflows_flow, normflows_flow, zuko_flow = (partial(flow_of, library) for library in LIBRARIES)


def diagonal_normal(mean=MEAN, std=STD):
    base = distributions.DiagonalNormal([D])
    with torch.no_grad():
        base.mean_.copy_(mean)
        base.log_std_.copy_(std.log())
    return base


def diag_gaussian(shape=(D,), mean=MEAN, std=STD):
    base = normflows.distributions.DiagGaussian(shape)
    with torch.no_grad():
        base.loc.copy_(mean.reshape(shape))
        base.log_scale.copy_(std.log().reshape(shape))
    return base


# The base


@pytest.mark.parametrize(
    "make",
    [
        lambda: nflows_flow(diagonal_normal()),
        lambda: normflows_flow(diag_gaussian()),
        lambda: zuko_flow(zuko_normal(MEAN, STD)),
    ],
    ids=["nflows", "normflows", "zuko"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_density_is_that_of_a_standard_normal_base(make, dtype):
    """An affine map takes one Gaussian to the other, and the last layer can be any."""
    x, standard, other = heavy().to(dtype), ebf.wrap(nflows_flow().to(dtype)), ebf.wrap(make().to(dtype))
    expected, report = (model.initialize(x, gaussianize=True) for model in (standard, other))
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    assert report.nll == pytest.approx(expected.nll, abs=tolerance)
    assert nll(other, x) == pytest.approx(nll(standard, x), abs=tolerance)
    assert report.nll == pytest.approx(nll(other, x[4::5]), abs=0.05)


def test_positions_that_share_a_layer_share_its_fit():
    """Two positions with Gaussians of their own: no shared layer fits both, and the best one is found."""
    x = heavy(shape=(2, 2))
    plain = ebf.wrap(normflows_flow(diag_gaussian((2, 2), torch.zeros(D), torch.ones(D)), features=2))
    alike = ebf.wrap(
        normflows_flow(diag_gaussian((2, 2), torch.tensor([3.0, -1.0] * 2), torch.full((D,), 0.2)), features=2)
    )
    for model in (plain, alike):
        model.initialize(x, gaussianize=True)
    assert nll(alike, x) == pytest.approx(nll(plain, x), abs=1e-9)
    apart = ebf.wrap(normflows_flow(diag_gaussian((2, 2), torch.tensor([3.0, -1.0, 0.0, 2.0])), features=2))
    report = apart.initialize(x, gaussianize=True)
    assert report.nll == pytest.approx(nll(apart, x[4::5]), abs=0.05)
    last, best = apart.plan.steps[-1].module, nll(apart, x)
    for scale, shift in ((1.1, 0.0), (0.9, 0.0), (1.0, 0.2), (1.0, -0.2)):
        with torch.no_grad():
            last.weight.mul_(scale)
            last.bias.mul_(scale).add_(shift)
            assert nll(apart, x) > best
            last.bias.sub_(shift).div_(scale)
            last.weight.div_(scale)


def zuko_box():
    ends = torch.full((D,), -3.0), torch.full((D,), 3.0)
    return zuko.lazy.UnconditionalDistribution(zuko.distributions.BoxUniform, *ends, buffer=True)


mixture = partial(normflows.distributions.GaussianMixture, 2, D)
OTHER_BASES = {
    "zuko's BoxUniform": lambda: zuko_flow(zuko_box()),
    "GaussianMixture": lambda: normflows_flow(mixture()),
    "modes far apart": lambda: normflows_flow(mixture(loc=[[0.0] * D, [60.0] * D], weights=[0.95, 0.05])),
    "UniformGaussian": lambda: normflows_flow(normflows.distributions.UniformGaussian(D, [0])),
    "BoxUniform": lambda: nflows_flow(BoxUniform(torch.full((D,), -3.0), torch.full((D,), 3.0))),
    "conditional": lambda: nflows_flow(distributions.ConditionalDiagonalNormal([D], torch.nn.Linear(2, 2 * D))),
}


@pytest.mark.parametrize("name", OTHER_BASES)
def test_another_base_is_refused_and_nothing_changes(name):
    flow, given = OTHER_BASES[name](), heavy()
    before = copy.deepcopy(flow.state_dict())
    if name == "conditional":
        given = given, torch.randn(len(given), 2, dtype=torch.float64, generator=rng())
    with pytest.raises(ebf.InputError, match="gaussianize=True fits a Gaussian base"):
        ebf.wrap(flow).initialize(given, gaussianize=True)
    with pytest.raises(ebf.InputError, match="calibrate fits a Gaussian base"):
        ebf.wrap(flow).calibrate(given)
    assert all(torch.equal(before[name], tensor) for name, tensor in flow.state_dict().items())


# Steps after the last full layer


LINEAR = {
    "lu": lambda: [transforms.LULinear(D, identity_init=False)],
    "affine": lambda: [transforms.PointwiseAffineTransform(2.0, 3.0)],
    "actnorm": lambda: [transforms.ActNorm(D)],
    "permutation": lambda: [transforms.RandomPermutation(D), transforms.LULinear(D, identity_init=False)],
}


@pytest.mark.parametrize("tail", LINEAR)
def test_linear_steps_after_the_chain_are_composed_with(tail):
    x, plain, longer = heavy(), ebf.wrap(nflows_flow()), ebf.wrap(nflows_flow(diagonal_normal(), LINEAR[tail]()))
    expected, report = (model.initialize(x, gaussianize=True) for model in (plain, longer))
    assert report.nll == pytest.approx(expected.nll, abs=1e-8)
    assert nll(longer, x) == pytest.approx(nll(plain, x), abs=1e-8)


NONLINEAR = {
    "leaky": lambda: [SmoothLeakyReLU(0.3)],
    "sinh": lambda: [SinhArcsinh(D)],
    "autoregressive": lambda: [transforms.MaskedAffineAutoregressiveTransform(D, 8, activation=torch.tanh)],
    "conditional": lambda: [transforms.MaskedAffineAutoregressiveTransform(D, 8, context_features=2)],
}


@pytest.mark.parametrize("tail", NONLINEAR)
@pytest.mark.parametrize("base", [None, diagonal_normal])
def test_what_follows_is_part_of_the_report(tail, base):
    torch.manual_seed(0)
    flow = nflows_flow(base and base(), NONLINEAR[tail]())
    x, old, model = heavy(), ebf.wrap(copy.deepcopy(flow)), ebf.wrap(flow)
    context = torch.randn(len(x), 2, dtype=torch.float64, generator=rng()) if tail == "conditional" else None
    held = None if context is None else context[4::5]
    report = model.initialize(x, context, gaussianize=True)
    assert report.before == pytest.approx(nll(old, x[4::5], held), abs=1e-9)
    assert report.nll == pytest.approx(nll(model, x[4::5], held), abs=0.05)
    assert report.nll < report.before


# Never worse than before


@pytest.mark.parametrize("tail", ["none", "lu", "leaky"])
def test_a_model_that_is_better_than_its_start_stays_as_it_was(tail):
    """Data of the model itself, heavy-tailed along axes that a symmetric whitening does not find."""
    flow = nflows_flow(tail={"none": list, **LINEAR, **NONLINEAR}[tail]())
    first, bend = flow._transform._transforms[:2]
    with torch.no_grad():
        first.weight.copy_(torch.linalg.qr(torch.randn(D, D, dtype=torch.float64, generator=rng(5)))[0])
        bend.log_tail.fill_(-1.2)
    model = ebf.wrap(flow)
    x = model.sample(2000, generator=rng(1))
    before, own = copy.deepcopy(flow.state_dict()), nll(model, x[4::5])
    report = model.initialize(x, gaussianize=True)
    assert not report.kept
    assert report.nll == report.before == pytest.approx(own, abs=1e-9)
    assert all(torch.equal(before[name], tensor) for name, tensor in flow.state_dict().items())
    assert "the model is as it was" in str(report)


def test_a_calibration_is_part_of_the_model_before():
    """Correlated Gaussian data, and a calibrated model: a start from few rows makes nothing better."""
    model = ebf.wrap(nflows_flow())
    model.calibrate(data(4000, D))
    few = data(24, D, seed=1)
    own = nll(model, few[4::5])
    report = model.initialize(few, gaussianize=True)
    assert report.before == pytest.approx(own, abs=1e-9)
    assert not report.kept
    assert model.calibration.ready
    assert nll(model, few[4::5]) == pytest.approx(own, abs=1e-9)


def test_fresh_actnorms_of_a_model_that_is_put_back_start_from_its_own_data():
    flow = nflows_flow(tail=[transforms.ActNorm(D)])
    x = torch.randn(20, D, dtype=torch.float64, generator=rng(3))
    plain = ebf.wrap(copy.deepcopy(flow))
    plain.initialize(x)
    model = ebf.wrap(flow)
    report = model.initialize(x, gaussianize=True)
    assert not report.kept
    assert report.before == pytest.approx(nll(plain, x[4::5]), abs=1e-9)
    torch.testing.assert_close(model.log_prob(x), plain.log_prob(x))


def test_a_singular_model_may_start():
    flow = nflows_flow()
    torch.nn.init.zeros_(flow._transform._transforms[0].weight)
    report = ebf.wrap(flow).initialize(heavy(), gaussianize=True)
    assert report.before == math.inf
    assert report.kept
    assert math.isfinite(report.nll)


def test_a_start_that_fails_leaves_the_model_as_it_was(monkeypatch):
    def fails(*_):
        raise RuntimeError("half way")

    flow = nflows_flow(tail=[transforms.ActNorm(D)])
    before = copy.deepcopy(flow.state_dict())
    monkeypatch.setattr(gaussianization, "fit_marginals", fails)
    with pytest.raises(RuntimeError, match="half way"):
        ebf.wrap(flow).initialize(heavy(), gaussianize=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in flow.state_dict().items())
