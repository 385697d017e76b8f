"""The exact densities of the synthetic sets: their integrals, scores, entropies and samples."""

import math

import pytest
import torch
from torch.distributions import Normal

from ebflow_examples import synthetic
from ebflow_examples.data import load
from ebflow_examples.runs import Floor
from ebflow_examples.synthetic import PLANE, Autoregressive
from ebflow_plugin.errors import InputError
from randomness import rng


def tabulated():
    """A grid around a set, shape (rows, columns, 2), and its spacing; the sums are analytic, so this is enough."""
    spacing = 0.125
    axis = torch.arange(-14.0, 14.0, spacing, dtype=torch.float64)
    return torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1), spacing


@pytest.mark.parametrize("name", PLANE)
def test_densities_integrate_to_one_and_have_their_entropy(name):
    """The entropy once more from the log-density itself, and from samples."""
    truth = PLANE[name]()
    grid, spacing = tabulated()
    log_prob = truth.log_prob(grid.reshape(-1, 2))
    assert float(log_prob.exp().sum()) * spacing**2 == pytest.approx(1.0, abs=1e-10)
    entropy = -float((log_prob.exp() * log_prob).sum()) * spacing**2
    assert truth.entropy() == pytest.approx(entropy, abs=1e-9)
    assert truth.entropy(0.03) == pytest.approx(truth.entropy(), abs=1e-11)
    surprise = -truth.log_prob(truth.sample(8_000, rng(1)))
    assert float(surprise.mean()) == pytest.approx(entropy, abs=4 * float(surprise.std()) / 8_000**0.5)
    assert truth.entropy() == pytest.approx({"sine": 4.4796, "swirl": 4.1394, "checkerboard": 4.6840}[name], abs=1e-4)


@pytest.mark.parametrize("name", PLANE)
def test_samples_fall_where_the_density_is(name):
    """A χ² test of 40,000 samples in 14 × 14 cells, against the density summed over each cell."""
    truth, count, cells = PLANE[name](), 40_000, 14
    grid, spacing = tabulated()
    side = len(grid) // cells
    mass = truth.log_prob((grid + spacing / 2).reshape(-1, 2)).exp().reshape(len(grid), -1) * spacing**2
    expected = count * mass.unfold(0, side, side).unfold(1, side, side).sum((-1, -2)).flatten()
    x = truth.sample(count, rng(2))
    found, _ = torch.histogramdd(x.flip(1), [cells, cells], range=[-14.0, 14.0, -14.0, 14.0])
    seen = expected > 5
    statistic = float(((found.flatten() - expected).square() / expected)[seen].sum())
    freedom = int(seen.sum())
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)
    assert float(found.flatten()[~seen].sum()) == pytest.approx(float(expected[~seen].sum()), abs=15)


