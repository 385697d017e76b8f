"""Convolutions as matrices, against the dense matrix that convolving the unit images gives."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ebflow_plugin.errors import InputError, SingularError
from ebflow_plugin.linalg import convolution as conv
from ebflow_plugin.linalg.band import Band
from ebflow_plugin.linalg.convolution import Convolution, structure
from ebflow_plugin.linalg.geometry import Axis, Setting, convolve
from randomness import randn

double = torch.float64
MODES = ["zeros", "circular", "reflect", "replicate"]


def dense_matrix(weight, geometry):
    """The oracle: column j is the image of the unit vector j."""
    size = geometry.size
    unit = torch.eye(size, dtype=weight.dtype).view(size, *geometry.shape)
    return convolve(unit, weight, geometry).flatten(1).mT


def kernel(setting, seed=0, size=0.3):
    """A kernel near space-to-depth, which makes the map invertible, with enough noise to tell all taps apart."""
    shape = (setting.out_channels, setting.in_channels // setting.groups, *setting.kernel_size)
    weight = randn(*shape, seed=seed) * size / math.prod(shape[1:]) ** 0.5
    taps = setting.cell_taps()
    block = setting.out_channels // setting.groups
    cells = torch.eye(block, dtype=double).view(block, -1, *setting.stride).repeat(setting.groups, 1, 1, 1)
    for row, column in ((a, b) for a in range(setting.stride[0]) for b in range(setting.stride[1])):
        weight[..., taps[0][row], taps[1][column]] += cells[..., row, column]
    return weight


def check(weight, geometry):
    matrix = dense_matrix(weight, geometry)
    found = Convolution(weight, geometry)
    torch.testing.assert_close(found.log_abs_det(), torch.linalg.slogdet(matrix)[1], rtol=1e-9, atol=1e-9)
    y = randn(2, *geometry.out_shape, seed=1)
    expected = torch.linalg.solve(matrix, y.flatten(1).mT).mT.view(2, *geometry.shape)
    torch.testing.assert_close(found.inverse()(y), expected, rtol=1e-7, atol=1e-7)


@st.composite
def axes(draw):
    """Kernel, stride, dilation, padding and size of one axis, where a tap reads each pixel of an output's cell."""
    stride = draw(st.integers(1, 3))
    dilation = draw(st.integers(1, 2)) if stride == 1 else 1
    kernel_size = draw(st.integers(stride, 4))
    before = dilation * draw(st.integers(0, kernel_size - stride))
    after = dilation * (kernel_size - 1) + 1 - stride - before
    cells = max(before, after) // stride + 1  # as many as it takes to reflect
    return kernel_size, stride, dilation, (before, after), stride * draw(st.integers(cells, cells + 2))


@st.composite
def convolutions(draw):
    down, across = draw(axes()), draw(axes())
    groups = draw(st.integers(1, 2))
    setting = Setting.of(
        groups * draw(st.integers(1, 2)),
        (down[0], across[0]),
        stride=(down[1], across[1]),
        dilation=(down[2], across[2]),
        padding=(*across[3], *down[3]),
        padding_mode=draw(st.sampled_from(MODES)),
        groups=groups,
    )
    return setting, setting.geometry((setting.in_channels, down[4], across[4]))


@settings(max_examples=150, deadline=None)
@given(convolutions(), st.integers(0, 9), st.sampled_from([3, 128]))
def test_any_convolution(case, seed, panel):
    setting, geometry = case
    weight = kernel(setting, seed)
    assume(torch.linalg.cond(dense_matrix(weight, geometry)) < 1e6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Band, "panel", panel)  # narrow panels make bands of small images
        check(weight, geometry)


