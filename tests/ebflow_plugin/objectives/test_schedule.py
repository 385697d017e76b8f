"""Noise that shrinks: σ of each step, what is learnt, and the same run in every loop."""

import copy
import math

import pytest
import torch
from nflows.distributions.normal import StandardNormal
from nflows.flows.base import Flow
from nflows.transforms import PointwiseAffineTransform
from torch._dynamo.testing import CompileCounter

import ebflow_plugin as ebf
from ebflow_plugin.errors import InputError
from ebflow_plugin.objectives import DSM, FDSSM, SSM, LatentMatch, NoiseSchedule
from randomness import randn, rng
from training_models import make_data, make_model, same, weights

SCHEDULE = NoiseSchedule(start=2.0, end=0.25, steps=3)
SIGMAS = [2.0, 1.0, 0.5, 0.25, 0.25]
OBJECTIVES = {
    "dsm": DSM,
    "ssm": SSM,
    "fdssm": FDSSM,
    "latent match": LatentMatch,
    "sum": lambda model, **options: DSM(model, **options) + 0.5 * LatentMatch(model, **options),
}
objectives = pytest.mark.parametrize("kind", OBJECTIVES.values(), ids=OBJECTIVES)


def closed(seed=0):
    torch.manual_seed(seed)
    return make_model(actnorm=False, dtype=torch.float64)


def gaussian(dim, scale):
    """E = ½‖scale · x‖²."""
    return ebf.wrap(Flow(PointwiseAffineTransform(0.0, scale), StandardNormal([dim])).double())


@pytest.mark.parametrize("kind", [DSM, SSM, LatentMatch])
def test_each_step_has_the_loss_of_its_sigma(kind):
    model, x = closed(), make_data(8, dtype=torch.float64)
    shrinking = kind(model, sigma=SCHEDULE)
    for step, sigma in enumerate(SIGMAS):
        loss = shrinking(x, generator=rng(step))
        torch.testing.assert_close(loss, kind(model, sigma=sigma)(x, generator=rng(step)), rtol=1e-12, atol=0)


def test_the_step_of_finite_differences_grows_with_the_noise():
    model, x = closed(), make_data(8, dtype=torch.float64)
    shrinking = FDSSM(model, eps=0.1, sigma=SCHEDULE)
    for step, sigma in enumerate(SIGMAS):
        constant = FDSSM(model, eps=0.1 * sigma / 0.25, sigma=sigma)
        torch.testing.assert_close(
            shrinking(x, generator=rng(step)), constant(x, generator=rng(step)), rtol=1e-12, atol=0
        )


@pytest.mark.parametrize("kind", [SSM, lambda *a, **k: FDSSM(*a, eps=1e-3, **k)], ids=["ssm", "fdssm"])
def test_sliced_score_matching_learns_the_density_of_noised_data(kind):
    """x ~ N(0, I) with noise is N(0, (1 + σ²) I): its energy has the least loss, -d / 2 / (1 + σ²)."""
    dim, sigma, x = 3, 0.7, randn(40_000, 3)
    variance = 1 + sigma**2
    losses = {}
    for name, precision in (("noised", 1 / variance), ("sharper", 1.3 / variance), ("clean", 1.0)):
        with torch.no_grad():
            values = kind(gaussian(dim, math.sqrt(precision)), sigma=sigma).losses(x, generator=rng(1))
        expected = dim * (0.5 * precision**2 * variance - precision)
        assert abs(values.mean() - expected) < 5 * values.std() / math.sqrt(len(x))
        losses[name] = values.mean()
    assert losses["noised"] < min(losses["sharper"], losses["clean"])


def test_only_losses_that_are_trained_with_are_counted():
    model, x = closed(), make_data(8, dtype=torch.float64)
    objective = DSM(model, sigma=SCHEDULE)
    objective(x)
    with torch.no_grad():
        objective(x)
        assert objective.metrics() == {"sigma": 1.0}
    model.eval()
    objective(x)
    assert objective.metrics() == {"sigma": 0.25}  # losses of validation data can be compared
    assert objective.state() == {"noise_step": 1, "noise_start": 2.0}
    model.train()
    objective(x)
    assert objective.metrics() == {"sigma": 1.0}
    assert objective.state()["noise_step"] == 2


