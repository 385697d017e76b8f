"""Training, starts and checks on a device that is not the CPU: data of the CPU, default devices, no waits."""

import copy
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import Callback
from nflows.distributions import StandardNormal
from nflows.flows import Flow
from nflows.transforms import ActNorm, CompositeTransform, LULinear, MaskedAffineAutoregressiveTransform

import accelerator as pretend
import ebflow_plugin as ebf
from ebflow_nflows import FullLinear, SinhArcsinh, SmoothLeakyReLU
from ebflow_plugin.linalg.random import kept_random_state, random_state, set_random_state
from ebflow_plugin.objectives import DSM, ML, SSM
from lightning_models import Cut, on_the_accelerator, run
from randomness import randn
from training_models import CrashError, same

D = 4


def flow_of(*first, last=(), device="cpu"):
    steps = [*first, FullLinear(D), SmoothLeakyReLU(0.3), ActNorm(D), LULinear(D), *last]
    return Flow(CompositeTransform(steps), StandardNormal([D])).double().to(device)


def data(rows=64):
    with torch.device("cpu"):
        return 2.0 * randn(rows, D) + 1.0


def loader(x):
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=16)


@pytest.fixture(params=["named", "default"])
def device(request, accelerator):
    """The accelerator; once as the default device of torch too."""
    if request.param == "named":
        yield accelerator
    else:
        torch.set_default_device(accelerator)
        try:
            yield accelerator
        finally:
            torch.set_default_device(None)


STARTS = {
    "initialize": lambda model, x: model.initialize(*(x if isinstance(x, tuple) else (x,))),
    "whiten": lambda model, x: model.initialize(x, whiten=True),
    "gaussianize": lambda model, x: model.initialize(x, gaussianize=True),
    "calibrate": lambda model, x: (begin(model, x), model.calibrate(x)),
    "calibrate, diagonal": lambda model, x: (begin(model, x), model.calibrate(x, kind="diagonal")),
}
FORMS = {
    "tensor": lambda x, context: x,
    "loader": lambda x, context: loader(x),
    "pair": lambda x, context: (x, context),
}


