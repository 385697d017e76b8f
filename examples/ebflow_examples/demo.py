"""``ebflow demo``: where energies do not pay, in two lines, and where they do: a race on images of known density."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import log
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

import ebflow_plugin as ebf
from ebflow_examples.bench.contenders import training_step
from ebflow_examples.bench.timing import interleaved
from ebflow_examples.config import TrainConfig
from ebflow_examples.console import say, table, to_json
from ebflow_examples.data import load
from ebflow_examples.defaults import objective_of
from ebflow_examples.folders import writable
from ebflow_examples.models import flow_for
from ebflow_examples.reproduce import race
from ebflow_examples.reproduce.common import one_thread
from ebflow_examples.reproduce.timed import train_by_steps
from ebflow_examples.runs import build, nll_of_rows, standard_error
from ebflow_examples.streams import drawing_from, stream

SMALL_STEPS = 150
TIMING = 0.5  # seconds, for the steps of the small case
SECONDS = 10.0
QUICK_SECONDS = 0.2
RACE = ("ml", "dsm", "ml_stochastic")
ROWS = 100  # that the race is evaluated with
WRONG = 0.5  # samples whose spread is off by more are visibly so


def run_demo(out: Path, seed: int = 0, quick: bool = False) -> list[dict[str, Any]]:
    """Trains, prints and draws; gives the rows of the table of the race, which ``demo.json`` holds too."""
    writable(out)
    with one_thread():
        return _tour(out, seed, quick)


def _tour(out: Path, seed: int, quick: bool) -> list[dict[str, Any]]:
    started = time.monotonic()
    say("\n1. Where energies do not pay: small layers. Handwritten digits, two full layers of nflows, D = 64.\n")
    ml, dsm = (small_case(loss, 4 if quick else SMALL_STEPS, seed) for loss in ("ml", "dsm"))
    times = interleaved({"ml": ml[1], "dsm": dsm[1]}, seconds=TIMING)
    say(_verdict(ml[0], dsm[0], times["ml"].median / times["dsm"].median))
    seconds = QUICK_SECONDS if quick else SECONDS
    data = load("textures16" if quick else "textures", seed=seed)
    size = data.train[0].numel()
    say(
        f"\n2. Where they do: large layers. Images of 3 x {data.event_shape[-1]} x {data.event_shape[-1]}, D = {size}, "
        "made by a flow that is known, so that\nthe least NLL of any model is known too: the floor. "
        "ebf.wrap(flow) around two 7 x 7 convolutions of nflows:\n"
    )
    with drawing_from(seed, "weights"):
        say(f"{ebf.wrap(flow_for('cnn', data)[0]).report}\n")
    rows, drawn = [], {}
    for name in RACE:
        contender = race.CONTENDERS[name]
        with Console(stderr=True).status(f"{contender.name}, {seconds:g} s"):
            model, facts = race.run(contender, data, data.test[:ROWS], seconds, contender.rate, seed)
        said = f"{facts['steps']} steps in {facts['seconds']:.1f} s: {facts['above_floor']:,.0f} nats above the floor"
        say(f"{contender.name}, {said}")
        drawn[name] = model.sample(race.SAMPLES, generator=stream(seed, "samples"))
        told = {"objective": name, "name": contender.name, "rate": contender.rate, "start": facts["curve"][0][1]}
        rows.append({**told, **facts, "seconds": seconds, "spread": race.spread(drawn[name], data)})
    (out / "demo.json").write_text(f"{to_json(rows)}\n", encoding="utf-8")
    picture = out / "demo.png"
    race.draw(picture, seconds, {row["objective"]: [row] for row in rows}, drawn, data)
    say(f"\n{_summary(rows, size, seconds)}\n")
    say(_finding(rows))
    say(f"\nThe picture is in {picture}. All of it took {time.monotonic() - started:.0f} s. What to try next:")
    say("  ebflow profile cnn --shape 3,32,32   what a step of every objective costs on this machine, and which to use")
    say("  ebflow train --data checkerboard --loss ssm --out runs/board && ebflow density runs/board")
    say("  ebflow inspect your_module:your_flow")
    return rows


def small_case(loss: str, steps: int, seed: int) -> tuple[Tensor, Callable[[], None]]:
    """Trains the paper's fc on digits from a start in closed form: the NLL of each test row, and a step to be timed."""
    told = TrainConfig(
        data="digits", model="fc", loss=loss, sigma=0.2 if loss == "dsm" else None, lr=3e-4, batch_size=100,
        steps=steps, ema=False, seed=seed, device="cpu",
    )  # fmt: skip
    run = build(told)
    held_out = {"validation": run.data.validation, "evaluate_every": max(1, steps // 3), "calibrate": True}
    run, result = train_by_steps(run, **held_out)
    result.load_best(run.model)
    nll = nll_of_rows(run.model, run.data.test, seed)
    objective = objective_of(run.model, run.config)
    objective.generator = stream(seed, "timing")
    return nll, training_step(run.model, objective, run.data.train[:100])


def _verdict(ml: Tensor, dsm: Tensor, faster: float) -> str:
    """In two lines: which NLL is better on the small case, and how many steps of DSM one of ML lasts."""
    apart = dsm - ml
    difference, error = float(apart.mean()), standard_error(apart)  # on the same rows, so of the difference itself
    better = "ML is better by" if difference > 0 else "DSM is better by"
    if abs(difference) <= 2 * error:
        better = "They differ by no more than chance:"
    return (
        f"After as many steps the test NLL is {float(ml.mean()):.2f} by ML and {float(dsm.mean()):.2f} by DSM. "
        f"{better} {abs(difference):.2f} ± {error:.2f} nats, and\na step of DSM is {faster:.1f} times as "
        "fast: determinants of this size are cheap. Use ML here."
    )


def _summary(rows: Sequence[dict[str, Any]], size: int, seconds: float) -> str:
    texts = "{name}|{rate:g}|{steps}|{start:,.0f}|{above_floor:,.0f} ± {error:.0f}|{spread:.2f}"
    cells = [texts.format(**row).split("|") for row in sorted(rows, key=lambda row: row["above_floor"])]
    head = ("objective", "rate", "steps", "start", "nats above the floor", "spread of samples")
    return table(head, cells) + (
        f"\nD = {size}, {seconds:g} CPU seconds of one thread each, evaluations not counted; ± over {ROWS} images. "
        "Each rate is the best\nof a short grid, on other images. Spread: the standard deviation of the pixels of "
        "samples over that of the data; 1 is right."
    )


def _finding(rows: Sequence[dict[str, Any]]) -> str:
    """What the race shows, in words that follow from its numbers."""
    exact = next(row for row in rows if row["objective"] == "ml")
    lines = []
    for row in sorted(rows, key=lambda row: row["above_floor"]):
        if row is exact:
            continue
        times, ratio = row["steps"] / exact["steps"], exact["above_floor"] / row["above_floor"]
        place = f"{ratio:.1f} times as near to" if ratio > 1 else f"{1 / ratio:.1f} times as far from"
        lines.append(f"{row['name']} takes {times:.1f} times as many steps as exact ML, and ends {place} the floor.")
    widest = max(rows, key=lambda row: abs(log(row["spread"])))
    if widest["objective"] == "dsm" and abs(widest["spread"] - 1) > WRONG:
        lines.append("The score says little about the strength of the widest waves, so that DSM gets them right last.")
    lines.append(
        "Exact ML and ML without determinants follow the same gradient in the mean: what exact ML lacks here is time."
    )
    return "\n".join(lines)
