"""Each check of ebflow_plugin.testing can fail."""

from functools import partial

import pytest
import torch
from nflows import transforms
from torch import nn

import ebflow_plugin as ebf
import nflows_small
from ebflow_nflows.steps import NflowsStep, UnknownStep
from ebflow_plugin import testing
from randomness import randn

D = 3
flow_of = partial(nflows_small.flow_of, shape=(D,), mode="eval")


@pytest.fixture
def x():
    return randn(4, D)


pytestmark = pytest.mark.filterwarnings("ignore:1 of")


class Bad(transforms.Transform):
    """A transform with one fault at a time."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.weight = nn.Parameter(torch.eye(D))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs, context=None):
        if self.fault == "determinant":
            return inputs @ self.weight, torch.linalg.slogdet(self.weight)[1].expand(len(inputs))
        if self.fault == "writes x":
            inputs += 1.0
        if self.fault == "counts":
            self.calls += 1.0
        if self.fault == "device":
            return inputs + torch.zeros(D), inputs.new_zeros(len(inputs))
        if self.fault == "random":
            return inputs + torch.randn_like(inputs), inputs.new_zeros(len(inputs))
        return inputs, inputs.new_zeros(len(inputs))

    def inverse(self, inputs, context=None):
        shift = 0.1 if self.fault == "inverse" else 0.0
        return inputs + shift, inputs.new_zeros(len(inputs))


@pytest.mark.parametrize(
    ("check", "fault", "message"),
    [
        (testing.check_no_determinant, "determinant", "_linalg_slogdet was called"),
        (testing.check_untouched, "counts", "calls changed"),
        (testing.check_inverse, "inverse", r"decode\(encode\(x\)\) is x"),
        (testing.check_invariant, "random", "log_prob equals the flow's own: largest"),
        (testing.check_copies, "random", "another log_prob"),
    ],
)
def test_a_fault_is_found(check, fault, message, x):
    flow = flow_of(transforms.LULinear(D), Bad(fault))
    with pytest.raises((AssertionError, RuntimeError), match=message):
        check(flow, x)
    check(flow_of(transforms.LULinear(D), Bad("none")), x)


def test_writing_into_x_is_found_where_no_copy_is_given(x, monkeypatch):
    testing.check_untouched(flow_of(Bad("writes x")), x)  # an unknown class gets a copy
    monkeypatch.setattr(UnknownStep, "call_forward", NflowsStep.call_forward)
    with pytest.raises((AssertionError, RuntimeError), match="x was written into|leaf"):
        testing.check_untouched(flow_of(Bad("writes x")), x)


def test_mixed_devices_are_found(x):
    with pytest.raises((AssertionError, RuntimeError), match="mixes meta with cpu|same device|meta"):
        testing.check_devices(flow_of(Bad("device")), x)
    testing.check_devices(flow_of(Bad("none")), x)


def test_scalars_of_the_cpu_may_join():
    with testing.one_device(torch.device("meta")):
        torch.ones(2, device="meta") * torch.tensor(2.0)
        torch.zeros(2) + torch.ones(2)  # nothing of the watched device in it
    with (
        pytest.raises(AssertionError, match=r"mixes meta with cpu \(shape \(2,\)\)"),
        testing.one_device(torch.device("meta")),
    ):
        torch.ones(2, device="meta") * torch.ones(2)


@pytest.mark.parametrize(
    "routine",
    [
        torch.linalg.slogdet,
        torch.slogdet,
        torch.logdet,
        torch.det,
        torch.linalg.det,
        torch.inverse,
        torch.linalg.inv,
        torch.linalg.lu_factor,
        torch.linalg.lu,
        torch.linalg.qr,
        torch.linalg.svd,
        torch.linalg.eigh,
        torch.linalg.cholesky,
        torch.linalg.pinv,
        torch.matrix_exp,
        lambda a: torch.linalg.solve(a, a),
        lambda a: torch.linalg.lstsq(a, a),
    ],
)
def test_no_factorisation_watches_every_routine(routine):
    matrix = torch.eye(3, dtype=torch.float64)
    routine(matrix)
    with testing.no_factorisation(), pytest.raises(AssertionError, match="was called"):
        routine(matrix)


def test_no_factorisation_lets_products_and_triangular_solves_pass():
    matrix = torch.eye(3)
    with testing.no_factorisation():
        torch.relu(matrix @ matrix)
        torch.linalg.solve_triangular(matrix, matrix, upper=True)


def test_check_flow_runs_all_of_it(x):
    testing.check_flow(flow_of(transforms.LULinear(D), transforms.Tanh()), x)
    with pytest.raises(AssertionError):
        testing.check_flow(flow_of(transforms.LULinear(D), Bad("inverse")), x)


def test_linear_steps_are_not_asked_for_their_log_det(x, monkeypatch):
    model = ebf.wrap(flow_of(transforms.LULinear(D)))
    step = type(model.plan.steps[0])
    encode = step.encode
    monkeypatch.setattr(step, "encode", lambda self, x, c: (self.log_abs_det((D,)), encode(self, x, c))[1])
    with pytest.raises(AssertionError, match="computes the log-det of linear step _transform._transforms.0"):
        testing.check_no_determinant(model.flow, x)
