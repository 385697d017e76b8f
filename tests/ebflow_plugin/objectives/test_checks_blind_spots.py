"""What objectives say with their first batch, of parameters that they cannot see."""

import copy
import math
from functools import partial

import pytest
import torch
from nflows.nn.nets import ResidualNet
from nflows.transforms import (
    AffineCouplingTransform,
    LULinear,
    MaskedAffineAutoregressiveTransform,
    PiecewiseRationalQuadraticCDF,
)
from torch import nn

import ebflow_plugin as ebf
import nflows_small
from ebflow_nflows import FullLinear, SmoothLeakyReLU
from ebflow_plugin.adapting import walk
from ebflow_plugin.objectives import DSM, FDSSM, ML, SM, SML, SSM
from ebflow_plugin.objectives.checks import find_blind_spots
from nflows_small import spline
from randomness import rng
from warned import messages

flow_of = partial(nflows_small.flow_of, shape=(2,))


def smooth_base(cls):
    return ebf.register_nonlinear(cls, smoothness="smooth", force=True)


@smooth_base
class Prior(nn.Module):
    """A Gaussian with classes: a mean for each, and a prior of classes that no score shows."""

    def __init__(self, classes=3, size=2):
        super().__init__()
        self.means = nn.Parameter(torch.randn(classes, size))
        self.prior = nn.Parameter(torch.zeros(classes))
        self.size = size

    def log_prob(self, inputs, context=None):
        label = context.long().squeeze(1)
        distance = (inputs - self.means[label]).square().sum(1)
        return -0.5 * distance - 0.5 * self.size * math.log(2 * math.pi) + self.prior.log_softmax(0)[label]


@smooth_base
class Level(nn.Module):
    """A Gaussian with a constant that nobody asked for."""

    def __init__(self, size=2):
        super().__init__()
        self._shape = torch.Size([size])
        self.level = nn.Parameter(torch.zeros(()))

    def log_prob(self, inputs, context=None):
        return -0.5 * inputs.square().sum(1) + self.level


class Laplace(nn.Module):
    def __init__(self, size=2):
        super().__init__()
        self._shape = torch.Size([size])
        self.location = nn.Parameter(torch.zeros(size))

    def log_prob(self, inputs, context=None):
        return -(inputs - self.location).abs().sum(1)


def first_words(make, model, *batch):
    """What an objective says when it is made and with its first batch."""
    return messages(lambda: make(model)(*batch or (torch.randn(4, 2, generator=rng()).double(),)))[1]


def test_a_constant_is_found_with_the_first_batch():
    model = ebf.wrap(flow_of(LULinear(2), base=Level()))
    for make in (SM, SSM, DSM, lambda m: FDSSM(m, eps=0.5)):
        objective, said = messages(lambda make=make: make(model))
        assert said == []
        _, (message,) = messages(lambda objective=objective: objective(torch.randn(4, 2).double()))
        assert message.startswith("score matching cannot see 1 of 5 trainable parameters")
        assert "\n  _distribution.level  ()\n" in message
        assert messages(lambda objective=objective: objective(torch.randn(4, 2).double()))[1] == []


def test_likelihood_sees_everything():
    model = ebf.wrap(flow_of(LULinear(2), base=Level()))
    for make in (ML, lambda m: SSM(m, energy_weight=0.1)):
        assert first_words(make, model) == []


def test_a_sum_sees_what_one_of_its_terms_sees():
    model = ebf.wrap(flow_of(LULinear(2), base=Level()))
    for make in (
        lambda m: 0.9 * SSM(m) + 0.1 * ML(m),
        lambda m: 0.1 * ML(m) + 0.9 * DSM(m),
        lambda m: SSM(m) + DSM(m, energy_weight=0.1),
    ):
        assert first_words(make, model) == []
    for make in (lambda m: SSM(m) + 0.0 * ML(m), lambda m: 0.5 * SSM(m) + 0.5 * DSM(m)):
        assert first_words(make, model) != []


def test_a_term_speaks_again_when_it_is_used_alone():
    model, x = ebf.wrap(flow_of(LULinear(2), base=Level())), torch.randn(9, 2).double()
    term = SSM(model)
    assert messages(lambda: (0.9 * term + 0.1 * ML(model))(x))[1] == []
    assert messages(lambda: term(x))[1] != []


