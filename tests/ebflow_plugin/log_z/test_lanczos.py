"""log Z by Lanczos quadrature: its control variate, its error bars, and where it is exact."""

import math

import pytest
import torch
from nflows import distributions, flows

import ebflow_nflows
import ebflow_plugin as ebf
from ebflow_plugin.linalg.dense import Dense
from ebflow_plugin.linalg.random import signs_like
from ebflow_plugin.log_z import lanczos
from gaussian_models import WIDE, assert_agrees, make_model
from randomness import rng


def test_known_squares_take_the_variance_out(monkeypatch):
    weight = torch.eye(100, dtype=WIDE) + 0.003 * torch.randn(100, 100, generator=rng(), dtype=WIDE)
    operator = Dense(weight)
    with_squares = lanczos.log_abs_det(operator, generator=rng(1))
    monkeypatch.setattr(operator, "sum_of_squares", lambda: None)
    without = lanczos.log_abs_det(operator, generator=rng(1))
    exact = float(torch.linalg.slogdet(weight)[1])
    assert abs(with_squares.value - exact) < 4 * with_squares.std_error
    assert abs(without.value - exact) < 4 * without.std_error
    assert with_squares.std_error < without.std_error / 10


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding_mode": "circular"},
        {"kernel_size": 4, "stride": 2},
        {"dilation": 2},
        {"groups": 2, "in_channels": 4},
        {"padding": (0, 2, 1, 1)},
    ],
)
def test_squares_of_a_convolution_are_those_of_its_matrix(options):
    options = {"in_channels": 2, "kernel_size": 3, **options}
    layer = ebflow_nflows.FullConv2d(**options, init="normal", generator=rng(), dtype=WIDE, bias=False)
    layer.requires_grad_(False)
    shape = (options["in_channels"], 6, 6)
    model = ebf.wrap(flows.Flow(layer, distributions.StandardNormal(layer.output_shape(shape))))
    matrix = layer.transform(torch.eye(math.prod(shape), dtype=WIDE).reshape(-1, *shape)).flatten(1)
    (step,) = model.plan.steps
    assert step.operator((shape,)).sum_of_squares() == pytest.approx(float(matrix.square().sum()))
    assert_agrees(model.log_z(method="lanczos", generator=rng()), model.log_z().detach())


def test_squares_are_unknown_where_taps_share_a_pixel():
    layer = ebflow_nflows.FullConv2d(2, kernel_size=3, padding_mode="reflect", init="normal", dtype=WIDE)
    model = ebf.wrap(flows.Flow(layer, distributions.StandardNormal([2, 5, 5])))
    assert model.plan.steps[0].operator(((2, 5, 5),)).sum_of_squares() is None
    assert_agrees(model.log_z(method="lanczos", generator=rng()), model.log_z().detach())


@pytest.mark.parametrize("dim", [50, 200])
def test_an_ill_conditioned_map_gets_a_wide_bar(dim):
    weight = torch.randn(dim, dim, generator=rng(dim), dtype=WIDE) / math.sqrt(dim)
    exact = float(torch.linalg.slogdet(weight)[1])
    found = lanczos.log_abs_det(Dense(weight), iterations=20, generator=rng())
    assert abs(found.value - exact) < 3 * found.std_error
    assert found.bias > math.sqrt(found.variance)  # and the quadrature is what it is for
    longer = lanczos.log_abs_det(Dense(weight), iterations=dim, generator=rng())
    assert longer.bias < found.bias / 4


def test_an_orthogonal_map_is_exact_at_once():
    layer = ebflow_nflows.FullLinear(40, init="orthogonal", generator=rng(), dtype=WIDE)
    found = lanczos.log_abs_det(Dense(layer.weight))
    assert found.value == pytest.approx(0.0, abs=1e-10)
    assert found.std_error < 1e-10
    assert found.products == 2 * 16  # it stops at the first step


@pytest.mark.parametrize(("dim", "scale"), [(500, 2.0), (100, 0.1), (60, 1e-100), (33, 1e6)])
@pytest.mark.parametrize("dtype", [WIDE, torch.float32])
def test_a_scaled_rotation_is_exact(dim, scale, dtype):
    """Its singular values differ by rounding alone, over which the logarithm has no measurable slope."""
    if dtype == torch.float32 and scale < 1e-30:
        pytest.skip("no number of single precision")
    for number in range(3):
        layer = ebflow_nflows.FullLinear(dim, init="orthogonal", generator=rng(number), dtype=WIDE)
        with torch.no_grad():
            layer.weight *= scale
        model = ebf.wrap(flows.Flow(layer.to(dtype).requires_grad_(False), distributions.StandardNormal([dim])))
        found = model.log_z(method="lanczos", generator=rng(number))
        assert_agrees(found, model.log_z())
        assert found.std_error < 1e-5 * dim
        assert float(found) == pytest.approx(-dim * math.log(scale), rel=1e-6)


def test_the_slope_of_the_control_variate_lies_within_the_spectrum():
    """A rotation with a few other singular values, far from 1: the slope is that of a chord of the logarithm."""
    dim = 80
    rotation = torch.linalg.qr(torch.randn(dim, dim, generator=rng(1), dtype=WIDE))[0]
    singular = torch.full((dim,), 50.0, dtype=WIDE)
    singular[:2] = torch.tensor([50.0 + 1e-9, 49.0], dtype=WIDE)
    weight = rotation * singular
    scores = []
    for number in range(40):
        found = lanczos.log_abs_det(Dense(weight), generator=rng(number))
        scores.append((found.value - float(singular.log().sum())) / found.std_error)
        assert found.std_error < 1e-2
    assert max(map(abs, scores)) < 5


def test_a_whole_krylov_space_is_exact(monkeypatch):
    """Without reorthogonalisation the vectors come back, and the last steps repeat the first."""
    dim = 60
    left, right = (torch.linalg.qr(torch.randn(dim, dim, generator=rng(k), dtype=WIDE))[0] for k in (1, 2))
    singular = torch.logspace(-2, 2, dim, dtype=WIDE)
    operator = Dense(left * singular @ right.mT)
    monkeypatch.setattr(operator, "sum_of_squares", lambda: None)  # without a control variate
    found = lanczos.log_abs_det(operator, iterations=dim, generator=rng())
    probes = signs_like(left.new_empty(16, dim), rng())
    exact = ((probes @ right).square() * singular.log()).sum(1)
    assert found.value == pytest.approx(float(exact.mean()), abs=1e-8)
    assert found.std_error == pytest.approx(float(exact.std()) / 4, rel=1e-6)


def test_lanczos_factorises_no_layer(monkeypatch):
    model = make_model(20)
    exact = model.log_z()
    other = make_model(20)
    for name in ("lu_factor_ex", "slogdet", "solve_ex", "inv"):
        monkeypatch.setattr(torch.linalg, name, None)
    assert_agrees(other.log_z(method="lanczos", generator=rng()), exact)
