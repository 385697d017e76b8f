"""Derivatives in closed form against those by autograd: on random compositions and by hand.

Every case: test_testing.py.
"""

import warnings

import normflows
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nflows import distributions, flows, transforms
from nflows.transforms import nonlinearities
from torch.utils._python_dispatch import TorchDispatchMode

import ebflow_normflows
import ebflow_plugin as ebf
from autograd_oracle import assert_derivatives, by_autograd, directions
from cases import SUPPORTED, first_of_each_class
from compositions import LIBRARIES, build, data, specs
from ebflow_nflows import FullConv2d, FullLinear, SmoothLeakyReLU
from ebflow_plugin.linalg.geometry import convolve, convolve_transposed
from ebflow_plugin.objectives import DSM, SM, SSM
from ebflow_plugin.plan.derivatives import derivatives
from nflows_small import flow_of, smooth_net
from randomness import randn, rng

pytestmark = pytest.mark.filterwarnings("ignore")  # the smoothness of splines is not the subject here

D = 6


@pytest.mark.parametrize("case", [case for case in SUPPORTED if "ogit" in case.name], ids=str)
def test_preprocessing_itself(case):
    """With MaP switched off, the derivatives of the logit are part of the energy."""
    model = ebf.wrap(case.build(), match_after=None)
    assert_derivatives(model, case.x(3), case.context(3))


