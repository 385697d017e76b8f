"""The truth about derivatives in closed form: autograd's double backward, in float64."""

import torch

from ebflow_plugin.plan.derivatives import closed_steps, derivatives


def tensors(found):
    """All that derivatives() found, as a list."""
    return [one for one in (found.energy, found.gradient, *found.slopes, *found.curvatures) if one is not None]


def weighted(many):
    """A sum with weights of its own for each entry."""
    return sum((one * torch.arange(1, one.numel() + 1).to(one).cos().view(one.shape)).sum() for one in many)


def assert_close(found, expected, rtol):
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one, two, rtol=rtol, atol=rtol * (1.0 + float(two.detach().abs().max()) if two.numel() else 1)
        )


def assert_as_autograd(model, shape, context=None, count=1, gradient=True, again=False, rows=6):
    """Values, slopes, curvatures and their gradients in all parameters; and, if asked for, gradients of these."""
    generator = torch.Generator().manual_seed(1)
    x, *directions = torch.randn(1 + count, rows, *shape, dtype=torch.float64, generator=generator)
    options = {"context": context, "directions": directions, "gradient": gradient, "energy": True}
    ours, autograd = (derivatives(model.core.plan, x, closed=closed, **options) for closed in (True, False))
    assert_close(tensors(ours), tensors(autograd), 1e-10)
    named = list(model.parameters())
    pair = [
        torch.autograd.grad(weighted(tensors(one)), named, create_graph=again, materialize_grads=True)
        for one in (ours, autograd)
    ]
    assert_close(*pair, 1e-10)
    if again:
        assert_close(*(torch.autograd.grad(weighted(one), named, materialize_grads=True) for one in pair), 1e-8)


def is_closed(model):
    """Whether every step of a model has its derivatives in closed form."""
    return closed_steps(model.core.plan) == len(model.core.plan.steps)


def moved(flow, scale=0.2, seed=0):
    """A flow in float64, with all parameters moved away from where they began."""
    flow = flow.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return flow
