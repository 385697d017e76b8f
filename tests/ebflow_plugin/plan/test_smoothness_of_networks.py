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


@pytest.mark.parametrize("smoothness", ["smooth", "score jumps", "density jumps", "unknown"])
def test_what_is_taught_holds(smoothness):
    assert smoothness_of(nn.Sequential(OwnNetwork())) == "unknown"  # nobody can see into a forward of one's own
    ebf.register_nonlinear(OwnNetwork, smoothness=smoothness)
    assert smoothness_of(nn.Sequential(OwnNetwork())) == smoothness
    ebf.register_nonlinear(OwnNetwork, smoothness="smooth", force=True)  # the last word holds
    assert smoothness_of(OwnNetwork()) == "smooth"
    ebf.register_linear(OwnNetwork, force=True)
    assert smoothness_of(OwnNetwork()) == "unknown"


def test_what_was_taught_of_a_class_is_not_all_that_counts():
    ebf.register_nonlinear(OwnNetwork, smoothness="smooth")
    assert smoothness_of(OwnNetwork(nn.ReLU())) == "score jumps"  # what is inside is looked at all the same
    assert smoothness_of(Same()) == "smooth"
    assert smoothness_of(Other()) == "unknown"
    network = OwnNetwork()
    network.register_forward_hook(lambda module, inputs, output: output.abs())
    assert smoothness_of(network) == "unknown"