def test_a_class_prior_is_found_with_the_first_batch():
    model = ebf.wrap(flow_of(LULinear(2), base=Prior()))
    objective, said = messages(lambda: SSM(model))
    assert said == []
    x, labels = torch.randn(9, 2).double(), torch.arange(9).remainder(3).double()[:, None]
    _, (message,) = messages(lambda: objective(x, labels))
    assert "_distribution.prior  (3,)" in message
    assert "means" not in message
    assert messages(lambda: objective(x, labels))[1] == []


def test_frozen_parameters_are_not_reported():
    base = Level()
    base.level.requires_grad_(False)
    assert first_words(SSM, ebf.wrap(flow_of(LULinear(2), base=base))) == []


def test_empty_parameters_are_not_reported():
    """An LU layer of one feature has triangles without entries."""
    model = ebf.wrap(flow_of(LULinear(1), shape=(1,)))
    objective, said = messages(lambda: SSM(model))
    assert said + messages(lambda: objective(torch.randn(4, 1).double()))[1] == []


def test_a_kink_is_seen_by_finite_differences_alone():
    model = ebf.wrap(flow_of(LULinear(2), base=Laplace()))
    (message,) = first_words(DSM, model)
    assert "_distribution.location" in message
    assert "_transform._transforms.0.bias" in message
    assert first_words(lambda m: FDSSM(m, eps=1.0), model) == []


def test_a_fresh_coupling_is_no_false_alarm():
    """Its last layer may begin at zero, so that nothing before it has an influence."""
    coupling = AffineCouplingTransform([0, 1], lambda i, o: ResidualNet(i, o, hidden_features=4, activation=torch.tanh))
    nn.init.zeros_(coupling.transform_net.final_layer.weight)
    nn.init.zeros_(coupling.transform_net.final_layer.bias)
    objective, said = messages(lambda: SSM(ebf.wrap(flow_of(coupling))))
    assert said + messages(lambda: objective(torch.randn(4, 2).double()))[1] == []


def test_the_search_happens_once(monkeypatch):
    calls = []

    def counted(*args, **options):
        calls.append(args)
        return find_blind_spots(*args, **options)

    monkeypatch.setattr("ebflow_plugin.objectives.checks.find_blind_spots", counted)
    objective = SSM(ebf.wrap(flow_of(LULinear(2))))
    for _ in range(3):
        objective(torch.randn(4, 2).double())
    assert len(calls) == 1
    objective = SSM(ebf.wrap(flow_of(LULinear(2), base=Prior())))
    for _ in range(3):
        messages(lambda: objective(torch.randn(4, 2).double(), torch.zeros(4, 1).double()))
    assert len(calls) == 3  # what the batch did not show was looked for elsewhere, too


@pytest.mark.parametrize("make", [SM, SSM, DSM, FDSSM, ML, SML, ebf.objectives.RelativeML])
def test_making_an_objective_does_no_work(make, monkeypatch):
    """No copy, no walk, no energy, no backward pass: a constructor costs less than a step."""
    model = ebf.wrap(flow_of(FullLinear(2), SmoothLeakyReLU(0.3), FullLinear(2), base=Level()))

    def forbidden(*_, **__):
        raise AssertionError("a constructor worked")

    for name in ("copy.deepcopy", "torch.autograd.grad", "ebflow_plugin.model.walk", "torch.randn"):
        monkeypatch.setattr(name, forbidden)
    monkeypatch.setattr(type(model.plan), "encode", forbidden)
    make(model)


