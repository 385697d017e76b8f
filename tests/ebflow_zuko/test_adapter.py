"""What is specific to zuko: which classes are known, contexts, what its derivatives miss, base densities, sbi."""

import importlib
import inspect
import math
import pkgutil

import pytest
import torch
import zuko
from torch import nn
from torch.distributions import Transform
from zuko import transforms as T
from zuko.flows import ElementWiseTransform, GeneralCouplingTransform, MaskedAutoregressiveTransform
from zuko.lazy import Flow, LazyDistribution, LazyTransform, UnconditionalTransform

import ebflow_plugin as ebf
from case import subclasses
from cases import ZUKO_CASES
from ebflow_plugin.objectives import DSM, SSM
from ebflow_zuko import FullLinear
from ebflow_zuko.adapter import RULES, TRANSFORMS
from randomness import randn, rng
from zuko_parts import D, coupling, lu, normal, permutation, rotation
from zuko_small import flow_of

ABSTRACT = {"LazyTransform"}
CONDITIONED = {"AutoregressiveTransform", "CouplingTransform"}  # made by lazy transforms alone


def test_every_lazy_transform_of_zuko_is_registered_or_abstract():
    for module in pkgutil.walk_packages(zuko.__path__, "zuko."):
        if module.name != "zuko.conftest":
            importlib.import_module(module.name)
    names = {cls.__name__ for cls in subclasses(LazyTransform) if cls.__module__.startswith("zuko.")}
    assert names >= {"LazyInverse", "MaskedAutoregressiveTransform"}
    assert names - ABSTRACT <= set(RULES), names - ABSTRACT - set(RULES)


def test_every_transform_of_zuko_is_known_and_has_a_case():
    names = {name for name in T.__all__ if inspect.isclass(getattr(T, name))}
    assert len(names) >= 23
    assert names - CONDITIONED <= set(TRANSFORMS), names - CONDITIONED - set(TRANSFORMS)
    words = " ".join(case.name for case in ZUKO_CASES)
    reached = {"AutoregressiveTransform", "FreeFormJacobianTransform", "CouplingTransform"}  # by their lazy transforms
    assert all(name in words for name in names - reached), [name for name in names - reached if name not in words]


def test_every_flow_of_zuko_has_a_case():
    words = " ".join(case.name for case in ZUKO_CASES)
    flows = {cls.__name__ for cls in subclasses(Flow) if cls.__module__.startswith("zuko.")} - {"Flow"}
    assert len(flows) >= 11
    assert all(f"flows.{name}" in words for name in flows), flows


# Contexts


class Counted(LazyTransform):
    """A user's own lazy transform, which counts how often a context passes through it."""

    def __init__(self):
        super().__init__()
        self.net, self.calls = nn.Linear(3, D), 0

    def forward(self, c=None):
        self.calls += 1
        return T.ComposedTransform(T.AdditiveTransform(self.net(c)), T.TanhTransform(), T.SoftclipTransform())


class CountedBase(LazyDistribution):
    def __init__(self):
        super().__init__()
        self.net, self.calls = nn.Linear(3, D), 0

    def forward(self, c=None):
        self.calls += 1
        return zuko.distributions.DiagNormal(self.net(c), torch.ones_like(self.net.bias))


@pytest.mark.filterwarnings("ignore:.*steps are not known")
@pytest.mark.filterwarnings("ignore:.*may be wrong about")
def test_a_context_passes_each_lazy_module_once_a_call():
    layers = [Counted(), ElementWiseTransform(D, 3), GeneralCouplingTransform(D, 3), Counted()]
    flow = flow_of(*layers, base=CountedBase())
    networks = {"elementwise": layers[1].hyper, "coupling": layers[2].hyper}
    passed = dict.fromkeys(networks, 0)

    def count(name):
        def hook(module, args):
            passed[name] += 1

        return hook

    for name, network in networks.items():
        network.register_forward_pre_hook(count(name))
    model, x, c = ebf.wrap(flow), randn(5, D), randn(5, 3)
    objectives = [SSM(model), DSM(model, sigma=0.1)]
    for objective in objectives:
        objective(x, c)
    for call in (model.energy, model.score, model.log_prob, *objectives):
        for counted in (layers[0], layers[3], flow.base):
            counted.calls = 0
        passed.update(dict.fromkeys(networks, 0))
        call(x, c)
        assert (layers[0].calls, layers[3].calls, flow.base.calls) == (1, 1, 1), call
        assert passed == {"elementwise": 1, "coupling": 1}, call


