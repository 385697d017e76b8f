"""Reverse KL: against its closed form for Gaussians, in all forms of its gradient, and what it refuses."""

import copy
import math

import normflows
import pytest
import torch
import zuko
from nflows import distributions, flows, transforms
from torch import nn

import ebflow_plugin as ebf
from ebflow_nflows import FullConv2d, FullLinear, SmoothLeakyReLU
from ebflow_plugin.objectives import ML, ReverseKL
from nflows_small import flow_of, smooth_net
from randomness import randn, rng
from stochastic_models import nflows_model, perturbed

D = 3
LOG_DETS = ["exact", "stochastic", "relative", "auto"]
MEAN, FACTOR = randn(D, seed=5), torch.linalg.cholesky(torch.eye(D).double() + 0.3 * torch.ones(D, D).double())
CONSTANT = 2.5  # log Z of the target
TARGET = torch.distributions.MultivariateNormal(MEAN, scale_tril=FACTOR)


def target(x):
    return TARGET.log_prob(x) + CONSTANT


def gaussian_model():
    return nflows_model(FullLinear(D), shape=[D])


def closed_form(model):
    """KL(q ‖ target) - log Z, of z = W x + b ~ N(0, I): differentiable in W and b."""
    layer = model.flow._transform._transforms[0]
    inverse = torch.linalg.inv(layer.weight)
    q = torch.distributions.MultivariateNormal(-inverse @ layer.bias, covariance_matrix=inverse @ inverse.mT)
    return torch.distributions.kl_divergence(q, TARGET) - CONSTANT


def gradients(objective, repeats, seeded=False):
    """The gradient of each of some calls, as rows; each with a seed of its own, if ``seeded``."""
    rows = []
    for seed in range(repeats):
        objective.zero_grad()
        objective(generator=rng(seed) if seeded else None).backward()
        rows.append(torch.cat([p.grad.flatten() for p in objective.parameters()]))
    return torch.stack(rows)


def assert_unbiased(rows, exact):
    """z-scores of the means about zero: their mean square is near 1, and none is large."""
    spread = rows.std(0) / math.sqrt(len(rows))
    scores = (rows.mean(0) - exact) / spread.clamp_min(1e-9)  # biases have no noise of probes
    assert float(scores.abs().max()) < 4.5
    assert float(scores.square().mean()) < 3.0
    return scores


def test_the_value_is_the_closed_form():
    model = gaussian_model()
    for gradient in ("path", "total"):
        values = ReverseKL(model, target, 20_000, gradient=gradient, generator=rng()).losses().detach()
        error = float(values.mean() - closed_form(model).detach())
        assert abs(error) < 4 * float(values.std()) / math.sqrt(len(values))
        assert abs(error) < 0.05


def test_the_value_at_the_optimum_is_the_log_z_of_the_target():
    model = gaussian_model()
    layer = model.flow._transform._transforms[0]
    with torch.no_grad():
        layer.weight.copy_(torch.linalg.inv(FACTOR))
        layer.bias.copy_(-layer.weight @ MEAN)
    with torch.no_grad():
        torch.testing.assert_close(ReverseKL(model, target, 10)(), torch.tensor(-CONSTANT).double())


@pytest.mark.parametrize("log_det", LOG_DETS)
@pytest.mark.parametrize("gradient", ["path", "total"])
def test_the_gradient_is_that_of_the_closed_form(gradient, log_det):
    model = gaussian_model()
    weight, bias = model.flow._transform._transforms[0].weight, model.flow._transform._transforms[0].bias
    of_weight, of_bias = torch.autograd.grad(closed_form(model), [weight, bias])
    if log_det in ("relative", "auto"):
        of_weight = of_weight @ weight.detach().mT @ weight.detach()
    found = {name: p for name, p in model.named_parameters()}
    assert len(found) == 2
    exact = torch.cat([{weight: of_weight, bias: of_bias}[p].flatten() for p in found.values()])
    objective = ReverseKL(model, target, 32, gradient=gradient, log_det=log_det, generator=rng(1))
    rows = gradients(objective, 300)
    assert_unbiased(rows, exact)
    assert float((rows.mean(0) - exact).norm() / exact.norm()) < 0.2  # not by a wide spread


@pytest.mark.parametrize("padding", ["zeros", "circular"])
def test_convolutions_have_the_same_gradient_in_all_forms(padding):
    """With the same samples: what is left is the noise of the probes, or of the part with expectation zero."""
    layers = [FullConv2d(2, kernel_size=3, padding_mode=padding, init="normal") for _ in range(2)]
    model = nflows_model(layers[0], SmoothLeakyReLU(0.5), layers[1], shape=[2, 4, 4])

    def quartic(x):
        return -(0.02 * x.pow(4) + 0.5 * x.square()).flatten(1).sum(1)

    def by(**options):
        return gradients(ReverseKL(model, quartic, 32, **options), 150, seeded=True)

    exact = by(gradient="total")
    # The determinants of the circular ones cost less than products: "stochastic" takes the exact ones.
    others = [by()] if padding == "circular" else [by(), by(gradient="total", log_det="stochastic")]
    for other in others:
        difference = other - exact
        assert float(difference.abs().max()) > 1e-3
        assert_unbiased(difference, torch.zeros_like(difference[0]))


def coupling():
    return transforms.AffineCouplingTransform([1, 0, 1], smooth_net())


