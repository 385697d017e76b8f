"""An estimate: a number with its error, and the diagnosis that says when not to believe it."""

import copy
import math
import pickle

import pytest
import torch
from nflows import distributions, flows, transforms

import ebflow_nflows
import ebflow_plugin as ebf
from ebflow_plugin.log_z.estimate import Estimate, _variance, log_mean_exp, pareto_k
from gaussian_models import WIDE, frozen, gaussian, make_model, near_identity
from randomness import rng


def test_a_collapsed_sample_says_so():
    model = make_model(50, nonlinear=True)
    with pytest.warns(UserWarning, match="effective sample size"):
        estimate = model.log_z(method="importance", generator=rng())
    assert estimate.std_error == math.inf
    assert estimate.effective_sample_size < 10


@pytest.mark.filterwarnings("ignore:.*unreliable")
@pytest.mark.parametrize("dim", [2, 6])
def test_what_misses_the_model_says_so(dim):
    """Of such models every value with a finite error was wrong by more than 4 of them."""
    for number in range(25):
        model = bent_model(dim, number, "normal", 0.3)  # some directions of x are ten times as wide as N(0, I)
        found = model.log_z(method="importance", generator=rng(number))
        assert not found.reliable or abs(found.value - float(model.log_z())) < 4 * found.std_error, (number, found)


@pytest.mark.filterwarnings("ignore:.*unreliable")
def test_energies_of_any_size_are_no_crash():
    model, _, _ = gaussian(1e90 * torch.eye(2, dtype=WIDE))
    assert not model.log_z(method="importance", generator=rng()).reliable


def test_energies_without_weight_are_no_rounding_errors():
    """A wall of any height, where no mass is, made the error as large as one likes."""

    def walled(x):
        return -0.5 * x.square().sum(1) - 1e200 * (x[:, 0] > 2).double()

    model = ebf.wrap(flows.Flow(transforms.IdentityTransform(), distributions.StandardNormal([2])).double())
    found = ebf.importance(model, walled, 4000, generator=rng()).log_z
    assert found.std_error < 0.01
    assert abs(found.value - math.log(2 * math.pi * 0.9772499)) < 4 * found.std_error


def gaussian_estimate(widths, number):
    """Log Z of a Gaussian energy of these widths, by draws of N(0, I): a linear layer that divides by them."""
    return gaussian(torch.diag(1 / widths))[0].log_z(method="importance", generator=rng(number))


@pytest.mark.filterwarnings("ignore:.*unreliable")
@pytest.mark.parametrize("widths", [(5.0, 5.0), (50.0, 1.0, 1.0, 1.0), (3.0, 0.7, 0.7)])
def test_a_density_that_is_wider_than_the_proposal(widths):
    widths = torch.tensor(widths, dtype=WIDE)
    for number in range(20):
        found = gaussian_estimate(widths, number)
        assert not found.reliable
        assert "unreliable" in repr(found)
    with pytest.warns(UserWarning, match=r"unreliable.*proposal="):
        gaussian_estimate(widths, 0)


def test_a_proposal_of_the_right_width_is_believed():
    """No false alarm, and the error is that of the closed form."""
    widths = torch.tensor([0.9, 0.8, 1.05], dtype=WIDE)
    exact = float(widths.log().sum())
    variance = float((widths * (2 - widths.square()).sqrt()).prod()) ** -1 - 1.0  # of the weights, relative to Z
    for number in range(20):
        found = gaussian_estimate(widths, number)
        assert abs(found.value - exact) < 4 * found.std_error
        assert found.std_error == pytest.approx(math.sqrt(variance / 1000), rel=0.25)
        assert found.effective_sample_size == pytest.approx(1000 / (1 + variance), rel=0.05)


def mild_model(dim, seed):
    """A linear layer near the identity, and a weak nonlinearity: N(0, I) is a good proposal."""
    return frozen(near_identity(dim, 0.1, rng(seed)), ebflow_nflows.SmoothLeakyReLU(0.8))


def bent_model(dim, seed, init="orthogonal", alpha=0.4):
    """Full layers around a nonlinearity: wider than N(0, I) in a corner that few draws reach."""
    torch.manual_seed(seed)
    first, last = (ebflow_nflows.FullLinear(dim, init=init, dtype=WIDE) for _ in range(2))
    return frozen(first, ebflow_nflows.SmoothLeakyReLU(alpha), last)


def misses(make, dim, seeds, fitted):
    """The reliable estimates, and those of them that are off by more than four errors."""
    reliable = off = 0
    for seed in range(seeds):
        model = make(dim, seed)
        proposal = {"proposal": model.sample(1000, generator=rng(seed))} if fitted else {}
        found = model.log_z(method="importance", generator=rng(10_000 + seed), **proposal)
        reliable += found.reliable
        off += found.reliable and abs(found.value - float(model.log_z())) > 4 * found.std_error
    return reliable, off


