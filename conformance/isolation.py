"""Cases in processes of their own: what crashes, exits or hangs there becomes a failed row, and the run goes on.

Processes, their time limits and their replacement are Pebble's; this module decides what an ended process means.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import TimeoutError as TookTooLong
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from pebble import ProcessExpired, ProcessFuture, ProcessPool

from conformance.case import Case

Result = TypeVar("Result")
CASE_TIMEOUT = 600.0  # seconds; a Case of the largest profile takes some
_AHEAD = 4  # Cases a worker may have waiting
_SPOILT = 117  # exit code of a worker that an earlier Case left unusable
_RETRIES = 2
_state = {"spoilt": False}
_TOOK_TOO_LONG, _DIED = "no result after", "its process"


def is_lost(reason: str) -> bool:
    """Whether ``reason`` is that of a `Lost` Case: to run it once more may take as long, and end as badly."""
    return reason.startswith((_TOOK_TOO_LONG, _DIED))


@dataclass(frozen=True)
class Lost:
    """Why a Case has no result."""

    reason: str


def run_isolated(
    cases: Iterable[Case], work: Callable[[Case], Result], *, workers: int, timeout: float = CASE_TIMEOUT
) -> Iterator[tuple[Case, Result | Lost]]:
    """``work`` of each Case in one of ``workers`` processes, in the order given; `Lost` where its process ended.

    work: a function that pickles. timeout: seconds of one Case. A CUDA context that a Case has broken goes with its
    process; the Cases behind it run in a new one. Raises what ``work`` raises.
    """
    # Threads of this process would not survive a fork, and neither would a CUDA context.
    context = multiprocessing.get_context("spawn")
    cores = max(1, (os.cpu_count() or 1) // workers)
    pool = ProcessPool(workers, context=context, initializer=_start_worker, initargs=[cores])
    todo = iter(cases)
    waiting: deque[tuple[Case, ProcessFuture]] = deque()

    def add(count: int) -> None:
        for case in islice(todo, count):
            waiting.append((case, pool.schedule(_run, args=[work, case], timeout=timeout)))

    try:
        add(workers * _AHEAD)
        while waiting:
            case, future = waiting.popleft()
            yield case, _result(pool, future, work, case, timeout)
            add(1)
        pool.close()
    finally:
        pool.stop()
        pool.join()


def _result(
    pool: ProcessPool, future: ProcessFuture, work: Callable[[Case], Result], case: Case, timeout: float
) -> Result | Lost:
    for _ in range(_RETRIES):
        try:
            return future.result()
        except TookTooLong:
            return Lost(f"{_TOOK_TOO_LONG} {timeout:g} s; its process was ended")
        except ProcessExpired as error:
            if error.exitcode != _SPOILT:
                return Lost(f"{_DIED} died: {exit_name(error.exitcode)}")
            future = pool.schedule(_run, args=[work, case], timeout=timeout)
    return Lost(f"{_DIED} could not be used, also a new one: exit code {_SPOILT}")


def exit_name(code: int | None) -> str:
    """'exit code 3', or 'SIGSEGV' where a signal ended the process."""
    if code is not None and code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"


def _run(work: Callable[[Case], Any], case: Case) -> Any:
    if _state["spoilt"]:
        os._exit(_SPOILT)  # the pool starts another process, and the parent gives it this Case again
    result = work(case)
    _state["spoilt"] = _context_is_broken()
    return result


def _context_is_broken() -> bool:
    """Whether a CUDA error has left this process' context unusable, as an illegal address does."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"the CUDA context of this worker is lost: {error}", file=sys.stderr)
        return True
    return False


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for its next Case for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _start_worker(cores: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["OPROJ_THREADS"] = str(cores)
    torch.set_num_threads(cores)
