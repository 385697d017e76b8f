"""MaP: log_prob does not change, score matching begins after the fixed steps, and bad prefixes are refused."""

import copy
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nflows import distributions, flows, transforms
from nflows.transforms.nonlinearities import CauchyCDFInverse

import ebflow_plugin as ebf
import nflows_small
from matched import log_prob
from randomness import rng

D = 3
flow_of = partial(nflows_small.flow_of, shape=(D,), mode="eval", noise=0.2)


def unit_data(batch=6, seed=0):
    return 0.05 + 0.9 * torch.rand(batch, D, dtype=torch.float64, generator=rng(seed))


def affine(low=0.05, high=0.95):
    return transforms.PointwiseAffineTransform(shift=low, scale=high - low)


@pytest.mark.parametrize(
    ("layers", "count"),
    [
        ([transforms.Logit(), transforms.LULinear(D)], 1),
        ([affine(), transforms.Logit(), transforms.LULinear(D)], 2),
        ([affine(), transforms.Logit(), affine(0.0, 2.0), transforms.LULinear(D)], 2),
        ([affine(), transforms.Logit(), transforms.Tanh(), transforms.InverseTransform(transforms.Tanh())], 4),
        ([affine(), transforms.LULinear(D)], 0),
        ([transforms.LULinear(D), transforms.Logit()], 0),
        ([transforms.InverseTransform(transforms.Sigmoid(learn_temperature=True)), transforms.LULinear(D)], 0),
        ([transforms.Sigmoid(), transforms.LULinear(D)], 0),
        ([transforms.RandomPermutation(D), CauchyCDFInverse()], 2),
    ],
)
def test_auto_finds_the_longest_fixed_run_that_ends_in_a_sensitive_step(layers, count):
    model = ebf.wrap(flow_of(*layers))
    assert model.report.preprocessing == count
    assert len(model.core.steps) == len(model.plan.steps) - count
    assert [step.path for step in model.prefix.steps] == [step.path for step in model.plan.steps[:count]]
    assert ("(MaP)" in model.report.summary) == (count > 0)


prefixes = st.lists(st.sampled_from(["affine", "permutation", "reverse", "sigmoid-logit", "identity"]), max_size=3)


@given(prefix=prefixes, seed=st.integers(0, 5), how=st.sampled_from(["auto", "index", "path", "none"]))
@settings(max_examples=40, deadline=None)
def test_log_prob_is_the_same_with_and_without(prefix, seed, how):
    make = {
        "affine": affine,
        "permutation": lambda: transforms.RandomPermutation(D),
        "reverse": lambda: transforms.ReversePermutation(D),
        "sigmoid-logit": lambda: transforms.CompositeTransform([transforms.Sigmoid(), transforms.Logit()]),
        "identity": transforms.IdentityTransform,
    }
    layers = [*(make[name]() for name in prefix), affine(0.2, 0.4), transforms.Logit(), transforms.LULinear(D)]
    flow = flow_of(*layers)
    x = torch.sigmoid(torch.randn(5, D, dtype=torch.float64, generator=rng(seed)))
    last = len(ebf.wrap(flow, match_after=None).plan.steps) - 2
    path = ebf.wrap(flow).plan.steps[last].path
    model = ebf.wrap(flow, match_after={"auto": "auto", "index": last, "path": path, "none": None}[how])
    plain = ebf.wrap(flow, match_after=None)
    torch.testing.assert_close(model.log_prob(x), plain.log_prob(x), rtol=1e-13, atol=1e-13)  # log Z in another order
    assert torch.equal(model.energy(x), plain.energy(x))
    assert torch.equal(model.score(x), plain.score(x))
    matched, log_det = model.preprocess(x)
    assert not matched.requires_grad
    assert log_det.shape == (5,)
    assert torch.allclose(log_prob(model.core, matched) + log_det, flow.log_prob(x), rtol=1e-10)
    assert (how == "none") == (len(model.prefix.steps) == 0)
    torch.testing.assert_close(model.to_data(matched), x)


