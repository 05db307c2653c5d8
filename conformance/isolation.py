"""Cases in processes of their own: what crashes, exits or hangs there becomes a failed row, and the run goes on.

Processes, their time limits and their replacement are Pebble's; this module decides what an ended process means.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import TimeoutError as TookTooLong
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Generic, TypeVar

import torch
from pebble import ProcessExpired, ProcessFuture, ProcessPool

from conformance.worker import start_worker
from oproj.engines.software.gemm import thread_count

Item = TypeVar("Item")
Result = TypeVar("Result")
CASE_TIMEOUT = 600.0  # seconds; a Case of the largest profile takes some
_AHEAD = 4  # Cases a worker may have waiting
_SPOILT = 117  # exit code of a worker that an earlier Case left unusable
_RETRIES = 2
_NOTE_LENGTH = 32  # bytes; 'after quantize' and the like
_TOOK_TOO_LONG, _DIED = "no result after", "its process"


@dataclass
class _State:
    """Of a worker: whether an item left it unusable, the file of the notes (-1: none) and the place of its item."""

    spoilt: bool = False
    notes: int = -1
    slot: int = 0


_state = _State()


def is_lost(reason: str) -> bool:
    """Whether ``reason`` is that of a `Lost` Case: to run it once more may take as long, and end as badly."""
    return reason.startswith((_TOOK_TOO_LONG, _DIED))


@dataclass(frozen=True)
class Lost:
    """Why an item has no result, and the stage that was called last ('' for none)."""

    reason: str
    stage: str = ""


@dataclass
class Ticket(Generic[Item]):
    """An item that waits in a pool, and its place among the notes."""

    item: Item
    slot: int
    future: ProcessFuture


class Isolated(Generic[Item, Result]):
    """Processes that do ``work``, one item (a Case) after another, and are replaced where an item ended or spoilt one.

    work: a function that pickles. timeout: seconds of one item. beside: how many pools like this one share the cores. A
    CUDA context that an item has broken goes with its process; the items behind it run in a new one.
    """

    def __init__(
        self, work: Callable[[Item], Result], *, workers: int = 1, timeout: float = CASE_TIMEOUT, beside: int = 1
    ) -> None:
        self._work, self._timeout, self._count = work, timeout, count()
        # Threads of this process would not survive a fork, and neither would a CUDA context.
        context = multiprocessing.get_context("spawn")
        cores = max(1, thread_count() // (workers * beside))
        # A process that dies says nothing any more; what it wrote to this file is still there.
        self._notes = tempfile.NamedTemporaryFile(prefix="oproj-notes-")  # noqa: SIM115  closed with the pool
        self._pool = ProcessPool(workers, context=context, initializer=_start, initargs=[cores, self._notes.name])

    def schedule(self, item: Item) -> Ticket[Item]:
        """Put ``item`` behind those already waiting."""
        slot = next(self._count)
        return Ticket(item, slot, self._submit(item, slot))

    def _submit(self, item: Item, slot: int) -> ProcessFuture:
        return self._pool.schedule(_run, args=[self._work, item, slot], timeout=self._timeout)

    def result(self, ticket: Ticket[Item]) -> Result | Lost:
        """What ``work`` gave, or why nothing. Raises what ``work`` raised."""
        for _ in range(_RETRIES):
            try:
                return ticket.future.result()
            except TookTooLong:
                stage, where = self._where(ticket.slot)
                return Lost(f"{_TOOK_TOO_LONG} {self._timeout:g} s{where}; its process was ended", stage)
            except ProcessExpired as error:
                if error.exitcode != _SPOILT:
                    stage, where = self._where(ticket.slot)
                    return Lost(f"{_DIED} died{where}: {exit_name(error.exitcode)}", stage)
                ticket.future = self._submit(ticket.item, ticket.slot)
        return Lost(f"{_DIED} could not be used, also a new one: exit code {_SPOILT}")

    def _where(self, slot: int) -> tuple[str, str]:
        """The stage of the last note, and the words for it."""
        written = os.pread(self._notes.fileno(), _NOTE_LENGTH, slot * _NOTE_LENGTH).decode().strip(" \0")
        when, _, stage = written.partition(" ")
        return stage, f" {when} {stage}" if stage else ""

    def close(self) -> None:
        """End the processes, whatever they do."""
        self._pool.stop()
        self._pool.join()
        self._notes.close()


def note_stage(stage: str, *, returned: bool = False) -> None:
    """Leave a note that ``stage`` is called or has returned, in case this process ends; outside of a pool nothing."""
    if _state.notes >= 0:
        text = f"{'after' if returned else 'in'} {stage}" if stage else ""
        os.pwrite(_state.notes, text.encode().ljust(_NOTE_LENGTH)[:_NOTE_LENGTH], _state.slot * _NOTE_LENGTH)


def run_isolated(
    items: Iterable[Item], work: Callable[[Item], Result], *, workers: int, timeout: float = CASE_TIMEOUT
) -> Iterator[tuple[Item, Result | Lost]]:
    """``work`` of each Case in one of ``workers`` processes, in the order given; `Lost` where its process ended.

    Takes and raises what `Isolated` does.
    """
    pool = Isolated(work, workers=workers, timeout=timeout)
    todo = iter(items)
    try:
        waiting = deque(pool.schedule(item) for item in islice(todo, workers * _AHEAD))
        while waiting:
            ticket = waiting.popleft()
            yield ticket.item, pool.result(ticket)
            waiting.extend(pool.schedule(item) for item in islice(todo, 1))
    finally:
        pool.close()


def exit_name(code: int | None) -> str:
    """'exit code 3', or 'SIGSEGV' where a signal ended the process."""
    if code is not None and code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"


def _run(work: Callable[[Any], Any], item: Any, slot: int) -> Any:
    if _state.spoilt:
        os._exit(_SPOILT)  # the pool starts another process, and the parent gives it this item again
    _state.slot = slot
    result = work(item)
    _state.spoilt = _context_is_broken()
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


def _start(cores: int, notes: str) -> None:
    _state.notes = os.open(notes, os.O_WRONLY)
    start_worker(cores)
