"""Likelihood without determinants: what it falls back to, chooses, keeps and refuses."""

import copy
import math
import pickle
from statistics import median

import pytest
import torch
from nflows.distributions.normal import StandardNormal
from nflows.flows.base import Flow
from nflows.transforms import AffineCouplingTransform, InverseTransform, LULinear

import ebflow_plugin as ebf
from ebflow_nflows import FullConv2d, FullLinear, SmoothLeakyReLU
from ebflow_plugin.objectives import ML
from ebflow_plugin.plan.log_dets import log_det_methods
from nflows_small import smooth_net
from randomness import randn, rng
from stochastic_models import batch, gradient, nflows_model, perturbed
from warned import no_warnings

DOUBLE = torch.float64


def near_singular(size=8):
    layer = FullLinear(size)
    with torch.no_grad():
        layer.weight.copy_(torch.diag(torch.logspace(0, -8, size)) @ layer.weight)
    return ebf.wrap(Flow(layer, StandardNormal([size])).double())


def conv_layer():
    return FullConv2d(2, kernel_size=3)


def conv():
    return nflows_model(conv_layer(), shape=[2, 6, 6])


def test_no_convergence_takes_the_exact_log_det_counts_and_warns_once():
    model = near_singular()
    x = batch(model)
    exact = gradient(ML(model), x)
    loss = ML(model, log_det="stochastic", probes=2, iterations=2)
    with pytest.warns(
        UserWarning, match=r"(?s)_transform  FullLinear.*not converge in 2 iterations \(residual [\d.]+e"
    ):
        found = gradient(loss, x)
    torch.testing.assert_close(found, exact)
    assert loss.metrics()["exact_log_dets"] == 1
    with no_warnings():
        # the inverse of that step preconditions the next: it converges at once, and with no noise left
        torch.testing.assert_close(gradient(loss, x), exact, rtol=1e-6, atol=1e-6)
    metrics = loss.metrics()["log_det"]["_transform"]
    assert (metrics["exact"], metrics["iterations"]) == (1, 1)


def test_a_convolution_that_does_not_converge():
    model = conv()
    x = batch(model)
    loss = ML(model, log_det="stochastic", probes=2, tolerance=1e-9, iterations=3)
    with pytest.warns(UserWarning, match="not converge in 3 iterations"):
        torch.testing.assert_close(gradient(loss, x), gradient(ML(model), x))
    with no_warnings():
        torch.testing.assert_close(gradient(loss, x), gradient(ML(model), x))
    assert loss.metrics()["exact_log_dets"] == 2


@pytest.mark.filterwarnings("ignore:.*did not converge")
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("make", [lambda: FullLinear(6), lambda: FullConv2d(2, kernel_size=3)])
def test_a_singular_layer_is_named(value, make):
    layer = make()
    shape = [6] if isinstance(layer, FullLinear) else [2, 5, 4]
    with torch.no_grad():
        layer.weight[0] = value
    model = ebf.wrap(Flow(layer, StandardNormal(shape)).double())
    with pytest.raises(ebf.SingularError, match=r"_transform  Full"):
        ML(model, log_det="stochastic", probes=2)(batch(model))


PATH = "_transform._transforms.0"


def total_variance(gradients):
    return float(torch.stack(gradients).var(0).sum())


def test_the_number_of_probes_minimises_variance_times_cost():
    """Both variances against those of fresh draws, and the number against every other one."""
    model = conv()
    x, rows = batch(model, rows=400), 400
    loss = ML(model, log_det="stochastic", generator=rng())
    for seed in range(20):
        loss(batch(model, rows=rows, seed=100 + seed))
    account = loss._estimator.accounts[PATH]
    by_batch = total_variance([gradient(ML(model), batch(model, rows=rows, seed=seed)) for seed in range(40)])
    one = ML(model, log_det="stochastic", probes=1, generator=rng(1))
    by_probe = total_variance([gradient(one, x) for _ in range(200)])
    assert 0.5 * by_batch < median(account.row_noises) / rows < 2.0 * by_batch
    assert 0.5 * by_probe < median(account.noise_factors) * account.remainder < 2.0 * by_probe

    def spent(count):
        return (by_batch + by_probe / count) * (3 * rows + count * (3 * account.iterations + 3))

    assert 4 < account.probes < 64
    assert spent(account.probes) < 1.1 * min(spent(count) for count in range(1, 65))


def test_probes_follow_the_noise_from_step_to_step():
    """A layer can leave its start in one step, and its noise grows by orders of magnitude then."""
    model = conv()
    layer = model.flow._transform._transforms[0]
    far = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.copy_(1e-3 * far)
        layer.weight[[0, 1], [0, 1], 1, 1] = 1.0
    loss = ML(model, log_det="stochastic", generator=rng())
    x = batch(model, rows=400)
    for _ in range(6):  # the sixth is not among those in which the noise is measured, nor are the next two
        loss(x)
    account = loss._estimator.accounts[PATH]
    measured = account.noise_factors, account.row_noises
    assert account.probes == 1
    with torch.no_grad():
        layer.weight.copy_(far)
    loss(x)
    loss(x)
    assert (account.noise_factors, account.row_noises) == measured
    assert account.probes > 4


