"""What fit() refuses, before any work is lost."""

import numpy as np
import pytest
import torch
from nflows import distributions, flows, transforms
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import ebflow_plugin as ebf
from ebflow_nflows import SmoothLeakyReLU
from ebflow_plugin.errors import ContextError, EBFlowError, InputError
from ebflow_plugin.objectives import DSM, ML
from ebflow_plugin.training import fit
from nflows_small import flow_of
from training_models import make_data, make_model, same, weights


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
