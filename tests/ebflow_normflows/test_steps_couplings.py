"""The couplings of normflows in closed form: against autograd, and what must not be followed."""

from functools import partial

import normflows as nf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from normflows import nets
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import ebflow_plugin as ebf
from autograd_oracle import assert_as_autograd, assert_close, is_closed, moved
from ebflow_plugin.errors import InputError
from ebflow_plugin.objectives import SSM
from ebflow_plugin.plan.derivatives import closed_steps, derivatives

D = 4
SPLITS = ("channel", "channel_inv", "checkerboard", "checkerboard_inv")
many = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


def wrapped(*steps, features=D, base=None):
    base = base or nf.distributions.DiagGaussian(features)
    return ebf.wrap(moved(nf.NormalizingFlow(base, list(steps))))


def net(inputs, outputs, activation=nn.SiLU):
    return nn.Sequential(nn.Linear(inputs, 5), activation(), nn.Linear(5, outputs))


def mask(features=D):
    return (torch.arange(features) % 2).float()


def block(network=None, **options):
    return nf.flows.AffineCouplingBlock(network or net(2, 4), **options)


@given(
    features=st.integers(1, 3),
    scale_map=st.sampled_from(["exp", "sigmoid", "sigmoid_inv", None]),
    split=st.sampled_from(SPLITS),
    turned=st.booleans(),
    count=st.integers(0, 3),
    gradient=st.booleans(),
    rows=st.integers(1, 4),
)
@many
def test_coupling_blocks(features, scale_map, split, turned, count, gradient, rows):
    sizes = features, features * (1 if scale_map is None else 2)
    options = {"scale": scale_map is not None, "scale_map": scale_map or "exp", "split_mode": split}
    steps = [block(net(*sizes), **options), nf.flows.LULinearPermute(2 * features), block(net(*sizes), **options)]
    steps[0] = nf.flows.Reverse(steps[0]) if turned else steps[0]
    model = wrapped(*steps, features=2 * features)
    assert is_closed(model)
    assert_as_autograd(model, (2 * features,), count=count, gradient=gradient, rows=rows)


@given(
    features=st.integers(1, 4),
    kinds=st.sampled_from([(True, True), (True, False), (False, True)]),
    turned=st.booleans(),
    soft=st.booleans(),
    count=st.integers(0, 3),
    gradient=st.booleans(),
)
@many
def test_masked_couplings(features, kinds, turned, soft, count, gradient):
    """A mask of any numbers too: what normflows makes of it is no coupling, but has derivatives."""
    scales, shifts = (net(features, features) if kind else None for kind in kinds)
    bits = torch.rand(features) if soft else mask(features)
    step = nf.flows.MaskedAffineFlow(bits, shifts, scales)
    model = wrapped(nf.flows.Reverse(step) if turned else step, features=features)
    assert is_closed(model)
    assert_as_autograd(model, (features,), count=count, gradient=gradient)


def test_masked_couplings_of_images():
    shape = (2, 3, 4)
    bits = (torch.arange(24) % 2).float().view(shape)
    model = wrapped(nf.flows.MaskedAffineFlow(bits, net(4, 4), net(4, 4)), features=shape)
    assert is_closed(model)
    assert_as_autograd(model, shape, count=2)


@pytest.mark.parametrize("scale_map", ["exp", "sigmoid"])
def test_one_shift_and_scale_for_all_features(scale_map):
    """normflows broadcasts them, and counts the scale once in its log-det: the energy is the one that it has."""
    model = wrapped(block(net(2, 2), scale_map=scale_map), block(net(2, 1), scale=False))
    assert is_closed(model)
    assert_as_autograd(model, (D,), count=2)
    model = wrapped(nf.flows.MaskedAffineFlow(mask(), net(D, 1), net(D, 1)))
    assert is_closed(model)
    assert_as_autograd(model, (D,), count=2)


def test_split_coupling_and_merge_as_steps_of_their_own():
    steps = [nf.flows.Split(), nf.flows.AffineCoupling(net(2, 4)), nf.flows.Merge()]
    model = wrapped(*steps)
    assert is_closed(model)
    assert_as_autograd(model, (D,), count=2)


