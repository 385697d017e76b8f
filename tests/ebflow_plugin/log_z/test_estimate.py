"""An estimate: the tensor with its error, and the diagnosis that says when not to believe it."""

import copy
import io
import math
import pickle

import pytest
import torch
from nflows import distributions, flows, transforms

import ebflow_nflows
import ebflow_plugin as ebf
from ebflow_plugin.log_z.estimate import Estimate, log_mean_exp
from ebflow_plugin.log_z.importance import importance
from ebflow_plugin.log_z.pareto import pareto_k
from log_z_models import WIDE, make_model
from randomness import rng


def test_a_collapsed_sample_says_so():
    model = make_model(50, nonlinear=True)
    with pytest.warns(UserWarning, match="effective sample size"):
        estimate = model.log_z(method="importance", generator=rng())
    assert estimate.std_error == math.inf
    assert estimate.effective_sample_size < 10


def wide_model(dim, number):
    """Two full layers of independent entries, which make some directions of x ten times as wide as N(0, I)."""
    torch.manual_seed(number)
    layers = [ebflow_nflows.FullLinear(dim, init="normal", dtype=WIDE) for _ in range(2)]
    layers.insert(1, ebflow_nflows.SmoothLeakyReLU(0.3))
    flow = flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([dim]))
    return ebf.wrap(flow.requires_grad_(False))


@pytest.mark.filterwarnings("ignore:.*unreliable")
@pytest.mark.parametrize("dim", [2, 6])
def test_what_misses_the_model_says_so(dim):
    """Of such models every value with a finite error was wrong by more than 4 of them."""
    for number in range(25):
        model = wide_model(dim, number)
        found = model.log_z(method="importance", generator=rng(number))
        assert not found.reliable or abs(float(found - model.log_z())) < 4 * found.std_error, (number, found)


@pytest.mark.filterwarnings("ignore:.*unreliable")
def test_annealing_that_misses_the_model_says_so():
    for number in range(6):
        model = wide_model(6, number)
        found = model.log_z(method="ais", generator=rng(number), steps=30, chains=120)
        assert not found.reliable or abs(float(found - model.log_z())) < 4 * found.std_error, (number, found)


@pytest.mark.filterwarnings("ignore:.*unreliable")
@pytest.mark.parametrize("widths", [(5.0, 5.0), (50.0, 1.0, 1.0, 1.0), (3.0, 0.7, 0.7)])
def test_a_density_that_is_wider_than_the_proposal(widths):
    widths = torch.tensor(widths, dtype=WIDE)
    for number in range(20):
        found = importance(
            lambda x: 0.5 * (x / widths).square().sum(1), widths.shape, widths, samples=1000, generator=rng(number)
        )
        assert not found.reliable
        assert "unreliable" in repr(found)
    with pytest.warns(UserWarning, match=r"unreliable.*proposal="):
        importance(lambda x: 0.5 * (x / widths).square().sum(1), widths.shape, widths, generator=rng())


def test_a_proposal_of_the_right_width_is_believed():
    """No false alarm, and no wider an error than the delta method's by half."""
    widths = torch.tensor([0.9, 0.8, 1.05], dtype=WIDE)
    exact = float(widths.log().sum()) + 1.5 * math.log(2 * math.pi)
    for number in range(20):
        found = importance(
            lambda x: 0.5 * (x / widths).square().sum(1), widths.shape, widths, samples=1000, generator=rng(number)
        )
        assert abs(float(found) - exact) < 4 * found.std_error
        assert found.pareto_k < 0.5
        assert found.std_error < 1.5 * math.sqrt((1000 / found.effective_sample_size - 1) / 1000)


@pytest.mark.parametrize("shape", [0.3, 0.6, 0.9, 1.5])
def test_the_shape_of_a_pareto_tail(shape):
    uniform = torch.rand(200_000, generator=rng(), dtype=WIDE)
    assert pareto_k(-shape * uniform.log()) == pytest.approx(shape, abs=0.1)


def test_the_shape_of_few_or_equal_weights():
    assert pareto_k(torch.zeros(20)) is None
    assert pareto_k(torch.zeros(1000)) == 0.0
    assert pareto_k(torch.tensor([0.0] * 999 + [50.0])) > 1.0


def test_an_exact_value_keeps_its_graph_and_has_no_error():
    flow = make_model(3).flow.requires_grad_(True)
    log_z = ebf.wrap(flow).log_z()
    assert (log_z.std_error, log_z.method, log_z.effective_sample_size) == (0.0, "exact", None)
    log_z.backward()
    weight = flow._transform._transforms[0].weight
    assert torch.allclose(weight.grad, -torch.linalg.inv(weight.detach()).mT)
    assert not ebf.wrap(flow).log_z(method="lanczos").requires_grad


def test_an_estimate_is_a_tensor():
    estimate = Estimate.of(torch.tensor(1.25), 0.5, "ais", 12.0)
    file = io.BytesIO()
    torch.save(estimate, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for copied in (copy.deepcopy(estimate), pickle.loads(pickle.dumps(estimate)), loaded):
        assert isinstance(copied, Estimate)
        assert (float(copied), copied.std_error, copied.method, copied.effective_sample_size) == (
            1.25,
            0.5,
            "ais",
            12.0,
        )
    assert type(estimate + 1) is torch.Tensor
    assert f"{estimate:.1f}" == "1.2"
    assert f"{estimate}" == repr(estimate) == "Estimate(1.25 ± 0.5, ais)"


def test_the_delta_method():
    weights = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=WIDE)
    found = log_mean_exp(weights.log(), "importance")
    assert float(found) == pytest.approx(math.log(3.0))
    assert found.std_error == pytest.approx(float(weights.std()) / 2 / 3)
    assert found.effective_sample_size == pytest.approx(12**2 / 50)