@pytest.mark.filterwarnings("ignore:.*unreliable")
@pytest.mark.parametrize("dim", [2, 3, 8])
def test_what_is_called_reliable_is(dim):
    """Draws that missed the tail judged the tail: a quarter to nearly all of the "reliable" ones were 3 errors off."""
    assert misses(bent_model, dim, 60, False)[1] == 0
    reliable, off = misses(bent_model, dim, 20, True)
    assert (reliable >= 19, off) == (True, 0)
    reliable, off = misses(mild_model, dim, 20, False)
    assert (reliable, off) == (20, 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*unreliable")
@pytest.mark.parametrize("dim", [1, 2, 3, 8, 20, 64])
def test_coverage(dim):
    """Of what is called reliable, 99 % lie within four errors, over 500 seeds."""
    for make in (bent_model, mild_model):
        for fitted in (False, True):
            reliable, off = misses(make, dim, 500, fitted)
            assert off <= 0.01 * reliable, (make.__name__, fitted, reliable, off)


def test_a_model_without_an_inverse_is_never_called_reliable(monkeypatch):
    """Nothing can judge the draws of the proposal."""
    model = make_model(2, 0.05)
    assert model.log_z(method="importance", generator=rng()).reliable

    def decode(self, value, context):
        raise NotImplementedError

    monkeypatch.setattr(type(model.plan.steps[0]), "decode", decode)
    with pytest.warns(ebf.EstimateWarning, match="no draws of the model"):
        found = model.log_z(method="importance", generator=rng())
    assert not found.reliable
    assert abs(found.value - float(model.log_z())) < 0.1  # the value is that of the method all the same


def test_draws_of_the_model_outside_of_the_proposal():
    """A proposal of a smaller support misses a part of Z, which its own draws cannot show."""
    unit = torch.distributions.Independent(torch.distributions.Uniform(-torch.ones(2, dtype=WIDE), 1.0), 1)
    with pytest.warns(ebf.EstimateWarning, match="effective sample size of 0.0"):
        assert not make_model(2).log_z(method="importance", proposal=unit, generator=rng()).reliable


def test_an_exact_value_is_a_tensor_with_its_graph():
    flow = make_model(3).flow.requires_grad_(True)
    log_z = ebf.wrap(flow).log_z()
    assert type(log_z) is torch.Tensor
    log_z.backward()
    weight = flow._transform._transforms[0].weight
    assert torch.allclose(weight.grad, -torch.linalg.inv(weight.detach()).mT)


def test_an_estimate_is_plain_data():
    estimate = Estimate(1.25, 0.5, "lanczos")
    assert pickle.loads(pickle.dumps(estimate)) == copy.deepcopy(estimate) == estimate
    assert (float(estimate), estimate.reliable) == (1.25, True)
    assert f"{estimate}" == "Estimate(1.25 ± 0.5, lanczos)"
    assert f"{Estimate(-3.0, math.inf, 'importance', 1.5)}" == "Estimate(-3 ± inf, importance, unreliable)"


def test_the_delta_method():
    weights = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=WIDE)
    drawn_by_the_model = weights.repeat_interleave(weights.long())  # each with its own weight
    found = log_mean_exp(weights.log(), drawn_by_the_model.log())
    assert found.value == pytest.approx(math.log(3.0))
    assert found.std_error == pytest.approx(float(weights.std()) / 2 / 3)
    assert found.effective_sample_size == pytest.approx(4 / (1 + float(weights.var()) / 9))


def test_each_part_of_the_variance_is_taken_from_the_draws_that_see_it():
    """Weights of 1 to 6 by draws of q, as often as they are drawn by the model: the variance is that of all."""
    weights = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=WIDE) / 3.0
    drawn_by_the_model = weights.repeat_interleave((3 * weights).round().long())
    assert _variance(weights.log(), drawn_by_the_model.log()) == pytest.approx(float(weights.var(correction=0)))
    backwards = _variance(-drawn_by_the_model.log(), -weights.log())
    assert backwards == pytest.approx(float((1 / drawn_by_the_model).var(correction=0)))


@pytest.mark.parametrize("shape", [0.1, 0.4, 0.7, 1.2])
def test_the_shape_of_a_pareto_tail(shape):
    """Weights u^-k have it exactly, whatever their scale; the mean of 20 fits, which have a weak prior of 0.5."""
    fits = [pareto_k(5.0 - shape * torch.rand(20_000, generator=rng(seed), dtype=WIDE).log()) for seed in range(20)]
    assert sum(fits) / len(fits) == pytest.approx(shape, abs=0.05)


def test_weights_without_a_tail():
    assert pareto_k(torch.zeros(100)) == -math.inf
    assert pareto_k(torch.randn(10)) == -math.inf
    assert pareto_k(torch.rand(10_000, generator=rng(), dtype=WIDE)) < 0  # bounded


def test_without_draws_of_the_model_the_tail_may_judge():
    weights = torch.randn(1000, generator=rng(), dtype=WIDE)
    assert log_mean_exp(weights, None, tail=0.6).reliable
    with pytest.warns(ebf.EstimateWarning, match=r"heavy tail \(Pareto k = 0.68\).* Do it\."):
        assert not log_mean_exp(weights, None, tail=0.68, advice="Do it.").reliable
    with pytest.warns(ebf.EstimateWarning, match="no draws of the model"):
        assert not log_mean_exp(weights, None).reliable
