"""fit(): what it computes, what it shows, and what it refuses."""

import math
import weakref

import pytest
import torch
from nflows import distributions, flows
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ebflow_plugin as ebf
from ebflow_nflows import FullLinear
from ebflow_plugin.linalg.random import derive_seed
from ebflow_plugin.objectives import DSM, ML, SSM, ReverseKL
from ebflow_plugin.training import fit
from ebflow_plugin.training.batches import Loader, once
from ebflow_plugin.training.evaluation import Judge, LikelihoodSum
from ebflow_plugin.training.fitting import noise_of, use_generators
from nflows_small import coupling_model
from randomness import rng
from training_models import adam, make_data, make_model, same, weights, without_timing

QUIET = {"progress": False}


def evaluate(model, source, seed):
    total = LikelihoodSum(model, derive_seed(seed, "validation", 0))
    for batch in once(source):
        total.add(*batch)
    return total.mean()


def test_maximum_likelihood_of_a_linear_flow_reaches_the_closed_form():
    x = make_data(400, dtype=torch.float64)
    model = ebf.wrap(flows.Flow(FullLinear(4).double(), distributions.StandardNormal([4]).double()))
    result = fit(
        ML(model), x, steps=400, batch_size=400, validation=x, optimizer=adam(0.05), patience=None, **QUIET,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400),
    )  # fmt: skip
    covariance = torch.cov(x.mT, correction=0)
    best = 0.5 * (torch.logdet(2 * torch.pi * torch.e * covariance)).item()
    assert result.history[-1]["nll"] == pytest.approx(best, abs=1e-3)
    assert result.history[-1]["bits_per_dim"] == pytest.approx(best / 4 / torch.log(torch.tensor(2.0)).item(), abs=1e-3)


def test_a_run_is_the_plain_loop():
    """Without extras, fit() takes the same steps as ten lines of torch."""
    model, twin = make_model(actnorm=False), make_model(actnorm=False)
    x = make_data(40)
    fit(ML(model), x, steps=5, batch_size=40, optimizer=adam(0.01), **QUIET)
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        ML(twin)(x).backward()
        optimizer.step()
    torch.testing.assert_close(weights(model), weights(twin), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "with gaps"])
def test_the_default_optimizer_is_adam_whatever_the_layout_of_weights(layout):
    """torch's fused Adam on the CPU takes no notice of strides that differ between a weight and its gradient."""

    def model():
        made = make_model(actnorm=False, dtype=torch.float64)
        for module in made.flow.modules():
            if isinstance(module, FullLinear) and layout != "contiguous":
                weight, wide = module.weight.detach(), torch.zeros(4, 8, dtype=torch.float64)
                moved = weight.mT.contiguous().mT if layout == "transposed" else wide[:, ::2].copy_(weight)
                module.weight = nn.Parameter(moved)
        return ebf.wrap(made.flow)

    fitted, twin, x = model(), model(), make_data(40, dtype=torch.float64)
    fit(ML(fitted), x, steps=5, batch_size=40, **QUIET)
    fit(ML(twin), x, steps=5, batch_size=40, optimizer=lambda p: torch.optim.Adam(p, 1e-3, fused=False), **QUIET)
    torch.testing.assert_close(weights(fitted), weights(twin), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("steps", "every", "expected"), [(40, None, [*range(2, 41, 2)]), (4, None, [1, 2, 3, 4]), (10, 4, [4, 8, 10])]
)
def test_there_are_twenty_evaluations_unless_told_otherwise_and_one_at_the_end(steps, every, expected):
    result = fit(ML(make_model()), make_data(64), steps=steps, validation=make_data(64), evaluate_every=every, **QUIET)
    assert [record["step"] for record in result.history] == expected