def test_without_preprocessing_the_matched_variable_is_the_data():
    model = ebf.wrap(flow_of(transforms.LULinear(D)))
    x = unit_data()
    matched, log_det = model.preprocess(x)
    assert torch.equal(matched, x)
    assert torch.equal(log_det, torch.zeros(6, dtype=torch.float64))


def test_a_trainable_prefix_is_refused():
    flow = flow_of(transforms.Logit(), transforms.LULinear(D), transforms.ActNorm(D))
    for where in (1, "_transform._transforms.1"):
        with pytest.raises(ebf.InputError, match=r"1 steps with trainable parameters(?s:.*)_transforms\.1  LULinear"):
            ebf.wrap(flow, match_after=where)
    flow._transform._transforms[1].requires_grad_(False)
    assert len(ebf.wrap(flow, match_after=1).core.steps) == 1


def test_bad_choices():
    flow = flow_of(transforms.Logit(), transforms.LULinear(D))
    with pytest.raises(ebf.InputError, match=r"match_after is 5, but the flow has the steps 0 to 1"):
        ebf.wrap(flow, match_after=5)
    with pytest.raises(ebf.UnknownNameError, match="no step '_transform._transform.0'.*Did you mean"):
        ebf.wrap(flow, match_after="_transform._transform.0")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [ebf.Rescale(0.1, 0.9), ebf.Dequantize(4)], "Dequantize must come first"),
        (lambda: [transforms.Logit()], r"preprocess\[0\] is Logit; valid: Dequantize, Rescale, Logit"),
        (lambda: [ebf.Dequantize(1)], "levels must be an integer, at least 2, got 1"),
        (lambda: [ebf.Dequantize(2.5)], "levels must be an integer"),
        (lambda: [ebf.Rescale(1.0, 0.0)], "low < high"),
        (lambda: [ebf.Rescale(0.0, 1.0, source=(1.0, 1.0))], "low < high"),
    ],
)
def test_bad_preprocessing(make, message):
    with pytest.raises(ebf.InputError, match=message):
        ebf.wrap(flow_of(transforms.LULinear(D)), preprocess=make())


def preprocessed(levels=8):
    steps = [ebf.Dequantize(levels), ebf.Rescale(0.05, 0.95), ebf.Logit()]
    return ebf.wrap(flow_of(transforms.LULinear(D)), preprocess=steps)


def test_the_core_of_added_preprocessing_is_the_whole_flow():
    model = preprocessed()
    x = torch.randint(8, (6, D), generator=rng(0))
    matched, log_det = model.preprocess(x)
    assert [step.path for step in model.core.steps] == ["_transform._transforms.0"]
    assert [row.path for row in model.report][:3] == ["preprocess.0", "preprocess.1", "preprocess.2"]
    assert list(model.flow.state_dict()) == list(flow_of(transforms.LULinear(D)).state_dict())
    assert torch.allclose(log_prob(model.core, matched), model.flow.log_prob(matched))
    unit = torch.sigmoid(matched) / 0.9 - 0.05 / 0.9
    again = ebf.wrap(model.flow, preprocess=[ebf.Rescale(0.05, 0.95), ebf.Logit()])
    expected = again.log_prob(unit) - D * math.log(8)
    assert torch.allclose(log_prob(model.core, matched) + log_det, expected)


@pytest.mark.parametrize("match_after", [None, "auto"])
def test_dequantize_alone_stands_in_front_of_the_matched_variable(match_after):
    model = ebf.wrap(flow_of(transforms.LULinear(D)), preprocess=[ebf.Dequantize(8)], match_after=match_after)
    assert model.report.preprocessing == 1
    assert len(model.core.steps) == 1


@pytest.mark.parametrize("last", [0, "preprocess.0", 1, "preprocess.1", "preprocess"])
def test_steps_are_counted_with_the_dequantisation(last):
    flow = flow_of(transforms.LULinear(D))
    model = ebf.wrap(flow, preprocess=[ebf.Dequantize(8), ebf.Rescale(0.05, 0.95)], match_after=last)
    assert model.report.preprocessing == 1 + (last not in (0, "preprocess.0"))
    x = torch.randint(8, (6, D), generator=rng(0))
    u, log_det = model.preprocess(x, generator=rng(3))
    torch.testing.assert_close(log_prob(model.core, u) + log_det, model.log_prob(x, generator=rng(3)))
    assert torch.equal(model.to_data(u), x.double())


