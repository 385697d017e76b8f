"""Several processes under ``torchrun``: ranks, reductions, and a start that all of them share."""

from __future__ import annotations

import atexit
import inspect
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ebflow_plugin.errors import InputError
from ebflow_plugin.model import EBFlow

__all__ = ["Processes", "is_sharded", "parallel", "processes", "start_once"]

T = TypeVar("T")


class Processes:
    """The processes of a run: those of torch's default process group, or this one alone.

    Attributes:
        rank: The rank of this process.
        world: The number of processes.
        first: Whether this is the first process, which writes the files and shows the progress.
    """

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world, self.first = rank, world, rank == 0

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
        values: list[Any] = [value] * self.world
        if self.world > 1:
            distributed.all_gather_object(values, value)
        return values

    def on_first(self, action: Callable[[], T]) -> T:
        """Runs an action in the first process. Returns its result, or raises its error, in all of them."""
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


def processes(device: torch.device) -> Processes:
    """The processes of this run.

    Uses an existing process group. Under ``torchrun``, which sets RANK and WORLD_SIZE, it creates one (gloo on the
    CPU, nccl on CUDA) that stays open until the process ends. Otherwise there is one process.

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


def _close() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


def start_once(model: EBFlow, x: Tensor, context: Tensor | None, group: Processes, generator: Generator) -> None:
    """Runs the data-dependent start of a flow (of its ActNorms, say) in the first process, for all processes.

    It uses the batch ``x`` of the first process. The generator draws the noise of a
    :class:`~ebflow_plugin.Dequantize`.
    """
    sharded, plan = is_sharded(model), model.core_plan
    if plan.uninitialised():
        if sharded:
            raise InputError("a sharded model cannot be initialised: call model.initialize(x) before the training")
        group.on_first(lambda: plan.initialize(model.preprocess(x, generator)[0], context))
    if group.world > 1 and not sharded:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                received = tensor.detach().clone()
                distributed.broadcast(received, 0)
                tensor.copy_(received)  # in place, which raises version counters


def is_sharded(module: nn.Module) -> bool:
    """Whether the parameters of a module are sharded over processes (FSDP2)."""
    return any(hasattr(parameter, "to_local") for parameter in module.parameters())


def parallel(objective: nn.Module, device: torch.device, unused: bool = True) -> DistributedDataParallel:
    """An objective whose gradients are averaged over all processes, which is the gradient of the joint batch.

    The derivatives in x of score matching are computed inside the objective's ``forward``, so that one backward pass
    reaches each parameter once, as DistributedDataParallel requires. Buffers do not change in training, and are not
    synchronised. If the loss does not depend on some parameters (``unused``), as in score matching, each step searches
    for them.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {buffers: False, "find_unused_parameters": unused}
    if device.type == "cuda":
        options["device_ids"] = [device]
    return DistributedDataParallel(objective, **options)
