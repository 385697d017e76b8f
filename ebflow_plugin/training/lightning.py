"""Objectives in Lightning's Trainer: the module, the exact NLL, starts and guards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, distributed, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DistributedSampler

from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg.random import derive_seed, random_state, set_random_state
from ebflow_plugin.objectives import Objective
from ebflow_plugin.options import integer, is_number, one_of
from ebflow_plugin.plan.inputs import batch_of
from ebflow_plugin.plan.spectrum import (
    NEAR_SINGULAR,
    ConditionWatch,
    Placed,
    Spectrum,
    conditioning_penalty,
    full_layers,
)
from ebflow_plugin.training.batches import gathered, least_of, once, process, total_of
from ebflow_plugin.training.evaluation import Likelihood, LikelihoodSum, calibrated
from ebflow_plugin.training.fitting import KINDS, noise_of, use_generators
from ebflow_plugin.training.guards import ADVICE, FiniteWatch, checks_every, failure, gradient_norms
from ebflow_plugin.training.optimizers import optimizer_of, scalar_objective, scheduler_of

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import WeightAveraging
except ImportError as error:
    raise ImportError("ebflow_plugin.lightning needs Lightning: pip install ebflow-plugin[lightning]") from error


class Evaluated(NamedTuple):
    """The exact NLL of a step, and the calibration that it had: the map's tensors, or None if nobody asked for one."""

    step: int
    likelihood: Likelihood
    calibration: dict[str, Tensor] | None


