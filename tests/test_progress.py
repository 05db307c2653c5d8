"""Lines of a log: one a minute at most, with counts that are true and a time left that is in proportion."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.progress import LOG_SECONDS, LogLines, progress


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(
    st.lists(st.tuples(st.floats(0, 200), st.booleans()), min_size=1, max_size=30),
    st.integers(0, 9),
    st.integers(0, 20),
)
def test_a_log_has_a_line_a_minute_with_true_counts(cases: list[tuple[float, bool]], done: int, after: int) -> None:
    clock, said, last = Clock(), list[str](), 1000.0
    total = done + len(cases) + after
    lines = LogLines(total, done, 0, said.append, clock=clock)
    failed = 0
    for number, (seconds, bad) in enumerate(cases, 1):
        clock.now += seconds
        failed += bad
        before = len(said)
        lines.advance(bad)
        assert len(said) - before == (clock.now - last >= LOG_SECONDS)
        if len(said) > before:
            last = clock.now
            found = re.fullmatch(r"(\d+) of (\d+) Cases, (\d+) failed, (?:(\d+) h )?(\d+) min left", said[-1])
            assert found and tuple(map(int, found.groups()[:3])) == (done + number, total, failed)
            left = 60 * (60 * int(found[4] or 0) + int(found[5]))
            assert 0 <= left - (clock.now - 1000.0) / number * (total - done - number) < 60.001


def test_the_line_reads_well() -> None:
    clock, said = Clock(), list[str]()
    lines = LogLines(504, 100, 1, said.append, clock=clock)
    for _ in range(20):
        clock.now += 9
        lines.advance(False)
    assert said == [
        "107 of 504 Cases, 1 failed, 1 h 0 min left",
        "114 of 504 Cases, 1 failed, 59 min left",
    ]


def test_outside_of_a_terminal_there_is_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(2) as advance:
        advance(False)
        advance(True)
    assert capsys.readouterr() == ("", "")