def test_the_probabilities_of_integers_sum_to_at_most_one():
    """Σ_x exp(E_u log p(x + u)) <= Σ_x ∫ p(x + u) du = 1, by Jensen; and close to it for a smooth density."""
    flow = flows.Flow(transforms.IdentityTransform(), distributions.StandardNormal([1])).double()
    model = ebf.wrap(flow, preprocess=[ebf.Dequantize(4), ebf.Rescale(1e-6, 1 - 1e-6), ebf.Logit()])
    x = torch.arange(4).repeat_interleave(4000)[:, None]
    log_p = -model.bits_per_dim(x) * math.log(2.0)
    total = log_p.reshape(4, 4000).mean(1).exp().sum().item()
    assert 0.8 < total <= 1.0


ODD = {
    "too many levels": (torch.arange(6).reshape(2, 3) * 40, r"values .* 0 to 7.*first is 40 at \[0, 1\]"),
    "one above": (torch.tensor([[0.0, 7.0, 8.0]]).double(), r"no integers.*first is 8 at \[0, 2\]"),
    "negative": (torch.tensor([[-1, 0, 1]]), r"first is -1 at \[0, 0\]"),
    "grey levels in [0, 1]": (unit_data(2), r"no integers.*\(x \* levels\).floor\(\)"),
    "infinite": (torch.tensor([[0.0, math.inf, 1.0]]).double(), r"first is inf|1 NaN or inf"),
}


@pytest.mark.parametrize("kind", ODD)
def test_values_that_are_no_levels_are_refused_everywhere(kind):
    x, words = ODD[kind]
    model = preprocessed()
    calls = [
        model.energy,
        model.log_prob,
        model.bits_per_dim,
        model.preprocess,
        ebf.objectives.ML(model),
        ebf.objectives.DSM(model),
        lambda x: model.calibrate(x.repeat(20, 1)),
        lambda x: ebf.fit(ebf.objectives.ML(model), x, steps=1, progress=False),
        lambda x: ebf.fit(ebf.objectives.ML(model), torch.ones(4, D).long(), steps=1, validation=x, progress=False),
    ]
    for call in calls:
        for _ in range(2):
            with pytest.raises(ebf.InputError, match=words):
                call(x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float64])
def test_whole_numbers_of_any_dtype_are_taken(dtype):
    x = torch.tensor([[0, 1, 1]]).to(dtype)
    assert preprocessed().log_prob(x).isfinite().all()
    if dtype != torch.bool:
        assert preprocessed().log_prob(x * 7).isfinite().all()


def test_where_no_value_can_be_asked_for_odd_ones_become_nan():
    """As on CUDA after the first batch: no wait, and no plausible number."""
    model = preprocessed()
    x = torch.tensor([[0.0, 7.0, 3.0], [0.0, 8.0, 3.0], [0.5, 1.0, 2.0], [-1.0, 0.0, 1.0]]).double()
    found = torch.func.vmap(lambda row: model.log_prob(row.unsqueeze(0)), randomness="different")(x)
    assert found.isnan().flatten().tolist() == [False, True, True, True]


def test_samples_come_back_as_integers():
    model = preprocessed()
    samples = model.sample(200, generator=rng(0))
    assert torch.equal(samples, samples.round())
    assert samples.min() >= 0
    assert samples.max() <= 7
    assert len(samples.unique()) > 3


def test_bits_per_dim_is_log_prob_in_other_units():
    model = ebf.wrap(flow_of(transforms.LULinear(D)))
    x = unit_data()
    assert torch.allclose(model.bits_per_dim(x), -model.log_prob(x) / (D * math.log(2.0)))


