"""Runs of ebflow_plugin.lightning in one of several processes. Usage: parallel_runs.py folder, under torchrun."""

import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
from lightning.pytorch import seed_everything
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import ebflow_plugin as ebf
from ebflow_plugin import model as models
from ebflow_plugin.closed_form.moments import barrier
from ebflow_plugin.errors import EBFlowError
from ebflow_plugin.lightning import Checkpoints, LitObjective, Loader, trainer
from lightning_models import Cut, Seen
from training_models import CrashError, adam, make_data, make_model, weights


def train(folder, name, rank=0, world=1, blind=False, cut=None):
    """A run of 12 steps with 20 rows in the joined batch; resumes if there is a checkpoint."""
    seed_everything(0, verbose=False)
    model = make_model(seed=rank, dtype=torch.float64)  # the first process's weights must win
    if blind:  # a parameter that no loss depends on
        model.flow.register_parameter("idle", torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)))
    module, seen = LitObjective(ebf.make_objective(name, model), adam(0.01)), Seen()
    together = {"strategy": "ddp_find_unused_parameters_true"} if world > 1 else {}
    made = trainer(
        folder,
        steps=12,
        evaluate_every=4,
        ema=0.9,
        calibrate="full",
        callbacks=[seen, *([] if cut is None else [Cut(cut)])],
        accelerator="cpu",
        devices=world,
        enable_progress_bar=False,
        **together,
    )
    kept = next(each for each in made.callbacks if isinstance(each, Checkpoints))
    data, held_out = make_data(100, dtype=torch.float64), make_data(301, seed=1, dtype=torch.float64)
    try:
        made.fit(module, Loader(data, 20 // world), Loader(held_out, 50, shuffle=False), ckpt_path=kept.last)
    except CrashError:
        return None
    noise = [generator.get_state().sum().item() for generator in module._noise.values()]
    return {"weights": weights(model), "rows": seen.rows, "noise": noise}


def without_data(seeds, together=False):
    """Five steps of reverse KL, whose loss is the mean over these streams of samples."""
    torch.manual_seed(0)
    model = make_model(dtype=torch.float64)
    model.initialize(make_data(100, dtype=torch.float64))
    objective = ebf.objectives.ReverseKL(model, lambda x: -(x - 1.0).square().sum(1), 16)
    loss = DistributedDataParallel(objective) if together else objective
    streams = [torch.Generator().manual_seed(seed) for seed in seeds]
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(5):
        adam.zero_grad()
        torch.stack([loss(generator=stream) for stream in streams]).mean().backward()
        adam.step()
    return weights(model)


def alone_and_together(rank):
    """Calls that the first process makes alone, where the other waits meanwhile, as in real programs; then both."""
    models.barrier = lambda call: barrier(call, timedelta(seconds=1))
    x = make_data(100, dtype=torch.float64).chunk(2)[rank]
    model, found = make_model(actnorm=False, dtype=torch.float64), []
    for call in (lambda: model.calibrate(x), lambda: model.initialize(x, whiten=True)):
        if rank == 0:
            try:
                call()
                found.append("no error")
            except EBFlowError as error:
                found.append(str(error))
        distributed.barrier()
        for _ in range(2):
            call()
    return {"found": found, "weights": model.state_dict()}


def main():
    folder = Path(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = {
        "ml": train(folder / "ml", "ml", rank, world),
        "whole": train(folder / "whole", "ssm", rank, world),
        "blind": train(folder / "blind", "ssm", rank, world, blind=True),
        "part": train(folder / "parts", "ssm", rank, world, cut=9),
        "parts": train(folder / "parts", "ssm", rank, world),
        "reverse": without_data([rank], together=True),
        "alone": alone_and_together(rank),
    }
    torch.save(found, folder / f"found-{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main()
