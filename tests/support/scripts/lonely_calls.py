"""Two processes, of which the first calls alone what is for both; then both call it.

Usage: torchrun … lonely_calls.py folder. Each process writes what it found.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from ebflow_plugin import model as models
from ebflow_plugin.closed_form.moments import barrier
from ebflow_plugin.errors import EBFlowError
from training_models import make_data, make_model


def main():
    rank = int(os.environ["RANK"])
    distributed.init_process_group("gloo")
    models.barrier = lambda call: barrier(call, timedelta(seconds=1))
    x = make_data(100, dtype=torch.float64).chunk(2)[rank]
    model, found = make_model(actnorm=False, dtype=torch.float64), []
    calls = {
        "calibrate": lambda: model.calibrate(x),
        "whiten": lambda: model.initialize(x, whiten=True),
    }
    for call in calls.values():
        if rank == 0:
            try:
                call()
                found.append("no error")
            except EBFlowError as error:
                found.append(str(error))
        distributed.barrier()  # where the other one waits meanwhile, as in real programs
        for _ in range(2):
            call()
    torch.save({"found": found, "weights": model.state_dict()}, Path(sys.argv[1]) / f"found-{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
