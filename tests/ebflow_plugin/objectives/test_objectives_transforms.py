"""Objectives inside of torch.func: gradients for each sample, by vmap(grad), and in swapped weights."""

import warnings

import pytest
import torch
from nflows import transforms
from torch.func import functional_call, grad, vmap

import ebflow_plugin as ebf
from ebflow_plugin.objectives import DSM, FDSSM, ML, SM, SSM
from nflows_small import flow_of
from training_models import make_data
from training_models import make_model as make_closed


def make_network():
    torch.manual_seed(0)
    made = transforms.MaskedAffineAutoregressiveTransform(4, 8, num_blocks=1, activation=torch.tanh)
    return ebf.wrap(flow_of(made, shape=(4,), mode="eval", noise=0.2))


MODELS = {"closed forms": lambda: make_closed(actnorm=False, dtype=torch.float64), "network": make_network}
OBJECTIVES = {
    "ml": ML,
    "sm": SM,
    "ssm": SSM,
    "ssm, gaussian": lambda model: SSM(model, projection="gaussian"),
    "ssm, sphere": lambda model: SSM(model, projection="sphere"),
    "ssm, energy": lambda model: SSM(model, energy_weight=0.1),
    "dsm": lambda model: DSM(model, sigma=0.5),
    "dsm, range": lambda model: DSM(model, sigma_range=(0.5, 1.0)),
    "fdssm": lambda model: FDSSM(model, eps=0.5),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("loss", OBJECTIVES)
def test_gradients_for_each_sample(name, loss):
    x = make_data(5, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch about its own torch.jit
        objective = OBJECTIVES[loss](MODELS[name]())
        weights = {key: value.detach() for key, value in objective.named_parameters()}

        def value(weights, row):
            return functional_call(objective, weights, (row.unsqueeze(0),))

        torch.manual_seed(0)
        each = vmap(grad(value), in_dims=(None, 0), randomness="different")
        found, alike = each(weights, x), each(weights, x[:1].repeat(5, 1))
        torch.manual_seed(0)
        alone = grad(value)(weights, x[0])
        torch.manual_seed(0)
        plain = objective(x[:1])
    differ = any(not torch.equal(alike[key][0], alike[key][1]) for key in weights)
    assert differ == (loss not in ("ml", "sm")), "each sample has its own draw"
    named = dict(objective.named_parameters())
    expected = torch.autograd.grad(plain, list(named.values()), allow_unused=True, materialize_grads=True)
    for key, wanted in zip(named, expected, strict=True):
        assert found[key].shape == (5, *wanted.shape)
        torch.testing.assert_close(alone[key], wanted, msg=lambda text, key=key: f"{key}: {text}")
        if loss in ("ml", "sm"):  # nothing is drawn
            torch.testing.assert_close(found[key][0], wanted, msg=lambda text, key=key: f"{key}: {text}")