@pytest.mark.parametrize(
    ("options", "shape", "expected"),
    [
        (dict(in_channels=3, kernel_size=1), (3, 5, 4), "patches"),
        (dict(in_channels=2, kernel_size=2, stride=2), (2, 6, 4), "patches"),
        (dict(in_channels=2, kernel_size=(1, 2), stride=(1, 2), padding_mode="reflect"), (2, 6, 4), "patches"),
        (dict(in_channels=3, kernel_size=3, padding_mode="circular"), (3, 4, 6), "fourier"),
        (dict(in_channels=3, kernel_size=3, padding_mode="circular"), (3, 5, 5), "fourier"),
        (dict(in_channels=1, kernel_size=4, stride=2, padding_mode="circular"), (1, 6, 8), "fourier"),
        (dict(in_channels=2, kernel_size=2, dilation=2, padding_mode="circular"), (2, 6, 7), "fourier"),
        (dict(in_channels=1, kernel_size=3), (1, 20, 20), "band"),
        (dict(in_channels=1, kernel_size=(5, 3)), (1, 30, 9), "band"),
        (dict(in_channels=1, kernel_size=(3, 5)), (1, 9, 30), "band"),
        (dict(in_channels=1, kernel_size=3), (1, 3, 100), "band"),
        (dict(in_channels=1, kernel_size=3), (1, 100, 3), "band"),
        (dict(in_channels=2, kernel_size=2, groups=2), (2, 20, 20), "band"),
        (dict(in_channels=1, kernel_size=4, stride=2), (1, 24, 24), "band"),
        (dict(in_channels=1, kernel_size=3, padding_mode="reflect"), (1, 20, 20), "dense"),
        (dict(in_channels=1, kernel_size=3, padding_mode="replicate"), (1, 20, 20), "dense"),
        (dict(in_channels=1, kernel_size=3, dilation=2), (1, 20, 20), "dense"),
        (dict(in_channels=2, kernel_size=3), (2, 5, 5), "dense"),
        (dict(in_channels=2, kernel_size=3, padding_mode="replicate"), (2, 5, 5), "dense"),
    ],
)
def test_structure(options, shape, expected):
    setting = Setting.of(**options)
    geometry = setting.geometry(shape)
    assert structure(geometry) == expected
    check(kernel(setting), geometry)
    y = randn(0, *geometry.out_shape)
    assert Convolution(kernel(setting), geometry).inverse()(y).shape == (0, *shape)


def test_fewer_channels_and_more_pixels():
    """Four channels of 2 x 2 pixels become one of 4 x 4: no cells, but as many elements."""
    geometry = Setting.of(4, 3, out_channels=1, padding=2).geometry((4, 2, 2))
    assert geometry.out_shape == (1, 4, 4)
    check(randn(1, 4, 3, 3), geometry)


@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_cells_that_begin_in_the_padding(mode):
    """The kernel is no larger than its step, and reads across the image's own cells."""
    geometry = Setting.of(1, 2, stride=2, padding=(1, 0, 1, 0), padding_mode=mode).geometry((1, 6, 6))
    assert geometry.out_shape == (4, 3, 3)
    assert structure(geometry) != "patches"
    x, weight = randn(2, 1, 6, 6), randn(4, 1, 2, 2)
    if mode == "circular":
        check(weight, geometry)
        torch.testing.assert_close(Convolution(weight, geometry).approximate().solve(convolve(x, weight, geometry)), x)


def test_stride_with_dilation():
    """No tap reads an output's own pixels, but all pixels are read."""
    geometry = Setting.of(1, 2, stride=2, dilation=3, padding_mode="circular").geometry((1, 6, 8))
    assert structure(geometry) == "fourier"
    check(randn(4, 1, 2, 2), geometry)


def test_order_of_pixels_makes_the_narrow_band():
    """A tall, narrow image and a wide, low one need the same work."""
    tall, wide = (Setting.of(1, 3).geometry(shape) for shape in ((1, 40, 6), (1, 6, 40)))
    weight = kernel(Setting.of(1, 3))
    assert Convolution(weight, tall)._parts(weight)[0].matrix.lower == 7
    assert Convolution(weight, wide)._parts(weight)[0].matrix.lower == 7


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("kernel_size", "stride", "panel"), [(1, 1, 128), (3, 1, 128), (3, 1, 4), (4, 2, 128), (4, 2, 3)]
)
def test_gradients(mode, kernel_size, stride, panel, monkeypatch):
    monkeypatch.setattr(Band, "panel", panel)
    setting = Setting.of(1, kernel_size, stride=stride, padding_mode=mode)
    geometry = setting.geometry((1, 4, 6))
    weight, y = kernel(setting).requires_grad_(), randn(1, *geometry.out_shape).requires_grad_()
    fast = kernel_size > 3  # random projections of the Jacobian in the place of all of it
    assert torch.autograd.gradcheck(lambda w: Convolution(w, geometry).log_abs_det(), weight, fast_mode=fast)
    assert torch.autograd.gradcheck(lambda w, b: Convolution(w, geometry).inverse()(b), (weight, y), fast_mode=fast)