def test_a_transform_that_was_built_without_a_context_goes_without():
    flow = flow_of(
        GeneralCouplingTransform(D, 3), ElementWiseTransform(D, univariate=T.BoundedBernsteinTransform, shapes=[(5,)])
    )
    x, c = randn(5, D), randn(5, 3)
    with pytest.raises(AttributeError):
        flow(c).log_prob(x)
    y, first = flow.transform.transforms[0](c).call_and_ladj(x)
    z, second = flow.transform.transforms[1]().call_and_ladj(y)
    expected = flow.base().log_prob(z) + first + second
    assert torch.allclose(ebf.wrap(flow).log_prob(x, c), expected)


# Classification


class Wave(Transform):
    """A user's own transform."""

    domain = codomain = torch.distributions.constraints.real
    bijective = True

    def __init__(self, height):
        super().__init__()
        self.height = height

    def _call(self, x):
        return x + self.height * torch.tanh(x)

    def log_abs_det_jacobian(self, x, y):
        return torch.log1p(self.height * (1 - torch.tanh(x) ** 2))


class Turned(T.RotationTransform):
    """A subclass is unknown, whatever it does."""


def test_unknown_classes_keep_their_own_log_det_with_one_warning():
    class Mine(LazyTransform):
        def forward(self, c=None):
            return T.SigmoidTransform()

    torch.manual_seed(0)
    layers = [
        UnconditionalTransform(Wave, torch.tensor(0.5)),
        UnconditionalTransform(Turned, torch.randn(D, D)),
        UnconditionalTransform(lambda a: T.RotationTransform(a), torch.randn(D, D)),
        Mine(),
    ]
    flow = Flow(layers, normal(D)).double()
    with pytest.warns(UserWarning, match="4 of 4 steps are not known") as caught:
        model = ebf.wrap(flow)
    assert len(caught) == 1
    assert [row.linearity for row in model.report] == ["nonlinear"] * 4
    assert torch.allclose(model.log_prob(randn(5, D)), flow().log_prob(randn(5, D)))
    with pytest.raises(ebf.UnsupportedStepError, match=r"transform.transforms.0  Wave \(zuko.lazy\): unknown class"):
        ebf.wrap(flow, strict=True)
    with pytest.warns(UserWarning, match="3 of 4"):
        told = ebf.wrap(flow, overrides={"transform.transforms.1": "linear"})
    assert told.report.rows[1].linearity == "linear"
    assert torch.allclose(told.log_prob(randn(5, D)), flow().log_prob(randn(5, D)))


def test_a_transform_inside_of_unconditional_can_be_registered():
    class Doubled(Transform):
        domain = codomain = torch.distributions.constraints.real_vector
        bijective = True

        def _call(self, x):
            return 2.0 * x

        def log_abs_det_jacobian(self, x, y):
            return torch.full_like(x[..., 0], D * math.log(2.0))

    flow = Flow(UnconditionalTransform(Doubled), normal(D)).double()
    ebf.register_linear(Doubled, apply=lambda module, x: 2.0 * x, log_det=lambda module, shape: D * math.log(2.0))
    model = ebf.wrap(flow, strict=True)
    assert (model.report.rows[0].linearity, model.report.rows[0].class_name) == ("linear", "Doubled")
    assert torch.allclose(model.log_prob(randn(5, D)), flow().log_prob(randn(5, D)))
    coupling = GeneralCouplingTransform(D, univariate=Wave, shapes=[()], activation=nn.Tanh)
    assert ebf.describe(flow_of(coupling)).rows[0].smoothness == "unknown"
    ebf.register_nonlinear(Wave, smoothness="smooth", force=True)
    assert ebf.describe(flow_of(coupling)).rows[0].smoothness == "smooth"


def test_a_base_of_batched_matrices_is_left_to_zuko():
    flow = Flow(
        UnconditionalTransform(T.LULinearTransform, torch.eye(D).expand(2, D, D).clone()), normal(2, D)
    ).double()
    with pytest.warns(UserWarning, match="not known"):
        model = ebf.wrap(flow)
    x = torch.randn(3, 2, D, dtype=torch.float64)
    assert torch.allclose(model.log_prob(x), flow().log_prob(x))


