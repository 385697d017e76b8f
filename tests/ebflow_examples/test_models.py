"""The built-in models: their sizes, that each is what it says, and what does not fit."""

import math
from dataclasses import replace

import pytest
import torch

import ebflow_plugin as ebf
from ebflow_examples.config import TrainConfig
from ebflow_examples.data import DataSet, load
from ebflow_examples.layers import ACTIVATIONS, LINEAR, Conditioner, ImageNetwork, TriangularLinear, coupling
from ebflow_examples.models import MODELS, build, flow_for, preprocessing
from ebflow_examples.runs import build as run_build
from ebflow_examples.streams import stream
from ebflow_plugin.errors import InputError, UnknownNameError
from matched import log_prob
from randomness import rng
from warned import no_warnings

VECTORS, IMAGES = (5,), (2, 4, 4)  # an odd number of features: halves differ
SMALL = {
    "fc": {},
    "deep": {"layers": 3},
    "cnn": {"blocks": 2},
    "conv": {"layers": 3},
    "glow": {"blocks": 2, "hidden": 8},
    "realnvp": {"blocks": 2, "hidden": 8},
    "maf": {"blocks": 2, "hidden": 8},
    "nsf": {"blocks": 2, "hidden": 8},
}


def kinds(name, shape):
    """The linear layers that a model can have."""
    if not MODELS[name].has_linear:
        return ["full"]
    return ["full", "lu"] if len(shape) == 3 else list(LINEAR)


CASES = [
    pytest.param(name, linear, shape, id=f"{name}-{linear}-{len(shape)}d")
    for name, info in MODELS.items()
    for shape in (VECTORS, IMAGES)
    if info.images is None or info.images is (len(shape) == 3)
    for linear in kinds(name, shape)
]


def moved(flow, seed=0):
    """Moves every parameter: zero-initialised networks hide what is wrong with them."""
    generator = rng(seed)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return flow


def made(name, shape, **options):
    """A model in float64, started from data, with every parameter moved; and data."""
    torch.manual_seed(0)
    if name == "cnn" and options.get("linear", "full") == "full":
        options = {"kernel": 3, **options}
    flow = build(name, shape, **{**SMALL[name], **options}).double()
    x = torch.randn(12, *shape, dtype=torch.float64)
    ebf.wrap(flow).initialize(x)
    return moved(flow), x


@pytest.mark.parametrize(("name", "linear", "shape"), CASES)
def test_models_keep_the_contracts(name, linear, shape):
    flow, x = made(name, shape, linear=linear)
    with no_warnings():
        model = ebf.wrap(flow, strict=True)
    torch.testing.assert_close(model.log_prob(x), flow.log_prob(x), rtol=1e-9, atol=1e-9)
    there_and_back = flow._transform.inverse(flow.transform_to_noise(x))[0]
    torch.testing.assert_close(there_and_back, x, rtol=1e-6, atol=1e-6)
    assert model.sample(3).shape == (3, *shape)
    assert ebf.verify(flow, x)
    # Splines aside, everything is smooth, so that SSM is unbiased.
    assert any(row.smoothness != "smooth" for row in model.report) == (name == "nsf")


def test_every_parameter_is_trained():
    for name, info in MODELS.items():
        flow, x = made(name, IMAGES if info.images else VECTORS)
        ebf.objectives.ML(ebf.wrap(flow))(x).backward()
        for path, parameter in flow.named_parameters():
            assert parameter.grad is not None, (name, path)
            assert parameter.grad.isfinite().all(), (name, path)


