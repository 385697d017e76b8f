"""What stops a run, and what it says: values that are not finite, layers that become singular."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nflows import distributions, flows, transforms
from torch.utils._python_dispatch import TorchDispatchMode

import ebflow_plugin as ebf
from ebflow_nflows import FullConv2d, FullLinear, SmoothLeakyReLU
from ebflow_plugin.errors import EBFlowError, TrainingError
from ebflow_plugin.plan.spectrum import SMALL, ConditionWatch, conditioning_penalty, estimate_spectrum, full_layers
from ebflow_plugin.training import fit, loop
from ebflow_plugin.training.guards import FiniteWatch
from randomness import rng
from training_models import make_data, make_model, same, weights

NAN = float("nan")


def trapped(good, place=1):
    """An objective whose FullLinear at a place gives NaN once so many losses were computed."""
    model = make_model(actnorm=False)
    layer = model.flow._transform._transforms[2 * place]
    plain, state = layer.transform, {"factor": 1.0, "losses": 0}

    class Trapped(ebf.objectives.DSM):
        def forward(self, x, context=None):
            state["losses"] += 1
            state["factor"] = NAN if state["losses"] > good else 1.0
            return super().forward(x, context)

    objective = Trapped(model)
    layer.transform = lambda x: plain(x) * state["factor"]  # after the objective's own look at copies of the model
    return objective


@pytest.mark.parametrize("place", [0, 1])
def test_a_loss_that_is_not_finite_names_the_step_and_the_layer(tmp_path, place):
    objective = trapped(5, place=place)
    model = objective.model
    with pytest.raises(TrainingError) as caught:
        fit(objective, make_data(), steps=10, checkpoint=tmp_path, evaluate_every=100, progress=False)
    text = str(caught.value)
    assert "step 6: the loss is not finite" in text
    assert f"is the output of _transform._transforms.{2 * place}  FullLinear" in text
    assert "gradients are not finite, the first is that of flow._transform._transforms.0.weight" in text
    for advice in ("learning rate", "clip_norm", "conditioning", 'on_non_finite="skip"'):
        assert advice in text
    saved = torch.load(tmp_path / "failed-00000006.pt", weights_only=True)
    assert saved["step"] == 6
    assert same(saved["model"], weights(model)), "the weights are those before the bad step"
    assert all(torch.isfinite(value).all() for value in saved["model"].values())


def test_a_gradient_alone_is_noticed_too():
    model = make_model(actnorm=False)
    weight = model.flow._transform._transforms[2].weight
    calls = []

    def spoil(gradient):
        calls.append(1)
        return gradient * (NAN if len(calls) == 4 else 1.0)

    weight.register_hook(spoil)
    with pytest.raises(TrainingError) as caught:
        fit(ebf.objectives.ML(model), make_data(), steps=10, progress=False)
    assert "step 4: a gradient is not finite" in str(caught.value)
    assert "the first is that of flow._transform._transforms.2.weight of _transform._transforms.2  FullLinear" in str(
        caught.value
    )
    assert "all values on the way to noise are finite" in str(caught.value)


def test_skipped_batches_are_counted_and_change_nothing():
    steps, bad = 8, {3, 5}

    class Sometimes(ebf.objectives.ML):
        calls = 0

        def forward(self, x, context=None):
            self.calls += 1
            return super().forward(x, context) * (NAN if self.calls in bad else 1.0)

    model = make_model()
    result = fit(Sometimes(model), make_data(), steps=steps, on_non_finite="skip", ema=True, progress=False)
    assert result.skipped == 2
    assert result.ema.updates == steps - 2
    assert result.history[-1]["skipped"] == 2
    assert all(torch.isfinite(value).all() for value in weights(model).values())
    assert all(record["loss"] == record["loss"] for record in result.history if record["step"] not in bad)


def test_too_many_skipped_in_a_row_stop():
    with pytest.raises(TrainingError, match="(?s)step 13.*10 batches in a row were skipped"):
        fit(trapped(3), make_data(), steps=50, on_non_finite="skip", progress=False)


def test_a_bad_batch_of_a_loader_is_named_as_such():
    x = make_data(64)
    x[50, 2] = NAN
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=16)
    with pytest.raises(TrainingError, match="(?s)step 4.*the batch holds NaN or inf in 1 of 16 rows"):
        fit(ebf.objectives.ML(make_model()), loader, steps=10, progress=False)


@given(bad=st.integers(1, 9), every=st.integers(1, 5), loss=st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_late_look_still_names_the_first_bad_step(bad, every, loss):
    watch = FiniteWatch(["a", "b", "c"])
    found = None
    for step in range(1, 11):
        norms = torch.ones(3)
        if step >= bad:  # everything is bad after the first one
            norms[1 if step == bad else slice(None)] = NAN
        watch.record(step, torch.tensor(NAN if loss and step >= bad else 0.0), norms)
        if step % every == 0 and (found := watch.check()):
            break
    found = found or watch.check()
    assert (found.step, found.loss, found.parameters) == (bad, loss, ("b",))
    assert watch.check() is None


def test_a_late_look_in_a_run_names_the_first_bad_step(monkeypatch, tmp_path):
    """As on CUDA, where a look waits for the device: the weights are spoilt when it comes."""
    monkeypatch.setitem(loop.CHECK_EVERY, "cpu", 10)
    with pytest.raises(TrainingError) as caught:
        fit(trapped(2), make_data(), steps=50, evaluate_every=50, checkpoint=tmp_path, progress=False)
    assert "step 3: the loss is not finite" in str(caught.value)
    assert "the first is that of flow._transform._transforms.0.weight" in str(caught.value)
    assert not list(tmp_path.glob("step-*.pt"))
    with pytest.raises(TrainingError, match="step 3"):  # a checkpoint looks before it is written
        fit(
            trapped(2),
            make_data(),
            steps=9,
            checkpoint_every=5,
            evaluate_every=9,
            checkpoint=tmp_path,
            progress=False,
        )
    assert not list(tmp_path.glob("step-*.pt"))


class Waits(TorchDispatchMode):
    """Counts the operations that fetch a number from the device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "local_scalar_dense" in str(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [ebf.objectives.SSM, ebf.objectives.DSM, ebf.objectives.FDSSM])
