"""SmoothLeakyReLU and SinhArcsinh: their formulas, their inverses everywhere, and their derivatives."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.functional import jacobian

from ebflow_plugin.errors import InputError
from ebflow_plugin.layers import SinhArcsinh, SmoothLeakyReLU
from randomness import rng

# torch itself calls torch.jit.script when it first differentiates forward
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")

double = torch.float64


ACTIVATIONS = [
    SmoothLeakyReLU(),
    SmoothLeakyReLU(0.6),
    SmoothLeakyReLU(1.0),
    SmoothLeakyReLU(1e-6),
    SmoothLeakyReLU(residual=True),
]


@pytest.mark.parametrize("layer", ACTIVATIONS, ids=repr)
def test_activation_formula(layer):
    x = torch.linspace(-30, 30, 13, dtype=double).view(1, 13)
    expected = layer.alpha * x + (1 - layer.alpha) * (1 + x.exp()).log() + (x if layer.residual else 0)
    torch.testing.assert_close(layer.transform(x), expected)
    found = jacobian(lambda x: layer.transform(x)[0], x)[:, 0]
    torch.testing.assert_close(layer.log_det(x), torch.linalg.slogdet(found)[1][None])
    assert layer.log_det(x.expand(4, 13).reshape(4, 1, 13)).shape == (4,)
    assert layer.log_det(x[0]).shape == (13,)
    assert layer.transform(x[:0]).shape == layer.invert(x[:0]).shape == (0, 13)
    assert layer.log_det(x[:0]).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, double])
@pytest.mark.parametrize("alpha", [1.0, 1 - 1e-6, 0.6, 0.3, 0.01, 1e-6, 1e-12, 1e-30])
@pytest.mark.parametrize("residual", [False, True])
def test_activation_inverse_everywhere(dtype, alpha, residual):
    """The root is right to rounding, of y, of the terms of the sum, or of x itself."""
    layer = SmoothLeakyReLU(alpha, residual)
    far = 30 if dtype == torch.float32 else 300
    magnitudes = torch.logspace(-far, far, 501, dtype=double)
    near = torch.linspace(-40, 40, 2001, dtype=double)
    y = torch.cat([-magnitudes, magnitudes, near, near / 40, torch.zeros(1, dtype=double)]).to(dtype)
    slope = alpha + residual
    y = y[y.double().abs() / slope < torch.finfo(dtype).max / 4]  # elsewhere the answer is no number of this type
    x = layer.invert(y)
    assert x.dtype == dtype
    exact, goal = x.double(), y.double()
    bent = (1 - alpha) * F.softplus(exact, threshold=40.0)
    rounding = (slope * exact).abs() + bent + goal.abs() + (slope + (1 - alpha) * torch.sigmoid(exact)) * exact.abs()
    assert ((slope * exact + bent - goal).abs() <= 2 * torch.finfo(dtype).eps * rounding).all()


@settings(max_examples=200, deadline=None)
@given(st.floats(-1e30, 1e30), st.floats(1e-9, 1.0), st.booleans())
def test_activation_round_trip(x, alpha, residual):
    layer = SmoothLeakyReLU(alpha, residual)
    x = torch.tensor([x], dtype=double)
    found = layer.invert(layer.transform(x))
    slope = layer.log_det(x[None]).exp()
    rounding = torch.finfo(double).eps * (1 + layer.transform(x).abs() + slope * x.abs()) / slope
    assert ((found - x).abs() <= 4 * rounding).all()


@pytest.mark.parametrize("layer", ACTIVATIONS, ids=repr)
def test_activation_derivatives(layer):
    x = torch.tensor([-8.0, -1.0, 0.0, 0.7, 9.0], dtype=double, requires_grad=True)
    for function in (layer.transform, layer.log_det):
        assert torch.autograd.gradcheck(function, x, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(function, x)
    if layer.alpha > 1e-3:  # finite differences of the inverse are hopeless where its slope is a million
        assert torch.autograd.gradcheck(layer.invert, x, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(layer.invert, x)


@pytest.mark.parametrize("layer", ACTIVATIONS, ids=repr)
@pytest.mark.parametrize("y", [-30.0, -2.0, -1e-3, 0.0, 0.4, 3.0, 30.0, 1e10])
def test_activation_inverse_derivatives_in_closed_form(layer, y):
    y = torch.tensor(y, dtype=double)
    x = layer.invert(y)
    s, bend = torch.sigmoid(x), 1 - layer.alpha
    first = layer.log_det(x[None]).exp()[0]
    second = bend * s * (1 - s)
    third = second * (1 - 2 * s)
    expected = [1 / first, -second / first**3, 3 * second**2 / first**5 - third / first**4]
    function = layer.invert
    for value in expected:
        function = torch.func.grad(function)
        torch.testing.assert_close(function(y), value, rtol=1e-9, atol=1e-12)
    one = torch.ones_like(y)
    twice = torch.func.jvp(lambda a: torch.func.jvp(layer.invert, (a,), (one,))[1], (y,), (one,))[1]
    torch.testing.assert_close(twice, expected[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, double])
@pytest.mark.parametrize("x", [-1e30, -800.0, -100.0, -25.0, 0.0, 19.9, 20.1, 39.9, 40.1, 100.0, 1e30])
def test_activation_derivatives_far_out(x, dtype):
    """Three derivatives that are finite and right where torch's softplus switches, and where exponentials overflow."""
    layer = SmoothLeakyReLU(0.3)
    s = torch.sigmoid(torch.tensor(x, dtype=double))
    t = torch.sigmoid(torch.tensor(-x, dtype=double))
    slope = 0.3 + 0.7 * s
    ratio = 0.7 * s * t / slope
    derivatives = {
        layer.transform: [slope, 0.7 * s * t, 0.7 * s * t * (t - s)],
        layer.log_det: [ratio, ratio * (t - s) - ratio**2],
    }
    for function, expected in derivatives.items():
        value = torch.tensor([x], dtype=dtype, requires_grad=True)
        found = function(value)
        for derivative in expected:
            (found,) = torch.autograd.grad(found.sum(), value, create_graph=True)
            torch.testing.assert_close(
                found[0].double(), derivative, rtol=1e-5, atol=1e-7 if dtype == torch.float32 else 1e-15
            )


