"""The most memory that a call holds at once, counted by torch's own allocator."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import torch
from torch.autograd.profiler import profile, record_function

METHOD = (
    "the most bytes of torch's allocator that are held at once (CPU: every allocation and release, by torch's "
    "profiler; GPU: max_memory_allocated); the workspace of LAPACK is not seen"
)
MARK = "measured from here"


def peak_bytes(prepare: Callable[[], Callable[[], object]], device: torch.device) -> int:
    """The most bytes that are held at once during a call, with what was made for it.

    Arguments:
        prepare: Makes what is called. It is called once before the measurement too, for what it keeps from then on.
        device: Where it runs.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        function = prepare()
        function()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it reports on stderr that there is no GPU
    gc.collect()  # what an earlier call left would be released, and counted, in this one
    with profile(profile_memory=True) as profiler:
        function = prepare()
        function()
        gc.collect(1)
        with record_function(MARK):
            function()
    held = peak = 0
    for event in sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == MARK:
            peak = held
        elif event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
