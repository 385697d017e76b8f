"""Base densities: subclasses, what jumps, and what an unknown step holds."""

import normflows
import pytest
import torch
from nflows import distributions, flows, transforms
from nflows.distributions.uniform import BoxUniform
from normflows.distributions.base import DiagGaussian, Uniform, UniformGaussian
from torch import nn

import ebflow_plugin as ebf
from ebflow_plugin.adapting.densities import density_smoothness
from ebflow_plugin.objectives import DSM, FDSSM, SM, SSM
from nflows_small import Net

D = 3


class Renamed(distributions.StandardNormal):
    """Does what its parent does."""


class Wider(distributions.MADEMoG):
    """One feature more inside than outside, as sbi's MADEMoGWrapper has it."""

    def __init__(self, features, context_features):
        super().__init__(features + 1, 8, context_features, num_mixture_components=2, activation=torch.tanh)

    def _log_prob(self, inputs, context=None):
        return super()._log_prob(nn.functional.pad(inputs, (1, 0)), context)

    def _sample(self, num_samples, context=None):
        return super()._sample(num_samples, context)[..., 1:]


class Raised(distributions.StandardNormal):
    def _log_prob(self, inputs, context):
        return super()._log_prob(inputs, context) - inputs.abs().sum(-1)


def flow_over(base):
    torch.manual_seed(0)
    return flows.Flow(transforms.LULinear(D, identity_init=False), base)


def test_a_subclass_with_other_shapes_than_its_parent_is_taken_as_it_is():
    flow = flow_over(Wider(D, 2))
    x, context = torch.randn(5, D), torch.randn(5, 2)
    model = ebf.wrap(flow)
    torch.testing.assert_close(model.log_prob(x, context), flow.log_prob(x, context))
    assert model.score(x, context).shape == x.shape
    assert model.sample(4, context=context).shape == (5, 4, D)
    assert ebf.verify(flow, x, context)


def test_the_made_estimator_of_sbi():
    build_made = pytest.importorskip("sbi.neural_nets.net_builders.flow").build_made
    torch.manual_seed(0)
    x, context = torch.randn(50, D), torch.randn(50, 2)
    estimator = build_made(x, context)
    model = ebf.wrap(estimator)
    torch.testing.assert_close(model.log_prob(x, context), estimator.net.log_prob(x, context))
    assert torch.isfinite(DSM(model)(x, context))
    assert model.sample(4, context=context[:5]).shape == (5, 4, D)


def test_a_subclass_that_changes_nothing_is_its_parent():
    x = torch.randn(5, D)
    ours, plain = ebf.wrap(flow_over(Renamed([D]))), ebf.wrap(flow_over(distributions.StandardNormal([D])))
    assert ours.plan.base.smoothness == "smooth"
    assert ours.plan.base.gaussian(None) is not None
    assert ours.plan.event_shape == (D,)
    assert torch.equal(ours.log_prob(x), plain.log_prob(x))


def test_a_subclass_that_changes_its_density_is_unknown():
    x = torch.randn(5, D)
    flow = flow_over(Raised([D]))
    model = ebf.wrap(flow)
    assert model.plan.base.smoothness == "unknown"
    assert model.plan.base.gaussian(None) is None
    torch.testing.assert_close(model.log_prob(x), flow.log_prob(x))

    class Flat(DiagGaussian):
        def log_prob(self, z):
            return super().log_prob(z).clamp(min=-3.0)

    base = ebf.wrap(normflows.NormalizingFlow(Flat(D), [normflows.flows.LULinearPermute(D)])).plan.base
    assert (base.smoothness, base.gaussian(None), base.shapes) == ("unknown", None, None)


