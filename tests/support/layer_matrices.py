"""Layers without special values, and their matrices."""

import math

import torch
from torch.autograd.functional import jacobian

from randomness import randn


def stirred(layer, seed=0):
    """The layer with no parameter left at a special value."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * randn(*parameter.shape, seed=seed, dtype=parameter.dtype)
    return layer


def dense_matrix(layer, shape):
    """The Jacobian of a layer, for an event of this shape."""
    found = jacobian(lambda x: layer.transform(x[None])[0], randn(*shape))
    return found.reshape(math.prod(shape), math.prod(shape))
