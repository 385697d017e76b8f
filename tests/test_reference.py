"""The API reference: the command of CONTRIBUTING.md builds it from the docstrings, without a warning."""

import re
import shlex
import subprocess
import sys
from inspect import ismodule
from pathlib import Path

import pytest

import ebflow_plugin as ebf

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_reference_builds_without_warnings(tmp_path):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    command = re.search(r"^python (-m pdoc .*?[^\\])$", text, re.DOTALL | re.MULTILINE).group(1)
    arguments = shlex.split(command.replace("\\\n", " ").replace("build/api", str(tmp_path)))
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "ebflow_plugin.html").read_text(encoding="utf-8")
    for name in ebf.__all__:
        assert ismodule(getattr(ebf, name)) or f'<section id="{name}">' in page, name
    for module in (argument for argument in arguments if argument.startswith("ebflow_")):
        assert (tmp_path / f"{module.replace('.', '/')}.html").is_file(), module
