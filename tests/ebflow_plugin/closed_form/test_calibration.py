"""The closed-form fit of the base."""

import copy
import io
import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nflows import distributions, flows, transforms
from torch import nn

import ebflow_plugin as ebf
import ebflow_plugin.closed_form.moments
from cases import SUPPORTED, Case, perturb
from ebflow_nflows import FullLinear
from ebflow_plugin.closed_form.calibration import fit_affine
from ebflow_plugin.closed_form.moments import Moments
from gaussian_models import D, data, linear_flow, nll, nonlinear_flow
from nflows_small import flow_of
from randomness import rng


def gaussian_nll(x):
    """The smallest mean NLL that any Gaussian has on x: its maximum-likelihood fit's."""
    covariance = torch.cov(x.T, correction=0)
    return (0.5 * torch.linalg.slogdet(covariance)[1] + 0.5 * x.shape[1] * (1 + math.log(2 * math.pi))).item()


def constant_feature():
    return torch.cat([data()[:, :4], data()[:, :1] * 0], 1)


def moments_of(x):
    moments = Moments()
    moments.add(x)
    return moments


def standard(dim):
    """The mean and standard deviation of a standard Gaussian base."""
    return torch.zeros(dim, dtype=torch.float64), torch.ones(dim, dtype=torch.float64)


# Moments


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
    st.integers(1, 20),
    st.booleans(),
    st.integers(0, 100),
    st.floats(-1e5, 1e5),
)
@settings(max_examples=60, deadline=None)
def test_moments_do_not_depend_on_the_batches(sizes, chunk, diagonal, seed, offset):
    rows = torch.randn(sum(sizes), 3, dtype=torch.float64, generator=rng(seed)) + offset
    moments, memory = Moments(diagonal), torch.empty(7, 3, dtype=torch.float64)
    with mock.patch.object(ebflow_plugin.closed_form.moments, "CHUNK", chunk):
        for part in rows.split(sizes):
            moments.add(memory[: len(part)].copy_(part))  # as a loader does that uses its memory again
    assert moments.count == len(rows)
    assert torch.allclose(moments.mean, rows.mean(0))
    if len(rows) > 1:
        expected = torch.cov(rows.T)
        assert torch.allclose(moments.covariance(), expected.diagonal() if diagonal else expected, atol=1e-6)
        around = rows.T @ rows / len(rows)
        assert torch.allclose(moments.second_moments(torch.zeros(3)), around.diagonal() if diagonal else around)


def test_a_diagonal_calibration_has_no_matrix():
    """A flow of 300,000 dimensions: its covariance would take 720 GB."""
    flow = flows.Flow(transforms.IdentityTransform(), distributions.StandardNormal([300_000]))
    model = ebf.wrap(flow)
    x = 3.0 * torch.randn(40, 300_000, generator=rng(0))
    report = model.calibrate(x, kind="diagonal")
    assert report.after < report.before


# Calibration


def test_a_linear_gaussian_flow_gets_its_maximum_likelihood():
    x = data(seed=1)
    model = ebf.wrap(linear_flow())
    report = model.calibrate(x)
    assert report.kind == "full"
    assert report.shrinkage == 0.0  # the held-out rows of this seed choose none
    assert report.after < report.before
    assert nll(model, x) == pytest.approx(gaussian_nll(x), abs=1e-9)


def test_a_diagonal_fit_is_the_best_diagonal_one():
    x = data()
    model = ebf.wrap(linear_flow())
    model.calibrate(x, kind="diagonal")
    expected = (0.5 * x.var(0, correction=0).log() + 0.5 * (1 + math.log(2 * math.pi))).sum().item()
    assert nll(model, x) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("kind", ["full", "diagonal"])
@pytest.mark.parametrize("make", [linear_flow, nonlinear_flow])
def test_training_nll_never_rises(kind, make):
    for seed in range(4):
        flow = make()
        perturb(flow, 0.3, seed=seed)
        model = ebf.wrap(flow)
        before = nll(model, data())
        model.calibrate(data(), kind=kind)
        assert nll(model, data()) <= before + 1e-9


def test_the_flow_stays_bit_equal_and_the_invariant_holds():
    flow = nonlinear_flow()
    model = ebf.wrap(flow)
    before, own = copy.deepcopy(flow.state_dict()), flow.log_prob(data())
    model.calibrate(data())
    assert all(torch.equal(before[name], tensor) for name, tensor in flow.state_dict().items())
    assert torch.equal(flow.log_prob(data()), own)
    assert model.flow is flow
    assert {id(p) for p in model.parameters()} == {id(p) for p in flow.parameters()}
    x = data(20)
    assert torch.allclose(model.log_prob(x), -model.energy(x) - model.log_z())
    assert not torch.allclose(model.log_prob(x), flow.log_prob(x))
    latents, _ = model.plan.encode(x)
    assert torch.allclose(model.plan.decode(latents), x)
    jacobian = torch.stack([torch.autograd.functional.jacobian(lambda v: model.plan.encode(v)[0][0], x[:1]).squeeze()])
    _, log_det = model.plan.encode(x[:1])
    assert torch.allclose(torch.linalg.slogdet(jacobian)[1], log_det - model.log_z())
    assert model.report.rows[-1].path == "calibration"


