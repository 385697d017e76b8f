"""The digest of a recipe: it changes with what decides the numbers, and with nothing else."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ebflow_examples.reproduce import provenance, race, table2, tablea3
from ebflow_examples.reproduce.provenance import commit, recipe


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """Has a module read from an edited copy of its file."""
    real = provenance._source

    def edit(name, change):
        copy = tmp_path / "copy.py"
        copy.write_text(change(real(name).read_text()))
        for cached in (provenance._tree, provenance._code, provenance._imports, provenance._needed):
            cached.cache_clear()
        monkeypatch.setattr(provenance, "_source", lambda asked: copy if asked == name else real(asked))

    yield edit
    for cached in (provenance._tree, provenance._code, provenance._imports, provenance._needed):
        cached.cache_clear()


@pytest.mark.parametrize(
    "name", ["ebflow_plugin.closed_form.calibration", "ebflow_nflows.layers", "ebflow_examples.racing"]
)
def test_code_that_computes_counts_and_words_about_it_do_not(edited, name):
    before = recipe(race, "mnist")
    edited(name, lambda text: "# a comment\n" + text.replace('"""', '"""Another word. ', 1))
    assert recipe(race, "mnist") == before
    other = recipe(tablea3, "mnist")
    edited(name, lambda text: text + "\nanother = 1\n")
    assert recipe(race, "mnist") != before
    assert (recipe(tablea3, "mnist") == other) == (name == "ebflow_examples.racing")  # which it has nothing to do with


def test_code_that_shows_does_not_count(edited):
    before = recipe(race, "mnist")
    edited("ebflow_examples.plots", lambda text: text + "\nanother = 1\n")
    assert recipe(race, "mnist") == before


def test_the_digest_does_not_depend_on_what_ran_before():
    code = "from ebflow_examples.reproduce import race, provenance\n{}print(provenance.recipe(race, 'mnist'))"
    later = "from ebflow_examples import textures, models, demo, profiler\n"
    first, second = (
        subprocess.run([sys.executable, "-c", code.format(more)], capture_output=True, text=True, check=True).stdout
        for more in ("", later)
    )
    assert first == second


def test_the_users_own_data_count(tmp_path):
    file = tmp_path / "images.npy"
    np.save(file, np.zeros((30, 8, 8), dtype=np.uint8))
    before, folder = recipe(table2, str(file)), recipe(table2, str(tmp_path))
    np.save(file, np.ones((30, 8, 8), dtype=np.uint8))
    assert recipe(table2, str(file)) != before
    assert recipe(table2, str(tmp_path)) != folder


def test_the_commit_is_that_of_the_checkout(monkeypatch):
    folder = Path(provenance.__file__).parent
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=folder)
    if git.returncode == 0:
        assert git.stdout.startswith(commit().rstrip("+"))

    def gone(*words):
        raise FileNotFoundError("git")

    monkeypatch.setattr(provenance, "_git", gone)
    commit.cache_clear()
    assert commit().startswith("version ")
    commit.cache_clear()
