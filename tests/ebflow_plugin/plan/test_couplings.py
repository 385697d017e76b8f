"""What couplings are made of: halves and log-scales; and that those of the census are in closed form."""

import normflows as nf
import pytest
import torch
import zuko
from hypothesis import given, settings
from hypothesis import strategies as st
from nflows import distributions, flows, transforms
from nflows.nn import nets
from torch import nn
from torch.nn import functional as F

import ebflow_plugin as ebf
from cases import SUPPORTED
from ebflow_plugin.adapting import FollowedStep
from ebflow_plugin.errors import InputError
from ebflow_plugin.objectives import SSM
from ebflow_plugin.plan import couplings
from ebflow_plugin.plan.derivatives import derivatives

SCALES = {
    "exponential": couplings.exponential_scale,
    "sigmoid": couplings.sigmoid_scale,
    "sigmoid with a floor": lambda u: couplings.sigmoid_scale(u, 1e-3),
    "one over sigmoid": couplings.negative_scale(couplings.sigmoid_scale),
    "soft-clipped": lambda u: couplings.soft_clipped_scale(u, 1.7),
}
OPAQUE = (  # cases whose network, or whose map of single features, is not followed
    *("use_batch_norm", "batch_norm_within_layers", "unconditional_transform", "net_actnorm", "normalize"),
    *("CouplingTransform: img", "CompositeTransform: img", "Logit + Glow step", "nested steps"),
    *("RQS", "SOSPolynomial"),
)


@pytest.mark.parametrize("name", SCALES)
def test_slopes_and_bends_of_log_scales(name):
    u = torch.linspace(-4, 4, 41, dtype=torch.float64, requires_grad=True)
    scale = SCALES[name](u)
    for one, two in ((scale.value, scale.slope), (scale.slope, scale.bend)):
        two = torch.as_tensor(two, dtype=torch.float64).expand_as(u)
        if isinstance(one, torch.Tensor) and one.requires_grad:
            (expected,) = torch.autograd.grad(one.sum(), u, retain_graph=True)
        else:
            expected = torch.zeros_like(u)
        torch.testing.assert_close(two, expected, rtol=1e-12, atol=1e-13)


def test_the_scales_are_those_of_the_libraries():
    u = torch.linspace(-4, 4, 41, dtype=torch.float64)
    sigmoid = torch.sigmoid(u + 2)
    torch.testing.assert_close(SCALES["sigmoid"](u).value, sigmoid.log())
    torch.testing.assert_close(SCALES["sigmoid with a floor"](u).value, (sigmoid + 1e-3).log())
    torch.testing.assert_close(SCALES["one over sigmoid"](u).value, -sigmoid.log())
    torch.testing.assert_close(SCALES["soft-clipped"](u).value, u / (1 + abs(u / 1.7)))


@given(count=st.integers(1, 5), more=st.lists(st.integers(1, 3), max_size=2))
@settings(max_examples=20, deadline=None)
def test_interleaved_shifts_and_scales(count, more):
    h = torch.randn(3, 2 * count, *more)
    shift, scale = couplings.INTERLEAVED.apart(h)
    assert torch.equal(shift, h[:, 0::2])
    assert torch.equal(scale, h[:, 1::2])
    assert torch.equal(couplings.INTERLEAVED.together(shift, scale), h)
    h = h.movedim(1, -1)
    shift, scale = couplings.INTERLEAVED_LAST.apart(h)
    assert torch.equal(shift, h[..., 0::2])
    assert torch.equal(scale, h[..., 1::2])
    assert torch.equal(couplings.INTERLEAVED_LAST.together(shift, scale), h)


def test_an_odd_number_of_shifts_and_scales():
    h = torch.randn(2, 5)
    for layout in (couplings.INTERLEAVED, couplings.INTERLEAVED_LAST):
        shift, scale = layout.apart(h)
        assert torch.equal(shift, h[:, 0::2])
        assert torch.equal(scale, h[:, 1::2])


