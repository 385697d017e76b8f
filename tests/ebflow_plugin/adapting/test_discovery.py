"""Finding flows, walking them, and registering new classes."""

from functools import partial

import pytest
import torch
from nflows import distributions, flows, transforms
from torch import nn

import ebflow_plugin as ebf
from ebflow_plugin.adapting import adapter, discovery, rules
from ebflow_plugin.adapting.rules import Child
from nflows_small import flow_of
from randomness import randn
from warned import no_warnings

D = 4
make_flow = partial(flow_of, shape=(D,), mode="eval")


class Shift(transforms.Transform):
    """Affine in x."""

    def forward(self, inputs, context=None):
        return 2.0 * inputs + 1.0, inputs.new_full((len(inputs),), D * 0.6931471805599453)

    def inverse(self, inputs, context=None):
        return (inputs - 1.0) / 2.0, inputs.new_full((len(inputs),), -D * 0.6931471805599453)


class Warp(transforms.LULinear):
    """Overrides what LULinear does."""

    def forward_no_cache(self, inputs):
        outputs, logabsdet = super().forward_no_cache(inputs)
        return outputs.sinh(), logabsdet + outputs.cosh().log().sum(-1)

    def inverse_no_cache(self, inputs):
        outputs, logabsdet = super().inverse_no_cache(inputs.asinh())
        return outputs, logabsdet - inputs.asinh().cosh().log().sum(-1)


class Renamed(transforms.LULinear):
    """The same map under another name."""

    def __init__(self, features):
        super().__init__(features)
        self.note = "mine"


