"""No training step makes the host wait for the device, whatever the objective; and its numbers are those of the CPU."""

import copy
import re
import warnings

import pytest
import torch
from nflows.distributions import StandardNormal
from nflows.flows import Flow
from nflows.transforms import ActNorm, CompositeTransform, LULinear

import accelerator as pretend
import ebflow_plugin as ebf
from cases import SUPPORTED, first_of_each_class
from ebflow_nflows import FullConv2d, FullLinear, SmoothLeakyReLU
from ebflow_plugin.objectives import DSM, FDSSM, ML, SM, SML, SSM, LatentMatch, ReverseKL
from ebflow_plugin.objectives.schedule import NoiseSchedule
from ebflow_plugin.plan.smoothness import Smoothness
from randomness import randn, rng

SHAPES = {"fc": (4,), "cnn": (2, 4, 4)}


def model_of(kind, device="cpu", scale=0.1):
    torch.manual_seed(0)
    steps = {
        "fc": [FullLinear(4), SmoothLeakyReLU(0.3), ActNorm(4), LULinear(4), FullLinear(4)],
        "cnn": [
            FullConv2d(2, kernel_size=3),
            SmoothLeakyReLU(0.3),
            FullConv2d(2, kernel_size=3, padding_mode="circular"),
        ],
    }[kind]
    flow = Flow(CompositeTransform(steps), StandardNormal(list(SHAPES[kind]))).double()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter += scale * torch.randn_like(parameter)
    ebf.wrap(flow).initialize(data(kind))
    return ebf.wrap(flow.to(device))


def data(kind, rows=12, seed=0):
    return randn(rows, *SHAPES[kind], seed=seed)


# Classes whose own code asks for values: splines (masks, a look for input outside of the domain), normflows' Residual
# (a fixed-point iteration, a random series), and ActNorms inside of a network, which start themselves.
ASKING = re.compile(r"(Masked)?Piecewise(Linear|Quadratic|Cubic|RationalQuadratic)[A-Z]\w+|Residual|ActNorm")

# Classes whose own code makes tensors of Python numbers, or indexes by CPU tensors or masks, in each call.
COPYING = re.compile(
    "QRLinear|QR [+]|PeriodicWrap|PeriodicShift|MaskedAffineFlow|base: RealNVP|flows.BPF|zuko StudentT|zuko GMM"
)


def asking(model):
    """Whether one of these is in a nonlinear step of a model."""
    nonlinear = [step.module for step in model.plan.steps if step.linearity != "linear"]
    return any(ASKING.fullmatch(type(part).__name__) for module in nonlinear for part in module.modules())


def target(x):
    return -0.5 * (x - 1.0).flatten(1).square().sum(1)


OBJECTIVES = {
    "SM": SM,
    "SSM": SSM,
    "SSM, sphere, noise": lambda model, **o: SSM(model, projections=2, projection="sphere", sigma=0.1, **o),
    "DSM": DSM,
    "DSM, range": lambda model, **o: DSM(model, sigma_range=(0.1, 1.0), **o),
    "DSM, schedule from data": lambda model, **o: DSM(model, sigma=NoiseSchedule(end=0.1, steps=9), **o),
    "DSM, schedule, latents": lambda m, **o: DSM(
        m, sigma=NoiseSchedule(end=0.1, steps=9, start=1.0), latent_weight=1.0, **o
    ),
    "FDSSM": FDSSM,
    "ML": ML,
    "ML stochastic": lambda model, **o: ML(model, log_det="stochastic", **o),
    "ML stochastic, 2 probes": lambda model, **o: ML(model, log_det="stochastic", probes=2, **o),
    "ML auto": lambda model, **o: ML(model, log_det="auto", **o),
    "SML": SML,
    "ReverseKL": lambda model, **o: ReverseKL(model, target, n=8, **o),
    "ReverseKL, total": lambda model, **o: ReverseKL(model, target, n=8, gradient="total", **o),
    "ReverseKL, stochastic": lambda m, **o: ReverseKL(m, target, n=8, gradient="total", log_det="stochastic", **o),
    "LatentMatch": LatentMatch,
    "sum": lambda model, **o: 0.9 * SSM(model, **o) + 0.1 * ML(model, **o),
}


def arguments(name, x):
    return () if name.startswith("ReverseKL") else (x,)


