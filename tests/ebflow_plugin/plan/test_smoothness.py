"""Contract 9, measured by the identity that score matching rests on.

For data with density p and score s_p, and a model with score s, integration by parts gives E_p[tr ∇s + s·s_p] = 0 where
s is continuous. Where it jumps, autograd's derivative misses the jump, and the mean is something else.
"""

import pytest
import torch
from nflows import transforms
from nflows.transforms.nonlinearities import CauchyCDFInverse
from torch import nn

import ebflow_plugin as ebf
from cases import SUPPORTED, Case
from ebflow_nflows import FullLinear, SmoothLeakyReLU
from ebflow_plugin.adapting.rules import REGISTERED
from ebflow_plugin.plan.smoothness import REGISTERED_NETWORKS, smoothness_of
from nflows_small import Net, OwnNetwork, flow_of
from randomness import rng
from stein import stein_defect

N = 4000


def known_data(n: int, shape: tuple[int, ...], domain: str, spread: float = 0.7) -> tuple[torch.Tensor, torch.Tensor]:
    """Data in a domain, and their exact score: a Gaussian, squashed where the domain is bounded."""
    generator = rng(0)
    normal = spread * torch.randn(n, *shape, dtype=torch.float64, generator=generator)
    if domain == "real":
        return normal, -normal / spread**2
    unit = torch.sigmoid(normal)
    score = (-normal / spread**2 - 1.0 + 2.0 * unit) / (unit * (1.0 - unit))
    return (unit, score) if domain == "unit" else (2.0 * unit - 1.0, score / 2.0)


def smooth(case: Case) -> bool:
    model = ebf.wrap(case.build())
    return case.dim <= 6 and all(part.smoothness == "smooth" for part in model.plan.parts())


@pytest.mark.parametrize("case", [case for case in SUPPORTED if smooth(case)], ids=str)
def test_what_claims_to_be_smooth_is(case: Case):
    model = ebf.wrap(case.build())
    model.initialize(case.x(), case.context())
    x, true_score = known_data(N, case.event_shape, case.domain)
    mean, error = stein_defect(model, x, true_score, case.context(N))
    assert abs(mean) < 5 * error + 1e-6


def one_dimensional(*layers):
    return ebf.wrap(flow_of(*layers, shape=(1,), mode="eval", noise=0.3))


def spline(cls, **options):
    return cls([1], num_bins=8, tails="linear", tail_bound=2.5, **options)


SMOOTH = {
    "affine": lambda: [transforms.PointwiseAffineTransform(0.7, 2.0)],
    "full linear": lambda: [FullLinear(1)],
    "smooth leaky ReLU": lambda: [SmoothLeakyReLU(0.3), FullLinear(1), SmoothLeakyReLU(0.2, residual=True)],
    "logit": lambda: [transforms.Logit()],
    "inverse tanh": lambda: [transforms.InverseTransform(transforms.Tanh())],
    "Cauchy quantile": lambda: [CauchyCDFInverse(), transforms.LULinear(1)],
    "MAF, tanh": lambda: [transforms.MaskedAffineAutoregressiveTransform(1, 8, activation=torch.tanh)],
    "batch norm": lambda: [transforms.BatchNorm(1)],
}
JUMPS = {
    "rational-quadratic spline": lambda: [spline(transforms.PiecewiseRationalQuadraticCDF)],
    "linear spline": lambda: [spline(transforms.PiecewiseLinearCDF)],
    "quadratic spline": lambda: [spline(transforms.PiecewiseQuadraticCDF)],
    "cubic spline": lambda: [spline(transforms.PiecewiseCubicCDF)],
    "LeakyReLU before a shift": lambda: [transforms.LeakyReLU(0.3), transforms.PointwiseAffineTransform(0.8, 1.0)],
    "LogTanh": lambda: [transforms.LogTanh()],
}


DOMAINS = {"logit": "unit", "inverse tanh": "interval", "Cauchy quantile": "unit"}


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_steps_in_one_dimension(name):
    model = one_dimensional(*SMOOTH[name]())
    assert all(row.smoothness == "smooth" for row in model.report)
    mean, error = stein_defect(model, *known_data(40_000, (1,), DOMAINS.get(name, "real"), spread=1.0))
    assert abs(mean) < 5 * error + 1e-9


@pytest.mark.parametrize("name", JUMPS)
def test_steps_that_jump_are_said_to_and_bias_the_objective(name):
    model = one_dimensional(*JUMPS[name]())
    assert any(row.smoothness in ("score jumps", "density jumps") for row in model.report)
    mean, error = stein_defect(model, *known_data(40_000, (1,), "real", spread=1.5))
    assert abs(mean) > 4 * error, (mean, error)


def test_a_relu_conditioner_biases_and_smooth_removes_it():
    torch.manual_seed(0)
    coupling = transforms.AffineCouplingTransform([1, 0], lambda i, o: Net(nn.Linear(i, 3), nn.ReLU(), nn.Linear(3, o)))
    flow = flow_of(coupling, shape=(2,), mode="eval")
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.mul_(4.0)
    data = known_data(40_000, (2,), "real", spread=1.0)
    kinked, kinked_error = stein_defect(ebf.wrap(flow), *data)
    smoothed, smoothed_error = stein_defect(ebf.wrap(ebf.smooth(flow, sharpness=2.0)), *data)
    assert abs(kinked) > 8 * kinked_error
    assert abs(smoothed) < 5 * smoothed_error


def test_bases_of_the_users_own_are_of_unknown_smoothness():
    case = next(case for case in SUPPORTED if case.name.startswith("Laplace base"))
    assert ebf.wrap(case.build()).plan.base.smoothness == "unknown"


# What is said about the classes of networks inside of couplings


class Same(OwnNetwork):
    """Does what its parent does."""


class Other(OwnNetwork):
    """Does something else."""

    def forward(self, inputs, context=None):
        return super().forward(inputs).abs()


@pytest.fixture(autouse=True)
def forgotten():
    yield
    REGISTERED.pop(OwnNetwork, None)
    REGISTERED_NETWORKS.pop(OwnNetwork, None)


@pytest.mark.parametrize("smoothness", ["smooth", "score jumps", "density jumps", "unknown"])
def test_what_is_taught_holds(smoothness):
    assert smoothness_of(nn.Sequential(OwnNetwork())) == "unknown"  # nobody can see into a forward of one's own
    ebf.register_nonlinear(OwnNetwork, smoothness=smoothness)
    assert smoothness_of(nn.Sequential(OwnNetwork())) == smoothness
    ebf.register_nonlinear(OwnNetwork, smoothness="smooth", force=True)  # the last word holds
    assert smoothness_of(OwnNetwork()) == "smooth"
    ebf.register_linear(OwnNetwork, force=True)
    assert smoothness_of(OwnNetwork()) == "unknown"


def test_what_was_taught_of_a_class_is_not_all_that_counts():
    ebf.register_nonlinear(OwnNetwork, smoothness="smooth")
    assert smoothness_of(OwnNetwork(nn.ReLU())) == "score jumps"  # what is inside is looked at all the same
    assert smoothness_of(Same()) == "smooth"
    assert smoothness_of(Other()) == "unknown"
    network = OwnNetwork()
    network.register_forward_hook(lambda module, inputs, output: output.abs())
    assert smoothness_of(network) == "unknown"
