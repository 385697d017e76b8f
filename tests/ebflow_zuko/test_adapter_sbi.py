"""sbi's estimators of zuko: flows with a context embedding, which the adapter finds in them."""

import pytest
import torch
import zuko
from torch import nn
from torch.distributions import transforms as torch_transforms
from zuko import transforms as T
from zuko.lazy import Flow, UnconditionalTransform

import ebflow_plugin as ebf
from ebflow_plugin.objectives import SSM
from randomness import randn
from zuko_parts import D, coupling
from zuko_small import flow_of


class ZukoFlow(nn.Module):
    """A stand-in for sbi's estimator: a flow, and beside it what the condition passes first."""

    def __init__(self, net, embedding):
        super().__init__()
        self.net, self._embedding_net = net, embedding

    def log_prob(self, input, condition):
        samples, rows = input.shape[:2]
        embedded = self._embedding_net(condition.expand(samples, *condition.shape).flatten(0, 1))
        return self.net(embedded.reshape(samples, rows, -1)).log_prob(input)


ZukoFlow.__module__ = "sbi.neural_nets.estimators.zuko_flow"


def estimator(**options):
    torch.manual_seed(0)
    standardise = UnconditionalTransform(
        torch_transforms.AffineTransform, loc=torch.randn(D), scale=torch.rand(D) + 0.5, buffer=True
    )
    maf = zuko.flows.MAF(D, 3, transforms=2, hidden_features=(8,), activation=nn.Tanh)
    embedding = nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.Tanh(), *options.get("more", []), nn.Linear(8, 3))
    return ZukoFlow(Flow([standardise, *maf.transform.transforms], maf.base), embedding).double()


def test_sbi_estimators_with_their_embedding():
    whole = estimator()
    model, x, c = ebf.wrap(whole, strict=True), randn(5, D), randn(5, 6).reshape(5, 2, 3)
    assert model.flow is whole
    assert {id(p) for p in model.parameters()} == {id(p) for p in whole.parameters()}
    assert torch.allclose(model.log_prob(x, c), whole.log_prob(x[None], c)[0])
    assert model.report.rows[0].path == "net.transform.transforms.0"
    assert [row.linearity for row in model.report] == ["linear", "nonlinear", "nonlinear"]
    assert ebf.verify(whole, x, c)
    assert model.sample(3, c).shape == (5, 3, D)
    with pytest.raises(ebf.InputError, match="conditional"):
        model.energy(x)
    SSM(model)(x, c).backward()
    assert all(torch.isfinite(p.grad).all() for p in whole._embedding_net.parameters())
    batch_norm = estimator(more=[nn.BatchNorm1d(8)])
    with pytest.raises(ebf.UnsupportedStepError, match=r"embeds the context couples the samples"):
        ebf.wrap(batch_norm)
    assert torch.allclose(ebf.wrap(batch_norm.eval()).log_prob(x, c), batch_norm.log_prob(x[None], c)[0])


class Mirrored(ZukoFlow):
    def log_prob(self, input, condition):
        return super().log_prob(-input, condition)


def test_an_estimator_with_a_density_of_its_own_is_refused():
    whole = estimator()
    with pytest.raises(ebf.UnsupportedStepError, match="Mirrored overrides log_prob"):
        ebf.wrap(Mirrored(whole.net, whole._embedding_net))


def test_sbi():
    builders = pytest.importorskip("sbi.neural_nets.net_builders")
    theta, x = torch.randn(50, 4), torch.randn(50, 3)
    whole = builders.build_zuko_maf(theta, x, hidden_features=8, num_transforms=2).eval()
    model = ebf.wrap(whole)
    expected = whole.log_prob(theta[:5].unsqueeze(0), x[:5])[0]
    assert torch.allclose(model.log_prob(theta[:5], x[:5]), expected, atol=1e-5)


def test_a_logit_that_sbi_puts_in_front_is_matched_after():
    class CallableTransform(nn.Module):
        def __init__(self, transform):
            super().__init__()
            self._transform = transform

        def forward(self):
            return self._transform.inv

    CallableTransform.__module__ = "sbi.utils.sbiutils"
    box = torch_transforms.ComposeTransform([T.SigmoidTransform(), torch_transforms.AffineTransform(-1.0, 3.0)])
    held = UnconditionalTransform(CallableTransform(torch_transforms.IndependentTransform(box, 1)), buffer=True)
    flow = flow_of(held, coupling()())
    model, x = ebf.wrap(flow, strict=True), -1.0 + 3.0 * torch.rand(5, D, dtype=torch.float64)
    assert torch.allclose(model.log_prob(x), flow().log_prob(x))
    assert [row.class_name for row in model.report][:2] == ["AffineTransform", "Logit"]
    assert model.report.preprocessing == 2
