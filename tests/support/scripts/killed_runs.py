"""Trains twice with the same arguments: once in peace, once killed with SIGKILL at random moments and started again.

Usage: killed_runs.py folder kills seed. Prints the last checkpoint at each kill of a training process.
"""

import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch._dynamo  # optimizers import it when they are made: here, not in each child

import ebflow_plugin as ebf
from ebflow_plugin.training import fit
from training_models import make_data, make_model


def train(folder):
    model = make_model()
    objective = 0.9 * ebf.objectives.DSM(model, sigma=0.5) + 0.1 * ebf.objectives.SSM(model)
    fit(
        objective,
        make_data(300),
        steps=100,
        batch_size=64,
        validation=make_data(100, seed=1),
        evaluate_every=7,
        checkpoint_every=5,
        ema=True,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100),
        clip_norm=5.0,
        conditioning=0.01,
        checkpoint=folder,
        progress=False,
    )


def last_checkpoint(folder):
    return max((path.name for path in folder.glob("step-*")), default="none")


def in_child(folder, wait):
    """Runs the training in a process of its own, and kills it after a while. Returns whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            train(folder)
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
    began = time.monotonic()
    in_child(folder / "peace", None)
    needed = time.monotonic() - began
    for _ in range(kills):
        if in_child(folder / "war", random.uniform(0.0, 0.3) * needed):
            print(last_checkpoint(folder / "war"))
    in_child(folder / "war", None)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
