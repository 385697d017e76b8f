"""Chains of full layers in each library, for the tests of starts."""

import normflows as nf
import torch
import zuko
from nflows import distributions, flows, transforms

import ebflow_nflows
import ebflow_normflows
import ebflow_zuko

LIBRARIES = (ebflow_nflows, ebflow_normflows, ebflow_zuko)


def flow_in(library, layers, shape, base=None):
    """A flow of these layers, from data to noise, in float64, with a standard normal base of this shape or its own."""
    shape = tuple(shape)
    if library is ebflow_nflows:
        made = flows.Flow(transforms.CompositeTransform(layers), base or distributions.StandardNormal(shape))
    elif library is ebflow_normflows:
        made = nf.NormalizingFlow(base or nf.distributions.DiagGaussian(shape, trainable=False), layers[::-1])
    else:
        made = zuko.lazy.Flow(layers, base or zuko_normal(torch.zeros(shape), torch.ones(shape)))
    return made.double()


def zuko_normal(mean, std):
    family = zuko.distributions.DiagNormal
    return zuko.lazy.UnconditionalDistribution(family, mean, std, ndims=mean.dim(), buffer=True)
