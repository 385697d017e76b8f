"""What is specific to nflows: which classes are known, how linear ones act, other namespaces, base densities."""

import importlib
import pkgutil
import sys
from functools import partial

import nflows.transforms
import pytest
import torch
from nflows import distributions, flows, transforms
from nflows.nn import nets
from torch import nn

import ebflow_plugin as ebf
import nflows_small
from case import subclasses
from cases import NFLOWS_CASES, perturb
from ebflow_nflows.adapter import RULES
from ebflow_plugin import testing
from randomness import randn, rng

D = 6
flow_of = partial(nflows_small.flow_of, shape=(D,), mode="eval", noise=0.2)
ABSTRACT = {
    "Transform",
    "Linear",
    "CouplingTransform",
    "PiecewiseCouplingTransform",
    "AutoregressiveTransform",
}


def test_every_transform_of_nflows_is_registered_or_abstract():
    for module in pkgutil.walk_packages(nflows.transforms.__path__, "nflows.transforms."):
        importlib.import_module(module.name)
    known = {cls for cls in subclasses(transforms.Transform) if cls.__module__.startswith("nflows.")}
    names = {cls.__name__ for cls in known}
    assert len(names) >= 47
    assert names - ABSTRACT <= set(RULES), names - ABSTRACT - set(RULES)
    assert names >= ABSTRACT


def test_every_concrete_transform_has_a_case():
    words = " ".join(case.name for case in NFLOWS_CASES)
    for cls in subclasses(transforms.Transform):
        if cls.__module__.startswith("nflows.") and cls.__name__ not in ABSTRACT:
            assert cls.__name__ in words, cls.__name__


def test_lu_is_applied_by_two_products_never_by_their_product():
    """With batch << D, a D × D × D product would show up as the largest."""
    dim, batch = 64, 3
    model = ebf.wrap(flow_of(transforms.LULinear(dim), shape=(dim,)))
    seen = []

    def look(func, leaves):
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm"):
            seen.append([tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 1])

    with testing._Watch(look):
        model.energy(randn(batch, dim))
    assert len(seen) == 2
    assert all((batch, dim) in shapes for shapes in seen)


def test_naive_linear_samples_although_nflows_cannot():
    flow = flow_of(transforms.NaiveLinear(D, orthogonal_initialization=False))
    model = ebf.wrap(flow)
    with pytest.raises(RuntimeError):
        flow.sample(3)
    samples = model.sample(4000, generator=rng(0))
    latents, _ = model.plan.encode(samples)
    assert latents[0].mean().abs() < 0.05
    assert (latents[0].std() - 1).abs() < 0.05


def test_logit_outside_of_its_domain_is_nan_and_does_not_wait():
    model = ebf.wrap(flow_of(transforms.Logit()))
    x = torch.tensor([[0.5] * D, [1.5] + [0.5] * (D - 1)], dtype=torch.float64)
    energy = model.energy(x)
    assert torch.isfinite(energy[0])
    assert torch.isnan(energy[1])


def test_tanh_has_a_log_det_where_nflows_overflows():
    flow = flow_of(transforms.Tanh())
    x = torch.full((1, D), 25.0, dtype=torch.float64)
    assert torch.isinf(flow._transform(x)[1])
    exact = D * (2 * torch.tensor(2.0).double().log() - 2 * 25.0)  # log(1 - tanh²) → 2 log 2 - 2|x|
    _, log_det = ebf.wrap(flow).plan.encode(x)
    assert torch.allclose(log_det, exact)


def test_gated_linear_units_have_the_right_log_det_for_any_number_of_features():
    flow = flows.Flow(transforms.GatedLinearUnit(), distributions.StandardNormal([3])).double()
    model = ebf.wrap(flow)
    x = randn(5, 3)
    for context in (randn(5, 3), randn(5, 1)):
        gate = torch.sigmoid(context).expand(-1, 3)
        expected = flow._distribution.log_prob(x * gate) + gate.log().sum(1)
        assert torch.allclose(model.log_prob(x, context), expected)
    with pytest.raises(ValueError, match="needs a context"):
        model.energy(x)


# Base densities


