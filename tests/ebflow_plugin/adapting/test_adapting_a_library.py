"""The worked example of docs/adding_a_library.md: a library that nobody knows, an adapter for it, and the contract."""

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import nn

import ebflow_plugin as ebf
import toy_library
from ebflow_plugin import testing
from ebflow_plugin.adapting import discovery
from randomness import rng

ROOT = Path(__file__).parents[3]
D = 4


@pytest.fixture
def installed(monkeypatch):
    """What the entry point in a pyproject.toml does."""
    point = EntryPoint("toy", "toy_adapter:ADAPTER", "ebflow_plugin.adapters")
    points = discovery.entry_points
    monkeypatch.setattr(discovery, "entry_points", lambda group: (*points(group=group), point))
    discovery.adapters.cache_clear()
    yield
    discovery.adapters.cache_clear()


def make_flow(*middle):
    torch.manual_seed(0)
    layers = [toy_library.Mix(D), *middle, toy_library.Mix(D)]
    return toy_library.Flow(layers, toy_library.Normal(D)).double()


def make_data():
    return torch.randn(5, D, dtype=torch.float64, generator=rng(1))


def test_without_its_adapter_nobody_knows_it():
    with pytest.raises(ebf.NotAFlowError, match="no flow"):
        ebf.wrap(make_flow())


@pytest.mark.usefixtures("installed")
def test_the_contract_holds():
    testing.check_flow(make_flow(toy_library.Sinh()), make_data())


@pytest.mark.usefixtures("installed")
def test_the_report_and_training():
    model = ebf.wrap(make_flow(toy_library.Sinh()))
    assert [row.linearity for row in model.report.rows] == ["linear", "nonlinear", "linear"]
    assert "energy() skips 2 determinants of 4 × 4" in str(model.report)
    ebf.objectives.SSM(model)(make_data()).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    assert model.sample(3).shape == (3, D)


class Cubed(nn.Module):
    """A layer of a user, which the adapter has no rule for."""

    def forward(self, x):
        return x + x**3, (1.0 + 3.0 * x**2).log().sum(-1)


@pytest.mark.usefixtures("installed")
def test_an_unknown_layer_keeps_its_own_log_det():
    flow = make_flow(Cubed())
    with pytest.warns(UserWarning, match=r"layers\.1  Cubed"):
        model = ebf.wrap(flow)
    assert torch.allclose(model.log_prob(make_data()), flow.log_prob(make_data()))


@pytest.mark.parametrize("name", ["toy_library.py", "toy_adapter.py"])
def test_the_page_quotes_the_files(name):
    text = (ROOT / "docs" / "adding_a_library.md").read_text(encoding="utf-8")
    quoted = re.search(rf"<!-- tests/support/{name} -->\n```python\n(.*?)```\n", text, re.DOTALL).group(1)
    assert quoted == (ROOT / "tests" / "support" / name).read_text(encoding="utf-8")
