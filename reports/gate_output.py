"""A gate's result for people in a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .findings import PASSED, Finding, GateResult, advice, exit_code, figures, others, summarise, table, verdict_line
from .formatting import label

_ROWS = 20
_PLAIN_WIDTH, _WIDEST = 200, 10_000
_NUMBERS = ("tp_size", "tokens", "run", "baseline")


def print_gate(result: GateResult, *, verbose: bool = False, console: Console | None = None) -> None:
    """Print what was found: the figures that are worse as a table (in a narrow terminal as lines, too), the rest in a
    few lines, the verdict last.

    verbose: all of them, and a line for each of the rest.
    """
    out = console or Console()
    if not out.is_terminal and console is None:
        out = Console(width=_PLAIN_WIDTH)  # a log has no width; a narrow table would cut names
    moved, rest = figures(result.all_problems), others(result.all_problems)
    listed = [finding for finding in moved if finding.kind == "failed"]
    if moved and not _print_table(out, moved if verbose else moved[:_ROWS]):
        listed = moved
    elif len(moved) > _ROWS and not verbose:
        out.print(f"... and {len(moved) - _ROWS} more; --verbose shows them")
    for line in [*summarise(listed, verbose=verbose), *summarise(rest, verbose=verbose)]:
        out.print(Text(line, style="bold red"), soft_wrap=True)
    for line in summarise(result.improvements, verbose=verbose):
        out.print(Text(line, style="green"), soft_wrap=True)
    replay = next((finding.replay for finding in moved if finding.replay), "")
    if replay:
        out.print(Text(f"the first of them again: {replay}"), soft_wrap=True)
    for line in advice(result):
        out.print(Text(line), soft_wrap=True)
    out.print(Text(verdict_line(result), style="" if exit_code(result) == PASSED else "bold red"), soft_wrap=True)


def _print_table(console: Console, findings: list[Finding]) -> bool:
    """Print findings as a table; False where the console is too narrow for one that cuts no name."""
    drawn = _table(findings)
    # Within the console's own width a table never measures wider than that.
    fits = console.measure(drawn, options=console.options.update(width=_WIDEST)).maximum <= console.width
    if fits:
        console.print(drawn)
    return fits


def _table(findings: list[Finding]) -> Table:
    frame = table(findings)
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in frame.columns:
        numeric = name in _NUMBERS
        out.add_column(label(name), justify="right" if numeric else "left", no_wrap=name != "figure")
    for row in frame.itertuples(index=False):
        out.add_row(*(Text(cell) for cell in row))
    return out
