"""bench flows: each model is one that its library evaluates itself, and ours says the same."""

import pytest
import torch

import ebflow_plugin as ebf
from ebflow_examples.bench.flows import IMAGE_MODELS, MODELS, own_step
from randomness import randn


@pytest.mark.parametrize("name", [*MODELS, *IMAGE_MODELS])
def test_the_models_are_those_of_the_libraries(name):
    images = name in IMAGE_MODELS
    x = randn(6, 3, 8, 8) if images else randn(6, 4)
    flow = (IMAGE_MODELS if images else MODELS)[name](tuple(x.shape[1:])).double()
    model = ebf.wrap(flow)
    model.initialize(x)
    # normflows adds log-dets up in float32
    torch.testing.assert_close(ebf.objectives.ML(model)(x), own_step(flow)(x), check_dtype=False, rtol=1e-5, atol=1e-5)
    assert all(row.known for row in model.report)