def test_probes_cost_no_more_than_the_batch_but_four_are_left():
    model = conv()
    for rows in (2, 20, 60):
        loss = ML(model, log_det="stochastic", generator=rng(), tolerance=1e-9)
        for seed in range(8):
            loss(1e-3 * batch(model, rows=rows, seed=seed))  # a batch of next to no noise
        account = loss._estimator.accounts[PATH]
        assert account.probes == max(4, -(-3 * rows // (3 * account.iterations + 3)))


def test_noise_that_cannot_be_compared_leaves_four_probes():
    model = conv()
    alone, equal = (ML(model, log_det="stochastic") for _ in range(2))
    x = batch(model, rows=1)
    for _ in range(6):
        alone(x)  # a batch of one
        equal(x.expand(400, -1, -1, -1))  # a batch without noise
    assert alone.metrics()["log_det"][PATH]["probes"] == 4
    assert equal.metrics()["log_det"][PATH]["probes"] == 4


@pytest.mark.parametrize("scale", [1e-25, 1e-60])
def test_remainders_beyond_single_precision(scale):
    """Their lengths, or their squares, are infinite there: a factor of zero would be no number in the next step."""
    model = conv()
    with torch.no_grad():
        model.flow._transform._transforms[0].weight.mul_(scale)
    loss = ML(model, log_det="stochastic", generator=rng())
    for _ in range(6):
        assert bool(gradient(loss, batch(model, rows=30)).isfinite().all())
    assert bool(loss._estimator.accounts[PATH].noise_factors) == (scale == 1e-25)


def chosen(model, batches):
    """The number of probes after these batches, where the noise is not measured."""
    loss = ML(model, log_det="stochastic", generator=rng())
    for x in batches:
        loss(x)
    account = loss._estimator.accounts[PATH]
    account.calls = 7
    assert not account.measures
    return account.best_probes(len(batches[-1]), 1)


def test_one_odd_batch_changes_nothing():
    model = conv()
    steps = [batch(model, rows=400, seed=seed) for seed in range(17)]
    usual = chosen(model, steps)
    steps[16] = 300 * steps[16]  # whose noise is measured
    assert usual > 4
    assert chosen(model, steps) == pytest.approx(usual, rel=0.25)


def test_probes_follow_the_noise_of_the_batches_when_it_stays():
    model = conv()
    quiet = [batch(model, rows=400, seed=seed) for seed in range(160)]
    loud = [100 * x for x in quiet[:5]]
    assert chosen(model, loud) == 1
    assert chosen(model, [*loud, *quiet]) == pytest.approx(chosen(model, quiet), rel=0.25)


def test_the_noise_of_a_batch_is_that_of_its_size():
    model = conv()
    large, small = ([batch(model, rows=rows, seed=seed) for seed in range(5)] for rows in (400, 100))
    assert chosen(model, [*small, large[0]]) == pytest.approx(chosen(model, large), rel=0.25)  # without: one half


def test_a_probe_through_one_of_many_equal_blocks_is_cheap():
    """A batch goes through a 1 × 1 convolution at each pixel, a probe through one of them."""
    model = nflows_model(FullConv2d(40, kernel_size=1), shape=[40, 4, 4])
    loss = ML(model, log_det="stochastic", generator=rng())
    x = batch(model, rows=10)
    for _ in range(6):
        loss(x)
    account = loss._estimator.accounts[PATH]
    noise = median(account.noise_factors) * account.remainder * 10 / median(account.row_noises)
    cost = 3 * 10 * 16 / (3 * account.iterations + 3)
    best = math.ceil(min(math.sqrt(noise * cost), max(4, cost)))
    loss(x)
    assert account.probes == best > 4


@pytest.mark.parametrize(
    ("layer", "shape"), [(conv_layer, [2, 6, 6]), (lambda: FullLinear(8), [8])], ids=["conv", "linear"]
)
def test_a_frozen_weight_beside_a_bias_is_not_solved_for(layer, shape):
    model = nflows_model(layer(), shape=shape)
    module = model.flow._transform._transforms[0]
    module.weight.requires_grad_(False)
    loss, x = ML(model, log_det="stochastic"), batch(model)
    torch.testing.assert_close(gradient(loss, x), gradient(ML(model), x))
    assert loss.metrics() == {}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("layer", "shape"), [(conv_layer, [2, 6, 6]), (lambda: FullLinear(8), [8])], ids=["conv", "linear"]
)
def test_a_weight_that_another_module_computes(layer, shape, bias):
    """A hypernetwork, or a tied weight: the module itself has no parameter, or no other than its bias."""
    model = nflows_model(layer(), shape=shape)
    module = model.flow._transform._transforms[0]
    module.bias.requires_grad_(bias)
    start = module.weight.detach().clone()
    scale = torch.ones_like(start).requires_grad_()
    del module.weight
    x = batch(model)

    def by_scale(loss):
        module.weight = start * scale
        model.rebuild()
        return torch.autograd.grad(loss(x), scale)[0]

    exact = by_scale(ML(model))
    loss = ML(model, log_det="stochastic", probes=2000, generator=rng())
    found = by_scale(loss)
    assert (found - exact).norm() < 0.1 * exact.norm()
    chosen_itself = ML(model, log_det="stochastic", generator=rng())
    for _ in range(6):
        by_scale(chosen_itself)
    assert chosen_itself.metrics()["log_det"][PATH]["probes"] == 4  # its noise cannot be measured here


def test_a_context():
    coupling = AffineCouplingTransform([0, 1] * 4, smooth_net(2, hidden=6))
    model = nflows_model(FullLinear(8), coupling, shape=[8])
    x, context = batch(model), randn(5, 2)
    loss = ML(model, log_det="stochastic", probes=500, generator=rng())
    found, exact = gradient(loss, x, context), gradient(ML(model), x, context)
    assert (found - exact).norm() < 0.2 * exact.norm()
    plain = gradient(ML(model, log_det="stochastic"), x, context)  # which looks at halves of the batch
    assert bool(plain.isfinite().all())


def test_auto_chooses_by_the_cost_and_the_report_shows_it():
    large, circular = FullConv2d(3, kernel_size=7), FullConv2d(3, kernel_size=3, padding_mode="circular")
    layers = [large, SmoothLeakyReLU(0.3), circular, FullConv2d(3, kernel_size=1)]
    model = nflows_model(*layers, shape=[3, 16, 16])
    assert list(log_det_methods(model.plan, (3, 16, 16), "auto").values()) == ["stochastic", "exact", "exact"]
    assert [row.log_det for row in model.report] == ["stochastic", "-", "exact", "exact"]
    assert 'ML(log_det="auto"): stochastic for 1 of 3 linear steps' in str(model.report)
    dense = nflows_model(FullLinear(8), InverseTransform(FullLinear(8)), shape=[8])
    assert [row.log_det for row in dense.report] == ["relative", "exact"]
    x = batch(dense)
    found, exact = gradient(ML(dense, log_det="auto"), x), gradient(ML(dense), x)
    weight = dense.flow._transform._transforms[0].weight.detach()
    first, rest = found[:64].reshape(8, 8), found[64:]
    torch.testing.assert_close(first, exact[:64].reshape(8, 8) @ weight.mT @ weight)
    torch.testing.assert_close(rest, exact[64:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"log_det": "krylov"}, "unknown log_det 'krylov'. Valid names: auto, exact, relative, stochastic"),
        ({"log_det": "stochastic", "probes": 0}, "probes must be an integer, at least 1, got 0"),
        ({"log_det": "stochastic", "tolerance": 1.5}, "tolerance is a relative residual, below 1, got 1.5"),
        ({"log_det": "auto", "iterations": 2.5}, "iterations must be an integer"),
        ({"probes": 3}, "probes, tolerance and iterations have no meaning for log_det='exact'"),
        ({"log_det": "relative"}, "log_det='relative' is for flows with FullLinear layers, and this one has none"),
        ({"log_det": "relative", "probes": 3}, "probes, tolerance and iterations have no meaning for log_det='rel"),
    ],
)
def test_options_that_cannot_be(options, message):
    model = nflows_model(LULinear(8), shape=[8])
    with pytest.raises(ebf.InputError, match=message):
        ML(model, **options)


