"""The data of a start and of a calibration: on which device they are, and in which mode of autograd they are read."""

import normflows
import pytest
import torch
from nflows import transforms

import ebflow_nflows
import ebflow_normflows
import ebflow_plugin as ebf
import ebflow_zuko
from chains import flow_in
from ebflow_plugin.closed_form.moments import Moments, batches
from gaussian_models import nll
from randomness import rng

D = 3


def skewed(n=300):
    return torch.randn(n, D, dtype=torch.float64, generator=rng()).exp() + 1.0


def model_in(library, before=(), between=(), after=()):
    layers = [*before, library.FullLinear(D), library.SinhArcsinh(D), *between, library.FullLinear(D), *after]
    return ebf.wrap(flow_in(library, layers, [D]))


def nflows_model(context=None):
    conditional = transforms.MaskedAffineAutoregressiveTransform(D, 8, context_features=2)
    return model_in(ebflow_nflows, [transforms.ActNorm(D)], after=[] if context is None else [conditional])


MAKES = {
    "nflows": nflows_model,
    "normflows": lambda: model_in(ebflow_normflows, between=[normflows.flows.ActNorm((D,))]),
    "zuko": lambda: model_in(ebflow_zuko),
}
CALLS = {
    "initialize": lambda model, data: model.initialize(*(data if isinstance(data, tuple) else (data,))),
    "whiten": lambda model, data: model.initialize(data, whiten=True),
    "gaussianize": lambda model, data: model.initialize(data, gaussianize=True),
    "calibrate": lambda model, data: model.calibrate(data),
    "diagonal": lambda model, data: model.calibrate(data, "diagonal"),
}


def test_a_flow_without_storage_takes_batches_of_the_cpu():
    x, *_ = next(batches([torch.zeros(2, D)], lambda x, _: (x, None), torch.device("meta")))
    assert x.is_meta
    nflows_model().to("meta").initialize(skewed(5))


# Modes


@pytest.mark.parametrize("made", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_each_call_works_in_each_mode(make, call, mode, made):
    x = skewed()
    expected = make()
    CALLS[call](expected, x)
    with made():
        model = make()
    with mode():
        CALLS[call](model, x.clone())
    assert nll(model, x) == pytest.approx(nll(expected, x), abs=1e-9)
    if made is torch.enable_grad:  # and what it wrote can be trained
        ebf.objectives.ML(model)(x).backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("first", [True, False])
def test_processes_without_rows_have_nothing_to_merge(first, monkeypatch):
    rows = skewed(20)
    one, other = Moments(), Moments()
    one.add(rows)

    def gather(every, mine):
        every[:] = [(0, 0, other.mean, other.scatter), mine][:: 1 if first else -1]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    one.reduce()
    assert one.count == 20
    torch.testing.assert_close(one.covariance(), torch.cov(rows.T))
