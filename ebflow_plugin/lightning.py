"""Objectives in Lightning's Trainer, and callbacks for what only an energy-based flow needs.

Lightning does checkpoints, resume, precision, clipping, accumulation, averaging of weights, loggers, DDP and sharding.
Needs the extra: ``pip install ebflow-plugin[lightning]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DistributedSampler

from ebflow_plugin.errors import InputError
from ebflow_plugin.inputs import one_of, whole
from ebflow_plugin.objectives import Objective
from ebflow_plugin.objectives.base import waits_for_data
from ebflow_plugin.training.batches import Batch, pair, refuse_useless_context
from ebflow_plugin.training.distributed import Processes, processes
from ebflow_plugin.training.evaluation import LikelihoodSum
from ebflow_plugin.training.guards import NEAR_SINGULAR, ConditionWatch, FiniteWatch, diagnose, failure
from ebflow_plugin.training.options import optimizer_of, scheduler_of
from ebflow_plugin.training.randomness import lend, mix, noise_of, random_state, set_random_state
from ebflow_plugin.training.spectrum import full_layers

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("ebflow_plugin.lightning needs Lightning: pip install ebflow-plugin[lightning]") from error

__all__ = ["Calibrate", "ConditionGuard", "DataDependentStart", "ExactNLL", "FiniteGuard", "LitObjective"]

ADVICE = (
    "Lower the learning rate, clip gradients (Trainer(gradient_clip_val=…)), or mix in a little likelihood: "
    "0.99 * SSM(model) + 0.01 * ML(model)."
)


class LitObjective(LightningModule):
    """An objective as a LightningModule: what ``Trainer.fit`` takes.

    Batches are tensors x, or pairs (x, context). It logs ``train_loss`` and ``val_loss``, the latter with the same
    noise each time. Each process draws noise of its own, seeded by ``seed_everything``; checkpoints hold its state, so
    that a run that goes on from the end of an epoch equals one that was never interrupted. The data-dependent start of
    ActNorms is run once for all processes (:class:`DataDependentStart`).

    Arguments:
        objective: The loss; it holds the model.
        optimizer: As in :func:`~ebflow_plugin.fit`: a function that makes one from the parameters, or an optimizer;
            Adam with a learning rate of 0.001 by default.
        scheduler: A function that makes a learning-rate schedule from the optimizer, or a schedule. It moves at each
            step; ``ReduceLROnPlateau`` at each validation, by the ``val_nll`` of :class:`ExactNLL`.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> module = LitObjective(ebf.objectives.SSM(model), optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
        >>> module.training_step(torch.zeros(5, 2), 0).shape
        torch.Size([])
    """

    def __init__(
        self,
        objective: Objective,
        optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None = None,
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(objective, Objective) or objective.reduction != "mean":
            raise InputError(
                'LitObjective needs an objective with reduction="mean", such as ebf.objectives.SSM(model), got '
                f"{objective if isinstance(objective, Objective) else type(objective).__name__}"
            )
        self.objective = objective
        self.model = objective.model
        self._optimizer, self._scheduler = optimizer, scheduler
        self._noise: dict[Objective, Generator] = {}

    def setup(self, stage: str) -> None:
        """Seeds the noise of this process."""
        self._noise = noise_of(self.objective, torch.initial_seed(), self.global_rank)

    def configure_callbacks(self) -> list[Callback]:
        """Adds what no run can do without."""
        there = any(isinstance(callback, DataDependentStart) for callback in self.trainer.callbacks)
        return [] if there else [DataDependentStart()]

    def configure_optimizers(self) -> Any:
        """The optimizer, and the schedule."""
        optimizer = optimizer_of(self.objective, self._optimizer)
        scheduler = scheduler_of(optimizer, self._scheduler, validated=True)
        if scheduler is None:
            return optimizer
        plateau = isinstance(scheduler, ReduceLROnPlateau)
        steps = {"scheduler": scheduler, "interval": "epoch" if plateau else "step", "monitor": "val_nll"}
        return {"optimizer": optimizer, "lr_scheduler": steps}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a batch."""
        x, context = pair(batch)
        with lend(self._noise):
            loss: Tensor = self.objective(x, context)
        if self._trainer is not None:
            self.log("train_loss", loss, prog_bar=True, batch_size=len(x))
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """The loss of a batch, with the same noise each time."""
        x, context = pair(batch)
        generator = Generator(self.device).manual_seed(mix("validation", self.global_rank, batch_idx))
        with lend(dict.fromkeys(self._noise, generator)):
            self.log("val_loss", self.objective(x, context), batch_size=len(x), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the state of all generators, in the order of the processes."""
        mine = random_state(self.device, list(self._noise.values()))
        checkpoint["ebflow_plugin"] = {"random": processes(self.device).gather(mine)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Goes on with the noise where the checkpoint left it, if it has as many processes."""
        random = checkpoint.get("ebflow_plugin", {}).get("random", [])
        if self._noise and len(random) == self.trainer.world_size:
            set_random_state(random[self.global_rank], self.device, list(self._noise.values()))


class DataDependentStart(Callback):
    """Runs the data-dependent start of a flow before the first step, once for all processes.

    Every :class:`LitObjective` has one, which initialises ActNorms on the first batch of the first process. Pass one
    to the Trainer to start from the whole training data instead.

    Arguments:
        whiten: As in :meth:`EBFlow.initialize <ebflow_plugin.EBFlow.initialize>`.
        gaussianize: As there.
    """

    def __init__(self, whiten: bool = False, gaussianize: bool = False) -> None:
        self._options = {"whiten": whiten, "gaussianize": gaussianize}

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Goes through the training data, if asked for, unless a run goes on."""
        if any(self._options.values()) and not trainer.global_step:
            group = _whole(module, "whitens them")
            module.model.initialize(_training_data(trainer, module), **self._options)
            group.spread([*module.parameters(), *module.buffers()])

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Looks at the first batch: initialises what waits for data, and refuses labels that nobody uses."""
        if trainer.global_step or batch_idx:
            return
        x, context = pair(batch)
        model = module.model
        if not _is_sharded(module):
            refuse_useless_context(model, x, context)
        if any(not getattr(step, "initialised", True) for step in model.core.plan.steps):
            group = _whole(module, "initialises ActNorms")
            group.on_first(lambda: model.initialize(x, context))
            group.spread([*module.parameters(), *module.buffers()])


class ExactNLL(Callback):
    """Logs the exact NLL of the validation data: ``val_nll``, and ``val_bits_per_dim``.

    With the weights that validation has: the averaged ones beside a ``WeightAveraging`` callback. Rows that a
    DistributedSampler repeats to fill a batch count once. Choose by it: ``ModelCheckpoint(monitor="val_nll")``,
    ``EarlyStopping("val_nll")``.

    Arguments:
        calibrate: ``"full"`` or ``"diagonal"``: calibrates the model on the training data first, for the duration of
            the validation, and logs ``val_nll_uncalibrated`` too. One pass over the training data each time.
        seed: Where the noise of a :class:`~ebflow_plugin.Dequantize` comes from; the same each time.
    """

    def __init__(self, calibrate: str | None = None, seed: int = 0) -> None:
        self._kind = None if calibrate is None else one_of("calibrate", calibrate, ("full", "diagonal"))
        self._seed = seed
        self._sums: dict[int, tuple[LikelihoodSum, list[int]]] = {}
        self._kept: dict[str, Tensor | None] | None = None

    def on_validation_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Adds up the NLL; by now every callback that changes the weights for the validation has done so."""
        if not self._sums and self._kind is not None and trainer.train_dataloader is not None:
            calibration = module.model.calibration
            self._kept = {name: getattr(calibration, name) for name in calibration.names}
            _calibrate(trainer, module, self._kind)
        if dataloader_idx not in self._sums:
            total = LikelihoodSum(module.model, self._seed, processes(module.device))
            self._sums[dataloader_idx] = total, [_own_rows(trainer, dataloader_idx)]
        total, left = self._sums[dataloader_idx]
        x, context = pair(batch)
        rows = min(len(x), left[0])
        left[0] -= rows
        total.add(x[:rows], None if context is None else context[:rows])

    def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Logs the means, and gives the model its own calibration back."""
        for place, (total, _) in self._sums.items():
            found = total.mean()._asdict()
            found["nll_uncalibrated"] = found.pop("uncalibrated")
            end = f"/dataloader_idx_{place}" if len(self._sums) > 1 else ""
            for name, value in found.items():
                if self._kept is not None or name != "nll_uncalibrated":
                    module.log(f"val_{name}{end}", value, prog_bar=name == "nll", sync_dist=True)
        if self._kept is not None:
            module.model.calibration.set(**self._kept)
        self._sums, self._kept = {}, None


class Calibrate(Callback):
    """Calibrates the model on the training data at the end of training, after the averaged weights are in place.

    The model keeps the calibration: ``trainer.validate`` and ``trainer.save_checkpoint`` afterwards have it.

    Arguments:
        kind: ``"full"`` or ``"diagonal"``; see :meth:`EBFlow.calibrate <ebflow_plugin.EBFlow.calibrate>`.

    Attributes:
        report: The NLL of held-out rows before and after.
    """

    def __init__(self, kind: str = "full") -> None:
        self._kind = one_of("kind", kind, ("full", "diagonal"))
        self.report: Any = None

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Calibrates."""
        self.report = _calibrate(trainer, module, self._kind)


class ConditionGuard(Callback):
    """Logs the largest condition number of the full layers (``condition``), and warns once of each near a singular one.

    Arguments:
        every: Steps between two looks; there is one at the end of each epoch too.
        limit: The condition number to warn at.
    """

    def __init__(self, every: int = 1000, limit: float = NEAR_SINGULAR) -> None:
        self._every, self._watch = whole("every", every), ConditionWatch([], limit, advice=ADVICE)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Looks, when it is time."""
        if trainer.global_step % self._every == 0 or trainer.is_last_batch:
            model = module.model
            u, _ = model.preprocess(pair(batch)[0][:1], Generator(module.device).manual_seed(0))
            self._watch.layers = full_layers(model.core.plan, tuple(u.shape[1:]))
            found = self._watch.look(trainer.global_step)
            if found:
                module.log("condition", max(spectrum.condition for spectrum in found.values()))


class FiniteGuard(Callback):
    """Stops with an error that names the step and the layer where a loss or a gradient is not finite.

    Gradients are not looked at where a GradScaler does so (``precision="16-mixed"``).

    Arguments:
        every: Steps between two looks. A look waits for the device; the step that is named is the first bad one.
    """

    def __init__(self, every: int = 1) -> None:
        self._every = whole("every", every)
        self._watch: FiniteWatch | None = None
        self._batch: Any = None
        self._loss: Tensor | None = None

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keeps the batch, to look into it if it is bad."""
        self._batch = batch

    def on_before_backward(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        """Keeps the loss."""
        self._loss = loss.detach()

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        """Looks at the gradients, before they are clipped."""
        trained = {name: p for name, p in module.model.named_parameters() if p.requires_grad}
        if self._watch is None:
            self._watch = FiniteWatch(list(trained), processes(module.device))
        assert self._loss is not None
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        zero = self._loss.new_zeros(())
        norms = [zero if p.grad is None or scaled else _local(p.grad).norm().to(zero) for p in trained.values()]
        step = trainer.global_step + 1
        self._watch.see(step, self._loss, torch.stack(norms))
        finding = self._watch.look() if step % self._every == 0 else None
        if finding is not None:
            lines = diagnose(module.model, *pair(self._batch)) if finding.step == step else []
            raise failure(module.model, finding, lines, ADVICE)


def _training_data(trainer: Trainer, module: LightningModule) -> Iterator[Batch]:
    """This process's part of the training data, on its device; what is drawn afterwards does not change by it."""
    kept = random_state(module.device, [])
    try:
        for batch in trainer.train_dataloader:
            yield pair(trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch), module.device))
    finally:
        set_random_state(kept, module.device, [])
