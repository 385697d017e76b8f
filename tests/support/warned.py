"""What was warned of."""

import warnings
from contextlib import contextmanager


def messages(make):
    """What a call returns, and the texts of all its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make()
    return made, [str(warning.message) for warning in caught]


@contextmanager
def no_warnings():
    """Every warning in the block is an error, also those that the test or pyproject.toml ignores."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
