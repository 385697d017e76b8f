"""What a run of `ebflow train` writes and shows."""

import io
import json
import sys

from rich.console import Console

from ebflow_examples import records
from ebflow_examples.config import TrainConfig
from ebflow_examples.console import as_lines
from ebflow_examples.training import train
from ebflow_plugin.training import Event

SMALL = TrainConfig(data="digits", loss="dsm", steps=6, batch_size=20, limit=150, evaluate_every=2, device="cpu")


def test_metrics_are_json_lines_of_all_that_was_measured(tmp_path, capsys):
    train(SMALL, tmp_path, progress=True)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6]
    names = {"step", "epoch", "loss", "nll", "nll_uncalibrated", "bits_per_dim", "best_nll", "grad_norm", "lr"}
    assert names | {"seconds", "steps_per_second", "condition"} == set(lines[0])
    assert all(set(layer) == {"smallest", "condition"} for layer in lines[0]["condition"].values())
    assert lines[-1]["best_nll"] == json.loads((tmp_path / "summary.json").read_text())["validation"]["nll_best"]
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in shown] == ["0/6", "2/6", "4/6", "6/6"]
    for word in ("loss", "NLL", "bits/dim", "condition", "steps/s", "left"):
        assert word in shown[-1]


def test_on_a_terminal_the_display_is_live_and_shows_everything(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, height=40)
    monkeypatch.setattr(records, "Console", lambda **options: console)
    condition = {f"layers.{place}": {"smallest": 0.1, "condition": 10.0 + place} for place in range(12)}
    record = {"step": 4, "loss": 1.0, "nll": 2.0, "bits_per_dim": 3.0, "steps_per_second": 5.0, "condition": condition}
    with records.display() as show:
        show(Event(4, record, model=None, steps=8, seconds_left=9.0))
        show(Event(0, {"nll": 2.0}, model=None, steps=8))
    for word in ("4/8", "loss", "NLL", "bits/dim", "steps/s", "0:00:09 left", "condition ≥"):
        assert word in screen.getvalue()


def test_numbers_that_json_does_not_have_are_words():
    made = as_lines([{"loss": float("nan")}, {"condition": {"a": float("inf")}}])
    assert made == b'{"loss": "nan"}\n{"condition": {"a": "inf"}}\n'
