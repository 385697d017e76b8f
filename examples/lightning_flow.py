"""An nflows model that was trained by likelihood in Lightning is trained by score matching: three lines are others.

    pip install lightning && python examples/lightning_flow.py   # about 30 seconds on one core

The Trainer stays as it is, with its checkpoints, precision, loggers, DDP and sharding. `ExactNLL` logs what score
matching itself never computes, with averaged weights.
"""

import logging
import os

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from nflows import distributions, flows, transforms
from torch.utils.data import DataLoader

import ebflow_plugin as ebf
from ebflow_nflows import FullLinear, SmoothLeakyReLU
from ebflow_plugin.lightning import AveragedWeights, ExactNLL, LitObjective  # changed, 1: the import

DIM, EPOCHS = 64, 1 if os.environ.get("EBFLOW_SMOKE") else 8
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
seed_everything(0, verbose=False)
turn, turn_again = (torch.linalg.qr(torch.randn(DIM, DIM))[0] for _ in range(2))
data = torch.nn.functional.leaky_relu(torch.randn(12_000, DIM) @ turn, 0.4) @ turn_again
train, test = DataLoader(data[2_000:], batch_size=100, shuffle=True), DataLoader(data[:2_000], batch_size=500)


def make_flow() -> flows.Flow:
    """Two full layers of 64 x 64, whose determinants are what likelihood pays for."""
    steps = [transforms.ActNorm(DIM), FullLinear(DIM), SmoothLeakyReLU(0.4), FullLinear(DIM)]
    return flows.Flow(transforms.CompositeTransform(steps), distributions.StandardNormal([DIM]))


class ByLikelihood(LightningModule):
    """What was there before."""

    def __init__(self, flow: flows.Flow) -> None:
        super().__init__()
        self.flow = flow

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        """The negative log-likelihood."""
        return -self.flow.log_prob(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), 1e-3)


flow = make_flow()
Trainer(max_epochs=EPOCHS, **QUIET).fit(ByLikelihood(flow), train)
print(f"by likelihood      exact test NLL {-flow.log_prob(data[:2_000]).mean():.3f}", flush=True)
flow = make_flow()
module = LitObjective(ebf.objectives.SSM(ebf.wrap(flow)), lambda p: torch.optim.Adam(p, 1e-3))  # changed, 2: the loss
trainer = Trainer(max_epochs=EPOCHS, callbacks=[ExactNLL(), AveragedWeights(0.99)], **QUIET)  # changed, 3
trainer.fit(module, train, test)
print(f"by score matching  exact test NLL {trainer.callback_metrics['val_nll']:.3f}")
