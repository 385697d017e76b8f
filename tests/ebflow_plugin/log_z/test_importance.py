"""log Z by importance sampling, and by Lanczos beside it, against the exact value and their own error bars."""

import math

import normflows
import numpy as np
import pytest
import torch
from nflows import distributions, flows, transforms
from torch import nn

import ebflow_nflows
import ebflow_normflows
import ebflow_plugin as ebf
from ebflow_plugin.log_z.importance import draw_from, gaussian_of
from ebflow_plugin.plan.plan import Plan
from gaussian_models import WIDE, assert_agrees, make_model
from randomness import rng

DIMS = (2, 10, 50, 200)


def scores_of(model, repeats, method, **options):
    exact = model.log_z()
    runs = [model.log_z(method=method, generator=rng(1000 + k), **options) for k in range(repeats)]
    return torch.tensor([(run.value - float(exact)) / run.std_error for run in runs if run.reliable])


@pytest.mark.parametrize("nonlinear", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_lanczos_agrees_with_the_exact_value(dim, nonlinear):
    model = make_model(dim, nonlinear=nonlinear)
    # Of 400 seeds, 99.5 % lie within 4 standard errors of 16 probes; 0 is one of the others for two of these models.
    estimate = model.log_z(method="lanczos", generator=rng(1))
    assert_agrees(estimate, model.log_z())
    assert estimate.method == "lanczos"
    assert estimate.std_error < 0.5  # and not by a wide bar


@pytest.mark.parametrize("dim", DIMS)
def test_importance_sampling_agrees_with_the_exact_value(dim):
    near = make_model(dim, spread=0.05)
    estimate = near.log_z(method="importance", generator=rng(), samples=4000)
    assert_agrees(estimate, near.log_z())
    assert 10 < estimate.effective_sample_size <= 4000


@pytest.mark.filterwarnings("ignore:.*unreliable")  # of the plain one
@pytest.mark.parametrize("dim", [2, 10, 50])
def test_importance_sampling_from_a_fitted_gaussian(dim):
    model = make_model(dim, nonlinear=True)
    data = model.sample(4000, generator=rng(1))
    fitted = model.log_z(method="importance", proposal=data, generator=rng(), samples=4000)
    assert_agrees(fitted, model.log_z())
    if dim == 2:
        plain = model.log_z(method="importance", generator=rng(), samples=4000)
        assert fitted.effective_sample_size > 1.5 * plain.effective_sample_size


HONEST = [
    ("lanczos", 30, {"probes": 16}),
    ("lanczos", 30, {"probes": 16, "iterations": 4}),
    ("importance", 5, {"samples": 400}),
]


@pytest.mark.filterwarnings("ignore:.*unreliable")
@pytest.mark.parametrize(("method", "dim", "options"), HONEST)
def test_error_bars_are_honest(method, dim, options):
    scores = scores_of(make_model(dim, 0.2), 80, method, **options)
    assert len(scores) > 60
    assert abs(float(scores.mean())) < 4 / math.sqrt(80)
    assert 0.35 < float(scores.var()) < 1.7  # 1 ± 0.16 if normal; weights with a tail get a wider bar


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("importance", {"samples": 50}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*unreliable")
def test_sampled_estimates_of_z_have_no_bias(method, options):
    model = make_model(4, spread=0.5)
    exact = model.log_z()
    runs = [model.log_z(method=method, generator=rng(k), **options) for k in range(150)]
    ratios = (torch.tensor([run.value for run in runs]) - exact).exp()
    error = float(ratios.std()) / math.sqrt(len(ratios))
    assert error < 0.05
    assert abs(float(ratios.mean()) - 1) < 4 * error


def test_table_a3():
    """With as many products as importance sampling has energies, Lanczos is ten times as exact; the paper: 0.034608."""
    model = make_model(100, spread=0.03)  # I + 0.003 G
    model.flow._transform._transforms[0].bias.zero_()
    exact = model.log_z()

    def error_rate(method, **options):
        runs = [model.log_z(method=method, generator=rng(k), **options) for k in range(30)]
        return sum(abs(math.expm1(float(exact) - run.value)) for run in runs) / 30

    sampled, products = error_rate("importance", samples=100), error_rate("lanczos", probes=16, iterations=3)
    assert 0.01 < sampled < 0.05
    assert products < sampled / 10


def normflows_model(layers, dim):
    return ebf.wrap(normflows.NormalizingFlow(normflows.distributions.DiagGaussian(dim), layers).double())


@pytest.mark.parametrize("method", ["lanczos"])
def test_either_direction_of_a_layer(method):
    """Data passes through the inverse of a normflows layer: the sign of its log-det turns."""
    dim = 12
    torch.manual_seed(0)
    generator = rng(3)
    ours = ebflow_normflows.FullLinear(dim)
    with torch.no_grad():
        ours.weight += 0.2 * torch.randn(dim, dim, generator=generator) / math.sqrt(dim)
        ours.weight *= 1.3
    theirs = normflows.flows.InvertibleAffine(dim, use_lu=False)
    with torch.no_grad():
        theirs.W.mul_(0.8)
    scale = normflows.flows.AffineConstFlow((dim,))
    nn.init.constant_(scale.s, 0.1)
    for layers in ([ours], [theirs], [ours, theirs, scale]):
        model = normflows_model(layers, dim).requires_grad_(False)
        assert abs(float(model.log_z())) > 0.5
        assert_agrees(model.log_z(method=method, generator=rng()), model.log_z())


def test_cheap_layers_are_exact():
    torch.manual_seed(0)
    layers = [transforms.ActNorm(3), transforms.OneByOneConvolution(3), ebflow_nflows.FullConv2d(3, kernel_size=3)]
    flow = flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([3, 8, 8])).double().eval()
    with torch.no_grad():
        layers[0].log_scale += 0.3
    model = ebf.wrap(flow.requires_grad_(False))
    estimate = model.log_z(method="lanczos", probes=2)  # the convolution is the identity: nothing is left to chance
    assert estimate.value == pytest.approx(float(model.log_z()), abs=1e-9)
    assert estimate.std_error < 1e-9


@pytest.mark.parametrize("method", ["importance", "lanczos"])
def test_preprocessing_in_front(method):
    flow, after = make_model(4).flow, [ebf.Rescale(0.05, 0.95), ebf.Logit()]
    model = ebf.wrap(flow, preprocess=[ebf.Dequantize(256), *after])
    exact = model.log_z()
    assert float(exact) == pytest.approx(float(ebf.wrap(flow).log_z()) - 4 * math.log(0.9))
    x = torch.randint(256, (10, 4), generator=rng(2))
    v, log_volume = model.dequantize.dequantize(x.to(WIDE), rng(3))
    assert log_volume.tolist() == pytest.approx([-4 * math.log(256)] * 10)
    inside = ebf.wrap(flow, preprocess=after).energy(v)  # the constant of a Dequantize is part of the energy
    assert torch.allclose(model.energy(x, generator=rng(3)), inside - log_volume)
    assert_agrees(model.log_z(method=method, generator=rng()), exact)
    if method != "lanczos":
        data = model.sample(500, generator=rng(1))
        assert_agrees(model.log_z(method=method, proposal=data, generator=rng()), exact)


@pytest.mark.parametrize("method", ["importance"])
def test_a_conditional_flow(method):
    torch.manual_seed(0)
    layers = [
        transforms.NaiveLinear(3, orthogonal_initialization=False),
        transforms.MaskedAffineAutoregressiveTransform(3, 8, context_features=2),
    ]
    flow = flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([3])).double()
    model = ebf.wrap(flow.eval().requires_grad_(False))
    data = model.sample(500, torch.ones(1, 2, dtype=WIDE), generator=rng(1)).flatten(0, 1)
    context = torch.ones(1, 2, dtype=WIDE)
    assert_agrees(model.log_z(method=method, context=context, proposal=data, generator=rng()), model.log_z())
    with pytest.raises(ebf.InputError, match="one row"):
        model.log_z(method=method, context=torch.ones(2, 2, dtype=WIDE))


