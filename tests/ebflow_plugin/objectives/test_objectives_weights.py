"""Weighted rows: against duplicated rows, and bit for bit against the plain mean."""

import pytest
import torch
from nflows import transforms

import ebflow_plugin as ebf
from ebflow_nflows import FullLinear, SmoothLeakyReLU
from ebflow_plugin.objectives import DSM, FDSSM, ML, SM, SML, SSM
from ebflow_plugin.objectives.registration import FunctionObjective
from ebflow_plugin.plan.inputs import check_weights
from nflows_small import flow_of, smooth_net
from randomness import randn, rng
from stochastic_models import nflows_model

OBJECTIVES = {
    "ml": ML,
    "relative": lambda model: ML(model, log_det="relative"),
    "sml": SML,
    "sm": SM,
    "ssm": SSM,
    "fdssm": FDSSM,
    "dsm": DSM,
    "sum": lambda model: 0.5 * SSM(model) + ML(model),
}
objectives = pytest.mark.parametrize("make", OBJECTIVES.values(), ids=OBJECTIVES)
COUNTS = torch.tensor([1, 3, 0, 2, 0])


def model_of():
    return nflows_model(FullLinear(3), SmoothLeakyReLU(0.4), FullLinear(3), shape=[3])


def loss_and_gradients(objective, *args, seed=0):
    objective.zero_grad()
    loss = objective(*args, generator=rng(seed))
    loss.backward()
    gradients = [p.grad for p in objective.parameters()]
    return loss.detach(), torch.cat([g.flatten() for g in gradients if g is not None])


@objectives
@pytest.mark.parametrize("weight", [1.0, 0.3, 7e-5])
def test_equal_weights_give_the_plain_loss_bit_for_bit(make, weight):
    objective, x = make(model_of()), randn(7, 3)
    plain = loss_and_gradients(objective, x)
    weighted = loss_and_gradients(objective, x, None, torch.full((7,), weight, dtype=x.dtype))
    assert torch.equal(plain[0], weighted[0])
    assert torch.equal(plain[1], weighted[1])


@pytest.mark.parametrize("make", [ML, OBJECTIVES["relative"], SM], ids=["ml", "relative", "sm"])
def test_weights_are_duplicated_rows(make):
    objective, x = make(model_of()), randn(5, 3)
    repeated = loss_and_gradients(objective, x.repeat_interleave(COUNTS, 0))
    for scale in (1.0, 0.1):
        weighted = loss_and_gradients(objective, x, None, scale * COUNTS)
        torch.testing.assert_close(weighted, repeated)


@objectives
def test_the_mean_is_that_of_the_losses(make):
    objective, x, w = make(model_of()), randn(6, 3), randn(6, seed=1).exp()
    values = objective.losses(x, generator=rng(3)).detach()
    found = objective(x, weights=w, generator=rng(3)).detach()
    torch.testing.assert_close(found, (w * values).sum() / w.sum())


@objectives
@pytest.mark.parametrize("bad", [torch.nan, 1e200])
def test_rows_of_weight_zero_do_not_matter(make, bad):
    objective, x = make(model_of()), randn(5, 3)
    expected = loss_and_gradients(objective, x, None, COUNTS.double())
    x = torch.where((COUNTS == 0)[:, None], bad, x)
    found = loss_and_gradients(objective, x, None, COUNTS.double())
    assert bool(found[1].isfinite().all())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_pending_start_counts_the_weights():
    """A row of weight zero, or three times the weight, is absent from an ActNorm, or in it three times."""

    def started(x, weights):
        flow = flow_of(transforms.ActNorm(3), shape=(3,))
        ML(ebf.wrap(flow))(x, weights=weights)
        return flow.state_dict()

    x = randn(6, 3)
    counts = torch.tensor([1, 3, 0, 2, 0, 0])
    expected = started(x.repeat_interleave(counts, 0), None)
    for key, value in started(x, counts).items():
        torch.testing.assert_close(value, expected[key])


def test_gradients_reach_the_context_of_counted_rows_alone():
    model = ebf.wrap(flow_of(transforms.AffineCouplingTransform([1, 0], smooth_net(2)), shape=(2,)))
    context = randn(4, 2, seed=1).requires_grad_()
    ML(model)(randn(4, 2), context, torch.tensor([1.0, 0.0, 2.0, 0.0])).backward()
    assert context.grad.abs().sum(1).gt(0).tolist() == [True, False, True, False]


def test_bad_weights_are_refused():
    objective, x = ML(model_of()), randn(4, 3)
    values, shape = "at least 0, finite, and not all 0, got ", r"of shape \(4,\), one for each row of x, got "
    for weights, message in (
        (torch.tensor([1.0, -1.0, 1.0, 1.0]), values + "1 of 4"),
        (torch.tensor([torch.nan, torch.inf, 0.0, 1.0]), values + "2 of 4"),
        (torch.zeros(4), values + "4 zeros"),
        (torch.ones(3), shape + r"\(3,\)"),
        (torch.ones(4, 1), shape + r"\(4, 1\)"),
        ([1.0] * 4, shape + "list"),
        (torch.ones(4, device="meta"), "weights are on meta, x is on cpu"),
    ):
        with pytest.raises(ebf.InputError, match=message):
            objective(x, weights=weights)


@pytest.mark.parametrize("weights", [[1.0, -1.0], [torch.nan, 1.0], [torch.inf, 1.0], [0.0, 0.0]])
def test_where_values_cannot_be_read_bad_weights_become_nan(weights, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert ML(model_of())(randn(2, 3), weights=torch.tensor(weights)).isnan()


def test_scaled_weights_need_no_range():
    tiny = torch.tensor([1e-300, 3e-300], dtype=torch.float64)
    assert check_weights(tiny, randn(2, 3)).tolist() == pytest.approx([1 / 3, 1.0])


def test_a_function_takes_weights_if_it_names_them():
    def named(model, x, context, weights=None):
        values = model.energy(x)
        return values.mean() if weights is None else (weights * values).sum()

    def plain(model, x, context):
        return model.energy(x).mean()

    model, x, w = model_of(), randn(4, 3), randn(4, seed=1).exp()
    objective = FunctionObjective(model, named)
    torch.testing.assert_close(objective(x, weights=w), (w * model.energy(x)).sum() / w.sum())
    torch.testing.assert_close(objective(x), model.energy(x).mean())
    with pytest.raises(ebf.InputError, match="plain takes no weights of rows: give it a parameter weights=None"):
        FunctionObjective(model, plain)(x, weights=w)
    with pytest.raises(ebf.InputError, match="at least 0"):
        objective(x, weights=-w)
