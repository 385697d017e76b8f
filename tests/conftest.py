"""What holds for every test."""

import pytest
import torch

import accelerator as pretend
from case import seeded

torch.set_num_threads(1)  # the tests run side by side, and small tensors gain nothing from more


class SameRandomNumbers:
    """Every test starts from the same random numbers, also the doctests, which no fixture here reaches."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self):
        with seeded():
            return (yield)


def pytest_configure(config):
    """Loads the pretend accelerator before any test module: autograd counts the devices in its first backward."""
    config.pluginmanager.register(SameRandomNumbers())
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests and pretend.missing() is None:
        pretend.load()


@pytest.fixture
def accelerator():
    """The first device of the pretend accelerator."""
    if pretend.missing() is not None:
        pytest.skip(pretend.missing())
    return pretend.DEVICE
