"""A made-up flow library. docs/adding_a_library.md shows how an adapter for it is written."""

import math

import torch
from torch import nn


class Mix(nn.Module):
    """y = W x, whose log-det costs O(D³)."""

    def __init__(self, features):
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(features) + 0.1 * torch.randn(features, features))

    def forward(self, x):
        return x @ self.matrix.mT, torch.linalg.slogdet(self.matrix).logabsdet.expand(len(x))

    def inverse(self, y):
        return torch.linalg.solve(self.matrix, y.mT).mT


class Sinh(nn.Module):
    """y = sinh(x), elementwise."""

    def forward(self, x):
        return x.sinh(), x.cosh().log().sum(-1)

    def inverse(self, y):
        return y.asinh()


class Normal(nn.Module):
    """N(0, I), the base density."""

    def __init__(self, features):
        super().__init__()
        self.features = features

    def log_prob(self, z):
        return -0.5 * (z.square() + math.log(2 * math.pi)).sum(-1)


class Flow(nn.Module):
    """Layers from data to noise, and a base density."""

    def __init__(self, layers, base):
        super().__init__()
        self.layers, self.base = nn.ModuleList(layers), base

    def log_prob(self, x):
        total = x.new_zeros(len(x))
        for layer in self.layers:
            x, log_det = layer(x)
            total = total + log_det
        return total + self.base.log_prob(x)