def test_nothing_is_searched_without_a_gradient():
    """Neither a validation loss nor inference mode is a first batch; the training that follows is."""
    model, x = ebf.wrap(flow_of(LULinear(2), base=Level())), torch.randn(4, 2).double()
    objective = SSM(model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert messages(lambda: objective(x))[1] == []
    assert len(messages(lambda: objective(x))[1]) == 1


@pytest.mark.parametrize("make", [SM, SSM, DSM, FDSSM])
def test_the_first_loss_is_the_second(make):
    """The search changes neither the value nor the gradient, nor what is drawn, of the loss that it comes with."""
    model, x = ebf.wrap(flow_of(LULinear(2), SmoothLeakyReLU(0.3), base=Level())), torch.randn(40, 2).double()
    objective, found = make(model), []
    for _ in range(2):
        torch.manual_seed(5)
        loss, _ = messages(lambda: objective(x))
        found.append((loss.detach(), torch.autograd.grad(loss, model.flow._transform._transforms[0].bias)[0]))
        found[-1] += (torch.rand(3),)
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


def test_data_in_the_tails_are_no_false_alarm():
    """There a spline is a line that its parameters do not reach; elsewhere they are seen."""
    model = ebf.wrap(flow_of(spline()))
    far = 50.0 + torch.rand(20, 2, generator=rng()).double()
    made = messages(lambda: DSM(model, sigma=0.1))[0]
    assert messages(lambda: made(far))[1] == []


def test_the_input_is_checked_once(monkeypatch):
    calls = []
    plain = walk.check_input

    def counted(*args, **options):
        calls.append(args)
        return plain(*args, **options)

    preprocess = [ebf.Rescale(0.05, 0.95), ebf.Logit()]
    model = ebf.wrap(flow_of(FullLinear(2), SmoothLeakyReLU(0.3), FullLinear(2)), preprocess=preprocess)
    x = torch.rand(6, 2, generator=rng()).double()
    for make in (SM, SSM, DSM, FDSSM, ML, ebf.objectives.RelativeML, lambda m: DSM(m, energy_weight=0.1)):
        objective = make(model)
        objective(x)
        with monkeypatch.context() as patch:
            patch.setattr(walk, "check_input", counted)
            calls.clear()
            objective(x)
        assert len(calls) == 1


def test_what_only_a_context_reaches_waits_for_it():
    made = MaskedAffineAutoregressiveTransform(2, 8, context_features=3, num_blocks=1, activation=torch.tanh)
    model = ebf.wrap(flow_of(made))
    x, context = torch.randn(4, 2).double(), torch.randn(4, 3).double()
    objective, said = messages(lambda: SSM(model))
    assert said == []
    assert messages(lambda: objective(x, context))[1] == []
    objective = SSM(model)
    _, (message,) = messages(lambda: objective(x))
    assert "context_layer.weight  (8, 3): not part of the energy at all" in message


def test_a_bounded_domain_waits_for_data():
    inside = PiecewiseRationalQuadraticCDF([2], num_bins=4)
    model = ebf.wrap(flow_of(inside, base=Level()))
    objective, (jumps,) = messages(lambda: SSM(model))
    assert "jumps" in jumps
    _, (message,) = messages(lambda: objective(torch.rand(4, 2).double()))
    assert "_distribution.level" in message


def test_a_search_that_fails_is_told_and_stops_nothing(monkeypatch):
    model = ebf.wrap(flow_of(LULinear(2)))

    def fails(*_, **__):
        raise RuntimeError("no copy")

    monkeypatch.setattr("ebflow_plugin.objectives.checks.find_blind_spots", fails)
    objective, said = messages(lambda: SSM(model))
    assert said == []
    value, (message,) = messages(lambda: objective(torch.randn(4, 2).double()))
    assert message == "could not find out which parameters score matching cannot see: RuntimeError: no copy"
    assert torch.isfinite(value)


def test_the_search_touches_nothing():
    model = ebf.wrap(flow_of(LULinear(2), base=Level()).train())
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    find_blind_spots(model, torch.randn(4, 2, generator=rng()).double())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_first_batch_draws_nothing_of_the_users():
    """The search of the first batch changes neither the global generator nor the objective's."""
    model = ebf.wrap(flow_of(LULinear(2), base=Prior()))
    x, labels = torch.randn(9, 2).double(), torch.zeros(9, 1).double()
    torch.manual_seed(0)
    objective, _ = messages(lambda: DSM(model))
    (first, second), _ = messages(lambda: (objective(x, labels), objective(x, labels)))
    torch.manual_seed(0)
    assert torch.equal(objective(x, labels), first)
    assert torch.equal(objective(x, labels), second)


def test_noise_that_leaves_the_domain_is_told():
    model = ebf.wrap(flow_of(PiecewiseRationalQuadraticCDF([2], num_bins=4)))
    for objective in (DSM(model, sigma=5.0, generator=rng()), FDSSM(model, eps=5.0, generator=rng())):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - nflows' own error
            messages(lambda objective=objective: objective(torch.rand(9, 2).double()))
        assert any("adds noise to the data" in note and "Logit" in note for note in caught.value.__notes__)
