"""Standardize: any units in front of a flow, and the density stays that of the data."""

import pytest
import torch
from nflows import distributions, flows, transforms

import ebflow_plugin as ebf
from ebflow_nflows import SmoothLeakyReLU
from ebflow_plugin.errors import InputError
from matched import log_prob
from randomness import rng

SCALES = torch.tensor([1e3, 1.0, 1e-3], dtype=torch.float64)
SHIFT = torch.tensor([-5e3, 0.0, 7e-3], dtype=torch.float64)


def rows(count=400):
    return SHIFT + SCALES * torch.randn(count, 3, generator=rng(0), dtype=torch.float64)


def standard_normal():
    return flows.Flow(transforms.IdentityTransform(), distributions.StandardNormal([3])).double()


def model_of(**options):
    torch.manual_seed(1)
    linear = transforms.LULinear(3)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.normal_(0.0, 0.3)
    steps = transforms.CompositeTransform([linear, SmoothLeakyReLU(0.3), transforms.LULinear(3)])
    flow = flows.Flow(steps, distributions.StandardNormal([3])).double()
    return ebf.wrap(flow, preprocess=[ebf.Standardize.of(rows())], **options)


@pytest.mark.parametrize("match_after", ["auto", None])
def test_the_density_is_that_of_a_gaussian_in_the_units_of_the_data(match_after):
    model = ebf.wrap(standard_normal(), preprocess=[ebf.Standardize(SHIFT, SCALES)], match_after=match_after)
    truth = torch.distributions.Normal(SHIFT, SCALES)
    x = rows(7)
    assert torch.allclose(model.log_prob(x), truth.log_prob(x).sum(1))
    assert torch.allclose(model.score(x), (SHIFT - x) / SCALES**2)
    assert torch.allclose(model.sample(20_000).std(0) / SCALES, torch.ones(3, dtype=torch.float64), atol=0.03)


def test_the_matched_variable_begins_behind_it():
    model = model_of()
    u, log_det = model.preprocess(rows())
    assert torch.allclose(u.std(0), torch.ones(3, dtype=torch.float64))
    assert torch.allclose(u.mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(log_det, -rows().std(0).log().sum().expand(len(u)))
    assert torch.allclose(model.log_prob(rows()), log_prob(model.core, u) + log_det)
    assert torch.allclose(model_of(match_after=None).preprocess(rows())[0], rows())


def test_score_matching_is_the_same_in_any_units():
    x, noise = rows(), torch.Generator()
    values = []
    for factor in (1.0, 1e4):
        torch.manual_seed(1)
        flow = flows.Flow(transforms.LULinear(3), distributions.StandardNormal([3])).double()
        model = ebf.wrap(flow, preprocess=[ebf.Standardize.of(factor * x)])
        losses = (ebf.objectives.DSM(model, sigma=0.1, generator=noise), ebf.objectives.SM(model))
        values.append([loss(factor * x).item() for loss in losses if noise.manual_seed(0)])
    assert values[0] == pytest.approx(values[1], rel=1e-8)


def test_derivatives_through_it_agree_with_autograd():
    model = model_of(match_after=None)
    x = rows(2)
    hessians = [torch.autograd.functional.hessian(lambda y: model.energy(y[None]).sum(), row) for row in x]
    score = model.score(x)
    exact = torch.stack([-h.diagonal().sum() for h in hessians]).mean() + 0.5 * score.square().sum(1).mean()
    assert ebf.objectives.SM(model)(x).item() == pytest.approx(exact.item(), rel=1e-6)


def test_its_numbers_are_saved_and_log_z_follows_them():
    model, other = model_of(match_after=None), model_of(match_after=None)
    before = other.log_z((3,)).item()
    model.preprocessing[0].std.mul_(10.0)
    other.load_state_dict(model.state_dict())
    assert other.log_z((3,)).item() == pytest.approx(before + 3 * torch.tensor(10.0).log().item())
    assert torch.allclose(other.log_prob(rows()), model.log_prob(rows()))


def test_single_precision_rows_meet_double_precision_numbers():
    model = ebf.wrap(standard_normal().float(), preprocess=[ebf.Standardize(SHIFT, SCALES)])
    assert model.log_prob(rows(5).float()).dtype == torch.float32
    assert ebf.Standardize.of(rows()).float().mean.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ebf.Standardize(SHIFT, SCALES[:2]), "the shape of one data point"),
        (lambda: ebf.Standardize(0.0, 1.0), "the shape of one data point"),
        (lambda: ebf.Standardize(SHIFT, -SCALES), "not: 0, 1, 2"),
        (lambda: ebf.Standardize(torch.tensor([0.0, float("nan")]), torch.ones(2)), "those of 1 features are not: 1"),
        (lambda: ebf.Standardize(torch.zeros(2).long(), torch.ones(2).long()), "floating-point"),
        (lambda: ebf.Standardize.of(torch.full((9, 2), 0.1)), "constant has no density"),
        (lambda: ebf.Standardize.of(torch.zeros(1, 2)), "N at least 2"),
    ],
)
def test_what_cannot_be_standardized_is_refused(make, words):
    with pytest.raises(InputError, match=words):
        make()
