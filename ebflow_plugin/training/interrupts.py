"""Ctrl-C: the step that is under way comes to its end first, so that its state can be saved."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType

__all__ = ["Interrupts"]


class Interrupts:
    """Listens for Ctrl-C during a ``with`` block. A second one stops at once, as without this.

    Signals reach the main thread alone, and whoever has a handler of their own keeps it: there nothing changes.

    Arguments:
        listen: Whether to listen at all.

    Attributes:
        asked: Whether somebody asked to stop.

    Example:
        >>> with Interrupts() as interrupts:
        ...     interrupts.asked
        False
    """

    def __init__(self, listen: bool = True) -> None:
        self.asked = False
        self._listen = listen

    def __enter__(self) -> Interrupts:
        here = threading.current_thread() is threading.main_thread()
        self._listen = self._listen and here and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._listen:
            signal.signal(signal.SIGINT, self._stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listen:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("\nStopping when this step is saved; Ctrl-C again stops at once.", file=sys.stderr, flush=True)
