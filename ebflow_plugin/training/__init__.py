"""Training: objectives go in, trained weights come out.

``fit`` is a short loop that needs torch alone (:mod:`~ebflow_plugin.training.fitting`). All that is serious, such as
checkpoints, resuming and several devices, is Lightning's: :mod:`ebflow_plugin.lightning` has our pieces for it.
"""

from ebflow_plugin.training.ema import EMA
from ebflow_plugin.training.events import Event
from ebflow_plugin.training.files import load_best
from ebflow_plugin.training.fitting import FitResult, fit
from ebflow_plugin.training.optimizers import parameter_groups

__all__ = ["EMA", "Event", "FitResult", "fit", "load_best", "parameter_groups"]
