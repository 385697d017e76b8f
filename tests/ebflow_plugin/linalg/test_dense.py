"""Dense and banded matrices against torch's and LAPACK's own routines, in double precision."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebflow_plugin.errors import SingularError
from ebflow_plugin.linalg.band import Band
from ebflow_plugin.linalg.dense import CachedLU, Dense
from randomness import randn

double = torch.float64


def banded(full, lower, upper):
    """A Band of a full matrix, which checks that what it is asked for is all there is."""

    def rows(start, stop, first, width):
        piece = full[start:stop, first : first + width]
        assert piece.detach().ne(0).sum() == full[start:stop].detach().ne(0).sum(), "entries outside of the window"
        assert piece.shape == (stop - start, width)
        return piece

    return Band(len(full), lower, upper, rows)


def band_entries(size, lower, upper, seed):
    return randn(size, size, seed=seed).tril(upper).triu(-lower)


@pytest.mark.parametrize("dtype", [double, torch.complex128])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("tracked", [False, True])
def test_dense_agrees_with_torch(dtype, batch, tracked):
    matrix = randn(*batch, 5, 5, dtype=dtype).requires_grad_(tracked)
    rows = randn(*batch, 4, 5, seed=1, dtype=dtype)
    torch.testing.assert_close(Dense(matrix).log_abs_det(), torch.linalg.slogdet(matrix)[1])
    torch.testing.assert_close(Dense(matrix).inverse()(rows), torch.linalg.solve(matrix, rows.mT).mT)
    assert Dense(matrix).log_abs_det().requires_grad == tracked


def test_dense_gradients():
    matrix, rows = randn(4, 4).requires_grad_(), randn(3, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda m: Dense(m).log_abs_det(), matrix)
    assert torch.autograd.gradgradcheck(lambda m: Dense(m).log_abs_det(), matrix)
    assert torch.autograd.gradcheck(lambda m, b: Dense(m).inverse()(b), (matrix, rows))
    assert torch.autograd.gradcheck(Dense(matrix.detach()).inverse(), rows)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.zeros(3, 3, dtype=double), "3 x 3 matrix of a linear layer is singular: a pivot .* is 0.0e"),
        (torch.ones(3, 3, dtype=double), "singular"),
        (randn(40, 1) @ randn(1, 40), "singular"),
        (randn(40, 40).index_copy(0, torch.tensor([7]), randn(40, 40)[:1]), "singular.*init='identity'"),
        (randn(40, 40).index_copy(1, torch.tensor([7]), randn(40, 40)[:, :1]), "singular"),
        (randn(3, 3).fill_diagonal_(float("nan")), "NaN or infinite"),
        (randn(3, 3).fill_diagonal_(float("inf")), "NaN or infinite"),
    ],
)
def test_singular_is_refused(matrix, message):
    size = len(matrix)
    for map_ in (Dense(matrix), banded(matrix, size, size)):
        with pytest.raises(SingularError, match=message):
            map_.log_abs_det()
        with pytest.raises(SingularError, match=message):
            map_.inverse()


def test_singular_in_a_graph():
    matrix = torch.ones(3, 3, dtype=double, requires_grad=True)
    assert Dense(matrix).log_abs_det() == -torch.inf
    with pytest.raises(SingularError, match="a pivot is zero"):
        Dense(matrix).inverse()(randn(1, 3))
    with pytest.raises(SingularError, match="singular"):
        Band(3, 2, 2, lambda a, b, c, d: matrix[a:b, c : c + d]).inverse()


@pytest.mark.parametrize("scales", [(1.0, 1e-20), (1e-20, 1.0), (1e-200, 1e-200), (1e150, 1e150)])
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_bad_scaling_is_not_singular(scales, side):
    scale = torch.linspace(0, 1, 6, dtype=double)
    scale = scales[0] ** (1 - scale) * scales[1] ** scale
    matrix = randn(6, 6)
    matrix = scale[:, None] * matrix if side == "rows" else matrix * scale
    expected = torch.linalg.slogdet(randn(6, 6))[1] + scale.log().sum()
    torch.testing.assert_close(Dense(matrix).log_abs_det(), expected)
    torch.testing.assert_close(banded(matrix, 5, 5).log_abs_det(), expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(0, 12), st.integers(0, 12), st.integers(1, 9), st.integers(0, 99))
def test_band_agrees_with_dense(size, lower, upper, panel, seed):
    full = band_entries(size, lower, upper, seed)
    matrix = banded(full, lower, upper)
    matrix.panel = panel
    _, expected = torch.linalg.slogdet(full)
    if torch.linalg.cond(full) > 1e9:  # a random band can be that bad; then both are only near the truth
        return
    torch.testing.assert_close(matrix.log_abs_det(), expected)
    rows = randn(3, size, seed=seed + 1)
    torch.testing.assert_close(matrix.inverse()(rows) @ full.mT, rows, rtol=1e-6, atol=1e-6)


def test_band_pivots():
    """A zero on the diagonal is no obstacle: rows are exchanged, also across panels."""
    full = torch.eye(30, dtype=double) * 1e-30
    full[0, 0] = full[29, 29] = 1.0
    for i in range(1, 29, 2):
        full[i, i + 1], full[i + 1, i] = 2.0, 3.0
    matrix = banded(full, 1, 1)
    matrix.panel = 4
    torch.testing.assert_close(matrix.log_abs_det(), torch.linalg.slogdet(full)[1])
    torch.testing.assert_close(matrix.inverse()(randn(2, 30)), torch.linalg.solve(full, randn(2, 30).mT).mT)


def test_band_agrees_with_lapack():
    lapack = pytest.importorskip("scipy.linalg.lapack")
    size, lower, upper = 500, 23, 17
    full = band_entries(size, lower, upper, seed=3)
    storage = torch.zeros(2 * lower + upper + 1, size, dtype=double)
    row, column = full.nonzero(as_tuple=True)
    storage[lower + upper + row - column, column] = full[row, column]
    factors, pivots, info = lapack.dgbtrf(storage.numpy(), lower, upper)
    assert info == 0
    expected = torch.from_numpy(factors[lower + upper]).abs().log().sum()
    matrix = banded(full, lower, upper)
    torch.testing.assert_close(matrix.log_abs_det(), expected)
    rows = randn(2, size)
    solved, _ = lapack.dgbtrs(factors, lower, upper, rows.mT.numpy(), pivots)
    torch.testing.assert_close(matrix.inverse()(rows), torch.from_numpy(solved).mT, rtol=1e-6, atol=1e-6)


def test_band_gradients():
    full = (band_entries(9, 2, 1, seed=5) + 2 * torch.eye(9, dtype=double)).requires_grad_()

    def matrix(entries):
        entries = entries.tril(1).triu(-2)
        result = Band(9, 2, 1, lambda start, stop, first, width: entries[start:stop, first : first + width])
        result.panel = 4
        return result

    rows = randn(2, 9).requires_grad_()
    assert torch.autograd.gradcheck(lambda m: matrix(m).log_abs_det(), full)
    assert torch.autograd.gradgradcheck(lambda m: matrix(m).log_abs_det(), full)
    assert torch.autograd.gradcheck(lambda m, b: matrix(m).inverse()(b), (full, rows))
    assert torch.autograd.gradcheck(matrix(full.detach()).inverse(), rows)


def test_band_without_rows_to_solve():
    full = band_entries(20, 2, 2, seed=1)
    assert banded(full, 2, 2).inverse()(full.new_zeros(0, 20)).shape == (0, 20)


def test_kept_for_one_setting():
    weight, lu = randn(3, 3), CachedLU(lambda weight, factor=1.0: Dense(factor * weight))
    once, thrice = lu.log_abs_det(weight), lu.log_abs_det(weight, 3.0)
    torch.testing.assert_close(thrice, once + 3 * torch.tensor(3.0, dtype=double).log())
    torch.testing.assert_close(lu.solve(weight, randn(1, 3), 3.0), lu.solve(weight, randn(1, 3)) / 3)


def test_kept_value_is_safe_from_its_users():
    weight, lu = randn(3, 3), CachedLU()
    lu.log_abs_det(weight).add_(1.0)
    torch.testing.assert_close(lu.log_abs_det(weight), torch.linalg.slogdet(weight)[1])


def test_nothing_is_kept_of_a_weight_in_training():
    weight, built = randn(3, 3).requires_grad_(), []
    lu = CachedLU(lambda weight: built.append(1) or Dense(weight))
    (gradient,) = torch.autograd.grad(lu.log_abs_det(weight), weight)
    torch.testing.assert_close(gradient, weight.detach().inverse().mT)
    lu.log_abs_det(weight)
    assert len(built) == 2
    with torch.no_grad():
        for _ in range(3):
            assert not lu.log_abs_det(weight).requires_grad
            lu.solve(weight, randn(2, 3, seed=1))
    assert len(built) == 4  # one for each kind of question


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights(dtype):
    weight = (torch.eye(3) + 0.1).to(dtype)
    expected = torch.linalg.slogdet(weight.double())[1].to(dtype)
    assert CachedLU().log_abs_det(weight) == expected
    assert CachedLU().log_abs_det(weight.requires_grad_()).dtype == dtype


def test_a_band_on_the_meta_device():
    weight = torch.empty(300, 300, device="meta")
    band = Band(300, 3, 3, lambda start, stop, first, width: weight[start:stop, first : first + width])
    assert band.log_abs_det().shape == ()
    assert band.inverse()(weight[:7]).shape == (7, 300)
