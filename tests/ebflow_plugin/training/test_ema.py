"""The moving average: its values, its swaps, and what it survives."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nflows.transforms import ActNorm, BatchNorm, LULinear, NaiveLinear

import ebflow_plugin as ebf
from cases import SUPPORTED
from ebflow_plugin.errors import EBFlowError
from ebflow_plugin.objectives import DSM
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


@torch.no_grad()
def fill(model, value):
    for parameter in model.parameters():
        parameter.fill_(value)
    return model


def moved(model=None, decay=0.5, **options):
    """A model that moved once, and its average."""
    model = model or make_model()
    ema = EMA(model, decay, warmup=False)
    move(model, **options)
    ema.update()
    return model, ema


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
    model, ema = moved()
    move(model, seed=1)
    own, identities = weights(model), [id(parameter) for parameter in model.parameters()]
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    with ema.applied() as averaged:
        assert averaged is model
        assert not same(model, own)
        for name, average in ema.state_dict()["averages"].items():
            assert torch.equal(dict(model.named_parameters())[name], average)
        assert [id(parameter) for parameter in model.parameters()] == identities
    averages = copy.deepcopy(ema.state_dict()["averages"])
    with ema.applied():
        move(model)  # what is written inside is lost
    assert same(model, own)
    with pytest.raises(ZeroDivisionError), ema.applied():
        raise ZeroDivisionError
    assert same(model, own)
    assert all(torch.equal(value, averages[name]) for name, value in ema.state_dict()["averages"].items())
    ema.update()  # and the average is usable again
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


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
    _, ema = moved(model)
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
    model, ema = moved(ebf.wrap(flow), scale=0.3)
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
    (model, ema), other = moved(), make_model()
    averages = ema.state_dict()["averages"]

    def holds(model):
        return all(torch.equal(parameter, averages[name]) for name, parameter in model.named_parameters())

    ema.copy_to(other)
    assert holds(other)
    assert not holds(model)
    ema.copy_to()
    assert holds(model)
    move(model)
    assert not holds(model), "storage is shared"


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {}, "no state of an EMA: it lacks decay, warmup, updates, averages"),
        (lambda state: None, "no state of an EMA: it lacks decay"),
        (lambda state: {**state, "decay": "a"}, "decay must be"),
        (lambda state: {**state, "warmup": 1}, "warmup must be"),
        (lambda state: {**state, "updates": -3}, "updates must be"),
        (lambda state: {**state, "averages": {"a": 3}}, "averages must be"),
        (
            lambda state: EMA(make_model(4)).state_dict(),
            r"(?s)the state does not have .*bias: shape \(4,\), not \(3,\)",
        ),
    ],
)
def test_states_that_do_not_fit(change, message):
    ema = EMA(make_model())
    before = copy.deepcopy(ema.state_dict()["averages"])
    with pytest.raises(ebf.InputError, match=message):
        ema.load_state_dict(change(ema.state_dict()))
    assert all(torch.equal(value, before[name]) for name, value in ema.state_dict()["averages"].items())


@pytest.mark.parametrize("decay", [1.0, 1.5, -0.1, math.nan, "0.9", None, True])
def test_bad_options(decay):
    with pytest.raises(ebf.InputError, match="decay must be a number, at least 0 and below 1, got"):
        EMA(make_model(), decay)
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
    model = make_model().to(torch.bfloat16)
    ema = EMA(fill(model, 1.0), decay=0.999, warmup=False)
    fill(model, 2.0)
    for _ in range(100):
        ema.update()
    for average in ema.state_dict()["averages"].values():
        torch.testing.assert_close(average, torch.full_like(average, 2.0 - 0.999**100))
    with ema.applied():
        assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())


def test_a_preprocessed_model():
    model = ebf.wrap(flow_of(LULinear(3), shape=(3,)), preprocess=[ebf.Rescale(0.05, 0.95), ebf.Logit()])
    x = torch.rand(4, 3, dtype=torch.float64)
    _, ema = moved(model)
    own = model.log_prob(x)
    with ema.applied():
        inside = model.log_prob(x)
    torch.testing.assert_close(model.log_prob(x), own)
    ema.copy_to()
    torch.testing.assert_close(model.log_prob(x), inside)
    assert not torch.allclose(own, inside)


def test_restart_begins_with_the_present_values():
    model, ema = moved()
    with pytest.raises(EBFlowError, match="leave the block first"), ema.applied():
        ema.restart()
    ema.restart()
    assert ema.updates == 0
    model.requires_grad_(False)
    own = weights(model)
    for _ in range(5):  # frozen parameters stay exactly
        ema.update()
    with ema.applied():
        assert same(model, own)
