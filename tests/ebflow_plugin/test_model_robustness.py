"""What users do to a model after they wrapped it, what they put into it, and a context that they forgot."""

import copy
import functools
import re
from functools import partial

import numpy as np
import pytest
import torch
from nflows import distributions, flows, transforms
from nflows.nn import nets
from torch import nn
from torch.nn import functional as F

import ebflow_plugin as ebf
import nflows_small
from ebflow_nflows import FullLinear, SmoothLeakyReLU
from ebflow_plugin.objectives import DSM, FDSSM, ML, SM, SSM, ReverseKL
from nflows_small import smooth_net
from randomness import randn, rng

D = 4
flow_of = partial(nflows_small.flow_of, shape=(D,))


@pytest.fixture
def x():
    return randn(6, D)


def coupling(net):
    return transforms.AffineCouplingTransform([1, 0] * (D // 2), net)


# The flow is rebuilt after wrapping


def test_objectives_follow_a_flow_that_is_rebuilt(x):
    flow = flow_of(transforms.Sigmoid(), transforms.Logit(), transforms.LULinear(D))
    model = ebf.wrap(flow)
    objective = ebf.objectives.ML(model)
    objective(x)
    flow._transform = transforms.CompositeTransform([transforms.LULinear(D, identity_init=False).double()])
    assert model.prefix.steps == ()
    assert torch.allclose(objective(x), -flow.log_prob(x).mean())


def test_a_prefix_that_is_unfrozen_later_is_refused(x):
    first = transforms.LULinear(D).requires_grad_(False)
    flow = flow_of(first, transforms.Sigmoid(), transforms.Logit(), transforms.LULinear(D))
    model = ebf.wrap(flow, match_after=2)
    assert model.report.preprocessing == 3
    objective = ebf.objectives.SSM(model)
    objective(x)
    first.requires_grad_(True)
    with pytest.raises(ebf.InputError, match=r"trainable parameters(?s:.*)_transforms\.0  LULinear"):
        objective(x)


def test_tensors_of_the_flow_can_be_swapped(x):
    flow = flow_of(transforms.LULinear(D))
    model = ebf.wrap(flow)
    with torch.no_grad():
        model.log_prob(x)
        model.sample(2)
        for parameter in list(flow.parameters()):
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() + 0.3))
        assert torch.allclose(model.log_prob(x), flow.log_prob(x))


def test_parameters_around_the_flow_are_reported():
    holder = nn.ModuleDict({"net": flow_of(transforms.LULinear(D)), "head": nn.Linear(2, 2)})
    with pytest.warns(UserWarning, match=r"\.net is wrapped alone: 2 trainable parameters.*'head\.weight'"):
        ebf.wrap(holder)


# Networks


def residual(activation):
    return lambda i, o: nets.ResidualNet(i, o, 8, activation=activation)


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        (lambda i, o: nflows_small.OwnNetwork(None, i, o), "unknown"),
        (residual(lambda z: F.relu(z)), "unknown"),
        (residual(functools.partial(F.leaky_relu, negative_slope=0.2)), "unknown"),
        (residual(F.relu), "score jumps"),
        (residual(nn.ReLU()), "score jumps"),
        (residual(torch.tanh), "smooth"),
        (residual(nn.SiLU()), "smooth"),
        (residual(F.silu), "smooth"),
    ],
)
def test_what_cannot_be_seen_into_is_not_called_smooth(net, expected):
    assert ebf.describe(flow_of(coupling(net))).rows[0].smoothness == expected


def test_smooth_replaces_a_shared_activation_everywhere():
    flow = flow_of(coupling(residual(nn.ReLU())))
    changes = []
    smoothed = ebf.smooth(flow, changes=changes)
    assert len(changes) >= 2
    assert ebf.describe(smoothed).rows[0].smoothness == "smooth"


def test_a_random_embedding_is_refused(x):
    net = lambda i, o: nets.ResidualNet(i, o, 8, context_features=3, activation=torch.tanh)  # noqa: E731
    flow = flow_of(coupling(net), embedding_net=nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.2)))
    with pytest.raises(ebf.UnsupportedStepError, match=r"embeds the context is random in training mode"):
        ebf.wrap(flow)
    model = ebf.wrap(flow.eval())
    context = torch.randn(6, 2, dtype=torch.float64)
    assert torch.equal(model.energy(x, context), model.energy(x, context))


def test_unconstrain_keeps_frozen_layers_frozen():
    flow = flow_of(transforms.LULinear(D).requires_grad_(False), transforms.LULinear(D))
    full = ebf.unconstrain(flow)
    trains = [parameter.requires_grad for parameter in full._transform.parameters()]
    assert trains == [False, False, True, True]


# Numbers


def test_constants_keep_the_precision_of_the_model():
    flow = flow_of(transforms.IdentityTransform(), shape=(3072,))
    model = ebf.wrap(flow, preprocess=[ebf.Rescale(0.05, 0.95, source=(0.0, 255.0))])
    x = 255.0 * torch.rand(2, 3072, dtype=torch.float64)
    scale = 0.9 / 255.0
    expected = flow.log_prob(x * scale + 0.05) + 3072 * torch.tensor(scale, dtype=torch.float64).log()
    assert torch.allclose(model.log_prob(x), expected, rtol=1e-13)