@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_both_likelihoods_come_from_one_pass(kind):
    """Through the flow, and equal to those of the model with and without its calibration."""
    model = ebf.wrap(
        coupling_model().flow.double(), preprocess=[ebf.Dequantize(8), ebf.Rescale(0.05, 0.95), ebf.Logit()]
    )
    x = torch.randint(8, (200, 4), generator=rng(0))
    source = Loader(x, 64, shuffle=False)
    before = evaluate(model, source, seed=3).nll
    model.calibrate(x, kind)
    generator = rng(derive_seed(3, "validation", 0))
    log_probs = torch.cat([model.log_prob(part, generator=generator) for part in x.split(64)]).detach()
    after, bits = -log_probs.mean().item(), -log_probs.mean().item() / 4 / math.log(2.0)
    assert after < before - 0.1
    passes = []
    hook = model.flow._transform.transform_net.register_forward_pre_hook(lambda *args: passes.append(1))
    found = evaluate(model, source, seed=3)
    hook.remove()
    assert len(passes) == len(source)
    assert found == pytest.approx((after, bits, before), rel=1e-12)


def test_gradients_are_clipped():
    model, x = make_model(actnorm=False), make_data(40)
    before = weights(model)
    result = fit(
        ML(model), 100 * x, steps=1, batch_size=40, clip_norm=0.5, optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        **QUIET,
    )  # fmt: skip
    moved = sum((weights(model)[name] - before[name]).square().sum() for name in before)
    assert moved.sqrt() == pytest.approx(0.5, rel=1e-4)
    assert result.history[0]["grad_norm"] > 10


def test_the_same_seed_gives_the_same_run_and_leaves_the_global_generator_alone():
    x, found = make_data(), []
    for seed in (0, 0, 1):
        torch.manual_seed(5)
        model = make_model()
        objective = DSM(model)
        result = fit(objective, x, steps=5, batch_size=32, seed=seed, validation=x, **QUIET)
        assert objective.generator is None
        assert torch.rand(1) == torch.rand(1, generator=rng(5))
        found.append((without_timing(result.history), weights(model)))
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])
    assert not same(found[0][1], found[2][1])


def test_an_objective_keeps_its_own_generator():
    generator = rng(3)
    objective = DSM(make_model(), generator=generator)
    fit(objective, make_data(), steps=2, **QUIET)
    assert objective.generator is generator
    assert not torch.equal(generator.get_state(), rng(3).get_state())


def test_other_processes_draw_from_a_copy_of_the_users_generator():
    own = rng(3)
    objective = 0.5 * DSM(make_model(), generator=own)
    objective = objective + 0.5 * SSM(objective.model) + 0.2 * DSM(objective.model, generator=own)
    before, draws = own.get_state(), []
    for rank in range(3):
        noise = noise_of(objective, rng(derive_seed(0, "noise", rank)), rank)
        first, shared, second = (noise[term] for term in objective.terms)
        assert first is second is not shared
        assert (first is own) == (rank == 0)
        with use_generators(noise):
            assert [term.generator for term in objective.terms] == [first, shared, second]
        assert [term.generator for term in objective.terms] == [own, None, own]
        draws += [] if first is own else [torch.rand(1, generator=first).item()]
        draws.append(torch.rand(1, generator=shared).item())
    assert torch.equal(own.get_state(), before)
    assert len(set(draws)) == len(draws) == 5


def test_epochs_are_counted():
    assert fit(ML(make_model()), make_data(50), epochs=3, batch_size=16, **QUIET).steps == 9
    loader = DataLoader(TensorDataset(make_data(50)), batch_size=10)
    assert fit(ML(make_model()), loader, epochs=2, **QUIET).steps == 10


def test_actnorm_starts_from_clean_data_before_the_first_step():
    model, x = make_model(), make_data(64)
    fit(DSM(model, sigma=100.0), x, steps=1, batch_size=64, optimizer=adam(1e-9), **QUIET)
    layer = model.flow._transform._transforms[0]
    torch.testing.assert_close(layer.log_scale, -x.std(0).log(), rtol=1e-4, atol=1e-4)


def test_the_average_begins_behind_the_data_dependent_start():
    model = make_model()
    ema = ebf.EMA(model)
    fit(ML(model), make_data(64), steps=1, optimizer=adam(1e-9), ema=ema, **QUIET)
    with ema.applied():
        averaged = weights(model)
    torch.testing.assert_close(averaged, weights(model), rtol=1e-4, atol=1e-6)


