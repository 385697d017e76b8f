"""What holds for every test."""

import pytest
import torch

from case import seeded

torch.set_num_threads(1)  # the tests run side by side, and small tensors gain nothing from more


class SameRandomNumbers:
    """Every test starts from the same random numbers, also the doctests, which no fixture here reaches."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self):
        with seeded():
            return (yield)


def pytest_configure(config):
    config.pluginmanager.register(SameRandomNumbers())