def test_dequantised_data_stay_below_one():
    model = ebf.wrap(flow_of(transforms.LULinear(D)).float(), preprocess=[ebf.Dequantize(256)])
    unit, _ = model.preprocess(torch.full((250_000, D), 255))
    assert unit.max() < 1.0


def test_verify_takes_what_the_wrapper_added(x):
    flow = flow_of(transforms.LULinear(D, identity_init=False))
    for noise in ("uniform", "smooth"):
        steps = [ebf.Dequantize(8, noise=noise), ebf.Rescale(0.05, 0.95), ebf.Logit()]
        assert ebf.verify(ebf.wrap(flow, preprocess=steps), torch.randint(8, (6, D)))
    plain = ebf.wrap(flow)
    plain.calibrate(torch.randn(200, D, dtype=torch.float64))
    assert ebf.verify(plain, x)


# torch's own transforms


def test_torch_func_and_compile(x):
    model = ebf.wrap(flow_of(transforms.LULinear(D), coupling(residual(torch.tanh))))
    score = model.score(x).detach()
    direction = torch.ones_like(x)
    value, product = torch.func.jvp(model.score, (x,), (direction,))
    assert torch.allclose(value, score)
    point = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad((model.score(point) * direction).sum(), point)
    assert torch.allclose(product, expected)
    single = torch.func.vmap(lambda row: model.score(row[None])[0])(x)
    assert torch.allclose(single, score)


@pytest.mark.slow
def test_energy_compiles_in_one_graph(x):
    model = ebf.wrap(flow_of(transforms.LULinear(D), coupling(residual(torch.tanh))))
    compiled = torch.compile(model.energy, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(x), model.energy(x))


def inference_flow():
    with torch.inference_mode():
        torch.manual_seed(0)
        layers = [
            transforms.LULinear(2),
            transforms.MaskedAffineAutoregressiveTransform(2, 8, context_features=3, activation=torch.tanh),
        ]
        embedding = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        return flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([2]), embedding).eval()


NEEDS_GRADIENTS = {
    "score": lambda model, x, context: model.score(x, context),
    "log_prob": lambda model, x, context: model.log_prob(x, context),
    "langevin": lambda model, x, context: ebf.langevin(model, x, 2, 0.1, context=context).samples,
    "impute": lambda model, x, context: ebf.impute(
        model, x, torch.tensor([True, False]), steps=2, step_size=0.1, context=context
    ),
    "denoise": lambda model, x, context: ebf.denoise(model, x, 0.1, context=context),
    "SM": lambda model, x, context: SM(model)(x, context),
    "DSM": lambda model, x, context: DSM(model, sigma=0.1)(x, context),
    "FDSSM": lambda model, x, context: FDSSM(model)(x, context),
    "ML": lambda model, x, context: ML(model)(x, context),
    "fit": lambda model, x, context: ebf.fit(SSM(model), (x, context), steps=1),
    "verify": lambda model, x, context: ebf.verify(model, x, context),
}


@pytest.mark.parametrize("call", NEEDS_GRADIENTS.values(), ids=NEEDS_GRADIENTS)
def test_parameters_made_in_inference_mode(call):
    """They cannot be part of a graph: works, or says what to do, where torch says neither which tensor nor why."""
    flow, x, context = inference_flow(), randn(5, 2, dtype=torch.float32), randn(5, 3, dtype=torch.float32)
    for mode in (True, False):
        try:
            with torch.inference_mode(mode):
                call(ebf.wrap(flow), x, context)
        except ebf.InputError as error:
            assert re.search(r"\w+\.\w+ was made under torch.inference_mode\(\).*copy.deepcopy", str(error))
    call(ebf.wrap(copy.deepcopy(flow)), x, context)


@pytest.mark.parametrize("call", NEEDS_GRADIENTS.values(), ids=NEEDS_GRADIENTS)
def test_data_and_contexts_made_in_inference_mode(call):
    model = ebf.wrap(copy.deepcopy(inference_flow()))
    with torch.inference_mode():
        x, context = randn(5, 2, dtype=torch.float32), randn(5, 3, seed=1, dtype=torch.float32)
    torch.manual_seed(0)
    found = call(model, x, context)
    if isinstance(found, torch.Tensor):
        torch.manual_seed(0)
        assert torch.equal(found, call(model, x.clone(), context.clone()))