def test_the_seed_decides_the_weights():
    for name, info in MODELS.items():
        shape = IMAGES if info.images else VECTORS
        flows = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            options = {"init": "orthogonal"} if "init" in info.options else {}
            flows.append(build(name, shape, **SMALL[name], **options))
        first, again, other = (torch.cat([p.flatten() for p in flow.parameters()]) for flow in flows)
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_sizes_of_the_paper():
    """Table 2: 1.230 M and 0.027 M parameters for MNIST, 0.241 M for CIFAR-10; ten and sixteen blocks of Glow."""

    def size(*args):
        return sum(parameter.numel() for parameter in build(*args).parameters())

    assert size("fc", (784,)) == 2 * (784**2 + 784)
    assert round(size("cnn", (1, 28, 28)), -3) == 27_000
    assert round(size("cnn", (3, 32, 32)), -3) == 241_000
    rows = [row.class_name for row in ebf.describe(build("glow", (2,)))]
    assert rows == ["ActNorm", "FullLinear", "AffineCouplingTransform"] * 10
    rows = [row.class_name for row in ebf.describe(build("glow", (1, 28, 28)))]
    level = ["SqueezeTransform", *["ActNorm", "FullConv2d", "ImageCoupling"] * 8]
    split = ["ImageCoupling", "MultiscaleCompositeTransform"]  # the prior of the half that is split off
    assert rows == [*level, *split, *level, "MultiscaleCompositeTransform"]
    rows = [row.class_name for row in ebf.describe(build("cnn", (1, 28, 28)))]
    block = ["FullConv2d", "SmoothLeakyReLU", "FullConv2d"]
    assert rows == [*block, "SqueezeTransform", *block, "SqueezeTransform", *block]


def test_the_authors_cnn_is_residual_after_every_convolution_but_the_last():
    flow = build("cnn", (1, 8, 8), residual=True, kernel=3)
    rows = [row.class_name for row in ebf.describe(flow)]
    pair, squeeze = ["FullConv2d", "SmoothLeakyReLU"], "SqueezeTransform"
    assert rows == [*pair, *pair, squeeze, *pair, *pair, squeeze, *pair, "FullConv2d"]
    activations = [module for module in flow.modules() if type(module).__name__ == "SmoothLeakyReLU"]
    assert [module.residual for module in activations] == [True] * 5
    x = torch.tensor([[-3.0, 0.0, 2.0]], dtype=torch.float64)
    expected = x + 0.3 * x + 0.7 * torch.log1p(torch.exp(x))
    assert torch.allclose(activations[0].transform(x), expected)


def test_a_temperature_moves_no_density_and_is_the_unit_of_the_matched_variable():
    config = TrainConfig(data="digits", loss="dsm", device="cpu")
    plain, warm = (run_build(replace(config, temperature=value)) for value in (None, 0.5))
    rows = plain.data.test[:20]
    for run in (plain, warm):
        run.model.double()
    (u, log_det), (v, warm_log_det) = (run.model.preprocess(rows.double(), stream(0, "test")) for run in (plain, warm))
    assert torch.allclose(v, 2.0 * u)
    assert torch.allclose(warm_log_det - log_det, torch.full((20,), 64 * math.log(2.0), dtype=torch.float64))
    with torch.no_grad():  # the same density: a first layer that undoes the temperature
        first = next(module for module in warm.model.modules() if type(module).__name__ == "FullLinear")
        other = next(module for module in plain.model.modules() if type(module).__name__ == "FullLinear")
        first.weight.copy_(0.5 * other.weight)
    assert torch.allclose(log_prob(warm.model.core, v) + warm_log_det, log_prob(plain.model.core, u) + log_det)
    with pytest.raises(InputError, match="temperature must be a positive number"):
        preprocessing(plain.data, temperature=0.0)
    with pytest.raises(InputError, match="temperature is of images"):
        preprocessing(load("swirl", limit=1), temperature=0.5)


def test_the_paper_start_of_fc_is_minus_the_identity():
    first, activation, second = build("fc", (3,))._transform._transforms
    assert torch.equal(first.weight, -torch.eye(3))
    assert torch.equal(second.weight, -torch.eye(3))
    assert activation.alpha == 0.3


@pytest.mark.parametrize("upper", [False, True])
def test_triangular_layers(upper):
    flow, x = made("fc", (5,), linear="upper" if upper else "lower", layers=1)
    model = ebf.wrap(flow)
    (row,) = model.report
    assert row.linearity == "linear"
    assert row.log_det_cost == "O(D)"
    jacobian = torch.autograd.functional.jacobian(lambda x: model.score(x[None])[0], x[0])
    weight = next(p for p in flow.parameters() if p.dim() == 2)
    matrix = weight.triu() if upper else weight.tril()
    torch.testing.assert_close(jacobian, -matrix.T @ matrix)  # of a Gaussian with precision WᵀW
    assert model.log_z().item() == pytest.approx(-torch.linalg.slogdet(matrix)[1].item())


