"""``python -m ebflow_examples``: the same as ``ebflow``."""

from ebflow_examples.cli import app

app(prog_name="ebflow")
