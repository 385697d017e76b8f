"""The truth about derivatives in closed form: autograd's double backward of the energy."""

import torch

from ebflow_plugin.plan.derivatives import Derivatives, derivatives
from randomness import rng


def by_autograd(plan, x, context=None, directions=()):
    """What derivatives() should find, with a graph to the parameters."""

    def gradient(value):
        if not value.requires_grad:
            return torch.zeros_like(x)
        return torch.autograd.grad(value.sum(), x, create_graph=True, materialize_grads=True)[0]

    x = x.detach().requires_grad_()
    energy = plan.energy(x, context)
    slope = gradient(energy)
    curvatures = [(gradient((slope * v).flatten(1).sum(1)) * v).flatten(1).sum(1) for v in directions]
    return Derivatives(slope, curvatures, energy)


def directions(x, count=2):
    generator = rng(7)
    return [torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(count)]


def assert_derivatives(model, x, context=None):
    """Compares derivatives() with autograd: values, and the gradient of each parameter of a sum of all of them."""
    core = model.core
    ours = derivatives(core, x, context, directions(x), energy=True)
    autograd = by_autograd(core, x, context, directions(x))
    scale = 1.0 + max(one.detach().abs().max() for one in (autograd.energy, *autograd.curvatures))
    pairs = {
        "energy": (ours.energy, autograd.energy),
        "gradient": (ours.gradient, autograd.gradient),
        **{f"curvature {i}": pair for i, pair in enumerate(zip(ours.curvatures, autograd.curvatures, strict=True))},
    }
    for name, (one, two) in pairs.items():
        _assert_close(one, two, 1e-9, 1e-10 * float(scale), f"the {name} is not autograd's")
    named = dict(model.named_parameters())
    totals = [sum(one.sin().sum() for one in (d.energy, d.gradient, *d.curvatures)) for d in (ours, autograd)]
    if not named or not totals[1].requires_grad:
        return
    found, wanted = (
        torch.autograd.grad(total, list(named.values()), allow_unused=True, materialize_grads=True) for total in totals
    )
    for name, one, two in zip(named, found, wanted, strict=True):
        size = 1.0 + float(two.detach().abs().max()) if two.numel() else 1.0
        _assert_close(one, two, 1e-8, 1e-9 * size, f"the derivative of the derivatives in {name} is not autograd's")


def _assert_close(one, two, rtol, atol, what):
    torch.testing.assert_close(one, two, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def log_prob_by_jacobian(model, x):
    """The density of the map, with the log-det of autograd's Jacobian: none of ours is in it."""
    values = []
    for row in x:
        jacobian = torch.autograd.functional.jacobian(lambda v: model.plan.encode(v[None])[0][0].flatten(), row)
        latents, _ = model.plan.encode(row[None])
        log_det = torch.linalg.slogdet(jacobian.reshape(row.numel(), -1))[1]
        values.append(model.plan.base.log_prob(latents, None)[0] + log_det)
    return torch.stack(values)
