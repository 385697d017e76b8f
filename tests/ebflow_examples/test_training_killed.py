"""`ebflow train` killed at random moments, stopped by Ctrl-C, and in two processes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from commands import ebflow
from ebflow_examples.runs import open_run
from processes import SCRIPTS
from training_models import same, weights, without_timing

SMALL = ["--steps", "40", "--batch-size", "20", "--limit", "200", "--evaluate-every", "8", "--loss", "dsm",
         "--device", "cpu", "--schedule", "constant"]  # fmt: skip


def environment(**more):
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPTS), *sys.path]), "OMP_NUM_THREADS": "1", **more}


def records(folder):
    return without_timing(json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())


def summary(folder):
    told = json.loads((folder / "summary.json").read_text())
    return {name: told[name] for name in ("steps", "stopped", "validation", "test")}


def test_a_run_that_is_killed_again_and_again_has_the_numbers_of_one_in_peace(tmp_path):
    """With $TMPDIR on another file system, which does harm to Lightning's own checkpoints."""
    other = {"TMPDIR": "/dev/shm"} if os.path.isdir("/dev/shm") else {}
    done = subprocess.run(
        [sys.executable, SCRIPTS / "killed_runs.py", tmp_path, "3", "0"],
        env=environment(**other),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split()) - {"torn", "whole"}) >= 2, "killed at different places of the run"
    peace, war = tmp_path / "peace", tmp_path / "war"
    assert len(records(peace)) == 12
    assert records(war) == records(peace)
    assert summary(war) == summary(peace)
    for kind in ("best", "last", "average"):
        assert same(*(weights(open_run(folder, kind, "cpu").model) for folder in (peace, war)))


def test_ctrl_c_saves_says_how_to_go_on_and_the_run_does(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    command = [sys.executable, "-m", "ebflow_examples", "train", *SMALL]
    with subprocess.Popen(
        [*command, "--out", parts, "--steps", "1000000"], env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        while not list(parts.glob("step-*.ckpt")):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    assert f"`ebflow train --out {parts} --resume` goes on from the last checkpoint." in said
    assert "Traceback" not in said
    step = max(int(path.stem.removeprefix("step-")) for path in parts.glob("step-*.ckpt"))
    steps = str(step + 20)
    ebflow("train", "--out", parts, "--resume", "--steps", steps)
    ebflow("train", "--out", whole, *SMALL, "--steps", steps)
    assert records(parts) == records(whole)
    assert summary(parts) == summary(whole)


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    """Likelihood has no noise. Each process has half of a batch."""
    one, two = tmp_path / "one", tmp_path / "two"
    told = ["train", "--data", "sine", "--model", "fc", "--loss", "ml", "--steps", "12", "--limit", "400"]
    told += ["--evaluate-every", "4", "--device", "cpu", "--clip-norm", "10"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for out, size, before in ((one, "40", []), (two, "20", launch)):
        command = [sys.executable, *before, "-m", "ebflow_examples", *told, "--batch-size", size, "--out", out]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    for first, second in zip(records(one), records(two), strict=True):
        for name in ("step", "loss", "nll", "best_nll", "grad_norm"):
            assert first[name] == pytest.approx(second[name], rel=1e-4), name
    assert summary(one)["test"]["nll"] == pytest.approx(summary(two)["test"]["nll"], rel=1e-4)
