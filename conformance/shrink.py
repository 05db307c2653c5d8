"""From a Case that fails to a small one that fails in the same way: the one to debug.

Hypothesis shrinks what it drew itself; here any Case may have failed, one of the grid or one that a user pasted, so
its fields are made simpler one by one, in the order and toward the values of `conformance.strategies`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from conformance.case import POSITION_FAMILIES, ROPE_KINDS, VARIANTS, Case
from conformance.families import FAMILIES
from conformance.isolation import CASE_TIMEOUT, Lost, is_lost, run_isolated
from conformance.judge import FAIL
from conformance.runner import Row, Run, Target, run_case
from conformance.strategies import TOKENS
from oproj.config import PRESETS
from reports.formatting import replay_line, replay_of

SECONDS = 15.0  # for one failure; a smaller Case found by then is as right as a smallest one
MOST_FAILURES = 3
_COLUMNS = (128, 256, 384, 512, 1024, 2048)
_Change = dict[str, Any]


@dataclass(frozen=True)
class Shrunk:
    """A failed row of a small Case, the id of the Case it came from, and how many Cases were tried on the way.

    ``problem`` says why there is none, where the process that looked for it ended.
    """

    row: Row
    origin: str
    tried: int = 0
    problem: str = ""


def simplifications(case: Case) -> Iterator[list[_Change]]:
    """For each field in turn the changes that make ``case`` simpler, simplest first. Not all of them fit the others."""
    local = case.n_groups // case.tp_size
    yield [{"tokens": n} for n in sorted(TOKENS) if 0 < n < case.tokens]
    yield [_groups(case.tp_size, n) for n in range(1, local)]
    yield [{"o_lora_rank": n} for n in _COLUMNS if n < case.o_lora_rank]
    yield [{"hidden_size": n} for n in _COLUMNS if n < case.hidden_size]
    yield [{**_groups(n, local), "tp_rank": 0} for n in (1, 2, 4) if n < case.tp_size]
    yield [{"tp_rank": n} for n in range(case.tp_rank)]
    yield [{"padding_slots": n} for n in range(case.padding_slots)]
    yield [{"padded_heads": 0}] if case.padded_heads else []
    yield [{"rope_kind": word} for word in _before(case.rope_kind, ROPE_KINDS)]
    yield [{"variant": word} for word in _before(case.variant, VARIANTS)]
    yield [{"position_family": word} for word in _before(case.position_family, POSITION_FAMILIES)]
    yield [{"family": word} for word in _before(case.family, tuple(FAMILIES))]
    yield [{"preset": word, **_groups(case.tp_size, local)} for word in _before(case.preset, tuple(PRESETS))]
    yield [{"seed": 0}] if case.seed else []


def _groups(tp_size: int, local: int) -> _Change:
    return {"tp_size": tp_size, "n_groups": local * tp_size, "n_heads": 0}


def _before(word: str, words: Sequence[str]) -> Sequence[str]:
    return words[: words.index(word)]


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float = SECONDS) -> tuple[Case, int]:
    """The simplest Case on the way from ``case`` for which ``fails`` still holds, and how many were tried.

    ``fails`` is asked until no field can be made simpler, or ``seconds`` are over. ``case`` itself is not asked about.
    """
    deadline = time.monotonic() + seconds
    answers: dict[Case, bool] = {}
    smaller, before = case, None
    while smaller != before:
        before = smaller
        for number in range(sum(1 for _ in simplifications(case))):
            changes = list(simplifications(smaller))[number]
            for candidate in _possible(smaller, changes):
                if time.monotonic() > deadline:
                    return smaller, len(answers)
                if candidate not in answers:
                    answers[candidate] = fails(candidate)
                if answers[candidate]:
                    smaller = candidate
                    break
    return smaller, len(answers)


def _possible(case: Case, changes: Iterable[_Change]) -> Iterator[Case]:
    for change in changes:
        try:
            yield dataclasses.replace(case, **change)
        except ValueError:  # sizes that do not fit each other
            continue


def failure(rows: Iterable[Row]) -> Row | None:
    """The first failed row: the first wrong stage."""
    return next((row for row in rows if row["verdict"] == FAIL), None)


def kind(row: Row) -> tuple[str, ...]:
    """What must stay the same while a Case shrinks: arch, stage, oracle, and of the exact properties which one."""
    check = row["reason"].partition(":")[0] if row["oracle"] == "exact" else ""
    return (row["arch"], row["stage"], row["oracle"], check)


def shrink_rows(case: Case, target: Target, run: Run, wanted: tuple[str, ...], seconds: float) -> tuple[Row, int]:
    """The failed row of the smallest Case found that fails as ``wanted`` says, and how many were tried."""
    found: dict[Case, Row] = {}

    def fails(candidate: Case) -> bool:
        row = failure(run_case(candidate, target, run))
        if row is None or kind(row) != wanted:
            return False
        found[candidate] = row
        return True

    if not fails(case):
        raise ValueError(f"Case {case.id} did not fail again: the failure depends on what ran before it")
    smallest, tried = shrink(case, fails, seconds)
    return found[smallest], tried


def shrink_failures(
    rows: Sequence[Row], target: Target, run: Run, *, seconds: float = SECONDS, timeout: float = CASE_TIMEOUT
) -> Iterator[Shrunk]:
    """A small Case for each of the first kinds of failure in ``rows``, at most three; its search takes ``seconds``.

    An implementation that is not ours is called in another process, which may end without harm.
    """
    for row in _one_of_each_kind(rows):
        case = Case.from_json(row["case"])
        work = partial(_shrunk, target=target, run=run, wanted=kind(row), seconds=seconds)
        if not target.implementation:
            yield work(case)
            continue
        for _, result in run_isolated([case], work, workers=1, timeout=timeout + seconds):
            yield Shrunk(row, row["case_id"], problem=result.reason) if isinstance(result, Lost) else result


def _shrunk(case: Case, target: Target, run: Run, wanted: tuple[str, ...], seconds: float) -> Shrunk:
    try:
        row, tried = shrink_rows(case, target, run, wanted, seconds)
    except ValueError as error:
        return Shrunk({}, case.id, problem=str(error))
    return Shrunk(row, case.id, tried)


def _one_of_each_kind(rows: Sequence[Row]) -> list[Row]:
    """The failed row of the smallest Case of each kind of failure, in the order in which the kinds came up; none of
    those whose process ended."""
    by_case: dict[str, list[Row]] = {}
    for row in rows:
        by_case.setdefault(row["case_id"], []).append(row)
    best: dict[tuple[str, ...], Row] = {}
    for of_case in by_case.values():
        first = failure(of_case)
        if first is None or is_lost(first["reason"]):
            continue
        held = best.get(kind(first))
        if held is None or _size(first) < _size(held):
            best[kind(first)] = first
    return list(best.values())[:MOST_FAILURES]


def _size(row: Row) -> int:
    return Case.from_json(row["case"]).macs


def as_text(shrunk: Shrunk) -> str:
    """The failure in two lines: where, both codes, bound and margin; and the command that runs it again."""
    if shrunk.problem:
        return f"Case {shrunk.origin} has no smaller one: {shrunk.problem}"
    row = shrunk.row
    where = f"smallest Case that fails {row['stage']} {row['oracle']} on {row['arch']}"
    how = f"(from {shrunk.origin}, {shrunk.tried} tried)"
    return f"{where} {how}: {row['reason']}\n  {replay_line(**replay_of(row))}"