@pytest.mark.parametrize(("library", "images"), [(one, images) for one in LIBRARIES for images in (False, True)])
@given(draw=st.data(), seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_compositions(library, images, draw, seed):
    spec = draw.draw(specs(library, images))
    model = ebf.wrap(build(library, images, spec, seed))
    assert_derivatives(model, data(images, 3, seed))


def make(*layers):
    return ebf.wrap(flow_of(*layers, shape=(D,)))


def fc():
    generator = rng(0)
    return make(*(FullLinear(D, init="normal", generator=generator) for _ in range(2)), SmoothLeakyReLU(0.3))


@pytest.mark.parametrize(
    "transform",
    [
        transforms.Tanh(),
        transforms.InverseTransform(transforms.Tanh()),
        transforms.LogTanh(0.4),
        transforms.InverseTransform(transforms.LogTanh(0.4)),
        transforms.LeakyReLU(0.3),
        transforms.InverseTransform(transforms.LeakyReLU(0.3)),
        transforms.Sigmoid(temperature=1.7),
        transforms.Logit(temperature=1.7, eps=0.1),  # clamps some of the points
        nonlinearities.CauchyCDF(),
        nonlinearities.CauchyCDFInverse(),
        SmoothLeakyReLU(0.2),
        SmoothLeakyReLU(0.2, residual=True),
        transforms.InverseTransform(SmoothLeakyReLU(0.2)),
    ],
    ids=lambda transform: repr(transform).replace("\n", "")[:40],
)
def test_elementwise_steps_between_linear_ones(transform):
    """After a layer and before one: pulled, pushed and bent, with a tangent that is not an axis."""
    inside = [transforms.PointwiseAffineTransform(0.5, 0.05)]  # into (0, 1) and (-1, 1)
    model = make(FullLinear(D, init="orthogonal"), *inside, transform, FullLinear(D, init="normal"))
    assert model.plan.closed_steps == len(model.plan.steps)
    x = torch.randn(40, D, dtype=torch.float64, generator=rng(1))
    assert_derivatives(model, x)


def test_by_hand():
    """E = ½(w tanh x)² - log(1 - tanh² x) in one dimension, against its derivatives on paper."""
    flow = flow_of(transforms.Tanh(), FullLinear(1), shape=(1,))
    model = ebf.wrap(flow)
    with torch.no_grad():
        flow._transform._transforms[1].weight.fill_(3.0)
    x, v = torch.tensor([[0.3]], dtype=torch.float64), torch.tensor([[2.0]], dtype=torch.float64)
    t = torch.tanh(x).squeeze()
    found = derivatives(model.plan, x, directions=[v])
    slope = 9 * t * (1 - t**2) + 2 * t
    curvature = 9 * (1 - t**2) * (1 - 3 * t**2) + 2 * (1 - t**2)
    torch.testing.assert_close(found.gradient.squeeze(), slope)
    torch.testing.assert_close(found.curvatures[0].squeeze(), 4 * curvature)


class Products(TorchDispatchMode):
    """Counts matrix products, in multiples of B · D²."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            left, right = args[-2:]
            self.count += left.shape[0] * left.shape[1] * right.shape[1]
        return result


@pytest.mark.parametrize(("objective", "products"), [(SSM, 16), (DSM, 11)])
def test_products_of_a_training_step(objective, products):
    """Of two full layers around an activation. Double backward takes 23 and 12."""
    model = make(FullLinear(D, init="orthogonal"), SmoothLeakyReLU(0.3), FullLinear(D, init="orthogonal"))
    loss, x = objective(model), torch.randn(5, D, dtype=torch.float64)
    loss(x).backward()
    with Products() as counted:
        loss(x).backward()
    assert counted.count == products * 5 * D**2


def test_networks_are_differentiated_twice_and_the_steps_before_are_not():
    mask = torch.arange(D) % 2
    coupling = transforms.AffineCouplingTransform(mask, smooth_net(hidden=4))
    model = make(FullLinear(D, init="normal"), SmoothLeakyReLU(0.3), coupling, FullLinear(D, init="normal"))
    assert model.plan.closed_steps == 2
    assert [row.second_derivatives for row in model.report] == ["product", "closed form", *["double backward"] * 2]
    assert "double backward from _transform._transforms.2 on" in str(model.report)
    x = torch.randn(5, D, dtype=torch.float64)
    assert_derivatives(model, x)


def test_the_report_of_a_plan_in_closed_form():
    model = fc()
    assert [row.second_derivatives for row in model.report] == ["product", "product", "closed form"]
    assert "second derivatives in closed form" in str(model.report)


def test_without_a_graph_there_is_none():
    model, x = fc(), torch.randn(5, D, dtype=torch.float64)
    with torch.no_grad():
        found = derivatives(model.plan, x, directions=directions(x), energy=True)
    assert not any(one.requires_grad for one in (found.energy, found.gradient, *found.curvatures))


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
@pytest.mark.parametrize(
    "options",
    [{}, {"kernel_size": 4, "stride": 2}, {"dilation": 2}, {"kernel_size": 2}, {"kernel_size": 2, "stride": 2}],
    ids=str,
)
def test_transposed_convolution(mode, options):
    """<C x, y> = <x, Cᵀ y>."""
    layer = FullConv2d(4, **{"kernel_size": 3, "init": "normal", **options}, padding_mode=mode).double()
    geometry = layer.setting.geometry((4, 8, 8))
    x = torch.randn(3, 4, 8, 8, dtype=torch.float64)
    forward = convolve(x, layer.weight, geometry)
    y = torch.randn_like(forward)
    back = convolve_transposed(y, layer.weight, geometry)
    assert back.shape == x.shape
    torch.testing.assert_close((forward * y).sum(), (x * back).sum())


def test_many_directions_and_the_trace():
    """SM is the mean of SSM over all ±1 directions; SSM with many projections is the mean of single ones."""
    model, x = fc(), torch.randn(4, D, dtype=torch.float64)
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * D)
    found = derivatives(model.plan, x, directions=[sign.expand_as(x) for sign in signs])
    expected = 0.5 * found.gradient.square().sum(1) - torch.stack(found.curvatures).mean(0)
    torch.testing.assert_close(SM(model).losses(x), expected)


def test_meta_tensors_pass():
    model = make(FullLinear(D), SmoothLeakyReLU(0.3), FullLinear(D)).to("meta")
    x = torch.empty(5, D, dtype=torch.float64, device="meta")
    assert SSM(model)(x).is_meta
    assert DSM(model)(x).is_meta


def test_an_error_names_the_step():
    model = make(FullLinear(D), SmoothLeakyReLU(0.3))
    x = torch.randn(5, D, dtype=torch.float64)
    model.plan.steps[1].module.alpha = "a word"
    with pytest.raises(TypeError) as caught:
        SSM(model)(x)
    assert "_transform._transforms.1" in "".join(caught.value.__notes__)


def patched_nflows():
    base = distributions.StandardNormal([4])
    base._log_prob = lambda z, context: distributions.StandardNormal._log_prob(base, 2 * z, context)
    return flows.Flow(FullLinear(4), base)


def patched_normflows():
    base = normflows.distributions.DiagGaussian(4)
    base.log_prob = lambda z: -z.square().square().sum(1)
    return normflows.NormalizingFlow(base, [ebflow_normflows.FullLinear(4)])


@pytest.mark.parametrize("make", [patched_nflows, patched_normflows])
def test_a_base_that_somebody_patched_is_differentiated_as_it_is(make):
    plan = ebf.wrap(make().double()).plan
    x, v = torch.randn(2, 3, 4, dtype=torch.float64)
    found, expected = derivatives(plan, x, None, [v]), by_autograd(plan, x, None, [v])
    assert torch.allclose(found.gradient, expected.gradient)
    assert torch.allclose(found.curvatures[0], expected.curvatures[0])


@pytest.mark.parametrize("edge", [1e-6, 1 - 1e-6])
def test_on_the_edge_where_a_logit_is_clamped_nothing_depends_on_x(edge):
    plan = ebf.wrap(flows.Flow(transforms.Logit(), distributions.StandardNormal([1])), match_after=None).plan
    x = torch.full((1, 1), 0.5).clamp(edge, edge)
    found, expected = derivatives(plan, x), by_autograd(plan, x)
    assert torch.equal(found.gradient, expected.gradient)


# Gradients through samples, which reverse KL trains by: those of the implicit function, for every step


def gradients(value, *tensors):
    found = torch.autograd.grad(value, tensors, allow_unused=True, materialize_grads=True)
    return found[0], torch.cat([gradient.flatten() for gradient in found[1:]] or [value.new_zeros(1)])


@pytest.mark.parametrize("case", first_of_each_class(SUPPORTED), ids=str)
def test_a_sample_has_the_gradient_of_the_implicit_function(case):
    """With g(x) = z, a cotangent v of x is Jᵀ a, a that of z, and the parameters have -aᵀ ∂g."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = ebf.wrap(case.build()).plan
    x, context = case.x(3), plan.embed(case.context(3))
    with torch.no_grad():
        latents, _ = plan.encode(x, context)
        flat = torch.cat([z.flatten(1) for z in latents], 1)
    modules = {id(step.module): step.module for step in plan.steps if isinstance(step.module, torch.nn.Module)}
    parameters = [p for module in modules.values() for p in module.parameters() if p.requires_grad]
    noise = flat.clone().requires_grad_()
    parts = noise.split([z[0].numel() for z in latents], 1)
    try:
        drawn = plan.decode(tuple(p.reshape(z.shape) for p, z in zip(parts, latents, strict=True)), context)
    except ebf.NoInverseError as error:
        pytest.skip(str(error).splitlines()[0])
    v = randn(*drawn.shape, seed=7)
    of_noise, of_parameters = gradients((v * drawn).sum(), noise, *parameters)
    point = drawn.detach().requires_grad_()
    encoded = torch.cat([z.flatten(1) for z in plan.encode(point, context)[0]], 1)
    of_point, of_map = gradients((of_noise.detach() * encoded).sum(), point, *parameters)
    torch.testing.assert_close(of_point, v, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_parameters, -of_map, rtol=1e-5, atol=1e-5 * float(1 + of_map.abs().max()))
