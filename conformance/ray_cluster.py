"""The connection of a process to a Ray cluster, and the end of a cluster that it started itself."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from oproj.engines import EngineUnavailable
from oproj.engines.software.gemm import thread_count

_REACHED = 10.0  # seconds; Ray itself tries for minutes
_STORE_BYTES = 128 << 20  # of Ray's object store in a cluster of our own: shards and answers are small


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """The module ``ray``, connected to ``address``; a process that was connected before stays so.

    Raises ``EngineUnavailable`` where Ray is missing or no cluster answers, ``ValueError`` for what is no address.
    """
    ray = import_ray()
    _reach(address)
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.WARNING}
    if address == "local":
        options |= {"include_dashboard": False, "num_cpus": thread_count(), "object_store_memory": _STORE_BYTES}
    with _signals_later() as came:
        try:
            ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise EngineUnavailable(f"--ray {address}: no Ray cluster answers: {error}") from error
    try:
        for number in came[:1]:
            signal.raise_signal(number)
        yield ray
    finally:
        started = _descendants() if address == "local" else {}
        ray.shutdown()
        _end_orphans(started)


def _reach(address: str) -> None:
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise ValueError(f"--ray {address!r} must be 'auto', 'local' or HOST:PORT of a cluster's head")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHED).close()
    except (OSError, OverflowError) as error:
        raise EngineUnavailable(f"--ray {address}: no Ray cluster answers: {error}") from error


def import_ray() -> Any:
    """The module ``ray``. Raises ``EngineUnavailable`` where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a sweep tells nobody of itself
    try:
        import ray
    except ImportError as error:
        raise EngineUnavailable("--ray needs Ray, which is not installed: pip install 'oproj[ray]'") from error
    return ray


@contextmanager
def _signals_later() -> Iterator[list[int]]:
    """SIGINT and SIGTERM that come within, for later: a Ray that was stopped as it starts would leave processes behind.

    Ray's own handler of SIGTERM, which would replace the one that ends a run with its exit code, is gone afterwards.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _descendants() -> dict[int, str]:
    """The processes below this one, with the moment of their start; none where there is no /proc."""
    children: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            children[int(fields[1])].append((int(path.parent.name), fields[19]))
    found: dict[int, str] = {}
    waiting = [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting += [pid for pid, _ in below]
    return found


def _end_orphans(started: dict[int, str]) -> None:
    """End those of ``started`` that nobody has any more: agents that were starting themselves when Ray's node ended."""
    ours = _descendants() if started else {}
    for pid, moment in started.items():
        with suppress(OSError):
            if pid not in ours and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19] == moment:
                os.kill(pid, signal.SIGKILL)