class Pair(transforms.Transform):
    """A container that nobody knows."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, inputs, context=None):
        outputs, one = self.first(inputs, context)
        outputs, two = self.second(outputs, context)
        return outputs, one + two

    def inverse(self, inputs, context=None):
        outputs, one = self.second.inverse(inputs, context)
        outputs, two = self.first.inverse(outputs, context)
        return outputs, one + two


@pytest.fixture
def taught():
    """Forgets what a test taught."""
    yield
    for cls in (Shift, Warp, Pair):
        rules.REGISTERED.pop(cls, None)


@pytest.fixture
def x():
    return randn(5, D)


def check(flow, model, x):
    assert torch.allclose(model.log_prob(x), flow.log_prob(x), rtol=1e-10)
    latents, _ = model.plan.encode(x)
    assert torch.allclose(model.plan.decode(latents), x)


def test_unknown_is_nonlinear_with_one_warning_and_an_error_if_strict(x):
    flow = make_flow(Shift(), transforms.LULinear(D), Warp(D))
    with pytest.warns(UserWarning, match="2 of 3 steps") as caught:
        model = ebf.wrap(flow)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "_transform._transforms.0  Shift" in message
    assert "overrides forward_no_cache of LULinear" in message
    assert "register_linear" in message
    assert [row.linearity for row in model.report] == ["nonlinear", "linear", "nonlinear"]
    assert [row.known for row in model.report] == [False, True, False]
    check(flow, model, x)
    with pytest.raises(ebf.UnsupportedStepError, match=r"(?s)2 of 3 steps.*_transforms.0  Shift.*_transforms.2  Warp"):
        ebf.wrap(flow, strict=True)


def test_describe_never_raises_on_unknown_or_refused_classes():
    flow = make_flow(Shift(), transforms.BatchNorm(D)).train()
    with no_warnings():
        report = ebf.describe(flow)
    assert [row.linearity for row in report] == ["nonlinear", "refused"]
    assert "1 refused" in report.summary
    assert "1 of unknown class" in report.summary


def test_a_subclass_that_changes_nothing_is_known(x):
    flow = make_flow(Renamed(D))
    model = ebf.wrap(flow, strict=True)
    assert model.report.rows[0].linearity == "linear"
    check(flow, model, x)


@pytest.mark.usefixtures("taught")
def test_register_linear_with_the_modules_own_methods(x):
    ebf.register_linear(Shift)
    flow = make_flow(Shift(), transforms.InverseTransform(Shift()))
    model = ebf.wrap(flow, strict=True)
    assert {row.linearity for row in model.report} == {"linear"}
    assert model.log_z().abs() < 1e-12
    check(flow, model, x)


@pytest.mark.usefixtures("taught")
def test_register_linear_with_functions(x, monkeypatch):
    ebf.register_linear(
        Shift,
        apply=lambda module, x: 2.0 * x + 1.0,
        invert=lambda module, y: (y - 1.0) / 2.0,
        log_det=lambda module, shape: torch.Size(shape).numel() * torch.tensor(2.0, dtype=torch.float64).log(),
        cost="O(1)",
    )
    flow = make_flow(Shift())
    model = ebf.wrap(flow, strict=True)
    assert model.report.rows[0].log_det_cost == "O(1)"
    monkeypatch.setattr(Shift, "forward", None)  # the functions are used, not the module's own
    assert torch.isfinite(model.energy(x)).all()


@pytest.mark.usefixtures("taught")
def test_register_nonlinear_and_duplicates():
    ebf.register_nonlinear(Warp, smoothness="smooth")
    row = ebf.wrap(make_flow(Warp(D)), strict=True).report.rows[0]
    assert (row.linearity, row.smoothness, row.known) == ("nonlinear", "smooth", True)
    with pytest.raises(ebf.EBFlowError, match="force=True"):
        ebf.register_nonlinear(Warp)
    with pytest.raises(ebf.UnknownNameError, match="Did you mean 'smooth'"):
        ebf.register_nonlinear(Warp, smoothness="smoth", force=True)


@pytest.mark.usefixtures("taught")
def test_register_container_walks_into_it(x):
    flow = make_flow(transforms.InverseTransform(Pair(transforms.LULinear(D), transforms.Tanh())))
    ebf.register_container(Pair, lambda pair: [("first", pair.first), ("second", pair.second)])
    model = ebf.wrap(flow, strict=True)
    path = "_transform._transforms.0._transform"
    assert [row.path for row in model.report] == [f"{path}.second", f"{path}.first"]
    x = 0.5 * torch.tanh(x)
    check(flow, model, x)


@pytest.mark.usefixtures("taught")
def test_a_container_can_say_that_a_member_runs_backwards(x):
    flow = make_flow(Pair(transforms.LULinear(D), transforms.InverseTransform(transforms.LULinear(D))))
    ebf.register_container(
        Pair,
        lambda pair: [
            Child("first", pair.first),
            Child("second._transform", pair.second._transform, inverted=True),
        ],
    )
    check(flow, ebf.wrap(flow, strict=True), x)


def test_overrides(x):
    flow = make_flow(Shift(), transforms.LULinear(D))
    model = ebf.wrap(
        flow, strict=True, overrides={"_transform._transforms.0": "linear", "_transform._transforms.1": "nonlinear"}
    )
    assert [row.linearity for row in model.report] == ["linear", "nonlinear"]
    check(flow, model, x)


def test_a_whole_container_can_be_overridden(x):
    flow = make_flow(transforms.LULinear(D), transforms.LULinear(D))
    model = ebf.wrap(flow, overrides={"_transform": "nonlinear"})
    assert len(model.report) == 1
    check(flow, model, x)


def test_bad_overrides():
    flow = make_flow(Shift())
    with pytest.raises(ebf.UnknownNameError, match=r"no module '_transform\._transforms\.7'.*Did you mean"):
        ebf.wrap(flow, overrides={"_transform._transforms.7": "linear"})
    with pytest.raises(ebf.UnknownNameError, match="Valid names: linear, nonlinear"):
        ebf.wrap(flow, overrides={"_transform._transforms.0": "affine"})


class Estimator(nn.Module):
    """The shape of sbi's density estimators."""

    def __init__(self, net):
        super().__init__()
        self.net = net


