"""The site: one command builds it without a warning, and it has every public name, formula, picture and page."""

import os
import re
import subprocess
import sys
from inspect import ismodule

import pytest

import ebflow_plugin as ebf
from documents import DOCUMENTS, ROOT

MODULES = ("ebflow_plugin.lightning", "ebflow_plugin.testing", "ebflow_plugin.adapting", "ebflow_nflows.layers")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return {file.relative_to(folder).as_posix(): file for file in folder.rglob("*.*")}


@pytest.fixture(scope="module")
def pages(site):
    return {name: file.read_text(encoding="utf-8") for name, file in site.items() if name.endswith(".html")}


@pytest.mark.slow
def test_the_reference_has_every_public_name(pages):
    reference = "".join(text for name, text in pages.items() if name.startswith("reference/"))
    names = {*re.findall(r' id="(ebflow_[\w.]+)"', reference)}
    short = {name.rsplit(".", 1)[-1] for name in names}
    for name in ebf.__all__:
        assert name.startswith("__") or ismodule(getattr(ebf, name)) or name in short, name
    for module in MODULES:
        assert any(name.startswith(f"{module}.") for name in names), module


@pytest.mark.slow
def test_every_page_pictures_and_formulas(site, pages):
    for file in DOCUMENTS:
        if file.is_relative_to(ROOT / "docs"):
            assert file.relative_to(ROOT / "docs").with_suffix(".html").as_posix() in pages
    for picture in (ROOT / "examples" / "results").glob("*.png"):
        assert f"examples/results/{picture.name}" in site
    assert all("arithmatex" not in text for text in pages.values())
    assert pages["likelihood.html"].count('class="formula"') > 20
    assert ":math:" not in "".join(pages.values())


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(pages):
    for name, text in pages.items():
        for source in re.findall(r'<(?:script|link|img)\b[^>]*?(?:src|href)="?([^"\s>]+)', text):
            assert not source.startswith(("http", "//")), f"{name}: {source}"