def test_d_49152_in_seconds():
    layer = ebflow_nflows.FullConv2d(3, kernel_size=3)
    with torch.no_grad():
        layer.weight += 0.1 * torch.randn(layer.weight.shape, generator=rng()) / 27**0.5
    model = ebf.wrap(flows.Flow(layer, distributions.StandardNormal([3, 128, 128])).requires_grad_(False))
    estimate = model.log_z(method="lanczos", generator=rng())
    assert estimate.std_error < 1.0
    assert_agrees(estimate, model.log_z())


def test_a_singular_layer_is_named():
    model = make_model(6)
    with torch.no_grad():
        model.flow._transform._transforms[0].weight[0] = 0.0
    with pytest.raises(ebf.SingularError, match=r"_transform._transforms.0  FullLinear"):
        model.log_z(method="lanczos", generator=rng())


@pytest.mark.parametrize("method", ["lanczos", "importance"])
def test_the_same_seed_gives_the_same_value(method):
    model = make_model(5)
    first, second, third = (model.log_z(method=method, generator=rng(k)) for k in (0, 0, 1))
    assert float(first) == float(second) != float(third)


@pytest.mark.parametrize(("method", "name"), [("importance", "samples")])
def test_batches_bound_the_rows_of_a_call(method, name, monkeypatch):
    model, seen = make_model(5), []
    energy = Plan.energy
    monkeypatch.setattr(Plan, "energy", lambda self, x, context=None: seen.append(len(x)) or energy(self, x, context))
    estimate = model.log_z(method=method, **{name: 50}, batch_size=20, generator=rng())
    assert max(seen) == 20
    assert_agrees(estimate, model.log_z())


