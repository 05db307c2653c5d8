"""How far a run is, on standard error: a bar in a terminal, a plain line now and then in a log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LOG_SECONDS = 60.0
"""Between two lines of a log: enough to show life, too few to bury what matters."""
Advance = Callable[[bool], None]


class LogLines:
    """Counts Cases and says every ``every`` seconds how many are done: "120 of 504 Cases, 0 failed, 3 min left"."""

    def __init__(
        self,
        total: int,
        done: int,
        failed: int,
        say: Callable[[str], object],
        *,
        clock: Callable[[], float] = time.monotonic,
        every: float = LOG_SECONDS,
    ) -> None:
        self.total, self.done, self.failed = total, done, failed
        self._say, self._clock, self._every = say, clock, every
        self._before, self._started = done, clock()
        self._said = self._started

    def advance(self, failed: bool) -> None:
        """One more Case is done."""
        self.done += 1
        self.failed += failed
        now = self._clock()
        if now - self._said >= self._every:
            self._said = now
            left = (now - self._started) / (self.done - self._before) * (self.total - self.done)
            self._say(f"{self.done} of {self.total} Cases, {self.failed} failed, {_duration(left)} left")


def _duration(seconds: float) -> str:
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def progress(total: int, done: int = 0, failed: int = 0) -> Iterator[Advance]:
    """What to call with whether it failed as each of ``total`` Cases ends; ``done`` of them are over already."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield LogLines(total, done, failed, lambda line: console.print(line, soft_wrap=True, highlight=False)).advance
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    ends = (TextColumn("{task.fields[failed]} failed"), TimeRemainingColumn())
    with Progress(*columns, *ends, console=console, transient=True) as bar:
        task = bar.add_task("Cases", total=total, completed=done, failed=failed)

        def advance(failed_too: bool) -> None:
            bar.update(task, advance=1, failed=bar.tasks[task].fields["failed"] + failed_too)

        yield advance
