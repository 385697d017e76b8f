"""Likelihood without determinants: convolutions of one geometry are solved for together, and share nothing else."""

import copy
import math

import pytest
import torch
from nflows.transforms import InverseTransform

from ebflow_nflows import FullConv2d, FullLinear, SmoothLeakyReLU
from ebflow_plugin.errors import ConditioningWarning
from ebflow_plugin.objectives import ML, stochastic
from randomness import rng
from stochastic_models import batch, gradient, nflows_model, unit_probes
from warned import no_warnings

DOUBLE = torch.float64
SHAPE = [2, 4, 3]
SIZE = math.prod(SHAPE)


def layers():
    return [
        FullConv2d(2, kernel_size=3),
        SmoothLeakyReLU(0.5),
        FullConv2d(2, kernel_size=3, bias=False),
        InverseTransform(FullConv2d(2, kernel_size=3)),
        FullConv2d(2, kernel_size=3, padding_mode="circular"),
        FullConv2d(2, kernel_size=3),
        InverseTransform(FullConv2d(2, kernel_size=3)),
    ]


def complete(model, **options):
    given = {"probes": SIZE, "tolerance": 1e-11, "iterations": SIZE, **options}
    return ML(model, log_det="stochastic", **given)


def test_several_convolutions_have_the_exact_gradient_also_with_an_older_inverse(monkeypatch):
    monkeypatch.setattr(stochastic, "signs_like", unit_probes)
    model = nflows_model(*layers(), shape=SHAPE)
    x, loss, generator = batch(model), complete(model), rng(5)
    for _ in range(4):
        torch.testing.assert_close(gradient(loss, x), gradient(ML(model), x), rtol=1e-8, atol=1e-8)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * torch.randn(parameter.shape, generator=generator, dtype=DOUBLE)
    uses = {len(name.split()): near.uses for name, near in loss._estimator._near.items()}
    assert set(uses) == {3, 2}  # forward and inverted; the circular one has a cheap determinant
    assert max(uses.values()) > 1
    assert loss.metrics()["exact_log_dets"] == 0
    assert loss.metrics()["log_dets"] == 4 * 5


def test_the_mean_over_draws_is_the_exact_gradient_while_an_inverse_grows_old():
    model = nflows_model(*layers()[:3], shape=SHAPE)
    x, draws = batch(model), 200
    exact = gradient(ML(model), x)
    loss = ML(model, log_det="stochastic", probes=2, tolerance=1e-10, generator=rng(1))
    with torch.no_grad():  # the inverse is of other weights
        for parameter in model.parameters():
            parameter += 0.02
        loss.zero_grad()
    gradient(loss, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.02
    found = []
    for _ in range(draws):
        for near in loss._estimator._near.values():
            near.uses = 1
        found.append(gradient(loss, x))
    found = torch.stack(found)
    error = found.std(0) / math.sqrt(draws)
    noisy = error > 1e-9 * exact.norm()
    z = ((found.mean(0) - exact) / error)[noisy]
    assert z.abs().max() < 5.0
    assert z.square().mean() < 2.5
    torch.testing.assert_close(found.mean(0)[~noisy], exact[~noisy], rtol=1e-7, atol=1e-7)


def test_an_inverse_is_computed_anew_once_it_is_old_or_worse():
    near = stochastic._Near(torch.zeros(1))
    seen = []
    for iterations in (4, 4, 5, 5, 4, 4, 4, 4, 4):
        if not near.serves(iterations):
            near = stochastic._Near(torch.zeros(1))
        near.uses += 1
        seen.append(near.uses)
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8, 1]
    near = stochastic._Near(torch.zeros(1), uses=3, least=4)
    assert near.serves(5)
    assert not near.serves(6)


def test_a_layer_that_does_not_converge_leaves_the_others_alone(monkeypatch):
    monkeypatch.setattr(stochastic, "signs_like", unit_probes)
    model = nflows_model(*layers()[:3], FullConv2d(2, kernel_size=3), shape=SHAPE)
    easy, _, hard, other = model.flow._transform._transforms
    with torch.no_grad():
        for layer in (easy, other):  # as good as its circular twin
            layer.weight[:, :, [0, 0, 1, 1, 2, 2], [0, 1, 0, 2, 1, 2]] = 0.0
            layer.weight[:, :, [0, 2], [2, 0]] = 0.0
        hard.weight.copy_(torch.randn(hard.weight.shape, generator=rng(2), dtype=DOUBLE))
    loss, x = complete(model, iterations=2), batch(model)
    with pytest.warns(ConditioningWarning, match=r"_transforms\.2  FullConv2d.*as in 1 of 1 steps so far \(100%\)"):
        found = gradient(loss, x)
    torch.testing.assert_close(found, gradient(ML(model), x), rtol=1e-8, atol=1e-8)
    counts = {path.rpartition(".")[2]: layer["exact"] for path, layer in loss.metrics()["log_det"].items()}
    assert counts == {"0": 0, "2": 1, "3": 0}
    assert (loss.metrics()["log_dets"], loss.metrics()["exact_log_dets"]) == (3, 1)


def test_a_run_that_falls_back_often_says_so_with_its_rate():
    model = nflows_model(FullConv2d(2, kernel_size=3), shape=SHAPE)
    loss, x = ML(model, log_det="stochastic", probes=2, tolerance=1e-12, iterations=2), batch(model)
    with pytest.warns(ConditioningWarning, match="as in 1 of 1 steps"):
        loss(x)
    with no_warnings():
        for _ in range(8):
            loss(x)
    with pytest.warns(ConditioningWarning, match=r"as in 10 of 10 steps so far \(100%\).*exact log-det is used there"):
        loss(x)
    rare = loss._estimator.accounts["_transform._transforms.0"]
    rare.exact, rare.calls = 99, 10_000
    with no_warnings():
        loss(x)


def test_state_goes_on_where_it_was_with_the_inverse_that_it_had():
    model = nflows_model(FullLinear(6), *[FullConv2d(2, kernel_size=3) for _ in range(2)], shape=[2, 5, 6])
    x, loss = batch(model), ML(model, log_det="stochastic", generator=rng(1))
    for _ in range(3):
        gradient(loss, x)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01
    other = ML(copy.deepcopy(model), log_det="stochastic", generator=rng(1))
    other.generator.set_state(loss.generator.get_state())
    other.load_state(loss.state())
    for _ in range(3):
        assert torch.equal(gradient(loss, x), gradient(other, x))
    assert loss.state() == other.state()