class Laplace(nn.Module):
    """A user's own base, without a context."""

    def __init__(self):
        super().__init__()
        self.location = nn.Parameter(torch.zeros(D))

    def log_prob(self, inputs):
        return torch.distributions.Laplace(self.location, 1.0).log_prob(inputs).sum(-1)


class SampledLaplace(Laplace):
    def sample(self, n):
        return torch.distributions.Laplace(self.location, 1.0).sample((n,))


def test_a_base_of_the_users_own():
    flow = flows.Flow(transforms.LULinear(D), SampledLaplace()).double()
    model = ebf.wrap(flow)
    z, log_det = flow._transform(randn(5, D))
    assert torch.allclose(model.log_prob(randn(5, D)), flow._distribution.log_prob(z) + log_det)
    assert model.sample(3).shape == (3, D)
    with pytest.raises(ebf.NoInverseError, match=r"base density cannot\n  _distribution  Laplace"):
        ebf.wrap(flows.Flow(transforms.LULinear(D), Laplace()).double()).sample(3)


def test_a_conditional_gaussian_base_is_sampled_as_it_is():
    conditional = distributions.ConditionalDiagonalNormal([D], context_encoder=nn.Linear(2, 2 * D))
    flow = flows.Flow(transforms.IdentityTransform(), conditional).double()
    context = torch.randn(3, 2, dtype=torch.float64)
    samples = ebf.wrap(flow).sample(20_000, context, generator=rng(0))
    assert samples.shape == (3, 20_000, D)
    means, log_stds = conditional._compute_params(context)
    assert torch.allclose(samples.mean(1), means, atol=0.1)
    assert torch.allclose(samples.std(1), log_stds.exp(), rtol=0.05)


def test_mademog_is_sampled_with_its_own_density():
    """Importance weights of samples against their own density have mean one: E_p[N(z; 0, 4)/p(z)] = 1."""
    torch.manual_seed(0)
    base = distributions.MADEMoG(2, 8, context_features=None, num_mixture_components=3)
    flow = flows.Flow(transforms.IdentityTransform(), base).double()
    perturb(flow, 0.1)
    model = ebf.wrap(flow)
    z = model.sample(40_000, generator=rng(1))
    inner = torch.distributions.Normal(torch.tensor(0.0).double(), 0.5).log_prob(z).sum(1)
    with torch.no_grad():
        weights = (inner - model.log_prob(z)).exp()
    assert (weights.mean() - 1).abs() < 5 * weights.std() / 200


# Namespaces


def copied_namespace(tmp_path, name):
    """nflows under another name, as its forks have it."""
    import shutil
    from pathlib import Path

    source = Path(nflows.__file__).parent
    target = tmp_path / name
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    for file in target.rglob("*.py"):
        file.write_text(file.read_text().replace("nflows", name))


@pytest.mark.parametrize("name", ["enflows", "flowcon"])
def test_forks_are_known_by_their_package(name, tmp_path, monkeypatch):
    copied_namespace(tmp_path, name)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        t, d, f = (importlib.import_module(f"{name}.{part}") for part in ("transforms", "distributions", "flows"))
        layers = [
            t.LULinear(D, identity_init=False),
            t.ActNorm(D),
            t.RandomPermutation(D),
            t.MaskedAffineAutoregressiveTransform(D, 8, activation=torch.tanh),
            t.NaiveLinear(D, orthogonal_initialization=False),
        ]
        flow = f.Flow(t.CompositeTransform(layers), d.StandardNormal([D])).double().eval()
        assert not isinstance(flow, flows.Flow)
        model = ebf.wrap(flow, strict=True)
        assert [row.linearity for row in model.report] == ["linear", "linear", "linear", "nonlinear", "linear"]
        assert torch.allclose(model.log_prob(randn(5, D)), flow.log_prob(randn(5, D)))
        changes = []
        full = ebf.unconstrain(flow, changes=changes)
        assert len(changes) == 1
        assert torch.allclose(ebf.wrap(full).log_prob(randn(5, D)), flow.log_prob(randn(5, D)))
    finally:
        for module in [module for module in sys.modules if module.split(".")[0] == name]:
            del sys.modules[module]


