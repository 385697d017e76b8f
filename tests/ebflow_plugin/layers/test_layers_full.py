"""FullLinear and FullConv2d: against autograd's Jacobian, torch's determinant and finite differences, in float64."""

import copy
import math
import pickle

import pytest
import torch

from ebflow_plugin.errors import InputError, SingularError
from ebflow_plugin.layers import FullConv2d, FullLinear, SmoothLeakyReLU
from layer_matrices import dense_matrix, stirred
from randomness import randn, rng

# torch itself calls torch.jit.script when it first differentiates forward
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")

double = torch.float64
INITS = ["identity", "negative_identity", "orthogonal", "normal"]


def linear(**options):
    return stirred(FullLinear(5, dtype=double, **options)), (5,)


def conv(**options):
    return stirred(FullConv2d(2, **{"kernel_size": 3, "dtype": double, **options})), (2, 4, 6)


LINEAR = {
    "linear": linear,
    "linear without bias": lambda: linear(bias=False),
    "linear on positions": lambda: (linear()[0], (3, 5)),
    "1x1": lambda: conv(kernel_size=1),
    "zeros": conv,
    "zeros without bias": lambda: conv(bias=False),
    "band": lambda: (stirred(FullConv2d(1, kernel_size=3, dtype=double)), (1, 14, 14)),
    "circular": lambda: conv(padding_mode="circular"),
    "replicate": lambda: conv(padding_mode="replicate"),
    "even": lambda: conv(kernel_size=2, padding_mode="reflect"),
    "asymmetric": lambda: conv(padding=(0, 2, 2, 0)),
    "stride": lambda: conv(kernel_size=4, stride=2),
    "stride, circular": lambda: conv(kernel_size=4, stride=2, padding_mode="circular"),
    "groups": lambda: conv(groups=2),
}


@pytest.fixture(params=LINEAR.values(), ids=LINEAR.keys())
def case(request):
    return request.param()


def test_log_det_is_that_of_the_jacobian(case):
    layer, shape = case
    expected = torch.linalg.slogdet(dense_matrix(layer, shape))[1]
    torch.testing.assert_close(layer.log_det(shape), expected)
    with torch.no_grad():
        found = layer.log_det(shape)
        assert found.shape == ()
        assert not found.requires_grad
        torch.testing.assert_close(found, expected.detach())


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("tracked", [False, True])
def test_invert_undoes_transform(case, batch, tracked):
    layer, shape = case
    layer.requires_grad_(tracked)
    x = randn(batch, *shape)
    y = layer.transform(x)
    assert y.shape == (batch, *layer.output_shape(shape))
    assert layer.input_shape(layer.output_shape(shape)) == shape
    found = layer.invert(y)
    assert found.requires_grad == tracked
    torch.testing.assert_close(found, x, check_device=False, rtol=1e-7, atol=1e-7)


def with_parameters(layer, function):
    """A function of the parameters and further tensors, as gradcheck wants it."""
    names, values = zip(*((f"layer.{name}", value) for name, value in layer.named_parameters()), strict=True)

    def called(*tensors):
        state = dict(zip(names, tensors, strict=False))
        return torch.func.functional_call(Calling(layer, function), state, tensors[len(names) :])

    return called, tuple(value.detach().clone().requires_grad_() for value in values)


class Calling(torch.nn.Module):
    def __init__(self, layer, function):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, *tensors):
        return self.function(self.layer, *tensors)


def test_gradients(case):
    layer, shape = case
    log_det, parameters = with_parameters(layer, lambda layer: layer.log_det(shape))
    y = randn(1, *layer.output_shape(shape)).requires_grad_()
    invert, _ = with_parameters(layer, lambda layer, y: layer.invert(y))
    fast = math.prod(shape) > 50  # projections of the Jacobian in the place of all of it
    assert torch.autograd.gradcheck(log_det, parameters, fast_mode=fast)
    assert torch.autograd.gradcheck(invert, (*parameters, y), fast_mode=fast)
    assert torch.autograd.gradgradcheck(invert, (*parameters, y), fast_mode=True)
    layer.requires_grad_(False)  # now through the factors that are kept
    assert torch.autograd.gradcheck(layer.invert, y, fast_mode=fast, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda y: layer.invert(y).square(), y, fast_mode=True)