@pytest.mark.parametrize("own", [False, True], ids=["global generator", "generator of the device"])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_step_waits(name, kind, own, accelerator):
    model = model_of(kind, accelerator)
    options = {"generator": torch.Generator(accelerator).manual_seed(0)} if own else {}
    objective, x = OBJECTIVES[name](model, **options), data(kind).to(accelerator)
    model.energy(x)  # reads once that the ActNorm has started
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(9):  # in the first steps noise is measured, and numbers come in from the fifth on
        with pretend.watch() as waits:
            objective(*arguments(name, x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not waits, (step, waits)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradients_are_those_of_the_cpu(name, accelerator):
    losses, gradients = [], []
    for device in ("cpu", accelerator):
        model = model_of("fc", device)
        objective = OBJECTIVES[name](model, generator=rng(3))
        loss = objective(*arguments(name, data("fc").to(device)))
        loss.backward()
        losses.append(loss.detach().cpu())
        gradients.append(torch.cat([p.grad.cpu().flatten() for p in model.parameters() if p.grad is not None]))
    tolerance = {"rtol": 0.02, "atol": 1e-3} if "stochastic" in name else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(losses[1], losses[0], **tolerance)  # a solve makes other iterations
    torch.testing.assert_close(gradients[1], gradients[0], **tolerance)


@pytest.mark.parametrize("name", ["SM", "SSM", "DSM", "FDSSM", "ML", "SML", "sum"])
def test_weights_do_not_wait(name, accelerator):
    model = model_of("fc", accelerator)
    objective, x = OBJECTIVES[name](model), data("fc").to(accelerator)
    model.energy(x)
    weights = torch.rand(12, dtype=x.dtype).to(accelerator)
    with pretend.watch() as waits:
        objective(x, weights=weights).backward()
    assert not waits


@pytest.mark.parametrize("case", first_of_each_class(SUPPORTED), ids=str)
def test_no_case_waits(case, accelerator):
    model = ebf.wrap(case.build().to(accelerator))
    x, context = case.x(3).to(accelerator), case.context(3)
    context = None if context is None else context.to(accelerator)
    false = any(part.smoothness == Smoothness.WRONG for part in model.plan.parts())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about jumps of the score
        calls = [model.energy, FDSSM(model, eps=1e-3)]  # which stays in the domain of a spline
        calls += [] if false else [SSM(model), DSM(model, sigma=1e-3)]
    model.initialize(x, context)
    model.energy(x, context)  # what is computed once
    for call in calls:
        with pretend.watch() as waits:
            value = call(x, context).sum()
            if value.requires_grad:
                value.backward()
        if waits and (asking(model) or COPYING.search(str(case))):
            pytest.skip(f"the library's own code: {waits[0]}")
        assert not waits


def test_a_solve_that_fails_is_noticed_some_steps_later(accelerator):
    """And then the exact log-determinant is used, with the warning, as on the CPU at once."""
    model = model_of("fc", accelerator)
    layer = model.flow._transform._transforms[0]
    with torch.no_grad():
        layer.weight.mul_(torch.logspace(0, -8, 4, dtype=torch.float64, device=accelerator)[:, None])
    objective = ML(model, log_det="stochastic", probes=2, iterations=2, generator=rng())
    x = data("fc").to(accelerator)
    for _ in range(4):
        objective(x).backward()
    assert objective.metrics()["exact_log_dets"] == 0
    with pytest.warns(ebf.ConditioningWarning, match="did not converge in 2 iterations"):
        objective(x).backward()
    assert objective.metrics()["exact_log_dets"] >= 1


def test_the_iterations_of_a_solve_follow_those_of_earlier_ones(accelerator):
    model = model_of("cnn", accelerator, scale=0.03)
    objective = ML(model, log_det="stochastic", probes=3, generator=rng())
    x, path = data("cnn").to(accelerator), "_transform._transforms.0"
    allowed = []
    for _ in range(7):
        objective(x).backward()
        allowed.append(objective._estimator.accounts[path].allowed)
    assert allowed[:4] == [0] * 4  # all of them
    needed = objective.metrics()["log_det"][path]["iterations"]
    assert needed < allowed[-1] <= needed * 1.25 + 2 < 32


def test_numbers_on_their_way_are_part_of_the_state(accelerator):
    model = model_of("cnn", accelerator)
    x = data("cnn").to(accelerator)
    objective = ML(model, log_det="stochastic", generator=rng())
    for _ in range(3):
        objective(x)
    other = ML(model, log_det="stochastic", generator=rng())
    other.load_state(copy.deepcopy(objective.state()))
    other.generator.set_state(objective.generator.get_state())
    copied = copy.deepcopy(objective)
    copied.generator = rng().set_state(objective.generator.get_state())
    for _ in range(9):
        values = [each(x) for each in (objective, other, copied)]
        gradients = [torch.autograd.grad(v, each.model.flow._transform._transforms[0].weight)[0]
                     for v, each in zip(values, (objective, other, copied), strict=True)]  # fmt: skip
        assert torch.equal(gradients[0], gradients[1])
        assert torch.equal(gradients[0], gradients[2])
    assert objective.metrics() == other.metrics()
