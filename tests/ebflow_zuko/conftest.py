"""Every test here starts from the same random numbers."""

import pytest

from case import seeded


@pytest.fixture(autouse=True)
def same_random_numbers():
    with seeded():
        yield
