"""The start of a process that works for another one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

import torch


def start_worker(cores: int = 1) -> None:
    """``cores`` threads of the engine and of PyTorch, signals as a child needs them, and no life without the parent."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["OPROJ_THREADS"] = str(cores)
    torch.set_num_threads(cores)


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for its next item for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