def test_a_flow_with_a_density_of_its_own_is_refused():
    class Mine(zuko.flows.MAF):
        def forward(self, c=None):
            return super().forward(None)

    with pytest.raises(ebf.UnsupportedStepError, match="Mine overrides forward"):
        ebf.wrap(Mine(D))


def test_paths_and_classes_are_those_of_the_user():
    flow = flow_of(
        permutation(), lu()(), rotation(), coupling()(), UnconditionalTransform(T.SoftclipTransform, bound=3.0).inv
    )
    rows = [(row.path, row.class_name, row.linearity, row.log_det_cost) for row in ebf.describe(flow)]
    assert rows == [
        ("transform.transforms.0", "PermutationTransform", "linear", "0"),
        ("transform.transforms.1", "LULinearTransform", "linear", "O(D)"),
        ("transform.transforms.2", "RotationTransform", "linear", "0"),
        ("transform.transforms.3", "GeneralCouplingTransform", "nonlinear", "-"),
        ("transform.transforms.4.transform", "SoftclipTransform", "nonlinear", "-"),
    ]
    assert ebf.describe(flow).base == "DiagNormal (4,)"


def test_what_is_not_exact_is_refused_with_the_reason():
    flow = zuko.flows.CNF(D)
    with pytest.raises(ebf.UnsupportedStepError, match=r"transform  FFJTransform .*differential equation"):
        ebf.wrap(flow)


def test_unconstrain_takes_rotations_lu_and_the_permutation_before():
    flow = flow_of(permutation(), lu(buffer=True)(), coupling()(), rotation(), lu()().inv)
    changes = []
    full = ebf.unconstrain(flow, changes=changes)
    assert [(one.path, one.old) for one in changes] == [
        ("transform.transforms.1", "LULinearTransform after PermutationTransform"),
        ("transform.transforms.3", "RotationTransform"),
        ("transform.transforms.4", "LULinearTransform"),
    ]
    assert [type(layer).__name__ for layer in full.transform.transforms] == [
        "FullLinear", "GeneralCouplingTransform", "FullLinear", "FullLinear",
    ]  # fmt: skip
    assert torch.allclose(full().log_prob(randn(5, D)), flow().log_prob(randn(5, D)))


# Derivatives


@pytest.mark.parametrize("name", ["SOSPF", "UNAF"])
@pytest.mark.parametrize("training", [True, False])
def test_second_derivatives_that_zuko_misses(name, training):
    """Its integrals hand on a derivative without a graph: half of the Hessian is gone, without an error."""
    torch.manual_seed(0)
    flow = getattr(zuko.flows, name)(3, transforms=2, hidden_features=(8,), activation=nn.Tanh).double().train(training)
    model, x, v, h = ebf.wrap(flow), randn(5, 3), randn(5, 3, seed=1), 1e-6

    def product(score):
        point = x.clone().requires_grad_()
        return torch.autograd.grad((score(point) * v).sum(), point)[0]

    def theirs(point):
        point = point if point.requires_grad else point.clone().requires_grad_()
        return torch.autograd.grad(flow().log_prob(point).sum(), point, create_graph=True)[0]

    expected = (model.score(x + h * v) - model.score(x - h * v)).detach() / (2 * h)
    assert torch.allclose(product(model.score), expected, atol=1e-3)  # the quadrature of a UMNN is good to 1e-4
    assert torch.allclose(theirs(x), model.score(x))
    assert (product(theirs) - expected).abs().max() > 0.1
    assert {row.smoothness for row in model.report} == {"smooth", "score jumps"}  # a Softclip between


def test_parameters_of_an_integrand_get_their_gradient_in_eval_mode():
    """zuko drops what comes through the integral there."""
    torch.manual_seed(0)
    flow = zuko.flows.UNAF(2, transforms=1, hidden_features=(8,)).double()
    weight = flow.transform.transforms[0].univariate.integrand[0].weight
    x = randn(5, 2)
    (expected,) = torch.autograd.grad(flow.train()().log_prob(x).sum(), weight)
    (theirs,) = torch.autograd.grad(flow.eval()().log_prob(x).sum(), weight)
    (ours,) = torch.autograd.grad(ebf.wrap(flow).log_prob(x).sum(), weight)
    assert torch.allclose(ours, expected)
    assert not torch.allclose(theirs, expected, rtol=1e-2)


