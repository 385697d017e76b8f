"""Steps of spline layers: which modules we compute ourselves, and which are left to their own code."""

import pytest
import torch
from nflows import distributions, flows, transforms
from nflows.nn import nets
from nflows.transforms.base import InputOutsideDomain

import ebflow_plugin as ebf
from case import perturb
from cases import SUPPORTED
from ebflow_plugin.adapting import PackedSplineStep
from randomness import randn

SPLINES = [
    case for case in SUPPORTED if any(word in case.name for word in ("Spline", "Piecewise", "RQS", "NSF", "NCSF"))
]


def coupling(**options):
    torch.manual_seed(0)
    made = transforms.PiecewiseRationalQuadraticCouplingTransform(
        [-1, 1, -1], lambda i, o: nets.ResidualNet(i, o, 8), **({"tails": "linear", "tail_bound": 2.0} | options)
    )
    flow = flows.Flow(made, distributions.StandardNormal([3])).double().eval()
    perturb(flow)
    return flow


@pytest.mark.parametrize("case", SPLINES, ids=str)
def test_densities_are_the_librarys_inside_and_outside(case):
    flow = case.build()
    model = ebf.wrap(flow)
    for scale in (1.0, 4.0) if case.domain == "real" else (1.0,):
        x, context = scale * case.x(), case.context()
        tolerance = max(case.own_tol, 1e-9)
        expected = case.own(flow, x, context)
        torch.testing.assert_close(model.log_prob(x, context), expected, rtol=tolerance, atol=tolerance)


def test_our_arithmetic_makes_no_boolean_index():
    model = ebf.wrap(coupling(apply_unconditional_transform=True))
    names = set()

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.add(str(function))
            return function(*args, **kwargs or {})

    with Names():
        model.score(randn(5, 3))
    assert not names & {"aten.nonzero.default", "aten._local_scalar_dense.default", "aten.index.Tensor"}


def test_what_was_changed_keeps_its_own_code():
    x = 1.5 * randn(5, 3)
    for change in (
        lambda flow: setattr(flow._transform, "_piecewise_cdf", lambda x, p, inverse=False: (2 * x, x * 0 + 0.7)),
        lambda flow: flow._transform.unconditional_transform.register_forward_hook(
            lambda m, a, out: (out[0] + 1, out[1])
        ),
        lambda flow: setattr(flow._transform, "unconditional_transform", transforms.IdentityTransform()),
        lambda flow: setattr(flow._transform.unconditional_transform, "tail_bound", 1.0),
        lambda flow: setattr(flow._transform, "tail_bound", 1.0),
    ):
        flow = coupling(apply_unconditional_transform=True)
        model = ebf.wrap(flow)
        before = model.energy(x)
        change(flow)
        model.overrides.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.warn", lambda *args, **options: None)
            torch.testing.assert_close(model.log_prob(x), flow.log_prob(x))
        assert not torch.allclose(model.energy(x), before)


def test_points_outside_of_a_domain_raise_the_librarys_error():
    model = ebf.wrap(coupling(tails=None))
    assert isinstance(model.plan.steps[0], PackedSplineStep)
    with pytest.raises(InputOutsideDomain):
        model.energy(torch.full((2, 3), 1.5, dtype=torch.float64))
    assert model.energy(torch.rand(0, 3, dtype=torch.float64)).shape == (0,)
