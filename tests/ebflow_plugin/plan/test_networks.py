"""Couplings in closed form: their networks against autograd, and what must not be followed."""

import gc
import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nflows import distributions, flows, transforms
from nflows.nn import nets
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import ebflow_plugin as ebf
from autograd_oracle import assert_as_autograd, assert_close
from ebflow_nflows import FullLinear
from ebflow_plugin.objectives import DSM, SSM
from ebflow_plugin.plan import networks
from ebflow_plugin.plan.derivatives import closed_steps
from ebflow_plugin.plan.networks import Network, follow, followed
from randomness import rng

D = 5
FUNCTIONS = [F.silu, torch.tanh, torch.sigmoid, F.gelu, F.elu, F.softplus, F.relu, F.leaky_relu]
MODULES = [
    *(nn.SiLU(), nn.Tanh(), nn.Sigmoid(), nn.GELU(), nn.ELU(0.7), nn.Softplus(2.0, 1.5), nn.ReLU(), nn.LeakyReLU(0.2)),
]


def flow_of(activation=F.silu, kind=transforms.AffineCouplingTransform, context=None, blocks=1, **options):
    """Couplings in both directions between full layers, all weights moved away from the start."""
    torch.manual_seed(0)

    def coupling():
        return kind(
            torch.arange(D) % 2,
            lambda i, o: nets.ResidualNet(
                i, o, hidden_features=4, activation=activation, context_features=context, num_blocks=blocks, **options
            ),
        )

    parts = [FullLinear(D, init="normal"), coupling(), FullLinear(D, init="normal")]
    parts.append(transforms.InverseTransform(coupling()))
    flow = flows.Flow(transforms.CompositeTransform(parts), distributions.StandardNormal([D])).double()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return flow


def assert_same(model, context=None, count=1, gradient=True, again=False):
    assert_as_autograd(model, (D,), context, count, gradient, again)


@pytest.mark.parametrize("activation", FUNCTIONS, ids=lambda one: one.__name__)
def test_every_activation_in_a_coupling(activation):
    model = ebf.wrap(flow_of(activation))
    assert closed_steps(model.plan) == 4
    assert_same(model)
    assert_same(model, count=2, gradient=False)
    assert_same(model, count=0)


@pytest.mark.parametrize("activation", MODULES, ids=repr)
def test_derivatives_of_activations(activation):
    """f and its three derivatives, one from another by autograd."""
    x = torch.linspace(-3, 3, 50, dtype=torch.float64, requires_grad=True)
    (operation,) = follow(activation)
    assert operation.layer is not None
    found = list(operation.layer.derivatives(x))
    torch.testing.assert_close(found[0], activation(x))
    for one, two in pairwise(found):
        (slope,) = torch.autograd.grad(one.sum(), x, retain_graph=True, materialize_grads=True)
        torch.testing.assert_close(two, slope, rtol=1e-11, atol=1e-12)


@given(count=st.integers(0, 3), gradient=st.booleans(), conditional=st.booleans(), blocks=st.integers(0, 2))
@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("kind", [transforms.AffineCouplingTransform, transforms.AdditiveCouplingTransform])
def test_contexts_blocks_and_directions(kind, count, gradient, conditional, blocks):
    model = ebf.wrap(flow_of(torch.tanh, kind, 3 if conditional else None, blocks))
    context = torch.randn(6, 3, dtype=torch.float64) if conditional else None
    assert_same(model, context, count, gradient)


@pytest.mark.parametrize("count", [0, 2])
def test_gradients_can_be_differentiated_again(count):
    assert_same(ebf.wrap(flow_of(F.silu)), count=count, again=True)


@pytest.mark.parametrize("objective", [SSM, DSM])
def test_losses_and_their_gradients_equal_those_of_autograd(objective, monkeypatch):
    model = ebf.wrap(flow_of())
    x = torch.randn(7, D, dtype=torch.float64)

    def found():
        loss = objective(model, generator=rng(3))(x)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)]

    ours = found()
    monkeypatch.setattr(networks, "follow_class", None)
    monkeypatch.setattr("ebflow_plugin.plan.couplings.followed", lambda operations: None)
    assert closed_steps(model.plan) == 1
    assert_close(ours, found(), 1e-10)


def hooked(net):
    net.blocks[0].linear_layers[0].register_forward_hook(lambda module, args, out: 2 * out)


def pre_hooked(net):
    net.final_layer.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def patched(net):
    net.initial_layer.forward = lambda x: 2 * F.linear(x, net.initial_layer.weight)


def parametrized(net):
    parametrizations.weight_norm(net.final_layer)


def subclassed(net):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    net.final_layer.__class__ = Doubled


def own_function(net):
    net.blocks[0].activation = lambda x: torch.tanh(2 * x)


