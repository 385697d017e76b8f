"""The Gaussianising start, layer by layer."""

import copy
import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nflows import transforms

import ebflow_nflows
import ebflow_plugin as ebf
from chains import LIBRARIES, flow_in, harmful_marginals
from ebflow_nflows import FullConv2d, FullLinear, SinhArcsinh, SmoothLeakyReLU
from ebflow_plugin.closed_form import gaussianization
from ebflow_plugin.closed_form.initialization import Thinned
from ebflow_plugin.closed_form.marginals import condense, fit_marginals
from ebflow_plugin.plan.plan import Plan
from gaussian_models import D, data, linear_flow, nll
from randomness import rng


def model_in(library, bends=("leaky",), features=D, before=(), between=()):
    layers = [*before, library.FullLinear(features)]
    for bend in bends:
        layers += [library.SinhArcsinh(features) if bend == "sinh" else library.SmoothLeakyReLU(0.3)]
        layers += [*(make() for make in between), library.FullLinear(features)]
    return ebf.wrap(flow_in(library, layers, [features]))


nflows_model = partial(model_in, ebflow_nflows)
each_library = pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.__name__)


def bent_data(bend, n=6000, seed=0):
    """Rows whose whitened features are a Gaussian through the inverse of f(a y + b); and their entropy."""
    scale = torch.tensor([4.0, 3.0, 2.0, 6.0, 3.0], dtype=torch.float64)
    if isinstance(bend, SmoothLeakyReLU):
        scale = scale * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    shift = torch.tensor([2.0, 0.0, -1.0, 1.0, -2.0], dtype=torch.float64)
    spread = 3.0
    noise = spread * torch.randn(n, D, dtype=torch.float64, generator=rng(seed))
    t = bend.invert(noise)
    y = (t - shift) / scale
    log_density = (
        -0.5 * (noise / spread).square() - math.log(spread) - 0.5 * math.log(2 * math.pi)
    ).sum(1) + bend.log_det(t) + scale.abs().log().sum()  # fmt: skip
    y_spread = y.std(0)  # a symmetric mixing of features of equal spread is what symmetric whitening undoes
    mixing = torch.eye(D, dtype=torch.float64) + 0.4
    x = (y / y_spread) @ mixing
    entropy = -log_density.mean() + torch.linalg.slogdet(mixing)[1] - y_spread.log().sum()
    return x.detach(), entropy.item()


def inverse_of(name):
    if name == "leaky":
        return SmoothLeakyReLU(0.3).double()
    layer = SinhArcsinh(D).double()
    with torch.no_grad():
        layer.log_tail.copy_(torch.tensor([0.8, 0.6, 0.9, 0.7, 0.5]).log())
        layer.skewness.copy_(torch.tensor([0.3, 0.0, -0.2, 0.1, 0.0]))
    return layer


@pytest.mark.parametrize("bend", ["leaky", "sinh"])
@each_library
def test_features_that_the_nonlinearity_can_make_gaussian_become_so(library, bend):
    x, entropy = bent_data(inverse_of(bend))
    white, gaussian = model_in(library, (bend,)), model_in(library, (bend,))
    white.initialize(x, whiten=True)
    white.calibrate(x)
    report = gaussian.initialize(x.split(700), gaussianize=True)
    assert nll(gaussian, x) == pytest.approx(entropy, abs=0.03)
    assert report.layers[0].nll > report.nll + 0.1
    assert [layer.fitted_features for layer in report.layers] == [D, None]
    if bend == "leaky":  # a SinhArcsinh starts as the identity, and cannot be worse than a Gaussian
        assert nll(white, x) > entropy + 0.1


@each_library
def test_the_report_is_the_models_own_nll_of_rows_that_it_did_not_see(library):
    x = torch.randn(30000, D, dtype=torch.float64, generator=rng()).sinh() @ (torch.eye(D).double() + 0.4)
    test = torch.randn(30000, D, dtype=torch.float64, generator=rng(1)).sinh() @ (torch.eye(D).double() + 0.4)
    model = model_in(library, ("sinh", "leaky"))
    report = model.initialize(x, gaussianize=True)
    assert report.nll == pytest.approx(nll(model, test), abs=0.1)
    assert len(report.layers) == 3
    assert "no gradient step taken" in str(report)


