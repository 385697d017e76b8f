"""Runs of Lightning's Trainer in one of several processes, or alone with the joined batches.

Usage: torchrun … lightning_runs.py folder. Each process writes what it found.
"""

import os
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import ebflow_plugin as ebf
from ebflow_plugin.lightning import ConditionGuard, ExactNLL, FiniteGuard, LitObjective
from ebflow_plugin.objectives import score_matching, stochastic
from training_models import make_data, make_model

ROWS = 12
PROBES = 4 // int(os.environ.get("WORLD_SIZE", "1"))
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}
OBJECTIVES = {
    "sm": ebf.objectives.SM,
    "ssm": lambda model: ebf.objectives.SSM(model, projections=2),
    "dsm": lambda model: ebf.objectives.DSM(model, sigma=0.5),
    "fdssm": lambda model: ebf.objectives.FDSSM(model, eps=0.5),
    "ml": ebf.objectives.ML,
    "stochastic": lambda model: ebf.objectives.ML(model, log_det="stochastic", probes=PROBES, tolerance=1e-12),
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
    signs = stochastic.signs_like
    score_matching.gaussian_like = slicing(gaussian)  # sphere() calls it too
    stochastic.signs_like = slicing(signs)  # the probes of likelihood
    score_matching.PROJECTIONS["rademacher"] = slicing(projections["rademacher"])
    try:
        yield
    finally:
        score_matching.gaussian_like = gaussian
        stochastic.signs_like = signs
        score_matching.PROJECTIONS.update(projections)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


class SameNoise(LitObjective):
    """Draws the noise of the joined batch in every process; each takes its own rows of it."""

    def setup(self, stage):
        super().setup(stage)
        self._noise = {term: torch.Generator().manual_seed(7) for _, term in self.objective.pairs()}

    def training_step(self, batch, batch_idx):
        with shared_noise(self.global_rank, self.trainer.world_size):
            return super().training_step(batch, batch_idx)


class Sharded(SameNoise):
    def configure_model(self):
        fully_shard(self.objective, mesh=self.device_mesh["data_parallel"])


def started_model(seed=0):
    model = make_model(seed=seed, dtype=torch.float64)
    model.initialize(make_data(50, dtype=torch.float64))
    return model


def own_batches(rank, world, weighted=False):
    """Three batches: in each process its rows of the joined ones, and their weights, if they have any."""
    joined = make_data(3 * ROWS, dtype=torch.float64)
    own = [batch.chunk(world)[rank] for batch in joined.split(ROWS)]
    heavy = [batch.chunk(world)[rank] for batch in torch.arange(3 * ROWS).double().split(ROWS)]
    return DataLoader([(x, None, w) for x, w in zip(own, heavy, strict=True)] if weighted else own, batch_size=None)


def whole_weights(model):
    """The weights as plain tensors; those of a sharded model gathered."""
    state = model.state_dict().items()
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for name, t in state}


def steps(make, rank=0, world=1, strategy="auto", kind=SameNoise, callbacks=(), weighted=False):
    """The weights after three steps, each of one joined batch."""
    model = started_model(seed=rank)  # the first process's weights must win
    if kind is Sharded:
        model = started_model()
    trainer = Trainer(
        max_epochs=1,
        strategy=strategy,
        devices=world,
        use_distributed_sampler=False,
        callbacks=list(callbacks),
        **QUIET,
    )
    trainer.fit(kind(make(model), sgd), own_batches(rank, world, weighted))
    return whole_weights(model)


def epochs(count, folder=None, ckpt_path=None, strategy="auto", world=1):
    """A run with shuffled data, an ActNorm that waits for data, noise, and rows that do not fill the last batch."""
    seed_everything(0, verbose=False)
    model = make_model()
    module = LitObjective(ebf.objectives.SSM(model))
    noise = []
    trainer = Trainer(max_epochs=count, strategy=strategy, devices=world, callbacks=[ExactNLL()], **QUIET)
    train = DataLoader(make_data(64), batch_size=16 // world, shuffle=True)
    trainer.fit(module, train, DataLoader(make_data(101, seed=1), batch_size=16), ckpt_path=ckpt_path)
    if folder is not None:
        trainer.save_checkpoint(folder / "last.ckpt")
    noise = [generator.get_state().sum().item() for generator in module._noise.values()]
    with torch.no_grad():
        nll = -model.log_prob(make_data(101, seed=1)).mean().item()
    return {
        "weights": whole_weights(model),
        "noise": noise,
        "val_nll": trainer.callback_metrics["val_nll"].item(),
        "nll": nll,
    }


def main():
    folder = Path(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = {name: steps(make, rank, world, "ddp") for name, make in OBJECTIVES.items()}
    found["sml"] = steps(ebf.objectives.SML, rank, world, "ddp")
    for name in ("ssm", "ml"):
        found[f"weighted {name}"] = steps(OBJECTIVES[name], rank, world, "ddp", weighted=True)
    found["run"] = epochs(3, strategy="ddp", world=world)
    epochs(2, folder, strategy="ddp", world=world)
    found["resumed"] = epochs(3, ckpt_path=folder / "last.ckpt", strategy="ddp", world=world)
    for name in ("ssm", "ml"):
        strategy = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
        watched = [ConditionGuard(), FiniteGuard()]
        found[f"sharded {name}"] = steps(OBJECTIVES[name], rank, world, strategy, Sharded, watched)
    torch.save(found, folder / f"found-{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main()
