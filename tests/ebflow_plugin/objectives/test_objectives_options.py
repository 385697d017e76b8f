"""Options, names, sums, and what is said about bad ones."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nflows.distributions.normal import StandardNormal
from nflows.flows.base import Flow
from nflows.transforms import LULinear

import ebflow_plugin as ebf
from ebflow_plugin.errors import EBFlowError
from ebflow_plugin.objectives import (
    DSM,
    FDSSM,
    ML,
    SM,
    SML,
    SSM,
    Objective,
    WeightedSum,
    make_objective,
    register_objective,
)
from ebflow_plugin.objectives.registration import OBJECTIVES
from ebflow_plugin.plan.inputs import check_input
from randomness import randn, rng

BUILT_IN = {"ml": ML, "sml": SML, "sm": SM, "ssm": SSM, "fdssm": FDSSM, "dsm": DSM}


def make_model(size=2):
    torch.manual_seed(0)
    return ebf.wrap(Flow(LULinear(size, identity_init=False), StandardNormal([size])).double())


@pytest.fixture
def model():
    return make_model()


@pytest.fixture
def x():
    return randn(6, 2)


@pytest.fixture
def registry():
    """Forgets what a test registers."""
    kept = dict(OBJECTIVES)
    yield
    OBJECTIVES.clear()
    OBJECTIVES.update(kept)


@pytest.mark.parametrize(("name", "cls"), BUILT_IN.items())
def test_by_name(model, x, name, cls):
    made = make_objective(name, model, generator=rng())
    assert type(made) is cls
    assert torch.equal(made(x), cls(model, generator=rng())(x))
    assert type(make_objective(name.upper(), model)) is cls


def test_an_unknown_name_gets_a_suggestion(model):
    with pytest.raises(
        ebf.UnknownNameError, match=r"unknown objective 'ssmm'. Did you mean 'ssm'\? Valid names: dsm, fd"
    ):
        make_objective("ssmm", model)
    with pytest.raises(ebf.InputError, match="the name of an objective is a string"):
        make_objective(SSM, model)


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("ssm", "projection_count", "SSM has no option 'projection_count'. Did you mean 'projection'"),
        ("dsm", "sigm", r"DSM has no option 'sigm'. Did you mean 'sigma'\? Valid names: energy_weight, generator,"),
        ("ml", "sigma", "ML has no option 'sigma'. Valid names: generator, iterations, log_det, probes,"),
        ("ml", "energy_weight", "ML has no option 'energy_weight'."),
        ("ssm", "reduction", "SSM has no option 'reduction'."),
    ],
)
def test_an_unknown_option_is_named_with_those_there_are(model, name, option, message):
    with pytest.raises(ebf.UnknownNameError, match=message):
        make_objective(name, model, **{option: 1})
    with pytest.raises(ebf.UnknownNameError, match=message):
        BUILT_IN[name](model, **{option: 1})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ssm", {"projections": 0}, "projections must be an integer, at least 1, got 0"),
        ("ssm", {"projections": 1.5}, "projections must be an integer"),
        ("ssm", {"projections": True}, "projections must be an integer"),
        ("ssm", {"projection": "gausian"}, "unknown projection 'gausian'. Did you mean 'gaussian'"),
        ("ssm", {"projection": None}, "unknown projection None. Valid names: gaussian, rademacher, sphere"),
        ("fdssm", {"eps": 0}, "eps must be a positive number, got 0"),
        ("fdssm", {"eps": -0.1}, "eps must be a positive number, got -0.1"),
        ("fdssm", {"eps": math.nan}, "eps must be a positive number, got nan"),
        ("fdssm", {"eps": "0.1"}, "eps must be a positive number, got '0.1'"),
        ("dsm", {"sigma": 0.0}, "sigma must be a positive number, got 0.0"),
        ("dsm", {"sigma": -1}, "sigma must be a positive number, got -1"),
        ("dsm", {"sigma": math.inf}, "sigma must be .*got inf"),
        ("dsm", {"sigma": [0.1, 1.0]}, r"sigma must be a positive number, got \[0.1, 1.0\]"),
        ("dsm", {"sigma": "0.1"}, "sigma must be .*got '0.1'"),
        ("dsm", {"sigma_range": (1.0, 0.1)}, r"sigma_range must be .*low < high, got \(1.0, 0.1\)"),
        ("dsm", {"sigma_range": (0.1, 0.5, 1.0)}, r"sigma_range must be .*got \(0.1, 0.5, 1.0\)"),
        ("dsm", {"sigma_range": (0.0, 1.0)}, "sigma_range must be a positive number, got 0.0"),
        ("dsm", {"sigma_range": 0.5}, "sigma_range must be .*got 0.5"),
        ("dsm", {"sigma": 1.0, "sigma_range": (0.1, 1.0)}, r"sigma or sigma_range, not both; got 1.0 and \(0.1, 1.0\)"),
        ("sm", {"energy_weight": -1.0}, "energy_weight must be a finite number, at least 0, got -1.0"),
        ("ssm", {"energy_weight": math.nan}, "energy_weight must be a finite number"),
        ("ml", {"generator": 0}, "generator must be a torch.Generator or None, got 0"),
    ],
)
def test_bad_options(model, name, options, message):
    with pytest.raises(ebf.InputError, match=message):
        make_objective(name, model, **options)


@pytest.mark.parametrize("cls", BUILT_IN.values())
def test_a_flow_must_be_wrapped_first(model, cls):
    with pytest.raises(ebf.InputError, match=r"needs an EBFlow, got nflows.*Flow; wrap it first: .*wrap\(flow\)"):
        cls(model.flow)


@pytest.mark.parametrize("name", BUILT_IN)
def test_bad_data(model, x, name):
    loss = make_objective(name, model)
    for args, message in (
        (([[0.0, 0.0]],), "x must be a tensor, got list"),
        ((torch.zeros(6, 3).double(),), r"x must have shape \(B, 2\), got \(6, 3\)"),
        ((x.float(),), "x is torch.float32, the flow is torch.float64"),
        ((x, x[:4]), r"context must have 6 rows, as x has, got shape \(4, 2\)"),
        ((x, 3), "context must be a tensor, got int"),
        ((x[:0],), "x holds no samples"),
    ):
        with pytest.raises(ebf.InputError, match=message):
            loss(*args)
    assert loss.losses(x[:0]).shape == (0,)


@pytest.mark.parametrize("name", BUILT_IN)
def test_data_are_checked_once(name, monkeypatch):
    calls = []

    def counted(*args, **options):
        calls.append(args)
        return check_input(*args, **options)

    flow = Flow(LULinear(2), StandardNormal([2])).double()
    loss = make_objective(name, ebf.wrap(flow, preprocess=[ebf.Rescale(0.05, 0.95), ebf.Logit()]))
    monkeypatch.setattr("ebflow_plugin.planned.check_input", counted)
    loss(torch.rand(6, 2, generator=rng()).double())
    assert len(calls) == 1


def test_a_weighted_sum(model, x):
    total = 0.9 * SSM(model, generator=rng()) + ML(model) * 0.1
    assert isinstance(total, WeightedSum)
    assert total.weights == (0.9, 0.1)
    assert total.model is model
    torch.testing.assert_close(sum([ML(model), SM(model)])(x), ML(model)(x) + SM(model)(x))
    torch.testing.assert_close(total(x), 0.9 * SSM(model, generator=rng())(x) + 0.1 * ML(model)(x))
    total = 0.5 * ML(model) + SM(model)
    torch.testing.assert_close(total.losses(x), 0.5 * ML(model).losses(x) + SM(model).losses(x))
    torch.testing.assert_close(total.losses(x).mean(), total(x))


@given(weights=st.lists(st.floats(-3, 3), min_size=1, max_size=4), outer=st.floats(-3, 3))
@settings(max_examples=25, deadline=None)
def test_nested_sums_are_one_sum(weights, outer):
    model, x = make_model(), torch.randn(4, 2, generator=rng(), dtype=torch.float64)
    inner = sum(weight * ML(model) for weight in weights)
    total = outer * (inner + SM(model))
    assert [type(term) for term in total.terms] == [ML] * len(weights) + [SM]
    torch.testing.assert_close(total(x), outer * (sum(weights) * ML(model)(x) + SM(model)(x)))
    assert "weights=" in repr(total)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_generator_of_a_call_replaces_that_of_the_objective(model, x, name):
    first = make_objective(name, model, generator=rng(1))(x)
    loss, own = make_objective(name, model, generator=rng(2)), rng(2).get_state()
    assert torch.equal(loss(x, generator=rng(1)), first)
    torch.testing.assert_close(loss.losses(x, generator=rng(1)).mean(), first)
    assert torch.equal(loss.generator.get_state(), own)


def test_all_terms_of_a_sum_draw_from_the_generator_of_a_call(model, x):
    loss = 0.5 * SSM(model, generator=rng(5)) + 0.5 * DSM(model)
    generator = rng()
    expected = 0.5 * SSM(model, generator=generator)(x) + 0.5 * DSM(model, generator=generator)(x)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    torch.testing.assert_close(loss(x, generator=rng()), expected)
    torch.testing.assert_close(loss.losses(x, generator=rng()).mean(), expected)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ebf.InputError, match="generator must be a torch.Generator or None, got 0"):
        loss(x, generator=0)


def test_descriptions_tell_the_options(model):
    assert SML(model).describe() == "SML()"
    total = 0.9 * SSM(model, projections=2) + 0.1 * ML(model)
    ssm = "SSM(projections=2, projection='rademacher', energy_weight=0)"
    assert total.describe() == f"0.9 * {ssm} + 0.1 * ML(log_det='exact')"
    assert "projections=2, projection='sphere', energy_weight=0" in repr(SSM(model, projections=2, projection="sphere"))
    dsm = DSM(model, sigma_range=(0.1, 1.0), energy_weight=0.001)
    assert "sigma_range=(0.1, 1.0), energy_weight=0.001" in repr(dsm)
    assert "eps=0.2" in repr(FDSSM(model, eps=0.2))


def test_sums_that_make_no_sense(model):
    with pytest.raises(ebf.InputError, match="SSM and ML are objectives of different models"):
        SSM(model) + ML(make_model())
    with pytest.raises(ebf.InputError, match="the weight of ML must be a finite number, got nan"):
        math.nan * ML(model)
    with pytest.raises(ebf.InputError, match="at least one objective"):
        WeightedSum([])
    for terms in ([ML(model)], [(1.0, "ml")], ML(model), 3):
        with pytest.raises(ebf.InputError, match="the terms of a sum are pairs of a weight and an objective"):
            WeightedSum(terms)
    for other in (1.0, "ml", None):
        with pytest.raises(TypeError):
            ML(model) + other
    with pytest.raises(TypeError):
        ML(model) * "2"


@pytest.mark.usefixtures("registry")
def test_a_function_of_the_users_own(model, x):
    @register_objective("contrast")
    def contrast(model, x, context, *, spread=1.0):
        return (model.energy(x, context) - model.energy(spread * x.flip(0), context)).square().mean()

    made = make_objective("Contrast", model, spread=2.0)
    torch.testing.assert_close(made(x), contrast(model, x, None, spread=2.0))
    assert "contrast" in repr(made)
    assert "spread=2.0" in repr(made)
    total = 0.5 * made + 0.5 * ML(model)
    total(x).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    given = x.clone().requires_grad_()
    made(given).backward()
    assert given.grad is None
    with pytest.raises(ebf.UnknownNameError, match=r"contrast has no option 'sprad'. Did you mean 'spread'\?"):
        make_objective("contrast", model, sprad=2.0)
    with pytest.raises(EBFlowError, match="objective 'contrast' is registered already; pass force=True"):
        register_objective("contrast")(contrast)
    register_objective("contrast", force=True)(contrast)
    register_objective("each")(lambda model, x, context: model.energy(x, context))
    with pytest.raises(ebf.InputError, match=r"must return a scalar tensor, got \(6,\); take the mean"):
        make_objective("each", model)(x)


@pytest.mark.usefixtures("registry")
def test_a_class_of_the_users_own(model, x):
    @register_objective("moment")
    class Moment(Objective):
        def __init__(self, model, *, power=2, **common):
            super().__init__(model, **common)
            self.power = power

        def per_sample(self, plan, u, context, generator):
            return plan.energy(u, context).pow(self.power)

    made = make_objective("moment", model, power=3)
    torch.testing.assert_close(made.losses(x), model.energy(x) ** 3)
    torch.testing.assert_close(made(x), (model.energy(x) ** 3).mean())
    with pytest.raises(ebf.UnknownNameError, match="Moment has no option 'powr'. Did you mean 'power'"):
        make_objective("moment", model, powr=3)


@pytest.mark.usefixtures("registry")
def test_what_cannot_be_registered(model):
    with pytest.raises(TypeError, match="abstract.*per_sample"):
        Objective(model)
    with pytest.raises(ebf.InputError, match="int is no subclass of ebflow_plugin.objectives.Objective"):
        register_objective("number")(int)
    with pytest.raises(ebf.InputError, match="an objective is a class or a function, got 3"):
        register_objective("three")(3)
    with pytest.raises(ebf.InputError, match=r"write @register_objective\('name'\)"):
        register_objective(SSM)


@pytest.mark.parametrize("cls", BUILT_IN.values())
def test_docstrings_have_equation_cost_and_example(cls):
    for word in (".. math::", "Cost:", "Use it", "Example:", "Arguments:"):
        assert word in cls.__doc__, word