def test_a_step_does_not_wait_for_the_device(monkeypatch, kind):
    monkeypatch.setitem(loop.CHECK_EVERY, "cpu", 10)
    waits, seen = Waits(), []
    tolist = torch.Tensor.tolist

    def counted(tensor):
        waits.count += 1
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)

    class Spy(kind):
        def forward(self, x, context=None):
            seen.append(waits.count)
            return super().forward(x, context)

    objective = Spy(make_model(), generator=rng(0))
    with waits:
        fit(
            objective, make_data(64), steps=18, batch_size=64, evaluate_every=18, clip_norm=1.0, conditioning=0.1,
            ema=True, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3), progress=False,
        )  # fmt: skip
    assert len(seen) == 18
    assert seen[1] == seen[9], "the first ten steps"
    assert seen[10] > seen[9], "the look"
    assert seen[10] == seen[17]


def with_spectrum(values, seed=0):
    generator = rng(seed)
    size = len(values)
    left, right = (torch.linalg.qr(torch.randn(size, size, generator=generator).double())[0] for _ in range(2))
    return left @ torch.tensor(values, dtype=torch.float64).diag() @ right.mT


def layer_of(weight, inverted=False):
    layer = FullLinear(weight.shape[0]).double()
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.fill_(7.0)
    transform = transforms.InverseTransform(layer) if inverted else layer
    model = ebf.wrap(flows.Flow(transform, distributions.StandardNormal([weight.shape[0]])))
    return full_layers(model.plan, (weight.shape[0],))[0], layer


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12))
@settings(max_examples=30, deadline=None)
def test_small_layers_are_measured_exactly(values):
    layer, _ = layer_of(with_spectrum(values))
    spectrum = estimate_spectrum(layer)
    assert spectrum.largest == pytest.approx(max(values), rel=1e-6)
    assert spectrum.smallest == pytest.approx(min(values), rel=1e-4)


