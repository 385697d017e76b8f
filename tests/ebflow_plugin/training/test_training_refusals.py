"""What fit() refuses, before any work is lost."""

import warnings

import numpy as np
import pytest
import torch
from nflows import distributions, flows, transforms
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import ebflow_plugin as ebf
from ebflow_nflows import SmoothLeakyReLU
from ebflow_plugin.errors import ContextError, EBFlowError, InputError, SingularError
from ebflow_plugin.objectives import DSM, ML
from ebflow_plugin.objectives.checks import refuse_useless_context
from ebflow_plugin.training import fit
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


class Ignoring(transforms.LULinear):
    """Needs a context, and makes no use of it."""

    def forward(self, inputs, context=None):
        if context is None:
            raise ValueError("no context")
        return super().forward(inputs)


def ignoring_its_context():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the unknown class
        return ebf.wrap(flows.Flow(Ignoring(4), distributions.StandardNormal([4])))


SPARE = torch.nn.Parameter(torch.zeros(3))
LABELS = torch.arange(200) % 10
REFUSED = {
    "no objective": (lambda m: fit(m, make_data(), steps=1), r"needs an objective, such as ebf.objectives.SSM"),
    "reduction": (lambda m: fit(ML(m, reduction="none"), make_data(), steps=1), "scalar"),
    "neither": (lambda m: fit(ML(m), make_data()), "either steps or epochs"),
    "both": (lambda m: fit(ML(m), make_data(), steps=1, epochs=1), "either steps or epochs"),
    "zero steps": (lambda m: fit(ML(m), make_data(), steps=0), "steps must be an integer, at least 1, got 0"),
    "half epochs": (lambda m: fit(ML(m), make_data(), epochs=0.5), "epochs must be an integer"),
    "batch size": (lambda m: fit(ML(m), make_data(), steps=1, batch_size=0), "batch_size must be"),
    "empty tensor": (lambda m: fit(ML(m), torch.zeros(0, 4), steps=1), "data is empty: 0 rows"),
    "empty validation": (
        lambda m: fit(ML(m), make_data(), steps=1, validation=torch.zeros(0, 4)),
        "validation is empty",
    ),
    "empty loader": (
        lambda m: fit(ML(m), DataLoader(TensorDataset(make_data(3)), batch_size=4, drop_last=True), steps=1),
        "the DataLoader is empty",
    ),
    "stream": (lambda m: fit(ML(m), DataLoader(Stream()), steps=1), "does not know its length"),
    "a list": (lambda m: fit(ML(m), [1, 2], steps=1), "a Dataset with a length or a DataLoader, got builtins.list"),
    "dicts": (lambda m: fit(ML(m), Dicts(), steps=1), "(?s)got a dict of 1.*collate_fn"),
    "triple": (lambda m: fit(ML(m), (make_data(), LABELS, LABELS), steps=1), "a pair .x, context., got a tuple of 3"),
    "a list of tensors": (
        lambda m: fit(ML(m), [make_data(), make_data(seed=1)], steps=1),
        r"(?s)data is a list of 2 tensors.*torch.cat.*tuple \(x, context\)",
    ),
    "validation in a list": (
        lambda m: fit(ML(m), make_data(), steps=1, validation=[make_data()]),
        "validation is a list of 1 tensors",
    ),
    "an array": (lambda m: fit(ML(m), make_data().numpy(), steps=1), "got numpy.ndarray; torch.from_numpy"),
    "targets": (
        lambda m: fit(ML(m), (make_data(), make_data(seed=1)), steps=1),
        "(?s)torch.float32 values.*makes no use of a context.*Drop the targets",
    ),
    "targets in a dataset": (
        lambda m: fit(ML(m), TensorDataset(make_data(), make_data(seed=1)), steps=1),
        "makes no use of a context",
    ),
    "targets to validate": (
        lambda m: fit(ML(m), make_data(), steps=1, validation=(make_data(), make_data(seed=1))),
        "validation: .*makes no use of a context",
    ),
    "targets that no step reads": (
        lambda m: fit(ML(ignoring_its_context()), (make_data(), make_data(seed=1)), steps=1),
        "makes no use of a context",
    ),
    "rows": (lambda m: fit(ML(m), (make_data(), make_data(7)), steps=1), "200 and 7 rows"),
    "NaN": (lambda m: fit(ML(m), nan_data(), steps=1), r"5 NaN or inf in 2 of 50 rows, the first at \[7, 2\]"),
    "NaN to validate": (lambda m: fit(ML(m), make_data(), steps=1, validation=nan_data()), "validation holds 5 NaN"),
    "NaN in a loader": (
        lambda m: fit(ML(m), DataLoader(TensorDataset(nan_data()), batch_size=25), steps=1),
        "data: its first batch holds 5 NaN",
    ),
    "labels": (lambda m: fit(ML(m), (make_data(), LABELS), steps=1), "(?s)makes no use of a context.*Drop the labels"),
    "loader of labels": (
        lambda m: fit(ML(m), DataLoader(TensorDataset(make_data(), LABELS)), steps=1),
        "(?s)Drop the labels.*collate_fn",
    ),
    "dtype": (lambda m: fit(ML(m), make_data().double(), steps=1), "float64, the flow is torch.float32; cast"),
    "integers": (lambda m: fit(ML(m), torch.zeros(9, 4, dtype=torch.int64), steps=1), "floating point.*Dequantize"),
    "shape": (lambda m: fit(ML(m), torch.zeros(9, 3), steps=1), r"x must have shape \(B, 4\), got \(9, 3\)"),
    "callbacks": (
        lambda m: fit(ML(m), make_data(), steps=1, callbacks=["print"]),
        r"callbacks\[0\] must be a function",
    ),
    "a callback": (lambda m: fit(ML(m), make_data(), steps=1, callbacks=print), r"callbacks=\[function\]"),
    "non-finite": (lambda m: fit(ML(m), make_data(), steps=1, on_non_finite="skp"), "Did you mean 'skip'"),
    "optimizer": (lambda m: fit(ML(m), make_data(), steps=1, optimizer="adam"), "optimizer must be an Optimizer"),
    "optimizer class": (lambda m: fit(ML(m), make_data(), steps=1, optimizer=lambda p: p), "must return a torch.optim"),
    "other optimizer": (
        lambda m: fit(ML(m), make_data(), steps=1, optimizer=torch.optim.SGD(make_model().parameters(), lr=0.1)),
        "holds none of the model's parameters",
    ),
    "half an optimizer": (
        lambda m: fit(ML(m), make_data(), steps=1, optimizer=torch.optim.SGD(list(m.parameters())[:1], lr=0.1)),
        r"lacks 3 of 4 trainable parameters of the model: flow\..*bias, .*requires_grad_\(False\)",
    ),
    "more than an optimizer": (
        lambda m: fit(ML(m), make_data(), steps=1, optimizer=torch.optim.SGD([*m.parameters(), SPARE], lr=0.1)),
        "holds 1 parameters that are not the model's",
    ),
    "an objective with parameters": (
        lambda m: fit(WithEncoder(m), make_data(), steps=1),
        "WithEncoder has parameters besides those of its model.*: encoder.weight, encoder.bias",
    ),
    "LBFGS": (
        lambda m: fit(ML(m), make_data(), steps=1, optimizer=torch.optim.LBFGS),
        r"LBFGS computes the loss of a step several times.*optimizer.step\(closure\)",
    ),
    "plateau": (
        lambda m: fit(ML(m), make_data(), steps=1, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau),
        "ReduceLROnPlateau uses the NLL of validation data",
    ),
    "no callbacks": (lambda m: fit(ML(m), make_data(), steps=1, callbacks=None), "callbacks must be a list.*got None"),
    "resume": (lambda m: fit(ML(m), make_data(), steps=1, resume="no"), "resume must be True or False, got 'no'"),
    "path": (lambda m: fit(ML(m), make_data(), steps=1, checkpoint=3), "checkpoint must be a path, got 3"),
    "path of metrics": (lambda m: fit(ML(m), make_data(), steps=1, metrics=""), "metrics must be a path, got ''"),
    "scheduler": (lambda m: fit(ML(m), make_data(), steps=1, scheduler="cosine"), "scheduler must be"),
    "ema": (lambda m: fit(ML(m), make_data(), steps=1, ema=0.99), "ema must be True"),
    "other ema": (lambda m: fit(ML(m), make_data(), steps=1, ema=ebf.EMA(make_model())), "of another model"),
    "patience": (lambda m: fit(ML(m), make_data(), steps=1, patience=3), "patience and calibrate need validation"),
    "calibrate": (lambda m: fit(ML(m), make_data(), steps=1, calibrate=True), "patience and calibrate need validation"),
    "kind": (
        lambda m: fit(ML(m), make_data(), steps=1, validation=make_data(), calibrate="ful"),
        "unknown calibrate 'ful'. Did you mean 'full'",
    ),
    "clip": (lambda m: fit(ML(m), make_data(), steps=1, clip_norm=0.0), "clip_norm must be a positive number"),
    "conditioning": (lambda m: fit(ML(m), make_data(), steps=1, conditioning=-1.0), "conditioning must be"),
    "seed": (lambda m: fit(ML(m), make_data(), steps=1, seed=0.5), "seed must be"),
    "frozen": (lambda m: fit(ML(m.requires_grad_(False)), make_data(), steps=1), "nothing to train"),
    "metrics": (lambda m: fit(ML(m), make_data(), steps=1, metrics="/proc/no/m.jsonl"), "metrics file .* cannot"),
    "checkpoint": (lambda m: fit(ML(m), make_data(), steps=1, checkpoint="/proc/no"), "checkpoint folder .* cannot be"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_with_the_fix(case):
    call, words = REFUSED[case]
    model = make_model(actnorm=False)
    before = weights(model)
    with pytest.raises(EBFlowError, match=words):
        call(model)
    assert same(weights(model), before)


def test_the_smooth_activation_is_no_full_layer():
    flow = flows.Flow(SmoothLeakyReLU(0.3), distributions.StandardNormal([4]))
    with pytest.raises(InputError, match="nothing to train"):
        fit(ML(ebf.wrap(flow)), make_data(), steps=1)


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


class Broken(transforms.LULinear):
    """Fails for a reason of its own, whose message happens to hold a word."""

    def forward(self, inputs, context=None):
        raise SingularError("singular, in this context")


def test_the_class_of_an_error_decides_and_not_its_text():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the unknown class
        model = ebf.wrap(flows.Flow(Broken(4), distributions.StandardNormal([4])))
    with pytest.raises(SingularError, match="singular, in this context"):
        refuse_useless_context(model, make_data(5), make_data(5, seed=1))
    with pytest.raises(ContextError, match="context must have 5 rows"):
        model.energy(make_data(5), make_data(4))
    with pytest.raises(ContextError, match="context is torch.float64"):
        model.energy(make_data(5), make_data(5).double())