def test_masked_entries_of_triangular_layers_do_nothing():
    layer = TriangularLinear(4)
    x = torch.randn(3, 4)
    before = layer(x)[0]
    with torch.no_grad():
        layer.weight += torch.ones(4, 4).triu(1)
    assert torch.equal(layer(x)[0], before)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(4,), (1, 4, 4)])
def test_activations(activation, shape):
    flow = build("glow", shape, activation=activation, blocks=1, hidden=8)
    rows = [row for row in ebf.describe(flow) if row.linearity == "nonlinear"]
    assert all((row.smoothness == "smooth") == ("relu" not in activation) for row in rows)


def test_no_coupling_of_an_image_glow_explodes():
    """However far the networks go, a coupling moves the volume by what its bounded scale allows, and no more."""
    torch.manual_seed(0)
    flow = build("glow", (1, 4, 4), levels=1, blocks=1, hidden=8).double()
    for module in flow.modules():
        if isinstance(module, ImageNetwork):
            torch.nn.init.normal_(module.layers[-1].weight, std=1e4)
    model = ebf.wrap(flow)
    model.initialize(torch.randn(50, 1, 4, 4, dtype=torch.float64))
    x = 10 * torch.randn(200, 1, 4, 4, dtype=torch.float64)
    (_,), log_det = model.plan.encode(x)
    mean_scale = log_det / 8  # its logarithm, over the half that is moved
    assert -2.0 <= mean_scale.min() < -1.0  # as far as it can
    assert 1.0 < mean_scale.max() <= 2.0


def test_the_split_prior_is_a_normal_density_given_the_other_half():
    torch.manual_seed(0)
    layer = moved(coupling((4, 3, 3), True, Conditioner(8, 1, "silu")).double())
    z = torch.randn(5, 4, 3, 3, dtype=torch.float64)
    outputs, log_det = layer(z)
    done, on = slice(0, 2), slice(2, 4)
    network = next(each for each in layer.modules() if isinstance(each, ImageNetwork))
    shift, log_scale = network(z[:, on]).chunk(2, dim=1)  # towards noise
    mean, deviation = -shift / log_scale.exp(), (-log_scale).exp()
    prior = torch.distributions.Normal(mean, deviation).log_prob(z[:, done]).sum((1, 2, 3))
    standard = torch.distributions.Normal(0.0, 1.0).log_prob(outputs[:, done]).sum((1, 2, 3))
    torch.testing.assert_close(standard + log_det, prior)
    assert torch.equal(outputs[:, on], z[:, on])


@pytest.mark.parametrize("objective", ["ml", "dsm"])
def test_gradients_reach_every_parameter_of_a_glow_with_a_split(objective):
    flow, x = made("glow", (1, 8, 8))
    ebf.make_objective(objective, ebf.wrap(flow))(x).backward()
    for path, parameter in flow.named_parameters():
        assert parameter.grad is not None, path
        assert float(parameter.grad.abs().sum()) > 0, path


def test_half_of_the_channels_are_split_off_between_two_levels():
    rows = list(ebf.describe(build("glow", (1, 8, 8), blocks=1, hidden=8)))
    plain = list(ebf.describe(build("glow", (1, 8, 8), blocks=1, hidden=8, levels=1)))
    assert [row.reason for row in rows].count("splits off latents") == 1
    assert "splits off latents" not in [row.reason for row in plain]


