"""A model acts on its flow as it is now, whichever of its methods is called first after an edit."""

import copy
import pickle
from functools import partial

import pytest
import torch
from nflows import distributions, flows, transforms
from torch import nn

import ebflow_plugin as ebf
import nflows_small
from ebflow_nflows import FullLinear
from ebflow_plugin.planned import Watch
from matched import log_prob
from randomness import randn, rng
from warned import messages

D = 3
flow_of = partial(nflows_small.flow_of, shape=(D,))


def full(scale):
    layer = FullLinear(D).double()
    nn.init.orthogonal_(layer.weight)
    with torch.no_grad():
        layer.weight.mul_(scale)
    return layer


@pytest.fixture
def x():
    return randn(200, D)


def replace_layer(flow):
    flow._transform._transforms[0] = full(2.0)


def replace_all(flow):
    flow._transform = transforms.CompositeTransform([full(0.3), transforms.LeakyReLU()])


def append(flow):
    flow._transform._transforms.append(full(3.0))


def patch_forward(flow):
    layer = flow._transform._transforms[0]
    forward, inverse = layer.forward, layer.inverse
    halves = D * torch.tensor(2.0, dtype=torch.float64).log()

    def doubled(inputs, context=None):
        outputs, log_det = forward(inputs, context)
        return 2.0 * outputs, log_det + halves

    def halved(inputs, context=None):
        outputs, log_det = inverse(inputs / 2.0, context)
        return outputs, log_det - halves

    layer.forward, layer.inverse = doubled, halved


def hook_container(flow):
    flow._transform.register_forward_hook(lambda module, args, output: (output[0] + 1.0, output[1]))


def hook_layer(flow):
    flow._transform._transforms[0].register_forward_hook(lambda module, args, output: (output[0] + 1.0, output[1]))


def another_class(flow, method="forward"):
    def shifted(self, inputs, context=None):
        outputs, log_det = getattr(FullLinear, method)(self, inputs, context)
        return outputs + 1.0, log_det

    flow._transform._transforms[0].__class__ = type("Shifted", (FullLinear,), {method: shifted})


def another_call(flow):
    another_class(flow, "__call__")


def replace_base(flow):
    flow._distribution = distributions.DiagonalNormal([D]).double()
    nn.init.constant_(flow._distribution.log_std_, 0.5)


def replace_transform(flow):
    flow._transform = transforms.QRLinear(D, 2).double()


def unconstrain(flow):
    flow._transform._transforms.append(transforms.LULinear(D).double())
    ebf.unconstrain(flow, in_place=True)
    nn.init.normal_(flow._transform._transforms[-1].weight)


KNOWN = [replace_layer, replace_all, append, replace_base, replace_transform, unconstrain]
EDITS = [*KNOWN, patch_forward, hook_container, hook_layer, another_class, another_call]
INVERTIBLE = [*KNOWN, patch_forward]  # a hook on forward leaves the inverse as it is


def calls(model, x):
    """What each public call gives. The first one is made on a model that nobody has looked at since the edit."""
    return {
        "energy": lambda: model.energy(x),
        "score": lambda: model.score(x).detach(),
        "log_prob": lambda: model.log_prob(x).detach(),
        "bits_per_dim": lambda: model.bits_per_dim(x).detach(),
        "sum": lambda: -model.energy(x).detach() - model.log_z((D,)).detach(),
        "log_z": lambda: model.log_z((D,)).detach(),
        "plan": lambda: [step.class_name for step in model.plan.steps],
        "report": lambda: [(row.path, row.class_name, row.linearity) for row in model.report],
        "core": lambda: log_prob(model.core, x).detach(),
        "preprocess": lambda: model.preprocess(x)[0],
        "gradient": lambda: slope(model.score(x).square().sum(), model.flow),
        "ml": lambda: ebf.objectives.ML(model)(x).detach(),
        "calibrate": lambda: model.calibrate(x).before,
        "copy": lambda: copy.deepcopy(model).log_prob(x).detach(),
        "pickle": lambda: pickle.loads(pickle.dumps(model)).log_prob(x).detach(),
        "state": lambda: sorted(model.state_dict()),
    }


