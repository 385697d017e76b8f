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
    """Has a module read from an edited copy of its file; what is known of the others is kept."""

    real = {part: getattr(provenance, part) for part in ("_source", "_tree", "_imports", "_code")}
    copy = tmp_path / "copy.py"

    def edit(name, change):
        copy.write_text(change(real["_source"](name).read_text()))
        fresh = {part: known.__wrapped__ for part, known in real.items()} | {"_source": lambda asked: copy}
        for part in real:
            choose = lambda asked, part=part: (fresh if asked == name else real)[part](asked)  # noqa: E731
            monkeypatch.setattr(provenance, part, choose)
        provenance._needed.cache_clear()

    yield edit
    provenance._needed.cache_clear()


@pytest.mark.parametrize(
    "name", ["ebflow_plugin.closed_form.calibration", "ebflow_nflows.layers", "ebflow_examples.clock"]
)
def test_code_that_computes_counts_and_words_about_it_do_not(edited, name):
    before = recipe(race, "mnist")
    edited(name, lambda text: "# a comment\n" + text.replace('"""', '"""Another word. ', 1))
    assert recipe(race, "mnist") == before
    other = recipe(tablea3, "mnist")
    edited(name, lambda text: text + "\nanother = 1\n")
    assert recipe(race, "mnist") != before
    assert (recipe(tablea3, "mnist") == other) == (name == "ebflow_examples.clock")  # which it has nothing to do with


def test_code_that_shows_does_not_count(edited):
    before = recipe(race, "mnist")
    edited("ebflow_examples.plots", lambda text: text + "\nanother = 1\n")
    assert recipe(race, "mnist") == before


def test_the_digest_does_not_depend_on_what_ran_before():
    code = "from ebflow_examples.reproduce import race, provenance\nprint(provenance.recipe(race, 'mnist'))"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert fresh.strip() == recipe(race, "mnist")


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
