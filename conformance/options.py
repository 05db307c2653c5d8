"""What several commands of the command line take: their options, and the target that two of them name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from conformance.runner import Target
from oproj.engines import ENGINES

Strings = list[str] | None
Rows = Annotated[Path, typer.Argument(metavar="DIR", help="Folder or file of rows.")]
Engine = Annotated[str, typer.Option(help=f"Who does the arithmetic: {', '.join(ENGINES)}.")]
Judged = Annotated[str, typer.Option(help="What to judge: package.module:Mine, path/file.py:Mine, or an entry point.")]
MOST_PROCESSES = 16


def choice(what: str, known: Iterable[str], default: Sequence[object] = (), more: str = "") -> str:
    """The help of an option that takes a comma list: what may be named, and what runs where it is left out."""
    names = ": " + ", ".join(known) if known else ""
    standard = ", ".join(map(str, default)) or "all"
    return f"{what}{names}; separate with commas. Default: {standard}{more}."


def target_of(engine: str, implementation: str) -> Target:
    """The target that `--engine` and `--implementation` name; raises ``ValueError`` where they exclude each other."""
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r} is unknown; known engines: {', '.join(ENGINES)}")
    if implementation and engine != "auto":
        raise ValueError(f"--engine {engine} and --implementation {implementation} exclude each other")
    return Target(engine, implementation)
