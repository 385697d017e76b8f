"""The moving average: its values, its swaps, and what it survives."""

import copy
import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nflows.distributions.normal import StandardNormal
from nflows.flows.base import Flow
from nflows.transforms import ActNorm, BatchNorm, CompositeTransform, LULinear, NaiveLinear

import ebflow_plugin as ebf
from cases import SUPPORTED
from ebflow_plugin.errors import EBFlowError
from ebflow_plugin.objectives import DSM, ML
from ebflow_plugin.training.ema import EMA
from nflows_small import flow_of
from randomness import rng
from training_models import weights


def make_model(size=3):
    torch.manual_seed(0)
    return ebf.wrap(flow_of(LULinear(size), ActNorm(size), LULinear(size, identity_init=False), shape=(size,)))


def same(model, values):
    state = model.state_dict()
    return list(state) == list(values) and all(torch.equal(state[name], value) for name, value in values.items())


@torch.no_grad()
def move(model, seed=0, scale=0.1):
    generator = rng(seed)
    for parameter in model.parameters():
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


@given(decay=st.floats(0.0, 0.9999), warmup=st.booleans(), steps=st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_the_average_is_the_formula(decay, warmup, steps):
    model = make_model()
    ema = EMA(model, decay, warmup)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for n in range(steps):
        move(model, seed=n)
        ema.update()
        d = min(decay, (1 + n) / (10 + n)) if warmup else decay
        expected = {name: d * expected[name] + (1 - d) * p.detach() for name, p in model.named_parameters()}
    assert ema.updates == steps
    for name, average in ema.state_dict()["averages"].items():
        torch.testing.assert_close(average, expected[name])


def test_buffers_are_the_models_own_and_may_come_and_go():
    flow = flow_of(BatchNorm(3), LULinear(3, identity_init=False), shape=(3,)).eval()
    model = ebf.wrap(flow)
    ema = EMA(model, decay=0.5, warmup=False)
    with torch.no_grad():
        flow._transform._transforms[0].running_mean.fill_(5.0)
    move(model)
    ema.update()
    x = torch.randn(40, 3, generator=rng(0), dtype=torch.float64) * 3
    model.calibrate(x)  # which adds buffers
    ema.update()
    with ema.applied():
        assert (flow._transform._transforms[0].running_mean == 5.0).all()
        assert model.calibration.ready
    model.calibration.set()
    ema.update()
    assert ema.updates == 3


def test_other_parameters_need_a_new_start():
    model = make_model()
    ema = EMA(model)
    model.flow.register_parameter("more", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(EBFlowError, match=r"other parameters than when its average began: call restart\(\)"):
        ema.update()
    ema.restart()
    ema.update()


def test_applied_swaps_and_restores_bit_for_bit():
    model = make_model()
    ema = EMA(model, decay=0.5)
    move(model)
    ema.update()
    move(model, seed=1)
    own, identities = weights(model), [id(parameter) for parameter in model.parameters()]
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    with ema.applied() as averaged:
        assert averaged is model
        assert not same(model, own)
        for name, average in ema.state_dict()["averages"].items():
            assert torch.equal(dict(model.named_parameters())[name], average)
        assert [id(parameter) for parameter in model.parameters()] == identities
    assert same(model, own)
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


def test_an_exception_restores_too():
    model = make_model()
    ema = EMA(model)
    move(model)
    own = weights(model)
    with pytest.raises(ZeroDivisionError), ema.applied():
        raise ZeroDivisionError
    assert same(model, own)
    ema.update()  # and the average is usable again


def test_what_is_written_inside_is_lost():
    model = make_model()
    ema = EMA(model)
    own, averages = weights(model), copy.deepcopy(ema.state_dict()["averages"])
    with ema.applied():
        move(model)
    assert same(model, own)
    assert all(torch.equal(value, averages[name]) for name, value in ema.state_dict()["averages"].items())


def test_optimisers_stay_valid():
    """A run with evaluations of the average in between is the run without them, bit for bit."""
    x = torch.randn(20, 3, generator=rng(0), dtype=torch.float64)
    ends = []
    for evaluate in (False, True):
        model = make_model()
        model.initialize(x)
        ema, loss = EMA(model), DSM(model, generator=rng(0))
        optimiser = torch.optim.Adam(loss.parameters(), lr=0.01)
        for _ in range(5):
            optimiser.zero_grad()
            loss(x).backward()
            optimiser.step()
            ema.update()
            if evaluate:
                with ema.applied(), torch.no_grad():
                    model.log_prob(x)
        ends.append((weights(model), ema.state_dict()["averages"]))
    for one, two in zip(*ends, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_log_z_is_that_of_the_values_inside(mode):
    model = make_model()
    x = torch.randn(4, 3, dtype=torch.float64)
    model.initialize(x)
    ema = EMA(model, decay=0.5, warmup=False)
    move(model)
    ema.update()
    move(model, seed=1)
    reference = copy.deepcopy(model)
    ema.copy_to(reference)
    with torch.no_grad():
        outside, inside = model.log_z(), reference.log_z()
        assert not torch.isclose(outside, inside)
    with mode():
        assert torch.equal(model.log_z(), outside)
        with ema.applied():
            assert torch.equal(model.log_z(), inside)
            torch.testing.assert_close(model.log_prob(x), reference.flow.log_prob(x))
        assert torch.equal(model.log_z(), outside)


CACHED = [case for case in SUPPORTED if case.own_log_prob and ("Cached" in case.name or "using_cache" in case.name)]


@pytest.mark.parametrize("case", CACHED, ids=str)
def test_caches_of_nflows_are_dropped(case):
    flow, x = case.build(), case.x(4)
    model = ebf.wrap(flow)
    ema = EMA(model, decay=0.5, warmup=False)
    move(model, scale=0.3)
    ema.update()
    move(model, seed=1, scale=0.3)
    reference = copy.deepcopy(model)
    ema.copy_to(reference)
    with torch.no_grad():
        flow.log_prob(x)  # fills the caches
        own = model.log_prob(x)
        with ema.applied():
            torch.testing.assert_close(flow.log_prob(x), reference.log_prob(x))
            torch.testing.assert_close(model.log_prob(x), reference.log_prob(x))
        torch.testing.assert_close(flow.log_prob(x), own)
    copy.deepcopy(model)


def test_copy_to():
    model, other = make_model(), make_model()
    ema = EMA(model, decay=0.5)
    move(model)
    ema.update()
    averages = ema.state_dict()["averages"]
    ema.copy_to(other)
    assert all(torch.equal(p, averages[name]) for name, p in other.named_parameters())
    assert not all(torch.equal(p, averages[name]) for name, p in model.named_parameters())
    ema.copy_to()
    assert all(torch.equal(p, averages[name]) for name, p in model.named_parameters())
    move(model)
    assert not all(torch.equal(p, averages[name]) for name, p in model.named_parameters()), "storage is shared"


def test_copy_to_another_kind_of_model():
    ema, before = EMA(make_model(3)), weights(make_model(4))
    other = make_model(4)
    with pytest.raises(ebf.InputError, match=r"(?s)does not have the parameters.*bias: shape \(4,\), not \(3,\)"):
        ema.copy_to(other)
    assert same(other, before)
    with pytest.raises(ebf.InputError, match=r"_weight: shape \(3, 3\), not none"):
        ema.copy_to(ebf.wrap(flow_of(NaiveLinear(3, False), shape=(3,))))
    with pytest.raises(ebf.InputError, match="copy_to.. needs an EBFlow, got Flow"):
        ema.copy_to(other.flow)


def test_a_saved_average_goes_on_as_if_nothing_had_happened(tmp_path):
    def run(model, ema, start, stop):
        for n in range(start, stop):
            move(model, seed=n)
            ema.update()

    straight = make_model()
    whole = EMA(straight, decay=0.9)
    run(straight, whole, 0, 10)
    model = make_model()
    ema = EMA(model, decay=0.9)
    run(model, ema, 0, 4)
    torch.save({"model": model.state_dict(), "ema": ema.state_dict()}, tmp_path / "checkpoint.pt")
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert set(state["ema"]) == {"decay", "warmup", "updates", "averages"}
    resumed = make_model()
    resumed.load_state_dict(state["model"])
    again = EMA(resumed, decay=0.5, warmup=False)
    again.load_state_dict(state["ema"])
    run(resumed, again, 4, 10)
    assert again.updates == 10
    for name, value in whole.state_dict()["averages"].items():
        assert torch.equal(again.state_dict()["averages"][name], value)


def test_states_that_do_not_fit():
    ema = EMA(make_model())
    before = copy.deepcopy(ema.state_dict()["averages"])
    with pytest.raises(ebf.InputError, match="no state of an EMA: it lacks decay, warmup, updates, averages"):
        ema.load_state_dict({})
    with pytest.raises(ebf.InputError, match="no state of an EMA: it lacks decay"):
        ema.load_state_dict(None)
    for name, value in {"decay": "a", "warmup": 1, "updates": -3, "averages": {"a": 3}}.items():
        with pytest.raises(ebf.InputError, match=f"{name} must be"):
            ema.load_state_dict({**ema.state_dict(), name: value})
    with pytest.raises(ebf.InputError, match=r"(?s)the state does not have .*bias: shape \(4,\), not \(3,\)"):
        ema.load_state_dict(EMA(make_model(4)).state_dict())
    assert all(torch.equal(value, before[name]) for name, value in ema.state_dict()["averages"].items())


@pytest.mark.parametrize("decay", [1.0, 1.5, -0.1, math.nan, "0.9", None, True])
def test_bad_decay(decay):
    with pytest.raises(ebf.InputError, match="decay must be a number, at least 0 and below 1, got"):
        EMA(make_model(), decay)


def test_bad_model():
    with pytest.raises(ebf.InputError, match="EMA needs an EBFlow, got nflows.*; wrap it first"):
        EMA(make_model().flow)


def test_what_would_go_wrong_inside_of_applied():
    ema = EMA(make_model())
    with ema.applied():
        for call in (ema.update, ema.copy_to, lambda: ema.applied().__enter__()):
            with pytest.raises(EBFlowError, match="appl|leave the block"):
                call()


def test_the_model_may_be_cast_and_moved():
    model = make_model()
    ema = EMA(model, decay=0.5, warmup=False)
    model.float()
    move(model)
    ema.update()
    assert all(average.dtype == torch.float32 for average in ema.state_dict()["averages"].values())
    with ema.applied():
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    model.to("meta")
    ema = EMA(model)
    ema.update()
    with ema.applied():
        assert all(parameter.is_meta for parameter in model.parameters())


def test_small_steps_do_not_vanish_in_half_precision():
    model = make_model()
    model.to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    ema = EMA(model, decay=0.999, warmup=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.0)
    for _ in range(100):
        ema.update()
    for average in ema.state_dict()["averages"].values():
        torch.testing.assert_close(average, torch.full_like(average, 2.0 - 0.999**100))
    with ema.applied():
        assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())


def test_a_preprocessed_model():
    flow = flow_of(LULinear(3), shape=(3,))
    model = ebf.wrap(flow, preprocess=[ebf.Rescale(0.05, 0.95), ebf.Logit()])
    x = torch.rand(4, 3, dtype=torch.float64)
    ema = EMA(model, decay=0.5)
    move(model)
    ema.update()
    own = model.log_prob(x)
    with ema.applied():
        inside = model.log_prob(x)
    torch.testing.assert_close(model.log_prob(x), own)
    ema.copy_to()
    torch.testing.assert_close(model.log_prob(x), inside)
    assert not torch.allclose(own, inside)


def test_frozen_parameters_stay_exactly():
    model = make_model()
    model.requires_grad_(False)
    ema, own = EMA(model), weights(model)
    for _ in range(5):
        ema.update()
    with ema.applied():
        assert same(model, own)


@pytest.mark.slow
def test_an_update_costs_less_than_a_twentieth_of_a_training_step():
    """Ten million parameters, of three linear layers; ML, batch 100."""
    torch.manual_seed(0)
    size = 1824
    flow = Flow(
        CompositeTransform([NaiveLinear(size, False), NaiveLinear(size, False), NaiveLinear(size, False)]),
        StandardNormal([size]),
    )
    with torch.no_grad():
        for layer in flow._transform._transforms:
            torch.nn.init.orthogonal_(layer._weight)
    model = ebf.wrap(flow)
    ema, loss, x = EMA(model), ML(model), torch.randn(100, size)
    optimiser = torch.optim.Adam(loss.parameters(), lr=1e-5)

    def step():
        optimiser.zero_grad()
        loss(x).backward()
        optimiser.step()

    def seconds(function):
        taken = []
        for _ in range(3):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
        return min(taken)

    assert sum(parameter.numel() for parameter in model.parameters()) > 9.9e6
    step()
    assert seconds(ema.update) < 0.05 * seconds(step)


def test_restart_begins_with_the_present_values():
    model = make_model()
    ema = EMA(model, decay=0.9)
    ema.update()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    ema.restart()
    assert ema.updates == 0
    for name, average in ema.state_dict()["averages"].items():
        assert torch.equal(average, dict(model.named_parameters())[name])
    with ema.applied(), pytest.raises(EBFlowError, match="leave the block first"):
        ema.restart()
