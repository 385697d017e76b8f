"""What objectives say when they are made, of steps that bias them."""

import math
from functools import partial

import pytest
import torch
from nflows.transforms import (
    AffineCouplingTransform,
    LeakyReLU,
    LogTanh,
    LULinear,
    PiecewiseRationalQuadraticCDF,
    Transform,
)
from torch import nn

import ebflow_plugin as ebf
import nflows_small
from ebflow_nflows import FullLinear, SmoothLeakyReLU
from ebflow_plugin.adapting.rules import REGISTERED
from ebflow_plugin.objectives import DSM, FDSSM, ML, SM, SML, SSM, LatentMatch
from ebflow_plugin.plan.smoothness import REGISTERED_NETWORKS
from nflows_small import OwnNetwork, spline
from randomness import rng
from warned import messages

flow_of = partial(nflows_small.flow_of, shape=(2,))


@pytest.fixture
def taught():
    """A class of steps for the test, forgotten afterwards."""
    known = []

    def teach(cls, smoothness):
        ebf.register_nonlinear(cls, smoothness=smoothness)
        known.append(cls)

    yield teach
    for cls in known:
        REGISTERED.pop(cls, None)
        REGISTERED_NETWORKS.pop(cls, None)


class Warp(Transform):
    """A transform of the user's own: x + tanh(a·x)/2."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.7))

    def forward(self, inputs, context=None):
        slope = 1 + 0.5 * self.a * (1 - torch.tanh(self.a * inputs) ** 2)
        return inputs + 0.5 * torch.tanh(self.a * inputs), slope.log().sum(-1)


# Smoothness


def smooth_model(**options):
    return ebf.wrap(flow_of(LULinear(2), SmoothLeakyReLU(0.3), LULinear(2)), **options)


def of_levels(noise):
    return smooth_model(preprocess=[ebf.Dequantize(8, noise=noise), ebf.Rescale(0.05, 0.95), ebf.Logit()])


HARMLESS = {
    "smooth flows": (smooth_model, [SM, SSM, FDSSM, lambda m: FDSSM(m, eps=1e-3), DSM, ML, SML]),
    "data that do not jump": (lambda: of_levels("smooth"), [SM, SSM, FDSSM, DSM, ML, SML]),
    "data that jump": (lambda: of_levels("uniform"), [FDSSM, DSM, ML, SML]),
    "a score that jumps": (lambda: ebf.wrap(flow_of(spline())), [ML, SML, DSM, lambda m: FDSSM(m, eps=0.1)]),
    "a density that jumps": (lambda: ebf.wrap(flow_of(LogTanh)), [ML, SML]),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_nothing_is_said_about_what_does_no_harm(name):
    model, objectives = HARMLESS[name]
    for make in objectives:
        assert messages(lambda make=make: make(model()))[1] == [], make


@pytest.mark.parametrize("make", [SM, SSM])
def test_data_that_jump(make):
    _, (message,) = messages(lambda: make(of_levels("uniform")))
    assert message.startswith(f"{make.__name__} integrates by parts over the density of the data, which jumps here\n")
    assert "preprocess.0  Dequantize(levels=8): uniform noise" in message
    assert 'Dequantize(8, noise="smooth")' in message
    assert "DSM or ML" in message


@pytest.mark.parametrize("make", [SM, SSM])
def test_jumps_of_the_score(make):
    model = ebf.wrap(flow_of(LULinear(2), spline(), LULinear(2)))
    _, (message,) = messages(lambda: make(model))
    name = make.__name__
    assert message.startswith(f"{name} may be wrong about 1 of 3 steps\n  _transform._transforms.1  PiecewiseRational")
    assert "its score jumps" in message
    assert "misses jumps of the score, so its value and gradients are biased" in message
    assert "Use DSM" in message
    assert "ebflow_plugin.smooth(flow)" in message
    assert "_transforms.0" not in message


def test_small_steps_and_jumps_of_the_score():
    model = ebf.wrap(flow_of(spline()))
    _, (message,) = messages(lambda: FDSSM(model, eps=0.05))
    assert "use eps of at least 0.1" in message
    assert "_transform._transforms.0  PiecewiseRationalQuadraticCDF" in message


@pytest.mark.parametrize("make", [SM, SSM, FDSSM, lambda m: FDSSM(m, eps=1.0), DSM])
def test_jumps_of_the_density_harm_every_kind_of_score_matching(make):
    _, (message,) = messages(lambda: make(ebf.wrap(flow_of(LULinear(2), LeakyReLU(0.5), LULinear(2)))))
    assert "_transform._transforms.1  LeakyReLU (nflows.transforms.nonlinearities): its density jumps" in message
    assert "use ML or SML, or a smooth layer" in message


def test_a_network_of_ones_own_can_be_taught(taught):
    def coupling(activation):
        return ebf.wrap(flow_of(AffineCouplingTransform([0, 1], lambda *sizes: OwnNetwork(activation))))

    smooth, kinked = coupling(nn.Tanh()), coupling(nn.ReLU())
    _, (message,) = messages(lambda: SSM(smooth))
    assert "AffineCouplingTransform (nflows.transforms.coupling): of unknown smoothness" in message
    assert "for the class of the step, or of your network inside it" in message
    taught(OwnNetwork, "smooth")
    assert messages(lambda: SSM(smooth))[1] == []
    assert "its score jumps" in messages(lambda: SSM(kinked))[1][0]  # what is inside is looked at all the same


def test_unknown_classes():
    model, _ = messages(lambda: ebf.wrap(flow_of(Warp)))
    _, (message,) = messages(lambda: SSM(model))
    assert "Warp" in message
    assert "of unknown smoothness" in message
    assert 'register_nonlinear(cls, smoothness="smooth")' in message
    assert messages(lambda: DSM(model))[1] == []


def test_all_kinds_at_once_are_one_warning():
    model, _ = messages(lambda: ebf.wrap(flow_of(spline(), LeakyReLU(0.5), Warp)))
    _, (message,) = messages(lambda: SSM(model))
    assert "3 of 3 steps" in message
    assert sum(word in message for word in ("its score jumps", "its density jumps", "of unknown smoothness")) == 3


def test_the_matched_variable_decides():
    """A jump in front of the matched variable is none of score matching's business."""
    flow = flow_of(LeakyReLU(0.5), LULinear(2))
    assert messages(lambda: SSM(ebf.wrap(flow, match_after=0)))[1] == []
    assert len(messages(lambda: SSM(ebf.wrap(flow)))[1]) == 1


