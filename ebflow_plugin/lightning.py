"""Training in Lightning: checkpoints, resuming, several devices, precision, accumulation, loggers.

:func:`trainer` has all of it in one call, and each piece works in a Trainer of your own:

- :class:`LitObjective`, an objective as a LightningModule; :class:`Loader`, batches that know their place
- :class:`ExactNLL`, the exact NLL of validation data, calibrated on request
- :class:`AveragedWeights`, a moving average that leaves buffers alone
- :class:`Checkpoints` and :class:`AtomicCheckpointIO`: a run that is killed at any moment resumes to the same numbers
- :class:`DataDependentStart`, :class:`FiniteGuard`, :class:`ConditionGuard`

Needs the extra: ``pip install ebflow-plugin[lightning]``. Importing it takes seconds, so nothing else here does.
"""

from ebflow_plugin.training.batches import Loader
from ebflow_plugin.training.lightning import (
    ConditionGuard,
    DataDependentStart,
    ExactNLL,
    FiniteGuard,
    LitObjective,
)
from ebflow_plugin.training.resuming import AtomicCheckpointIO, AveragedWeights, Checkpoints, trainer

__all__ = [
    "AtomicCheckpointIO",
    "AveragedWeights",
    "Checkpoints",
    "ConditionGuard",
    "DataDependentStart",
    "ExactNLL",
    "FiniteGuard",
    "LitObjective",
    "Loader",
    "trainer",
]
