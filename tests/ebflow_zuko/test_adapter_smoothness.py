"""What zuko's transforms do to the score, measured in one dimension by the identity that score matching rests on.

E_p[s' + s·s_p] = 0 for data with density p where the model's score s is continuous; autograd's s' misses its jumps.
"""

import pytest
import torch
from zuko import transforms as T
from zuko.flows import ElementWiseTransform
from zuko.flows.neural import MNN, UMNN
from zuko.lazy import Flow, UnconditionalTransform

import ebflow_plugin as ebf
from case import perturb
from stein import stein_defect
from zuko_parts import normal


def univariate(maker, *shapes):
    return lambda: ElementWiseTransform(1, univariate=maker() if maker is UMNN else maker, shapes=shapes)


SMOOTH = {
    "Bernstein": univariate(T.BernsteinTransform, (6,)),
    "bounded Bernstein": univariate(T.BoundedBernsteinTransform, (6,)),
    "Gaussianization": univariate(T.GaussianizationTransform, (3,), (3,)),
    "sum of squares": univariate(T.SOSPolynomialTransform, (2, 3)),
    "UMNN": univariate(UMNN, (16,), ()),
}
KINKED = {
    "spline": univariate(T.MonotonicRQSTransform, (8,), (8,), (7,)),
    "MNN": lambda: ElementWiseTransform(1, univariate=MNN(4, hidden_features=(8,)), shapes=[(4,)]),
    "Softclip": lambda: UnconditionalTransform(T.SoftclipTransform, bound=1.0),
}


def smoothness_and_defect(make):
    torch.manual_seed(0)
    shift = UnconditionalTransform(T.AdditiveTransform, torch.full((1,), 0.4))
    flow = Flow([make(), shift], normal(1)).double().eval()
    perturb(flow, 0.05)
    model = ebf.wrap(flow, strict=True)
    x = torch.randn(20_000, 1, dtype=torch.float64)
    return {row.smoothness for row in model.report}, *stein_defect(model, x, -x)


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth(name):
    said, mean, error = smoothness_and_defect(SMOOTH[name])
    assert said == {"smooth"}
    assert abs(mean) < 5 * error + 1e-6


@pytest.mark.parametrize("name", KINKED)
def test_jumps(name):
    said, mean, error = smoothness_and_defect(KINKED[name])
    assert said == {"score jumps", "smooth"}
    assert abs(mean) > 10 * error