def begin(model, x):
    model.initialize(*(x if isinstance(x, tuple) else (data(),)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", STARTS)
def test_starts_take_data_of_the_cpu(name, form, device):
    if (name, form) == ("initialize", "loader"):
        pytest.skip("a start of ActNorms takes one batch")
    torch.manual_seed(0)
    with torch.device("cpu"):
        x, context = data(), randn(64, 2, seed=2) if form == "pair" else None
        last = [MaskedAffineAutoregressiveTransform(D, 8, context_features=2)] if form == "pair" else []
        flow = flow_of(*([FullLinear(D), SinhArcsinh(D)] if name == "gaussianize" else []), last=last)
    found = []
    for place in ("cpu", device):
        model = ebf.wrap(copy.deepcopy(flow).to(place))
        given = FORMS[form](x, context)
        if place == "cpu":
            with torch.device("cpu"):
                STARTS[name](model, given)
        else:
            STARTS[name](model, given)
        found.append(model.log_prob(x.to(place), context if context is None else context.to(place)).detach().cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore::ebflow_plugin.EstimateWarning", "ignore::ebflow_plugin.CoverageWarning")
def test_everything_public_under_a_device(device):
    """No tensor is left on the CPU, nor made where torch makes them by default."""
    model, x = ebf.wrap(flow_of(device=device)), data().to(device)
    model.initialize(x)
    for value in (model.energy(x), model.score(x), model.log_prob(x), model.log_z(), model.sample(3)):
        assert value.device == device
    generator = torch.Generator("cpu").manual_seed(0)
    assert model.sample(3, temperature=0.5, generator=generator, batch_size=2).device == device
    assert model.log_z(method="lanczos").value is not None
    assert model.log_z(method="importance", samples=2000, proposal=model.sample(1000)).value is not None
    mask = torch.zeros(5, D, dtype=torch.bool, device=device)
    mask[:, 0] = True
    inside = ebf.wrap(model.flow, preprocess=[ebf.Rescale(-20.0, 20.0, source=(0.0, 1.0))])
    options = {"steps": 3, "step_size": 0.01, "burn_in": 3, "generator": generator}
    for space in ("data", "matched"):
        chains = ebf.langevin(inside, x[:5].sigmoid(), **options, space=space, thin=1)
        found = (chains.samples, chains.trajectory, chains.energies, chains.step_sizes)
        filled = ebf.impute(inside, x[:5].sigmoid(), mask, **options, space=space)
        for tensor in (*found, filled, ebf.denoise(inside, x[:5].sigmoid(), 0.1, space=space)):
            assert tensor.device == device
    ebf.importance(model, lambda y: -0.5 * y.square().sum(1), 64)
    ebf.coverage(model, data(200))
    ebf.verify(model.flow, x[:8])
    assert "LULinear" in str(model.report)


def test_fit_is_that_of_the_cpu(device):
    results = []
    for place in ("cpu", device):
        torch.manual_seed(0)
        with torch.device("cpu"):
            flow, x = flow_of(), data()
        with torch.device(place) if place == "cpu" else nullcontext():
            model = ebf.wrap(flow.to(place))
            options = {"steps": 12, "batch_size": 16, "calibrate": True, "ema": True, "progress": False}
            result = ebf.fit(ML(model), x, validation=x[:20], **options)
            result.load_best(model)
        results.append([record["nll"] for record in result.history])
    assert results[1] == pytest.approx(results[0], rel=1e-6)


@pytest.mark.parametrize("kind", [SSM, DSM, ML, ebf.objectives.SML], ids=lambda kind: kind.__name__)
def test_fit_does_not_wait_between_evaluations(kind, accelerator):
    model = ebf.wrap(flow_of(device=accelerator))
    model.initialize(data())
    counts = []

    class Spy(kind):
        def forward(self, *args, **options):
            counts.append(len(waits))
            return super().forward(*args, **options)

    with pretend.watch() as waits:
        ebf.fit(Spy(model), data(), steps=33, batch_size=16, evaluate_every=33, clip_norm=1.0, ema=True, progress=False)
    assert len(counts) == 33
    assert counts[1] == counts[-1], waits[counts[1] :]


class Waited(Callback):
    """The number of waits before each step."""

    def __init__(self, waits):
        self.waits, self.counts = waits, []

    def on_train_batch_start(self, *_):
        self.counts.append(len(self.waits))


def test_lightning_does_not_wait_between_evaluations(accelerator):
    """But once in an epoch, in its first step, for the loss that it shows."""
    with pretend.watch() as waits:
        seen = Waited(waits)
        run(None, steps=24, batch=2, evaluate_every=24, callbacks=[seen], strategy=on_the_accelerator(), clip_norm=1.0)
    assert len(seen.counts) == 24
    assert seen.counts[1] == seen.counts[-1], waits[seen.counts[1] : seen.counts[-1]]


def test_a_run_in_lightning_resumes_on_any_device(tmp_path, accelerator):
    """With the noise of the device's own generators, which Lightning saves for CUDA alone."""

    def start(folder, cut=None):
        return run(folder, cut, objective=NoiseOfTheDevice, strategy=on_the_accelerator())

    expected, rows, _ = start(tmp_path / "whole")
    with pytest.raises(CrashError):
        start(tmp_path / "parts", Cut(9))
    found, again, _ = start(tmp_path / "parts")
    assert again == rows
    assert same(found, expected)


class NoiseOfTheDevice(DSM):
    """Draws from the global generator of the device too, as a layer with dropout does."""

    def forward(self, x, *arguments, **options):
        return super().forward(x + 0.1 * torch.randn_like(x), *arguments, **options)


def test_a_bad_step_is_named_some_steps_later(accelerator):
    """And nothing that is not finite is reported as an evaluation in between."""
    model = ebf.wrap(flow_of(device=accelerator))
    model.initialize(data())
    calls, seen = [], []
    layer = model.flow._transform._transforms[0]

    class Broken(ML):
        def forward(self, *args, **options):
            calls.append(1)
            if len(calls) == 13:
                with torch.no_grad():
                    layer.weight[0].zero_()  # singular: log Z is infinite
            return super().forward(*args, **options)

    with pytest.raises(ebf.TrainingError) as caught:
        ebf.fit(
            Broken(model), data(), steps=200, batch_size=16, evaluate_every=100, callback=seen.append, progress=False
        )
    assert "step 13: the loss is not finite" in str(caught.value)
    assert "flow._transform._transforms.0.weight of _transform._transforms.0  FullLinear" in str(caught.value)
    assert 13 < len(calls) <= 30
    assert not seen


def test_random_states_of_any_device(accelerator):
    generator = torch.Generator(accelerator).manual_seed(5)
    state = random_state(accelerator, [generator])
    draws = lambda: [  # noqa: E731
        torch.randn(3, device=accelerator).tolist(),
        torch.randn(3, device="cpu").tolist(),
        torch.randn(3, device=accelerator, generator=generator).tolist(),
    ]
    first = draws()
    set_random_state(state, accelerator, [generator])
    assert draws() == first
    set_random_state(state, accelerator, [generator])
    with kept_random_state(accelerator):
        draws()
    assert draws()[:2] == first[:2]


def test_fit_leaves_the_random_state_of_the_device(accelerator):
    model = ebf.wrap(flow_of(device=accelerator))
    state = torch.get_device_module(accelerator).get_rng_state(accelerator)
    ebf.fit(DSM(model), data(), steps=2, progress=False)
    assert torch.equal(torch.get_device_module(accelerator).get_rng_state(accelerator), state)


def test_nflows_actnorm_as_it_is_on_cuda(accelerator):
    """Its start replaces the data of the flag, a buffer, by a CPU tensor, which CUDA allows."""
    model = ebf.wrap(flow_of(device=accelerator))
    model.initialize(data())
    layer = model.flow._transform._transforms[2]
    layer._buffers["initialized"] = torch.tensor(True)
    x = data().to(accelerator)
    expected = model.log_prob(x)
    copied = copy.deepcopy(model)
    assert torch.equal(copied.log_prob(x), expected)
    fresh = ebf.wrap(flow_of(device=accelerator))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.log_prob(x), expected)
    model.to(accelerator)
    ebf.fit(SSM(model), data(), steps=3, ema=True, validation=data(20), progress=False)
    assert torch.isfinite(model.log_prob(x)).all()
