"""What holds for every test."""

import pytest
import torch

from case import seeded

torch.set_num_threads(1)  # the tests run side by side, and small tensors gain nothing from more


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Every test starts from the same random numbers."""
    with seeded():
        yield
