"""fit(): training with validation, checkpoints and guards. The loop is in :mod:`ebflow_plugin.training.loop`."""

from ebflow_plugin.training.checkpoints import load_best
from ebflow_plugin.training.fitting import FitResult, fit
from ebflow_plugin.training.progress import Event

__all__ = ["Event", "FitResult", "fit", "load_best"]
