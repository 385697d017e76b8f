"""The classes of torch.nn, each classified as it is measured: along lines, does the value jump, or its slope."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import activation, batchnorm, dropout, instancenorm, normalization, padding, pooling

from ebflow_plugin.plan.smooth_modules import FUNCTIONS, known_smoothness
from ebflow_plugin.plan.smoothness import smoothness_of, stochastic_parts
from randomness import rng

# How to build a class, and the event shape that it takes, where it is not cls() on (6,).
IMAGE, LINE, VOLUME = (2, 6, 6), (2, 6), (2, 4, 4, 4)
SHAPES = {"1d": LINE, "2d": IMAGE, "3d": VOLUME}
ARGUMENTS = {
    **{f"{kind}Pad{n}d": (1,) for kind in ("Zero", "Reflection", "Replication", "Circular") for n in (1, 2, 3)},
    **{f"ConstantPad{n}d": (1, 0.5) for n in (1, 2, 3)},
    **{f"{kind}Pool{n}d": (2,) for kind in ("Max", "Avg", "AdaptiveAvg", "AdaptiveMax") for n in (1, 2, 3)},
    **{f"LPPool{n}d": (2, 2) for n in (1, 2, 3)},
    **{f"{kind}Norm{n}d": (2,) for kind in ("Batch", "Instance") for n in (1, 2, 3)},
    "Threshold": (0.3, 0.3),
    "LayerNorm": (6,),
    "RMSNorm": (6, 1e-3),
    **dict.fromkeys(("Softmax", "Softmin", "LogSoftmax"), (-1,)),
    "GroupNorm": (1, 2),
    "LocalResponseNorm": (2,),
    "CrossMapLRN2d": (2,),
    "SyncBatchNorm": (2,),
}
EVENTS = {"Softmax2d": IMAGE, "GroupNorm": LINE, "LocalResponseNorm": IMAGE, "CrossMapLRN2d": IMAGE}
# Not functions of one tensor, or built for the first batch, or random, or not on a CPU: each with its reason.
NOT_MEASURED = {
    "MultiheadAttention": "takes three tensors",
    "MaxUnpool1d": "takes indices",
    "MaxUnpool2d": "takes indices",
    "MaxUnpool3d": "takes indices",
    "FractionalMaxPool2d": "is random, and refused",
    "FractionalMaxPool3d": "is random, and refused",
    "SyncBatchNorm": "takes CUDA tensors in training mode, and is a BatchNorm in eval mode",
    **{f"Lazy{kind}Norm{n}d": "becomes another class" for kind in ("Batch", "Instance") for n in (1, 2, 3)},
}
UNKNOWN = {name for name in NOT_MEASURED if name.startswith(("MaxUnpool", "Lazy"))}
FAMILIES = (activation, pooling, padding, dropout, normalization, batchnorm, instancenorm)
NAMES = sorted({name for family in FAMILIES for name in family.__all__})


def build(name):
    torch.manual_seed(0)
    return getattr(nn, name)(*ARGUMENTS.get(name, ())).double().eval()


def event_of(name):
    return EVENTS.get(name, next((shape for end, shape in SHAPES.items() if name.endswith(end)), (6,)))


def measured(function, shape):
    """What happens along three lines, one through zero: jumps that do not shrink with the distance of points."""
    generator = rng(1)
    found = set()
    for line in range(3):
        start, way = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        start = start * (line > 0)
        changes = []
        for points in (2_000, 20_000):
            t = torch.linspace(-4.03, 4.0, points, dtype=torch.float64).reshape(-1, *[1] * len(shape))
            x = (start + t * way).requires_grad_()
            y = function(x)
            mixed = (y * torch.linspace(0.3, 1.0, y[0].numel(), dtype=torch.float64).reshape(y.shape[1:])).flatten(1)
            (slope,) = torch.autograd.grad(mixed.sum(), x)
            along = (slope * way).flatten(1).sum(1)
            changes.append([values.diff().abs().max().item() for values in (mixed.sum(1).detach(), along)])
        coarse, fine = changes
        found |= {"density jumps"} if fine[0] > 0.5 * coarse[0] and fine[0] > 1e-6 else set()
        found |= {"score jumps"} if fine[1] > 0.5 * coarse[1] and fine[1] > 1e-6 else set()
    return "density jumps" if "density jumps" in found else "score jumps" if found else "smooth"


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_of_torch_is_classified_as_it_is_measured(name):
    if name in UNKNOWN:
        assert known_smoothness(getattr(nn, name)) is None
        return
    assert known_smoothness(getattr(nn, name)) is not None, f"{name} is in no table"
    if name not in NOT_MEASURED:
        module = build(name)
        assert str(smoothness_of(module)) == measured(module, event_of(name))


@pytest.mark.parametrize(
    "module",
    [nn.ELU(alpha=0.5), nn.Threshold(0.3, 0.0), nn.Threshold(0.3, 0.3), nn.Hardshrink(0.0), nn.CELU(alpha=2.0)],
    ids=repr,
)
def test_options_decide(module):
    assert str(smoothness_of(module)) == measured(module, (6,))


ELEMENTWISE = [
    function
    for function in FUNCTIONS
    if function not in (F.linear, F.prelu, torch.prelu, F.threshold, torch.threshold, torch.clamp, torch.zeros_like)
    and not getattr(function, "__name__", "").endswith("_")
]


@pytest.mark.parametrize("function", ELEMENTWISE, ids=lambda function: function.__name__)
def test_functions_are_classified_as_they_are_measured(function):
    options = {"dim": -1} if "softmax" in function.__name__ else {}
    assert str(FUNCTIONS[function]) == measured(lambda x: function(x, **options), (6,))


def test_what_is_in_no_table_is_unknown():
    class Mine(nn.Module):
        def forward(self, x):
            return x.abs()

    class Doubled(nn.Tanh):
        def forward(self, x):
            return 2 * super().forward(x)

    for module in (Mine(), Doubled(), nn.CosineSimilarity(), nn.RMSNorm(2)):
        assert smoothness_of(nn.Sequential(nn.Linear(2, 2), module)) == "unknown"
    hooked = nn.Tanh()
    hooked.register_forward_hook(lambda module, inputs, output: output.abs())
    assert smoothness_of(nn.Sequential(hooked)) == "unknown"


def test_parametrisations_act_on_weights():
    class Positive(nn.Module):
        def forward(self, weight):
            return weight.abs()

    layer = nn.Linear(2, 2)
    nn.utils.parametrize.register_parametrization(layer, "weight", Positive())
    assert smoothness_of(nn.Sequential(layer, nn.Tanh())) == "smooth"
    assert smoothness_of(nn.Sequential(layer, nn.ReLU())) == "score jumps"


def first_reason(module):
    return next((why for question in stochastic_parts(module) if (why := question()) is not None), None)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(NOT_MEASURED)))
@pytest.mark.parametrize("training", [True, False])
def test_what_is_random_or_couples_samples_is_refused(name, training):
    module, shape = build(name).train(training), event_of(name)
    x = torch.randn(4, *shape, dtype=torch.float64, generator=rng(0))
    changes = not torch.equal(module(x), module(x))
    couples = not torch.allclose(module(x)[:2], module(x[:2]))
    refused = first_reason(nn.Sequential(module))
    assert (refused is not None) == (changes or couples), refused
    if refused:
        assert "eval()" in refused


@pytest.mark.parametrize(
    ("module", "word"),
    [
        (nn.FractionalMaxPool2d(2, output_size=2), "random in every mode"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), "p=0.1"),
        (nn.LSTM(3, 3, num_layers=2, dropout=0.2), "p=0.2"),
        (nn.InstanceNorm1d(3, track_running_stats=True), "running statistics"),
    ],
)
def test_others_that_are_refused(module, word):
    assert word in first_reason(module)
    if "every mode" not in word:
        assert first_reason(module.eval()) is None
