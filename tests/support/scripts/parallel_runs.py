"""What one of several processes finds: gradients of each objective on its rows of a batch, and runs of fit().

Usage: torchrun … parallel_runs.py folder. Each process writes what it found.
"""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import distributed

import ebflow_plugin as ebf
from ebflow_plugin.objectives import score_matching
from ebflow_plugin.training import fit
from ebflow_plugin.training.distributed import parallel
from training_models import make_data, make_model

ROWS = 12
OBJECTIVES = {
    "ssm": lambda model: ebf.objectives.SSM(model, projections=2),
    "dsm": lambda model: ebf.objectives.DSM(model, sigma=0.5),
    "fdssm": lambda model: ebf.objectives.FDSSM(model, eps=0.5),
    "ml": ebf.objectives.ML,
    "stochastic": lambda model, world=1: ebf.objectives.ML(
        model, log_det="stochastic", probes=4 // world, tolerance=1e-12
    ),
    "sum": lambda model: 0.5 * ebf.objectives.SSM(model) + 0.5 * ebf.objectives.ML(model),
}


@contextmanager
def shared_noise(rank, world):
    """Lets each process draw the noise of the joined batch, and take its own rows of it."""

    def slicing(draw):
        def drawn(like, generator):
            joined = like.new_empty((len(like) * world, *like.shape[1:]))
            return draw(joined, generator).chunk(world)[rank].contiguous()

        return drawn

    gaussian, projections = score_matching.gaussian_like, dict(score_matching.PROJECTIONS)
    score_matching.gaussian_like = slicing(gaussian)  # sphere() calls it too
    score_matching.rademacher = slicing(projections["rademacher"])  # the probes of likelihood
    score_matching.PROJECTIONS["rademacher"] = slicing(projections["rademacher"])
    try:
        yield
    finally:
        score_matching.gaussian_like = gaussian
        score_matching.rademacher = projections["rademacher"]
        score_matching.PROJECTIONS.update(projections)


def gradients(rank=0, world=1, wrap=lambda objective: objective):
    """Loss and gradients of two steps in a row (the second finds what the first left after)."""
    found = {}
    for name, make in OBJECTIVES.items():
        model = make_model(dtype=torch.float64)
        model.initialize(make_data(50, dtype=torch.float64))
        objective = make(model, world) if name == "stochastic" else make(model)
        for term in objective.modules():
            if isinstance(term, ebf.objectives.Objective) and hasattr(term, "generator"):
                term.generator = torch.Generator().manual_seed(7)
        called = wrap(objective)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for step in range(2):
            x = make_data(ROWS, seed=step, dtype=torch.float64).chunk(world)[rank]
            for parameter in parameters:
                parameter.grad = None
            with shared_noise(rank, world):
                loss = called(x, None)
            torch.autograd.backward(loss, inputs=parameters)
            found[f"{name}.{step}"] = [loss.detach(), *(p.grad for p in parameters)]
    return found


def train(folder, name, steps, rank=0, world=1, blind=False):
    """A run of fit(), with 20 rows in the joined batch."""
    model = make_model(seed=rank, dtype=torch.float64)  # the first process's weights must win
    if blind:  # a parameter that no loss depends on
        model.flow.register_parameter("idle", torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)))
    objective = ebf.make_objective(name, model)
    noise = []

    def keep(event):
        noise.append(objective.generator.get_state().sum().item())

    result = fit(
        objective,
        make_data(100, dtype=torch.float64),
        steps=steps,
        batch_size=20 // world,
        validation=make_data(300, seed=1, dtype=torch.float64),
        evaluate_every=4,
        checkpoint_every=4,
        ema=True,
        conditioning=0.0 if name == "ml" else 0.01,
        checkpoint=folder,
        callbacks=[keep],
        progress=False,
    )
    return {"weights": model.state_dict(), "history": list(result.history), "noise": noise, "best": result.best_state}


def main():
    folder = Path(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = {
        "ml": train(folder / "ml", "ml", 12, rank, world),
        "whole": train(folder / "whole", "ssm", 12, rank, world),
        "blind": train(folder / "blind", "ssm", 4, rank, world, blind=True),
        "part": train(folder / "parts", "ssm", 4, rank, world),
        "parts": train(folder / "parts", "ssm", 12, rank, world),
    }
    found["gradients"] = gradients(rank, world, lambda objective: parallel(objective, torch.device("cpu")))
    for values in found["gradients"].values():
        distributed.all_reduce(values[0])
        values[0] /= world
    torch.save(found, folder / f"found-{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