@given(features=st.integers(2, 6), seed=st.integers(0, 100), dim=st.sampled_from([1, -1]))
@settings(max_examples=20, deadline=None)
def test_indexed_halves(features, seed, dim):
    order = torch.randperm(features, generator=torch.Generator().manual_seed(seed))
    halves = couplings.indexed(order[:1], order[1:], dim)
    x = torch.randn(2, features, 3) if dim == 1 else torch.randn(2, 3, features)
    a, b = halves.apart(x)
    assert torch.equal(a, x.index_select(dim, order[:1]))
    assert torch.equal(b, x.index_select(dim, order[1:]))
    assert torch.equal(halves.together(a, b), x)
    with pytest.raises(InputError, match=f"a coupling of {features} features"):
        halves.apart(x[:, :1] if dim == 1 else x[..., :1])


@pytest.mark.filterwarnings("ignore")  # about networks that are not smooth, and classes that nobody knows
def test_the_couplings_of_the_census_are_in_closed_form():
    """Their numbers are compared in test_derivatives.py."""
    closed, opaque = set(), set()
    for case in SUPPORTED:
        for step in ebf.wrap(case.build()).plan.steps:
            if isinstance(step, FollowedStep):
                (closed if step.closed else opaque).add(str(case))
    assert sorted(opaque) == sorted(name for name in closed | opaque if any(word in name for word in OPAQUE))
    assert not closed & opaque
    assert len([name for name in closed if "normflows" in name]) > 40
    assert len([name for name in closed if "zuko" in name]) > 15


MODELS = {
    "nflows": lambda: flows.Flow(
        transforms.AffineCouplingTransform([0, 1, 0, 1], lambda i, o: nets.ResidualNet(i, o, 5, activation=F.silu)),
        distributions.StandardNormal([4]),
    ),
    "normflows": lambda: nf.NormalizingFlow(
        nf.distributions.DiagGaussian(4),
        [
            nf.flows.AffineCouplingBlock(nn.Sequential(nn.Linear(2, 4), nn.SiLU())),
            nf.flows.MaskedAffineFlow(torch.tensor([1.0, 0.0, 1.0, 0.0]), nn.Linear(4, 4), nn.Linear(4, 4)),
        ],
    ),
    "zuko": lambda: zuko.flows.RealNVP(4, hidden_features=[5], activation=nn.SiLU),
}


@pytest.mark.parametrize("library", MODELS)
def test_meta_tensors_pass(library):
    model = ebf.wrap(MODELS[library]()).to("meta")
    assert SSM(model)(torch.empty(5, 4, device="meta")).is_meta


@pytest.mark.parametrize("library", MODELS)
def test_no_rows(library):
    model, x = ebf.wrap(MODELS[library]()), torch.zeros(0, 4)
    found = derivatives(model.plan, x, directions=[x, x])
    assert [one.shape for one in (*found.slopes, *found.curvatures)] == [(0,)] * 4
    assert found.gradient.shape == (0, 4)
    found.curvatures[0].sum().backward()


def test_a_network_without_layers_is_left_to_autograd_where_a_context_is_appended():
    merge = couplings.shifted(couplings.PAIR, 1.0)
    assert couplings.coupling(couplings.PAIR, nn.Identity(), merge, appended=True) is None
    assert couplings.coupling(couplings.PAIR, nn.Sequential(), merge, appended=True) is None
    assert couplings.coupling(couplings.PAIR, nn.Linear(2, 2), merge, appended=True) is not None


def test_a_network_that_the_library_cannot_call_is_not_called_by_ssm():
    """nflows passes two inputs to a network: what trains must also have a density."""

    def network(features, outputs):
        return nn.Sequential(nn.Linear(features, 8), nn.SiLU(), nn.Linear(8, outputs))

    coupling = transforms.AffineCouplingTransform(torch.tensor([1, 0, 1, 0]), network)
    model = ebf.wrap(flows.Flow(coupling, distributions.StandardNormal([4])))
    for call in (model.log_prob, model.score, SSM(model)):
        with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
            call(torch.randn(5, 4))
