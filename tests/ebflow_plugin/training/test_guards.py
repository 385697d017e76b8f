"""What stops a run, and what it says: values that are not finite, layers that are singular."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import ebflow_plugin as ebf
from ebflow_plugin.errors import EBFlowError, TrainingError
from ebflow_plugin.training import fit, guards
from ebflow_plugin.training.guards import FiniteWatch
from randomness import rng
from training_models import make_data, make_model, weights

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
def test_a_loss_that_is_not_finite_names_the_step_and_the_layer(place):
    objective = trapped(5, place=place)
    with pytest.raises(TrainingError) as caught:
        fit(objective, make_data(), steps=10, evaluate_every=100, progress=False)
    text = str(caught.value)
    assert "step 6: the loss is not finite" in text
    assert f"is the output of _transform._transforms.{2 * place}  FullLinear" in text
    assert "gradients are not finite, the first is that of flow._transform._transforms.0.weight" in text
    for advice in ("learning rate", "clip gradients", "a little likelihood"):
        assert advice in text
    finite = (torch.isfinite(value).all() for value in weights(objective.model).values())
    assert all(finite), "the weights are those before the bad step"


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


def test_a_late_look_in_a_run_names_the_first_bad_step(monkeypatch):
    """As on CUDA, where a look waits for the device: the weights are spoilt when it comes."""
    monkeypatch.setitem(guards.CHECK_EVERY, "cpu", 10)
    with pytest.raises(TrainingError) as caught:
        fit(trapped(2), make_data(), steps=50, evaluate_every=50, progress=False)
    assert "step 3: the loss is not finite" in str(caught.value)
    assert "the first is that of flow._transform._transforms.0.weight" in str(caught.value)


class Waits(TorchDispatchMode):
    """Counts the operations that fetch a number from the device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "local_scalar_dense" in str(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [ebf.objectives.SSM, ebf.objectives.DSM, ebf.objectives.FDSSM])
def test_a_step_does_not_wait_for_the_device(monkeypatch, kind):
    monkeypatch.setitem(guards.CHECK_EVERY, "cpu", 10)
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
            objective, make_data(64), steps=18, batch_size=64, evaluate_every=18, clip_norm=1.0,
            optimizer=lambda p: torch.optim.SGD(p, lr=1e-3), progress=False,
        )  # fmt: skip
    assert len(seen) == 18
    assert seen[1] == seen[9], "the first ten steps"
    assert seen[10] > seen[9], "the look"
    assert seen[10] == seen[17]


def test_a_singular_layer_stops_an_evaluation_with_its_path():
    model = make_model(actnorm=False)
    with torch.no_grad():
        model.flow._transform._transforms[2].weight[0].zero_()
    model.flow._transform._transforms[2].requires_grad_(False)
    with pytest.raises(TrainingError) as caught:  # before any step is taken
        fit(ebf.objectives.DSM(model), make_data(), steps=3, validation=make_data(20), progress=False)
    assert isinstance(caught.value, EBFlowError)
    assert "step 0" in str(caught.value)
    assert "_transform._transforms.2  FullLinear" in str(caught.value)