class LitObjective(LightningModule):
    """An objective as a LightningModule, for ``Trainer.fit``.

    Batches are tensors x, or tuples (x, context) or (x, context, weights). It logs ``train_loss`` in every step that
    Lightning logs (``log_every_n_steps``: a ``self.log`` in each would cost 0.7 ms), and ``val_loss``, with the same
    noise each time.
    Each process draws its own noise, seeded by ``seed_everything``. Checkpoints hold the state of the generators and of
    the objective; with a :class:`~ebflow_plugin.training.batches.Loader` a resumed run equals an uninterrupted one. A
    checkpoint that is saved after an :class:`ExactNLL` has the calibration of that NLL in its ``state_dict``.

    Arguments:
        objective: The loss; it holds the model. ``objective.compile()`` first trains it in one graph.
        optimizer: As in :func:`~ebflow_plugin.fit`: an optimizer, or a function that builds one from the parameters.
        scheduler: As in :func:`~ebflow_plugin.fit`. It is stepped after each step, ``ReduceLROnPlateau`` after each
            epoch with ``val_nll``.
        conditioning: The weight of a penalty on full layers that are nearly singular
            (:func:`~ebflow_plugin.plan.spectrum.conditioning_penalty`).

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
        conditioning: float = 0.0,
    ) -> None:
        super().__init__()
        self.objective = scalar_objective("LitObjective", objective)
        if not is_number(conditioning) or conditioning < 0:
            raise InputError(f"conditioning must be a number, at least 0, got {conditioning!r}")
        self._optimizer, self._scheduler, self._conditioning = optimizer, scheduler, float(conditioning)
        self._noise: dict[Objective, Generator] = {}
        self._generators: list[Generator] = []
        self.evaluated: Evaluated | None = None

    def setup(self, stage: str) -> None:
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging) and callback._use_buffers:
                raise InputError(
                    f"{type(callback).__name__}(use_buffers=True) averages integer buffers too, such as the masks of "
                    "couplings, and makes another model of this one; use ebflow_plugin.lightning.AveragedWeights(decay)"
                )
        device, seed = self.trainer.strategy.root_device, torch.initial_seed()
        shared = Generator(device).manual_seed(derive_seed(seed, "noise", self.global_rank))
        self._noise = noise_of(self.objective, shared, self.global_rank)
        self._probes = Generator(device).manual_seed(derive_seed(seed, "probes", self.global_rank))
        self._generators = [*self._noise.values(), self._probes]

    def configure_callbacks(self) -> list[Callback]:
        given: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        return [] if any(isinstance(callback, DataDependentStart) for callback in given) else [DataDependentStart()]

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self.objective, self._optimizer)
        if self._scheduler is None:
            return optimizer
        scheduler = scheduler_of(optimizer, self._scheduler, validated=True)
        interval = "epoch" if isinstance(scheduler, ReduceLROnPlateau) else "step"
        return [optimizer], [{"scheduler": scheduler, "interval": interval, "monitor": "val_nll"}]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, context, weights = batch_of(batch)
        with use_generators(self._noise):
            loss: Tensor = self.objective(x, context) if weights is None else self.objective(x, context, weights)
        if weights is not None and process()[1] > 1:  # the mean over all processes is taken of the gradients
            total = weights.to(loss.dtype).sum()
            loss = loss * (total * process()[1] / total_of(total.clone()))
        self.last = batch, loss.detach()
        if batch_idx % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self.log("train_loss", loss.detach().cpu(), prog_bar=True)  # the bar reads it in every step from now on
        if self._conditioning:
            layers = self.full_layers()
            loss = loss + self._conditioning * conditioning_penalty(layers, self._probes) if layers else loss
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if _too_early(self.trainer, self):
            return
        generator, (x, context, weights) = Generator(self.device), batch_of(batch)
        generator.manual_seed(derive_seed("validation", self.global_rank, batch_idx))
        if len(x):  # the last rows may be those of other processes
            weighted = () if weights is None else (weights,)
            loss = self.objective(x, context, *weighted, generator=generator)
            self.log("val_loss", loss, batch_size=len(x), sync_dist=True)

    def full_layers(self) -> list[Placed]:
        """The full layers of the model, at the shape of the last batch."""
        model = self.objective.model
        plan, u, _ = model.match(batch_of(self.last[0])[0][:1], None, Generator(self.device).manual_seed(0))
        return full_layers(plan, tuple(u.shape[1:]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own = {"random": random_state(self.device, self._generators), "objective": self.objective.state()}
        ranks = gathered(own)
        kept: dict[str, Any] = {name: [each[name] for each in ranks] for name in own}
        kept |= {"facts": self._facts(), "nll": None, "uncalibrated": None, "prefix": self._prefixes()[0]}
        checkpoint["ebflow_plugin"] = kept
        if self.evaluated is None or self.evaluated.step != self.trainer.global_step:
            return
        kept["nll"] = self.evaluated.likelihood.nll  # what is selected by it is what is saved
        if (found := self.evaluated.calibration) is not None:
            state = checkpoint["state_dict"]
            kept["uncalibrated"] = self._without_calibration(state)
            for prefix in self._prefixes():
                state |= {f"{prefix}calibration.{name}": tensor for name, tensor in found.items()}

    def _prefixes(self) -> list[str]:
        """The places of the model in this module: one for each term of a sum."""
        model, parts = self.objective.model, self.named_modules(remove_duplicate=False)
        return [f"{name}." for name, part in parts if part is model]

    def _without_calibration(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Takes the calibration out of a state dict, and returns it."""
        places = tuple(f"{prefix}calibration." for prefix in self._prefixes())
        return {name: state.pop(name) for name in list(state) if name.startswith(places)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kept = checkpoint.get("ebflow_plugin", {})
        here, there = self._facts(), kept.get("facts", {})
        differing = [f"{name}: {there[name]} there, {here[name]} here" for name in there if there[name] != here[name]]
        if differing:
            raise InputError("the checkpoint is of another run\n  " + "\n  ".join(differing))
        if kept.get("uncalibrated") is not None:
            self._without_calibration(checkpoint["state_dict"])
            checkpoint["state_dict"] |= kept["uncalibrated"]
        random, objective = (kept.get(name, ()) for name in ("random", "objective"))
        if self._generators and len(random) == self.trainer.world_size:  # otherwise the generators start anew
            set_random_state(random[self.global_rank], self.device, self._generators)
        if len(objective) == self.trainer.world_size:  # otherwise its statistics do
            self.objective.load_state(objective[self.global_rank])

    def _facts(self) -> dict[str, str]:
        """What a run and a checkpoint must share."""
        parameters = self.objective.model.named_parameters()
        shapes = "; ".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in parameters)
        return {"model": shapes, "objective": self.objective.describe()}


