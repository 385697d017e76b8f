"""The kernel of a convolution that makes images most likely: against entropies, and exact likelihood by autograd."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ebflow_nflows
import ebflow_plugin as ebf
from chains import flow_in
from ebflow_nflows import FullConv2d
from ebflow_plugin.closed_form.kernels import fit_kernel
from ebflow_plugin.linalg.convolution import Convolution
from ebflow_plugin.linalg.geometry import Setting, patches
from gaussian_models import nll
from randomness import rng


def one_layer(shape, **options):
    layer = FullConv2d(shape[0], **options)
    return ebf.wrap(flow_in(ebflow_nflows, [layer], layer.output_shape(shape)))


def smooth(shape, rows, seed=0, mode="circular"):
    """Gaussian images with correlated pixels and channels, and what made them from white noise."""
    blur = FullConv2d(shape[0], kernel_size=3, padding_mode=mode).double()
    with torch.no_grad():
        blur.weight.add_(
            0.1 * torch.randn(blur.weight.shape, dtype=torch.float64, generator=rng(seed)) / shape[0] ** 0.5
        )
        noise = torch.randn(rows, *shape, dtype=torch.float64, generator=rng(seed + 1))
        return blur.invert(noise) + 2.0, blur


@pytest.mark.parametrize("channels", [1, 2])
def test_stationary_gaussian_images_are_described_to_their_entropy(channels):
    """The inverse of what made them is a 3 x 3 kernel: the fit finds it, up to a rotation and sampling error."""
    shape = (channels, 6, 6)
    x, blur = smooth(shape, 2000)
    model = one_layer(shape, kernel_size=3, padding_mode="circular")
    model.initialize(x, whiten=True)
    entropy = 0.5 * math.prod(shape) * (1 + math.log(2 * math.pi)) - blur.log_det(shape).item()
    fresh = blur.invert(torch.randn(5000, *shape, dtype=torch.float64, generator=rng(9))).detach() + 2.0
    error = 4 * (math.prod(shape) / 2 / len(fresh)) ** 0.5
    assert nll(model, fresh) == pytest.approx(entropy, abs=error + 9 * channels**2 / len(x))
    pixels = one_layer(shape, kernel_size=1)
    pixels.initialize(x, whiten=True)
    assert nll(pixels, fresh) > entropy + 0.5


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_no_worse_than_exact_likelihood_trained_to_convergence(mode):
    shape = (2, 8, 8)
    x, _ = smooth(shape, 400, mode="reflect")
    x = x + 0.3 * torch.randn(400, *shape, dtype=torch.float64, generator=rng(5)).cumsum(-1)
    model = one_layer(shape, kernel_size=3, padding_mode=mode)
    model.initialize(x, whiten=True)
    found = nll(model, x)
    trained = one_layer(shape, kernel_size=3, padding_mode=mode)
    trained.initialize(x, whiten=True)
    layer = trained.plan.steps[0].module
    with torch.no_grad():  # from elsewhere
        layer.weight.mul_(1.3).add_(0.02 * torch.randn(layer.weight.shape, dtype=torch.float64, generator=rng(6)))
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = -trained.log_prob(x).mean()
        value.backward()
        return value

    optimizer.step(loss)
    assert found <= nll(trained, x) + 0.02
    untrained = one_layer(shape, kernel_size=1)
    untrained.initialize(x, whiten=True)
    assert found < nll(untrained, x) - 1.0


@settings(max_examples=12, deadline=None)
@given(
    channels=st.integers(1, 3),
    height=st.integers(2, 6),
    width=st.integers(2, 6),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    mode=st.sampled_from(["zeros", "circular", "replicate", "reflect"]),
    seed=st.integers(0, 100),
)
@example(channels=1, height=2, width=2, kernel=(1, 4), mode="circular", seed=0)  # taps that read the same pixel
@example(channels=2, height=2, width=3, kernel=(5, 5), mode="zeros", seed=0)  # taps that read nothing
def test_the_output_is_white_and_no_less_likely_than_that_of_pixels(channels, height, width, kernel, mode, seed):
    """Even kernels, and kernels that are wider than the image, among others."""
    shape = (channels, height, width)
    layer = FullConv2d(channels, kernel_size=kernel, padding_mode=mode).double()
    try:
        layer.output_shape(shape)
    except ebf.InputError:  # more padding than such images have
        return
    x = torch.randn(200, *shape, dtype=torch.float64, generator=rng(seed)).cumsum(-1) * 3.0 + 1.0
    model = ebf.wrap(flow_in(ebflow_nflows, [layer], shape))
    model.initialize(x, whiten=True)
    pixels = one_layer(shape, kernel_size=1)
    pixels.initialize(x, whiten=True)
    assert nll(model, x) <= nll(pixels, x) + 1e-6
    rows = layer.transform(x).movedim(1, -1).flatten(0, -2).detach()
    torch.testing.assert_close(rows.mean(0), torch.zeros(channels).double(), rtol=0, atol=1e-8)
    torch.testing.assert_close(
        torch.cov(rows.T).view(channels, channels), torch.eye(channels).double(), atol=1e-6, rtol=0
    )


def test_the_gradient_vanishes_at_the_fit():
    geometry = Setting.of(2, kernel_size=3).geometry((2, 7, 5))
    x, _ = smooth((2, 7, 5), 500)
    covariance = torch.cov(patches(x, geometry).T)
    start = torch.zeros(2, 2, 3, 3, dtype=torch.float64)
    start[:, :, 1, 1] = torch.eye(2)
    kernel, log_det = fit_kernel(covariance, start, geometry)
    kernel.requires_grad_()
    value = Convolution(kernel, geometry).log_abs_det()
    assert value.item() == pytest.approx(log_det)
    loss = 35 * 0.5 * ((kernel.flatten(1) @ covariance) * kernel.flatten(1)).sum() - value
    (slope,) = torch.autograd.grad(loss, kernel)
    scale = torch.outer(torch.ones(2).double(), covariance.diagonal()).view_as(kernel)
    assert (slope.square() / (35 * scale)).sum() < 0.05  # nats, by a Newton step


# Data that no kernel can whiten, or that hardly suffice


def images(rows=40, shape=(2, 5, 5), seed=0):
    return torch.randn(rows, *shape, dtype=torch.float64, generator=rng(seed))


def changed(channel, value):
    x = images()
    x[:, channel] = value(x)
    return x


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (changed(1, lambda x: 3.0), {}, r"features \[1\] of the input of .*FullConv2d.* are constant"),
        (changed(1, lambda x: 2.0 * x[:, 0]), {}, "linearly dependent"),
        (images(1), {"kernel_size": 5}, "FullConv2d.*directions of its patches have no variance"),
        (
            images()[:, :, :1, :1].expand(-1, -1, 5, 5),
            {"padding_mode": "circular"},
            "directions of its patches have no variance",
        ),
    ],
    ids=["constant", "alike", "too few", "no structure inside"],
)
def test_what_no_kernel_can_whiten_is_refused(x, options, message):
    with pytest.raises(ebf.SingularError, match=message):
        one_layer((2, 5, 5), **{"kernel_size": 3, **options}).initialize(x, whiten=True)


def test_nan_rows_are_refused():
    x = images()
    x[3, 0, 2, 2] = float("nan")
    with pytest.raises(ebf.InputError, match="NaN"):
        one_layer((2, 5, 5), kernel_size=3).initialize(x, whiten=True)


def test_one_image_of_enough_pixels_is_fitted():
    model = one_layer((1, 16, 16), kernel_size=3)
    x = images(1, (1, 16, 16))
    model.initialize(x, whiten=True)
    assert math.isfinite(nll(model, x))
    assert math.isfinite(model.log_z().item())


def test_integer_images_are_taken_by_their_noise():
    x = torch.randint(0, 4, (200, 2, 5, 5), generator=rng(0))
    flow = flow_in(ebflow_nflows, [FullConv2d(2, kernel_size=3)], [2, 5, 5]).float()
    plain, noisy = ebf.wrap(flow), ebf.wrap(flow, preprocess=[ebf.Dequantize(4)])
    with pytest.raises(ebf.InputError):
        plain.initialize(x, whiten=True)
    noisy.initialize(x.float(), whiten=True, generator=rng(1))
    assert math.isfinite(nll(noisy, x.float()))


def test_scales_far_apart_are_no_obstacle():
    x = images(300)
    x = torch.stack([1e6 * x[:, 0], 1e-6 * x[:, 1]], 1)
    model = one_layer((2, 5, 5), kernel_size=3)
    model.initialize(x, whiten=True)
    expected = one_layer((2, 5, 5), kernel_size=3)
    expected.initialize(images(300), whiten=True)
    assert nll(model, x) == pytest.approx(nll(expected, images(300)), abs=1e-3)
