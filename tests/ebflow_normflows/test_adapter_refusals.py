"""What of normflows can be part of no energy, and what its users are told to do."""

import normflows as nf
import pytest
import torch
from normflows import flows
from normflows.distributions import DiagGaussian, GaussianMixture, NNDiagGaussian
from normflows.distributions.base import ConditionalDiagGaussian
from torch import nn

import ebflow_plugin as ebf
from normflows_parts import D, lu_permute, net, residual
from normflows_small import model_of
from randomness import randn


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
