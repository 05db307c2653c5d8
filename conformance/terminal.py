"""What the commands share: exit codes, errors as one line, comma lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

import pandas as pd
import typer
from rich.console import Console
from rich.text import Text

from oproj.engines import EngineUnavailable
from reports.aggregate import NOTHING, overall_verdict
from reports.columns import NoRowsError

PASSED, FAILED, BAD_INPUT, MISSING, NOTHING_COMPARED, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 4, 130, 143
T = TypeVar("T")


def say(line: str, style: str = "") -> None:
    """Print one line to standard output, unbroken: it may be pasted or searched for."""
    Console().print(Text(line, style=style), soft_wrap=True)


def stop(code: int, message: str) -> NoReturn:
    """Print ``message`` to standard error and leave with ``code``."""
    Console(stderr=True).print(Text(message, style="bold red"), soft_wrap=True)
    raise typer.Exit(code)


def guarded(action: Callable[[], T]) -> T:
    """The result of ``action``; bad input, missing hardware and missing rows end the program with their code."""
    try:
        return action()
    except EngineUnavailable as error:
        stop(MISSING, str(error))
    except NoRowsError as error:
        stop(NOTHING_COMPARED, str(error))
    except (ValueError, TypeError) as error:
        stop(BAD_INPUT, str(error))
    except MemoryError as error:
        stop(BAD_INPUT, f"not enough memory: {error}")
    except OSError as error:
        path = error.filename2 or error.filename
        stop(BAD_INPUT, f"{path}: {error.strerror}" if path else str(error))


def split(values: list[str] | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Comma lists and repeated options as one tuple without repeats, in the order given."""
    if values is None:
        return default
    parts = [part.strip() for value in values for part in value.split(",")]
    return tuple(dict.fromkeys(part for part in parts if part))


def integers(values: list[str] | None, default: tuple[int, ...], name: str) -> tuple[int, ...]:
    """As `split`, for whole numbers. Raises ``ValueError`` naming the option."""
    if values is None:
        return default
    try:
        return tuple(int(part) for part in split(values, ()))
    except ValueError as error:
        raise ValueError(f"--{name} takes whole numbers separated by commas: {error}") from None


def verdict_code(df: pd.DataFrame) -> int:
    """The exit code that rows deserve."""
    return {"pass": PASSED, NOTHING: NOTHING_COMPARED}.get(overall_verdict(df), FAILED)
