"""The digest of a recipe: it changes with what decides the numbers, and with nothing else."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ebflow_examples.reproduce import provenance, race, table2, table3
from ebflow_examples.reproduce.provenance import commit, recipe


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """Has a module read from an edited copy of its file."""
    files = dict(provenance._modules())

    def edit(name, change):
        copy = tmp_path / f"{len(list(tmp_path.iterdir()))}.py"
        copy.write_text(change(files[name].read_text()))
        monkeypatch.setattr(provenance, "_modules", lambda: {**files, name: copy})

    return edit


@pytest.mark.parametrize(
    "name", ["ebflow_plugin.closed_form.calibration", "ebflow_nflows.layers", "ebflow_examples.clock"]
)
def test_code_that_computes_counts_and_words_about_it_do_not(edited, name):
    before = recipe(race, "mnist")
    edited(name, lambda text: "# a comment\n" + text.replace('"""', '"""Another word. ', 1))
    assert recipe(race, "mnist") == before
    edited(name, lambda text: text + "\nanother = 1\n")
    assert recipe(race, "mnist") != before


@pytest.mark.parametrize("name", ["plots", "bench.plain", "reproduce.output", "reproduce.tablea3"])
def test_code_that_shows_and_other_experiments_do_not_count(edited, name):
    before = recipe(race, "mnist")
    edited(f"ebflow_examples.{name}", lambda text: text + "\nanother = 1\n")
    assert recipe(race, "mnist") == before


def test_an_experiment_that_another_one_uses_counts(edited):
    before = [recipe(each, "mnist") for each in (table2, table3, race)]
    edited("ebflow_examples.reproduce.table2", lambda text: text + "\nanother = 1\n")
    after = [recipe(each, "mnist") for each in (table2, table3, race)]
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, False, True]


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