def slope(value, flow):
    gradients = torch.autograd.grad(value, list(flow.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


def same(ours, theirs):
    return torch.allclose(ours, theirs, rtol=1e-10) if isinstance(ours, torch.Tensor) else ours == theirs


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", list(calls(None, None)))
def test_every_call_sees_an_edit(edit, name, x):
    if name == "pickle" and edit not in KNOWN:
        pytest.skip("functions inside of a function cannot be pickled")
    flow = flow_of(full(1.0), transforms.Tanh())
    model = ebf.wrap(flow)
    before = model.log_prob(x)
    edit(flow)
    found = calls(model, x)[name]()
    fresh, warned = messages(lambda: ebf.wrap(flow))
    assert bool(warned) == (edit not in KNOWN)
    assert all("not known" in message for message in warned)
    assert torch.allclose(fresh.log_prob(x), flow.log_prob(x), rtol=1e-6)  # seen at wrap as well
    assert not torch.allclose(fresh.log_prob(x), before)
    assert same(found, calls(fresh, x)[name]())


@pytest.mark.parametrize("edit", INVERTIBLE)
@pytest.mark.filterwarnings("ignore:1 of 2 steps are not known")
def test_sampling_sees_an_edit(edit):
    flow = flow_of(full(1.0), transforms.LeakyReLU())
    model = ebf.wrap(flow)
    model.sample(2)
    edit(flow)
    drawn = model.sample(50, generator=rng(1))
    assert torch.equal(drawn, ebf.wrap(flow).sample(50, generator=rng(1)))


def test_latents_of_samples_are_standard_after_an_edit():
    flow = flow_of(full(1.0))
    model = ebf.wrap(flow)
    replace_layer(flow)
    latents = flow._transform(model.sample(20_000, generator=rng(1)))[0]
    assert torch.allclose(latents.std(0), torch.ones(D, dtype=torch.float64), atol=0.03)


def test_whitening_sees_an_unconstrained_flow(x):
    mix = torch.tensor([[2.0, 0.0, 0.0], [1.0, 0.5, 0.0], [0.0, 3.0, 1.0]], dtype=torch.float64)
    flow = flow_of(transforms.LULinear(D), transforms.LeakyReLU())
    model = ebf.wrap(flow)
    ebf.unconstrain(flow, in_place=True)
    model.initialize(x @ mix + 1.0, whiten=True)
    white = flow._transform._transforms[0](x @ mix + 1.0)[0]
    assert torch.allclose(torch.cov(white.T), torch.eye(D, dtype=torch.float64), atol=1e-9)


def test_initialize_sees_a_new_actnorm(x):
    flow = flow_of(full(1.0))
    model = ebf.wrap(flow)
    flow._transform._transforms.append(transforms.ActNorm(D).double())
    model.initialize(x + 5.0)
    assert torch.allclose(flow._transform(x + 5.0)[0].std(0), torch.ones(D, dtype=torch.float64), atol=0.02)


def test_a_patched_part_inside_of_a_linear_step_is_seen(x):
    layer = transforms.SVDLinear(D, num_householder=2)
    flow = flow_of(layer)
    model = ebf.wrap(flow)
    inner = layer.orthogonal_1.forward
    layer.orthogonal_1.forward = lambda inputs, context=None: inner(inputs + 1.0, context)
    expected = flow.log_prob(x)
    assert torch.allclose(model.log_prob(x), expected)
    with pytest.warns(UserWarning, match="orthogonal_1 inside it is hooked or patched"):
        assert torch.allclose(ebf.wrap(flow).log_prob(x), expected)


def test_a_density_that_is_patched_later_is_refused(x):
    flow = flow_of(full(1.0))
    model = ebf.wrap(flow)
    flow.log_prob = lambda inputs, context=None: inputs.sum(1)
    with pytest.raises(ebf.UnsupportedStepError, match="overrides log_prob"):
        model.sample(2)


def test_a_base_that_is_no_module_can_be_replaced(x):
    narrow, wide = (torch.distributions.Normal(torch.zeros(D, dtype=torch.float64), std) for std in (1.0, 2.0))
    flow = flows.Flow(full(1.0), torch.distributions.Independent(narrow, 1))
    model = ebf.wrap(flow)
    model.log_prob(x)
    flow._distribution = torch.distributions.Independent(wide, 1)
    assert torch.allclose(model.log_prob(x), wide.log_prob(flow._transform(x)[0]).sum(1))
    assert model.sample(5000, generator=rng(1)).std() > 1.9


def test_a_plan_that_somebody_holds_stays_and_the_next_one_follows():
    flow = flow_of(transforms.Logit(), full(1.0))
    model = ebf.wrap(flow)
    core, u = model.core, torch.randn(5, D, dtype=torch.float64)
    flow._transform._transforms[1] = full(4.0)
    expected = log_prob(ebf.wrap(flow).core, u)
    assert torch.allclose(log_prob(model.core, u), expected)
    assert not torch.allclose(log_prob(core, u), expected)
    model.calibrate(torch.rand(100, D, dtype=torch.float64))
    assert model.core.steps[-1].path == "calibration"
    assert torch.allclose(log_prob(copy.deepcopy(model).core, u), log_prob(model.core, u))


def test_nothing_is_walked_again_without_an_edit(x, monkeypatch):
    flow = flow_of(transforms.ActNorm(D), full(1.0), transforms.Tanh())
    model = ebf.wrap(flow)
    model.initialize(x)
    walks = []
    monkeypatch.setattr(ebf.EBFlow, "rebuild", lambda self: walks.append(1))
    model.train()
    model.energy(x)
    model.eval()
    model.log_prob(x)
    model.sample(3)
    for parameter in model.parameters():
        parameter.data.add_(0.1)
    model.score(x)
    assert not walks


def test_a_module_that_counts_its_calls_is_the_same_module():
    net = nn.Sequential(nn.Tanh())
    net.calls = 0
    watch = Watch([net])
    net.calls += 1
    assert watch.unchanged()
    net.mode = "other"
    assert not watch.unchanged()


def test_rebuild_takes_up_what_was_registered_later(x):
    class Doubled(nflows_small.Doubled):
        pass

    flow = flow_of(Doubled())
    with pytest.warns(UserWarning, match="not known"):
        model = ebf.wrap(flow)
    ebf.register_linear(Doubled)
    model.rebuild()
    assert [row.linearity for row in model.report] == ["linear"]
    assert torch.allclose(model.log_prob(x), flow.log_prob(x))