def test_a_score_names_the_parameter_from_inference_mode():
    with pytest.raises(ebf.InputError, match=r"embedding.0.weight was made under torch.inference_mode\(\)"):
        ebf.wrap(inference_flow()).score(randn(5, 2, dtype=torch.float32), randn(5, 3, dtype=torch.float32))
    flow = inference_flow()
    flow._embedding_net = nn.Identity()
    x, context = randn(5, 2, dtype=torch.float32), randn(5, 3, dtype=torch.float32)
    expected = ebf.wrap(copy.deepcopy(flow)).score(x, context)
    assert torch.allclose(ebf.wrap(flow).score(x, context), expected)  # these layers save none of their parameters
    assert ebf.wrap(flow).log_z(method="lanczos").std_error == 0  # of cheap log-dets alone, without a gradient


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("name", ["score", "log_prob", "langevin", "denoise", "DSM", "SSM", "SM", "ML", "ReverseKL"])
def test_no_step_ends_in_an_error_of_torch(name, inference):
    """Plain tensors of a step (the temperature of a logit), and closed-form derivatives in their backward pass."""
    calls = {
        **{each: lambda model, each=each: NEEDS_GRADIENTS[each](model, x, None) for each in NEEDS_GRADIENTS},
        "SSM": lambda model: SSM(model)(x),
        "ReverseKL": lambda model: ReverseKL(model, lambda x: -x.square().sum(1), n=4)(),
    }
    with torch.inference_mode():
        layers = [transforms.Logit(), FullLinear(2), SmoothLeakyReLU(0.3), FullLinear(2)]
        model = ebf.wrap(nflows_small.flow_of(*layers, shape=(2,)).float())
    x = randn(5, 2, dtype=torch.float32).sigmoid()
    try:
        with torch.inference_mode(inference):
            calls[name](model)
    except ebf.InputError as error:
        assert re.search(r"was made under torch.inference_mode\(\).*copy.deepcopy", str(error))


# A context that was forgotten, or is none, is named in our words


C = 3


def autoregressive():
    return transforms.MaskedAffineAutoregressiveTransform(D, 8, context_features=C, activation=torch.tanh)


def with_coupling():
    return flows.Flow(
        transforms.AffineCouplingTransform([1, 0, 1, 0], smooth_net(C)), distributions.StandardNormal([D])
    )


def with_embedding():
    return flows.Flow(autoregressive(), distributions.StandardNormal([D]), embedding_net=nn.Linear(5, C))


def with_conditional_base():
    base = distributions.ConditionalDiagonalNormal([D], context_encoder=nn.Linear(C, 2 * D))
    return flows.Flow(transforms.LULinear(D), base)


CALLS = {
    "energy": lambda model, x: model.energy(x),
    "score": lambda model, x: model.score(x),
    "log_prob": lambda model, x: model.log_prob(x),
    "sample": lambda model, x: model.sample(2),
    "calibrate": lambda model, x: model.calibrate(x),
    "dsm": lambda model, x: ebf.objectives.DSM(model, sigma=0.1)(x),
    "ssm": lambda model, x: ebf.objectives.SSM(model)(x),
    "ml": lambda model, x: ebf.objectives.ML(model)(x),
}


@pytest.mark.parametrize("make", [with_coupling, with_embedding, with_conditional_base])
@pytest.mark.parametrize("name", list(CALLS))
def test_a_forgotten_context_is_named(make, name):
    torch.manual_seed(0)
    with pytest.raises(ebf.InputError, match=r"is conditional(?s:.*)Pass context=") as caught:
        CALLS[name](ebf.wrap(make()), torch.randn(30, D))
    assert not any("noise" in note for note in getattr(caught.value, "__notes__", ()))


def test_an_embedding_that_needs_no_context_is_asked():
    class Usual(nn.Module):
        def __init__(self):
            super().__init__()
            self.usual = nn.Parameter(torch.ones(1, C))

        def forward(self, context):
            return self.usual if context is None else context

    torch.manual_seed(0)
    flow = flows.Flow(autoregressive(), distributions.StandardNormal([D]), embedding_net=Usual())
    model = ebf.wrap(flow)
    drawn = model.sample(3, generator=rng(0))
    expected = model.sample(3, torch.ones(1, C), generator=rng(0))[0]
    assert torch.allclose(drawn, expected)


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (np.zeros((2, C), dtype="float32"), "context must be a tensor, got ndarray"),
        ([1, 2], "context must be a tensor, got list"),
        (torch.zeros(3, C), "context must have 2 rows, as x has, got shape \\(3, 3\\)"),
        (torch.zeros(2, C, dtype=torch.float64), "context is torch.float64, the flow is torch.float32"),
        (torch.tensor(1.0), "context must have (2 )?rows"),
        (torch.zeros(2, C, device="meta"), "context is on meta, (the flow|x) is on cpu"),
    ],
)
def test_what_is_no_context_is_refused(context, message):
    model = ebf.wrap(flows.Flow(autoregressive(), distributions.StandardNormal([D])))
    if "as x has" not in message:
        with pytest.raises(ebf.InputError, match=message):
            model.sample(2, context)
    with pytest.raises(ebf.InputError, match=message):
        model.energy(torch.zeros(2, D), context)


def test_an_array_is_no_data():
    model, array = ebf.wrap(flows.Flow(FullLinear(D), distributions.StandardNormal([D]))), np.zeros((2, D), "float32")
    with pytest.raises(ebf.InputError, match="x must be a tensor, got ndarray"):
        model.preprocess(array)
    for call in (model.calibrate, lambda x: model.initialize(x, whiten=True)):
        with pytest.raises(ebf.InputError, match=r"got ndarray; torch\.as_tensor"):
            call(array)
