"""The tests of the pytest face: one for each Case, whose failure is what the rows say and a line to paste.

This file is where node ids point: `.../conformance/pytest_cases.py::test_case[sm90-0123456789ab]`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest

from conformance.case import Case
from conformance.grid import Grid
from conformance.isolation import Isolated, Lost
from conformance.judge import FAIL, NOT_APPLICABLE, SKIPPED
from conformance.runner import Row, Run, Target, judged_by, lost_row, run_case
from conformance.strategies import ProfileCases
from reports.formatting import replay_line, replay_of

_DEAD = (NOT_APPLICABLE, SKIPPED)


class CaseFailed(Exception):
    """The report of a Case; its text is all that a person needs, so no traceback is shown."""


class Judge:
    """Judges one Case after another: an engine of ours in this process, anything else in one of its own, which is
    replaced when a Case ends it.

    timeout: seconds of one Case. Raises ``ValueError`` where that is no positive number.
    """

    def __init__(self, target: Target, timeout: float) -> None:
        if not timeout > 0:
            raise ValueError(f"--case-timeout {timeout:g} must be a positive number of seconds")
        self.target, self.timeout, self.run = target, timeout, Run.now()
        self._pool: Isolated[Case, list[Row]] | None = None

    def check(self, archs: Iterable[str]) -> None:
        """Raise ``EngineUnavailable`` or ``ValueError`` where there is nothing to judge on one of ``archs``."""
        for arch in archs:
            judged_by(self.target, arch, self.timeout)

    def rows(self, case: Case) -> list[Row]:
        """The rows of ``case``; where its process ended, the one that says so."""
        if not self.target.implementation:
            return run_case(case, self.target, self.run)
        if self._pool is None:
            beside = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
            work = partial(run_case, target=self.target, run=self.run)
            self._pool = Isolated(work, timeout=self.timeout, beside=beside)
        result = self._pool.result(self._pool.schedule(case))
        return [lost_row(case, self.target, self.run, result)] if isinstance(result, Lost) else result

    def close(self) -> None:
        """End the process of the Cases."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


JUDGE = pytest.StashKey[Judge]()
CASES = pytest.StashKey[Grid | ProfileCases]()


class CasesFile(pytest.File):
    """Collects the Cases that the options name."""

    def collect(self) -> Iterable[pytest.Item]:
        """In the order of the Cases, each once."""
        for case in dict.fromkeys(self.config.stash[CASES].cases()):
            yield CaseItem.from_parent(self, name=f"test_case[{case.arch}-{case.id}]", case=case)


class CaseItem(pytest.Item):
    """One Case."""

    def __init__(self, *, case: Case, **more: Any):
        super().__init__(**more)
        self.case = case
        self.user_properties.append(("case", case.to_json()))

    def runtest(self) -> None:
        """Fails with what is wrong, stage by stage. A Case without tokens claims shapes and dtypes alone: where those
        are right it has compared nothing, so it is skipped, not passed."""
        rows = self.config.stash[JUDGE].rows(self.case)
        problem = problem_of(self.case, rows)
        if problem:
            raise CaseFailed(problem)
        if self.case.tokens == 0 and all(row["verdict"] in _DEAD for row in rows):
            pytest.skip("no tokens: shapes and dtypes agree, there is nothing to compare")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The text of a failed Case; a traceback of anything else, which is the suite's own fault."""
        if isinstance(excinfo.value, CaseFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, None, str]:
        """File and name, without a line."""
        return self.path, None, self.name


def problem_of(case: Case, rows: Sequence[Row]) -> str:
    """'' where ``case`` holds, else its failed rows, first wrong stage first, and the command that runs it again."""
    failed = [row for row in rows if row["verdict"] == FAIL]
    if not failed and not (case.tokens and all(row["verdict"] in _DEAD for row in rows)):
        return ""
    if not failed:
        reasons = dict.fromkeys(f"{row['stage']} {row['oracle']}: {row['reason']}" for row in rows)
        return "\n".join(["nothing compared", *(f"  {reason}" for reason in reasons), _replay(case, rows)])
    first = failed[0]
    lines = [f"{first['implementation']} on {case.arch}, first wrong stage: {first['stage']}"]
    lines += [f"  {row['stage']} {row['oracle']}: {row['reason']}" for row in failed]
    return "\n".join([*lines, _replay(case, rows)])


def _replay(case: Case, rows: Sequence[Row]) -> str:
    return replay_line(**replay_of(rows[0])) if rows else replay_line(case.to_json())