def test_map_makes_the_gradient_of_score_matching_smaller_by_orders_of_magnitude():
    """Fig. 3 of the paper, in kind: near 0 and 1 the derivatives of the logit explode."""
    flow = flow_of(affine(1e-6, 1 - 1e-6), transforms.Logit(eps=1e-9), transforms.LULinear(D))
    x = torch.rand(64, D, dtype=torch.float64, generator=rng(0)) ** 8

    def gradient_norm(model, data):
        point = data.clone().requires_grad_()
        score = model.score(point)
        direction = torch.ones_like(data)
        (curvature,) = torch.autograd.grad((score * direction).sum(), point, create_graph=True)
        loss = (0.5 * score.square().sum(1) + (curvature * direction).sum(1)).mean()
        gradients = torch.autograd.grad(loss, [p for p in flow.parameters() if p.requires_grad], allow_unused=True)
        return sum(g.square().sum() for g in gradients if g is not None).sqrt()

    with_map, without = ebf.wrap(flow), ebf.wrap(flow, match_after=None)
    matched, _ = with_map.preprocess(x)
    assert gradient_norm(without, x) > 1e3 * gradient_norm(with_map.core, matched)


def inner_logit():
    torch.manual_seed(0)
    first = transforms.LULinear(D, identity_init=False)
    flow = flow_of(first, transforms.Sigmoid(), transforms.Logit(), transforms.LULinear(D))
    return flow, torch.randn(20, D, dtype=torch.float64)


def freeze(flow):
    flow.requires_grad_(False)


def fine_tune(flow):
    flow.requires_grad_(False)
    flow._transform._transforms[-1].requires_grad_(True)


@pytest.mark.parametrize("edit", [freeze, fine_tune])
@pytest.mark.parametrize("when", ["before wrapping", "after wrapping", "loaded", "copied"])
def test_what_is_matched_does_not_depend_on_what_is_frozen(edit, when):
    flow, x = inner_logit()
    model = ebf.wrap(flow)
    expected = ebf.objectives.SM(model)(x).detach()
    edit(flow)
    if when == "before wrapping":
        model = ebf.wrap(flow)
    elif when == "loaded":
        model.load_state_dict(model.state_dict())
    elif when == "copied":
        model = copy.deepcopy(model)
    assert model.report.preprocessing == 0
    assert model.prefix.steps == ()
    assert torch.allclose(ebf.objectives.SM(model)(x), expected, rtol=1e-12)


def test_a_chosen_prefix_stays_when_it_is_unfrozen_and_says_so_at_the_loss():
    flow, x = inner_logit()
    flow._transform._transforms[0].requires_grad_(False)
    model = ebf.wrap(flow, match_after="_transform._transforms.2")
    expected = ebf.objectives.SM(model)(x).detach()
    for other in (model, copy.deepcopy(model)):
        other.load_state_dict(other.state_dict())
        assert torch.allclose(ebf.objectives.SM(other)(x), expected, rtol=1e-12)
    flow.requires_grad_(True)
    model.load_state_dict(model.state_dict())
    assert model.report.preprocessing == 3
    assert torch.allclose(model.log_prob(x), flow.log_prob(x))
    with pytest.raises(ebf.InputError, match="1 steps with trainable parameters"):
        ebf.objectives.SM(model)(x)


@pytest.mark.parametrize("method", ["energy", "score", "log_prob", "bits_per_dim", "preprocess"])
def test_a_generator_makes_dequantisation_repeatable(method):
    model = preprocessed()
    x = torch.randint(8, (4, D))

    def call(x, **options):
        found = getattr(model, method)(x, **options)
        return found[0] if method == "preprocess" else found.detach()

    one, two = (call(x, generator=rng(7)) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, call(x, generator=rng(8)))
    assert not torch.equal(call(x), call(x))
    state = torch.get_rng_state()
    call(x, generator=rng(7))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("arguments", [("a", 1), (0, None), (0, float("inf")), (True, 2)])
def test_rescale_needs_numbers(arguments):
    with pytest.raises(ebf.InputError, match="Rescale needs finite numbers"):
        ebf.Rescale(*arguments)
    with pytest.raises(ebf.InputError, match="Rescale needs finite numbers"):
        ebf.Rescale(0, 1, source=arguments)
    with pytest.raises(ebf.InputError, match="Rescale needs finite numbers"):
        ebf.Rescale(0, 1, source=3)
