"""unconstrain(), with kernels too, and smooth(): the same density, in the library too."""

import math

import normflows as nf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nflows.distributions.normal import StandardNormal
from nflows.flows.base import Flow
from nflows.transforms import CompositeTransform, InverseTransform, OneByOneConvolution, RandomPermutation
from torch import nn
from torch.nn import functional as F

import ebflow_nflows
import ebflow_normflows
import ebflow_plugin as ebf
from autograd_oracle import log_prob_by_jacobian
from cases import SUPPORTED, Case
from ebflow_examples.models import build
from ebflow_plugin.adapting.surgery import Smooth, _features
from nflows_small import Net
from randomness import rng
from stochastic_models import perturbed


def constrained(case: Case) -> bool:
    model = ebf.wrap(case.build())
    return any(_features(model.adapter, step) for step in model.plan.steps)


CONSTRAINED = [case for case in SUPPORTED if constrained(case)]


@pytest.mark.parametrize("case", CONSTRAINED, ids=str)
def test_unconstrain_keeps_the_density_in_layers_that_train_and_invert(case: Case):
    flow, x, context = case.build(), case.x(), case.context()
    model = ebf.wrap(flow)
    model.initialize(x, context)
    before = {name: tensor.clone() for name, tensor in flow.state_dict().items()}
    changes = []
    full = ebf.unconstrain(flow, changes=changes)
    again = ebf.wrap(full)
    assert changes
    assert torch.allclose(again.log_prob(x, context), model.log_prob(x, context), rtol=1e-9)
    assert not any(_features(model.adapter, step) for step in again.plan.steps)
    for step in again.plan.steps:
        if step.class_name.startswith("Full"):
            assert not step.inverted, "the density direction of a full layer must be its product, not its solve"
    assert all(torch.equal(before[name], tensor) for name, tensor in flow.state_dict().items())
    assert not {id(p) for p in flow.parameters()} & {id(p) for p in full.parameters()}
    assert full.training == flow.training
    weights = [p for step in again.plan.steps if step.class_name.startswith("Full") for p in step.module.parameters()]
    if any(weight.requires_grad for weight in weights):
        gradients = torch.autograd.grad(again.score(x, context).square().sum(), weights, allow_unused=True)
        assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients), "not trainable"
    else:  # a fixed layer stays fixed
        assert not any(parameter.requires_grad for parameter in flow.parameters())
    if case.own_inverse:
        embedded = again.plan.embed(context)
        latents, _ = again.plan.encode(x, embedded)
        assert torch.allclose(again.plan.decode(latents, embedded), x, atol=max(1e-6, 10 * case.inverse_tol))


def test_in_place_edits_the_given_flow():
    case = CONSTRAINED[0]
    flow = case.build()
    expected = flow.log_prob(case.x())
    changes = []
    assert ebf.unconstrain(flow, in_place=True, changes=changes) is flow
    assert changes[0].path == "_transform"
    assert torch.allclose(flow.log_prob(case.x()), expected)


def test_what_is_replaced_is_said():
    case = next(case for case in CONSTRAINED if "Perm+LU" in case.name)
    flow = case.build()
    changes = []
    full = ebf.unconstrain(flow, changes=changes)
    assert len(changes) == 1
    assert changes[0].new == "FullLinear"
    assert changes[0].old.startswith("LULinear after ")
    assert "Permutation" in changes[0].old
    assert len(full._transform._transforms) == len(flow._transform._transforms) - 1
    ebf.unconstrain(full, changes=changes)
    assert len(changes) == 1, "nothing was left to replace"


def test_a_shared_layer_stays_shared():
    case = next(case for case in CONSTRAINED if case.name.startswith("Shared"))
    full = ebf.unconstrain(case.build())
    layers = [step.module for step in ebf.wrap(full).plan.steps if step.class_name == "FullLinear"]
    assert len(layers) == 2
    assert layers[0] is layers[1]


# smooth

OWN_KINKS = ("Piecewise", "Spline", "Planar", "NSF")  # not those of a network
KINKED = [case for case in SUPPORTED if "relu" in case.name and not any(name in case.name for name in OWN_KINKS)]


@pytest.mark.parametrize("case", KINKED, ids=str)
def test_smooth_replaces_every_relu(case: Case):
    flow, x, context = case.build(), case.x(), case.context()
    before = ebf.describe(flow)
    changes = []
    smoothed = ebf.smooth(flow, "softplus", sharpness=1e4, changes=changes)
    jumping = [row for row in before if row.smoothness == "score jumps"]
    assert jumping
    assert changes
    assert not any(row.smoothness == "score jumps" for row in ebf.describe(smoothed))
    assert all(path.startswith(("_transform", "flows", "transform")) for path, _, _ in changes)
    old, new = ebf.wrap(flow), ebf.wrap(smoothed)
    assert torch.allclose(new.log_prob(x, context), old.log_prob(x, context), atol=0.05, rtol=1e-3)
    assert any(row.smoothness == "score jumps" for row in ebf.describe(flow))