NETWORKS = {
    "MLP": lambda: nets.MLP([2, 5, 5, 4]),
    "leaky MLP": lambda: nets.MLP([2, 5, 4], leaky=0.1),
    "MLP that starts at 0": lambda: nets.MLP([2, 5, 4], init_zeros=True),
    "tanh at the end": lambda: nets.MLP([2, 5, 4], output_fn="tanh", score_scale=0.5, output_scale=3.0),
    "sigmoid at the end": lambda: nets.MLP([2, 5, 4], output_fn="sigmoid"),
    "dropout": lambda: nets.MLP([2, 5, 4], dropout=0.5).eval(),
    "ResidualNet": lambda: nets.ResidualNet(2, 4, 5, activation=F.silu),
    "one activation twice": lambda: (lambda act: nn.Sequential(nn.Linear(2, 4), act, nn.Linear(4, 4), act))(nn.Tanh()),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_that_are_followed(name):
    model = wrapped(block(NETWORKS[name]()), nf.flows.Permute(D))
    assert is_closed(model)
    assert_as_autograd(model, (D,), count=2)


def frozen_zeros():
    """All activations at exactly 0, where two definitions of a slope could differ."""
    network = nets.MLP([2, 5, 4])
    for parameter in network.parameters():
        nn.init.zeros_(parameter)
    return network


def test_activations_at_zero():
    model = ebf.wrap(nf.NormalizingFlow(nf.distributions.DiagGaussian(D), [block(frozen_zeros())]).double())
    assert is_closed(model)
    assert_as_autograd(model, (D,))


OPAQUE = {
    "clamped": lambda: nets.MLP([2, 5, 4], output_fn="clampexp"),
    "preprocessed": lambda: nets.ResidualNet(2, 4, 5, preprocessing=nn.Tanh()),
    "batch norm": lambda: nets.ResidualNet(2, 4, 5, use_batch_norm=True).eval(),
    "LayerNorm": lambda: nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4)),
    "in place": lambda: nn.Sequential(nn.Linear(2, 4), nn.SiLU(inplace=True), nn.Linear(4, 4)),
    "trained scale": lambda: nn.Sequential(nn.Linear(2, 4), trained_scale()),
}


def trained_scale():
    layer = nf.utils.nn.ConstScaleLayer(2.0)
    del layer.scale
    layer.scale = nn.Parameter(torch.tensor(2.0))
    return layer


@pytest.mark.parametrize("name", OPAQUE)
def test_networks_that_are_not_followed(name):
    model = wrapped(block(OPAQUE[name]()))
    assert closed_steps(model.plan) == 0
    assert [row.second_derivatives for row in model.report] == ["double backward"]
    assert_as_autograd(model, (D,))


@pytest.mark.parametrize("split", ["channel", "channel_inv", "checkerboard"])
@pytest.mark.parametrize("scale", [True, False])
def test_glow_blocks(split, scale):
    block = nf.flows.GlowBlock(4, 3, scale=scale, split_mode=split, leaky=0.1, init_zeros=False)
    block.flows[-1].data_dep_init_done.fill_(1.0)
    model = wrapped(block, features=(4, 2, 6))
    assert is_closed(model)
    assert_as_autograd(model, (4, 2, 6), count=2)


@given(
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.integers(1, 2),
    groups=st.sampled_from([1, 2]),
    bias=st.booleans(),
    count=st.integers(0, 2),
)
@many
def test_convolutions(kernel, dilation, groups, bias, count):
    padding = tuple(dilation * (size - 1) for size in kernel)
    convolve = partial(nn.Conv2d, kernel_size=kernel, dilation=dilation, groups=groups, bias=bias)
    network = nn.Sequential(convolve(2, 4, padding=padding), nn.Tanh(), convolve(4, 4))  # larger, then as before
    model = wrapped(block(network), features=(4, 4, 5))
    assert is_closed(model)
    assert_as_autograd(model, (4, 4, 5), count=count)


def hooked(coupling):
    coupling.param_map[0].register_forward_hook(lambda module, args, out: 2 * out)


def network_hooked(coupling):
    coupling.param_map.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def patched(coupling):
    coupling.param_map[2].forward = lambda x: 2 * F.linear(x, coupling.param_map[2].weight)


def parametrized(coupling):
    parametrizations.weight_norm(coupling.param_map[0])


def subclassed(coupling):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    coupling.param_map[2].__class__ = Doubled


def replaced(coupling):
    coupling.param_map[1] = nn.Softsign()