def test_samples_follow_the_calibrated_density():
    x = data()
    model = ebf.wrap(linear_flow())
    model.calibrate(x)
    samples = model.sample(40_000, generator=rng(0))
    assert torch.allclose(samples.mean(0), x.mean(0), atol=0.1)
    assert torch.allclose(torch.cov(samples.T), torch.cov(x.T), atol=0.3)


def test_calibrating_again_starts_from_the_flow():
    model = ebf.wrap(nonlinear_flow())
    model.calibrate(data(seed=1))
    model.calibrate(data())
    once = ebf.wrap(nonlinear_flow())
    torch.manual_seed(0)
    once.flow.load_state_dict(model.flow.state_dict())
    once.calibrate(data())
    assert torch.allclose(model.log_prob(data(10)), once.log_prob(data(10)))


def test_checkpoints_and_copies_carry_it():
    model = ebf.wrap(nonlinear_flow())
    model.calibrate(data())
    x = data(10)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = ebf.wrap(nonlinear_flow())
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(fresh.log_prob(x), model.log_prob(x))
    assert torch.equal(copy.deepcopy(model).log_prob(x), model.log_prob(x))
    fresh.load_state_dict(ebf.wrap(nonlinear_flow()).state_dict())  # and one without takes it off again
    assert fresh.report.rows[-1].path != "calibration"
    single, exact = ebf.wrap(nonlinear_flow().float()), model.log_prob(x)
    single.load_state_dict(model.state_dict())  # of another dtype
    assert torch.allclose(single.log_prob(x.float()).double(), exact, atol=1e-3)
    assert torch.allclose(model.float().log_prob(x.float()).double(), exact, atol=1e-3)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_calibration_that_fails_leaves_the_model_as_it_was(earlier):
    model = ebf.wrap(linear_flow())
    if earlier:
        model.calibrate(data())
    before, state = model.log_prob(data(10)), list(model.state_dict())
    with pytest.raises(ebf.SingularError, match="do not vary"):
        model.calibrate(constant_feature())
    assert model.calibration.ready == earlier
    assert list(model.state_dict()) == state
    assert torch.equal(model.log_prob(data(10)), before)


def calibrated_in_two_processes(flow, shards, monkeypatch):
    """The model and the report of the first of two processes with these data."""
    gathered = []  # what each Moments of the other process would send, in order
    monkeypatch.setattr(Moments, "reduce", lambda self: gathered.append(copy.deepcopy(self)))
    ebf.wrap(copy.deepcopy(flow)).calibrate(shards[1])
    sent = iter(list(gathered))
    monkeypatch.setattr(Moments, "reduce", lambda self: self.merge(next(sent)))
    model = ebf.wrap(copy.deepcopy(flow))
    return model, model.calibrate(shards[0])


def test_all_processes_decide_alike(monkeypatch):
    """Two processes with different data: each must judge by the losses of both."""
    shards = [data(200, seed=1), 0.1 * data(200, seed=2) - 5.0]
    alone = ebf.wrap(nonlinear_flow())
    # Rows 9, 19, … are held out in each shard: 200 is a multiple of 10, so the joined data hold out the same rows.
    expected = alone.calibrate(torch.cat(shards))
    model, report = calibrated_in_two_processes(alone.flow, shards, monkeypatch)
    assert report.before == pytest.approx(expected.before)
    assert report.after == pytest.approx(expected.after)
    assert torch.allclose(model.log_prob(data(10)), alone.log_prob(data(10)))