@pytest.mark.parametrize("kind", Smooth.kinds)
@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_a_sharp_activation_is_near_the_old_one_and_smooth(kind, slope):
    x = torch.linspace(-3, 3, 601, dtype=torch.float64)
    old = F.leaky_relu(x, slope)
    assert (Smooth(kind, 100.0, slope)(x) - old).abs().max() < 0.01
    point = torch.tensor([-1e-7, 1e-7], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(Smooth(kind, 10.0, slope)(point).sum(), point)
    assert (gradient[0] - gradient[1]).abs() < 1e-5


@pytest.mark.parametrize("edit", [ebf.unconstrain, ebf.smooth])
def test_the_result_is_a_flow_that_wraps_and_edits_again(edit):
    """No pair any more: what was asked for by .flow or by unpacking fails at once."""
    case = CONSTRAINED[0]
    edited = edit(case.build())
    assert torch.allclose(ebf.wrap(ebf.smooth(ebf.unconstrain(edited))).log_prob(case.x()), edited.log_prob(case.x()))
    with pytest.raises(AttributeError, match="flow"):
        _ = edited.flow
    with pytest.raises(TypeError, match="cannot unpack"):
        _flow, _replaced = edited


def test_changes_are_added_to_the_list():
    changes = [ebf.Replaced("here", "Old", "New")]
    ebf.unconstrain(CONSTRAINED[0].build(), changes=changes)
    ebf.smooth(KINKED[0].build(), changes=changes)
    assert changes[0].path == "here"
    assert changes[1].new == "FullLinear"
    assert changes[2].new.startswith("Smooth(")
    for edit in (ebf.unconstrain, ebf.smooth):
        with pytest.raises(ebf.InputError, match="changes must be a list"):
            edit(CONSTRAINED[0].build(), changes=())


def test_smooth_refuses_bad_options():
    flow = KINKED[0].build()
    with pytest.raises(ebf.UnknownNameError, match="unknown activation 'slu'. Did you mean 'silu'"):
        ebf.smooth(flow, "slu")
    with pytest.raises(ebf.InputError, match="sharpness must be above 0"):
        ebf.smooth(flow, sharpness=0.0)


def test_smooth_replaces_modules_in_place_too():
    from nflows import distributions, flows, transforms

    coupling = transforms.AffineCouplingTransform(
        [1, 0], lambda i, o: Net(nn.Linear(i, 8), nn.ReLU(), nn.Linear(8, 8), nn.LeakyReLU(0.1), nn.Linear(8, o))
    )
    flow = flows.Flow(coupling, distributions.StandardNormal([2]))
    changes = []
    assert ebf.smooth(flow, in_place=True, changes=changes) is flow
    assert [(r.path, r.old) for r in changes] == [
        ("_transform.transform_net.1", "ReLU"),
        ("_transform.transform_net.3", "LeakyReLU"),
    ]
    assert coupling.transform_net[3].slope == pytest.approx(0.1)


# unconstrain(kernel_size=k): 1 × 1 convolutions become k × k ones with the same density, in the library too


DOUBLE = torch.float64


def nflows_flow(*steps, shape):
    return Flow(CompositeTransform(list(steps)), StandardNormal(list(shape)))


def normflows_flow(*flows, shape):
    return nf.NormalizingFlow(nf.distributions.DiagGaussian(shape, trainable=False), list(flows))


POINTWISE = {  # every 1 × 1 convolution of the libraries, and ours: what makes it, for this many channels
    "OneByOneConvolution": OneByOneConvolution,
    "inverted OneByOneConvolution": lambda c: InverseTransform(OneByOneConvolution(c)),
    "OneByOneConvolution after a permutation": lambda c: CompositeTransform(
        [RandomPermutation(c), OneByOneConvolution(c)]
    ),
    "FullConv2d": lambda c: ebflow_nflows.FullConv2d(c, kernel_size=1, bias=False),
    "inverted FullConv2d": lambda c: InverseTransform(ebflow_nflows.FullConv2d(c, kernel_size=1)),
    "FullConv2d in groups": lambda c: ebflow_nflows.FullConv2d(c, kernel_size=1, groups=c),
    "Invertible1x1Conv of LU factors": lambda c: nf.flows.Invertible1x1Conv(c, use_lu=True),
    "Invertible1x1Conv, full": lambda c: nf.flows.Invertible1x1Conv(c, use_lu=False),
    "reversed Invertible1x1Conv": lambda c: nf.flows.Reverse(nf.flows.Invertible1x1Conv(c, use_lu=True)),
    "FullConv2d of normflows": lambda c: ebflow_normflows.FullConv2d(c, kernel_size=1),
}


def moved(flow):
    """Other weights of the convolutions, beside the middle too: as training leaves them."""
    generator = rng(3)
    with torch.no_grad():
        for parameter in flow.parameters():
            if parameter.dim() == 4 and parameter.shape[-1] > 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter += 0.1 / math.sqrt(parameter[0].numel()) * noise
    return flow


@pytest.mark.filterwarnings("ignore:.*torch.lu is deprecated")
@pytest.mark.parametrize("name", POINTWISE)
@settings(deadline=None, max_examples=8)
@given(
    channels=st.integers(1, 4),
    kernel=st.sampled_from([3, 5]),
    more=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    padding=st.sampled_from(["zeros", "circular"]),
    seed=st.integers(0, 99),
)
def test_every_pointwise_convolution_keeps_its_density(name, channels, kernel, more, padding, seed):
    torch.manual_seed(seed)
    shape = (channels, kernel + more[0], kernel + more[1])
    layer = POINTWISE[name](channels)
    flow = perturbed((normflows_flow if isinstance(layer, nf.flows.Flow) else nflows_flow)(layer, shape=shape))
    x = torch.randn(3, *shape, generator=rng(seed), dtype=DOUBLE)
    changes = []
    full = ebf.unconstrain(flow, kernel, padding_mode=padding, changes=changes)
    assert [change.new for change in changes] == ["FullConv2d"]
    torch.testing.assert_close(full.log_prob(x), flow.log_prob(x), rtol=1e-8, atol=1e-8)
    (step,) = ebf.wrap(full).plan.steps
    assert step.module.setting.kernel_size == (kernel, kernel)
    assert step.module.setting.padding_mode == padding
    assert not step.inverted
    model = ebf.wrap(moved(full))
    torch.testing.assert_close(full.log_prob(x[:1])[0], log_prob_by_jacobian(model, x[:1])[0], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(model.log_prob(x), full.log_prob(x), rtol=1e-8, atol=1e-8)
    with torch.no_grad():
        latents, _ = model.plan.encode(x, None)
        torch.testing.assert_close(model.plan.decode(latents, None), x, rtol=1e-8, atol=1e-8)


def normflows_glow(linear):
    """A MultiscaleFlow for images of 2 x 12 x 12: two levels of a GlowBlock, with LU factors or a FullConv2d."""
    levels, bases = [], []
    for channels, side in ((16, 3), (8, 6)):  # from noise to data
        block = nf.flows.GlowBlock(channels, 4, use_lu=True)
        if linear == "full":
            block.flows[1] = ebflow_normflows.FullConv2d(channels, kernel_size=1, init="orthogonal")
        levels.append([block, nf.flows.Squeeze()])
        finished = channels if side == 3 else channels // 2
        bases.append(nf.distributions.DiagGaussian((finished, side, side), trainable=False))
    return nf.MultiscaleFlow(bases, levels, [nf.flows.Merge("channel")], class_cond=False)


@pytest.fixture
def double():
    """nflows draws its noise in torch's default dtype."""
    torch.set_default_dtype(DOUBLE)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double")
@pytest.mark.filterwarnings("ignore:.*torch.lu is deprecated")
@pytest.mark.parametrize("library", ["nflows", "normflows"])
@pytest.mark.parametrize("linear", ["full", "lu"])
@pytest.mark.parametrize("padding", ["zeros", "circular"])
def test_a_glow_of_several_levels_works_in_its_library(library, linear, padding):
    torch.manual_seed(0)
    if library == "nflows":
        flow = build("glow", (2, 12, 12), linear=linear, blocks=1, hidden=4)
    else:
        flow = normflows_glow(linear)
    x = torch.randn(3, 2, 12, 12, generator=rng(), dtype=DOUBLE)
    ebf.wrap(flow).initialize(x)
    flow.eval()
    changes = []
    full = ebf.unconstrain(flow, 3, padding_mode=padding, changes=changes)
    assert len(changes) == 2
    before, after = ebf.wrap(flow), ebf.wrap(moved(full))
    unmoved = ebf.wrap(ebf.unconstrain(flow, 3, padding_mode=padding))
    torch.testing.assert_close(unmoved.log_prob(x), before.log_prob(x), rtol=1e-8, atol=1e-8)
    assert not torch.allclose(after.log_prob(x), before.log_prob(x), rtol=1e-6)
    own = after.adapter.own_log_prob
    torch.testing.assert_close(after.log_prob(x), own(full, x, None), rtol=1e-8, atol=1e-8)
    drawn = full.sample(2) if library == "nflows" else full.sample(2)[0]
    torch.testing.assert_close(after.log_prob(drawn), own(full, drawn, None), rtol=1e-8, atol=1e-8)
    torch.manual_seed(5)
    theirs = full.sample(4)
    torch.manual_seed(5)
    torch.testing.assert_close(full.sample(4), theirs)  # from the cached factors


@pytest.mark.filterwarnings("ignore:.*torch.lu is deprecated")
@pytest.mark.parametrize("use_lu", [True, False])
def test_glow_blocks_of_normflows(use_lu):
    torch.manual_seed(0)
    blocks = [nf.flows.GlowBlock(4, 8, use_lu=use_lu) for _ in range(2)]
    flow = perturbed(normflows_flow(*blocks, nf.flows.Squeeze(), shape=(4, 4, 4)))
    x = torch.randn(3, 1, 8, 8, generator=rng(), dtype=DOUBLE)
    ebf.wrap(flow).initialize(x)
    full = ebf.unconstrain(flow, 3)
    torch.testing.assert_close(full.log_prob(x), flow.log_prob(x), rtol=1e-8, atol=1e-8)
    drawn, log_prob = moved(full).sample(5)
    torch.testing.assert_close(full.log_prob(drawn), log_prob, rtol=1e-8, atol=1e-8)
    found = [type(part).__name__ for part in full.modules()]
    assert found.count("FullConv2d") == 2
    assert "Invertible1x1Conv" not in found


def test_other_layers_become_what_they_become_without_a_kernel():
    torch.manual_seed(0)
    flow = nflows_flow(OneByOneConvolution(3), ebflow_nflows.FullConv2d(3, kernel_size=5), shape=(3, 6, 6))
    flow._transform._transforms[0].requires_grad_(False)
    full = ebf.unconstrain(flow, 3)
    first, second = full._transform._transforms
    assert (first.setting.kernel_size, second.setting.kernel_size) == ((3, 3), (5, 5))
    assert not any(parameter.requires_grad for parameter in first.parameters())
    assert all(parameter.requires_grad for parameter in second.parameters())
    changes = []
    again = ebf.unconstrain(full, 3, changes=changes)  # nothing is left to do, and that is no error
    assert changes == []
    x = torch.randn(2, 3, 6, 6, generator=rng())
    torch.testing.assert_close(again.log_prob(x), flow.log_prob(x))
    plain = ebf.unconstrain(flow)
    assert plain._transform._transforms[0].setting.kernel_size == (1, 1)


def test_a_layer_that_is_used_twice_is_as_large_as_its_smallest_map():
    torch.manual_seed(0)
    with pytest.warns(
        ebf.EBFlowWarning, match=r"kernel_size=5: these convolutions stay 1 × 1: \S+  FullConv2d .*3 x 3"
    ):
        full = ebf.unconstrain(build("glow", (4, 12, 12), blocks=1, hidden=4), 5)
    sizes = [part.setting.kernel_size for part in full.modules() if isinstance(part, ebflow_nflows.FullConv2d)]
    assert sizes == [(5, 5), (1, 1)]


def test_what_cannot_be_is_said():
    torch.manual_seed(0)
    flow = nflows_flow(OneByOneConvolution(3), shape=(3, 4, 6))
    for kernel, words in (
        (2, "kernel_size=2 is even, so no tap is its middle: use 1 or 3"),
        (0, "kernel_size must be an integer, at least 1, got 0"),
        (3.0, "kernel_size must be an integer, at least 1, got 3.0"),
        (5, r"no 1 × 1 convolution that can have such a kernel, but too small ones: \S+  OneByOneConv.* has 4 x 6 pix"),
    ):
        with pytest.raises(ebf.InputError, match=words):
            ebf.unconstrain(flow, kernel)
    with pytest.raises(ebf.InputError, match=r"unknown padding_mode 'reflect'. Valid names: circular, zeros"):
        ebf.unconstrain(flow, 3, padding_mode="reflect")
    with pytest.raises(
        ebf.InputError, match="kernel_size=3: the flow has no 1 × 1 convolution that can have such a ker"
    ):
        ebf.unconstrain(build("fc", (4,)), 3)
    changes = []
    ebf.unconstrain(flow, 1, changes=changes)
    assert changes == [ebf.Replaced("_transform._transforms.0", "OneByOneConvolution", "FullConv2d")]
