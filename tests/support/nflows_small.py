"""Small nflows models, for tests of single facts. The cases are in nflows_cases.py."""

import math

import torch
from nflows.distributions import StandardNormal
from nflows.flows import Flow
from nflows.nn.nets import ResidualNet
from nflows.transforms import AffineCouplingTransform, CompositeTransform, PiecewiseRationalQuadraticCDF, Transform
from torch import nn

import ebflow_plugin as ebf
from case import perturb


def flow_of(*layers, shape, base=None, mode="train", noise=0.0, **options):
    """A flow of layers, or of what makes them, from data to noise: float64, moved from its initial values by noise.

    Torch's own generator is seeded, so that what a test draws afterwards is the same in every run.
    """
    torch.manual_seed(0)
    made = [layer if isinstance(layer, nn.Module) else layer() for layer in layers]
    flow = Flow(CompositeTransform(made), base or StandardNormal(shape), **options).double()
    if noise:
        perturb(flow, noise)
    return flow.train(mode == "train")


def smooth_net(context=None, hidden=8, **options):
    """What makes the network of a coupling: one residual block with tanh."""
    options = {"num_blocks": 1, "activation": torch.tanh, "context_features": context} | options
    return lambda inputs, outputs: ResidualNet(inputs, outputs, hidden, **options)


def coupling_model(context=None, hidden=8):
    """One affine coupling of four features, in single precision."""
    torch.manual_seed(0)
    coupling = AffineCouplingTransform(torch.tensor([1, 0, 1, 0]), smooth_net(context, hidden))
    return ebf.wrap(Flow(coupling, StandardNormal([4])))


def spline(size=2):
    """An elementwise spline that is not the identity."""
    torch.manual_seed(1)
    made = PiecewiseRationalQuadraticCDF([size], num_bins=4, tails="linear", tail_bound=2.0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.5)
    return made


class Net(nn.Sequential):
    """Layers as the network of a coupling, which hands over a context."""

    def forward(self, inputs, context=None):
        return super().forward(inputs)


class OwnNetwork(nn.Module):
    """A network of the user's own inside of a coupling, which nobody can see into."""

    def __init__(self, activation=None, inputs=1, outputs=2):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 8), activation or nn.Tanh(), nn.Linear(8, outputs))

    def forward(self, inputs, context=None):
        return torch.tanh(self.layers(inputs))


class Doubled(Transform):
    """2 x, by a class that nobody knows."""

    def forward(self, inputs, context=None):
        return 2.0 * inputs, inputs.new_full((len(inputs),), inputs[0].numel() * math.log(2.0))

    def inverse(self, inputs, context=None):
        return inputs / 2.0, inputs.new_full((len(inputs),), -inputs[0].numel() * math.log(2.0))


class Level(StandardNormal):
    """A Gaussian with a constant that no score depends on."""

    def __init__(self, shape):
        super().__init__(shape)
        self.level = nn.Parameter(torch.zeros(()))

    def _log_prob(self, inputs, context):
        return super()._log_prob(inputs, context) + self.level
