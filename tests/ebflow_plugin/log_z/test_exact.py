import pytest
import torch
from nflows import distributions, flows, transforms
from torch import nn

import ebflow_plugin as ebf
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import LinearStep
from ebflow_plugin.training.evaluation import LikelihoodSum

D = 5


def make_flow(seed=0):
    torch.manual_seed(seed)
    layers = [transforms.NaiveLinear(D, orthogonal_initialization=False), transforms.ActNorm(D), transforms.LULinear(D)]
    flow = flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([D])).double()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return flow.eval()


def log_z(flow):
    naive, actnorm, lu = flow._transform._transforms
    total = torch.linalg.slogdet(naive._weight)[1] + actnorm.log_scale.sum() + torch.log(lu.upper_diag).sum()
    return -total.detach()


def optimiser_step(flow):
    optimiser = torch.optim.Adam(flow.parameters(), lr=0.1)
    flow.log_prob(torch.randn(4, D, dtype=torch.float64)).mean().backward()
    optimiser.step()


def fused_step(flow):
    optimiser = torch.optim.AdamW(flow.parameters(), lr=0.1, fused=True)
    flow.log_prob(torch.randn(4, D, dtype=torch.float64)).mean().backward()
    optimiser.step()


def edit_in_place(flow):
    with torch.no_grad():
        flow._transform._transforms[0]._weight.mul_(2.0)


def edit_data(flow):
    flow._transform._transforms[1].log_scale.data.add_(1.0)


def load(flow):
    flow.load_state_dict(make_flow(seed=1).state_dict())


def swap(flow):
    weight = flow._transform._transforms[0]._weight
    flow._transform._transforms[0]._weight = nn.Parameter(3.0 * weight.detach())


EDITS = [optimiser_step, fused_step, edit_in_place, edit_data, load, swap, lambda flow: flow.float().double()]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_log_z_is_never_stale(edit):
    flow = make_flow()
    model = ebf.wrap(flow)
    with torch.no_grad():
        before = model.log_z()
        assert torch.allclose(before, log_z(flow))
        torch.enable_grad()(edit)(flow)
        assert torch.allclose(model.log_z(), log_z(flow), rtol=1e-12)
        assert torch.allclose(before, log_z(flow)) == (edit is EDITS[-1])


def test_dtype_changes_are_noticed():
    model = ebf.wrap(make_flow())
    with torch.no_grad():
        exact = model.log_z()
        single = model.float().log_z()
    assert single.dtype == torch.float32
    assert torch.allclose(single.double(), exact, atol=1e-5)


def test_log_z_is_computed_once(monkeypatch):
    model = ebf.wrap(make_flow())
    calls = []
    factor = torch.linalg.lu_factor_ex
    monkeypatch.setattr(torch.linalg, "lu_factor_ex", lambda weight: calls.append(1) or factor(weight))
    x = torch.randn(3, D, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(3):
            model.log_prob(x)
            model.log_z()
    assert len(calls) == 1


def test_log_z_has_the_gradient_of_maximum_likelihood():
    flow = make_flow()
    model = ebf.wrap(flow)
    with torch.no_grad():
        model.log_z()  # a kept value must not stand in for one with a graph
    x = torch.randn(4, D, dtype=torch.float64)
    model.log_prob(x).mean().backward()
    ours = {name: parameter.grad.clone() for name, parameter in flow.named_parameters()}
    flow.zero_grad()
    flow.log_prob(x).mean().backward()
    for name, parameter in flow.named_parameters():
        assert torch.allclose(ours[name], parameter.grad, rtol=1e-9), name


def test_a_frozen_linear_layer_is_kept_with_grad_mode_on(monkeypatch):
    flow = make_flow().requires_grad_(False)
    model = ebf.wrap(flow)
    model.log_z()
    monkeypatch.setattr(torch.linalg, "lu_factor_ex", None)  # calling it again would raise
    model.log_z()


def test_a_singular_layer_is_named():
    flow = make_flow()
    with torch.no_grad():
        flow._transform._transforms[0]._weight[0] = 0.0
        flow._transform._transforms[1].log_scale[0] = float("nan")
    model = ebf.wrap(flow)
    x = torch.randn(2, D, dtype=torch.float64)
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode, pytest.raises(ebf.SingularError, match=r"2 of 3 linear steps") as error:
            model.log_prob(x)
        assert "_transform._transforms.0  NaiveLinear" in str(error.value)
        assert "_transform._transforms.1  ActNorm" in str(error.value)


def test_log_z_says_when_it_needs_a_shape():
    class Laplace(nn.Module):
        def log_prob(self, inputs, context=None):
            return -inputs.abs().flatten(1).sum(1)

    flow = flows.Flow(transforms.ActNorm(2), Laplace()).eval()
    model = ebf.wrap(flow)
    with pytest.raises(ebf.InputError, match="event_shape"):
        model.log_z()
    assert model.log_z((2, 3, 3)).shape == ()
    model.energy(torch.randn(4, 2, 3, 3))
    with pytest.raises(ebf.InputError, match="event_shape"):  # it does not remember data
        model.log_z()
    with pytest.raises(ebf.InputError, match="method 'guess'"):
        model.log_z((2, 3, 3), method="guess")


def test_the_shape_matters():
    flow = flows.Flow(transforms.ActNorm(2), distributions.StandardNormal([2, 3, 3])).eval()
    with torch.no_grad():
        flow._transform.log_scale.fill_(1.0)
        model = ebf.wrap(flow)
        assert model.log_z() == -18.0
        assert model.log_z((2, 1, 1)) == -2.0


@pytest.mark.parametrize("calibrate", [False, True])
def test_log_prob_and_evaluations_share_their_log_z(monkeypatch, calibrate):
    """They take turns in a training loop: the linear steps behind the preprocessing are computed once for both."""
    model = ebf.wrap(make_flow(), preprocess=[ebf.Logit()])
    if calibrate:
        assert model.calibrate(torch.rand(100, D, dtype=torch.float64)).kind == "full"
    x = torch.rand(6, D, dtype=torch.float64)
    computed = []
    whole = Plan.log_z
    monkeypatch.setattr(Plan, "log_z", lambda plan, *inputs: (computed.append(plan), whole(plan, *inputs))[1])
    for _ in range(3):
        with torch.no_grad():
            expected = -float(model.log_prob(x).mean())
        total = LikelihoodSum(model)
        total.add(x, None)
        assert total.mean().nll == pytest.approx(expected)
    assert sum(any(isinstance(step, LinearStep) for step in plan.steps) for plan in computed) == 1
