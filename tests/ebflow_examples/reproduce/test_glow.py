"""The Glows that `ebflow reproduce glow` compares."""

import pytest
import torch

from ebflow_examples.data import load
from ebflow_examples.reproduce import glow
from ebflow_examples.reproduce.common import Options

pytestmark = pytest.mark.filterwarnings("ignore:torch.lu is deprecated")  # in normflows


def test_each_library_has_both_kernels_and_all_seeds_are_of_the_main_ones():
    named = [cell.name for cell in glow.cells(Options("glow", budget=1.0, seeds=3))]
    assert {"normflows1-long-seed0", "normflows3-half-seed0", "kernel3-long-seed2"} <= set(named)
    assert "normflows3-long-seed1" not in named


@pytest.mark.parametrize("arm", ["kernel", "normflows"])
def test_a_larger_kernel_begins_at_the_same_density(arm):
    data = load("digits")
    x = data.test[:5]
    models = [
        glow.model_of({**glow.PLAIN, **glow.ARMS[f"{arm}{kernel}"], "seed": 0, "quick": True}, data)
        for kernel in (1, 3)
    ]
    plain, larger = (model.bits_per_dim(x, generator=torch.Generator().manual_seed(0)) for model in models)
    assert torch.allclose(plain, larger, atol=1e-3)  # float32
    assert sum(p.numel() for p in models[1].parameters()) > sum(p.numel() for p in models[0].parameters())


def test_a_glow_of_normflows_has_halves_that_are_finished_early():
    flow = glow.glow_of_normflows((3, 8, 8), hidden=4, levels=2, blocks=1)
    assert [tuple(base.shape) for base in flow.q0] == [(24, 2, 2), (6, 4, 4)]  # from the noise on
    assert flow.log_prob(torch.rand(2, 3, 8, 8), None).shape == (2,)
