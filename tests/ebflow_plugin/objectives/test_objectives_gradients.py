"""Gradients reach every parameter that matters, on every model there is, and nothing that is the user's."""

import copy
import pickle

import pytest
import torch
from nflows.distributions.normal import StandardNormal
from nflows.flows.base import Flow
from nflows.transforms import ActNorm, AffineCouplingTransform, LULinear
from torch import nn

import ebflow_plugin as ebf
from cases import SUPPORTED, Case
from ebflow_plugin import testing
from ebflow_plugin.objectives import DSM, FDSSM, ML, SM, SML, SSM, make_objective
from ebflow_plugin.objectives.unseen import unseen_parameters
from ebflow_plugin.plan.smoothness import Smoothness
from nflows_small import OwnNetwork, flow_of
from randomness import rng

pytestmark = pytest.mark.filterwarnings("ignore")  # what objectives warn about is the subject of test_checks.py

OPTIONS = {"ml": {}, "sml": {}, "sm": {}, "ssm": {}, "fdssm": {}, "dsm": {}, "dsm, range": {"sigma_range": (0.1, 1.0)}}
every = pytest.mark.parametrize("name", OPTIONS)


def made(name, model, **options):
    return make_objective(name.split(",")[0], model, **OPTIONS[name], **options)


def named(case_name: str) -> Case:
    return next(case for case in SUPPORTED if case.name == case_name)


def nsf():
    """A model with an embedding, data for it and contexts."""
    case = named("NSF: LU + RQ-spline coupling, context, embedding_net (eval)")
    return ebf.wrap(case.build()), case.x(3), case.context(3)


def changed(model, names, *functions):
    """For each function, which of these trainable parameters change its values when they change."""
    before, found = [function().detach() for function in functions], [set() for _ in functions]
    for name, parameter in model.named_parameters():
        if name not in names or not parameter.requires_grad:
            continue
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(1e-4 * torch.randn(kept.shape, generator=rng(), dtype=kept.dtype))
        after = [function().detach() for function in functions]
        with torch.no_grad():
            parameter.copy_(kept)
        for changing, old, new in zip(found, before, after, strict=True):
            if (new - old).abs().max() > 1e-9 * (1 + old.abs().max()):
                changing.add(name)
    return found


def without_gradient(loss, x, context):
    """The parameters that a loss gives no gradient; all other gradients are finite."""
    loss.zero_grad()
    value = loss(x, context)
    assert torch.isfinite(value), f"{type(loss).__name__} is {value.item()}"
    if value.requires_grad:
        value.backward()
    gradients = {name: parameter.grad for name, parameter in loss.model.named_parameters()}
    bad = [name for name, gradient in gradients.items() if gradient is not None and not gradient.isfinite().all()]
    assert not bad, f"{type(loss).__name__} gives {bad} a gradient that is not finite"
    return {name for name, gradient in gradients.items() if gradient is None or not gradient.any()}


@pytest.mark.parametrize("case", SUPPORTED, ids=str)
def test_every_parameter_that_matters_gets_a_finite_gradient(case):
    """What has no gradient must not matter: a change of it changes no density, or no score."""
    model, x, context = ebf.wrap(case.build()), case.x(3), case.context(3)
    model.initialize(x, context)
    core, u = model.core, model.preprocess(x)[0]
    losses = [ML(model), FDSSM(model, eps=0.02, generator=rng())]
    if any(step.smoothness == Smoothness.WRONG for step in core.steps):
        for cls in (SSM, DSM):
            with pytest.raises(ebf.UnsupportedStepError):
                cls(model)
    else:  # σ is inside of every domain
        losses += [SSM(model, generator=rng()), DSM(model, sigma=1e-3, generator=rng())]
    likelihood, *scores = (without_gradient(loss, x, context) for loss in losses)
    unseen = {f"flow.{name}" for name in unseen_parameters(model, u, context)}
    asked = likelihood.union(unseen, *scores)
    in_likelihood, in_score = changed(model, asked, lambda: model.log_prob(x, context), lambda: core.score(u, context))
    assert in_score <= in_likelihood
    assert not in_score & unseen, "a false alarm"
    for loss, names in zip(losses, (likelihood, *scores), strict=True):
        lost = names & (in_likelihood if isinstance(loss, ML) else in_score)
        assert not lost, f"{type(loss).__name__} gives {lost} no gradient"


@pytest.mark.parametrize(
    "case",
    [case for case in SUPPORTED if case.domain == "real" and case.own_sample and case.own_inverse][::5],
    ids=str,
)
def test_sml_gives_finite_gradients(case):
    model, x, context = ebf.wrap(case.build()), case.x(3), case.context(3)
    model.initialize(x, context)
    value = SML(model, generator=rng())(x, context)
    assert torch.isfinite(value)
    if value.requires_grad:
        value.backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


