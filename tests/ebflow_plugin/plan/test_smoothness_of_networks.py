"""What is said about the classes of networks inside of couplings."""

import pytest
from torch import nn

import ebflow_plugin as ebf
from ebflow_plugin.adapting.rules import REGISTERED
from ebflow_plugin.plan.smoothness import REGISTERED_NETWORKS, smoothness_of
from nflows_small import OwnNetwork


class Same(OwnNetwork):
    """Does what its parent does."""


class Other(OwnNetwork):
    """Does something else."""

    def forward(self, inputs, context=None):
        return super().forward(inputs).abs()


@pytest.fixture(autouse=True)
def forgotten():
    yield
    REGISTERED.pop(OwnNetwork, None)
    REGISTERED_NETWORKS.pop(OwnNetwork, None)


def test_nobody_can_see_into_a_forward_of_ones_own():
    assert smoothness_of(nn.Sequential(OwnNetwork())) == "unknown"


@pytest.mark.parametrize("smoothness", ["smooth", "score jumps", "density jumps", "unknown"])
def test_what_is_taught_holds(smoothness):
    ebf.register_nonlinear(OwnNetwork, smoothness=smoothness)
    assert smoothness_of(nn.Sequential(OwnNetwork())) == smoothness


def test_what_is_inside_is_looked_at_all_the_same():
    ebf.register_nonlinear(OwnNetwork, smoothness="smooth")
    assert smoothness_of(OwnNetwork(nn.ReLU())) == "score jumps"


def test_it_holds_for_classes_that_do_not_change_it():
    ebf.register_nonlinear(OwnNetwork, smoothness="smooth")
    assert smoothness_of(Same()) == "smooth"
    assert smoothness_of(Other()) == "unknown"


def test_a_hook_may_change_it():
    ebf.register_nonlinear(OwnNetwork, smoothness="smooth")
    network = OwnNetwork()
    network.register_forward_hook(lambda module, inputs, output: output.abs())
    assert smoothness_of(network) == "unknown"


def test_the_last_word_holds():
    ebf.register_nonlinear(OwnNetwork, smoothness="score jumps")
    ebf.register_nonlinear(OwnNetwork, smoothness="smooth", force=True)
    assert smoothness_of(OwnNetwork()) == "smooth"
    ebf.register_linear(OwnNetwork, force=True)
    assert smoothness_of(OwnNetwork()) == "unknown"