@pytest.mark.parametrize("make", [SM, SSM, DSM, FDSSM, ML, SML, partial(ML, log_det="relative")])
def test_making_an_objective_does_no_work(make, monkeypatch):
    """No copy, no walk, no energy, no backward pass: a constructor costs less than a step."""
    model = ebf.wrap(flow_of(FullLinear(2), SmoothLeakyReLU(0.3), FullLinear(2)))

    def forbidden(*_, **__):
        raise AssertionError("a constructor worked")

    with monkeypatch.context() as patched:  # pytest itself copies objects after the test
        for name in ("copy.deepcopy", "torch.autograd.grad", "ebflow_plugin.planned.find_flow", "torch.randn"):
            patched.setattr(name, forbidden)
        patched.setattr(type(model.plan), "encode", forbidden)
        make(model)


def test_noise_that_leaves_the_domain_is_told():
    model = ebf.wrap(flow_of(PiecewiseRationalQuadraticCDF([2], num_bins=4)))
    for cls, options, words in (
        (DSM, {"sigma": 5.0}, "sigma=5.0"),
        (DSM, {"sigma_range": (4.0, 9.0)}, "sigma_range=(4.0, 9.0)"),
        (SSM, {"sigma": 5.0}, "sigma=5.0"),
        (FDSSM, {"eps": 5.0}, "eps=5"),
        (LatentMatch, {"sigma": 5.0}, "sigma=5.0"),
    ):
        words = f"{cls.__name__} adds noise to the data ({words})"
        with pytest.raises(Exception) as caught:  # noqa: PT011 - nflows' own error
            messages(lambda: cls(model, generator=rng(), **options)(torch.rand(9, 2).double()))
        assert any(words in note and "Logit" in note for note in caught.value.__notes__), words
    with pytest.raises(Exception) as caught:  # noqa: PT011 - rows that are outside by themselves
        messages(lambda: SSM(model)(2.0 + torch.rand(9, 2).double()))
    assert not any("adds noise" in note for note in caught.value.__notes__)


# What the warnings claim, measured in one dimension


