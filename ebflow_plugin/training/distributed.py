"""Many processes under ``torchrun``: who this one is, what they tell each other, and the objective in parallel."""

from __future__ import annotations

import atexit
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ebflow_plugin.errors import InputError
from ebflow_plugin.model import EBFlow

__all__ = [
    "Processes",
    "awaits_start",
    "gathered",
    "is_sharded",
    "own_gradients",
    "parallel",
    "processes",
    "start_once",
]

T = TypeVar("T")


class Processes:
    """The processes of a run: those of torch's default process group, or this one alone, with nobody to talk to.

    Attributes:
        rank: Which process this is.
        world: How many there are.
    """

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world

    @property
    def first(self) -> bool:
        """Whether this process writes the files and shows the progress."""
        return self.rank == 0

    def maximum(self, tensor: Tensor) -> Tensor:
        """The largest value among all processes, elementwise and in place."""
        if self.world > 1:
            distributed.all_reduce(tensor, distributed.ReduceOp.MAX)
        return tensor

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, elementwise and in place."""
        if self.world > 1:
            distributed.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in each of them."""
        found: list[Any] = [value] * self.world
        if self.world > 1:
            distributed.all_gather_object(found, value)
        return found

    def on_first(self, action: Callable[[], T]) -> T:
        """Does something in the first process, and gives its result, or raises its error, in all of them."""
        if self.world == 1:
            return action()
        outcome: list[Any] = [None, None]
        if self.first:
            try:
                outcome[0] = action()
            except Exception as error:
                outcome[1] = error
        distributed.broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result

    @torch.no_grad()
    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Gives all processes the values that the first one has; copied, so that version counters tell of it."""
        for tensor in tensors if self.world > 1 else ():
            received = tensor.detach().clone()
            distributed.broadcast(received, 0)
            tensor.copy_(received)


def processes(device: torch.device) -> Processes:
    """The processes that this one belongs to.

    A process group that is there is used. Under ``torchrun``, which sets RANK and WORLD_SIZE, one is made (gloo on the
    CPU, nccl on CUDA), which stays open for whatever follows and is closed when the process ends. Otherwise there is
    one process.

    Example:
        >>> group = processes(torch.device("cpu"))
        >>> group.rank, group.world
        (0, 1)
    """
    if not distributed.is_available():
        return Processes()
    if not distributed.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
            return Processes()
        if device.type == "cuda":
            local = os.environ.get("LOCAL_RANK")
            if local is not None and device.index not in (None, int(local)):
                raise InputError(
                    f"the model is on {device}, this is process {local} of its machine; move it first: "
                    "flow.to(f\"cuda:{os.environ['LOCAL_RANK']}\")"
                )
            torch.cuda.set_device(device)
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(_close)
    return Processes(distributed.get_rank(), distributed.get_world_size())


def _running() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _close() -> None:
    if _running():
        distributed.destroy_process_group()


def awaits_start(model: EBFlow) -> bool:
    """Whether a step still waits for its data-dependent start, whatever mode the model is in."""
    return any(not getattr(step, "initialised", True) for step in model.core.plan.steps)


def start_once(model: EBFlow, x: Tensor, context: Tensor | None, group: Processes, generator: Generator) -> None:
    """Runs the data-dependent start of a flow, such as that of ActNorms, in the first process, and tells all of them.

    Arguments:
        model: The model.
        x: The batch to start from; that of the first process counts.
        context: Its context.
        group: The processes.
        generator: Draws the noise of a :class:`~ebflow_plugin.Dequantize`.
    """
    core = model.core

    def start() -> None:
        u, _ = model.preprocess(x, generator)
        core.plan.initialize(u, context)

    if awaits_start(model):
        if is_sharded(model):
            raise InputError("a sharded model cannot be initialised: call model.initialize(x) before the training")
        group.on_first(start)
    if not is_sharded(model):
        group.spread([*model.parameters(), *model.buffers()])


def is_sharded(module: nn.Module) -> bool:
    """Whether the parameters of a module are spread over processes (FSDP2)."""
    if not _running():
        return False
    from torch.distributed.tensor import DTensor  # takes a second to import, which one process need not wait for

    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def own_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor | None]:
    """The gradients of parameters; this process's part of those that are sharded."""
    gradients = [parameter.grad for parameter in parameters]
    if not _running():
        return gradients
    from torch.distributed.tensor import DTensor

    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Gives every process the whole parameters of a sharded module, for the duration of a ``with`` block."""
    sharded: list[Any] = []
    if _running():
        from torch.distributed.fsdp import FSDPModule

        sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in sharded:
        part.unshard()
    try:
        yield
    finally:
        for part in sharded:
            part.reshard()


def parallel(objective: nn.Module, device: torch.device, unused: bool = True) -> DistributedDataParallel:
    """An objective whose gradients are averaged over all processes: those of the joined batch.

    The second derivatives of score matching are taken inside of the objective's ``forward``, so that one backward pass
    reaches each parameter once, as DistributedDataParallel needs it. Buffers stay as they are: training does not change
    them.

    Arguments:
        objective: The module whose ``forward`` gives the loss.
        device: Where it is.
        unused: Whether there are parameters that the loss does not depend on (score matching does not see all of
            them); DistributedDataParallel then looks for them at each step.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {buffers: False, "find_unused_parameters": unused}
    if device.type == "cuda":
        options["device_ids"] = [device]
    return DistributedDataParallel(objective, **options)
