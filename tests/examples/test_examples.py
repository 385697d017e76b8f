"""Every script under examples/ runs, in its small mode, from any folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda script: script.name)
def test_an_example_runs(script, tmp_path):
    environment = {**os.environ, "EBFLOW_SMOKE": "1", "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    if script.name == "wrap_nflows.py":
        assert (tmp_path / "runs" / "wrap_nflows.png").stat().st_size > 10_000