def test_glasflow():
    glasflow = pytest.importorskip("glasflow")
    for conditional in (None, 2):
        flow = glasflow.RealNVP(D, n_transforms=2, linear_transform="lu", n_conditional_inputs=conditional)
        flow = flow.double().eval()
        context = None if conditional is None else randn(5, conditional)
        model = ebf.wrap(flow, strict=True)
        assert torch.allclose(model.log_prob(randn(5, D), context), flow.log_prob(randn(5, D), conditional=context))
    assert type(flow._transform).__module__.startswith("glasflow.")


def test_sbi():
    builders = pytest.importorskip("sbi.neural_nets.net_builders")
    theta, x = torch.randn(50, 4), torch.randn(50, 3)
    estimator = builders.build_maf(theta, x, hidden_features=8, num_transforms=2).eval()
    model = ebf.wrap(estimator)
    assert model.report.inside == "net"
    expected = estimator.log_prob(theta[:5].unsqueeze(0), x[:5])[0]
    assert torch.allclose(model.log_prob(theta[:5], x[:5]), expected, atol=1e-5)
    with pytest.raises(ebf.NotAFlowError, match="These can be wrapped"):
        ebf.wrap(builders.build_mdn(theta, x, hidden_features=8))


def test_a_multiscale_flow_is_shown_with_its_splits():
    composite = transforms.MultiscaleCompositeTransform(2)
    hidden = composite.add_transform(transforms.ActNorm(4), (4, 2, 2))
    composite.add_transform(transforms.OneByOneConvolution(2), hidden)
    flow = flows.Flow(composite, distributions.StandardNormal([16])).double().eval()
    rows = [(row.path, row.class_name, row.reason) for row in ebf.describe(flow)]
    assert rows == [
        ("_transform._transforms.0", "ActNorm", "affine per feature (ActNorm)"),
        ("_transform", "MultiscaleCompositeTransform", "splits off latents"),
        ("_transform._transforms.1", "OneByOneConvolution", "1 × 1 convolution held as LU factors"),
        ("_transform", "MultiscaleCompositeTransform", "joins the latents"),
    ]
    assert ebf.wrap(flow).plan.event_shape == (4, 2, 2)


@pytest.mark.parametrize("kind", [transforms.AffineCouplingTransform, transforms.AdditiveCouplingTransform])
@pytest.mark.parametrize("shape", [(D,), (D, 2, 3)])
@pytest.mark.parametrize("unconditional", [False, True])
def test_couplings_are_exactly_those_of_nflows(kind, shape, unconditional):
    def net(inputs, outputs):
        kinds = {True: nn.Linear, False: partial(nn.Conv2d, kernel_size=1)}
        layer = kinds[len(shape) == 1](inputs, outputs)
        return type("Net", (nn.Module,), {"forward": lambda self, x, context=None: layer(x)})()

    coupling = kind([1, 0, -1, 2, 0, 1], net)
    if unconditional:
        coupling.unconditional_transform = transforms.PointwiseAffineTransform(0.3, 2.0)
    (step,) = ebf.wrap(flows.Flow(coupling, distributions.StandardNormal(shape))).plan.steps
    x = torch.randn(4, *shape, generator=rng(1))
    for found, expected in ((step.call_forward, coupling), (step.call_inverse, coupling.inverse)):
        for one, other in zip(found(x, None), expected(x), strict=True):
            assert torch.equal(one, other)
    with pytest.raises(ValueError, match="Expected features = 6, got 5"):
        step.encode(x[:, :5], None)


def test_a_coupling_runs_under_autocast_and_in_transforms():
    coupling = transforms.AffineCouplingTransform([1, 0] * 3, lambda i, o: nets.ResidualNet(i, o, 8))
    model = ebf.wrap(flows.Flow(coupling, distributions.StandardNormal([D])))
    x = torch.randn(4, D, generator=rng(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = model.plan.steps[0]
        for given in (x, x.bfloat16()):
            assert step.encode(given, None)[0].dtype == given.dtype
    energies = torch.func.vmap(lambda row: model.energy(row[None])[0])(x)
    torch.testing.assert_close(energies, model.energy(x))
