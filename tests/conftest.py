"""One thread for each worker: the tests run side by side, and small tensors gain nothing from more."""

import torch

torch.set_num_threads(1)