def test_deeper_chains_come_further():
    """Features through two bends, with a whitening between: one layer cannot undo both."""
    torch.manual_seed(0)
    inner = torch.randn(8000, D, dtype=torch.float64, generator=rng())
    mixing = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64, generator=rng(1)))[0]
    x = (inner.sinh() / 2 @ mixing).sinh()
    shallow, deep = nflows_model(("sinh",)), nflows_model(("sinh", "sinh", "sinh"))
    assert deep.initialize(x, gaussianize=True).nll < shallow.initialize(x, gaussianize=True).nll - 0.02


def test_a_loader_is_as_good_as_a_tensor():
    x, _ = bent_data(inverse_of("sinh"))
    of_tensor, of_loader = (nflows_model(("sinh", "leaky")) for _ in range(2))
    one = of_tensor.initialize(x, gaussianize=True)
    two = of_loader.initialize(x.split(1000), gaussianize=True)
    assert one == two
    for mine, theirs in zip(of_tensor.parameters(), of_loader.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_an_iterator_is_refused():
    with pytest.raises(ebf.InputError, match="data per layer, and tuple_iterator is exhausted after the first"):
        nflows_model().initialize(iter(data().split(50)), gaussianize=True)


def heavy_tails(kind, rows, features, seed):
    x = torch.zeros(rows, features, dtype=torch.float64)
    if kind == "cauchy":
        return x.cauchy_(generator=rng(seed))
    if kind == "gaussian":
        return x.normal_(generator=rng(seed))
    if kind == "two lumps":
        return x.normal_(generator=rng(seed)) + 6.0 * torch.randint(0, 2, x.shape, generator=rng(seed + 1))
    return x.exponential_(generator=rng(seed))


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(["cauchy", "gaussian", "two lumps", "exponential"]),
    rows=st.sampled_from([20, 60, 400]),
    features=st.integers(1, 6),
    bends=st.lists(st.sampled_from(["sinh", "leaky"]), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
@example(kind="cauchy", rows=60, features=2, bends=["sinh", "sinh"], seed=7)  # few rows: the whitening is shrunk
def test_no_layer_makes_held_out_rows_less_likely(kind, rows, features, bends, seed):
    x = heavy_tails(kind, rows, features, seed)
    report = nflows_model(bends, features).initialize(x, gaussianize=True)
    found = [layer.nll for layer in report.layers]
    assert all(math.isfinite(value) for value in found)
    slack = 1e-3 + 1e-3 * abs(found[0])  # of a nonlinearity that was made as straight as it can be
    assert all(after <= before + slack for before, after in pairwise(found))


@pytest.mark.parametrize("bend", ["sinh", "leaky"])
def test_a_bend_that_harms_is_made_straight(bend, monkeypatch):
    """Bends that are fitted well to the wrong thing: the model is what whitening alone makes it."""

    x = torch.randn(2000, D, dtype=torch.float64, generator=rng()) @ (torch.eye(D).double() + 0.4)
    monkeypatch.setattr(gaussianization, "fit_marginals", harmful_marginals)
    model = nflows_model((bend, bend))
    report = model.initialize(x, gaussianize=True)
    monkeypatch.undo()
    assert [layer.fitted_features for layer in report.layers] == [0, 0, None]
    gaussian = torch.distributions.MultivariateNormal(x.mean(0), torch.cov(x.T))
    assert nll(model, x) == pytest.approx(-gaussian.log_prob(x).mean().item(), abs=0.01)


def test_rows_far_out_stay_finite():
    x = torch.randn(5000, D, dtype=torch.float64, generator=rng()).sinh().sinh()
    model = nflows_model(("sinh",) * 4)
    model.initialize(x, gaussianize=True)
    far = torch.full((1, D), 1e9, dtype=torch.float64)
    (latents,), _ = model.plan.encode(far)
    assert latents.abs().max() < 100  # 1e9 would be hundreds of thousands of standard deviations for a Gaussian


@pytest.mark.parametrize("library", ["actnorm", "permutation"])
def test_steps_between_the_layers_are_taken(library):
    make = {"actnorm": lambda: transforms.ActNorm(D), "permutation": lambda: transforms.ReversePermutation(D)}[library]
    x, _ = bent_data(inverse_of("sinh"))
    model = nflows_model(("sinh", "sinh"), before=(make(),), between=(make,))
    report = model.initialize(x, gaussianize=True)
    assert len(report.layers) == 3
    assert report.nll == pytest.approx(nll(model, x), abs=0.1)


def test_the_search_finds_the_best_of_a_fine_grid():
    x, _ = bent_data(inverse_of("leaky"), 4000)
    model = nflows_model()
    model.initialize(x, whiten=True)
    (y,), _ = Plan(model.plan.steps[:1], model.plan.base).encode(x)
    bend = model.plan.steps[1]
    y = y.detach()

    def value(feature, scale, shift):
        t = scale * y[:, feature] + shift
        return 0.5 * bend.module.transform(t).var().log() - bend.module.slope(t).log().mean() - abs(scale).log()

    with torch.no_grad():
        found = fit_marginals(bend, y, y)
    for feature in range(D):
        grid = [
            value(feature, torch.tensor(a), torch.tensor(b))
            for a in (*torch.linspace(-9, -0.5, 25).tolist(), *torch.linspace(0.5, 9, 25).tolist())
            for b in torch.linspace(-8, 8, 33).tolist()
        ]
        assert value(feature, found.scale[feature], found.shift[feature]) <= min(grid) + 1e-3


@pytest.mark.parametrize("rows", [1, 7, 199, 5000])
def test_condensed_rows_have_the_mean_and_the_ends_of_all(rows):
    y = torch.zeros(rows, 3, dtype=torch.float64).cauchy_(generator=rng())
    points, weights = condense(y)
    torch.testing.assert_close((weights * points).sum(0), y.mean(0))
    assert weights.sum().item() == pytest.approx(1.0)
    assert len(points) <= min(rows, 200)
    if rows > 1:
        torch.testing.assert_close(points[[0, -1]], torch.stack([y.min(0).values, y.max(0).values]))


@pytest.mark.parametrize("sizes", [[1] * 37, [5, 1, 30, 1], [100]])
def test_thinned_rows_are_evenly_spread(sizes):
    rows, thinned = torch.arange(sum(sizes))[:, None], Thinned(4)
    for part in rows.split(sizes):
        thinned.add(part)
    kept = thinned.rows().flatten().tolist()
    assert kept == list(range(0, len(rows), thinned.stride))
    assert 4 < len(kept) <= 9


def test_noise_of_a_dequantize_comes_from_the_generator():
    x = torch.randint(0, 8, (400, 3), generator=rng()).double()
    found = []
    for seed in (0, 0, 1):
        flow = flow_in(ebflow_nflows, [FullLinear(3), SinhArcsinh(3), FullLinear(3)], [3])
        model = ebf.wrap(flow, preprocess=[ebf.Dequantize(8), ebf.Rescale(0.05, 0.95), ebf.Logit()])
        state = torch.get_rng_state()
        model.initialize(x, gaussianize=True, generator=rng(seed))
        model.calibrate(x, generator=rng(seed))
        assert torch.equal(state, torch.get_rng_state())
        found.append(flow._transform._transforms[0].weight)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


# Errors that say what is the case


def test_what_cannot_be_made_gaussian():
    def refused(layers, shape, x, message, **options):
        flow = flow_in(ebflow_nflows, layers, shape)
        with pytest.raises(ebf.InputError, match=message):
            ebf.wrap(flow, **options).initialize(x, gaussianize=True)

    with pytest.raises(ebf.InputError, match=r"elementwise nonlinearity(?s:.*)found nothing"):
        ebf.wrap(linear_flow()).initialize(data(), gaussianize=True)
    refused([FullLinear(D), transforms.Logit(), FullLinear(D)], [D], data(), "no finite log-det", match_after=None)
    refused([FullLinear(D, bias=False), SmoothLeakyReLU(0.3)], [D], data(), "needs a full layer with a bias")
    images = torch.randn(20, 2, 4, 4, dtype=torch.float64)
    convolution = [FullConv2d(2, kernel_size=1), SmoothLeakyReLU(0.3)]
    refused(convolution, [2, 4, 4], images, "another full layer with a bias(?s:.*)Use whiten=True alone")
    columns = [FullConv2d(2, kernel_size=1), SinhArcsinh(4), FullConv2d(2, kernel_size=1)]  # a map for each column
    refused(columns, [2, 4, 4], images, "elementwise nonlinearity(?s:.*)found(?s:.*)SinhArcsinh")
    tied, of_parameter, of_memory = (FullLinear(D).double() for _ in range(3))
    of_parameter.weight, of_memory.weight.data = tied.weight, tied.weight.data
    for twin in (tied, of_parameter, of_memory):
        refused([tied, SmoothLeakyReLU(0.3), twin], [D], data(), "parameters of its own")
    refused([FullLinear(D), SinhArcsinh(D), FullLinear(D)], [D], data()[:9], "at least 10 data points")
    refused([FullLinear(D), SinhArcsinh(D), FullLinear(D)], [D], data() * float("nan"), "NaN")


@pytest.mark.parametrize("start", ["whiten", "gaussianize"])
def test_what_has_no_variance_is_told_apart(start):
    x = torch.randn(500, D, dtype=torch.float64, generator=rng())
    constant, dependent = x.clone(), x.clone()
    constant[:, 1] = 3.0
    dependent[:, 1] = dependent[:, 0] - 2.0 * dependent[:, 2]
    with pytest.raises(ebf.SingularError, match=r"features \[1\] of the input of .*FullLinear.* are constant over"):
        nflows_model().initialize(constant, **{start: True})
    with pytest.raises(ebf.SingularError, match=f"linearly dependent(?s:.*)1 of {D} directions"):
        nflows_model().initialize(dependent, **{start: True})


def test_fewer_rows_than_features_are_shrunk():
    x = torch.randn(30, 40, dtype=torch.float64, generator=rng())
    report = nflows_model(("sinh",), 40).initialize(x, gaussianize=True)
    assert report.layers[0].shrinkage > 0
    assert math.isfinite(report.nll)


def test_a_start_drops_the_calibration_of_the_weights_before():
    x = torch.randn(600, 4, generator=rng(0)).exp()
    layers = [FullLinear(4), SinhArcsinh(4), FullLinear(4)]
    for start in ({"gaussianize": True}, {"whiten": True}):
        model = ebf.wrap(flow_in(ebflow_nflows, copy.deepcopy(layers), [4]).float())
        model.calibrate(x)
        model.initialize(x, **start)
        torch.testing.assert_close(model.log_prob(x), model.flow.log_prob(x))


@pytest.mark.parametrize("seed", range(4))
def test_few_gaussian_rows_are_not_made_less_likely(seed):
    """Few rows must not judge what they were fitted to: fresh rows are about as likely as after a whitening alone."""
    mixing = torch.randn(8, 8, generator=rng(100 + seed), dtype=torch.float64)
    draw = torch.randn(2024, 8, generator=rng(seed), dtype=torch.float64) @ mixing
    x, fresh = draw[:24], draw[24:]
    layers = [FullLinear(8), SinhArcsinh(8), FullLinear(8), SinhArcsinh(8), FullLinear(8)]
    found = []
    for start in ({"gaussianize": True}, {"whiten": True}):
        model = ebf.wrap(flow_in(ebflow_nflows, copy.deepcopy(layers), [8]))
        model.initialize(x, **start)
        if "whiten" in start:
            model.calibrate(x)
        found.append(-model.log_prob(fresh).mean().item())
    assert found[0] < found[1] + 4.0