ERRORS = [
    ({"method": "lancsoz"}, "Did you mean 'lanczos'"),
    ({"method": "lanczos", "probes": 1}, "probes must be an integer, at least 2"),
    ({"method": "lanczos", "iterations": 2}, "iterations must be"),
    ({"method": "importance", "samples": 1}, "samples must be"),
    ({"method": "importance", "proposal": torch.distributions.Normal(torch.zeros(5), 1.0)}, "Independent"),
    ({"method": "importance", "proposal": torch.distributions.Normal(torch.zeros(4), 1.0)}, r"takes \(5,\)"),
    ({"method": "importance", "proposal": 3}, "proposal must be a tensor of data.*got int"),
    ({"method": "importance", "proposal": np.zeros((9, 5))}, "proposal must be a tensor of data.*got ndarray"),
    ({"method": "importance", "batch_size": 0}, "batch_size must be an integer, at least 1, got 0"),
    ({"method": "lanczos", "generator": 0}, "generator must be a torch.Generator"),
    ({"event_shape": 3}, "event_shape must be a tuple of integers.*got 3"),
    ({"event_shape": (5.0,)}, "event_shape must be a tuple"),
    ({"method": 3}, "unknown method 3"),
    ({"method": "importance", "proposal": torch.zeros(1, 5, dtype=WIDE)}, "at least 2 data points"),
    ({"method": "importance", "proposal": torch.zeros(9, 5, dtype=WIDE)}, "constant"),
]


@pytest.mark.parametrize(("options", "message"), ERRORS)
def test_errors_name_the_option(options, message):
    with pytest.raises(ebf.InputError, match=message):
        make_model(5).log_z(**options)


@pytest.mark.parametrize("method", ["lanczos", "importance"])
def test_inference_mode(method):
    model = make_model(3, 0.1)
    with torch.inference_mode():
        data = model.sample(200, generator=rng(1))
        for options in ({}, {"proposal": data}) if method != "lanczos" else ({},):
            assert_agrees(model.log_z(method=method, generator=rng(), **options), model.log_z(), 5.0)


def test_counts_of_numpy():
    model = make_model(3, 0.1)
    model.log_z(method="importance", samples=np.int64(200), batch_size=np.int64(60), generator=rng())
    model.log_z(method="lanczos", probes=np.int32(4), generator=rng())


def test_an_unknown_option_is_refused():
    for method in ("exact", "lanczos", "importance"):
        with pytest.raises(TypeError, match="probe"):
            make_model(3).log_z(method=method, probe=3)


def test_a_proposal_outside_of_the_domain_is_refused():
    model = ebf.wrap(make_model(2).flow, preprocess=[ebf.Logit()], match_after=None)
    with pytest.raises(ebf.InputError, match="reaches out of the model's domain"):
        model.log_z(method="importance", generator=rng())
    inside = torch.distributions.Independent(torch.distributions.Uniform(torch.zeros(2), torch.ones(2)), 1)
    assert_agrees(model.log_z(method="importance", proposal=inside, generator=rng()), model.log_z())


def test_a_progress_bar_changes_nothing(capsys):
    model = make_model(3)
    for method in ("lanczos", "importance"):
        quiet, shown = (model.log_z(method=method, generator=rng(), progress=bar) for bar in (False, True))
        assert float(quiet) == float(shown)


def test_the_fitted_gaussian_has_the_moments_of_the_data():
    data = torch.randn(4000, 2, 3, generator=rng(), dtype=WIDE) @ torch.randn(3, 3, generator=rng(1), dtype=WIDE)
    fitted = gaussian_of(data + 2.0)
    x, log_q = draw_from(fitted, 4000, (2, 3), data, rng(2))
    truth = torch.distributions.MultivariateNormal(data.mean(0).flatten() + 2.0, torch.cov(data.flatten(1).mT))
    assert torch.allclose(log_q, truth.log_prob(x.flatten(1)))
    assert torch.allclose(log_q, fitted.log_prob(x))
    assert torch.allclose(torch.cov(x.flatten(1).mT), torch.cov(data.flatten(1).mT), atol=0.3)
    few = gaussian_of(data[:11])  # too few for all covariances
    assert few.base_dist.variance.allclose(data[:11].flatten(1).var(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_error_includes_rounding(dtype):
    """If the proposal is the model, the weights differ by rounding alone."""
    for seed in range(20):
        torch.manual_seed(seed)
        layer = ebflow_nflows.FullLinear(20, init="orthogonal", dtype=dtype).requires_grad_(False)
        model = ebf.wrap(flows.Flow(layer, distributions.StandardNormal([20])))
        found = model.log_z(method="importance", generator=rng(seed))
        assert abs(found.value - float(model.log_z())) < 4 * found.std_error < 1e-3