def test_options_are_shown():
    model = nflows_model(FullLinear(8), shape=[8])
    assert repr(ML(model)).startswith("ML(\n  log_det='exact'\n")
    shown = repr(ML(model, log_det="stochastic"))
    assert "log_det='stochastic', probes=chosen, tolerance=0.01, iterations=50" in shown


def test_on_the_meta_device_nothing_is_asked():
    model = ebf.wrap(Flow(FullConv2d(2, kernel_size=3, device="meta"), StandardNormal([2, 5, 4])).to("meta"))
    loss = ML(model, log_det="stochastic")
    loss(torch.randn(5, 2, 5, 4, device="meta")).backward()
    assert model.flow._transform.weight.grad.is_meta


def test_half_precision_weights_are_solved_in_single():
    model = ebf.wrap(perturbed(Flow(FullConv2d(2, kernel_size=3), StandardNormal([2, 5, 4]))).to(torch.bfloat16))
    with no_warnings():
        ML(model, log_det="stochastic", probes=2, tolerance=1e-5)(batch(model).to(torch.bfloat16)).backward()
    assert model.flow._transform.weight.grad.dtype == torch.bfloat16


def test_copies_and_pickles():
    model = conv()
    x = batch(model)
    loss = ML(model, log_det="stochastic", probes=2)
    loss(x)
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        loss.generator, other.generator = rng(1), rng(1)
        assert other.model is not model
        assert torch.equal(gradient(other, x), gradient(loss, x))
        loss.generator = None


def test_a_batch_that_is_not_finite_is_no_reason_to_choose():
    model = conv()
    loss = ML(model, log_det="stochastic")
    x = batch(model)
    x[0] = float("inf")
    for _ in range(4):
        assert not torch.isfinite(loss(x))
    assert loss.metrics()["log_det"]["_transform._transforms.0"]["probes"] == 4