def test_equal_singular_values_do_not_look_singular():
    layer, _ = layer_of(3.0 * torch.eye(50, dtype=torch.float64))
    assert estimate_spectrum(layer).condition == pytest.approx(1.0)


def test_one_small_singular_value_among_many_is_found():
    values = [1.0 + 0.5 * (place / 300) for place in range(299)] + [1e-4]
    layer, _ = layer_of(with_spectrum(values), inverted=True)
    assert estimate_spectrum(layer).smallest == pytest.approx(1e-4, rel=0.05)
    assert estimate_spectrum(layer).largest == pytest.approx(1.5, rel=0.01)


def test_estimates_are_on_the_safe_side():
    weight = torch.randn(200, 200, generator=rng(0)).double()
    exact = torch.linalg.svdvals(weight)
    spectrum = estimate_spectrum(layer_of(weight)[0])
    assert spectrum.smallest >= exact[-1] * (1 - 1e-9)
    assert spectrum.largest <= exact[0] * (1 + 1e-9)
    assert spectrum.largest == pytest.approx(exact[0].item(), rel=0.05)
    assert spectrum.condition > 20


def test_convolutions_are_measured_without_their_matrix():
    conv = FullConv2d(2, kernel_size=3, init="normal", generator=rng(0)).double()
    model = ebf.wrap(flows.Flow(conv, distributions.StandardNormal([2, 3, 4])))
    (layer,) = full_layers(model.plan, (2, 3, 4))
    matrix = torch.autograd.functional.jacobian(lambda x: conv.transform(x).flatten(), torch.zeros(1, 2, 3, 4).double())
    exact = torch.linalg.svdvals(matrix.reshape(24, 24))
    spectrum = estimate_spectrum(layer)
    assert spectrum.largest == pytest.approx(exact[0].item(), rel=1e-6)
    assert spectrum.smallest == pytest.approx(exact[-1].item(), rel=1e-6)


