"""What a context is to the models of normflows, what can be part of no energy, and what its users are told to do."""

import normflows as nf
import pytest
import torch
from normflows import flows
from normflows.distributions import ClassCondDiagGaussian, DiagGaussian, GaussianMixture, NNDiagGaussian
from normflows.distributions.base import ConditionalDiagGaussian
from torch import nn

import ebflow_plugin as ebf
from case import perturb
from normflows_models import labelled_glow
from normflows_parts import CLASSES, CONTEXT, IMG, D, glow_levels, lu_permute, masked, net, residual
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


# What of normflows can be part of no energy, and what its users are told to do


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: flows.BatchNorm(), "couples the samples of a batch, in eval mode too; use ActNorm"),
        (lambda: flows.Reverse(flows.BatchNorm()), "couples the samples of a batch, in eval mode too; use ActNorm"),
        (
            lambda: flows.MetropolisHastings(DiagGaussian(D), None, 2),
            "stochastic, has no density of its own; remove it",
        ),
        (
            lambda: flows.HamiltonianMonteCarlo(DiagGaussian(D), 2, torch.zeros(D), torch.zeros(D)),
            "stochastic, has no density of its own; remove it",
        ),
        (lambda: flows.Planar((D,)), "has no inverse, which is its density direction; put it into .*Reverse"),
        (lambda: flows.Radial((D,)), "has no inverse, which is its density direction; put it into .*Reverse"),
        (lambda: residual(), r"carries no graph in eval mode.*build it with exact_trace=True"),
        (lambda: residual(reverse=False), r"carries no graph in eval mode.*build it with exact_trace=True"),
    ],
)
def test_refusals(make, message: str):
    flow = model_of(make())
    with pytest.raises(ebf.UnsupportedStepError, match=message):
        ebf.wrap(flow)
    assert [row.linearity for row in ebf.describe(flow)] == ["refused"]


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (D, {}, r"random estimate in training mode; build it with exact_trace=True"),
        (D, {"exact_trace": True}, r"random length in training mode; put it in eval\(\), or set n_power_series"),
        (2, {}, r"random estimate in training mode; put it in eval\(\), or give it brute_force=True"),
    ],
)
def test_residual_in_training_mode(size: int, options: dict[str, bool], message: str):
    flow = model_of(residual(size, **options), base=DiagGaussian(size)).train()
    with pytest.raises(ebf.UnsupportedStepError, match=message):
        ebf.wrap(flow)


class Contraction(nn.Module):
    """A network that does not tell how many features it takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) / 2


def test_residual_of_unknown_size_is_refused_at_the_call():
    model = ebf.wrap(model_of(flows.Residual(Contraction()), base=GaussianMixture(2, 2)))
    model.energy(randn(5, 2))
    model = ebf.wrap(model_of(flows.Residual(Contraction()), base=GaussianMixture(2, 3)))
    with pytest.raises(ebf.UnsupportedStepError, match=r"flows.0  Residual .*exact_trace=True"):
        model.energy(randn(5, 3))


def test_residual_is_inverted_to_full_precision():
    for reverse in (True, False):
        flow = model_of(flows.Residual(Contraction(), reverse=reverse), base=GaussianMixture(2, 2))
        model, x = ebf.wrap(flow), randn(5, 2)
        (z,), _ = model.plan.encode(x)
        tolerance = 1e-12 if reverse else 1e-2  # the second needs the library's fixed point to go to z
        assert (model.plan.decode((z,)) - x).abs().max() < tolerance


def test_residual_without_a_contraction_cannot_be_sampled():
    layer = flows.Residual(nn.Linear(2, 2))
    with torch.no_grad():
        layer.iresblock.nnet.weight.copy_(3 * torch.eye(2))
    model = ebf.wrap(nf.NormalizingFlow(DiagGaussian(2), [layer]).eval())
    with pytest.raises(ebf.UnsupportedStepError, match="update_lipschitz"):
        model.sample(3)


def test_planar_and_radial_have_a_density_through_reverse_and_no_samples():
    for layer in (flows.Planar((D,)), flows.Radial((D,))):
        flow = model_of(flows.Reverse(layer))
        model, x = ebf.wrap(flow), randn(5, D)
        assert torch.allclose(model.log_prob(x), flow.log_prob(x), rtol=1e-10)
        with pytest.raises(ebf.NoInverseError, match=r"flows.0.flow  (Planar|Radial)"):
            model.sample(2)


def test_an_unknown_flow_without_an_inverse_is_refused():
    class OneWay(flows.Flow):
        def forward(self, z):
            return z, 0

    with pytest.raises(ebf.UnsupportedStepError, match=r"flows.0  OneWay .*: has no inverse"):
        ebf.wrap(model_of(OneWay()))


def test_a_vae_is_told_what_to_wrap_instead():
    encoder = net(3, 2 * D)
    vae = nf.NormalizingFlowVAE(DiagGaussian(D), NNDiagGaussian(encoder), [lu_permute()]).double()
    for call in (ebf.wrap, ebf.describe):
        with pytest.raises(ebf.NotAFlowError, match=r"ClassCondFlow\(ConditionalDiagGaussian\(D, net\), vae.flows\)"):
            call(vae)

    class HalvedLogVariance(nn.Module):
        def forward(self, x):
            mean, log_variance = encoder(x).chunk(2, dim=-1)
            return torch.cat([mean, log_variance / 2], dim=-1)

    model = ebf.wrap(nf.ClassCondFlow(ConditionalDiagGaussian(D, HalvedLogVariance()), vae.flows))
    condition = randn(5, 3)
    z, log_q, _ = vae(condition)
    assert torch.allclose(model.log_prob(z[:, 0], condition), log_q[:, 0], rtol=1e-6)


def test_a_density_of_ones_own_is_refused():
    class Own(nf.NormalizingFlow):
        def log_prob(self, x):
            return super().log_prob(x) / 2

    with pytest.raises(ebf.UnsupportedStepError, match="Own overrides log_prob"):
        ebf.wrap(Own(DiagGaussian(D), []))
    with pytest.raises(ebf.UnsupportedStepError, match="base distribution with log_prob"):
        ebf.wrap(nf.NormalizingFlow(None, []))


def test_a_bare_flow_is_told_to_get_a_base():
    with pytest.raises(ebf.NotAFlowError, match=r"NormalizingFlow\(DiagGaussian\(shape\), \[flow\]\)"):
        ebf.wrap(flows.ActNorm(D))


def test_a_resampled_base_is_refused_in_training_mode():
    class ResampledGaussian(DiagGaussian):  # that of the package larsflow draws anew there, to estimate its normaliser
        pass

    flow = nf.NormalizingFlow(ResampledGaussian(D), [flows.AffineConstFlow(D)])
    with pytest.raises(ebf.UnsupportedStepError, match=r"random estimate in training mode; put it in eval\(\)"):
        ebf.wrap(flow)
    ebf.wrap(flow.eval()).energy(torch.zeros(2, D))