def test_what_stands_behind_a_fixed_monotonic_function_can_be_trained():
    """zuko frees the graph of the function, so that a backward pass through its value raises."""
    flow = flow_of(UnconditionalTransform(T.MonotonicTransform, torch.sinh), FullLinear(D))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        flow().log_prob(randn(5, D)).sum().backward()
    ebf.wrap(flow).log_prob(randn(5, D)).sum().backward()
    assert flow.transform.transforms[1].weight.grad.abs().sum() > 0
    with torch.no_grad():
        assert not ebf.wrap(flow).log_prob(randn(5, D)).requires_grad


def test_numeric_inverses_are_precise_and_differentiable():
    torch.manual_seed(0)
    flow = zuko.flows.NAF(3, transforms=1, hidden_features=(8,)).double().eval()
    model, x = ebf.wrap(flow), 0.5 * randn(5, 3)
    z = flow().transform(x)
    assert (model.plan.decode((z,)) - x).abs().max() < 1e-12
    assert (flow().transform.inv(z) - x).abs().max() > 1e-9
    iaf = Flow(flow.transform.inv, flow.base)
    assert ebf.verify(iaf, x)


def test_inference_mode():
    for name in ("NAF", "GF", "BPF"):
        flow = getattr(zuko.flows, name)(3, transforms=1).double()
        model = ebf.wrap(flow)
        expected = model.log_prob(randn(5, 3))
        with torch.inference_mode():
            assert torch.allclose(model.log_prob(randn(5, 3)), expected)


def test_networks_of_the_context_alone_do_no_harm_to_the_score():
    assert [row.smoothness for row in ebf.describe(flow_of(ElementWiseTransform(D, 3)))] == ["smooth"]
    smoothness = [ebf.describe(flow_of(MaskedAutoregressiveTransform(D, activation=kind))).rows[0].smoothness
                  for kind in (nn.ReLU, nn.Tanh)]  # fmt: skip
    assert smoothness == ["score jumps", "smooth"]


# Base densities and estimators


def test_conditional_bases_are_sampled_by_their_context():
    flow = flow_of(ElementWiseTransform(D, univariate=T.AdditiveTransform, shapes=[()]), base=CountedBase())
    model, c = ebf.wrap(flow), randn(3, 3)
    samples = model.sample(4000, c, generator=rng(0))
    assert samples.shape == (3, 4000, D)
    shift = flow.transform.transforms[0].phi[0]
    assert torch.allclose(samples.mean(1), flow.base.net(c) - shift, atol=0.1)


def test_calibration_and_temperature_know_the_gaussian():
    flow = flow_of(FullLinear(D, init="orthogonal"))
    model, x = ebf.wrap(flow), 2.0 * randn(400, D) + 1.0
    before = model.log_prob(x).mean()
    model.calibrate(x)
    assert model.log_prob(x).mean() > before
    cold = ebf.wrap(flow).sample(2000, temperature=0.1, generator=rng(0))
    warm = ebf.wrap(flow).sample(2000, generator=rng(0))
    assert torch.allclose(cold.std(0), 0.1 * warm.std(0), rtol=1e-6)


@pytest.mark.parametrize(("make", "size"), [("NSF", 3), ("NICE", 4), ("RealNVP", 5), ("GF", 3), ("MAF", 2), ("BPF", 2)])
def test_a_forgotten_context_is_named(make, size):
    """With NICE(4, 2) as many features change as the context has, so that the network would take them for it."""
    model = ebf.wrap(getattr(zuko.flows, make)(size, 2))
    x = torch.rand(4, size)
    for call in (model.log_prob, model.score):
        with pytest.raises(ebf.ContextError, match=r"Pass context="):
            call(x)
    with pytest.raises(ebf.ContextError):
        model.sample(2)


def test_our_layers_go_beside_a_context():
    flow, x, context = flow_of(FullLinear(D, init="orthogonal")), randn(3, D), randn(3, 2)
    assert torch.allclose(ebf.wrap(flow).log_prob(x, context), flow(context).log_prob(x))
