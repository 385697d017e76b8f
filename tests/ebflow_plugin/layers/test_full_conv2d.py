"""What is of FullConv2d alone: its arguments, and how its kernel begins."""

import inspect

import pytest
import torch
import torch.nn.functional as F

from ebflow_plugin.errors import InputError
from ebflow_plugin.layers import FullConv2d
from layer_matrices import dense_matrix, stirred
from randomness import randn, rng

# torch itself calls torch.jit.script when it first differentiates forward
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")

double = torch.float64


INITS = ["identity", "negative_identity", "orthogonal", "normal"]


CONVOLUTIONS = [
    dict(kernel_size=3),
    dict(kernel_size=(2, 4)),
    dict(kernel_size=2, dilation=3),
    dict(kernel_size=1, groups=2),
    dict(kernel_size=3, padding=(2, 0, 0, 2)),
    dict(kernel_size=2, stride=2),
    dict(kernel_size=5, stride=2, groups=2),
    dict(kernel_size=(3, 4), stride=(1, 2), padding_mode="circular"),
]


@pytest.mark.parametrize("options", CONVOLUTIONS)
def test_convolution_initialisation(options):
    x = randn(2, 4, 6, 6)
    make = {init: FullConv2d(4, **options, init=init, dtype=double, generator=rng()) for init in INITS}
    high, wide = make["identity"].setting.stride
    # the elements of a cell, in pixel_unshuffle's order, for a stride that may differ along the axes
    cells = (
        x.view(2, 4, 6 // high, high, 6 // wide, wide).permute(0, 1, 3, 5, 2, 4).reshape(2, -1, 6 // high, 6 // wide)
    )
    if high == wide:
        assert torch.equal(cells, F.pixel_unshuffle(x, high))
    assert torch.equal(make["identity"].transform(x), cells)
    assert torch.equal(make["negative_identity"].transform(x), -cells)
    turned = make["orthogonal"].transform(x)
    torch.testing.assert_close(turned.square().sum(1), cells.square().sum(1))
    assert not torch.allclose(turned.abs(), cells.abs())
    noisy = make["normal"]
    assert noisy.weight.ne(0).all()
    torch.testing.assert_close(noisy.invert(noisy.transform(x)), x)
    again = FullConv2d(4, **options, init="normal", dtype=double, generator=rng())
    assert torch.equal(again.weight, noisy.weight)


def test_the_arguments_of_a_convolution_have_the_order_of_torch():
    ours = list(inspect.signature(FullConv2d).parameters)
    assert ours[:9] == list(inspect.signature(torch.nn.Conv2d).parameters)[:9]
    layer = FullConv2d(3, 12, 6, 2, 2, 1, 3, False, "circular", dtype=double)
    twin = torch.nn.Conv2d(3, 12, 6, 2, 2, 1, 3, False, "circular", dtype=double)
    twin.load_state_dict(layer.state_dict())
    x = randn(2, 3, 8, 6)
    assert torch.equal(layer.transform(x), twin(x))
    assert FullConv2d(3, 3, 7).setting == FullConv2d(3, kernel_size=7).setting
    assert FullConv2d(3, 3, 7).setting.kernel_size == (7, 7)
    assert FullConv2d(2, None, 4, 2).setting.out_channels == 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FullConv2d(3), r"order is FullConv2d\(in_channels, out_channels, kernel_size\)"),
        (lambda: FullConv2d(3, 7), r"got out_channels=7, kernel_size=None: .*write FullConv2d\(3, kernel_size=7\)"),
        (lambda: FullConv2d(3, (1, 7)), r"write FullConv2d\(3, kernel_size=\(1, 7\)\)"),
        (lambda: FullConv2d(3, (1, 7), 3), r"write FullConv2d\(3, kernel_size=\(1, 7\)\)"),
        (lambda: FullConv2d(3, 7, None, 1), r"write FullConv2d\(3, kernel_size=7\)"),
        (lambda: FullConv2d(3, 7, 3), r"out_channels=7.*\(in_channels, out_channels, kernel_size\), as in torch"),
        (lambda: FullConv2d(3, 3, 3, 1, 1, "zeros"), "dilation must be"),
    ],
)
def test_the_former_order_raises_with_the_present_one(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_convolution_without_cells():
    with pytest.raises(InputError, match=r"init='identity' needs an output channel.*Use init='normal'"):
        FullConv2d(4, kernel_size=3, out_channels=1, padding=2)
    layer = FullConv2d(4, kernel_size=3, out_channels=1, padding=2, init="normal", dtype=double, generator=rng(1))
    x = randn(2, 4, 2, 2)
    assert layer.transform(x).shape == (2, 1, 4, 4)
    torch.testing.assert_close(layer.invert(layer.transform(x)), x)
    torch.testing.assert_close(layer.log_det((4, 2, 2)), torch.linalg.slogdet(dense_matrix(layer, (4, 2, 2)))[1])


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
def test_transform_is_torchs_convolution(mode):
    layer = stirred(FullConv2d(4, kernel_size=(3, 5), padding=(1, 2), padding_mode=mode, groups=2, dtype=double))
    theirs = torch.nn.Conv2d(4, 4, (3, 5), padding=(1, 2), padding_mode=mode, groups=2, dtype=double)
    theirs.load_state_dict(layer.state_dict())
    x = randn(2, 4, 7, 6)
    torch.testing.assert_close(layer.transform(x), theirs(x))


@pytest.mark.parametrize("options", [{}, {"padding_mode": "circular"}, {"groups": 2}, {"stride": 2}], ids=str)
def test_the_inverse_by_the_implicit_function(options):
    """The value and derivatives of the inverse, without a factorisation in the graph, beside those of the matrix."""
    layer = FullConv2d(2, kernel_size=3, init="normal", generator=rng(), dtype=torch.float64, **options)
    y = layer.transform(randn(3, 2, 4, 4)).detach().requires_grad_()
    matrix = layer.multiply(torch.eye(32, dtype=double).view(32, 2, 4, 4)).flatten(1).mT
    plain = torch.linalg.solve(matrix, (y - layer.bias[:, None, None]).flatten(1).mT).mT
    v, w, found = randn(3, 2, 4, 4, seed=1), randn(*layer.weight.shape, seed=2), []
    for x in (layer.invert(y), plain.view(3, 2, 4, 4)):
        first = torch.autograd.grad((v * x.square()).sum(), [y, *layer.parameters()], create_graph=True)
        second = torch.autograd.grad((w * first[1]).sum() + (v * first[0].view_as(v)).sum(), [y, *layer.parameters()])
        found.append((x, *first, *second))
    for implicit, expected in zip(*found, strict=True):
        torch.testing.assert_close(implicit, expected)