class DataDependentStart(Callback):
    """Initialises ActNorms from the first batch of all processes, before the first step, once for all of them.

    Every :class:`LitObjective` adds one. Other starts are
    :meth:`EBFlow.initialize <ebflow_plugin.EBFlow.initialize>`, called before training.
    """

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int) -> None:
        model, rank = module.objective.model, process()[0]
        if trainer.global_step or index or not model.core.uninitialised():
            return
        if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
            raise InputError("a sharded model cannot be initialised: call model.initialize(x) before the training")
        own = tuple(None if part is None else part.cpu() for part in batch_of(batch))
        parts = zip(*gathered(own), strict=True)
        if rank == 0:
            joined = (None if part[0] is None else torch.cat(part).to(module.device) for part in parts)
            model.initialize(*joined, generator=Generator(module.device).manual_seed(0))
        if trainer.world_size > 1:
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    received = tensor.detach().clone()
                    distributed.broadcast(received, 0)
                    tensor.copy_(received)  # in place, which raises version counters


class ExactNLL(Callback):
    """Logs the exact NLL of the validation data, ``val_nll`` and ``val_bits_per_dim``, with the weights of validation.

    With an :class:`~ebflow_plugin.lightning.AveragedWeights` those are the averaged weights. Rows that a
    DistributedSampler repeats count once. ``start_nll`` is the NLL before the first step, if all layers were
    initialised. Select models by it, with ``ModelCheckpoint(monitor="val_nll")`` or
    :class:`~ebflow_plugin.lightning.Checkpoints`.

    Arguments:
        calibrate: ``"full"`` or ``"diagonal"``: calibrates the model for the duration of each validation, which takes
            a pass over the training data, and logs ``val_nll_uncalibrated`` too. A checkpoint that is saved at its end
            has this calibration in its ``state_dict``; training goes on, and resumes, without it.
        seed: The seed of the noise of a :class:`~ebflow_plugin.Dequantize`, the same each time.
    """

    def __init__(self, calibrate: str | None = None, seed: int = 0) -> None:
        self._kind = None if calibrate is None else one_of("calibrate", calibrate, KINDS)
        self._seed, self._sums = seed, list[LikelihoodSum]()
        self._calibration: dict[str, Tensor] | None = None
        self.start_nll: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"start_nll": self.start_nll}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.start_nll = state_dict["start_nll"]

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        loaders = _loaders(trainer)
        if trainer.global_step or not loaders or module.objective.model.core.waits_for_data():
            return
        self._sums = []
        for batch in once(loaders[0]):
            self.on_validation_batch_start(trainer, module, _moved(trainer, batch), 0)
        self.start_nll = self._found(trainer, module)[0].nll
        self._sums = []

    def on_validation_start(self, trainer: Trainer, module: Any) -> None:
        self._sums = []  # drop the sums of a failed validation

    def on_validation_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int, place: int = 0) -> None:
        if _too_early(trainer, module):
            return
        # At the first batch: by then every callback that swaps the weights for validation has done so.
        with unsharded(module):
            if not self._sums:
                model, kind = module.objective.model, None if trainer.sanity_checking else self._kind
                with calibrated(model, _training_data(trainer), kind) as self._calibration:
                    seed = derive_seed(self._seed, "validation", process()[0])
                    self._sums += [LikelihoodSum(model, seed, _own_rows(loader)) for loader in _loaders(trainer)]
            self._sums[place].add(*batch_of(batch))

    def on_validation_epoch_end(self, trainer: Trainer, module: Any) -> None:
        for place, found in enumerate(self._found(trainer, module)):
            metrics = {"val_nll": found.nll, "val_bits_per_dim": found.bits_per_dim}
            metrics |= {} if self._kind is None else {"val_nll_uncalibrated": found.uncalibrated}
            suffix = f"/dataloader_idx_{place}" if len(self._sums) > 1 else ""
            named = {name + suffix: value for name, value in metrics.items()}
            module.log_dict(named, prog_bar=True, sync_dist=True, add_dataloader_idx=False)

    def _found(self, trainer: Trainer, module: Any) -> list[Likelihood]:
        found = [total.mean(total_of) for total in self._sums]
        if found and not trainer.sanity_checking:
            module.evaluated = Evaluated(trainer.global_step, found[0], self._calibration)
        return found


