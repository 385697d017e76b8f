"""The truth about derivatives in closed form: autograd's double backward of the energy."""

import torch

from ebflow_plugin.plan.derivatives import Derivatives


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
