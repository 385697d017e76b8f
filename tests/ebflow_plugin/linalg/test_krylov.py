"""GMRES against dense solves, and that the residual it reports is the residual."""

import pytest
import torch

from ebflow_plugin import testing
from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg.krylov import gmres
from randomness import rng

DTYPES = (torch.float32, torch.float64)


def make(size=30, rows=4, dtype=torch.float64, spread=0.3, seed=0):
    generator = rng(seed)
    noise = torch.randn(size, size, generator=generator, dtype=dtype) / size**0.5
    matrix = torch.eye(size, dtype=dtype) + spread * noise
    return matrix, torch.randn(rows, size, generator=generator, dtype=dtype)


def times(matrix):
    return lambda rows: rows @ matrix.mT


def true_residuals(matrix, right, x):
    return (right - x @ matrix.mT).norm(dim=1) / right.norm(dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.1, 0.5, 0.9])
def test_it_solves_as_a_dense_solve_does(dtype, spread):
    matrix, right = make(dtype=dtype, spread=spread)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    found = gmres(times(matrix), right, tolerance=tolerance)
    error = (found.x - torch.linalg.solve(matrix, right.mT).mT).norm() / right.norm()
    assert error < 100 * tolerance
    assert bool((found.residuals <= tolerance).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("iterations", [1, 3, 7, 50])
@pytest.mark.parametrize("preconditioned", [False, True])
def test_the_residual_is_what_it_reports(dtype, iterations, preconditioned):
    matrix, right = make(dtype=dtype, spread=0.8)
    near = torch.linalg.inv(matrix + 0.1 * make(dtype=dtype, seed=1)[0])
    found = gmres(
        times(matrix),
        right,
        tolerance=1e-3,
        iterations=iterations,
        precondition=times(near) if preconditioned else None,
    )
    assert found.iterations <= iterations
    torch.testing.assert_close(found.residuals, true_residuals(matrix, right, found.x), rtol=1e-3, atol=1e-6)


def test_each_row_has_the_smallest_residual_of_its_own_space():
    matrix, right = make(size=12, rows=3, spread=0.9)
    for count in (1, 2, 5):
        found = gmres(times(matrix), right, tolerance=1e-14, iterations=count)
        for row, residual in zip(right, found.residuals, strict=True):
            powers = [row]
            for _ in range(count):
                powers.append(matrix @ powers[-1])
            images = torch.stack(powers[1:], 1)
            best = row - images @ torch.linalg.lstsq(images, row[:, None]).solution[:, 0]
            torch.testing.assert_close(residual, best.norm() / row.norm(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_exact_solution_early(dtype):
    """Rows whose space is exhausted at different steps: eigenvectors, sums of two of them, and all of them."""
    matrix = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype))
    right = torch.tensor([[0.0, 5.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]], dtype=dtype)
    found = gmres(times(matrix), right, tolerance=1e-6)
    torch.testing.assert_close(found.x, right / matrix.diagonal(), rtol=1e-5, atol=1e-6)
    assert gmres(times(matrix), right[:1]).iterations == 1
    assert found.iterations == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_perfect_preconditioner_needs_one_iteration(dtype):
    matrix, right = make(dtype=dtype, spread=0.9)
    found = gmres(times(matrix), right, precondition=times(torch.linalg.inv(matrix)), tolerance=1e-4)
    assert found.iterations == 1
    assert bool((found.residuals < 1e-4).all())


def test_a_right_hand_side_of_zeros():
    matrix, right = make()
    right[1] = 0.0
    found = gmres(times(matrix), right, tolerance=1e-10)
    assert bool((found.x[1] == 0).all())
    assert found.residuals[1] == 0
    assert bool((found.residuals < 1e-10).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_singular_matrix_gives_numbers_and_tells(dtype):
    matrix, right = make(dtype=dtype)
    matrix[0] = 0.0
    found = gmres(times(matrix), right, tolerance=1e-3)
    assert bool(found.x.isfinite().all())
    assert bool((found.residuals > 1e-3).all())
    nothing = gmres(times(torch.zeros_like(matrix)), right)
    torch.testing.assert_close(nothing.residuals, torch.ones_like(nothing.residuals))
    assert bool((nothing.x == 0).all())


def test_no_convergence():
    """A cyclic shift: nothing is found before the last iteration."""
    shift = torch.eye(20, dtype=torch.float64).roll(1, 0)
    right = torch.eye(20, dtype=torch.float64)[:2]
    assert bool((gmres(times(shift), right, iterations=19).residuals > 0.99).all())
    assert bool((gmres(times(shift), right, iterations=20).residuals < 1e-10).all())


def test_a_matrix_that_is_not_finite():
    matrix, right = make()
    matrix[3, 4] = float("nan")
    found = gmres(times(matrix), right)
    assert bool(found.residuals.isnan().all())
    assert bool(found.x.isfinite().all())


def test_ill_conditioned_in_single_precision():
    """Reorthogonalisation: a condition number of 1e3, to 1e-4, as in double precision."""
    generator = rng(0)
    left, _ = torch.linalg.qr(torch.randn(60, 60, generator=generator))
    right, _ = torch.linalg.qr(torch.randn(60, 60, generator=generator))
    matrix = left @ torch.diag(torch.logspace(0, -3, 60)) @ right
    found = gmres(times(matrix), torch.randn(3, 60, generator=generator), tolerance=1e-4, iterations=60)
    assert bool((found.residuals < 1e-4).all())


def test_it_makes_no_graph_and_no_factorisation():
    matrix, right = make()
    matrix.requires_grad_()
    with testing.no_factorisation():
        found = gmres(times(matrix), right, tolerance=1e-8)
    assert not found.x.requires_grad


def test_no_rows_and_wrong_shapes():
    matrix, right = make()
    assert gmres(times(matrix), right[:0]).x.shape == (0, 30)
    with pytest.raises(InputError, match=r"rows, shape \(P, D\), got shape \(30,\)"):
        gmres(times(matrix), right[0])
