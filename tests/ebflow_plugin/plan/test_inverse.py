"""Samples by the inverse: temperature, batches, kept factorisations."""

import math
import sys
from concurrent.futures import ThreadPoolExecutor

import normflows
import numpy as np
import pytest
import torch
import zuko
from nflows import distributions, flows, transforms
from torch import nn

import ebflow_nflows
import ebflow_plugin as ebf
from nflows_small import flow_of
from randomness import rng

D = 4
WIDE = torch.float64


def make_flow():
    torch.manual_seed(0)
    first = transforms.NaiveLinear(D, orthogonal_initialization=False)
    last = ebflow_nflows.FullLinear(D, init="orthogonal")
    return flow_of(first, ebflow_nflows.SmoothLeakyReLU(0.5), last, shape=(D,), mode="eval")


def shifted_nflows():
    base = distributions.DiagonalNormal([D])
    with torch.no_grad():
        base.mean_ += 2.0
        base.log_std_ -= 1.0
    return flows.Flow(transforms.IdentityTransform(), base).to(WIDE)


def shifted_normflows():
    base = normflows.distributions.DiagGaussian(D)
    with torch.no_grad():
        base.loc += 2.0
        base.log_scale -= 1.0
    return normflows.NormalizingFlow(base, [normflows.flows.Permute(D)]).to(WIDE)


class Wrapped(nn.Module):
    """A base density that nflows takes, around one of torch."""

    def __init__(self, distribution):
        super().__init__()
        self.distribution = distribution

    def log_prob(self, inputs, context=None):
        return self.distribution.log_prob(inputs)

    def sample(self, n):
        return self.distribution.sample((n,))


@pytest.mark.parametrize("make", [shifted_nflows, shifted_normflows])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_the_temperature_scales_about_the_mean(make, temperature):
    samples = ebf.wrap(make()).sample(20_000, temperature=temperature, generator=rng())
    spread = temperature * torch.tensor(-1.0).exp().item()
    assert torch.allclose(samples.mean(0), torch.full((D,), 2.0, dtype=WIDE), atol=5 * spread / 20_000**0.5)
    assert torch.allclose(samples.std(0), torch.full((D,), spread, dtype=WIDE), rtol=0.03)


def test_the_temperature_of_a_multiscale_flow():
    """Squeezes and merges alone: the map is linear, and the means are zero."""
    flows_ = [[normflows.flows.Squeeze()], [normflows.flows.Squeeze()]]
    bases = [normflows.distributions.DiagGaussian((8, 1, 1)), normflows.distributions.GlowBase((2, 2, 2))]
    model = ebf.wrap(normflows.MultiscaleFlow(bases, flows_, [normflows.flows.Merge()], class_cond=False))
    warm, cold = (model.sample(10, temperature=temperature, generator=rng()) for temperature in (1.0, 0.5))
    assert warm.shape == (10, 1, 4, 4)
    assert torch.allclose(cold, 0.5 * warm)
    assert [base.temperature for base in bases] == [None, None]


def test_the_temperature_of_a_conditional_base():
    torch.manual_seed(0)
    base = distributions.ConditionalDiagonalNormal([D], context_encoder=nn.Linear(2, 2 * D))
    model = ebf.wrap(flows.Flow(transforms.IdentityTransform(), base))
    context = torch.randn(3, 2)
    cold, warm = (model.sample(5000, context, temperature=t, generator=rng()) for t in (0.1, 1.0))
    assert cold.shape == (3, 5000, D)
    mean = base._compute_params(context)[0]
    assert torch.allclose(cold - mean[:, None], 0.1 * (warm - mean[:, None]), atol=1e-4)


def test_a_base_without_a_temperature_names_itself():
    base = Wrapped(torch.distributions.Laplace(torch.zeros(D), 1.0))
    model = ebf.wrap(flows.Flow(transforms.IdentityTransform(), base))
    with pytest.raises(ebf.InputError, match="needs a Gaussian base density.*\n.*Wrapped"):
        model.sample(3, temperature=0.7)


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_samples_do_not_depend_on_the_batch_size(batch_size):
    model = ebf.wrap(make_flow())
    whole = model.sample(20, generator=rng())
    assert torch.allclose(model.sample(20, generator=rng(), batch_size=batch_size), whole, atol=1e-12)
    assert whole.unique(dim=0).shape[0] == 20
    assert not whole.requires_grad
    assert not torch.equal(model.sample(20), model.sample(20))


