"""ML without determinants: the gradient is that of exact ML, in expectation and with a complete set of probes."""

import copy
import math
import pickle

import normflows as nf
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from nflows.distributions.normal import StandardNormal
from nflows.flows.base import Flow
from nflows.transforms import ActNorm, CompositeTransform, InverseTransform, LULinear, NaiveLinear, RandomPermutation

import ebflow_normflows
import ebflow_plugin as ebf
from ebflow_nflows import FullConv2d, FullLinear, SmoothLeakyReLU
from ebflow_plugin import testing
from ebflow_plugin.objectives import DSM, ML, RelativeML, score_matching
from randomness import rng
from warned import no_warnings

DOUBLE = torch.float64


def perturbed(flow, scale=0.1, seed=0):
    generator = rng(seed)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return flow.double()


def nflows_model(*transforms, shape):
    return ebf.wrap(perturbed(Flow(CompositeTransform(transforms), StandardNormal(shape))))


def normflows_model(*flows, shape):
    base = nf.distributions.DiagGaussian(shape if len(shape) > 1 else shape[0])
    return ebf.wrap(perturbed(nf.NormalizingFlow(base, list(flows))))


def batch(model, rows=5, seed=0):
    return torch.randn(rows, *model.plan.event_shape, generator=rng(seed), dtype=DOUBLE)


def gradient(loss, x, context=None):
    parameters = [parameter for parameter in loss.model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = None
    loss(x, context).sum().backward()
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])


def unit_probes(like, generator):
    """All unit vectors, so that the mean over the probes is the trace itself."""
    size = like[0].numel()
    assert len(like) == size
    return (math.sqrt(size) * torch.eye(size, dtype=like.dtype)).reshape(like.shape)


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
    monkeypatch.setattr(score_matching, "rademacher", unit_probes)
    ((step, shapes),) = model.core.plan.shapes(model.plan.event_shape)
    size = math.prod(step.operator(step.own_shape(shapes)).out_shape)
    loss = ML(model, log_det="stochastic", probes=size, tolerance=1e-11, iterations=size)
    assert set(loss.ways(model.plan.event_shape).values()) == {"stochastic"}
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
    try:
        layer = FullConv2d(
            channels,
            kernel_size=kernel,
            stride=stride,
            dilation=dilation,
            padding_mode=mode,
            groups=channels if grouped else 1,
        )
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
        block = operator.product(unit.reshape(-1, *operator.shape)).flatten(1).mT
        torch.testing.assert_close(near.trace(), (inverse.mT * block).sum())
        expected = torch.autograd.grad((inverse.mT * block).sum(), layer.weight)[0]
        torch.testing.assert_close(torch.autograd.grad(near.trace(), layer.weight)[0], expected)
    kept = score_matching.rademacher
    score_matching.rademacher = unit_probes
    try:
        loss = ML(model, log_det="stochastic", probes=size, tolerance=1e-9, iterations=size)
        torch.testing.assert_close(gradient(loss, x), gradient(ML(model), x), rtol=1e-5, atol=1e-5)
    finally:
        score_matching.rademacher = kept


def deep():
    steps = [
        ActNorm(8),
        FullLinear(8),
        SmoothLeakyReLU(0.3),
        RandomPermutation(8),
        LULinear(8),
        NaiveLinear(8, orthogonal_initialization=False),
    ]
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


def test_cheap_log_dets_are_taken_as_they_are():
    model = deep()
    x = batch(model)
    loss = ML(model, log_det="stochastic", probes=3)
    ways = loss.ways((8,))
    assert [way for way in ways.values()] == ["exact", "stochastic", "exact", "exact", "stochastic"]
    exact, found = gradient(ML(model), x), gradient(loss, x)
    sizes = [parameter.numel() for parameter in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    for name, ours, theirs in zip(names, found.split(sizes), exact.split(sizes), strict=True):
        if name.endswith("weight"):
            assert not torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs)