@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_second_gradients(mode, monkeypatch):
    monkeypatch.setattr(Band, "panel", 3)
    setting = Setting.of(1, (2, 3), padding_mode=mode)
    geometry = setting.geometry((1, 4, 3))
    assert structure(geometry) == ("band" if mode == "zeros" else "fourier")
    weight, y = kernel(setting).requires_grad_(), randn(1, 1, 4, 3).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda w: Convolution(w, geometry).log_abs_det(), weight)
    assert torch.autograd.gradgradcheck(lambda w, b: Convolution(w, geometry).inverse()(b), (weight, y))


@pytest.mark.parametrize(
    ("mode", "size", "taps"),
    [
        ("circular", 8, [0.5, 0.5, 0.0]),  # the highest frequency is averaged away
        ("circular", 9, [1.0, -2 * math.cos(4 * math.pi / 9), 1.0]),  # the second frequency, but for rounding
        ("zeros", 20, [1.0, 0.0, 0.0]),  # a shift loses the last column
        ("zeros", 5, [1.0, 0.0, 0.0]),
        ("zeros", 20, [0.0, 0.0, 0.0]),
        ("replicate", 20, [-1.0, 1.0, 0.0]),  # the difference of a constant is zero
    ],
)
def test_singular_is_refused(mode, size, taps):
    geometry = Setting.of(1, (1, 3), padding_mode=mode).geometry((1, size, size))
    matrix = Convolution(torch.tensor(taps, dtype=double).view(1, 1, 1, 3), geometry)
    with pytest.raises(SingularError, match="singular"):
        matrix.log_abs_det()
    with pytest.raises(SingularError, match="singular"):
        matrix.inverse()


def test_dense_matrix_that_does_not_fit(monkeypatch):
    setting = Setting.of(1, 9)
    geometry = setting.geometry((1, 12, 12))
    assert structure(geometry) == "dense"
    monkeypatch.setattr(conv, "DENSE_LIMIT", 2 * 144**2 * 8 - 1)
    with pytest.raises(InputError, match=r"9x9 convolution of images of shape \(1, 12, 12\).*144 x 144 .* need 0.0 GB"):
        Convolution(kernel(setting), geometry).log_abs_det()
    monkeypatch.setattr(conv, "DENSE_LIMIT", 2 * 144**2 * 8)
    check(kernel(setting, size=0.1), geometry)


MEMORY = """
import resource, sys, torch
from ebflow_plugin.layers import FullConv2d

def used():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**20

layer = FullConv2d(3, kernel_size=3, init="normal", generator=torch.Generator().manual_seed(0)).requires_grad_(False)
layer.invert(layer.transform(torch.randn(1, 3, 16, 16)))  # loads the libraries
x = torch.randn(1, 3, 64, 64)
before = used()
layer.log_det((3, 64, 64))
error = (layer.invert(layer.transform(x)) - x).abs().max().item()
print(used() - before, error)
"""


def test_memory_of_large_images():
    """12,288 dimensions, whose dense matrix would need 1.2 GB."""
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    megabytes, error = map(float, run.stdout.split())
    assert megabytes < 200
    assert error < 1e-5


@settings(max_examples=60, deadline=None)
@given(axes(), st.sampled_from(MODES))
def test_sources_are_those_of_torch(axis, mode):
    kernel_size, stride, dilation, (before, after), size = axis
    line = Axis(size, kernel_size, stride, dilation, before, after, mode)
    numbers = torch.arange(size, dtype=double).view(1, 1, size) + 1
    padded = F.pad(numbers, (before, after), mode="constant" if mode == "zeros" else mode).flatten() - 1
    expected = [[int(padded[i * stride + tap * dilation]) for tap in range(kernel_size)] for i in range(line.out)]
    assert line.sources() == expected


@settings(max_examples=60, deadline=None)
@given(convolutions())
def test_shapes_there_and_back(case):
    setting, geometry = case
    weight = torch.empty(
        setting.out_channels, setting.in_channels // setting.groups, *setting.kernel_size, dtype=double
    )
    assert convolve(randn(1, *geometry.shape), weight, geometry).shape[1:] == geometry.out_shape
    assert setting.input_shape(geometry.out_shape) == geometry.shape


def test_turned_geometry_is_the_transposed_convolution():
    setting = Setting.of(2, (2, 3), stride=(2, 1), padding=(1, 1, 0, 0))
    geometry = setting.geometry((2, 6, 5))
    weight, x = kernel(setting), randn(1, 2, 6, 5)
    torch.testing.assert_close(convolve(x.mT, weight.mT, geometry.transposed), convolve(x, weight, geometry).mT)


