"""Chains of full layers in each library, for the tests of starts."""

import normflows as nf
import torch
import zuko
from nflows import distributions, flows, transforms

import ebflow_nflows
import ebflow_normflows
import ebflow_zuko
from ebflow_plugin.closed_form.marginals import MarginalMap, fit_marginals

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


def harmful_marginals(step, y, held_out):
    """Marginal maps that are fitted well to the wrong thing."""
    fitted = fit_marginals(step, y, held_out)
    scale, shift = torch.full_like(fitted.scale, 30.0), torch.zeros_like(fitted.shift)
    return MarginalMap(scale, shift, fitted.log_tail - 2.0, fitted.skewness + 1.0, torch.ones_like(fitted.helps))