class FlowModel:
    """The shape of nessai's FlowModel: no module itself."""

    def __init__(self, model):
        self.model = model
        self.name = "flow"


def test_a_flow_inside_of_something_is_found(x):
    flow = make_flow(transforms.LULinear(D))
    for held, place in (
        (Estimator(flow), "net"),
        (FlowModel(flow), "model"),
        (FlowModel(Estimator(flow)), "model.net"),
    ):
        model = ebf.wrap(held)
        assert model.flow is flow
        assert model.report.inside == place
        assert f"(found at .{place})" in str(model.report)
    check(flow, model, x)


@pytest.mark.parametrize(
    "thing",
    [nn.Linear(2, 2), Estimator(nn.Linear(2, 2)), "flow", None, 3, transforms.LULinear(2), FlowModel(None), torch],
)
def test_what_is_no_flow_is_refused_with_what_can_be_wrapped(thing):
    with pytest.raises(ebf.NotAFlowError, match=r"(?s)is no flow and holds none.*nflows: Flow objects"):
        ebf.wrap(thing)


def test_a_library_that_is_missing_is_named_with_how_to_install_it(monkeypatch):
    there = {"nflows": False, "glasflow": False, "enflows": False, "flowcon": False, "nessai": False}
    monkeypatch.setattr(adapter, "find_spec", lambda name: object() if there.get(name, True) else None)
    with pytest.raises(ebf.NotAFlowError, match=r"nflows is not installed: pip install nflows\)") as error:
        ebf.wrap(nn.Linear(2, 2))
    assert "normflows is not installed" not in str(error.value)
    there["glasflow"] = True  # a fork of nflows is as good
    with pytest.raises(ebf.NotAFlowError) as error:
        ebf.wrap(nn.Linear(2, 2))
    assert "not installed" not in str(error.value)


def test_several_flows_are_listed():
    both = nn.ModuleDict({"a": make_flow(Renamed(D)), "b": make_flow(Renamed(D))})
    with pytest.raises(ebf.NotAFlowError, match=r"(?s)holds 2 flows.*\n  a  Flow\n  b  Flow"):
        ebf.wrap(both)


def test_a_flow_held_twice_is_one_flow():
    flow = make_flow(Renamed(D))
    held = FlowModel(flow)
    held.again = flow
    assert ebf.wrap(held).flow is flow


def test_a_broken_adapter_is_reported_and_left_out(monkeypatch):
    class Point:
        name, value = "broken", "nowhere:ADAPTER"

        def load(self):
            raise ImportError("no such thing")

    points = discovery.entry_points
    monkeypatch.setattr(discovery, "entry_points", lambda group: (Point(), *points(group=group)))
    discovery.adapters.cache_clear()
    try:
        with pytest.warns(ebf.AdapterWarning, match="adapter 'broken' .*cannot be loaded: no such thing"):
            assert len(discovery.adapters()) == 3
        monkeypatch.setattr(discovery, "entry_points", lambda group: ())
        discovery.adapters.cache_clear()
        with pytest.raises(ebf.AdapterError, match="no adapter is installed"):
            discovery.adapters()
    finally:
        discovery.adapters.cache_clear()


def test_a_flow_with_a_density_of_its_own_is_refused():
    class Mine(flows.Flow):
        def _log_prob(self, inputs, context):
            return super()._log_prob(inputs, context) - 1.0

    with pytest.raises(ebf.UnsupportedStepError, match="Mine overrides _log_prob"):
        ebf.wrap(Mine(transforms.LULinear(D), distributions.StandardNormal([D])))


def test_a_flow_without_parts_is_refused():
    for parts, lacking in (
        ((None, distributions.StandardNormal([2])), "transform"),
        ((transforms.LULinear(2), None), "base"),
    ):
        with pytest.raises(ebf.UnsupportedStepError, match=f"no {lacking}"):
            ebf.wrap(flows.Flow(*parts))