def test_the_value_is_that_of_ml_without_the_estimated_log_dets():
    model = deep()
    x = batch(model)
    loss = ML(model, log_det="stochastic", probes=1)
    left_out = sum(value for step, value in model.plan.log_dets((8,), x) if loss.ways((8,))[step.path] == "stochastic")
    torch.testing.assert_close(loss(x), ML(model)(x) + left_out)
    with torch.no_grad():
        torch.testing.assert_close(loss(x), ML(model)(x) + left_out)


def test_no_determinant_is_computed():
    model = nflows_model(
        FullLinear(8), SmoothLeakyReLU(0.3), NaiveLinear(8, orthogonal_initialization=False), shape=[8]
    )
    x = batch(model)
    with testing.no_factorisation():
        ML(model, log_det="stochastic", probes=2)(x).backward()


def test_the_generator_decides_and_nothing_else_draws():
    model = nflows_model(FullConv2d(2, kernel_size=3), shape=[2, 5, 4])
    x = batch(model)
    state = torch.get_rng_state()
    first, again = (gradient(ML(model, log_det="stochastic", probes=2, generator=rng(3)), x) for _ in range(2))
    other = gradient(ML(model, log_det="stochastic", probes=2, generator=rng(4)), x)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_sums_preprocessing_and_energy_weight():
    """MaP: in data space as ML, and with gradients that do not change by it."""
    flow = perturbed(Flow(FullConv2d(1, kernel_size=3), StandardNormal([1, 4, 4])))
    model = ebf.wrap(flow, preprocess=[ebf.Rescale(0.05, 0.95), ebf.Logit()])
    x = torch.rand(6, 1, 4, 4, generator=rng(), dtype=DOUBLE)
    loss = ML(model, log_det="stochastic", probes=400, generator=rng(1), energy_weight=0.1)
    exact = ML(model, energy_weight=0.1)
    found, expected = gradient(loss, x), gradient(exact, x)
    assert (found - expected).norm() < 0.05 * expected.norm()
    log_z = model.core.log_z((1, 4, 4))
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


def near_singular(size=8):
    layer = FullLinear(size)
    with torch.no_grad():
        layer.weight.copy_(torch.diag(torch.logspace(0, -8, size)) @ layer.weight)
    model = ebf.wrap(Flow(layer, StandardNormal([size])).double())
    return model


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
    model = nflows_model(FullConv2d(2, kernel_size=3), shape=[2, 5, 4])
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


def test_probes_are_chosen_from_the_first_batches():
    """As many as make the noise of the probes half of that of the batch, or as the cost of the step allows."""
    model = nflows_model(FullConv2d(2, kernel_size=3), shape=[2, 6, 6])
    path = "_transform._transforms.0"
    loss = ML(model, log_det="stochastic", generator=rng())
    x = batch(model, rows=400)
    for _ in range(2):
        loss(x)
        assert loss._estimator.accounts[path].probes is None
    loss(x)
    account = loss._estimator.accounts[path]
    exact = [gradient(ML(model), batch(model, rows=400, seed=seed)) for seed in range(20)]
    by_batch = torch.stack(exact).var(0).sum()
    drawn = ML(model, log_det="stochastic", probes=account.probes, generator=rng(1))
    by_probes = torch.stack([gradient(drawn, x) for _ in range(60)]).var(0).sum()
    assert account.probes > 1
    assert 0.1 * by_batch < by_probes < 1.0 * by_batch
    few = ML(model, log_det="stochastic", generator=rng())
    for _ in range(3):
        few(x[:20])
    chosen = few._estimator.accounts[path]
    assert chosen.probes * (chosen.iterations + 3) <= 0.5 * 3 * 20
    alone = ML(model, log_det="stochastic")
    for _ in range(4):
        alone(x[:1])  # a batch of one has no noise to compare with
    assert alone.metrics()["log_det"][path]["probes"] == 4


