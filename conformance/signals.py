"""SIGTERM, as what stops a batch job or a container sends it, ends a program as Ctrl-C does: after its clean-up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM came. A KeyboardInterrupt, since nothing that lets that one pass may hold this one."""


@contextmanager
def terminable() -> Iterator[None]:
    """Within, the first SIGTERM raises `Terminated` in the main thread; more of them cannot spoil the clean-up.

    Outside of the main thread, where Python allows no handlers, it changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    came = []

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        came.append(number)
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt as error:
        if came and not isinstance(error, Terminated):
            raise Terminated from error  # C++ code of Ray, which it interrupted, knows no such class
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
