"""Objectives in Lightning's Trainer, and callbacks that are specific to energy-based flows.

Lightning does checkpoints, resume, precision, clipping, accumulation, averaging of weights, loggers, DDP and sharding.
Needs the extra: ``pip install ebflow-plugin[lightning]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DistributedSampler

from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg.random import mix, random_state, set_random_state
from ebflow_plugin.objectives import Objective
from ebflow_plugin.objectives.checks import refuse_useless_context
from ebflow_plugin.objectives.evaluation import LikelihoodSum, calibrated
from ebflow_plugin.objectives.noise import noise_of, use_generators
from ebflow_plugin.plan.inputs import integer, one_of, pair
from ebflow_plugin.plan.spectrum import NEAR_SINGULAR, ConditionWatch, full_layers
from ebflow_plugin.training.checkpoints import write_weights
from ebflow_plugin.training.distributed import is_sharded, processes, start_once
from ebflow_plugin.training.guards import FiniteWatch, diagnose, failure, gradient_norms
from ebflow_plugin.training.options import optimizer_of, scalar_objective, scheduler_of

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("ebflow_plugin.lightning needs Lightning: pip install ebflow-plugin[lightning]") from error

__all__ = ["Calibrate", "ConditionGuard", "DataDependentStart", "ExactNLL", "FiniteGuard", "LitObjective"]

KINDS = ("full", "diagonal")
ADVICE = "Lower the learning rate, clip gradients, or mix in a little likelihood: 0.99 * SSM(model) + 0.01 * ML(model)."


class LitObjective(LightningModule):
    """An objective as a LightningModule, for ``Trainer.fit``.

    Batches are tensors x, or pairs (x, context). It logs ``train_loss`` and ``val_loss``, the latter with the same
    noise each time. Each process draws its own noise, seeded by ``seed_everything``. Checkpoints hold the state of the
    generators and of the objective, so a run resumed at the end of an epoch equals an uninterrupted one.

    Arguments:
        objective: The loss; it holds the model.
        optimizer: As in :func:`~ebflow_plugin.fit`: an optimizer, or a function that builds one from the parameters.
        scheduler: As in :func:`~ebflow_plugin.fit`. It is stepped after each step, ``ReduceLROnPlateau`` after each
            epoch with ``val_nll``.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> module = LitObjective(ebf.objectives.SSM(model), optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
        >>> type(module.configure_optimizers()).__name__
        'Adam'
    """

    def __init__(
        self,
        objective: Objective,
        optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None = None,
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        super().__init__()
        self.objective = scalar_objective("LitObjective", objective)
        self._optimizer, self._scheduler = optimizer, scheduler
        self._noise: dict[Objective, Generator] = {}

    def setup(self, stage: str) -> None:
        device = self.trainer.strategy.root_device
        self._noise = noise_of(self.objective, torch.initial_seed(), self.global_rank, device)

    def configure_callbacks(self) -> list[Callback]:
        given: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        return [] if any(isinstance(callback, DataDependentStart) for callback in given) else [DataDependentStart()]

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self.objective, self._optimizer)
        scheduler = scheduler_of(optimizer, self._scheduler, validated=True)
        if scheduler is None:
            return optimizer
        interval = "epoch" if isinstance(scheduler, ReduceLROnPlateau) else "step"
        return [optimizer], [{"scheduler": scheduler, "interval": interval, "monitor": "val_nll"}]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with use_generators(self._noise):
            loss: Tensor = self.objective(*pair(batch))
        self.log("train_loss", loss, prog_bar=True)
        self.last = batch, loss.detach()
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        generator, (x, context) = Generator(self.device), pair(batch)
        generator.manual_seed(mix("validation", self.global_rank, batch_idx))
        with use_generators(dict.fromkeys(self._noise, generator)):
            self.log("val_loss", self.objective(x, context), batch_size=len(x), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own = {"random": random_state(self.device, list(self._noise.values())), "objective": self.objective.state()}
        ranks = processes(self.device).gather(own)
        checkpoint["ebflow_plugin"] = {name: [each[name] for each in ranks] for name in own}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kept = checkpoint.get("ebflow_plugin", {})
        random, objective = (kept.get(name, ()) for name in ("random", "objective"))
        if self._noise and len(random) == self.trainer.world_size:  # otherwise the generators start anew
            set_random_state(random[self.global_rank], self.device, list(self._noise.values()))
        if len(objective) == self.trainer.world_size:  # otherwise its statistics do
            self.objective.load_state(objective[self.global_rank])


class DataDependentStart(Callback):
    """Runs the data-dependent start of a flow before the first step, once for all processes.

    Every :class:`LitObjective` adds one, which initialises ActNorms from the first batch of the first process. Pass one
    to the Trainer to start from all training data, as
    :meth:`EBFlow.initialize <ebflow_plugin.EBFlow.initialize>` does.
    """

    def __init__(self, whiten: bool = False, gaussianize: bool = False) -> None:
        self._options = {"whiten": whiten, "gaussianize": gaussianize}
        self._untouched: dict[str, Tensor] = {}

    def on_sanity_check_start(self, trainer: Trainer, module: Any) -> None:
        if module.objective.model.core_plan.uninitialised():  # validation data must not initialise an ActNorm
            self._untouched = {name: value.clone() for name, value in module.objective.model.state_dict().items()}

    def on_sanity_check_end(self, trainer: Trainer, module: Any) -> None:
        if self._untouched:
            write_weights(module.objective.model, self._untouched, "the weights before the sanity check")
            self._untouched = {}

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        if any(self._options.values()) and not trainer.global_step:  # a resumed run has started already
            module.objective.model.initialize(_TrainingData(trainer, module), **self._options)

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int) -> None:
        if trainer.global_step or index:
            return
        model, (x, context) = module.objective.model, pair(batch)
        start_once(model, x, context, processes(module.device), Generator(module.device).manual_seed(0))
        if not is_sharded(module):
            refuse_useless_context(model, x, context)


class ExactNLL(Callback):
    """Logs the exact NLL of the validation data, ``val_nll`` and ``val_bits_per_dim``, with the weights of validation.

    With Lightning's ``EMAWeightAveraging`` those are the averaged weights. Rows that a DistributedSampler repeats count
    once. Select models by it: ``ModelCheckpoint(monitor="val_nll")``.

    Arguments:
        calibrate: ``"full"`` or ``"diagonal"``: calibrates the model for the duration of each validation, which takes
            a pass over the training data, and logs ``val_nll_uncalibrated`` too.
        seed: The seed of the noise of a :class:`~ebflow_plugin.Dequantize`, the same each time.
    """

    def __init__(self, calibrate: str | None = None, seed: int = 0) -> None:
        self._kind = None if calibrate is None else one_of("calibrate", calibrate, KINDS)
        self._seed, self._sums = seed, list[LikelihoodSum]()

    def on_validation_start(self, trainer: Trainer, module: Any) -> None:
        self._sums = []  # drop the sums of a failed validation

    def on_validation_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int, place: int = 0) -> None:
        # At the first batch: by then every callback that swaps the weights for validation has done so.
        with _gathered(module):
            if not self._sums:
                model, group, given = module.objective.model, processes(module.device), trainer.val_dataloaders
                kind = None if trainer.sanity_checking else self._kind  # a sanity check has no training data
                loaders = given if isinstance(given, (list, tuple)) else [given]
                with calibrated(model, _TrainingData(trainer, module), kind):
                    for loader in loaders:
                        noise = Generator(module.device).manual_seed(mix(self._seed, "validation", group.rank))
                        self._sums.append(LikelihoodSum(model, noise, _own_rows(loader)))
            self._sums[place].add(*pair(batch))

    def on_validation_epoch_end(self, trainer: Trainer, module: Any) -> None:
        for place, total in enumerate(self._sums):
            nll, bits, uncalibrated = total.mean(processes(module.device).total)
            metrics = {"val_nll": nll, "val_bits_per_dim": bits}
            metrics |= {} if self._kind is None else {"val_nll_uncalibrated": uncalibrated}
            suffix = f"/dataloader_idx_{place}" if len(self._sums) > 1 else ""
            named = {name + suffix: value for name, value in metrics.items()}
            module.log_dict(named, prog_bar=True, sync_dist=True, add_dataloader_idx=False)


class Calibrate(Callback):
    """Calibrates the model at the end of training, after averaged weights are in place, and sets ``report``."""

    def __init__(self, kind: str = "full") -> None:
        self._kind = one_of("kind", kind, KINDS)
        self.report: Any = None

    def on_fit_end(self, trainer: Trainer, module: Any) -> None:
        with _gathered(module):
            self.report = module.objective.model.calibrate(_TrainingData(trainer, module), self._kind)


class ConditionGuard(Callback):
    """Logs the largest condition number of full layers, ``condition``, and warns once for each nearly singular one."""

    def __init__(self, every: int = 1000, limit: float = NEAR_SINGULAR) -> None:
        self._every, self._watch = integer("every", every), ConditionWatch([], limit, ADVICE)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if trainer.global_step % self._every and not trainer.is_last_batch:
            return
        model = module.objective.model
        with _gathered(module):
            u, _ = model.preprocess(pair(batch)[0][:1], Generator(module.device).manual_seed(0))
            self._watch.layers = full_layers(model.core.plan, tuple(u.shape[1:]))
            spectra = self._watch.check(trainer.global_step)
        if spectra:
            module.log("condition", max(spectrum.condition for spectrum in spectra.values()))


class FiniteGuard(Callback):
    """Stops with a :class:`TrainingError` that names the step and the layer where a loss or gradient is not finite.

    Gradients are left to the GradScaler if there is one (``precision="16-mixed"``). A check synchronises with the
    device; with ``every=10`` there are fewer, and the error still names the first bad step.
    """

    def __init__(self, every: int = 1) -> None:
        self._every, self._watch = integer("every", every), FiniteWatch([])

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        named = module.objective.model.named_parameters()
        self._trained = {name: p for name, p in named if p.requires_grad and not scaled}
        self._watch = FiniteWatch(list(self._trained), processes(module.device))

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Optimizer) -> None:
        model, step, (batch, loss) = module.objective.model, trainer.global_step + 1, module.last
        self._watch.record(step, loss, gradient_norms(self._trained.values(), loss))
        finding = self._watch.check() if step % self._every == 0 else None
        if finding is not None:
            with _gathered(module):
                lines = diagnose(model, *pair(batch)) if finding.step == step else []
            raise failure(model, finding, lines, ADVICE)


@contextmanager
def _gathered(module: nn.Module) -> Iterator[None]:
    """Unshards the parameters of a sharded module (FSDP2) inside a ``with`` block."""
    sharded: list[Any] = [part for part in module.modules() if hasattr(part, "unshard")]
    for part in sharded:
        part.unshard()
    try:
        yield
    finally:
        for part in sharded:
            part.reshard()


def _own_rows(loader: Any) -> int | None:
    """The number of rows of a loader that are this process's own; None for all of them.

    A DistributedSampler repeats rows at the end, so that all processes have equally many.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.shuffle:
        return None
    return len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))  # type: ignore[arg-type]


class _TrainingData:
    """This process's part of the training data, on its device. Iterating restores the random state afterwards."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module

    def __iter__(self) -> Iterator[Any]:
        trainer, device = self._trainer, self._module.device
        if trainer.train_dataloader is None:
            raise InputError("there are no training data to calibrate the model on: use it for validation in fit()")
        state = random_state(device, ())
        try:
            for batch in trainer.train_dataloader:
                yield trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))
        finally:
            set_random_state(state, device, ())
