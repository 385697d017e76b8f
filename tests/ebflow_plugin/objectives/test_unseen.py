"""The search for parameters that no score depends on: what it finds, and what is no false alarm."""

import copy
import math
from functools import partial

import pytest
import torch
from nflows.transforms import (
    AffineCouplingTransform,
    LULinear,
    MaskedAffineAutoregressiveTransform,
    PiecewiseRationalQuadraticCDF,
)
from torch import nn

import ebflow_plugin as ebf
import nflows_small
from ebflow_plugin.errors import EBFlowError
from ebflow_plugin.objectives.unseen import perturbed, unseen_parameters
from nflows_small import Level, spline
from randomness import randn, rng

flow_of = partial(nflows_small.flow_of, shape=(2,))


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


class Laplace(nn.Module):
    """Its score is a sign, whose derivative is 0."""

    def __init__(self, size=2):
        super().__init__()
        self._shape = torch.Size([size])
        self.location = nn.Parameter(torch.zeros(size))

    def log_prob(self, inputs, context=None):
        return -(inputs - self.location).abs().sum(1)


def unseen(flow, u=None, context=None, **options):
    return unseen_parameters(ebf.wrap(flow, **options), randn(9, 2) if u is None else u, context)


def test_a_constant_is_found():
    assert unseen(flow_of(LULinear(2), base=Level([2]))) == ["_distribution.level"]


def test_a_class_prior_is_found_and_the_means_are_not():
    labels = torch.arange(9).remainder(3).double()[:, None]
    assert unseen(flow_of(LULinear(2), base=Prior()), context=labels) == ["_distribution.prior"]


def test_a_score_that_is_piecewise_constant_shows_no_location():
    assert unseen(flow_of(LULinear(2), base=Laplace())) == ["_transform._transforms.0.bias", "_distribution.location"]


def test_what_only_a_context_reaches_needs_one():
    made = MaskedAffineAutoregressiveTransform(2, 8, context_features=3, num_blocks=1, activation=torch.tanh)
    assert unseen(flow_of(made), context=randn(9, 3)) == []
    assert all("context_layer" in name for name in unseen(flow_of(made)))
    assert unseen(flow_of(made))


def test_frozen_parameters_are_not_reported():
    base = Level([2])
    base.level.requires_grad_(False)
    assert unseen(flow_of(LULinear(2), base=base)) == []


def test_empty_parameters_are_not_reported():
    """An LU layer of one feature has triangles without entries."""
    assert unseen(flow_of(LULinear(1), shape=(1,)), randn(4, 1)) == []


def test_a_fresh_coupling_is_no_false_alarm():
    """Its last layer may begin at zero, so that nothing before it has an influence."""
    coupling = AffineCouplingTransform([0, 1], nflows_small.smooth_net(hidden=4))
    nn.init.zeros_(coupling.transform_net.final_layer.weight)
    nn.init.zeros_(coupling.transform_net.final_layer.bias)
    assert unseen(flow_of(coupling)) == []


def test_data_in_the_tails_are_no_false_alarm():
    """There a spline is a line that its parameters do not reach; elsewhere they are seen."""
    assert unseen(flow_of(spline()), 50.0 + torch.rand(20, 2, generator=rng()).double()) == []


def test_random_points_outside_of_the_domain_stop_nothing():
    flow = flow_of(PiecewiseRationalQuadraticCDF([2], num_bins=4), base=Level([2]))
    assert unseen(flow, torch.rand(4, 2, generator=rng()).double()) == ["_distribution.level"]


def test_a_score_that_is_not_finite_is_told():
    with pytest.raises(EBFlowError, match="the score of a perturbed copy is not finite"):
        unseen(flow_of(LULinear(2)), torch.full((3, 2), math.inf).double())


def test_the_search_touches_nothing():
    model = ebf.wrap(flow_of(LULinear(2), base=Level([2])).train())
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with torch.no_grad():
        assert unseen_parameters(model, torch.randn(4, 2, generator=rng()).double()) == ["_distribution.level"]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_perturbed_copy_differs_in_every_entry_by_little():
    """Each row moves by about 0.1, whatever its width; integers stay."""
    layer = nn.Linear(1000, 3)
    layer.register_parameter("count", nn.Parameter(torch.tensor([3]), requires_grad=False))
    found = perturbed(layer)
    moved = (found.weight - layer.weight).detach()
    assert moved.all()
    torch.testing.assert_close(moved.norm(dim=1), torch.full((3,), 0.1), rtol=0.1, atol=0)
    assert torch.equal(found.count, layer.count)
    assert torch.equal(perturbed(layer).weight, found.weight)
    assert not torch.equal(perturbed(layer, seed=1).weight, found.weight)