def in_place(net):
    net.blocks[0].activation = nn.SiLU(inplace=True)


def own_module(net):
    net.blocks[0].activation = nn.Sequential(nn.Tanh(), nn.LayerNorm(4, dtype=torch.float64))


@pytest.mark.parametrize(
    "change", [hooked, pre_hooked, patched, parametrized, subclassed, own_function, in_place, own_module]
)
def test_what_somebody_changed_is_differentiated_as_it_is(change):
    """After wrapping, too: the networks are looked at for each batch."""
    flow = flow_of()
    model = ebf.wrap(flow)
    assert closed_steps(model.plan) == 4
    change(flow._transform._transforms[1].transform_net)
    assert closed_steps(model.plan) == 1
    assert [row.second_derivatives for row in model.report] == ["product", *["double backward"] * 3]
    assert_same(model)


def test_batch_norm_in_eval_mode_and_dropout():
    model = ebf.wrap(flow_of(use_batch_norm=True).eval())
    assert closed_steps(model.plan) == 1
    assert_same(model)
    model = ebf.wrap(flow_of(dropout_probability=0.5).eval())
    assert closed_steps(model.plan) == 4
    assert_same(model)


def test_a_coupling_that_somebody_patched():
    flow = flow_of()
    coupling = flow._transform._transforms[1]
    coupling._scale_and_shift = lambda given: (torch.ones_like(given[:, 2:]), given[:, :2])
    with pytest.warns(ebf.errors.UnknownStepWarning):
        assert closed_steps(ebf.wrap(flow).plan) == 1


def test_one_network_is_one_operation():
    step = ebf.wrap(flow_of()).plan.steps[1]
    assert [type(each) for each in step.operations()][1] is Network
    assert len(step.operations()) == 3


def test_weights_that_change_before_backward_are_noticed():
    model = ebf.wrap(flow_of())
    loss = SSM(model)(torch.randn(4, D, dtype=torch.float64))
    with torch.no_grad():
        model.flow._transform._transforms[1].transform_net.final_layer.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_loss_without_backward_leaves_nothing_in_memory():
    """Outputs that their own node held would be a cycle, which nobody collects."""
    model = ebf.wrap(flow_of())
    step, seen = model.plan.steps[1], []
    for _ in range(2):
        value = step.operations()[0].expand(torch.randn(4, D, dtype=torch.float64), None).value[2]
        made = step.operations()[1].passed(value.requires_grad_(), [torch.ones_like(value)], None)
        back, _ = made.pull(torch.ones_like(made.value))
        seen += [weakref.ref(made.value), weakref.ref(back)]
        del made, back, value
    gc.collect()
    assert [one() for one in seen] == [None] * 4


def test_half_precision_goes_its_own_way():
    model = ebf.wrap(flow_of().float())
    x = torch.randn(4, D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        SSM(model)(x).backward()


def test_unknown_parts_are_opaque():
    assert followed(follow(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)))) is None
    assert followed(follow(lambda x: x)) is None
    assert len(followed(follow(nn.Sequential(nn.Linear(2, 3), nn.Identity(), nn.Tanh())))) == 2


def test_a_chain_acts_on_the_last_dimension():
    """nflows hands images to any network; a ResidualNet takes their columns."""

    def coupling():
        return transforms.AdditiveCouplingTransform(
            torch.tensor([1, 0]), lambda i, o: nets.ResidualNet(4, 4, 5, activation=torch.tanh)
        )

    parts = [coupling(), transforms.ReversePermutation(2), transforms.InverseTransform(coupling())]
    base = distributions.StandardNormal([2, 3, 4])
    model = ebf.wrap(flows.Flow(transforms.CompositeTransform(parts), base).double())
    assert closed_steps(model.plan) == 3
    for count in (0, 1, 2):
        assert_as_autograd(model, (2, 3, 4), count=count)


@pytest.mark.parametrize("slope", [-0.3, 0.0, 0.2, 1.0, 2.0])
def test_slopes_of_a_leaky_relu_as_torch_has_them(slope):
    """At 0 too, where networks that start from zeros are."""
    x = torch.tensor([-1.5, -0.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    (operation,) = follow(nn.LeakyReLU(slope))
    value, found = operation.layer.derivatives(x)
    (expected,) = torch.autograd.grad(F.leaky_relu(x, slope).sum(), x)
    assert torch.equal(found, expected)
    assert torch.equal(value, F.leaky_relu(x, slope))


@pytest.mark.parametrize(
    "options", [{"stride": 2}, {"padding": "same"}, {"padding_mode": "circular", "padding": 1}], ids=str
)
def test_convolutions_of_other_kinds_are_opaque(options):
    assert followed(follow(nn.Conv2d(2, 3, 3, **options))) is None
    assert len(followed(follow(nn.Conv2d(2, 3, 3, padding=1)))) == 1
