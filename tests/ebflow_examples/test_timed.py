"""Training by the clock: starts that objectives share."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

from ebflow_examples.config import TrainConfig
from ebflow_examples.reproduce.timed import train_for
from ebflow_examples.runs import build


def test_a_start_is_computed_once_for_all_objectives(tmp_path: Path) -> None:
    """Another objective of the same model begins with the kept weights, and counts the seconds that they took."""
    file = tmp_path / "start-digits.safetensors"
    first, second, alone = (
        train_for(
            build(TrainConfig(data="digits", model="fc", loss=loss, lr=1e-5, limit=300, device="cpu")),
            0.1, evaluations=1, validation=50, start_file=kept,
        )
        for loss, kept in (("ml", file), ("dsm", file), ("dsm", None))
    )  # fmt: skip
    assert second.curve[0][1] == first.curve[0][1] == alone.curve[0][1]
    assert second.run.config == alone.run.config
    facts = json.loads(safe_open(file, "pt").metadata()["start"])
    assert facts["gaussianize"] is True
    assert second.start >= facts["seconds"] > 0
