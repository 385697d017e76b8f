"""Maximum likelihood by samples: what its gradient is made of."""

import torch

from ebflow_nflows import FullLinear, SmoothLeakyReLU
from ebflow_plugin.objectives import SML
from randomness import randn, rng
from stochastic_models import gradient, nflows_model


def test_no_gradient_flows_through_the_samples():
    model = nflows_model(FullLinear(3), SmoothLeakyReLU(0.4), FullLinear(3), shape=[3])
    x, drawn = randn(6, 3), model.sample(6, generator=rng(2))
    found = gradient(SML(model, generator=rng(2)), x)
    loss = model.energy(x).mean() - model.energy(drawn).mean()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(found, expected)
