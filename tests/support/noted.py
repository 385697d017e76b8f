"""Which of several things a test was at when it failed."""

from contextlib import contextmanager


@contextmanager
def at(*what):
    """Notes these in what is raised inside the block: one test can go through a table, and a failure names its row."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"at {', '.join(map(str, what))}")
        raise