@every
def test_gradients_are_for_the_flow_alone(name):
    """X may come out of a network that is trained by something else."""
    model, x, context = nsf()
    source = torch.ones((), dtype=torch.float64, requires_grad=True)
    before = x.clone(), context.clone()
    x.requires_grad_()
    for given in (x, x * source):
        made(name, model, generator=rng())(given, context).backward()
    assert x.grad is None
    assert source.grad is None
    assert x.requires_grad
    assert not context.requires_grad
    assert torch.equal(x, before[0])
    assert torch.equal(context, before[1])
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.flow._embedding_net.parameters())


@every
def test_an_objective_holds_the_flow_in_its_mode(name):
    model, _, _ = nsf()
    loss = made(name, model.eval())
    assert {id(p) for p in loss.parameters()} == {id(p) for p in model.flow.parameters()}
    assert len(list((loss + made("ml", model)).parameters())) == len(list(model.flow.parameters()))
    assert not loss.training
    assert not model.flow.training
    loss.train()
    assert model.flow.training
    assert (2.0 * loss).training


@every
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_value_is_the_same_without_gradients_and_in_copies(name, mode):
    model, x, context = nsf()
    loss = 2.0 * made(name, model, generator=rng())
    wanted = loss(x, context)
    with mode():
        value = made(name, model, generator=rng())(x.clone(), context.clone())
    assert not value.requires_grad
    torch.testing.assert_close(2.0 * value, wanted.detach())
    loss.terms[0].generator.manual_seed(0)
    for copied in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert not {id(p) for p in copied.parameters()} & {id(p) for p in loss.parameters()}
        assert torch.equal(copied(x, context), wanted)
    single = made(name, model.float(), generator=rng())(x.float(), context.float())
    assert (single.dtype, value.dtype) == (torch.float32, torch.float64)


@every
def test_the_same_seed_gives_the_same_value(name):
    model, x, context = nsf()
    loss = made(name, model, generator=rng(1))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first, second = loss(x, context), loss(x, context)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    if name not in ("ml", "sm"):
        assert not torch.equal(first, second)
    loss.generator.manual_seed(1)
    assert torch.equal(loss(x, context), first)
    assert torch.equal(loss(x, context), second)
    flow = Flow(LULinear(4), StandardNormal([4])).double()
    model = ebf.wrap(flow, preprocess=[ebf.Dequantize(16, noise="smooth"), ebf.Rescale(0.05, 0.95), ebf.Logit()])
    levels = torch.randint(16, (5, 4), generator=rng())
    first, second, third = (made(name, model, generator=rng(seed))(levels) for seed in (1, 1, 2))
    assert torch.equal(first, second), "the noise of Dequantize is not seeded"
    assert not torch.equal(first, third)


@every
def test_preprocessed_data_are_matched_behind_the_preprocessing(name):
    """MaP: the objective of the model is that of its core on the matched variable (ML: plus the log-det)."""
    case = named("Logit + Glow step: img in [0,1] (eval)")
    model, x = ebf.wrap(case.build()), case.x(3)
    assert 0 < len(model.prefix.steps) < len(model.plan.steps)
    u, log_det = model.preprocess(x)
    loss = made(name, model)
    value, inside = loss(x, generator=rng()), loss.per_sample(model.core, u, None, rng()).mean()
    torch.testing.assert_close(value, inside - log_det.mean() if name == "ml" else inside)


def act_norm_flow():
    coupling = AffineCouplingTransform([0, 1, 0, 1], lambda i, o: OwnNetwork(None, i, o))
    return flow_of(ActNorm(4), coupling, ActNorm(4), shape=(4,))


@every
def test_the_clean_batch_initialises_actnorm_once_and_not_in_eval_mode(name):
    x = 3.0 + 2.0 * torch.randn(50, 4, generator=rng(), dtype=torch.float64)
    flow, reference = act_norm_flow(), act_norm_flow()
    reference.load_state_dict(flow.state_dict())
    options = {"dsm": {"sigma": 5.0}, "fdssm": {"eps": 5.0}}.get(name, {})
    loss = made(name, ebf.wrap(flow.eval()), generator=rng(), **options)
    for start, rows in ((None, x), (x, x), (None, 10 * x)):
        if start is not None:
            ebf.wrap(reference).initialize(start)
            loss.train()
        loss(rows)
        for key, wanted in reference.state_dict().items():
            assert torch.equal(flow.state_dict()[key], wanted), key


