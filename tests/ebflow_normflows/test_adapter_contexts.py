"""What a context is to the models of normflows: class labels, a condition, or nothing."""

import normflows as nf
import pytest
import torch
from normflows import flows
from normflows.distributions import ClassCondDiagGaussian, DiagGaussian
from normflows.distributions.base import ConditionalDiagGaussian
from torch import nn

import ebflow_plugin as ebf
from case import perturb
from normflows_models import labelled_glow
from normflows_parts import CLASSES, CONTEXT, IMG, D, glow_levels, masked, net
from normflows_small import model_of
from randomness import randn


def labels(batch: int = 5) -> torch.Tensor:
    return torch.arange(batch) % CLASSES


def moved_glow(**options: object) -> nn.Module:
    flow = labelled_glow(**options).double()
    perturb(flow, 0.1)
    return flow


def test_labels_are_whole_numbers_or_one_hot():
    flow, y, x = moved_glow(), labels(), randn(5, 1, 4, 4)
    model = ebf.wrap(flow)
    model.initialize(x, y)
    expected = flow.log_prob(x, y)
    one_hot = nn.functional.one_hot(y, CLASSES)
    for context in (y, y.int(), one_hot, one_hot.double()):
        assert torch.allclose(model.log_prob(x, context), expected, rtol=1e-10)
    assert not torch.allclose(model.energy(x, y), model.energy(x, y.flip(0)))


def test_labelled_samples():
    flow, x = moved_glow(), randn(5, 1, 4, 4)
    model = ebf.wrap(flow)
    model.initialize(x, labels())
    assert model.sample(4, labels(2)).shape == (2, 4, 1, 4, 4)
    assert model.sample(4).shape == (4, 1, 4, 4)  # of classes drawn at random
    with pytest.raises(ebf.InputError, match=r"ClassCondDiagGaussian .* is conditional"):
        model.energy(x)


def test_one_class_is_drawn_for_all_levels_of_a_sample():
    flow = nf.MultiscaleFlow(
        [ClassCondDiagGaussian(2, 2), ClassCondDiagGaussian(2, 2)], [[], []], [flows.Merge()]
    ).double()
    with torch.no_grad():
        for base in flow.q0:
            base.loc.copy_(torch.tensor([-100.0, 100.0]))
    sides = torch.sign(ebf.wrap(flow).sample(64))
    assert torch.equal(sides[:, 0], sides[:, 3])
    assert sides.unique().numel() == 2


def test_a_multiscale_flow_without_classes_needs_no_y():
    bases = [DiagGaussian((8, 1, 1)), DiagGaussian((2, 2, 2))]
    flow = nf.MultiscaleFlow(bases, *glow_levels(), class_cond=False).double()
    x = randn(5, 1, 4, 4)
    model = ebf.wrap(flow)
    model.initialize(x)
    assert torch.allclose(model.log_prob(x), flow.log_prob(x, None), rtol=1e-10)
    assert torch.equal(model.log_prob(x, labels()), model.log_prob(x))  # the library makes no use of it either
    assert model.sample(3).shape == (3, 1, 4, 4)


def test_own_log_prob_of_a_multiscale_flow_with_an_outer_act_norm():
    bases = [DiagGaussian((8, 1, 1)), DiagGaussian((2, 2, 2))]
    levels, merges = glow_levels()
    levels[-1].append(flows.ActNorm((1, 1, 1)))
    flow = nf.MultiscaleFlow(bases, levels, merges, class_cond=False).double()
    x, model = randn(5, 1, 4, 4), ebf.wrap(flow)
    model.initialize(x)
    with pytest.raises(RuntimeError, match="output with shape"):
        flow.log_prob(x, None)
    assert torch.allclose(model.adapter.own_log_prob(flow, x, None), model.log_prob(x), rtol=1e-10)


def test_flows_that_take_no_context_can_be_part_of_a_conditional_flow():
    made = flows.MaskedAffineAutoregressive(D, 8, context_features=CONTEXT, activation=torch.tanh)
    without = [flows.ActNorm(D), flows.AffineCouplingBlock(net(3, 6)), masked(net(D, D), None)]
    without.append(flows.AffineConstFlow(D))
    base = ConditionalDiagGaussian(D, net(CONTEXT, 2 * D))
    flow = model_of(made, *without, base=base, model=nf.ConditionalNormalizingFlow)
    x, context = randn(5, D), randn(5, CONTEXT, seed=1)
    model = ebf.wrap(flow)
    model.initialize(x, context)
    with pytest.raises(TypeError, match="context"):
        flow.log_prob(x, context=context)
    log_det = torch.zeros(5, dtype=torch.float64)
    z = x
    for step in reversed(flow.flows):
        z, one = step.inverse(z, context) if step is made else step.inverse(z)
        log_det = log_det + one
    assert torch.allclose(model.log_prob(x, context), log_det + base.log_prob(z, context), rtol=1e-10)
    assert model.sample(2, context).shape == (5, 2, D)


def test_the_flows_of_a_class_conditional_model_see_no_labels():
    made = flows.MaskedAffineAutoregressive(D, 8, context_features=1, activation=torch.tanh)
    flow = model_of(made, base=ClassCondDiagGaussian(D, CLASSES), model=nf.ClassCondFlow)
    x, y = randn(5, D), labels()
    assert torch.allclose(ebf.wrap(flow).log_prob(x, y), flow.log_prob(x, y), rtol=1e-10)


@pytest.mark.parametrize("shape", [(D,), IMG])
def test_class_conditional_constants_keep_their_log_det_in_the_energy(shape: tuple[int, ...]):
    layer = flows.CCAffineConst(shape if len(shape) == 1 else (4, 1, 1), CLASSES)
    model = ebf.wrap(model_of(layer, base=DiagGaussian(shape)))
    x, y = randn(5, *shape), labels()
    one_hot = nn.functional.one_hot(y, CLASSES).double()
    z, log_det = layer.inverse(x, one_hot)
    assert torch.allclose(model.log_prob(x, y), model.flow.q0.log_prob(z) + log_det, rtol=1e-10)
    assert torch.equal(model.log_prob(x, one_hot), model.log_prob(x, y))
    assert model.log_z() == 0
    assert model.report.rows[0].reason == "affine in x, but its log-det depends on the context"
    with pytest.raises(ebf.InputError, match="pass them as context"):
        model.energy(x)


def test_a_context_that_nothing_would_look_at_is_refused():
    with pytest.raises(ebf.InputError, match="ConditionalNormalizingFlow"):
        ebf.wrap(model_of(flows.AffineConstFlow(D))).energy(randn(5, D), randn(5, D))
