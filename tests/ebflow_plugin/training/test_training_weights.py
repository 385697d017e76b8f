"""Weights of rows, from the loader to the loss, the NLL, starts and calibrations: against duplicated rows."""

import copy

import pytest
import torch
from nflows import transforms
from torch.utils.data import DataLoader, TensorDataset

import ebflow_plugin as ebf
from ebflow_nflows import FullLinear, SmoothLeakyReLU
from ebflow_plugin.objectives import DSM, ML, SSM, ReverseKL
from ebflow_plugin.training import fit
from ebflow_plugin.training.batches import Loader
from ebflow_plugin.training.evaluation import LikelihoodSum
from gaussian_models import full_layer
from nflows_small import flow_of
from randomness import randn, rng
from training_models import adam

ROWS = 40
COUNTS = torch.randint(0, 4, (ROWS,), generator=rng(3))


def model_of(*first):
    torch.manual_seed(0)
    return ebf.wrap(flow_of(*first, FullLinear(3), SmoothLeakyReLU(0.4), FullLinear(3), shape=(3,)))


def rows():
    return randn(ROWS, 3) @ randn(3, 3, seed=1) + 1.0


def broken(x):
    """The same rows, with NaN where the weight is zero."""
    return torch.where((COUNTS == 0)[:, None], torch.nan, x)


def collate(found):
    x, w = zip(*found, strict=True)
    return torch.stack(x), None, torch.stack(w)


LOADERS = {
    "tuple": lambda x, w: (x, None, w),
    "loader": lambda x, w: DataLoader(TensorDataset(x, w), batch_size=len(x), collate_fn=collate),
    "loader of whole batches": lambda x, w: DataLoader([(x, None, w)], batch_size=None),
}


def trained(model, data, **options):
    result = fit(ML(model), data, steps=5, batch_size=1000, optimizer=adam(0.01), progress=False, **options)
    return result, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_a_run_counts_weights_as_duplicated_rows(make):
    x, model, twin = rows(), model_of(), model_of()
    repeated = x.repeat_interleave(COUNTS, 0)
    data = make(broken(x), 0.1 * COUNTS)
    found, weights = trained(model, data, validation=data)
    expected, others = trained(twin, repeated, validation=repeated)
    torch.testing.assert_close(weights, others)
    assert found.start_nll == pytest.approx(expected.start_nll)
    for one, other in zip(found.history, expected.history, strict=True):
        assert one["nll"] == pytest.approx(other["nll"])
        assert one["bits_per_dim"] == pytest.approx(other["bits_per_dim"])


def test_the_start_of_a_run_counts_them():
    x, model, twin = rows(), model_of(transforms.ActNorm(3)), model_of(transforms.ActNorm(3))
    fit(DSM(model), (broken(x), None, COUNTS), steps=1, optimizer=adam(0.0), progress=False)
    fit(DSM(twin), x.repeat_interleave(COUNTS, 0), steps=1, batch_size=200, optimizer=adam(0.0), progress=False)
    for name, value in twin.flow.state_dict().items():
        torch.testing.assert_close(model.flow.state_dict()[name], value, rtol=0.2, atol=0.1)


def test_a_calibrated_run_counts_them():
    model = model_of()
    x = torch.cat([randn(200, 3), randn(200, 3, seed=1) + 50.0])
    weights = torch.cat([torch.ones(200), torch.zeros(200)]).double()
    result = fit(
        SSM(model), (x, None, weights), validation=(x, None, weights), steps=2, calibrate="full", progress=False
    )
    gaussian = 0.5 * 3 * (1 + torch.tensor(2 * torch.pi).log())
    assert result.best_nll == pytest.approx(float(gaussian), abs=0.3)  # half of the rows are 50 away


def test_an_evaluation_in_parts_weights_the_parts():
    x, model, total = rows(), model_of(), LikelihoodSum(model_of())
    for part, counts in zip(broken(x).split(13), COUNTS.split(13), strict=True):
        total.add(part, None, 7.0 * counts)
    expected = -model.log_prob(x.repeat_interleave(COUNTS, 0)).detach().mean()
    assert total.mean().nll == pytest.approx(float(expected))


def test_a_loader_gives_three_parts_if_there_are_weights():
    x = torch.arange(10.0).reshape(5, 2)
    loader = Loader((x, None, torch.tensor([1.0, 0.0, 2.0, 3.0, 4.0])), 2, shuffle=False)
    batches = list(loader)
    assert [w.tolist() for _, _, w in batches] == [[1.0, 2.0], [3.0, 4.0]]
    assert batches[0][0].tolist() == [[0.0, 1.0], [4.0, 5.0]]
    assert batches[0][1] is None


def test_samples_of_importance_train_by_fit():
    """The bridge from a target to data: weighted samples of a wide model, fitted by likelihood."""
    torch.manual_seed(0)
    model = ebf.wrap(flow_of(full_layer(0.5 * torch.eye(2)), shape=(2,)))

    def target(x):
        return -0.5 * (x - 1.0).square().sum(1)

    drawn = ebf.importance(model, target, 4000, generator=rng())
    fit(
        ML(model), (drawn.samples, None, drawn.weights), steps=300, batch_size=500, optimizer=adam(0.02), progress=False
    )
    assert ebf.importance(model, target, 2000, generator=rng()).effective_sample_size > 1900
    twin = copy.deepcopy(model)
    fit(ReverseKL(twin, target) + ML(twin), (drawn.samples, None, drawn.weights), steps=2, progress=False)
