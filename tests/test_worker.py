"""Processes that work for another one end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARENT = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from conformance.worker import start_worker
def pid_after(seconds):
    time.sleep(seconds)
    return os.getpid()
if __name__ == "__main__":
    pool = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"), initializer=start_worker)
    pids = [future.result() for future in [pool.submit(pid_after, 1.0) for _ in range(2)]]
    print(*pids, pool.submit(os.getenv, "OPROJ_THREADS").result(), flush=True)
    time.sleep(100)
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, str(tmp_path / "parent.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        *workers, threads = parent.stdout.readline().split()
        try:
            assert threads == "1"
            assert all(alive(int(worker)) for worker in workers)
        finally:
            parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(alive(int(worker)) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [worker for worker in workers if alive(int(worker))]
