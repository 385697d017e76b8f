"""``ebflow``, and ``python -m ebflow_examples``: the commands, or what to install for them."""

from __future__ import annotations

import sys
from importlib.util import find_spec

NEEDED = ("typer", "rich")  # to speak at all; what single commands need, they say themselves


def main() -> None:
    """Runs the command that was typed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(
            f"error: ebflow needs {' and '.join(missing)}, which the extra [examples] has: "
            "pip install 'ebflow-plugin[examples]', or pip install '.[examples]' in a checkout. "
            "The library itself needs neither: import ebflow_plugin."
        )
    from ebflow_examples.cli import app

    app(prog_name="ebflow")


if __name__ == "__main__":
    main()
