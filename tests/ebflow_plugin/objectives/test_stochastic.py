"""ML without determinants: the gradient is that of exact ML, in expectation and with a complete set of probes."""

import copy
import math

import normflows as nf
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from nflows.distributions.normal import StandardNormal
from nflows.flows.base import Flow
from nflows.transforms import ActNorm, InverseTransform, LULinear, NaiveLinear, RandomPermutation

import ebflow_normflows
import ebflow_plugin as ebf
from ebflow_nflows import FullConv2d, FullLinear, SmoothLeakyReLU
from ebflow_plugin import testing
from ebflow_plugin.objectives import DSM, ML, stochastic
from ebflow_plugin.plan.log_dets import log_det_methods
from randomness import rng
from stochastic_models import batch, gradient, nflows_model, perturbed, unit_probes

DOUBLE = torch.float64


def normflows_model(*flows, shape):
    base = nf.distributions.DiagGaussian(shape if len(shape) > 1 else shape[0])
    return ebf.wrap(perturbed(nf.NormalizingFlow(base, list(flows))))


LAYERS = {
    "zeros": lambda: nflows_model(FullConv2d(2, kernel_size=3), shape=[2, 5, 4]),
    "circular": lambda: nflows_model(FullConv2d(12, kernel_size=(1, 2), padding_mode="circular"), shape=[12, 1, 2]),
    "reflect": lambda: nflows_model(FullConv2d(2, kernel_size=3, padding_mode="reflect"), shape=[2, 5, 4]),
    "replicate": lambda: nflows_model(FullConv2d(2, kernel_size=(3, 2), padding_mode="replicate"), shape=[2, 5, 4]),
    "dilation": lambda: nflows_model(FullConv2d(1, kernel_size=3, dilation=2), shape=[1, 7, 6]),
    "groups": lambda: nflows_model(FullConv2d(4, kernel_size=3, groups=2), shape=[4, 4, 4]),
    "stride": lambda: nflows_model(FullConv2d(2, kernel_size=4, stride=2), shape=[8, 3, 2]),
    "stride and groups": lambda: nflows_model(FullConv2d(2, kernel_size=3, stride=(2, 1), groups=2), shape=[4, 3, 4]),
    "wide 1 x 1": lambda: nflows_model(FullConv2d(10, kernel_size=1), shape=[10, 1, 2]),
    "wide patches in groups": lambda: nflows_model(FullConv2d(4, kernel_size=2, stride=2, groups=2), shape=[16, 1, 1]),
    "inverted convolution": lambda: nflows_model(InverseTransform(FullConv2d(2, kernel_size=3)), shape=[2, 5, 4]),
    "inverted stride": lambda: nflows_model(InverseTransform(FullConv2d(2, kernel_size=4, stride=2)), shape=[2, 6, 4]),
    "FullLinear": lambda: nflows_model(FullLinear(8, init="orthogonal"), shape=[8]),
    "FullLinear of rows": lambda: nflows_model(FullLinear(8), shape=[2, 8]),
    "inverted FullLinear": lambda: nflows_model(InverseTransform(FullLinear(8)), shape=[8]),
    "NaiveLinear": lambda: nflows_model(NaiveLinear(8, orthogonal_initialization=False), shape=[8]),
    "inverted NaiveLinear": lambda: nflows_model(
        InverseTransform(NaiveLinear(8, orthogonal_initialization=False)), shape=[8]
    ),
    "normflows FullConv2d": lambda: normflows_model(ebflow_normflows.FullConv2d(2, kernel_size=3), shape=(2, 5, 4)),
    "normflows reversed FullConv2d": lambda: normflows_model(
        nf.flows.Reverse(ebflow_normflows.FullConv2d(2, kernel_size=3)), shape=(2, 5, 4)
    ),
    "normflows FullLinear": lambda: normflows_model(ebflow_normflows.FullLinear(8), shape=(8,)),
    "InvertibleAffine": lambda: normflows_model(nf.flows.InvertibleAffine(8, use_lu=False), shape=(8,)),
    "reversed InvertibleAffine": lambda: normflows_model(
        nf.flows.Reverse(nf.flows.InvertibleAffine(8, use_lu=False)), shape=(8,)
    ),
    "wide Invertible1x1Conv": lambda: normflows_model(nf.flows.Invertible1x1Conv(9, use_lu=False), shape=(9, 1, 2)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_complete_set_of_probes_gives_the_exact_gradient(name, monkeypatch):
    model = LAYERS[name]()
    x = batch(model)
    monkeypatch.setattr(stochastic, "signs_like", unit_probes)
    ((step, shapes),) = model.core.shapes(model.plan.event_shape)
    size = math.prod(step.operator(shapes).out_shape)
    loss = ML(model, log_det="stochastic", probes=size, tolerance=1e-11, iterations=size)
    assert set(log_det_methods(model.plan, model.plan.event_shape, "stochastic").values()) == {"stochastic"}
    torch.testing.assert_close(gradient(loss, x), gradient(ML(model), x), rtol=1e-8, atol=1e-8)
    assert loss.metrics()["exact_log_dets"] == 0


@pytest.mark.parametrize("name", LAYERS)
def test_the_mean_over_draws_is_the_exact_gradient(name):
    """z-scores: each entry is within its standard error, all of them together as normal numbers are."""
    model, draws = LAYERS[name](), 60
    x = batch(model)
    exact = gradient(ML(model), x)
    loss = ML(model, log_det="stochastic", probes=2, tolerance=1e-10, generator=rng(1))
    found = torch.stack([gradient(loss, x) for _ in range(draws)])
    error = found.std(0) / math.sqrt(draws)
    noisy = error > 1e-9 * exact.norm()
    assert bool(noisy.any()) or name == "circular"  # which is its own twin, so that no noise is left
    z = torch.where(noisy, (found.mean(0) - exact) / error.clamp_min(1e-300), 0.0)
    assert z.abs().max() < 5.0
    assert z.square().sum() < 2.5 * noisy.sum().clamp_min(1)
    torch.testing.assert_close(found.mean(0)[~noisy], exact[~noisy], rtol=1e-7, atol=1e-7)


@settings(deadline=None, max_examples=40)
@given(
    channels=st.integers(1, 3),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    mode=st.sampled_from(["zeros", "circular", "reflect", "replicate"]),
    cells=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    grouped=st.booleans(),
    inverted=st.booleans(),
)
def test_any_convolution(channels, kernel, stride, dilation, mode, cells, grouped, inverted):
    """With all unit vectors for probes; the twin's inverse and its trace against their matrices on the way."""
    options = {"stride": stride, "dilation": dilation, "padding_mode": mode, "groups": channels if grouped else 1}
    try:
        layer = FullConv2d(channels, kernel_size=kernel, **options)
        shape = (channels, cells[0] * stride[0], cells[1] * stride[1])
        out_shape = layer.output_shape(shape)
    except ebf.InputError:
        assume(False)
    model = nflows_model(InverseTransform(layer) if inverted else layer, shape=shape if inverted else out_shape)
    matrix = layer.multiply(torch.eye(math.prod(shape), dtype=DOUBLE).reshape(-1, *shape)).flatten(1).mT.detach()
    assume(torch.linalg.cond(matrix) < 1e4)
    x = batch(model)
    operator = layer.operator(shape)
    size = math.prod(operator.out_shape)
    near = operator.approximate()
    if near.trace is not None:
        unit = torch.eye(size, dtype=DOUBLE)
        inverse = near.control(unit.reshape(-1, *operator.out_shape)).flatten(1).mT
        block = operator.apply(unit.reshape(-1, *operator.shape)).flatten(1).mT
        trace = near.trace(operator.weight).sum()
        torch.testing.assert_close(trace, (inverse.mT * block).sum())
        expected = torch.autograd.grad((inverse.mT * block).sum(), layer.weight)[0]
        torch.testing.assert_close(torch.autograd.grad(trace, layer.weight)[0], expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stochastic, "signs_like", unit_probes)
        loss = ML(model, log_det="stochastic", probes=size, tolerance=1e-9, iterations=size)
        torch.testing.assert_close(gradient(loss, x), gradient(ML(model), x), rtol=1e-5, atol=1e-5)


def deep():
    naive = NaiveLinear(8, orthogonal_initialization=False)
    steps = [ActNorm(8), FullLinear(8), SmoothLeakyReLU(0.3), RandomPermutation(8), LULinear(8), naive]
    return nflows_model(*steps, shape=[8])


def test_in_single_precision_and_to_a_loose_tolerance():
    model = nflows_model(FullConv2d(3, kernel_size=5), shape=[3, 8, 8])
    x = batch(model)
    exact = gradient(ML(model), x)
    single = ebf.wrap(copy.deepcopy(model.flow).float())
    loss = ML(single, log_det="stochastic", probes=256, generator=rng())
    found = gradient(loss, x.float()).double()
    assert (found - exact).norm() < 0.1 * exact.norm()
    assert 0 < loss.metrics()["log_det"]["_transform._transforms.0"]["residual"] <= 0.01


def test_cheap_log_dets_are_taken_as_they_are_and_the_others_left_out_of_the_value():
    model = deep()
    x = batch(model)
    loss = ML(model, log_det="stochastic", probes=3)
    with testing.no_factorisation():
        loss(x).backward()
    ways = log_det_methods(model.plan, (8,), "stochastic")
    assert list(ways.values()) == ["exact", "stochastic", "exact", "exact", "stochastic"]
    left_out = sum(value for step, value in model.plan.log_dets((8,), x) if ways[step] == "stochastic")
    torch.testing.assert_close(loss(x), ML(model)(x) + left_out)
    with torch.no_grad():
        torch.testing.assert_close(loss(x), ML(model)(x) + left_out)
    exact, found = gradient(ML(model), x), gradient(loss, x)
    sizes = [parameter.numel() for parameter in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    for name, ours, theirs in zip(names, found.split(sizes), exact.split(sizes), strict=True):
        if name.endswith("weight"):
            assert not torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs)


def test_the_generator_decides_and_nothing_else_draws():
    model = nflows_model(FullConv2d(2, kernel_size=3), shape=[2, 5, 4])
    x = batch(model)
    state = torch.get_rng_state()
    first, again = (gradient(ML(model, log_det="stochastic", probes=2, generator=rng(3)), x) for _ in range(2))
    other = gradient(ML(model, log_det="stochastic", probes=2, generator=rng(4)), x)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_sums_and_preprocessing():
    """MaP: in data space as ML, and with gradients that do not change by it."""
    flow = perturbed(Flow(FullConv2d(1, kernel_size=3), StandardNormal([1, 4, 4])))
    model = ebf.wrap(flow, preprocess=[ebf.Rescale(0.05, 0.95), ebf.Logit()])
    x = torch.rand(6, 1, 4, 4, generator=rng(), dtype=DOUBLE)
    loss = ML(model, log_det="stochastic", probes=400, generator=rng(1))
    exact = ML(model)
    found, expected = gradient(loss, x), gradient(exact, x)
    assert (found - expected).norm() < 0.05 * expected.norm()
    log_z = model.core.log_z((1, 4, 4), x)
    torch.testing.assert_close(loss(x), exact(x) - log_z)
    both = 0.5 * loss + 0.5 * DSM(model, generator=rng(2))
    both(x).backward()
    assert both.metrics()["exact_log_dets"] == 0


def test_layers_that_are_not_trained_are_not_solved_for():
    model = nflows_model(FullConv2d(2, kernel_size=3), shape=[2, 5, 4])
    model.flow._transform._transforms[0].weight.requires_grad_(False)
    model.flow._transform._transforms[0].bias.requires_grad_(False)
    loss = ML(model, log_det="stochastic")
    assert not loss(batch(model)).requires_grad
    assert loss.metrics() == {}
