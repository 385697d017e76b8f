"""Objectives against a slow reference with the full Hessian, their limits, and how a batch is split."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ebflow_plugin as ebf
from cases import SUPPORTED
from ebflow_plugin.objectives import DSM, FDSSM, ML, SM, SML, SSM, make_objective, score_matching
from ebflow_plugin.plan.derivatives import derivatives
from ebflow_plugin.plan.inverse import draw
from ebflow_plugin.plan.plan import Plan
from randomness import rng

pytestmark = pytest.mark.filterwarnings("ignore")  # the smoothness of splines is not the subject here

MODELS = {
    "AffineCouplingTransform: vec net=tanh (eval)",
    "MaskedAffineAutoregressiveTransform: vec net=tanh (eval)",
    "CompositeTransform: vec Perm+LU+AdditiveCoupling tanh (eval)",
    "Logit: vec (eval)",  # matched after the logit
    "MADEMoG base: vec, context=3 (eval)",
    "PiecewiseRationalQuadraticCouplingTransform: vec net=tanh tails=linear bound=2 (eval)",
    "MaskedAffineFlow: vec s,t net=tanh (eval)",
    "Glow: two levels, GlowBase and ClassCondDiagGaussian, labels (eval)",
    "Multiscale: vec, 3 levels of odd sizes 11, 5, 2 (eval)",
}
CASES = [case for case in SUPPORTED if case.name in MODELS]
cases = pytest.mark.parametrize("case", CASES, ids=str)


def slow(core: Plan, x, context):
    """Gradients (B, D) and Hessians (B, D, D), one sample at a time, with their graphs."""
    gradients, hessians = [], []
    for row in range(len(x)):

        def energy(flat, row=row):
            return core.energy(flat.reshape(1, *x.shape[1:]), None if context is None else context[row : row + 1])[0]

        flat = x[row].flatten()
        gradients.append(torch.autograd.functional.jacobian(energy, flat, create_graph=True))
        hessians.append(torch.autograd.functional.hessian(energy, flat, create_graph=True))
    return torch.stack(gradients), torch.stack(hessians)


def assert_same(ours, reference, model):
    """The value, and the gradient of each parameter."""
    torch.testing.assert_close(ours, reference, rtol=1e-8, atol=1e-8)
    parameters = list(model.parameters())
    if not parameters:
        return
    found = torch.autograd.grad(ours, parameters, allow_unused=True, materialize_grads=True)
    wanted = torch.autograd.grad(reference, parameters, allow_unused=True, materialize_grads=True)
    for (name, _), one, two in zip(model.named_parameters(), found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-7, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")


def test_all_models_are_there():
    assert {case.name for case in CASES} == MODELS


@cases
def test_sm(case):
    model, x, context = ebf.wrap(case.build()), case.x(3), case.context(3)
    gradient, hessian = slow(model.core, model.preprocess(x)[0], context)
    reference = 0.5 * gradient.square().sum(1) - hessian.diagonal(dim1=1, dim2=2).sum(1)
    assert_same(SM(model)(x, context), reference.mean(), model)
    torch.testing.assert_close(SM(model).losses(x, context), reference)


@cases
@pytest.mark.parametrize("projection", ["rademacher", "gaussian", "sphere"])
def test_ssm(case, projection):
    model, x, context = ebf.wrap(case.build()), case.x(3), case.context(3)
    u = model.preprocess(x)[0]
    gradient, hessian = slow(model.core, u, context)
    generator, reference = rng(), 0.0
    for _ in range(2):
        v = score_matching.PROJECTIONS[projection](u, generator).flatten(1)
        reference = reference + (0.5 * gradient.square().sum(1) - torch.einsum("bi,bij,bj->b", v, hessian, v)) / 2
    ours = SSM(model, projections=2, projection=projection, generator=rng())
    assert_same(ours(x, context), reference.mean(), model)


@cases
def test_dsm(case):
    model, x, context = ebf.wrap(case.build()), case.x(3), case.context(3)
    u, sigma = model.preprocess(x)[0], 0.05
    moved = u + sigma * score_matching.gaussian_like(u, rng())
    gradient, _ = slow(model.core, moved, context)
    reference = 0.5 * (gradient + (u - moved).flatten(1) / sigma**2).square().sum(1)
    assert_same(DSM(model, sigma=sigma, generator=rng())(x, context), reference.mean(), model)


@cases
def test_fdssm(case):
    model, x, context = ebf.wrap(case.build()), case.x(3), case.context(3)
    u, eps = model.preprocess(x)[0], 0.2
    step = score_matching.sphere(u, rng())
    step = step * (eps / step.flatten(1).norm(dim=1).reshape(-1, *[1] * (u.dim() - 1)))
    energy, ahead, after = (model.core.energy(point, context) for point in (u, u + step, u - step))
    reference = (2 * energy - ahead - after + (ahead - after).square() / 8) * u[0].numel() / eps**2
    assert_same(FDSSM(model, eps=eps, generator=rng())(x, context), reference.mean(), model)


@cases
def test_ml_is_the_negative_log_likelihood_of_the_data(case):
    model, x, context = ebf.wrap(case.build()), case.x(3), case.context(3)
    reference = -case.own(model.flow, x, context)
    assert_same(ML(model)(x, context), reference.mean(), model)
    torch.testing.assert_close(ML(model).losses(x, context), reference)


@cases
def test_sml(case):
    if not case.own_sample and case.library != "nflows":
        pytest.skip("cannot be sampled")
    model, x, context = ebf.wrap(case.build()), case.x(3), case.context(3)
    drawn = draw(model.core, 3 if context is None else 1, context, rng(), x).detach()
    drawn = drawn.reshape(model.preprocess(x)[0].shape)
    reference = model.core.energy(model.preprocess(x)[0], context) - model.core.energy(drawn, context)
    assert_same(SML(model, generator=rng())(x, context), reference.mean(), model)


@cases
def test_fdssm_tends_to_ssm(case):
    """½(v·∇E)² - vᵀ∇²E v in the direction of the same v; the error falls with ε²."""
    model, x, context = ebf.wrap(case.build()), case.x(3), case.context(3)
    if "RationalQuadratic" in case.name:
        pytest.skip("not smooth")
    with torch.no_grad():
        u = model.preprocess(x)[0]
        v = score_matching.sphere(u, rng())
        found = derivatives(model.core, u, context, [v])
        limit = (0.5 * (found.gradient * v).flatten(1).sum(1).square() - found.curvatures[0]).mean()
        errors = [
            (FDSSM(model, eps=eps, generator=rng())(x, context) - limit).abs().item() for eps in (0.04, 0.02, 0.01)
        ]
    assert errors[2] < 1e-3 * (1 + abs(limit.item()))
    for larger, smaller in pairwise(errors):
        assert smaller < 0.3 * larger + 1e-7


def by_row(like, generator):
    """Noise that depends on the row alone."""
    return torch.sign(torch.sin(1e4 * like))


@pytest.fixture
def fixed_noise(monkeypatch):
    monkeypatch.setitem(score_matching.PROJECTIONS, "rademacher", by_row)
    monkeypatch.setattr(score_matching, "gaussian_like", by_row)
    monkeypatch.setattr(score_matching, "sphere", by_row)


SPLIT = {
    "ml": ML,
    "sm": SM,
    "ssm": SSM,
    "ssm, several": partial(SSM, projections=2),
    "ssm energy": partial(SSM, energy_weight=0.1),
    "dsm": partial(DSM, sigma=0.1),
    "fdssm": partial(FDSSM, eps=0.3),
}


@pytest.mark.usefixtures("fixed_noise")
@pytest.mark.parametrize("make", SPLIT.values(), ids=SPLIT)
@cases
def test_how_a_batch_is_split_makes_no_difference(case, make):
    model, x, context = ebf.wrap(case.build()), case.x(7), case.context(7)
    loss = make(model)
    whole, values = loss(x, context), loss.losses(x, context)
    torch.testing.assert_close(values.mean(), whole)
    for cut in (1, 3):
        parts = zip(
            x.tensor_split([cut]), (None, None) if context is None else context.tensor_split([cut]), strict=True
        )
        front, back = (loss(*part) for part in parts)
        torch.testing.assert_close((cut * front + (7 - cut) * back) / 7, whole)
        torch.testing.assert_close(front, values[:cut].mean())


@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 6),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    kind=st.sampled_from(["rademacher", "gaussian", "sphere"]),
)
@settings(max_examples=50, deadline=None)
def test_projections(seed, batch, shape, kind):
    like = torch.empty(batch, *shape, dtype=torch.float64)
    v = score_matching.PROJECTIONS[kind](like, rng(seed))
    assert v.shape == like.shape
    assert v.dtype == like.dtype
    assert torch.equal(v, score_matching.PROJECTIONS[kind](like, rng(seed)))
    size = like[0].numel()
    if kind != "gaussian":
        torch.testing.assert_close(v.flatten(1).square().sum(1), torch.full((batch,), float(size)).double())
    if kind == "rademacher":
        assert (v.abs() == 1).all()


@pytest.mark.parametrize("kind", ["rademacher", "gaussian", "sphere"])
def test_projections_have_the_identity_for_their_second_moment(kind):
    v = score_matching.PROJECTIONS[kind](torch.empty(200_000, 3, dtype=torch.float64), rng())
    moment = v.mT @ v / len(v)
    torch.testing.assert_close(moment, torch.eye(3).double(), atol=0.02, rtol=0)


@given(batch=st.integers(0, 4), name=st.sampled_from(["ml", "sml", "sm", "ssm", "fdssm", "dsm"]))
@settings(max_examples=30, deadline=None)
def test_batches_of_any_size(batch, name):
    case = CASES[0]
    values = make_objective(name, ebf.wrap(case.build())).losses(case.x(4)[:batch])
    assert values.shape == (batch,)
    assert torch.isfinite(values).all()
