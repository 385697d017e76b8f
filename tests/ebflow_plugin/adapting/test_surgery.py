"""unconstrain() and smooth()."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ebflow_plugin as ebf
from cases import SUPPORTED, Case
from ebflow_plugin.adapting.surgery import Smooth, _features
from nflows_small import Net


def constrained(case: Case) -> bool:
    model = ebf.wrap(case.build())
    return any(_features(model.adapter, step) for step in model.plan.steps)


CONSTRAINED = [case for case in SUPPORTED if constrained(case)]


@pytest.mark.parametrize("case", CONSTRAINED, ids=str)
def test_unconstrain_keeps_the_density(case: Case):
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


@pytest.mark.parametrize("case", CONSTRAINED, ids=str)
def test_unconstrained_layers_are_trainable_and_invertible(case: Case):
    flow, x, context = case.build(), case.x(), case.context()
    ebf.wrap(flow).initialize(x, context)
    model = ebf.wrap(ebf.unconstrain(flow))
    weights = [p for step in model.plan.steps if step.class_name.startswith("Full") for p in step.module.parameters()]
    if not any(weight.requires_grad for weight in weights):
        assert not any(parameter.requires_grad for parameter in flow.parameters())
        pytest.skip("a fixed layer stays fixed")
    gradients = torch.autograd.grad(model.score(x, context).square().sum(), weights, allow_unused=True)
    assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)
    if case.own_inverse:
        embedded = model.plan.embed(context)
        latents, _ = model.plan.encode(x, embedded)
        assert torch.allclose(model.plan.decode(latents, embedded), x, atol=max(1e-6, 10 * case.inverse_tol))


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


def test_a_shared_layer_stays_shared():
    case = next(case for case in CONSTRAINED if case.name.startswith("Shared"))
    full = ebf.unconstrain(case.build())
    layers = [step.module for step in ebf.wrap(full).plan.steps if step.class_name == "FullLinear"]
    assert len(layers) == 2
    assert layers[0] is layers[1]


def test_nothing_to_replace():
    case = next(case for case in SUPPORTED if case.name.startswith("ActNorm"))
    changes = []
    ebf.unconstrain(case.build(), changes=changes)
    assert changes == []


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