def test_validation_is_of_the_averaged_weights():
    model, x = make_model(), make_data(100)
    result = fit(ML(model), x, steps=10, validation=x, ema=ebf.EMA(model, 0.9), optimizer=adam(0.05), **QUIET)
    with result.ema.applied(), torch.no_grad():
        averaged = -model.log_prob(x).mean().item()
    assert result.history[-1]["nll"] == pytest.approx(averaged, rel=1e-5)
    with torch.no_grad():
        assert result.history[-1]["nll"] != pytest.approx(-model.log_prob(x).mean().item(), rel=1e-5)


def test_log_z_is_computed_once_for_an_evaluation(monkeypatch):
    model, x = make_model(), make_data(100)
    model.initialize(x)
    calls = []
    plan = type(model.core)
    original = plan.log_z
    monkeypatch.setattr(plan, "log_z", lambda self, *args: calls.append(1) or original(self, *args))
    evaluate(model, Loader(x, 10, shuffle=False), seed=0)
    assert len(calls) == 1


def test_integers_are_dequantized_with_the_same_noise_at_each_evaluation():
    model = ebf.wrap(
        flows.Flow(FullLinear(4), distributions.StandardNormal([4])),
        preprocess=[ebf.Dequantize(8, noise="smooth"), ebf.Rescale(0.05, 0.95), ebf.Logit()],
    )
    x = torch.randint(8, (60, 4), generator=rng(0), dtype=torch.uint8)
    source = Loader(x, 20, shuffle=False)
    assert evaluate(model, source, 0) == evaluate(model, source, 0)
    result = fit(SSM(model), x, steps=5, batch_size=20, validation=x, **QUIET)
    assert result.history[-1]["bits_per_dim"] == pytest.approx(result.history[-1]["nll"] / 4 / 0.6931472, rel=1e-5)
    assert 0 < result.history[-1]["bits_per_dim"] < 20


def test_patience_stops_by_nll_and_the_best_is_kept():
    x = make_data(200)
    model = make_model(actnorm=False)
    result = fit(
        ML(model), x, steps=200, validation=5 * x.flip(0), evaluate_every=2, patience=3, optimizer=adam(0.05), **QUIET
    )
    nlls = [record["nll"] for record in result.history]
    assert result.stopped == "patience"
    assert result.steps < 200
    assert len(nlls) - 1 - nlls.index(min(nlls)) == 3
    assert result.best_step == result.history[nlls.index(min(nlls))]["step"]
    result.load_best(model)
    with torch.no_grad():
        assert -model.log_prob(5 * x).mean() == pytest.approx(min(nlls), rel=1e-5)


def test_the_judge_keeps_the_best_weights_and_stops_at_nan(monkeypatch):
    model, x = make_model(actnorm=False), make_data(8)
    judge, nlls = Judge(model, Loader(x, 4, shuffle=False), lambda: x, None, None, seed=0), iter([5.0, 3.0, 4.0])
    monkeypatch.setattr(LikelihoodSum, "mean", lambda self: (next(nlls), 0.0, 9.0))
    for step in range(3):
        with torch.no_grad():
            model.flow._transform._transforms[0].bias.fill_(step + 1.0)
        assert judge(step)["best_nll"] == (5.0, 3.0, 3.0)[step]
    assert (judge.nll, judge.step, judge.stale) == (3.0, 1, 1)
    assert (judge.state["flow._transform._transforms.0.bias"] == 2.0).all()  # a copy of then
    monkeypatch.setattr(LikelihoodSum, "mean", lambda self: (math.nan, 0.0, 0.0))
    with pytest.raises(ebf.TrainingError, match="step 3: the NLL on the validation data is not a number"):
        judge(3)


@pytest.mark.parametrize("data", ["tensor", "loader"])
def test_the_calibrated_best_is_kept_and_training_does_not_notice(data):
    x, held_out = make_data(400), make_data(200, seed=1)
    found = []
    for calibrate in (None, "full"):
        source = x if data == "tensor" else DataLoader(TensorDataset(x), batch_size=50, shuffle=True)
        model = make_model()
        result = fit(
            DSM(model, sigma=0.3), source, steps=12, batch_size=50, evaluate_every=3, validation=held_out, ema=True,
            calibrate=calibrate, **QUIET,
        )  # fmt: skip
        found.append((result, weights(model)))
    (plain, before), (calibrated, after) = found
    assert same(before, after)
    for one, other in zip(plain.history, calibrated.history, strict=True):
        assert other["nll_uncalibrated"] == one["nll"]
        assert other["nll"] < one["nll"]
    assert calibrated.best_nll == min(calibrated.start_nll, *(record["nll"] for record in calibrated.history))
    fresh = make_model()
    calibrated.load_best(fresh)
    assert fresh.calibration.ready
    with torch.no_grad():
        assert -fresh.log_prob(held_out).mean() == pytest.approx(calibrated.best_nll, rel=1e-5)


