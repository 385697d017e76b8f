"""A context that was forgotten, or is none, is named in our words."""

import numpy as np
import pytest
import torch
from nflows import distributions, flows, transforms
from nflows.nn import nets
from torch import nn

import ebflow_plugin as ebf
from ebflow_nflows import FullLinear
from randomness import rng

D, C = 4, 3


def coupling():
    return transforms.AffineCouplingTransform(
        [1, 0, 1, 0],
        lambda i, o: nets.ResidualNet(i, o, 8, context_features=C, num_blocks=1, activation=torch.tanh),
    )


def autoregressive():
    return transforms.MaskedAffineAutoregressiveTransform(D, 8, context_features=C, activation=torch.tanh)


def with_coupling():
    return flows.Flow(coupling(), distributions.StandardNormal([D]))


def with_embedding():
    return flows.Flow(autoregressive(), distributions.StandardNormal([D]), embedding_net=nn.Linear(5, C))


def with_conditional_base():
    base = distributions.ConditionalDiagonalNormal([D], context_encoder=nn.Linear(C, 2 * D))
    return flows.Flow(transforms.LULinear(D), base)


CALLS = {
    "energy": lambda model, x: model.energy(x),
    "score": lambda model, x: model.score(x),
    "log_prob": lambda model, x: model.log_prob(x),
    "sample": lambda model, x: model.sample(2),
    "calibrate": lambda model, x: model.calibrate(x),
    "dsm": lambda model, x: ebf.objectives.DSM(model, sigma=0.1)(x),
    "ssm": lambda model, x: ebf.objectives.SSM(model)(x),
    "ml": lambda model, x: ebf.objectives.ML(model)(x),
}


@pytest.mark.parametrize("make", [with_coupling, with_embedding, with_conditional_base])
@pytest.mark.parametrize("name", list(CALLS))
def test_a_forgotten_context_is_named(make, name):
    torch.manual_seed(0)
    with pytest.raises(ebf.InputError, match=r"is conditional(?s:.*)Pass context=") as caught:
        CALLS[name](ebf.wrap(make()), torch.randn(30, D))
    assert not any("noise" in note for note in getattr(caught.value, "__notes__", ()))


def test_an_embedding_that_needs_no_context_is_asked():
    class Usual(nn.Module):
        def __init__(self):
            super().__init__()
            self.usual = nn.Parameter(torch.ones(1, C))

        def forward(self, context):
            return self.usual if context is None else context

    torch.manual_seed(0)
    flow = flows.Flow(autoregressive(), distributions.StandardNormal([D]), embedding_net=Usual())
    model = ebf.wrap(flow)
    drawn = model.sample(3, generator=rng(0))
    expected = model.sample(3, torch.ones(1, C), generator=rng(0))[0]
    assert torch.allclose(drawn, expected)


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (np.zeros((2, C), dtype="float32"), "context must be a tensor, got ndarray"),
        (torch.zeros(2, C, dtype=torch.float64), "context is torch.float64, the flow is torch.float32"),
        (torch.tensor(1.0), "context must have (2 )?rows"),
        (torch.zeros(2, C, device="meta"), "context is on meta, (the flow|x) is on cpu"),
    ],
)
def test_what_is_no_context_is_refused(context, message):
    model = ebf.wrap(flows.Flow(autoregressive(), distributions.StandardNormal([D])))
    with pytest.raises(ebf.InputError, match=message):
        model.sample(2, context)
    with pytest.raises(ebf.InputError, match=message):
        model.energy(torch.zeros(2, D), context)


def test_an_array_is_no_data():
    model = ebf.wrap(flows.Flow(FullLinear(D), distributions.StandardNormal([D])))
    for call in (model.energy, model.log_prob, model.score, model.preprocess, model.initialize):
        with pytest.raises(ebf.InputError, match="x must be a tensor, got ndarray"):
            call(np.zeros((2, D), dtype="float32"))
    for call in (model.calibrate, lambda x: model.initialize(x, whiten=True)):
        with pytest.raises(ebf.InputError, match=r"got ndarray; torch\.as_tensor"):
            call(np.zeros((2, D), dtype="float32"))