def gap(objective, model, x):
    """E[L] + ½E[s²], which is 0 for data from the model itself (E[s² + s'] = 0), and its standard error."""
    with torch.no_grad():
        values = objective.losses(x) + 0.5 * model.score(x).square().sum(1)
    return values.mean().item(), values.std().item() / math.sqrt(len(x))


def test_a_jumping_score_biases_ssm_but_not_finite_differences():
    model = ebf.wrap(flow_of(spline(1), shape=(1,)))
    x = model.sample(200_000, generator=rng())
    (bias, error), _ = messages(lambda: gap(SSM(model, generator=rng()), model, x))
    assert abs(bias) > 20 * error
    bias, error = gap(FDSSM(model, eps=0.1, generator=rng()), model, x)
    assert abs(bias) < 5 * error


def test_a_smooth_score_biases_nothing():
    model = ebf.wrap(flow_of(SmoothLeakyReLU(0.3), LULinear(1), shape=(1,)))
    x = model.sample(200_000, generator=rng())
    for objective in (SM(model), SSM(model, generator=rng()), FDSSM(model, eps=0.1, generator=rng())):
        bias, error = gap(objective, model, x)
        assert abs(bias) < 5 * error


@pytest.mark.parametrize(("layer", "biased"), [(LeakyReLU(0.5), True), (SmoothLeakyReLU(0.5), False)])
def test_a_jumping_density_biases_dsm(layer, biased):
    """At the truth the gradient of the bias is 0 up to O(σ²), unless the density jumps."""
    flow = flow_of(layer, LULinear(1), shape=(1,))
    with torch.no_grad():
        flow._transform._transforms[1].bias.fill_(0.7)
    model = ebf.wrap(flow)
    x = model.sample(400_000, generator=rng())
    objective, said = messages(lambda: DSM(model, sigma=0.1, generator=rng(1)))
    objective(x).backward()
    gradient = abs(flow._transform._transforms[1].bias.grad.item())
    assert bool(said) == biased
    assert gradient > 0.1 if biased else gradient < 0.05


class Forgetful(torch.autograd.Function):
    """a·tanh(x), with a first derivative that is right and a second one that torch takes to be 0, as UMNN has it."""

    @staticmethod
    def forward(ctx, x, a):
        ctx.save_for_backward(x.detach(), a.detach())
        return a * torch.tanh(x)

    @staticmethod
    def backward(ctx, gradient):
        x, a = (tensor.detach() for tensor in ctx.saved_tensors)
        return gradient * a * (1 - torch.tanh(x) ** 2), (gradient * torch.tanh(x)).sum().reshape(())


class Integrated(Transform):
    """x₁, x₂ + a·tanh(x₁)."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.7))

    def forward(self, inputs, context=None):
        first, second = inputs.unbind(1)
        return torch.stack([first, second + Forgetful.apply(first, self.a)], 1), inputs.new_zeros(len(inputs))


def test_wrong_second_derivatives_are_refused_where_they_would_be_used(taught):
    taught(Integrated, "2nd derivative is wrong")
    model, x = ebf.wrap(flow_of(Integrated)), torch.randn(50, 2, generator=rng(), dtype=torch.float64)
    for cls in (SM, SSM, DSM):
        with pytest.raises(ebf.UnsupportedStepError, match="(?s)Integrated.*derivatives are wrong.*FDSSM"):
            cls(model)
    for objective in (ML(model), FDSSM(model, generator=rng())):
        assert_gradient(objective, x, model.flow._transform._transforms[0].a, right=True)


def test_dsm_would_be_wrong_there(taught):
    """Why DSM is refused: the gradient of the score in a parameter is a second derivative too."""
    taught(Integrated, "smooth")  # a lie
    model, x = ebf.wrap(flow_of(Integrated)), torch.randn(50, 2, generator=rng(), dtype=torch.float64)
    assert_gradient(DSM(model, generator=rng()), x, model.flow._transform._transforms[0].a, right=False)


def assert_gradient(objective, x, parameter, right):
    """Compares the gradient with a difference quotient."""

    def value():
        if objective.generator is not None:
            objective.generator.manual_seed(0)
        return objective(x)

    (gradient,) = torch.autograd.grad(value(), parameter)
    ends = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            parameter.add_(step)
            ends.append(value().item())
            parameter.sub_(step)
    quotient = (ends[0] - ends[1]) / 2e-5
    assert math.isclose(gradient.item(), quotient, rel_tol=1e-5, abs_tol=1e-7) == right