def test_flow_for_takes_the_shape_of_the_data():
    data = load("digits")
    flow, flat = flow_for("fc", data)
    assert flat.event_shape == (64,)
    model = ebf.wrap(flow, preprocess=preprocessing(flat))
    assert model.log_prob(flat.test).isfinite().all()
    assert model.bits_per_dim(flat.test).shape == (179,)
    flow, images = flow_for("glow", data, blocks=1, hidden=8)
    assert images.event_shape == (1, 8, 8)
    model = ebf.wrap(flow, preprocess=preprocessing(images))
    model.initialize(images.train)
    assert model.log_prob(images.test).isfinite().all()
    sample = model.sample(4)
    assert torch.equal(sample, sample.round())
    assert 0 <= sample.min() <= sample.max() <= 16


def test_alpha_is_that_of_the_data():
    grey = torch.zeros(10, 3, 4, 4)
    cifar, other = (DataSet(name, grey, grey, grey, 256) for name in ("cifar10-jpeg", "mine"))
    options = {"blocks": 1, "kernel": 1}
    leaky = [flow_for("cnn", data, **options)[0]._transform._transforms[1].alpha for data in (cifar, other)]
    assert leaky == [0.6, 0.3]
    assert flow_for("cnn", cifar, alpha=0.5, **options)[0]._transform._transforms[1].alpha == 0.5
    assert preprocessing(cifar)[1].shift == pytest.approx(0.05)
    assert preprocessing(other)[1].shift == pytest.approx(1e-6)
    assert preprocessing(load("swirl", limit=1)) == []
    with pytest.raises(InputError, match="alpha must lie between 0 and 0.5"):
        preprocessing(cifar, alpha=0.7)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("fcc", (3,)), {}, "unknown model 'fcc'. Did you mean 'fc'"),
        (("fc", (3,)), {"linear": "fulll"}, "unknown linear layer 'fulll'. Did you mean 'full'"),
        (("glow", (3,)), {"activation": "rellu"}, "unknown activation 'rellu'. Did you mean 'relu'"),
    ],
)
def test_unknown_names(arguments, options, message):
    with pytest.raises(UnknownNameError, match=message):
        build(*arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("cnn", (64,)), {}, "cnn takes images, .* but the data are vectors of 64"),
        (("fc", (1, 8, 8)), {}, r"fc takes vectors, .* flatten them to \(64,\)"),
        (("glow", (1, 7, 8)), {}, "glow squeezes 2 x 2 pixels, but has 7 x 8"),
        (("glow", (1, 6, 6)), {}, "but has 3 x 3 of them there; use levels=1"),
        (("cnn", (1, 6, 6)), {}, "but has 3 x 3 of them there; use blocks=2"),
        (("conv", (1, 4, 6)), {"kernel": 5}, "kernels of 5 x 5 pixels, and the images 4 x 6"),
        (("cnn", (1, 8, 8)), {"linear": "qr"}, "nflows has no 'qr' linear layer for images; choose one of full, lu"),
        (("realnvp", (4,)), {"linear": "lu"}, "realnvp has no linear layers"),
        (("fc", (4,)), {"hiden": 3}, "fc has no option 'hiden'. .*Valid names: alpha, init, layers"),
        (("fc", (4, 4)), {}, "takes vectors, shape .* or images"),
        (("glow", (1,)), {}, "the data have one; try fc or maf"),
        (("glow", (4,)), {"hidden": -1}, "hidden >= 1"),
        (("fc", (4,)), {"layers": 0}, "layers must be at least 1, got 0"),
        (("glow", (4,)), {"blocks": 0}, "blocks must be at least 1, got 0"),
        (("glow", (1, 8, 8)), {"kernel": 3, "linear": "lu"}, "linear='lu' are 1 x 1; leave out kernel=3"),
        (("glow", (4,)), {"kernel": 3}, "on images alone, not on vectors of 4"),
        (("fc", (4,)), {"alpha": 2.0}, "alpha must lie in"),
        (("fc", (4,)), {"init": "idenity"}, "unknown init 'idenity'"),
    ],
)
def test_what_does_not_fit(arguments, options, message):
    with pytest.raises(InputError, match=message):
        build(*arguments, **options)


def test_models_say_what_they_are():
    assert list(MODELS) == ["fc", "deep", "cnn", "conv", "glow", "realnvp", "maf", "nsf"]
    for info in MODELS.values():
        assert len(info.about) < 110
        assert info.options