@every
@pytest.mark.parametrize("generator", [None, rng()], ids=["global", "of the cpu"])
@pytest.mark.parametrize(
    "case_name",
    ["ConditionalDiagonalNormal base: vec, context=3, encoder (eval)", "ActNorm: img, initialized (train)"],
)
def test_no_operation_mixes_devices_or_waits(name, generator, case_name):
    """On the meta device: whatever asks for a value raises there."""
    case = named(case_name)
    if name == "sm" and case.dim > 10:
        pytest.skip("many Hessian products")
    if name == "sml" and generator is not None:
        pytest.skip("a seeded sample of a library without generators reads one number")
    model = ebf.wrap(case.build().to("meta"))
    x, context = case.x(3).to("meta"), None if case.context(3) is None else case.context(3).to("meta")
    options = {} if name in ("ml", "sml") else {"energy_weight": 0.1}
    loss = made(name, model, generator=generator, **options)
    with testing.one_device(torch.device("meta")):
        value = loss(x, context)
        value.backward()
    assert value.is_meta
    assert value.shape == ()


@pytest.mark.parametrize("name", ["sm", "ssm", "fdssm", "dsm"])
def test_score_matching_needs_no_determinant(name):
    """Contract 3, for a whole training step."""
    case = named("NaiveLinear stack: vec, orthogonal_initialization=False, LeakyReLU(0.5) (train)")
    model, x = ebf.wrap(case.build()), case.x(3)
    loss = make_objective(name, model, generator=rng())
    with testing.no_factorisation():
        loss(x).backward()
    with pytest.raises(AssertionError, match="slogdet"), testing.no_factorisation():
        ML(model)(x)


def test_an_objective_of_another_library_takes_the_model():
    """As torchebm has them: a loss that is made with an energy model and called on data."""

    class ContrastiveDivergence(nn.Module):
        def __init__(self, model, k_steps, step_size):
            super().__init__()
            self.model, self.k_steps, self.step_size = model, k_steps, step_size

        def forward(self, x):
            negative = x.detach().clone()
            for _ in range(self.k_steps):
                negative.requires_grad_()
                (gradient,) = torch.autograd.grad(self.model(negative).sum(), negative)
                noise = torch.randn(negative.shape, generator=self.generator, dtype=x.dtype)
                negative = (negative - self.step_size * gradient + (2 * self.step_size) ** 0.5 * noise).detach()
            return self.model(x).mean() - self.model(negative).mean(), negative

    torch.manual_seed(0)
    model = ebf.wrap(Flow(LULinear(2), StandardNormal([2])).double())
    contrastive = ContrastiveDivergence(model, k_steps=30, step_size=0.05)
    contrastive.generator = rng()
    x = 0.5 * torch.randn(2000, 2, generator=rng(), dtype=torch.float64)
    optimiser = torch.optim.Adam(contrastive.parameters(), lr=0.05)
    before = -model.log_prob(x).mean().item()
    for _ in range(60):
        optimiser.zero_grad()
        loss, _ = contrastive(x)
        loss.backward()
        optimiser.step()
    after = -model.log_prob(x).mean().item()
    best = -torch.distributions.Normal(0.0, 0.5).log_prob(x).sum(1).mean().item()
    assert after - best < 0.1 * (before - best)


def test_torchebm_takes_the_model():
    losses = pytest.importorskip("torchebm.losses")
    model = ebf.wrap(Flow(LULinear(2), StandardNormal([2])))
    loss = losses.SlicedScoreMatching(model=model)(torch.randn(64, 2))
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("make", [SM, SSM, lambda model, **o: FDSSM(model, eps=0.3, **o)], ids=["SM", "SSM", "FDSSM"])
def test_training_finds_a_gaussian(make):
    """From a wrong start to the moments of the data, which a wrong sign or scale would not find."""
    torch.manual_seed(0)
    mixing = torch.tensor([[1.0, 0.0], [0.8, 0.5]], dtype=torch.float64)
    x = torch.randn(20_000, 2, generator=rng(5), dtype=torch.float64) @ mixing.mT + 1.0
    model = ebf.wrap(Flow(LULinear(2), StandardNormal([2])).double())
    loss = make(model, generator=rng())
    optimiser = torch.optim.LBFGS(loss.parameters(), max_iter=50, line_search_fn="strong_wolfe")

    def closure():
        loss.generator.manual_seed(6)
        optimiser.zero_grad()
        value = loss(x)
        value.backward()
        return value

    for _ in range(3):
        optimiser.step(closure)
    weight, bias = model.flow._transform.weight().detach(), model.flow._transform.bias.detach()
    torch.testing.assert_close(torch.linalg.inv(weight.mT @ weight), torch.cov(x.mT), atol=0.1, rtol=0)
    torch.testing.assert_close(-torch.linalg.solve(weight, bias), x.mean(0), atol=0.1, rtol=0)