@pytest.mark.parametrize("truth", [*(make() for make in PLANE.values()), Autoregressive(5, 0.7, 1.5)])
def test_score_is_the_gradient_of_the_density(truth):
    x = truth.sample(20, rng(1))
    if not isinstance(truth, Autoregressive):
        x = torch.cat([x, torch.tensor([[60.0, -80.0], [0.0, 0.0]], dtype=torch.float64)])
    step, score = 1e-5, truth.score(x)
    for place, unit in enumerate(step * torch.eye(x.shape[1], dtype=torch.float64)):
        expected = (truth.log_prob(x + unit) - truth.log_prob(x - unit)) / (2 * step)
        torch.testing.assert_close(score[:, place], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", PLANE)
def test_twice_the_nodes_along_a_curve_change_nothing(name, monkeypatch):
    truth = PLANE[name]()
    monkeypatch.setattr(synthetic, "ORDER", 2 * synthetic.ORDER)
    finer = PLANE[name].__wrapped__()
    x = truth.sample(500, rng(3))
    torch.testing.assert_close(truth.log_prob(x), finer.log_prob(x), rtol=0, atol=1e-10)
    torch.testing.assert_close(truth.score(x), finer.score(x), rtol=0, atol=1e-9)


def test_a_smoothed_interval_far_from_it():
    """log k from its definition, an integral over the interval, where Φ(b) - Φ(a) itself is 0 in double precision."""
    offset = torch.tensor([-20.0, -0.3, 0.0, 7.0, 15.0], dtype=torch.float64)
    nodes, weights = synthetic._nodes(torch.linspace(-1.0, 1.0, 101, dtype=torch.float64))
    gaussian = -0.5 * ((offset[:, None] - nodes) / 0.4).square() - math.log(0.4 * math.sqrt(2 * math.pi))
    expected = torch.logsumexp(gaussian + (weights / 2).log(), 1)
    torch.testing.assert_close(synthetic._log_kernel(offset, 2.0, 0.4), expected, rtol=1e-10, atol=1e-10)


def test_chunks_do_not_matter(monkeypatch):
    truth = synthetic.checkerboard()
    x = truth.sample(33, rng(1))
    whole = truth.log_prob(x), truth.score(x)
    monkeypatch.setattr(synthetic, "CHUNK", 56)  # seven rows at a time
    torch.testing.assert_close(truth.log_prob(x), whole[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(truth.score(x), whole[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_densities_have_the_type_of_their_input(dtype):
    x = torch.zeros(3, 2, dtype=dtype)
    truth = synthetic.sine()
    assert truth.log_prob(x).dtype == truth.score(x).dtype == dtype
    assert truth.score(x).shape == x.shape
    assert truth.log_prob(x[:0]).shape == (0,)


def test_sine_swirl_and_checkerboard_lie_where_the_authors_put_them():
    x, y = synthetic.sine().clean(2000, rng()).T
    assert x.abs().max() <= 8
    rest = y - 4 * torch.sin(3 * x / 4)
    assert float(rest.mean()) == pytest.approx(0, abs=0.1)
    assert float(rest.std()) == pytest.approx(1, abs=0.1)
    points = synthetic.swirl().clean(2000, rng()) * 3 / 2.5
    angle = torch.linspace(0, 3 * math.pi, 3000, dtype=torch.float64)
    curve = torch.stack([angle * angle.cos() + 1, 2 - angle * angle.sin()], dim=1)
    above = curve[None] - points[:, None]  # by how much a point of the curve is to the right, and higher
    inside = (above > -0.01) & (above < 0.51)
    assert inside.all(-1).any(1).all()
    assert torch.hypot(*(points - torch.tensor([1.0, 2.0])).T).max() < 3 * math.pi + 0.8
    x, y = synthetic.checkerboard().clean(2000, rng()).T / 3
    assert ((x.floor() + y.floor()) % 2 == 0).all()
    assert torch.stack([x, y]).abs().max() <= 2
    assert len({(i, j) for i, j in zip(x.floor().tolist(), y.floor().tolist(), strict=True)}) == 8


@pytest.mark.parametrize("name", PLANE)
def test_clean_rows_are_the_training_rows_without_their_noise(name):
    data = load(name, limit=20_000)
    noise = data.train - data.clean
    assert noise.mean(0).abs().max() < 0.02
    torch.testing.assert_close(torch.cov(noise.T), 0.375**2 * torch.eye(2), rtol=0, atol=0.005)
    assert load("autoregressive10", limit=5).clean is None


def test_autoregressive_follows_eq_a7():
    chain = Autoregressive(4, shape=0.5, distance=2.0)
    x = chain.sample(50, rng())
    u = torch.randn(50, 4, generator=rng(), dtype=torch.float64)
    torch.testing.assert_close(x[:, 0], u[:, 0])
    for i in (2, 3, 4):  # the paper counts from 1
        torch.testing.assert_close(x[:, i - 1], torch.tanh(u[:, i - 1] * 0.5) * (x[:, i - 2] + 2.0 * 2**i))
    assert Floor.of(chain, x, -chain.log_prob(x)) is None  # no formula has its entropy


def test_density_of_the_chain_is_that_of_its_jacobian():
    chain = Autoregressive(4, shape=0.5, distance=2.0)

    def forward(u):
        columns = [u[0]]
        for i in (2, 3, 4):
            columns.append(torch.tanh(u[i - 1] * 0.5) * (columns[-1] + 2.0 * 2**i))
        return torch.stack(columns)

    for u in torch.randn(5, 4, generator=rng(3), dtype=torch.float64):
        jacobian = torch.autograd.functional.jacobian(forward, u)
        expected = Normal(0.0, 1.0).log_prob(u).sum() - torch.linalg.slogdet(jacobian)[1]
        torch.testing.assert_close(chain.log_prob(forward(u)[None])[0], expected)


def test_density_of_the_chain_integrates_to_one_and_ends_at_its_support():
    chain = Autoregressive(2)
    line = torch.linspace(-6, 6, 401, dtype=torch.float64)
    tall = torch.linspace(-10, 10, 4001, dtype=torch.float64)
    grid = torch.cartesian_prod(line, tall)
    density = chain.log_prob(grid).exp().reshape(401, 4001)
    total = torch.trapezoid(torch.trapezoid(density, tall, dim=1), line)
    assert total.item() == pytest.approx(1, abs=2e-3)
    assert chain.log_prob(torch.tensor([[0.0, 4.5]])).item() == -math.inf


@pytest.mark.parametrize("truth", [synthetic.sine(), Autoregressive(3)])
def test_densities_refuse_other_shapes(truth):
    with pytest.raises(InputError, match="takes rows of"):
        truth.log_prob(torch.zeros(4, 5))
