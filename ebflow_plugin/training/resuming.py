"""What Lightning lacks to keep our promises: a run that is killed at any moment resumes to the same numbers."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import distributed

from ebflow_plugin.errors import EBFlowError, InputError, ResumeWarning, warn
from ebflow_plugin.options import at_least, path_of
from ebflow_plugin.training.ema import EMA, decay_of
from ebflow_plugin.training.files import BEST, atomic_write, latest, read, read_first
from ebflow_plugin.training.fitting import evaluate_every_default
from ebflow_plugin.training.lightning import ExactNLL, FiniteGuard

KEPT = 2  # checkpoints
INTERRUPTED = 130  # the exit code of Ctrl-C


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints completely or not at all, and falls back to the one before if one cannot be read.

    Lightning's own are not atomic if ``$TMPDIR`` is another file system than the folder's. No code in a file is run:
    it may hold tensors, numbers, strings, lists and dictionaries.
    """

    def __init__(self) -> None:
        self._readable = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, lambda file: torch.save(checkpoint, file))
        if not self._readable:  # the first one tells whether a resumed run will be able to read them
            try:
                read(path)
            except InputError as error:
                path.unlink(missing_ok=True)
                raise InputError(
                    f"the state of this run cannot be read back: {error}. The states of optimizers, schedulers and "
                    "callbacks must hold only tensors, numbers, strings, lists and dictionaries."
                ) from None
            self._readable = True

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(path)
        older = (other for other in latest(path.parent) if other.name < path.name)
        return read_first([path, *older], "cpu" if map_location is None else map_location)


