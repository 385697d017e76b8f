"""An encoder in front of the context is trained by every objective, as log_prob trains it."""

import normflows
import pytest
import torch
from nflows import distributions, flows, transforms
from torch import nn

import ebflow_plugin as ebf
from case import perturb
from ebflow_nflows import FullLinear, SmoothLeakyReLU
from ebflow_plugin.objectives import DSM, FDSSM, ML, SM, SML, SSM
from ebflow_plugin.objectives.registration import FunctionObjective
from nflows_small import flow_of
from randomness import rng

pytestmark = pytest.mark.filterwarnings("ignore")  # what objectives warn about is the subject of test_checks.py

D, C, ROWS = 3, 2, 5


def nflows_autoregressive():
    """Closed forms in front (a full layer, an elementwise step), a network after them."""
    full = FullLinear(D, init="orthogonal", generator=rng())
    made = transforms.MaskedAffineAutoregressiveTransform(D, 8, context_features=C, num_blocks=1, activation=torch.tanh)
    return flow_of(full, SmoothLeakyReLU(0.3), made, shape=(D,))


def nflows_base():
    """All steps in closed form: the context is seen by the base alone."""
    base = distributions.ConditionalDiagonalNormal([D], context_encoder=nn.Linear(C, 2 * D))
    return flows.Flow(FullLinear(D, init="orthogonal", generator=rng()), base)


def normflows_autoregressive():
    layers = [
        normflows.flows.MaskedAffineAutoregressive(D, 8, context_features=C, num_blocks=1, activation=torch.tanh)
        for _ in range(2)
    ]
    return normflows.ConditionalNormalizingFlow(normflows.distributions.DiagGaussian(D), layers)


MODELS = {
    "nflows, network": nflows_autoregressive,
    "nflows, base": nflows_base,
    "normflows": normflows_autoregressive,
}
OBJECTIVES = {
    "ml": ML,
    "sm": SM,
    "ssm": lambda model: SSM(model, projections=2, generator=rng(3)),
    "dsm": lambda model: DSM(model, sigma=0.5, generator=rng(3)),
    "dsm, many": lambda model: DSM(model, sigma_range=(0.1, 1.0), generator=rng(3)),
    "fdssm": lambda model: FDSSM(model, eps=0.5, generator=rng(3)),
    "regularised": lambda model: SSM(model, energy_weight=0.3, generator=rng(3)),
    "sum": lambda model: 0.7 * SSM(model, generator=rng(3)) + 0.3 * ML(model),
    "function": lambda model: FunctionObjective(model, lambda model, x, context: model.energy(x, context).mean()),
}


def setting(name):
    """A model, data, what the encoder sees, and the encoder."""
    torch.manual_seed(0)
    flow = MODELS[name]().double().eval()
    perturb(flow, 0.2)
    encoder = nn.Sequential(nn.Linear(4, C), nn.Tanh()).double()
    x, seen = (torch.randn(ROWS, size, generator=rng(1), dtype=torch.float64) for size in (D, 4))
    return ebf.wrap(flow), x, seen, encoder


def gradients(value, encoder):
    return torch.autograd.grad(value, list(encoder.parameters()))


def by_differences(value, encoder, step=1e-5):
    """The derivative of a value in each entry of the encoder's parameters, by central differences."""
    found = []
    for parameter in encoder.parameters():
        entries = []
        for place in range(parameter.numel()):
            ends = []
            for move in (step, -step):
                with torch.no_grad():
                    parameter.view(-1)[place] += move
                ends.append(value().item())
                with torch.no_grad():
                    parameter.view(-1)[place] -= move
            entries.append((ends[0] - ends[1]) / (2 * step))
        found.append(torch.tensor(entries, dtype=parameter.dtype).reshape(parameter.shape))
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("loss", OBJECTIVES)
def test_the_gradient_of_an_encoder_is_that_of_finite_differences(name, loss):
    model, x, seen, encoder = setting(name)
    found = gradients(OBJECTIVES[loss](model)(x, encoder(seen)), encoder)
    expected = by_differences(lambda: OBJECTIVES[loss](model)(x, encoder(seen)), encoder)
    assert all(bool(gradient.any()) for gradient in found)
    torch.testing.assert_close(list(found), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_maximum_likelihood_trains_an_encoder_as_log_prob_does(name):
    model, x, seen, encoder = setting(name)
    found = gradients(ML(model)(x, encoder(seen)), encoder)
    expected = gradients(-model.log_prob(x, encoder(seen)).mean(), encoder)
    torch.testing.assert_close(found, expected)


def test_the_relative_gradient_leaves_that_of_an_encoder_as_it_is():
    model, x, seen, encoder = setting("nflows, network")
    found = gradients(ML(model, log_det="relative")(x, encoder(seen)), encoder)
    torch.testing.assert_close(found, gradients(ML(model)(x, encoder(seen)), encoder))


@pytest.mark.parametrize("name", MODELS)
def test_samples_of_the_model_count_as_data_for_an_encoder(name):
    """No gradient flows through the samples themselves."""
    model, x, seen, encoder = setting(name)
    drawn = model.sample(1, encoder(seen).detach(), generator=rng(3)).squeeze(1)

    def value():
        return (model.energy(x, encoder(seen)) - model.energy(drawn, encoder(seen))).mean()

    found = gradients(SML(model, generator=rng(3))(x, encoder(seen)), encoder)
    torch.testing.assert_close(list(found), by_differences(value, encoder), rtol=1e-5, atol=1e-7)


def test_a_context_from_inference_mode_is_taken():
    model, x, seen, encoder = setting("nflows, network")
    with torch.inference_mode():
        context = encoder(seen)
    loss = SSM(model, generator=rng(3))
    loss(x, context).backward()
    expected = SSM(model, generator=rng(3))(x, encoder(seen))
    torch.testing.assert_close(SSM(model, generator=rng(3))(x, context), expected)
