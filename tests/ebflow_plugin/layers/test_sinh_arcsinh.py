"""The sinh-arcsinh layer: against its formula and autograd."""

import pytest
import torch

from ebflow_plugin.errors import InputError
from ebflow_plugin.layers import SinhArcsinh
from randomness import rng

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