class ConditionGuard(Callback):
    """Logs the largest condition number of full layers, ``condition``, and warns once for each nearly singular one.

    It looks every so many steps, and at each validation. ``spectra`` has the last estimates, by path.
    """

    def __init__(self, every: int = 1000, limit: float = NEAR_SINGULAR) -> None:
        self._every, self._watch = integer("every", every), ConditionWatch([], limit, ADVICE)
        self.spectra: dict[str, Spectrum] = {}

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if trainer.global_step % self._every == 0:
            self._look(trainer, module)

    def on_validation_start(self, trainer: Trainer, module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._look(trainer, module)

    def _look(self, trainer: Trainer, module: Any) -> None:
        with unsharded(module):
            self._watch.layers = module.full_layers()
            self.spectra = self._watch.check(trainer.global_step)
        if self.spectra:
            module.log("condition", max(spectrum.condition for spectrum in self.spectra.values()))


class FiniteGuard(Callback):
    """Stops with a :class:`TrainingError` that names the step and the layer where a loss or gradient is not finite.

    Gradients are left to the GradScaler if there is one (``precision="16-mixed"``). Elsewhere than on the CPU a check
    reads what the one before has sent to the host, so that nothing synchronises with the device; the error still names
    the first bad step. Nothing is saved unchecked.

    Arguments:
        every: Steps between two checks; by default 1 on the CPU, and 10 elsewhere.
    """

    def __init__(self, every: int | None = None) -> None:
        self._every = None if every is None else integer("every", every)
        self.norms: Tensor | None = None  # of the last gradients, before they were clipped

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        named = module.objective.model.named_parameters()
        self._trained = {name: p for name, p in named if p.requires_grad and not scaled}
        self._watch = FiniteWatch(list(self._trained), least_of)

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Optimizer) -> None:
        step, (_, loss) = trainer.global_step + 1, module.last
        self.norms = gradient_norms(self._trained.values(), loss)
        self._watch.record(step, loss, self.norms)
        if step % (self._every or checks_every(loss.device)) == 0:
            self._look(module, step)

    def on_save_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self._look(module, None)

    def _look(self, module: Any, step: int | None) -> None:
        finding = self._watch.check(now=step is None)
        if finding is not None:
            with unsharded(module):
                raise failure(module.objective.model, finding, step, *batch_of(module.last[0])[:2])


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Unshards the parameters of a sharded module (FSDP2) inside a ``with`` block."""
    sharded: list[Any] = [part for part in module.modules() if hasattr(part, "unshard")]
    for part in sharded:
        part.unshard()
    try:
        yield
    finally:
        for part in sharded:
            part.reshard()


def _too_early(trainer: Trainer, module: Any) -> bool:
    """Whether validation data would initialise an ActNorm: in Lightning's sanity check, before training."""
    return bool(trainer.sanity_checking and module.objective.model.core.uninitialised())


def _loaders(trainer: Trainer) -> list[Any]:
    given = trainer.val_dataloaders
    return list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]


def _moved(trainer: Trainer, batch: Any) -> Any:
    return trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))


def _own_rows(loader: Any) -> int | None:
    """The number of rows of a loader that are this process's own; None for all of them.

    A DistributedSampler repeats rows at the end, so that all processes have equally many.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.shuffle:
        return None
    return len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))  # type: ignore[arg-type]


def _training_data(trainer: Trainer) -> Iterator[Any]:
    """This process's part of the training data, on its device."""
    if trainer.train_dataloader is None:
        raise InputError("there are no training data to calibrate the model on: use it for validation in fit()")
    for batch in once(trainer.train_dataloader):
        yield _moved(trainer, batch)