@pytest.mark.parametrize(
    ("options", "padding", "channels"),
    [
        (dict(kernel_size=3), (1, 1, 1, 1), 2),
        (dict(kernel_size=(2, 5)), (2, 2, 0, 1), 2),
        (dict(kernel_size=3, dilation=2), (2, 2, 2, 2), 2),
        (dict(kernel_size=2, dilation=3), (0, 3, 0, 3), 2),
        (dict(kernel_size=2, stride=2), (0, 0, 0, 0), 8),
        (dict(kernel_size=4, stride=2), (1, 1, 1, 1), 8),
        (dict(kernel_size=3, stride=2), (0, 1, 0, 1), 8),
        (dict(kernel_size=3, padding=4), (4, 4, 4, 4), 2),
        (dict(kernel_size=3, padding=(4, 5)), (5, 5, 4, 4), 2),
        (dict(kernel_size=3, padding=(1, 2, 3, 4)), (1, 2, 3, 4), 2),
    ],
)
def test_padding(options, padding, channels):
    setting = Setting.of(2, **options)
    assert setting.padding == padding
    assert setting.out_channels == channels


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(in_channels=0, kernel_size=3), "in_channels must be an integer, at least 1, got 0"),
        (dict(in_channels=2, kernel_size=0), "kernel_size must be an integer, at least 1"),
        (dict(in_channels=2, kernel_size=3.0), "kernel_size must be an integer, or one for the height"),
        (dict(in_channels=2, kernel_size=(3, 3, 3)), r"kernel_size must be .* got \(3, 3, 3\)"),
        (dict(in_channels=2, kernel_size=3, stride=True), "stride must be an integer, at least 1"),
        (dict(in_channels=2, kernel_size=1, stride=2), "smaller than the stride"),
        (dict(in_channels=3, kernel_size=1, groups=2), "in_channels=3 cannot be divided into groups=2"),
        (dict(in_channels=2, kernel_size=1, out_channels=3, groups=2), "out_channels=3 cannot"),
        (dict(in_channels=2, kernel_size=3, padding=-1), "padding must be a non-negative integer"),
        (dict(in_channels=2, kernel_size=3, padding=(1, 1, 1)), r"\(left, right, top, bottom\); got \(1, 1, 1\)"),
        (dict(in_channels=2, kernel_size=3, padding="same"), "padding must be .* got 'same'"),
        (dict(in_channels=2, kernel_size=3, padding_mode="zero"), "unknown padding_mode 'zero'. Did you mean 'zeros'"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(InputError, match=message):
        Setting.of(**options)


@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        (dict(kernel_size=3), (3, 4, 4), r"images with 2 channels, shape \(2, H, W\), but got shape \(3, 4, 4\)"),
        (dict(kernel_size=3), (2, 4), r"got shape \(2, 4\)"),
        (dict(kernel_size=3, padding=0), (2, 4, 4), r"\(2, 4, 4\) \(32 elements\) to .* \(2, 2, 2\) \(8 elements\)"),
        (dict(kernel_size=2, stride=2), (2, 5, 4), r"\(2, 5, 4\) \(40 elements\) to an output of shape \(8, 2, 2\)"),
        (dict(kernel_size=7, padding=0), (2, 4, 4), r"shape \(2, -2, -2\)"),
        (
            dict(kernel_size=9, padding_mode="reflect"),
            (2, 4, 9),
            "reflect padding of 4 pixels needs a larger height than 4",
        ),
        (
            dict(kernel_size=9, padding_mode="circular"),
            (2, 9, 3),
            "circular padding of 4 pixels needs a larger width than 3",
        ),
    ],
)
def test_bad_images(options, shape, message):
    with pytest.raises(InputError, match=message):
        Setting.of(2, **options).geometry(shape)


def test_outputs_without_an_input():
    with pytest.raises(InputError, match=r"images with 2 channels, .* got shape \(3, 4, 4\)"):
        Setting.of(2, 3).input_shape((3, 4, 4))
    with pytest.raises(InputError, match=r"as many elements as an output of shape \(3, 4, 4\)"):
        Setting.of(2, 3, out_channels=3).input_shape((3, 4, 4))


def test_group_is_one_part():
    geometry = Setting.of(4, 3, groups=2).geometry((4, 5, 5))
    assert geometry.group == replace(geometry, channels=2, out_channels=2, groups=1)
