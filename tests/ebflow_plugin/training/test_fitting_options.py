"""What fit() refuses before any work is lost, and what it records and shows."""

import numpy as np
import pytest
import torch
from nflows import distributions, flows, transforms
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import ebflow_plugin as ebf
from ebflow_nflows import FullConv2d, FullLinear, SmoothLeakyReLU
from ebflow_plugin.errors import ContextError, EBFlowError, InputError
from ebflow_plugin.objectives import DSM, ML
from ebflow_plugin.training import Event, fit
from ebflow_plugin.training.events import describe
from nflows_small import flow_of
from randomness import rng
from training_models import adam, make_data, make_model, same, weights


class Stream(IterableDataset):
    def __iter__(self):
        return iter(make_data(20))


class Dicts(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"x": torch.zeros(4)}


def nan_data():
    x = make_data(50)
    x[7, 2] = float("nan")
    x[9] = float("inf")
    return x


class WithEncoder(ML):
    def __init__(self, model):
        super().__init__(model)
        self.encoder = torch.nn.Linear(4, 4)


SPARE = torch.nn.Parameter(torch.zeros(3))
LABELS = torch.arange(200) % 10
REFUSED = {  # what is changed in fit(ML(model), data, steps=1), or the call
    "no objective": (lambda m: fit(m, make_data(), steps=1), r"needs an objective, such as ebf.objectives.SSM"),
    "neither": ({"steps": None}, "either steps or epochs"),
    "both": ({"epochs": 1}, "either steps or epochs"),
    "zero steps": ({"steps": 0}, "steps must be an integer, at least 1, got 0"),
    "half epochs": ({"steps": None, "epochs": 0.5}, "epochs must be an integer"),
    "batch size": ({"batch_size": 0}, "batch_size must be"),
    "empty tensor": ({"data": torch.zeros(0, 4)}, "data is empty: 0 rows"),
    "empty validation": ({"validation": torch.zeros(0, 4)}, "validation is empty"),
    "empty loader": (
        {"data": DataLoader(TensorDataset(make_data(3)), batch_size=4, drop_last=True)},
        "the DataLoader is empty",
    ),
    "stream": ({"data": DataLoader(Stream())}, "does not know its length"),
    "a list": ({"data": [1, 2]}, "a Dataset with a length or a DataLoader, got builtins.list"),
    "dicts": ({"data": Dicts()}, "(?s)got a dict of 1.*collate_fn"),
    "four": ({"data": (make_data(), *3 * [LABELS])}, "x, context, weights., got a tuple of 4"),
    "a list of tensors": (
        {"data": [make_data(), make_data(seed=1)]},
        r"(?s)data must be a tensor.*got builtins.list.*torch.cat.*tuple \(x, context, weights\)",
    ),
    "validation in a list": ({"validation": [make_data()]}, "validation must be a tensor, .*torch.cat"),
    "an array": ({"data": make_data().numpy()}, "got numpy.ndarray; torch.from_numpy"),
    "rows": ({"data": (make_data(), make_data(7))}, "200 and 7 rows"),
    "NaN": ({"data": nan_data()}, r"5 NaN or inf in 2 of 50 rows, the first at \[7, 2\]"),
    "NaN to validate": ({"validation": nan_data()}, "validation holds 5 NaN"),
    "NaN in a loader": (
        {"data": DataLoader(TensorDataset(nan_data()), batch_size=25)},
        "data: its first batch holds 5 NaN",
    ),
    "dtype": ({"data": make_data().double()}, "float64, the flow is torch.float32; cast"),
    "integers": ({"data": torch.zeros(9, 4, dtype=torch.int64)}, "floating point.*Dequantize"),
    "shape": ({"data": torch.zeros(9, 3)}, r"x must have shape \(B, 4\), got \(9, 3\)"),
    "callback": ({"callback": "print"}, "callback must be a function of an event"),
    "progress": ({"progress": "no"}, "progress must be True or False, got 'no'"),
    "optimizer": ({"optimizer": "adam"}, "optimizer must be an Optimizer"),
    "optimizer class": ({"optimizer": lambda p: p}, "or a function that returns one, got"),
    "other optimizer": (
        {"optimizer": torch.optim.SGD(make_model().parameters(), lr=0.1)},
        "it lacks 4 of them .* and holds 6 others. Build it from objective.parameters",
    ),
    "half an optimizer": (
        lambda m: fit(ML(m), make_data(), steps=1, optimizer=torch.optim.SGD(list(m.parameters())[:1], lr=0.1)),
        r"the 4 trainable parameters of the model .* lacks 3 of them \(flow\..*bias, .*requires_grad_\(False\)",
    ),
    "more than an optimizer": (
        lambda m: fit(ML(m), make_data(), steps=1, optimizer=torch.optim.SGD([*m.parameters(), SPARE], lr=0.1)),
        "it lacks none, and holds 1 others",
    ),
    "an objective with parameters": (
        lambda m: fit(WithEncoder(m), make_data(), steps=1),
        "WithEncoder has parameters besides those of its model.*: encoder.weight, encoder.bias",
    ),
    "LBFGS": (
        {"optimizer": torch.optim.LBFGS},
        r"LBFGS computes the loss of a step several times.*optimizer.step\(closure\)",
    ),
    "plateau": (
        {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau},
        "ReduceLROnPlateau uses the NLL of validation data",
    ),
    "scheduler": ({"scheduler": "cosine"}, "scheduler must be"),
    "ema": ({"ema": 0.99}, "ema must be True"),
    "other ema": ({"ema": ebf.EMA(make_model())}, "of another model"),
    "patience": ({"patience": 3}, "patience and calibrate need validation"),
    "calibrate": ({"calibrate": True}, "patience and calibrate need validation"),
    "kind": ({"validation": make_data(), "calibrate": "ful"}, "unknown calibrate 'ful'. Did you mean 'full'"),
    "no kind": ({"validation": make_data(), "calibrate": ""}, "unknown calibrate ''. Valid names: diagonal, full"),
    "number as kind": ({"validation": make_data(), "calibrate": 0}, "unknown calibrate 0"),
    "clip": ({"clip_norm": 0.0}, "clip_norm must be a positive number"),
    "seed": ({"seed": 0.5}, "seed must be"),
    "frozen": (lambda m: fit(ML(m.requires_grad_(False)), make_data(), steps=1), "nothing to train"),
    "an activation": (
        lambda m: fit(ML(ebf.wrap(flow_of(SmoothLeakyReLU(0.3), shape=(4,)))), make_data().double(), steps=1),
        "nothing to train",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_with_the_fix(case):
    given, words = REFUSED[case]
    model = make_model(actnorm=False)
    before = weights(model)
    with pytest.raises(EBFlowError, match=words):
        given(model) if callable(given) else fit(ML(model), **{"data": make_data(), "steps": 1, **given})
    assert same(weights(model), before)


def test_counts_of_numpy_are_counts():
    runs = []
    for kind in (int, np.int64):
        model = make_model(actnorm=False)
        result = fit(DSM(model), make_data(), steps=kind(3), batch_size=kind(8), seed=kind(5), progress=False)
        assert result.steps == 3
        runs.append(weights(model))
    assert same(*runs)


def test_a_context_that_is_read_is_taken():
    made = transforms.MaskedAffineAutoregressiveTransform(4, 8, context_features=3, num_blocks=1, activation=torch.tanh)
    model = ebf.wrap(flows.Flow(made, distributions.StandardNormal([4])))
    assert fit(ML(model), (make_data(), make_data(size=3)), steps=1, progress=False).steps == 1


def test_contexts_that_do_not_fit():
    model = make_model()
    with pytest.raises(ContextError, match="context must have 5 rows"):
        model.energy(make_data(5), make_data(4))
    with pytest.raises(ContextError, match="context is torch.float64"):
        model.energy(make_data(5), make_data(5).double())


def test_several_processes_train_in_lightning(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"one process.*ebflow_plugin\.lightning trains in them all"):
        fit(ML(make_model()), make_data(), steps=1)


# What a run of fit() records and shows: metrics, the callback, lines


QUIET = {"progress": False}


def test_a_line_has_the_time_left():
    record = {"step": 100, "loss": 0.0, "steps_per_second": 10.0}
    event = Event(100, record, model=None, steps=250, seconds_left=3735.0)
    assert str(event) == "step 100/250  loss 0.0000  10.0 steps/s  1:02:15 left"


def test_the_callback_is_told_how_far_the_run_is_and_can_stop():
    events = []

    def stop(event):
        events.append(event)
        return event.step >= 4

    result = fit(ML(make_model()), make_data(), steps=20, evaluate_every=2, callback=stop, **QUIET)
    assert [(event.step, event.steps) for event in events] == [(2, 20), (4, 20)]
    assert [event.record for event in events] == result.history
    assert all(event.seconds_left > 0 for event in events)
    assert (result.steps, result.stopped) == (4, "callback")


def test_a_record_has_all_that_was_measured():
    x = make_data()
    result = fit(DSM(make_model()), x, steps=6, evaluate_every=2, validation=x, ema=True, **QUIET)
    assert [record["step"] for record in result.history] == [2, 4, 6]
    names = {
        "step",
        "epoch",
        "loss",
        "nll",
        "bits_per_dim",
        "best_nll",
        "grad_norm",
        "lr",
        "seconds",
        "steps_per_second",
    }
    assert set(result.history[0]) == names
    best = min(result.start_nll, *(record["nll"] for record in result.history))
    assert result.history[-1]["best_nll"] == result.best_nll == best
    assert fit(ML(make_model()), x, epochs=3, batch_size=100, evaluate_every=1, **QUIET).history[-1]["epoch"] == 2


def test_the_recorded_loss_is_the_mean_since_the_last_record():
    x, losses = make_data(64), []

    class Spy(ML):
        def forward(self, x, context=None):
            losses.append(super().forward(x, context))
            return losses[-1]

    result = fit(Spy(make_model()), x, steps=6, batch_size=16, evaluate_every=3, **QUIET)
    means = [torch.stack(losses[:3]).mean().item(), torch.stack(losses[3:6]).mean().item()]
    assert [record["loss"] for record in result.history] == pytest.approx(means, rel=1e-5)


def test_there_is_a_line_for_the_start_and_each_evaluation(capsys):
    x = make_data()
    fit(ML(make_model()), x, steps=4, evaluate_every=2, validation=x)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("step 0/4  NLL ")
    assert "loss" not in lines[0]
    for word in ("step 4/4", "loss", "NLL", "bits/dim", "steps/s", "left"):
        assert word in lines[-1]
    fit(ML(make_model()), x, steps=4, **QUIET)
    assert capsys.readouterr().err == ""


# Training by ML without determinants: metrics, and where it ends. Resumed runs are in test_resuming.py


def test_metrics_show_the_solves_and_the_exact_nll():
    noise = torch.randn(60, 2, 6, 6, generator=rng(0))
    x = noise + 0.5 * noise.roll(1, 3)
    steps = [FullConv2d(2, kernel_size=3), SmoothLeakyReLU(0.5), FullConv2d(2, kernel_size=3)]
    model = ebf.wrap(flows.Flow(transforms.CompositeTransform(steps), distributions.StandardNormal([2, 6, 6])))
    objective = ML(model, log_det="stochastic")
    result = fit(objective, x, steps=12, batch_size=20, validation=x, optimizer=adam(1e-2), progress=False)
    last = result.history[-1]
    assert set(last["log_det"]) == {"_transform._transforms.0", "_transform._transforms.2"}
    for layer in last["log_det"].values():
        assert layer["probes"] >= 1
        assert 1 <= layer["iterations"] <= 50
        assert 0 <= layer["residual"] <= 0.01
        assert layer["exact"] == 0
    assert last["exact_log_dets"] == 0
    with torch.no_grad():
        assert last["nll"] == pytest.approx(-model.log_prob(x).mean().item(), rel=1e-5)
    assert result.best_nll < result.start_nll


def test_what_did_not_converge_is_counted_in_words():
    assert describe({"loss": 1.0, "exact_log_dets": 3})[-1] == "3 log-dets exact (no convergence)"


def test_training_comes_to_where_exact_likelihood_does():
    x = torch.randn(400, 6, generator=rng(1)) @ torch.linspace(0.3, 2.0, 36).reshape(6, 6)
    x = x + torch.randn(400, 6, generator=rng(2))
    found = {}
    for way in ("exact", "stochastic"):
        model = ebf.wrap(flows.Flow(FullLinear(6), distributions.StandardNormal([6])))
        options = {"optimizer": adam(2e-2), "progress": False}
        result = fit(ML(model, log_det=way), x, steps=300, batch_size=100, validation=x, ema=True, **options)
        found[way] = result.history[-1]["nll"]
    assert found["stochastic"] == pytest.approx(found["exact"], abs=0.05)