def test_gradients_of_bias_alone(case):
    layer, shape = case
    if layer.bias is None:
        return
    layer.weight.requires_grad_(False)
    y = layer.transform(randn(2, *shape)).detach()
    (gradient,) = torch.autograd.grad(layer.invert(y).sum(), layer.bias)
    weight_solved = layer.invert(y.requires_grad_())
    (expected,) = torch.autograd.grad(weight_solved.sum(), y)
    dims = [d for d in range(y.dim()) if d != (1 if y.dim() == 4 else y.dim() - 1)]
    torch.testing.assert_close(gradient, -expected.sum(dims))


def test_single_precision_round_trip():
    layer = FullLinear(300, init="normal", generator=rng()).requires_grad_(False)
    x = randn(10, 300, dtype=torch.float32)
    y = layer.transform(x)
    exact = torch.linalg.solve(layer.weight.double(), y.double().mT).mT.float()
    torch.testing.assert_close(layer.invert(y), exact, rtol=1e-6, atol=1e-6)
    assert layer.invert(y).dtype == torch.float32
    assert layer.log_det((300,)) == torch.linalg.slogdet(layer.weight.double())[1].float()


def edit_in_place(layer):
    with torch.no_grad():
        layer.weight.mul_(2.0)


def edit_data(layer):
    layer.weight.data.mul_(2.0)


def load(layer):
    layer.load_state_dict({name: value * 2 for name, value in layer.state_dict().items()})


def train(layer):
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.1)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimiser.step()


def swap(layer):
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 2)


@pytest.mark.parametrize("change", [edit_in_place, edit_data, load, train, swap, lambda layer: layer.float()])
@pytest.mark.parametrize("name", ["linear", "1x1", "zeros", "band", "circular"])
def test_nothing_is_stale(name, change):
    layer, shape = LINEAR[name]()
    with torch.no_grad():
        x = randn(2, *shape)
        before = layer.log_det(shape)
        layer.invert(layer.transform(x))
        change(layer)
        x = x.to(layer.weight.dtype)
        expected = torch.linalg.slogdet(dense_matrix(copy.deepcopy(layer).double(), shape))[1]
        found = layer.log_det(shape)
        assert found.dtype == layer.weight.dtype
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5)
        assert layer.weight.dtype == torch.float32 or not torch.isclose(found, before)
        torch.testing.assert_close(layer.invert(layer.transform(x)), x, rtol=1e-4, atol=1e-4)


def test_image_sizes_alternate():
    layer = stirred(FullConv2d(2, kernel_size=3, dtype=double)).requires_grad_(False)
    for shape in ((2, 4, 4), (2, 5, 3), (2, 4, 4)):
        torch.testing.assert_close(layer.log_det(shape), torch.linalg.slogdet(dense_matrix(layer, shape))[1])
        x = randn(1, *shape)
        torch.testing.assert_close(layer.invert(layer.transform(x)), x)


def test_copies_and_checkpoints(case):
    layer, shape = case
    layer.requires_grad_(False)
    x = randn(2, *shape)
    y = layer.transform(x)
    layer.invert(y), layer.log_det(shape)
    assert set(layer.state_dict()) <= {"weight", "bias"}
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(twin.invert(y), layer.invert(y))
        twin.weight.mul_(2.0)
        torch.testing.assert_close(twin.log_det(shape), layer.log_det(shape) + math.prod(shape) * math.log(2))
    assert str(layer.weight.shape[0]) in repr(layer)


def test_meta_device(case):
    layer, shape = case
    layer = layer.to("meta")
    y = layer.transform(torch.empty(2, *shape, device="meta", dtype=double))
    for tracked in (True, False):
        layer.requires_grad_(tracked)
        assert layer.invert(y).shape == (2, *shape)
        assert layer.log_det(shape).device.type == "meta"


@pytest.mark.parametrize("init", INITS)
def test_construction_on_a_device_and_in_a_dtype(init):
    for layer in (
        FullLinear(4, init=init, device="meta", dtype=double),
        FullConv2d(2, kernel_size=3, init=init, device="meta", dtype=double),
    ):
        assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", double)}


