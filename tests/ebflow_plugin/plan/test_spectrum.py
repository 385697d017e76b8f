"""Singular values of full layers: estimates, the watch, and the penalty on small ones."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nflows import distributions, flows, transforms

import ebflow_plugin as ebf
from ebflow_nflows import FullConv2d
from ebflow_plugin.plan.spectrum import SMALL, ConditionWatch, conditioning_penalty, estimate_spectrum, full_layers
from gaussian_models import full_layer
from randomness import rng


def with_spectrum(values, seed=0):
    generator = rng(seed)
    size = len(values)
    left, right = (torch.linalg.qr(torch.randn(size, size, generator=generator).double())[0] for _ in range(2))
    return left @ torch.tensor(values, dtype=torch.float64).diag() @ right.mT


def layer_of(weight, inverted=False):
    layer = full_layer(weight, 7.0)
    transform = transforms.InverseTransform(layer) if inverted else layer
    model = ebf.wrap(flows.Flow(transform, distributions.StandardNormal([weight.shape[0]])))
    return full_layers(model.plan, (weight.shape[0],))[0], layer


def spectrum_of(layer):
    step, shapes = layer
    return estimate_spectrum(step.operator(shapes))


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12))
@settings(max_examples=30, deadline=None)
def test_small_layers_are_measured_exactly(values):
    layer, _ = layer_of(with_spectrum(values))
    spectrum = spectrum_of(layer)
    assert spectrum.largest == pytest.approx(max(values), rel=1e-6)
    assert spectrum.smallest == pytest.approx(min(values), rel=1e-4)


def test_equal_singular_values_do_not_look_singular():
    layer, _ = layer_of(3.0 * torch.eye(50, dtype=torch.float64))
    assert spectrum_of(layer).condition == pytest.approx(1.0)


def test_one_small_singular_value_among_many_is_found():
    values = [1.0 + 0.5 * (place / 300) for place in range(299)] + [1e-4]
    layer, _ = layer_of(with_spectrum(values), inverted=True)
    assert spectrum_of(layer).smallest == pytest.approx(1e-4, rel=0.05)
    assert spectrum_of(layer).largest == pytest.approx(1.5, rel=0.01)


def test_estimates_are_on_the_safe_side():
    weight = torch.randn(200, 200, generator=rng(0)).double()
    exact = torch.linalg.svdvals(weight)
    spectrum = spectrum_of(layer_of(weight)[0])
    assert spectrum.smallest >= exact[-1] * (1 - 1e-9)
    assert spectrum.largest <= exact[0] * (1 + 1e-9)
    assert spectrum.largest == pytest.approx(exact[0].item(), rel=0.05)
    assert spectrum.condition > 20


def test_convolutions_are_measured_without_their_matrix():
    conv = FullConv2d(2, kernel_size=3, init="normal", generator=rng(0)).double()
    model = ebf.wrap(flows.Flow(conv, distributions.StandardNormal([2, 3, 4])))
    (layer,) = full_layers(model.plan, (2, 3, 4))
    matrix = torch.autograd.functional.jacobian(lambda x: conv.transform(x).flatten(), torch.zeros(1, 2, 3, 4).double())
    exact = torch.linalg.svdvals(matrix.reshape(24, 24))
    spectrum = spectrum_of(layer)
    assert spectrum.largest == pytest.approx(exact[0].item(), rel=1e-6)
    assert spectrum.smallest == pytest.approx(exact[-1].item(), rel=1e-6)


def test_a_nearly_singular_layer_is_reported_once():
    layer, _ = layer_of(with_spectrum([2.0, 1.0, 1e-6]))
    watch = ConditionWatch([layer], advice="Add conditioning.")
    with pytest.warns(
        ebf.ConditioningWarning,
        match=r"(?s)step 5: 1 of 1 full layers.*_transform  FullLinear.*1.0e-06.*Add",
    ):
        watch.check(5)
    assert watch.check(6)["_transform"].condition == pytest.approx(2e6, rel=1e-3)  # warnings are errors in these tests


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_the_penalty_counts_small_singular_values_and_its_gradient_is_right(kind):
    if kind == "linear":
        values = [1.0, 0.8, 0.9, 0.02, 0.003]
        layer, module = layer_of(with_spectrum(values))
    else:
        module = FullConv2d(1, kernel_size=3, init="normal", generator=rng(1)).double()
        model = ebf.wrap(flows.Flow(module, distributions.StandardNormal([1, 2, 3])))
        (layer,) = full_layers(model.plan, (1, 2, 3))
        with torch.no_grad():
            module.weight.mul_(0.3).add_(0.3)
            module.bias.fill_(7.0)

    def dense():
        operator = layer[0].operator(layer[1])
        eye = torch.eye(math.prod(operator.shape), dtype=torch.float64)
        return operator.apply(eye.reshape(-1, *operator.shape)).flatten(1).mT

    signs = torch.cartesian_prod(*[torch.tensor([0, 1])] * dense().shape[0])
    totals = []
    for row in signs[: len(signs) // 2]:  # every probe, up to its sign: the mean is exact
        module.zero_grad()
        totals.append((_penalty_with(layer, row), module.weight.grad.clone()))
        assert module.bias.grad is None or module.bias.grad.abs().max() < 1e-12
    matrix = dense()
    # δ is estimated with the probe too; compare with the same average of the exact expression
    expected = torch.zeros((), dtype=torch.float64)
    for row in signs[: len(signs) // 2]:
        v = (row.double() * 2 - 1)[:, None]
        delta = (SMALL**2 * (matrix @ v).square().mean()).detach()
        inner = torch.linalg.inv(matrix.mT @ matrix + delta * torch.eye(len(matrix), dtype=torch.float64))
        expected = expected + delta * (v.mT @ inner @ v).squeeze()
    expected = expected / len(totals)
    (gradient,) = torch.autograd.grad(expected, module.weight)
    value = sum(total for total, _ in totals) / len(totals)
    mean = sum(grad for _, grad in totals) / len(totals)
    assert value == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(mean, gradient, rtol=1e-5, atol=1e-8)


def _penalty_with(layer, row):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "ebflow_plugin.plan.spectrum.signs_like", lambda like, _: (2.0 * row - 1.0).to(like).view_as(like)
        )
        value = conditioning_penalty([layer])
    value.backward()
    return value.item()


def test_the_penalty_leaves_healthy_layers_alone():
    layer, module = layer_of(with_spectrum([1.0, 2.0, 0.5]))
    conditioning_penalty([layer], rng(0)).backward()
    assert module.weight.grad.norm() < 0.01


def test_descending_the_penalty_lifts_the_small_singular_value():
    layer, module = layer_of(with_spectrum([1.0] * 30 + [0.001]))
    optimizer = torch.optim.SGD([module.weight], lr=1e-5)
    generator = rng(0)
    before = spectrum_of(layer).smallest
    for _ in range(20):
        optimizer.zero_grad()
        conditioning_penalty([layer], generator).backward()
        optimizer.step()
    after = torch.linalg.svdvals(module.weight.detach())
    assert before == pytest.approx(0.001, rel=1e-3)
    assert after[-1] > 0.01
    assert after[0] < 1.1
