"""The identity that score matching rests on: E_p[tr ∇s + s·s_p] = 0 where the model's score s is continuous."""

import torch


def stein_defect(model, x, true_score, context=None):
    """Mean and standard error of tr ∇s + s·s_p over data x with the score s_p; the trace is exact, but misses jumps."""
    point = x.clone().requires_grad_()
    score = model.score(point, context).flatten(1)
    values = (score.detach() * true_score.flatten(1)).sum(1)
    for axis in range(score.shape[1]):
        if score.requires_grad:
            (row,) = torch.autograd.grad(score[:, axis].sum(), point, retain_graph=True, allow_unused=True)
            values = values if row is None else values + row.flatten(1)[:, axis]
    return values.mean().item(), (values.std() / len(values) ** 0.5).item()
