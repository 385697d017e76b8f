"""The numbers of the paper, from paper.toml: a mean and the half-width of its 95 % interval, or a mean alone."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

Pair = list[float]

_TOLD: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

PLANE: dict[str, dict[str, dict[str, Pair]]] = _TOLD["plane"]
IMAGES: dict[str, dict[str, dict[str, Pair]]] = _TOLD["images"]
THROUGHPUT: dict[str, dict[str, dict[str, float]]] = _TOLD["throughput"]
ANCHORS: dict[str, dict[str, float]] = _TOLD["anchors"]
ABLATION: dict[str, dict[str, dict[str, Pair]]] = _TOLD["ablation"]
RELATED: dict[str, Pair] = {**IMAGES["mnist"]["fc"], **_TOLD["related"]}
GLOW: float = _TOLD["glow"]
LOG_Z: dict[int, dict[int, float]] = {
    int(budget): {int(dim): error for dim, error in errors.items()} for budget, errors in _TOLD["log_z"].items()
}