def normflows_flow():
    halves = [normflows.flows.AffineCouplingBlock(normflows.nets.MLP([1, 8, 2], output_fn=None)) for _ in range(2)]
    return normflows.NormalizingFlow(normflows.distributions.DiagGaussian(2), halves)


FLOWS = {
    "full": lambda: flow_of(FullLinear(D), SmoothLeakyReLU(0.4), FullLinear(D), shape=(D,)),
    "coupling": lambda: flow_of(coupling(), shape=(D,)),
    "trained base": lambda: flows.Flow(coupling(), distributions.DiagonalNormal([D])),
    "normflows": normflows_flow,
    "zuko": lambda: zuko.flows.NSF(2, transforms=2, hidden_features=(8,)),
}


@pytest.mark.parametrize("make", FLOWS.values(), ids=FLOWS)
def test_the_path_gradient_has_no_variance_at_the_optimum(make):
    model = ebf.wrap(perturbed(make()))
    twin = copy.deepcopy(model).requires_grad_(False)
    path = gradients(ReverseKL(model, twin.log_prob, 8, generator=rng()), 3)
    total = gradients(ReverseKL(model, twin.log_prob, 8, gradient="total", generator=rng()), 3)
    assert float(path.abs().max()) < 1e-9
    assert float(total.abs().max()) > 1e-3


@pytest.mark.parametrize("make", FLOWS.values(), ids=FLOWS)
def test_both_gradients_have_one_expectation(make):
    """Every parameter, that of a Gaussian base too, away from the optimum; the exact one by a large sample."""
    model = ebf.wrap(perturbed(make()))

    def narrow(x):
        return -(0.1 * x.pow(4) + (x - 0.5).square()).sum(1)

    exact = gradients(ReverseKL(model, narrow, 50_000, generator=rng(3)), 1)[0]
    rows = gradients(ReverseKL(model, narrow, 64, gradient="total", generator=rng(1)), 100)
    error = (rows.mean(0) - exact).square().sum()
    noise = (rows.var(0) / len(rows)).sum()
    assert float(error) < 3 * float(noise)
    assert float(exact.norm()) > 3 * float(noise.sqrt())


def test_the_target_is_never_trained_and_sums_need_no_data():
    class Quadratic(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x):
            return -self.scale * x.square().sum(1)

    model = gaussian_model()
    objective = ReverseKL(model, Quadratic(), 8, generator=rng())
    assert len(list(objective.parameters())) == 2
    assert "Quadratic, n=8, gradient='path', log_det='exact'" in objective.describe()
    half = 0.5 * objective
    half().backward()
    mixed = half + ML(model)
    mixed(randn(5, D), weights=torch.arange(5)).backward()
    with pytest.raises(ebf.InputError, match="x must be a tensor, got NoneType"):
        mixed()


def test_the_seed_decides():
    objective = ReverseKL(gaussian_model(), target, 8)
    first, second = (objective(generator=rng(4)) for _ in range(2))
    assert torch.equal(first, second)
    with torch.inference_mode():
        assert torch.equal(objective(generator=rng(4)), first)


@pytest.mark.parametrize("gradient", ["path", "total"])
def test_bad_targets_are_refused_in_one_line(gradient):
    model = gaussian_model()
    bad = {
        r"log_density is NaN or inf at 8 of 8 samples": lambda x: x.sum(1) * math.nan,
        r"log_density is NaN or inf at \d of 8 samples": lambda x: torch.where(x[:, 0] > 0, x[:, 0], -math.inf),
        r"must return shape \(8,\), one value for each sample, got \(8, 3\)": lambda x: x,
        r"must return shape \(8,\), one value for each sample, got \(\)": lambda x: x.sum(),
        r"must return shape \(8,\), one value for each sample, got float": lambda x: 0.0,
        r"log_density returns no gradient in x": lambda x: x.detach().sum(1),
    }
    for message, function in bad.items():
        with pytest.raises(ebf.InputError, match=message) as caught:
            ReverseKL(model, function, 8, gradient=gradient, generator=rng())().backward()
        assert "\n" not in str(caught.value)
    with pytest.raises(ebf.InputError, match="log_density must be a function of x, got Tensor"):
        ReverseKL(model, torch.zeros(3))


def test_models_that_cannot_be_trained_so_are_refused():
    whole = ebf.wrap(FLOWS["coupling"]().double(), preprocess=[ebf.Dequantize(256)])
    with pytest.raises(ebf.InputError, match="ReverseKL needs a model with a density"):
        ReverseKL(whole, target)
    waiting = ebf.wrap(flows.Flow(transforms.ActNorm(D), distributions.StandardNormal([D])).double().train())
    with pytest.raises(ebf.InputError, match="call model.initialize"):
        ReverseKL(waiting, target)()
    mixture = normflows.distributions.GaussianMixture(2, 2)
    mixed = ebf.wrap(normflows.NormalizingFlow(mixture, normflows_flow().flows).double())
    with pytest.raises(ebf.InputError, match="carry no gradient of its parameters; freeze them"):
        ReverseKL(mixed, lambda x: -x.square().sum(1))()
    mixture.requires_grad_(False)
    ReverseKL(mixed, lambda x: -x.square().sum(1))().backward()


def test_a_density_that_jumps_is_warned_about():
    model = ebf.wrap(flow_of(transforms.LeakyReLU(), FullLinear(D), shape=(D,)))
    with pytest.warns(ebf.BiasWarning, match="miss the jumps, so those of ReverseKL are biased"):
        ReverseKL(model, target)