def test_the_start_is_half_of_the_standard_deviation_of_the_first_batch():
    model, x = closed(), make_data(50, dtype=torch.float64) * torch.tensor([1.0, 2.0, 3.0, 4.0]) + 7.0
    objective = DSM(model, sigma=NoiseSchedule(end=0.1, steps=4))
    objective(x)
    expected = 0.5 * x.var(0).mean().sqrt().item()
    assert objective.state()["noise_start"] == pytest.approx(expected, rel=1e-12)
    objective(100.0 * x)
    assert objective.metrics()["sigma"] == pytest.approx(expected * (0.1 / expected) ** 0.25, rel=1e-12)


def test_noise_never_grows():
    x = make_data(50, dtype=torch.float64)
    objective = DSM(closed(), sigma=NoiseSchedule(end=100.0, steps=4))
    objective(x)
    assert objective.metrics() == {"sigma": 100.0}


def steps(objective, batches, optimizer=None):
    optimizer = torch.optim.SGD(objective.parameters(), 1e-2) if optimizer is None else optimizer
    for batch in batches:
        optimizer.zero_grad()
        objective(batch).backward()
        optimizer.step()


@objectives
@pytest.mark.parametrize("start", [None, 2.0])
def test_a_loop_that_goes_on_elsewhere_is_the_same(kind, start):
    x, sigma = make_data(60, dtype=torch.float64), NoiseSchedule(start=start, end=0.25, steps=4)
    whole = kind(closed(), sigma=sigma)
    torch.manual_seed(1)
    steps(whole, x.split(10))
    first = kind(closed(), sigma=sigma)
    torch.manual_seed(1)
    steps(first, x.split(10)[:3])
    later = kind(copy.deepcopy(first.model), sigma=sigma)
    later.load_state(first.state())
    steps(later, x.split(10)[3:])
    assert same(weights(whole.model), weights(later.model))
    without = kind(copy.deepcopy(first.model), sigma=sigma)
    steps(without, x.split(10)[3:])
    assert not same(weights(whole.model), weights(without.model))


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`.*")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers.*")
@pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval.*")
@pytest.mark.parametrize("start", [None, 2.0])
def test_fit_and_lightning_train_as_an_own_loop_does(start):
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from ebflow_plugin.lightning import LitObjective

    x, sigma = make_data(60, dtype=torch.float64), NoiseSchedule(start=start, end=0.25, steps=4)

    def made():
        model, generator = closed(), rng(3)
        options = {"sigma": sigma, "generator": generator}
        return DSM(model, **options) + 0.5 * LatentMatch(model, **options)

    def sgd(parameters):
        return torch.optim.SGD(parameters, 1e-2)

    own, fitted, lit = made(), made(), made()
    steps(own, x.split(10))
    ebf.fit(fitted, DataLoader(x, batch_size=10), epochs=1, optimizer=sgd, progress=False)
    trainer = Trainer(
        max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(LitObjective(lit, sgd), DataLoader(x, batch_size=10))
    assert own.state()["0"]["noise_step"] == 6
    assert fitted.state() == lit.state() == own.state()
    assert same(weights(own.model), weights(fitted.model))
    assert same(weights(own.model), weights(lit.model))


@objectives
@pytest.mark.parametrize("start", [None, 2.0])
def test_a_compiled_loss_is_compiled_once(kind, start):
    """σ is an input of the compiled graph, not a constant of it."""
    x, sigma = make_data(8, dtype=torch.float64), NoiseSchedule(start=start, end=0.25, steps=3)
    counter = CompileCounter()
    eager, compiled = kind(closed(), sigma=sigma), kind(closed(), sigma=sigma).compile(backend=counter)
    for step in range(len(SIGMAS)):
        values = [objective(x, generator=rng(step)) for objective in (eager, compiled)]
        torch.testing.assert_close(*values, rtol=1e-12, atol=0)
    assert compiled.state() == eager.state()
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 0.1, "end": 0.5, "steps": 3}, "start must be at least end=0.5, got 0.1"),
        ({"end": 0.0, "steps": 3}, "end must be a positive number, got 0.0"),
        ({"end": 0.5, "steps": 0}, "steps must be an integer, at least 1, got 0"),
    ],
)
def test_options(options, message):
    with pytest.raises(InputError, match=message):
        NoiseSchedule(**options)


def test_one_row_has_no_standard_deviation():
    with pytest.raises(InputError, match="has one row"):
        DSM(closed(), sigma=NoiseSchedule(end=0.1, steps=4))(make_data(1, dtype=torch.float64))


def test_the_schedule_is_part_of_the_description():
    text = DSM(closed(), sigma=SCHEDULE).describe()
    assert text == "DSM(sigma=NoiseSchedule(end=0.25, steps=3, start=2.0), energy_weight=0)"
