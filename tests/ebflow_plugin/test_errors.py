"""Every warning has a class of its own kind, so that it can be filtered without reading its text."""

import ast
import warnings
from pathlib import Path

import pytest
import torch
from nflows import distributions, flows, transforms
from torch import nn

import ebflow_plugin as ebf
from ebflow_nflows import FullLinear
from ebflow_plugin.log_z.estimate import log_mean_exp
from ebflow_plugin.objectives import ML, SSM
from nflows_small import Doubled, Level
from randomness import rng

ROOT = Path(ebf.__file__).parent


def wrapped(transform, base=distributions.StandardNormal):
    return ebf.wrap(flows.Flow(transform, base([2])))


def unknown_step():
    wrapped(Doubled())


def biased():
    SSM(wrapped(transforms.PiecewiseRationalQuadraticCDF([2], tails="linear")))(torch.zeros(2, 2))


def unseen():
    ebf.verify(wrapped(transforms.LULinear(2), Level), torch.randn(4, 2))


def outside():
    flow = flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2]))
    ebf.wrap(nn.ModuleDict({"net": flow, "head": nn.Linear(2, 2)}))


def ill_conditioned():
    layer = FullLinear(40, init="normal", generator=rng(0))
    with torch.no_grad():
        layer.weight.copy_(torch.diag(torch.logspace(0, -8, 40)) @ layer.weight)
    model = ebf.wrap(flows.Flow(layer, distributions.StandardNormal([40])).double())
    ML(model, log_det="stochastic", probes=2, iterations=2)(torch.zeros(2, 40).double())


def unreliable():
    log_mean_exp(torch.tensor([0.0] * 99 + [90.0]), None)


KINDS = {
    unknown_step: ebf.UnknownStepWarning,
    biased: ebf.BiasWarning,
    unseen: ebf.UnseenParameterWarning,
    outside: ebf.UnseenParameterWarning,
    ill_conditioned: ebf.ConditioningWarning,
    unreliable: ebf.EstimateWarning,
}


@pytest.mark.parametrize("act", KINDS, ids=lambda act: act.__name__)
def test_warnings_are_filtered_by_class(act):
    kind = KINDS[act]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", kind)
        act()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ebf.EBFlowWarning)
        act()
    assert [each.category for each in caught] == [kind]
    assert [each.filename for each in caught] == [__file__], "a warning points at the line of the user"


def test_the_classes_are_distinct_and_are_user_warnings():
    kinds = {getattr(ebf, name) for name in ebf.__all__ if name.endswith("Warning")}
    assert {ebf.EBFlowWarning, ebf.AdapterWarning, ebf.ResumeWarning, *KINDS.values()} <= kinds
    for kind in kinds - {ebf.EBFlowWarning}:
        assert kind.__bases__ == (ebf.EBFlowWarning,)
    assert issubclass(ebf.EBFlowWarning, UserWarning)


def test_no_warning_of_the_core_is_without_a_class():
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name in ("warn", "warnings.warn") and file.name != "errors.py":
                kind = getattr(ebf, ast.unparse(node.args[1]) if len(node.args) > 1 else "", None)
                assert isinstance(kind, type), (file, node.lineno)
                assert issubclass(kind, ebf.EBFlowWarning), (file, node.lineno)
