"""A Case whose process dies, hangs or breaks its device is one failed row; every other Case has its own result."""

from __future__ import annotations

import os
import signal
import time

import pytest

from conformance import isolation
from conformance.case import Case
from conformance.isolation import Lost, exit_name, run_isolated
from conformance.runner import Run, Target, run_cases
from planted import case

RUN = Run("test", "2026-01-31T12:00:00Z", "abc")
MINE = """
import ctypes, os, time, conformance
class Mine(conformance.SoftwareImplementation):
    def wo_b(self, z, weights, *, config):
        tokens = len(z)
        if tokens == 2: os._exit(7)
        if tokens == 3: ctypes.string_at(0)
        if tokens == 4: time.sleep(600)
        return super().wo_b(z, weights, config=config)
"""


def test_crash_exit_and_hang_are_failed_rows_and_the_run_goes_on(tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    # o_proj calls wo_b, and the properties call it with other numbers of tokens: 6 and 7 meet none of the three.
    cases = [case(tokens=tokens) for tokens in (6, 2, 3, 4, 7)]
    target = Target(implementation=f"{path}:Mine")
    listed = list(run_cases(cases, target, RUN, workers=2, timeout=25))
    assert [rows[0]["case_id"] for rows in listed] == [one.id for one in cases]
    for right in (listed[0], listed[-1]):
        assert {row["verdict"] for row in right} <= {"pass", "not applicable"} and len(right) > 10
    reasons = [rows[0]["reason"] for rows in listed[1:4]]
    assert reasons[0] == "its process died in wo_b: exit code 7"
    assert reasons[1] == "its process died in wo_b: SIGSEGV"
    assert "no result after 25 s in wo_b" in reasons[2]
    assert [len(rows) for rows in listed[1:4]] == [1, 1, 1]
    assert {(rows[0]["verdict"], rows[0]["stage"], rows[0]["implementation"]) for rows in listed[1:4]} == {
        ("fail", "wo_b", "Mine")
    }


def number(one: Case) -> tuple[int, int]:
    """The tokens of a Case and the process that had it; 5 tokens spoil the process."""
    if one.tokens == 5:
        isolation._state.spoilt = None  # type: ignore[assignment]
        isolation._context_is_broken = lambda: True
    return one.tokens, os.getpid()


def test_a_spoilt_process_is_replaced_and_the_next_case_runs_in_the_new_one() -> None:
    cases = [case(tokens=tokens) for tokens in (1, 5, 6, 7)]
    results = [result for _, result in run_isolated(cases, number, workers=1, timeout=60)]
    assert [tokens for tokens, _ in results] == [1, 5, 6, 7]
    first, second, third, fourth = (pid for _, pid in results)
    assert first == second != third == fourth


def raises(one: Case) -> int:
    """The work itself is broken, not the implementation under test."""
    raise KeyError("bug of the suite")


def test_an_error_of_the_suite_is_raised() -> None:
    with pytest.raises(KeyError, match="bug of the suite"):
        list(run_isolated([case()], raises, workers=1))


def test_ends_of_processes_are_named() -> None:
    assert [exit_name(code) for code in (3, -int(signal.SIGSEGV), -200, None)] == [
        "exit code 3", "SIGSEGV", "signal 200", "exit code None",
    ]  # fmt: skip
    assert Lost("x").reason == "x"


def test_a_timeout_must_be_positive() -> None:
    with pytest.raises(ValueError, match="timeout=0 must be a positive number"):
        next(run_cases([case()], Target(), RUN, timeout=0))


def sleeps(one: Case) -> None:
    time.sleep(600)


def test_stopping_early_ends_the_processes() -> None:
    started = time.monotonic()
    results = run_isolated([case(), case(seed=1)], sleeps, workers=1, timeout=8)
    _, first = next(results)
    results.close()  # type: ignore[attr-defined]
    assert isinstance(first, Lost) and time.monotonic() - started < 60
