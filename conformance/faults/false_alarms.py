"""How often a right implementation is flagged: many Cases, each with one legitimate variant in turn. Must be never.

python -m conformance.faults.false_alarms --cases 100000 --workers 16 --out alarms.json
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from conformance.case import POSITION_FAMILIES, ROPE_KINDS, Case
from conformance.families import FAMILIES
from conformance.faults.fault import ALL
from conformance.faults.matrix import failed_checks
from conformance.faults.variants import VARIANTS, Variant
from conformance.streams import Stream
from conformance.terminal import FAILED, NOTHING_COMPARED, PASSED
from conformance.worker import start_worker
from reports.files import write_text

T = TypeVar("T")
_PRESETS = ("v4-flash", "v4-flash-base", "v4-pro", "v4.1-flash")
_TOKENS = (1, 2, 2, 3, 3, 4, 5, 7, 8, 9)
_BATCH = 50  # Cases of one task


@dataclasses.dataclass(frozen=True)
class Count:
    """Cases of one (variant, arch, family) and the alarms among them."""

    key: tuple[str, str, str]
    case: str
    alarms: tuple[str, ...]


def small_case(number: int, seed: int) -> Case:
    """Case ``number``: two groups at most, the narrowest columns, K of a group whole; architectures in turn."""
    draw = Stream(seed, "false alarms", number)

    def pick(what: str, options: Sequence[T]) -> T:
        return options[int(draw.below(what, len(options), (1,))[0])]

    tp_size, groups = pick("tp", (1, 2, 4, 8)), pick("groups", (1, 1, 1, 2))
    preset, arch = pick("preset", _PRESETS), ALL[number % len(ALL)]
    bf16 = preset == "v4.1-flash" and arch != "sm100"
    return Case(
        arch=arch,
        preset=preset,
        tokens=pick("tokens", _TOKENS),
        hidden_size=128,
        n_groups=groups * tp_size,
        o_lora_rank=128 if arch == "sm90" else 512 // groups,  # wo_b reads packed scales of 512 at a time
        tp_size=tp_size,
        tp_rank=pick("tp rank", range(tp_size)),
        family=pick("family", tuple(FAMILIES)),
        seed=seed + number,
        position_family=pick("positions", POSITION_FAMILIES),
        rope_kind=pick("rope", ROPE_KINDS),
        padded_heads=pick("padded", (0, groups * 8, groups * 8 + 8)),
        padding_slots=0 if bf16 else pick("slots", (0, 0, 1)),
    )


def variant_of(number: int, case: Case) -> Variant:
    """The variant whose turn it is among those that ``case`` fits."""
    fitting = [v for v in VARIANTS if case.arch in v.archs and v.fits(case)]
    return fitting[number // len(ALL) % len(fitting)]


def run_numbers(numbers: range, seed: int) -> list[Count]:
    """The Cases of these numbers, one after another."""
    counts = []
    for number in numbers:
        case = small_case(number, seed)
        variant = variant_of(number, case)
        prepared = variant.prepare(case)
        alarms = failed_checks(prepared, variant.implementation(case.arch))
        counts.append(Count((variant.name, case.arch, case.family), prepared.to_json(), alarms))
    return counts


def run_all(cases: int, workers: int, seed: int) -> Iterator[Count]:
    """Every Case, in no order; ``workers`` processes of one thread each."""
    tasks = [range(first, min(first + _BATCH, cases)) for first in range(0, cases, _BATCH)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker) as pool:
        for counts in pool.map(run_numbers, tasks, [seed] * len(tasks)):
            yield from counts


def print_counts(console: Console, ran: Counter, alarms: Counter) -> None:
    """One line per variant and arch."""
    table = Table(title="False alarms", title_justify="left")
    for column in ("variant", "arch", "Cases", "families", "alarms"):
        table.add_column(column)
    pairs = sorted({(variant, arch) for variant, arch, _ in ran})
    for pair in pairs:
        keys = [key for key in ran if key[:2] == pair]
        counts = (sum(ran[key] for key in keys), len(keys), sum(alarms[key] for key in keys))
        table.add_row(*pair, *map(str, counts))
    console.print(table)


def main(
    cases: Annotated[int, typer.Option(min=1, help="How many Cases.")] = 1000,
    workers: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Write counts and every alarm there, as JSON.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives other Cases.")] = 0,
) -> None:
    """Count how often a right implementation is flagged."""
    started, ran, alarms, bad = time.perf_counter(), Counter(), Counter(), []  # type: ignore[var-annotated]
    for count in run_all(cases, workers, seed):
        ran[count.key] += 1
        if count.alarms:
            alarms[count.key] += 1
            bad.append({"variant": count.key[0], "checks": list(count.alarms), "case": json.loads(count.case)})
    seconds, console = time.perf_counter() - started, Console()
    print_counts(console, ran, alarms)
    for one in bad[:10]:
        console.print(json.dumps(one, sort_keys=True), soft_wrap=True, highlight=False)
    console.print(f"{len(bad)} alarms in {ran.total():,} Cases, {seconds:.0f} s on {workers} processes")
    if out is not None:
        rows = [{"variant": v, "arch": a, "family": f, "cases": n, "alarms": alarms[v, a, f]}
                for (v, a, f), n in sorted(ran.items())]  # fmt: skip
        result = {"version": 1, "cases": ran.total(), "seconds": round(seconds, 1), "counts": rows, "alarms": bad}
        write_text(out, json.dumps(result, indent=1) + "\n")
    raise typer.Exit(NOTHING_COMPARED if not ran else FAILED if bad else PASSED)


if __name__ == "__main__":
    typer.run(main)
