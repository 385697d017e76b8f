"""Ctrl-C in a training run: the current step is completed, and one more is taken and saved."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType

__all__ = ["Interrupts"]


class Interrupts:
    """Listens for Ctrl-C inside a ``with`` block. A second Ctrl-C stops at once, as usual.

    It does nothing outside the main thread, which alone receives signals, if the user has a handler, or with
    ``listen=False``. A nested block notifies the outer one.

    Attributes:
        asked: Whether Ctrl-C was pressed.

    Example:
        >>> with Interrupts() as interrupts:
        ...     interrupts.asked
        False
    """

    def __init__(self, listen: bool = True) -> None:
        self.asked = False
        self._listen = listen
        self._outer: Interrupts | None = None
        self._process = os.getpid()

    def __enter__(self) -> Interrupts:
        before = signal.getsignal(signal.SIGINT)
        owner = getattr(before, "__self__", None)
        self._outer = owner if isinstance(owner, Interrupts) else None
        free = before is signal.default_int_handler or self._outer is not None
        self._listen = self._listen and free and threading.current_thread() is threading.main_thread()
        if self._listen:
            signal.signal(signal.SIGINT, self._stop)
        return self

    def __exit__(self, *error: object) -> None:
        if self._listen and signal.getsignal(signal.SIGINT) == self._stop:  # the handler was not replaced since
            signal.signal(signal.SIGINT, signal.default_int_handler if self._outer is None else self._outer._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked worker, which the main process will end
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        block: Interrupts | None = self
        while block is not None:
            block.asked, block = True, block._outer
        with suppress(OSError, ValueError, RuntimeError):  # Ctrl-C may also have ended the reader of a pipe
            print("\nStopping when the next step is saved; Ctrl-C again stops at once.", file=sys.stderr, flush=True)