def test_a_nearly_singular_layer_is_reported_once():
    layer, _ = layer_of(with_spectrum([2.0, 1.0, 1e-6]))
    watch = ConditionWatch([layer], advice=loop.NEARLY_SINGULAR)
    with pytest.warns(
        ebf.ConditioningWarning, match=r"(?s)step 5: 1 of 1 full layers.*_transform  FullLinear.*1.0e-06.*conditioning"
    ):
        watch.check(5)
    assert watch.check(6)["_transform"].condition == pytest.approx(2e6, rel=1e-3)  # warnings are errors in these tests


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_the_penalty_counts_small_singular_values_and_its_gradient_is_right(kind):
    if kind == "linear":
        values = [1.0, 0.8, 0.9, 0.02, 0.003]
        layer, module = layer_of(with_spectrum(values))
    else:
        module = FullConv2d(1, kernel_size=3, init="normal", generator=rng(1)).double()
        model = ebf.wrap(flows.Flow(module, distributions.StandardNormal([1, 2, 3])))
        (layer,) = full_layers(model.plan, (1, 2, 3))
        with torch.no_grad():
            module.weight.mul_(0.3).add_(0.3)
            module.bias.fill_(7.0)

    def dense():
        eye = torch.eye(layer.product(torch.zeros(1, *layer.shape).double()).numel(), dtype=torch.float64)
        return torch.cat([layer.product(row.reshape(1, *layer.shape)).reshape(1, -1) for row in eye]).mT

    signs = torch.cartesian_prod(*[torch.tensor([0, 1])] * dense().shape[0])
    totals = []
    for row in signs[: len(signs) // 2]:  # every probe, up to its sign: the mean is exact
        module.zero_grad()
        totals.append((_penalty_with(layer, row), module.weight.grad.clone()))
        assert module.bias.grad is None or module.bias.grad.abs().max() < 1e-12
    matrix = dense()
    # δ is estimated with the probe too; compare with the same average of the exact expression
    expected = torch.zeros((), dtype=torch.float64)
    for row in signs[: len(signs) // 2]:
        v = (row.double() * 2 - 1)[:, None]
        delta = (SMALL**2 * (matrix @ v).square().mean()).detach()
        inner = torch.linalg.inv(matrix.mT @ matrix + delta * torch.eye(len(matrix), dtype=torch.float64))
        expected = expected + delta * (v.mT @ inner @ v).squeeze()
    expected = expected / len(totals)
    (gradient,) = torch.autograd.grad(expected, module.weight)
    value = sum(total for total, _ in totals) / len(totals)
    mean = sum(grad for _, grad in totals) / len(totals)
    assert value == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(mean, gradient, rtol=1e-5, atol=1e-8)


def _penalty_with(layer, row):
    class Fixed:
        @staticmethod
        def randint(*args, **options):
            return row.reshape(1, *layer.shape)

    original = torch.randint
    torch.randint = Fixed.randint
    try:
        value = conditioning_penalty([layer])
    finally:
        torch.randint = original
    value.backward()
    return value.item()


def test_the_penalty_leaves_healthy_layers_alone():
    layer, module = layer_of(with_spectrum([1.0, 2.0, 0.5]))
    conditioning_penalty([layer], rng(0)).backward()
    assert module.weight.grad.norm() < 0.01


def test_descending_the_penalty_lifts_the_small_singular_value():
    layer, module = layer_of(with_spectrum([1.0] * 30 + [0.001]))
    optimizer = torch.optim.SGD([module.weight], lr=1e-5)
    generator = rng(0)
    before = estimate_spectrum(layer).smallest
    for _ in range(20):
        optimizer.zero_grad()
        conditioning_penalty([layer], generator).backward()
        optimizer.step()
    after = torch.linalg.svdvals(module.weight.detach())
    assert before == pytest.approx(0.001, rel=1e-3)
    assert after[-1] > 0.01
    assert after[0] < 1.1


def drifting(conditioning):
    """SSM of data in a plane, which no density fits: the layer becomes singular, or is kept from it."""
    torch.manual_seed(0)
    flow = flows.Flow(
        transforms.CompositeTransform([FullLinear(4), SmoothLeakyReLU(0.3), FullLinear(4)]),
        distributions.StandardNormal([4]),
    )
    model = ebf.wrap(flow)
    x = torch.randn(200, 4) @ torch.diag(torch.tensor([1.0, 1.0, 1.0, 3e-3]))
    result = fit(
        ebf.objectives.DSM(model, sigma=0.05), x, steps=300, batch_size=50, conditioning=conditioning,
        optimizer=lambda p: torch.optim.Adam(p, lr=0.05), progress=False,
    )  # fmt: skip
    return max(c["condition"] for record in result.history for c in record["condition"].values())


def test_conditioning_is_part_of_the_training():
    free, held = drifting(0.0), drifting(100.0)
    assert held < 0.7 * free


def test_a_singular_layer_stops_an_evaluation_with_its_path(tmp_path):
    model = make_model(actnorm=False)
    with torch.no_grad():
        model.flow._transform._transforms[2].weight[0].zero_()
    frozen = model.flow._transform._transforms[2].requires_grad_(False)
    assert frozen is model.flow._transform._transforms[2]
    with pytest.raises(TrainingError) as caught:  # before any step is taken
        fit(
            ebf.objectives.DSM(model), make_data(), steps=3, validation=make_data(20), checkpoint=tmp_path,
            evaluate_every=3, progress=False,
        )  # fmt: skip
    assert isinstance(caught.value, EBFlowError)
    assert "step 0" in str(caught.value)
    assert "_transform._transforms.2  FullLinear" in str(caught.value)
    assert (tmp_path / "failed-00000000.pt").exists()
