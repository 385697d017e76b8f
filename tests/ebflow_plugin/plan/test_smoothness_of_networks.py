"""What is said about the classes of networks inside of couplings."""

import pytest
import torch
from torch import nn

import ebflow_plugin as ebf
from ebflow_plugin.adapting.rules import REGISTERED
from ebflow_plugin.plan.smoothness import REGISTERED_NETWORKS, smoothness_of


class Network(nn.Module):
    """A network of the user's own, which nobody can see into."""

    def __init__(self, activation=None):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 8), activation or nn.Tanh(), nn.Linear(8, 2))

    def forward(self, inputs, context=None):
        return torch.tanh(self.layers(inputs))


class Same(Network):
    """Does what its parent does."""


class Other(Network):
    """Does something else."""

    def forward(self, inputs, context=None):
        return super().forward(inputs).abs()


@pytest.fixture(autouse=True)
def forgotten():
    yield
    REGISTERED.remove(Network)
    REGISTERED_NETWORKS.remove(Network)


def test_nobody_can_see_into_a_forward_of_ones_own():
    assert smoothness_of(nn.Sequential(Network())) == "unknown"


@pytest.mark.parametrize("smoothness", ["smooth", "score jumps", "density jumps", "unknown"])
def test_what_is_taught_holds(smoothness):
    ebf.register_nonlinear(Network, smoothness=smoothness)
    assert smoothness_of(nn.Sequential(Network())) == smoothness


def test_what_is_inside_is_looked_at_all_the_same():
    ebf.register_nonlinear(Network, smoothness="smooth")
    assert smoothness_of(Network(nn.ReLU())) == "score jumps"


def test_it_holds_for_classes_that_do_not_change_it():
    ebf.register_nonlinear(Network, smoothness="smooth")
    assert smoothness_of(Same()) == "smooth"
    assert smoothness_of(Other()) == "unknown"


def test_a_hook_may_change_it():
    ebf.register_nonlinear(Network, smoothness="smooth")
    network = Network()
    network.register_forward_hook(lambda module, inputs, output: output.abs())
    assert smoothness_of(network) == "unknown"


def test_the_last_word_holds():
    ebf.register_nonlinear(Network, smoothness="score jumps")
    ebf.register_nonlinear(Network, smoothness="smooth", force=True)
    assert smoothness_of(Network()) == "smooth"
    ebf.register_linear(Network, force=True)
    assert smoothness_of(Network()) == "unknown"