def test_activation_waits_for_nothing():
    """On the meta device any look at a value would fail."""
    layer = SmoothLeakyReLU()
    y = torch.empty(2, 3, device="meta")
    assert layer.invert(y).shape == (2, 3)
    assert layer.log_det(y).shape == (2,)


def test_activation_copies():
    layer = SmoothLeakyReLU(0.2, residual=True)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert (twin.alpha, twin.residual) == (0.2, True)
    assert not layer.state_dict()
    assert repr(layer) == "SmoothLeakyReLU(alpha=0.2, residual=True)"


# The sinh-arcsinh layer: against its formula and autograd


D = 3


def layer():
    made = SinhArcsinh(D).double()
    with torch.no_grad():
        made.log_tail.copy_(torch.tensor([-1.2, 0.0, 0.4]))
        made.skewness.copy_(torch.tensor([0.7, 0.0, -1.5]))
    return made


POINTS = torch.tensor([-1e6, -30.0, -1.0, -1e-3, 0.0, 0.4, 5.0, 1e8], dtype=torch.float64)[:, None].expand(-1, D)


def test_the_map_is_that_of_jones_and_pewsey():
    made = layer()
    expected = torch.sinh(made.log_tail.exp() * torch.asinh(POINTS) - made.skewness)
    torch.testing.assert_close(made.transform(POINTS), expected)
    torch.testing.assert_close(made.invert(made.transform(POINTS)), POINTS, rtol=1e-9, atol=1e-12)


def test_derivatives_are_those_of_autograd():
    made = layer()
    x = POINTS[1:-1].clone().requires_grad_()

    def derivative(y):
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    slope = derivative(made.transform(x))
    first = derivative(slope.log())
    second = derivative(first)
    for ours, theirs in zip(made.slopes(x), (slope, first, second), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(made.slope(x), slope)
    torch.testing.assert_close(made.log_det(x), slope.log().sum(1))


@pytest.mark.parametrize("dim", [-1, -2, -3])
def test_parameters_can_be_those_of_any_dimension(dim):
    made, last = SinhArcsinh(D, dim).double(), layer()
    made.load_state_dict(last.state_dict())
    x = torch.randn(5, D, D, D, dtype=torch.float64, generator=rng(0))
    moved = x.movedim(dim, -1)
    torch.testing.assert_close(made.transform(x).movedim(dim, -1), last.transform(moved))
    torch.testing.assert_close(made.invert(made.transform(x)), x)
    torch.testing.assert_close(made.log_det(x), last.log_det(moved))
    for ours, theirs in zip(made.slopes(x), last.slopes(moved), strict=True):
        torch.testing.assert_close(ours.movedim(dim, -1), theirs)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((lambda dim=dim: SinhArcsinh(D, dim), "dim must be a negative integer") for dim in (0, 1, 1.0, True)),
        (lambda: layer().transform(torch.zeros(2, 4).double()), "takes 3 features"),
        (lambda: layer().invert(torch.zeros(2, 4).double()), "takes 3 features"),
        (lambda: SinhArcsinh(D, dim=-3).transform(torch.zeros(2, 4, 3, 3)), r"takes 3 features in dimension -3"),
        (lambda: SinhArcsinh(D, dim=-3).transform(torch.zeros(3, 3)), "takes 3 features"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(InputError, match=message):
        call()