class AveragedWeights(Callback):
    """The moving average of :class:`~ebflow_plugin.EMA` in Lightning: validated, and saved as the weights.

    Lightning's ``EMAWeightAveraging`` averages buffers too, integers among them, has no warm-up, and synchronises with
    the device in each step. After training the model has the averaged weights. Averages of half-precision weights are
    rounded to that precision in a checkpoint.

    Arguments:
        decay: The decay, at least 0 and below 1.

    Attributes:
        ema: The average, once a run has begun.
    """

    ema: EMA

    def __init__(self, decay: float = 0.999) -> None:
        self._decay, self._step, self._swap = decay_of(decay), 0, ExitStack()

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        if stage == "fit":
            self.ema = EMA(module.objective.model, self._decay)

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self._step = trainer.global_step
        self._begin(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        self._begin(trainer)  # again: the first batch may have initialised an ActNorm

    def _begin(self, trainer: Trainer) -> None:
        """The weights before the first step are the first ones of the average."""
        if trainer.global_step == 0:
            self.ema.restart()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if trainer.global_step > self._step:  # gradients may accumulate over batches
            self.ema.update()
            self._step = trainer.global_step

    def on_validation_epoch_start(self, trainer: Trainer, module: Any) -> None:
        if trainer.state.fn == "fit":
            self._swap.enter_context(self.ema.applied())

    def on_validation_epoch_end(self, trainer: Trainer, module: Any) -> None:
        self._swap.close()

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        self.ema.copy_to()

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        self._swap.close()

    def on_save_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        own = checkpoint["state_dict"]
        with self.ema.applied():
            averaged = trainer.strategy.lightning_module_state_dict()
            averaged = {name: tensor.clone() for name, tensor in averaged.items()}
        checkpoint.update(state_dict=averaged, current_model_state=own, averaged=self.ema.updates)

    def on_load_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self.ema.restart()  # by now the module has the averages, if there were any
        if "averaged" in checkpoint:
            self.ema.updates = checkpoint["averaged"]
            module.load_state_dict(checkpoint["current_model_state"])


class Checkpoints(Checkpoint):
    """Checkpoints of a run in a folder, after each validation: the last two, and the one with the best exact NLL.

    ``step-00001000.ckpt`` holds all that a resumed run needs, ``best.ckpt`` the weights with the lowest NLL (of an
    :class:`~ebflow_plugin.lightning.ExactNLL`), which :func:`~ebflow_plugin.load_best` reads. There is a validation
    after the last step too. On Ctrl-C the current step is completed and saved, and the process exits with 130.

    Arguments:
        folder: Where they go.
        patience: Stops after this many validations without a better NLL.
        hint: Printed on Ctrl-C: how to go on.

    Attributes:
        best_nll: The lowest NLL so far, and ``best_step`` its step.
        stopped: Why the run ended: ``"steps"`` or ``"patience"``.
    """

    def __init__(self, folder: str | os.PathLike[str], patience: int | None = None, hint: str | None = None) -> None:
        self.folder, self._hint = path_of("folder", folder), hint
        self._patience = None if patience is None else at_least(1, "patience", patience)
        self.best_nll: float | None = None
        self.best_step: int | None = None
        self._stale, self._asked, self._process, self._listening = 0, False, os.getpid(), False

    @property
    def stopped(self) -> str:
        """Why the run ended."""
        return "steps" if self._patience is None or self._stale < self._patience else "patience"

    @property
    def last(self) -> Path | None:
        """The latest checkpoint: the ``ckpt_path`` of ``trainer.fit``."""
        return next(iter(latest(self.folder)), None)

    def state_dict(self) -> dict[str, Any]:
        return {"best_nll": self.best_nll, "best_step": self.best_step, "stale": self._stale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_nll, self.best_step = state_dict["best_nll"], state_dict["best_step"]
        self._stale = state_dict["stale"]

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                atomic_write(self.folder / ".writable", lambda file: file.write(b""))
                (self.folder / ".writable").unlink(missing_ok=True)
            except OSError as error:
                raise InputError(f"the checkpoint folder {self.folder} cannot be written to: {error}") from error

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        """Refuses the folder of another run. If the best weights of this one are lost, takes those of its last step."""
        if trainer.ckpt_path is None and self.last is not None:
            raise InputError(
                f"{self.folder} holds a run already: trainer.fit(…, ckpt_path={str(self.last)!r}) goes on with it; "
                "remove its checkpoints, or choose another folder, to begin a new one"
            )
        if self.best_step is None:
            return
        try:
            read(self.folder / BEST)
        except InputError as error:
            warn(f"the best weights so far are lost: {error}", ResumeWarning)
            self.best_nll = self.best_step = None
            path = self.last
            state = {} if path is None else read_first(latest(self.folder))
            if path is not None and state["ebflow_plugin"]["nll"] is not None:
                self.best_nll, self.best_step = state["ebflow_plugin"]["nll"], state["global_step"]
                if trainer.is_global_zero:
                    atomic_write(self.folder / BEST, lambda file: torch.save(state, file))

    def teardown(self, trainer: Trainer, module: Any, stage: str) -> None:
        self._listen_no_more()

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        self._listen_no_more()
        if self._asked and isinstance(exception, Exception) and not isinstance(exception, EBFlowError):
            # Ctrl-C also reaches the workers of a DataLoader, which then fail first.
            self._exit("stopped; " + self._how(self.last))

    def _listen_no_more(self) -> None:
        if self._listening and signal.getsignal(signal.SIGINT) == self._interrupt:  # it was not replaced since
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._listening = False

    def _interrupt(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:  # a forked worker, which the main process will end
            return
        if self._asked:
            self._exit("stopped at once; " + self._how(self.last))
        self._asked = True
        _say("\nStopping when this step is saved; Ctrl-C again stops at once.")

    def _exit(self, message: str) -> None:
        _say(message)
        raise SystemExit(INTERRUPTED)

    def _how(self, path: Path | None) -> str:
        if path is None:
            return "there is no checkpoint yet"
        return self._hint or f"trainer.fit(…, ckpt_path={str(path)!r}) goes on"

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        # One process alone: several would not stop in the same step. Not if the user has a handler.
        free = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if free and trainer.world_size == 1 and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._interrupt)
            self._listening, self._process = True, os.getpid()
        self._select(trainer, module)  # the start may have the best weights of the run
        if self.stopped == "patience":
            trainer.should_stop = True

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        last_batch = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        if trainer.max_steps == trainer.global_step or last_batch:
            trainer.should_stop = True  # which makes Lightning validate after the last step
        # A checkpoint before a validation would resume after it.
        loop = trainer.fit_loop
        if self._asked and loop._data_fetcher and not loop.epoch_loop._should_check_val_fx(loop._data_fetcher):
            self._save(trainer)
            self._exit(f"stopped after step {trainer.global_step}; " + self._how(self.last))

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._select(trainer, module)
        self._save(trainer)
        if self.stopped == "patience":
            trainer.should_stop = True
        if self._asked:
            self._exit(f"stopped after step {trainer.global_step}; " + self._how(self.last))

    def _select(self, trainer: Trainer, module: Any) -> None:
        found = getattr(module, "evaluated", None)
        if found is None or found.step != trainer.global_step or found.step == self.best_step:
            return
        self._stale += 1
        nll = found.likelihood.nll
        if self.best_nll is None or nll < self.best_nll:
            self.best_nll, self.best_step, self._stale = nll, found.step, 0
            trainer.save_checkpoint(self.folder / BEST, weights_only=False)

    def _save(self, trainer: Trainer) -> None:
        """Saves a checkpoint, then removes all but the last two, and what killed processes left."""
        trainer.save_checkpoint(self.folder / f"step-{trainer.global_step:08d}.ckpt", weights_only=False)
        if trainer.is_global_zero:
            for old in (*latest(self.folder)[KEPT:], *self.folder.glob(".*.ckpt.*.tmp")):
                old.unlink(missing_ok=True)


def _say(text: str) -> None:
    with suppress(OSError, ValueError, RuntimeError):  # Ctrl-C may also have ended the reader of a pipe
        print(text, file=sys.stderr, flush=True)


def _leave_group() -> None:
    """Ends the process group: its threads may abort a process that exits before them. Lightning does it for NCCL."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def trainer(
    folder: str | os.PathLike[str] | None = None,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    evaluate_every: int | None = None,
    patience: int | None = None,
    ema: bool | float = False,
    calibrate: str | None = None,
    clip_norm: float | None = None,
    callbacks: Iterable[Callback] = (),
    hint: str | None = None,
    **options: Any,
) -> Trainer:
    """A Trainer of Lightning with all of our pieces, each of which can be used in a Trainer of your own.

    Pass it a :class:`LitObjective` and a :class:`Loader`, and the latest checkpoint to resume: after a kill at any
    moment the run has the same numbers as an uninterrupted one.

    A Trainer costs some 0.5 ms a step, and each ``self.log`` 0.7 ms: where a step takes 2 ms, ``ebflow_plugin.fit``
    is twice as fast; from 30 ms on there is no difference.

    Arguments:
        folder: The folder of :class:`Checkpoints`; None for no checkpoints.
        steps: The number of steps. This or ``epochs``.
        epochs: The number of epochs. This or ``steps``.
        evaluate_every: Steps between two validations. By default 20 in a run, and at least every 1000 steps; with
            ``epochs``, one after each.
        patience: Stops after this many validations without a better NLL.
        ema: The decay of :class:`AveragedWeights`; True for 0.999.
        calibrate: The ``calibrate`` of :class:`ExactNLL`.
        clip_norm: The largest norm of the gradient of all parameters together.
        callbacks: More callbacks.
        hint: What :class:`Checkpoints` says on Ctrl-C.
        options: All other options of Lightning's Trainer.

    Example:
        >>> import tempfile
        >>> import ebflow_plugin as ebf
        >>> from ebflow_plugin.lightning import LitObjective, Loader
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> x = 3.0 * torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
        >>> module = LitObjective(ebf.objectives.ML(model), lambda p: torch.optim.Adam(p, lr=0.01))
        >>> folder = tempfile.TemporaryDirectory()
        >>> run = trainer(folder.name, steps=40, ema=0.99, accelerator="cpu", enable_progress_bar=False)
        >>> run.fit(module, Loader(x[:400], 50), Loader(x[400:], shuffle=False), ckpt_path=run.checkpoint_callback.last)
        >>> ebf.load_best(model, folder.name)["step"]
        40
        >>> folder.cleanup()
    """
    if (steps is None) == (epochs is None):
        raise InputError(f"trainer needs either steps or epochs, got steps={steps!r} and epochs={epochs!r}")
    if steps is not None:
        evaluate_every = evaluate_every or evaluate_every_default(at_least(1, "steps", steps))
    pieces: list[Callback] = [ExactNLL(calibrate), *callbacks]
    if ema is not False:
        pieces.append(AveragedWeights(0.999 if ema is True else ema))
    pieces.append(FiniteGuard())
    if folder is not None:
        pieces.append(Checkpoints(folder, patience, hint))
    elif patience is not None:
        raise InputError("patience needs a folder: it is part of the checkpoints")
    atexit.unregister(_leave_group)
    atexit.register(_leave_group)
    given = {"logger": False, "enable_model_summary": False, "num_sanity_val_steps": 0, **options}
    return Trainer(
        callbacks=pieces,
        plugins=[AtomicCheckpointIO(), *given.pop("plugins", ())],
        max_steps=-1 if steps is None else steps,
        max_epochs=-1 if epochs is None else epochs,
        val_check_interval=evaluate_every,
        check_val_every_n_epoch=None if evaluate_every else 1,
        gradient_clip_val=clip_norm,
        enable_checkpointing=folder is not None,
        **given,
    )