def test_after_inference_mode(case):
    layer, shape = case
    layer.requires_grad_(False)
    y = layer.transform(randn(1, *shape))
    with torch.inference_mode():
        layer.invert(y), layer.log_det(shape)
    y.requires_grad_()
    (gradient,) = torch.autograd.grad(layer.invert(y).sum(), y)
    assert gradient.shape == y.shape
    (layer.log_det(shape) * y.sum()).backward()


@pytest.mark.parametrize("tracked", [False, True])
def test_autocast_leaves_the_factorisation_alone(case, tracked):
    layer, shape = case
    layer.float().requires_grad_(tracked)
    y = randn(2, *layer.output_shape(shape), dtype=torch.float32)
    expected = layer.log_det(shape), copy.deepcopy(layer).invert(y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = copy.deepcopy(layer).log_det(shape), layer.invert(y)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_linear_initialisation():
    eye = torch.eye(6, dtype=double)
    made = {init: FullLinear(6, init=init, dtype=double, generator=rng()) for init in INITS}
    assert torch.equal(made["identity"].weight, eye)
    assert torch.equal(made["negative_identity"].weight, -eye)
    torch.testing.assert_close(made["orthogonal"].weight @ made["orthogonal"].weight.mT, eye)
    assert not torch.allclose(made["orthogonal"].weight, eye)
    assert all(not layer.bias.any() for layer in made.values())
    big = FullLinear(400, init="normal", generator=rng())
    assert big.weight.std().item() == pytest.approx(400**-0.5, rel=0.01)
    for init in ("orthogonal", "normal"):
        again = FullLinear(6, init=init, dtype=double, generator=rng())
        assert torch.equal(again.weight, made[init].weight)
        again.reset_parameters(rng(1))
        assert not torch.equal(again.weight, made[init].weight)


def test_singular_layers():
    layer = FullLinear(3)
    with torch.no_grad():
        layer.weight[0] = layer.weight[1]
        for call in (lambda: layer.log_det((3,)), lambda: layer.invert(torch.ones(1, 3))):
            with pytest.raises(SingularError, match="3 x 3 matrix of a linear layer is singular"):
                call()
    assert layer.log_det((3,)) == -torch.inf  # in a graph
    with pytest.raises(SingularError, match="singular"):
        layer.invert(torch.ones(1, 3))
    layer.reset_parameters()
    assert layer.log_det((3,)) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FullLinear(0), "features must be an integer, at least 1, got 0"),
        (lambda: FullLinear(2.5), "features must be an integer, at least 1, got 2.5"),
        (lambda: FullLinear(3, init="identiti"), "unknown init 'identiti'. Did you mean 'identity'"),
        (lambda: FullConv2d(3, kernel_size=3, init="zero"), "unknown init 'zero'. .*Valid names: identity, negative_"),
        (lambda: FullLinear(3).transform(torch.ones(2, 4)), r"takes 3 features in the last dimension, .* \(2, 4\)"),
        (lambda: FullLinear(3).invert(torch.ones(2, 4)), r"FullLinear\(3\) takes 3 features"),
        (lambda: FullLinear(3).log_det((4,)), r"shape \(4,\)"),
        (lambda: FullLinear(3).log_det(()), r"shape \(\)"),
        (lambda: FullConv2d(3, None, 3).transform(torch.ones(3, 4, 4)), r"\(B, C, H, W\), but got shape \(3, 4, 4\)"),
        (lambda: FullConv2d(3, None, 3).transform(torch.ones(1, 2, 4, 4)), r"3 channels.* but got shape \(2, 4, 4\)"),
        (lambda: FullConv2d(3, None, 3).invert(torch.ones(1, 2, 4, 4)), r"3 channels.* but got shape \(2, 4, 4\)"),
        (lambda: FullConv2d(3, None, 3, 1, 0).transform(torch.ones(1, 3, 4, 4)), "must keep the number of elements"),
        (lambda: FullConv2d(3, kernel_size=3, padding=0).log_det((3, 4, 4)), r"\(3, 2, 2\) \(12 elements\)"),
        (lambda: SmoothLeakyReLU(0.0), r"alpha must lie in \(0, 1\], got 0.0"),
        (lambda: SmoothLeakyReLU(1.5), "got 1.5"),
        (lambda: SmoothLeakyReLU(float("nan")), "got nan"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(InputError, match=message):
        make()