def test_other_shards_give_the_same_map(monkeypatch):
    """Interleaved rows: other rows are held out than in one process, so the report differs; the map does not."""
    torch.manual_seed(0)
    x = data(2003)
    alone = ebf.wrap(nonlinear_flow())
    expected = alone.calibrate(x)
    model, report = calibrated_in_two_processes(alone.flow, (x[::2], x[1::2]), monkeypatch)
    assert report.shrinkage == expected.shrinkage  # enough rows: both choose the same
    torch.testing.assert_close(model.calibration.to_base, alone.calibration.to_base)
    torch.testing.assert_close(model.calibration.mean, alone.calibration.mean)
    held = torch.cat([x[::2][9::10], x[1::2][9::10]])
    assert report.before == pytest.approx(nll(ebf.wrap(alone.flow), held), abs=1e-9)
    assert expected.before == pytest.approx(nll(ebf.wrap(alone.flow), x[9::10]), abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_report_of_a_float32_model_far_from_its_base(seed):
    """Latents of 1e4 have log-densities of -1e8, beside which the log-dets of float32 are lost to rounding."""
    torch.manual_seed(seed)
    scales = torch.logspace(-4, 4, D, dtype=torch.float64)
    x = torch.randn(4000, D, dtype=torch.float64, generator=rng(seed)) * scales
    flow = nonlinear_flow().float()
    model = ebf.wrap(flow)
    report = model.calibrate(x.float())
    assert report.after == pytest.approx(nll(model, x[9::10].float()), abs=0.1)
    exact = ebf.wrap(copy.deepcopy(flow).double()).calibrate(x.float().double())
    assert report.after == pytest.approx(exact.after, abs=1e-3)


def test_a_loader_of_batches_and_contexts():
    layer = transforms.MaskedAffineAutoregressiveTransform(D, 8, context_features=2, activation=torch.tanh)
    flow = flow_of(layer, shape=(D,))
    model = ebf.wrap(flow)
    x, context = data(), data(dim=2)
    model.calibrate((x, context))
    other = ebf.wrap(flow)
    other.calibrate([(x[part], context[part]) for part in (slice(0, 130), slice(130, 400))])
    assert torch.allclose(model.log_prob(x, context), other.log_prob(x, context))


@pytest.mark.parametrize(
    "case", [case for case in SUPPORTED if case.domain == "real" and case.context_shape is None], ids=str
)
def test_every_flow_with_a_gaussian_base(case: Case):
    flow = case.build()
    model = ebf.wrap(flow)
    x = torch.cat([case.x(40, seed=seed) for seed in range(3)])
    model.initialize(x)
    before = nll(model, x)
    try:
        report = model.calibrate(x, kind="diagonal")
    except ebf.InputError as error:
        assert "Gaussian" in str(error)
        return
    except ebf.SingularError:
        return  # a flow that maps everything to one point
    assert math.isfinite(report.after)
    if report.kind != "none":
        assert nll(model, x) <= before + 1e-6
    assert torch.allclose(model.log_prob(x), -model.energy(x) - model.log_z(case.event_shape))


def test_shrinkage_is_chosen_by_held_out_rows():
    """With few points a full covariance overfits: shrinking is better on new data, and never worse than not at all."""
    torch.manual_seed(0)
    dim = 40
    x, new = (torch.randn(n, dim, dtype=torch.float64) for n in (100, 4000))
    flow = flows.Flow(transforms.PointwiseAffineTransform(0.0, 1.5), distributions.StandardNormal([dim])).double()
    chosen, greedy = ebf.wrap(flow), ebf.wrap(flow)
    report = chosen.calibrate(x)
    moments = moments_of(1.5 * x)
    greedy.calibration.set(**fit_affine(moments, moments, standard(dim), "full", shrinkage=0.0)[0])
    assert report.shrinkage > 0.1
    assert nll(chosen, new) < nll(greedy, new)
    assert nll(chosen, new) < -flow.log_prob(new).mean().item()


def test_nothing_is_done_where_it_would_harm():
    torch.manual_seed(0)
    flow = flows.Flow(transforms.PointwiseAffineTransform(0.0, 1.0), distributions.StandardNormal([30])).double()
    model = ebf.wrap(flow)
    report = model.calibrate(torch.randn(40, 30, dtype=torch.float64), kind="diagonal")
    assert report.kind == "none"
    assert report.after == report.before
    assert len(model.plan.steps) == 1


class Laplace(nn.Module):
    def log_prob(self, inputs, context=None):
        return -inputs.abs().sum(-1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda model: model.calibrate(data(), kind="ful"), ebf.InputError, "unknown kind 'ful'. Did you mean 'full'"),
        (lambda model: model.calibrate(data(12)), ebf.InputError, "at least 20 data points, got 12"),
        (lambda model: model.calibrate([]), ebf.InputError, "no batches"),
        (lambda model: model.calibrate(3), ebf.InputError, "got int"),
        (lambda model: model.calibrate(constant_feature()), ebf.SingularError, "do not vary"),
        (
            lambda _: ebf.wrap(flow_of(FullLinear(D), shape=(D,), base=Laplace())).calibrate(data()),
            ebf.InputError,
            "Lap",
        ),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call(ebf.wrap(linear_flow()))


def test_a_singular_covariance_has_no_fit_without_shrinkage():
    moments = moments_of(torch.cat([data()[:, :4], data()[:, :1]], 1))
    with pytest.raises(ebf.SingularError, match=rf"singular \(400 data points for {D} dimensions\)"):
        fit_affine(moments, moments, standard(D), "full", shrinkage=0.0)
