"""The header of a user's .csv file: asked for by each command that reads one, and remembered by a run."""

import json

import numpy as np

from commands import ebflow, refused_at_length
from ebflow_examples import profiler
from ebflow_examples.config import TrainConfig, read_toml
from ebflow_plugin.errors import InputError


def test_a_run_remembers_what_its_header_was(tmp_path):
    rows = np.random.default_rng(0).standard_normal((40, 3))
    file, out = tmp_path / "rows.csv", tmp_path / "run"
    np.savetxt(file, rows, delimiter=",", header="2019,2020,2021", comments="")
    done = ebflow("train", "--data", file, "--header", "--steps", 2, "--out", out)
    assert "the header is 2019, 2020, 2021" in done.stderr
    assert "header = true" in (out / "config.toml").read_text()
    for command in ("eval", "sample"):
        assert "the header is 2019, 2020, 2021" in ebflow(command, out).stderr
    assert json.loads(ebflow("eval", out, "--json").stdout)["rows"] == 4
    assert json.loads(ebflow("train", "--out", out, "--resume", "--steps", 3, "--json").stdout)["steps"] == 3
    words = "begun with header True, and would be another run with False"
    assert words in refused_at_length("train", "--out", out, "--resume", "--no-header")
    told = TrainConfig().updated(read_toml(out / "config.toml"))
    assert told.updated({"data": "other.csv"}).header is None  # another file has another first line


def test_every_command_that_reads_a_file_takes_a_header(tmp_path, monkeypatch):
    def measured(*arguments, **options):
        raise InputError("it takes seconds")

    monkeypatch.setattr(profiler, "profile", measured)
    file = tmp_path / "rows.csv"
    np.savetxt(file, np.random.default_rng(0).standard_normal((40, 3)), delimiter=",", header="1,2,3", comments="")
    for command, code in (("inspect", 0), ("profile", 2)):
        assert "no header, 1, 2, 3 is the first row" in ebflow(command, "fc", "--data", file, code=code).stderr
        assert "the header is 1, 2, 3" in ebflow(command, "fc", "--data", file, "--header", code=code).stderr
        assert "there is none; leave it out" in refused_at_length(command, "fc", "--header")
    for command in ("train", "inspect", "profile"):
        assert "--no-header" in ebflow(command, "--help").output