def test_state_goes_on_where_it_was():
    model = nflows_model(FullConv2d(2, kernel_size=3), FullLinear(4), shape=[2, 6, 4])
    loss = ML(model, log_det="stochastic", generator=rng())
    x = batch(model, rows=30)
    loss(x)
    other = ML(model, log_det="stochastic", generator=rng())
    other.load_state(loss.state())
    other.generator.set_state(loss.generator.get_state())
    for _ in range(4):
        assert torch.equal(gradient(loss, x), gradient(other, x))
    assert loss.state() == other.state()


def test_a_context():
    from nflows.nn.nets import ResidualNet
    from nflows.transforms import AffineCouplingTransform

    coupling = AffineCouplingTransform([0, 1] * 4, lambda i, o: ResidualNet(i, o, 6, context_features=2))
    model = nflows_model(FullLinear(8), coupling, shape=[8])
    x, context = batch(model), torch.randn(5, 2, generator=rng(), dtype=DOUBLE)
    loss = ML(model, log_det="stochastic", probes=500, generator=rng())
    found, exact = gradient(loss, x, context), gradient(ML(model), x, context)
    assert (found - exact).norm() < 0.2 * exact.norm()
    plain = gradient(ML(model, log_det="stochastic"), x, context)  # which looks at halves of the batch
    assert bool(plain.isfinite().all())


def test_auto_chooses_by_the_cost_and_the_report_shows_it():
    layers = [
        FullConv2d(3, kernel_size=7),
        SmoothLeakyReLU(0.3),
        FullConv2d(3, kernel_size=3, padding_mode="circular"),
        FullConv2d(3, kernel_size=1),
    ]
    model = nflows_model(*layers, shape=[3, 16, 16])
    assert list(ML(model, log_det="auto").ways((3, 16, 16)).values()) == ["stochastic", "exact", "exact"]
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


def test_relative_is_one_implementation():
    model = nflows_model(FullLinear(8), SmoothLeakyReLU(0.3), shape=[8])
    x = batch(model)
    short, long = RelativeML(model), ML(model, log_det="relative")
    assert torch.equal(gradient(short, x), gradient(long, x))
    assert torch.equal(short(x), long(x))
    assert isinstance(short, ML)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"log_det": "krylov"}, "unknown log_det 'krylov'. Valid names: auto, exact, relative, stochastic"),
        ({"log_det": "stochastic", "probes": 0}, "probes must be an integer, at least 1, got 0"),
        ({"log_det": "stochastic", "tolerance": 1.5}, "tolerance is a relative residual, below 1, got 1.5"),
        ({"log_det": "auto", "iterations": 2.5}, "iterations must be an integer"),
        ({"probes": 3}, "probes, tolerance and iterations have no meaning for log_det='exact'"),
        ({"log_det": "relative"}, "this one has none; use ML"),
    ],
)
def test_options_that_cannot_be(options, message):
    model = nflows_model(LULinear(8), shape=[8])
    with pytest.raises(ebf.InputError, match=message):
        ML(model, **options)


def test_options_are_shown():
    model = nflows_model(FullLinear(8), shape=[8])
    assert repr(ML(model)).startswith("ML(\n  reduction='mean'")
    shown = repr(ML(model, log_det="stochastic"))
    assert "log_det='stochastic', probes=chosen, tolerance=0.01, iterations=50, reduction='mean'" in shown


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
    model = nflows_model(FullConv2d(2, kernel_size=3), shape=[2, 5, 4])
    x = batch(model)
    loss = ML(model, log_det="stochastic", probes=2)
    loss(x)
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        loss.generator, other.generator = rng(1), rng(1)
        assert other.model is not model
        assert torch.equal(gradient(other, x), gradient(loss, x))
        loss.generator = None


def test_a_batch_that_is_not_finite_is_no_reason_to_choose():
    model = nflows_model(FullConv2d(2, kernel_size=3), shape=[2, 5, 4])
    loss = ML(model, log_det="stochastic")
    x = batch(model)
    x[0] = float("inf")
    for _ in range(4):
        assert not torch.isfinite(loss(x))
    assert loss.metrics()["log_det"]["_transform._transforms.0"]["probes"] == 4
    with pytest.raises(ebf.InputError, match="leave log_det out"):
        RelativeML(model, log_det="exact")
