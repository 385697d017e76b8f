"""What would be uploaded: the distributions build, and the wheel works with each flow library alone."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import ebflow_plugin as ebf

ROOT = Path(__file__).parent.parent


def test_the_citation_has_the_version():
    assert f"\nversion: {ebf.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_distributions_build_and_hold_what_they_should(tmp_path):
    build = [sys.executable, "-m", "build", "--outdir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(source)], check=True)
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    packages = {"ebflow_plugin", "ebflow_nflows", "ebflow_normflows", "ebflow_zuko", "ebflow_examples"}
    assert {top for top in tops if not top.endswith(".dist-info")} == packages
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/test_release.py", "CHANGELOG.md", "examples/wrap_nflows.py", ".ci/run", "noxfile.py"} <= inside


@pytest.mark.slow
@pytest.mark.parametrize("library", ["nflows", "normflows", "zuko", "none"])
def test_the_wheel_works_with_one_library_alone(library):
    """In a fresh environment."""
    session = f"alone(library='{library}')"
    subprocess.run([sys.executable, "-m", "nox", "-f", str(ROOT / "noxfile.py"), "-s", session], check=True)