@pytest.mark.parametrize("change", [hooked, network_hooked, patched, parametrized, subclassed, replaced])
def test_what_somebody_changed_is_differentiated_as_it_is(change):
    """After wrapping, too: the networks are looked at for each batch."""
    coupling = block()
    model = wrapped(coupling)
    assert is_closed(model)
    change(coupling.flows[1])
    assert closed_steps(model.plan) == 0
    assert_as_autograd(model, (D,))


def test_a_coupling_that_somebody_changed_after_the_walk():
    """The plan that a caller holds is that of before."""
    coupling = block()
    model = wrapped(coupling)
    plan, inner = model.plan, coupling.flows[1]
    handle = inner.register_forward_hook(lambda module, args, out: out)
    assert closed_steps(plan) == 0
    handle.remove()
    assert closed_steps(plan) == 1
    inner.inverse = lambda z: nf.flows.AffineCoupling.inverse(inner, z)
    assert closed_steps(plan) == 0


def test_the_scale_map_is_read_anew():
    coupling = block()
    model = wrapped(coupling)
    coupling.flows[1].scale_map = "sigmoid"
    assert is_closed(model)
    assert_as_autograd(model, (D,))
    coupling.flows[1].scale_map = "cubic"
    assert closed_steps(model.plan) == 0
    with pytest.raises(NotImplementedError, match="This scale map is not implemented"):
        SSM(model)(torch.randn(2, D, dtype=torch.float64))


@pytest.mark.parametrize("where", ["scale", "shift"])
def test_infinities_become_nan_as_normflows_has_it(where):
    """e^-inf = 0 would hide an infinite scale."""
    nets_of = [net(D, D), net(D, D)]
    model = wrapped(nf.flows.MaskedAffineFlow(mask(), *nets_of))
    with torch.no_grad():
        nets_of[where == "scale"][2].bias.fill_(float("inf"))
    x, v = torch.randn(2, 3, D, dtype=torch.float64)
    for closed in (True, False):
        found = derivatives(model.plan, x, directions=[v], energy=True, closed=closed)
        assert found.energy.isnan().all()
        assert found.curvatures[0].isnan().all()


def test_a_mask_of_another_shape():
    model = wrapped(nf.flows.MaskedAffineFlow(mask(), net(D, D), net(D, D)))
    with pytest.raises(InputError, match="a mask of shape"):
        derivatives(model.plan, torch.zeros(2, 3, D, dtype=torch.float64), directions=[torch.zeros(2, 3, D)])


def test_a_context_is_for_others():
    """A coupling of normflows takes none; a ResidualNet that could, gets none."""
    network = nets.ResidualNet(2, 4, 5, activation=torch.tanh)
    base = nf.distributions.base.ConditionalDiagGaussian(D, nn.Linear(3, 2 * D))
    flow = nf.ConditionalNormalizingFlow(base, [block(network)])
    model = ebf.wrap(moved(flow))
    assert closed_steps(model.plan) == 1
    assert_as_autograd(model, (D,), torch.randn(6, 3, dtype=torch.float64), count=2)


@pytest.mark.parametrize("step", [block, lambda: nf.flows.MaskedAffineFlow(mask(), net(D, D), net(D, D))])
def test_a_loss_and_its_gradients(step, monkeypatch):
    model = wrapped(step(), nf.flows.LULinearPermute(D), step())
    x = torch.randn(7, D, dtype=torch.float64)

    def found():
        loss = SSM(model, generator=torch.Generator().manual_seed(3))(x)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)]

    assert is_closed(model)
    ours = found()
    monkeypatch.setattr("ebflow_plugin.plan.couplings.followed", lambda operations: None)
    assert closed_steps(model.plan) == 0
    assert_close(ours, found(), 1e-10)


def test_gradients_can_be_differentiated_again():
    model = wrapped(block(), nf.flows.MaskedAffineFlow(mask(), net(D, D), net(D, D)))
    assert_as_autograd(model, (D,), again=True)


def test_half_precision_goes_its_own_way():
    model = wrapped(block(), nf.flows.MaskedAffineFlow(mask(), net(D, D), net(D, D))).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        SSM(model)(torch.randn(4, D)).backward()


def test_transforms_of_torch_func():
    model = wrapped(block(), nf.flows.MaskedAffineFlow(mask(), net(D, D), net(D, D)))
    x, v = torch.randn(2, 3, D, dtype=torch.float64)

    found = torch.func.jvp(lambda one: derivatives(model.plan, one, directions=[v]).curvatures[0], (x,), (v,))[0]
    torch.testing.assert_close(found, derivatives(model.plan, x, directions=[v]).curvatures[0])