def test_batches_with_a_context():
    layer = transforms.MaskedAffineAutoregressiveTransform(D, 8, context_features=2)
    model = ebf.wrap(flow_of(layer, shape=(D,), mode="eval"))
    context = torch.randn(3, 2, dtype=WIDE)
    state = torch.get_rng_state()
    whole, parts = (model.sample(5, context, generator=rng(), batch_size=size) for size in (None, 4))
    assert torch.equal(state, torch.get_rng_state())
    assert whole.shape == (3, 5, D)
    assert torch.allclose(whole, parts, atol=1e-12)


def test_batches_bound_the_rows_of_the_inverse():
    model, rows = ebf.wrap(make_flow()), []
    step = model.plan.steps[0]
    decode = step.decode
    step.decode = lambda z, context: rows.append(len(z)) or decode(z, context)
    model.sample(20, batch_size=8)
    assert rows == [8, 8, 4]


def test_factorisations_are_kept_over_batches_and_calls(monkeypatch):
    model, calls = ebf.wrap(make_flow()), []
    factor = torch.linalg.lu_factor_ex
    monkeypatch.setattr(torch.linalg, "lu_factor_ex", lambda weight: calls.append(1) or factor(weight))
    model.sample(1000, batch_size=10)
    model.sample(10)
    assert len(calls) == 2  # one for each of two layers
    with torch.no_grad():
        model.flow._transform._transforms[0]._weight.mul_(2.0)
    model.sample(10)
    assert len(calls) == 3


@pytest.mark.parametrize("padding_mode", ["zeros", "circular", "reflect"])  # a band, by FFT, dense
def test_convolutions_are_factorised_once(padding_mode, monkeypatch):
    layer = ebflow_nflows.FullConv2d(
        2, kernel_size=3, padding_mode=padding_mode, init="normal", generator=rng(), dtype=WIDE
    )
    model, calls = ebf.wrap(flows.Flow(layer, distributions.StandardNormal([2, 12, 12]))), []
    factor = torch.linalg.lu_factor_ex
    monkeypatch.setattr(torch.linalg, "lu_factor_ex", lambda matrix: calls.append(1) or factor(matrix))
    x = model.sample(4, generator=rng(), batch_size=2)
    once = len(calls)
    assert once > 0
    again = model.sample(4, generator=rng(), batch_size=1)
    assert len(calls) == once
    assert torch.allclose(x, again)


def test_single_precision_is_solved_in_double(monkeypatch):
    dim = 300
    layer = ebflow_nflows.FullLinear(dim, init="normal", generator=rng()).requires_grad_(False)
    model = ebf.wrap(flows.Flow(layer, distributions.StandardNormal([dim])))
    z = torch.randn(20, dim, generator=rng())
    monkeypatch.setattr(model.plan.base, "sample", lambda n, context, like: (z,))
    x = model.sample(20)
    exact = torch.linalg.solve(layer.weight.double(), z.double().mT).mT
    single = torch.linalg.solve(layer.weight, z.mT).mT
    ours, theirs = (float((found - exact).norm() / exact.norm()) for found in (x, single))
    assert x.dtype == torch.float32
    assert ours < 1e-6
    assert theirs > 10 * ours


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": -1}, "n must be an integer, at least 0, got -1"),
        ({"n": 2.5}, "n must be"),
        ({"n": (2, -1)}, "n must be an integer, at least 0, got -1"),
        ({"n": (2, 1.5)}, "n must be an integer, at least 0, got 1.5"),
        ({"n": "2"}, "n must be an integer, at least 0, got '2'"),
        ({"n": 2, "temperature": 0.0}, "temperature must be a positive number"),
        ({"n": 2, "temperature": float("nan")}, "temperature must be"),
        ({"n": 2, "batch_size": 0}, "batch_size must be"),
        ({"n": np.bool_(True)}, "n must be an integer"),
        ({"n": 3, "generator": 0}, "generator must be a torch.Generator or None, got 0"),
    ],
)
def test_errors_name_the_option(options, message):
    model = ebf.wrap(make_flow())
    with pytest.raises(ebf.InputError, match=message):
        model.sample(**options)
    assert model.sample(np.int64(3), batch_size=np.int32(2)).shape == (3, D)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), [2, 1, 3], torch.Size([3, 2]), (2, 0), (0, 2)])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_shape_of_samples(shape, batch_size):
    """It is that many samples in that shape, the same as without it."""
    model, count = ebf.wrap(make_flow()), math.prod(shape)
    samples = model.sample(shape, generator=rng(), batch_size=batch_size)
    assert samples.shape == (*shape, D)
    assert torch.equal(samples.reshape(-1, D), model.sample(count, generator=rng(), batch_size=batch_size))


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 0)])
def test_a_shape_of_samples_for_each_row_of_a_context(shape):
    context = torch.tensor([[100.0], [-100.0]])
    base = distributions.ConditionalDiagonalNormal([1], torch.nn.Linear(1, 2))
    with torch.no_grad():
        base._context_encoder.weight.copy_(torch.tensor([[1.0], [0.0]]))
    model = ebf.wrap(flows.Flow(transforms.IdentityTransform(), base))
    samples = model.sample(shape, context, generator=rng())
    assert samples.shape == (2, *shape, 1)
    assert torch.equal(samples.sign().flatten(1), context.sign().expand(2, math.prod(shape)))
    flat = model.sample(math.prod(shape), context, generator=rng())
    assert torch.equal(samples.flatten(1), flat.flatten(1))


