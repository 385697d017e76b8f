"""``ebflow train`` twice: once in peace, once killed with SIGKILL at random moments and started again.

Usage: killed_runs.py folder kills seed. Prints the last checkpoint at each kill, and whether a file was being written.
"""

import os
import random
import signal
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path

import torch
import torch._dynamo  # optimizers import it when they are made: here, not in each child

import ebflow_examples.records  # noqa: F401  (imports Lightning, which takes seconds: here, not in each child)
from ebflow_examples.config import TrainConfig
from ebflow_examples.training import train

CONFIG = TrainConfig(
    data="digits", limit=300, model="fc", loss="dsm", steps=80, batch_size=32, evaluate_every=7, device="cpu",
    whiten=False, clip_norm=50.0, schedule="cosine", lr=1e-3, calibrate="diagonal",
)  # fmt: skip
fsync = os.fsync


def slow(descriptor):
    """Files take a while to be written, so that some kills come in the middle."""
    time.sleep(float(os.environ.get("SLOW_FSYNC", "0.01")))
    fsync(descriptor)


def last_checkpoint(folder):
    return max((path.name for path in folder.glob("step-*")), default="none")


def in_child(folder, wait):
    """Runs the training in a process of its own, and kills it after a while. Returns whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            os.fsync = slow
            train(CONFIG, folder, resume=True, progress=False)
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    if wait is not None:
        before = last_checkpoint(folder)
        while last_checkpoint(folder) == before and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.005)  # every run gets somewhere, however slow the machine
        time.sleep(wait)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    try:
        _, status = os.waitpid(child, 0)
    except ChildProcessError:  # it ended by itself
        return False
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status):
        sys.exit(1)
    return False


def main():
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    random.seed(seed)
    in_child(folder / "peace", None)
    war, done = folder / "war", 0
    while done < kills:
        if in_child(war, random.uniform(0.0, float(os.environ.get("LONGEST_WAIT", "0.3")))):
            done += 1
            print(last_checkpoint(war), "torn" if list(war.glob(".*.tmp")) else "whole", flush=True)
        else:  # it came to its end: another one
            for path in war.iterdir():
                path.unlink()
    in_child(war, None)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main()