def test_schedules_move_the_learning_rate():
    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)

    result = fit(ML(make_model()), make_data(), steps=4, evaluate_every=1, scheduler=schedule, **QUIET)
    assert [record["lr"] for record in result.history] == pytest.approx([1e-3, 1e-4, 1e-4, 1e-5])

    def plateau(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)

    x = make_data()
    result = fit(ML(make_model()), x, steps=3, evaluate_every=1, scheduler=plateau, validation=x, **QUIET)
    assert [record["lr"] for record in result.history] == pytest.approx([1e-3, 1e-4, 1e-5])


def test_a_context_is_given_to_the_model():
    model = coupling_model(context=2)
    x, context = make_data(100), torch.randn(100, 2, generator=rng(0))
    result = fit(ML(model), (x, context), steps=30, validation=(x, context), optimizer=adam(0.02), **QUIET)
    assert result.best_nll < result.history[0]["nll"]
    assert any(parameter.abs().sum() > 0 for name, parameter in model.named_parameters() if "context" in name)
    loader = DataLoader(TensorDataset(x, context), batch_size=20)
    assert fit(ML(coupling_model(context=2)), loader, epochs=1, **QUIET).steps == 5


def test_labels_that_an_embedding_takes_are_a_context():
    torch.manual_seed(0)
    model = coupling_model(context=3)
    flow = flows.Flow(model.flow._transform, model.flow._distribution, embedding_net=nn.Embedding(5, 3))
    model = ebf.wrap(flow)
    x, labels = make_data(60), torch.arange(60) % 5
    before = flow._embedding_net.weight.detach().clone()
    fit(ML(model), (x, labels), steps=20, optimizer=adam(0.05), **QUIET)
    assert not torch.equal(flow._embedding_net.weight, before)


def test_calibrating_holds_a_few_batches_at_a_time():
    alive, most = weakref.WeakSet(), []

    def collate(items):
        batch = torch.stack([row for (row,) in items])
        alive.add(batch)
        most.append(len(alive))
        return batch

    loader = DataLoader(TensorDataset(make_data(160)), batch_size=8, collate_fn=collate)
    objective = ebf.objectives.DSM(make_model(), sigma=0.5)
    fit(objective, loader, steps=2, validation=make_data(30, seed=1), calibrate="full", progress=False)
    assert len(most) > 20
    assert max(most) < 6


def shifted(x):
    """An unnormalised N(1, I)."""
    return -0.5 * (x - 1.0).square().sum(1)


def test_an_objective_without_data_needs_no_loader():
    trained = []
    for _ in range(2):
        model = ebf.wrap(flows.Flow(FullLinear(2), distributions.StandardNormal([2])))
        result = fit(ReverseKL(model, shifted, n=64), steps=60, optimizer=adam(0.05), **QUIET)
        assert result.steps == 60
        assert result.history[-1]["loss"] < result.history[0]["loss"]
        trained.append(model.flow._transform.bias)
    assert torch.allclose(trained[0], -torch.ones(2), atol=0.2)
    assert torch.equal(*trained)  # the same seed, the same run


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"epochs": 1}, "without data, fit needs steps"),
        ({"steps": 1, "validation": make_data(9), "calibrate": True}, "cannot calibrate"),
    ],
)
def test_what_needs_data_is_refused_without_them(options, text):
    with pytest.raises(ebf.InputError, match=text):
        fit(ReverseKL(make_model(), shifted), **QUIET, **options)


def test_other_objectives_need_data():
    model = make_model()
    for objective in (SSM(model), ReverseKL(model, shifted) + SSM(model)):
        with pytest.raises(ebf.InputError, match="fit needs data: only objectives without data"):
            fit(objective, steps=1, **QUIET)
