"""Gradients through samples, which reverse KL trains by: those of the implicit function, for every step."""

import warnings

import pytest
import torch

import ebflow_plugin as ebf
from cases import SUPPORTED, first_of_each_class
from randomness import randn


def gradients(value, *tensors):
    found = torch.autograd.grad(value, tensors, allow_unused=True, materialize_grads=True)
    return found[0], torch.cat([gradient.flatten() for gradient in found[1:]] or [value.new_zeros(1)])


@pytest.mark.parametrize("case", first_of_each_class(SUPPORTED), ids=str)
def test_a_sample_has_the_gradient_of_the_implicit_function(case):
    """With g(x) = z, a cotangent v of x is Jᵀ a, a that of z, and the parameters have -aᵀ ∂g."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = ebf.wrap(case.build()).plan
    x, context = case.x(3), plan.embed(case.context(3))
    with torch.no_grad():
        latents, _ = plan.encode(x, context)
        flat = torch.cat([z.flatten(1) for z in latents], 1)
    modules = {id(step.module): step.module for step in plan.steps if isinstance(step.module, torch.nn.Module)}
    parameters = [p for module in modules.values() for p in module.parameters() if p.requires_grad]
    noise = flat.clone().requires_grad_()
    parts = noise.split([z[0].numel() for z in latents], 1)
    try:
        drawn = plan.decode(tuple(p.reshape(z.shape) for p, z in zip(parts, latents, strict=True)), context)
    except ebf.NoInverseError as error:
        pytest.skip(str(error).splitlines()[0])
    v = randn(*drawn.shape, seed=7)
    of_noise, of_parameters = gradients((v * drawn).sum(), noise, *parameters)
    point = drawn.detach().requires_grad_()
    encoded = torch.cat([z.flatten(1) for z in plan.encode(point, context)[0]], 1)
    of_point, of_map = gradients((of_noise.detach() * encoded).sum(), point, *parameters)
    torch.testing.assert_close(of_point, v, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_parameters, -of_map, rtol=1e-5, atol=1e-5 * float(1 + of_map.abs().max()))