def test_a_layer_without_an_inverse_names_itself():
    class OneWay(transforms.Transform):
        def forward(self, inputs, context=None):
            return inputs, inputs.new_zeros(len(inputs))

    with pytest.warns(UserWarning, match="OneWay"):
        model = ebf.wrap(flows.Flow(OneWay(), distributions.StandardNormal([D])))
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ebf.NoInverseError, match="OneWay"):
            model.to(dtype).sample(2)


class Whitened(transforms.IdentityTransform):
    """A user's own, whose inverse takes a determinant: torch refuses that in half precision in words of its own."""

    def inverse(self, inputs, context=None):
        return inputs, torch.linalg.slogdet(torch.eye(D).to(inputs)).logabsdet.expand(len(inputs))


@pytest.mark.filterwarnings("ignore::ebflow_plugin.UnknownStepWarning")
@pytest.mark.parametrize("name", ["LULinear", "QRLinear", "Whitened"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_precision_that_torch_lacks_is_named(name, dtype):
    layers = {"LULinear": transforms.LULinear(D), "QRLinear": transforms.QRLinear(D, 2), "Whitened": Whitened()}
    model = ebf.wrap(flows.Flow(layers[name], distributions.StandardNormal([D])))
    assert model.sample(2).isfinite().all()
    message = rf"(?s)_transform  {name}.*lacks an operation in {dtype} .*(Half|BFloat16).*float32"
    with pytest.raises(ebf.NoInverseError, match=message):
        model.to(dtype).sample(2)


MODELS = {
    "nflows": lambda: flows.Flow(transforms.LULinear(D), distributions.StandardNormal([D])),
    "normflows": lambda: normflows.NormalizingFlow(
        normflows.distributions.DiagGaussian(D), [normflows.flows.LULinearPermute(D)]
    ),
    "a mixture": lambda: normflows.NormalizingFlow(normflows.distributions.GaussianMixture(3, D), []),
    "zuko": lambda: zuko.flows.GMM(D, components=2),
    "of torch": lambda: flows.Flow(
        transforms.LULinear(D), Wrapped(torch.distributions.Independent(torch.distributions.StudentT(torch.ones(D)), 1))
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_generator_leaves_the_global_state_alone(name):
    model = ebf.wrap(MODELS[name]().eval())
    before = torch.get_rng_state()
    first, second, third = (model.sample(4, generator=rng(number)) for number in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_temperature_is_never_written_into_the_users_base():
    class Watched(normflows.distributions.DiagGaussian):
        def __setattr__(self, key, value):
            if key == "temperature" and self.__dict__.get("watched") == id(self):
                raise AssertionError("the user's base was written to")
            super().__setattr__(key, value)

    base = Watched(D)
    base.temperature = 0.5
    object.__setattr__(base, "watched", id(base))
    model = ebf.wrap(normflows.NormalizingFlow(base, [normflows.flows.Permute(D)]))
    cold, warm = (model.sample(2000, temperature=t, generator=rng()) for t in (0.2, 1.0))
    torch.testing.assert_close(cold, 0.2 * warm)
    assert float(warm.std()) == pytest.approx(0.5, rel=0.1)
    assert base.temperature == 0.5


@pytest.mark.parametrize("name", MODELS)
def test_threads_with_generators_of_their_own_do_not_disturb_each_other(name):
    torch.manual_seed(0)
    model = ebf.wrap(MODELS[name]().eval())
    expected = [model.sample(5, generator=rng(number)) for number in range(3)]
    before, state = sys.getswitchinterval(), torch.get_rng_state()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as threads:
            numbers = [number for _ in range(30) for number in range(3)]
            drawn = list(threads.map(lambda number: model.sample(5, generator=rng(number)), numbers))
    finally:
        sys.setswitchinterval(before)
    for number, found in zip(numbers, drawn, strict=True):
        assert torch.equal(found, expected[number])
    assert torch.equal(torch.get_rng_state(), state)