BOXES = {
    "nflows BoxUniform": lambda: flow_over(BoxUniform(torch.zeros(D) - 9, torch.zeros(D) + 9)),
    "torch Uniform": lambda: flow_over(
        torch.distributions.Independent(torch.distributions.Uniform(-9 * one(), 9 * one()), 1)
    ),
    "normflows Uniform": lambda: normflows.NormalizingFlow(Uniform(D, -9.0, 9.0), [normflows.flows.LULinearPermute(D)]),
    "normflows UniformGaussian": lambda: normflows.NormalizingFlow(
        UniformGaussian(D, [0], scale=9 * one()), [normflows.flows.LULinearPermute(D)]
    ),
}


def one():
    return torch.ones(D)


@pytest.mark.filterwarnings("ignore:__array_wrap__")  # normflows takes a logarithm of a tensor by numpy
@pytest.mark.parametrize("name", BOXES)
@pytest.mark.parametrize("make", [SM, SSM, DSM, FDSSM, lambda model: FDSSM(model, eps=0.5)])
def test_every_kind_of_score_matching_warns_of_a_density_that_jumps(name, make):
    model = ebf.wrap(BOXES[name]())
    assert model.plan.base.smoothness == "density jumps"
    with pytest.warns(UserWarning, match="its density jumps"):
        make(model)


@pytest.mark.parametrize(
    ("density", "smoothness"),
    [
        (torch.distributions.Normal(0.0, 1.0), "smooth"),
        (torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2)), "smooth"),
        (torch.distributions.StudentT(3.0), "smooth"),
        (torch.distributions.Laplace(0.0, 1.0), "score jumps"),
        (torch.distributions.Exponential(1.0), "density jumps"),
        (torch.distributions.Beta(2.0, 2.0), "unknown"),
    ],
)
def test_distributions_of_torch(density, smoothness):
    assert density_smoothness(density) == smoothness


class Mine(transforms.Transform):
    """An unknown class that holds something."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, inputs, context=None):
        return self.inner[0](inputs)


class MineToo(normflows.flows.Flow):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def inverse(self, z):
        return self.inner[0].inverse(z)


@pytest.mark.filterwarnings("ignore:1 of")
@pytest.mark.parametrize("taught", [None, "nonlinear", "linear"])
def test_what_is_inside_of_an_unknown_step_is_asked(taught):
    layer = Mine(nn.ModuleList([transforms.BatchNorm(D)]))
    flow = flows.Flow(transforms.CompositeTransform([layer]), distributions.StandardNormal([D]))
    options = {} if taught is None else {"overrides": {"_transform._transforms.0": taught}}
    with pytest.raises(ebf.UnsupportedStepError, match=r"holds BatchNorm at .*inner.0'?: couples .* eval\(\)"):
        ebf.wrap(flow, **options)
    model = ebf.wrap(flow.eval(), **options)
    model.energy(torch.randn(4, D))
    with pytest.raises(ebf.UnsupportedStepError, match="holds BatchNorm"):
        model.train().energy(torch.randn(4, D))


@pytest.mark.filterwarnings("ignore:1 of")
@pytest.mark.parametrize(
    "inner", [normflows.flows.BatchNorm, lambda: normflows.flows.Residual(normflows.nets.LipschitzMLP([D, 4, D]))]
)
def test_what_is_inside_of_an_unknown_flow_of_normflows_is_asked(inner):
    flow = normflows.NormalizingFlow(DiagGaussian(D), [MineToo(nn.ModuleList([inner()]))])
    with pytest.raises(ebf.UnsupportedStepError, match=r"holds (BatchNorm|Residual) at 'flows.0.inner.0'"):
        ebf.wrap(flow)


@pytest.mark.parametrize("name", ["RReLU", "Dropout"])
def test_a_random_network_is_refused_in_training_mode(name):
    coupling = transforms.AffineCouplingTransform(
        [1, 0, 1], lambda i, o: Net(nn.Linear(i, 4), getattr(nn, name)(), nn.Linear(4, o))
    )
    flow = flows.Flow(coupling, distributions.StandardNormal([D]))
    with pytest.raises(ebf.UnsupportedStepError, match=f"is random in training mode .*{name}"):
        ebf.wrap(flow)
    ebf.wrap(flow.eval())
