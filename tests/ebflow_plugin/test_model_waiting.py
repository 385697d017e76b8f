"""Nothing in energy() or an objective waits for the device: no number is read back, no branch asks for values."""

import warnings

import pytest
import torch
from nflows import distributions, flows, transforms
from torch.utils._python_dispatch import TorchDispatchMode

import ebflow_plugin as ebf
from cases import SUPPORTED, first_of_each_class
from ebflow_nflows import FullLinear
from ebflow_plugin.objectives import DSM, FDSSM, SSM
from ebflow_plugin.plan.smoothness import Smoothness
from exemptions import asking

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique2", "_unique2")


class WaitingError(Exception):
    """An operation of which CUDA waits for the result."""


class NoWaiting(TorchDispatchMode):
    """Fails on operations whose result the host needs."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in READS or masks:
            raise WaitingError(name)
        return function(*args, **(kwargs or {}))


def waits(model, x, context):
    false = any(part.smoothness == Smoothness.WRONG for part in model.plan.parts())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about jumps of the score
        calls = [model.energy, FDSSM(model, eps=1e-3)]  # which stays in the domain of a spline
        calls += [] if false else [SSM(model), DSM(model, sigma=1e-3)]
        for call in calls:
            call(x, context)  # ActNorms start
    for call in calls:
        with NoWaiting():
            value = call(x, context).sum()
            if value.requires_grad:
                value.backward()


@pytest.mark.parametrize("case", first_of_each_class(SUPPORTED), ids=str)
def test_no_case_waits(case):
    model = ebf.wrap(case.build())
    exempt = asking(model)
    try:
        waits(model, case.x(3), case.context(3))
    except WaitingError as error:
        if not exempt:
            raise
        pytest.skip(f"{', '.join(sorted(exempt))} of the library: {error}")


@pytest.mark.parametrize("turned", [False, True])
def test_no_matrix_waits_in_the_density_direction(turned):
    naive = transforms.NaiveLinear(3, orthogonal_initialization=False)
    for layer in (FullLinear(3), naive, transforms.QRLinear(3, 2), transforms.SVDLinear(3, 2)):
        layer = transforms.InverseTransform(layer) if turned else layer
        model = ebf.wrap(flows.Flow(layer, distributions.StandardNormal([3])))
        waits(model, torch.randn(4, 3), None)
        with torch.no_grad(), NoWaiting():
            model.energy(torch.randn(4, 3))


def test_the_mode_sees_what_waits():
    x = torch.ones(3)
    for wait in (lambda: x.sum().item(), lambda: bool(x.any()), lambda: x[x > 0], lambda: torch.equal(x, x + 0)):
        with pytest.raises(WaitingError), NoWaiting():
            wait()
