"""Runs in Trainers of Lightning's and of ours, some of them cut short, and what they recorded."""

import signal

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, TensorDataset

import accelerator as pretend
import ebflow_plugin as ebf
from ebflow_plugin.lightning import Checkpoints, LitObjective, Loader, trainer
from training_models import CrashError, adam, make_data, make_model, weights

QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


def train(module, x, validation=None, epochs=1, size=32, ckpt_path=None, shuffle=False, **options):
    """A run of a Trainer; gives it back."""
    options = {"enable_checkpointing": False, **QUIET, **options}
    trainer = Trainer(max_epochs=epochs, **options)
    data = x if isinstance(x, TensorDataset) else TensorDataset(x)
    held_out = None if validation is None else DataLoader(validation, batch_size=40)
    trainer.fit(module, DataLoader(data, batch_size=size, shuffle=shuffle), held_out, ckpt_path=ckpt_path)
    return trainer


class Cut(Callback):
    """Ends a run after a step: by an error in the next one, or by Ctrl-C."""

    def __init__(self, step, presses=0):
        self.step, self.presses = step, presses

    def on_train_batch_start(self, trainer, module, batch, index):
        if not self.presses and trainer.global_step == self.step:
            raise CrashError

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.global_step == self.step:
            for _ in range(self.presses):
                signal.raise_signal(signal.SIGINT)


class Seen(Callback):
    """Keeps what each validation found; part of the checkpoints."""

    def __init__(self):
        self.rows = []

    def on_validation_end(self, trainer, module):
        self.rows.append([trainer.global_step, *module.evaluated.likelihood])

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]


class Pretend(Accelerator):
    """The pretend accelerator, as Lightning wants it."""

    def setup_device(self, device):
        assert device == pretend.DEVICE

    def teardown(self):
        pass

    def get_device_stats(self, device):
        return {}

    @staticmethod
    def parse_devices(devices):
        return [pretend.DEVICE]

    @staticmethod
    def get_parallel_devices(devices):
        return [pretend.DEVICE]

    @staticmethod
    def auto_device_count():
        return 1

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def name():
        return "pretend"


def on_the_accelerator():
    """The strategy of a Trainer that trains on the pretend accelerator."""
    return SingleDeviceStrategy(device=pretend.DEVICE, accelerator=Pretend())


def run(folder, cut=None, *, data=None, batch=8, objective=None, model=None, rate=0.01, scheduler=None, **options):
    """A run of 20 steps of 8 rows, 6 in an epoch; resumes if there is a checkpoint. Its model, records and trainer."""
    seed_everything(0, verbose=False)
    model = make_model() if model is None else model
    loss = 0.5 * ebf.objectives.SSM(model) + 0.5 * ebf.objectives.DSM(model) if objective is None else objective(model)
    schedule = scheduler or (lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5))
    seen = Seen()
    length = {} if {"steps", "epochs"} & set(options) else {"steps": 20}
    made = trainer(
        folder,
        callbacks=[seen, *options.pop("callbacks", ()), *([] if cut is None else [cut])],
        enable_progress_bar=False,
        **{"ema": 0.9, "evaluate_every": 4, **length, **options},
        **({} if "strategy" in options else {"accelerator": "cpu"}),
    )
    kept = next((each for each in made.callbacks if isinstance(each, Checkpoints)), None)
    rows = make_data(50) if data is None else data
    made.fit(
        LitObjective(loss, adam(rate), schedule),
        Loader(rows, batch) if isinstance(rows, torch.Tensor) else rows,
        Loader(make_data(60, seed=1), 25, shuffle=False),
        ckpt_path=None if kept is None else kept.last,
    )
    return weights(model), seen.rows, made
