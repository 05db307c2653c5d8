"""``python -m benchmarks.reports [--rows N] [--out DIR]``: time and size of loading, tables and the page of many rows.

The rows are synthetic: Cases of every architecture, preset, size and family, 18 rows each, figures drawn at random,
one row in 5,000 failing. Prints a Markdown table; exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.table import row
from reports import RowWriter, load, per_arch_stage, run_against_run, to_markdown, worst_cases, write_page
from reports.columns import COLUMNS, SCHEMA_VERSION
from reports.schema import ARROW_SCHEMA

ROWS = 1_000_000
PART = 1000
LOAD_SECONDS, PAGE_SECONDS, PAGE_MB = 2.0, 20.0, 8.0
_PLACES = [
    *(("quantize", oracle) for oracle in ("bits", "exact", "attainable", "bound")),
    *((stage, oracle) for stage in ("wo_a", "wo_b") for oracle in ("bits", "exact", "bound", "format")),
    *(("reduce", oracle) for oracle in ("bits", "exact", "bound")),
    *(("o_proj", oracle) for oracle in ("bits", "exact", "format")),
]
_WORDS = {
    "arch": ("sm90", "sm100", "sm120"),
    "preset": ("v4-flash", "v4-pro", "v4.1-flash"),
    "family": ("normal", "wide", "outlier", "sparse", "boundary", "positive", "address", "exact"),
}


def rows(count: int, seed: int = 0) -> pa.Table:
    """``count`` synthetic rows as an Arrow table of the schema."""
    rng = np.random.default_rng(seed)
    case = np.arange(count) // len(_PLACES)
    place = np.arange(count) % len(_PLACES)
    stage, oracle = np.array(_PLACES)[place].T
    margins = np.isin(oracle, ["bound", "format"])
    failed = (rng.random(count) < 1 / 5000) & (oracle != "format")
    margin = np.where(margins, rng.beta(5, 2, count), np.nan)
    values = {
        **{name: np.array(words)[case % len(words)] for name, words in _WORDS.items()},
        "stage": stage,
        "oracle": oracle,
        "case_id": np.char.add("c", case.astype(str)),
        "case": _cases(case),
        "tp_size": 2 ** (case // 3 % 4),
        "tokens": 1 + case // 7 % 33,
        "compared": rng.integers(1, 10**6, count),
        "mismatched": failed.astype(np.int64),
        "margin_max": np.where(failed & margins, 1.5, margin),
        "margin_p999": margin,
        "margin_p50": margin / 4,
        "rms_rel_error": np.where(margins, rng.random(count) / 100, np.nan),
        "signed_bias": np.where(margins, rng.normal(0, 1e-4, count), np.nan),
        "ulp_max": np.where(oracle == "bound", rng.integers(0, 2**15, count), np.nan).astype(np.float64),
        "ulp_histogram": _histograms(rng, oracle == "bound"),
        "first_bad": np.where(failed, '{"tensor": "z", "at": [1, 2, 128]}', ""),
        "error_map": _maps(rng, failed & margins, (stage == "wo_b") & (oracle == "bound")),
        "verdict": np.where(failed, "fail", "pass"),
        "reason": np.where(failed, "1 of 512 elements with other bits", ""),
    }
    fixed = {
        "schema_version": SCHEMA_VERSION,
        "run_id": "bench",
        "time_utc": "2026-01-31T12:00:00Z",
        "git_revision": "0123abc",
        "engine": "software",
        "implementation": "software",
        "evidence": "measured",
        "versions": '{"numpy": "2.4.6"}',
    }
    defaults: dict[str, Any] = {"int64": 0, "float64": np.nan}
    columns = [values.get(c.name, fixed.get(c.name, defaults.get(c.dtype, ""))) for c in COLUMNS]
    filled = [column if isinstance(column, np.ndarray) else np.full(count, column) for column in columns]
    arrays = [pa.array(column).cast(field.type) for column, field in zip(filled, ARROW_SCHEMA)]
    return pa.Table.from_arrays(arrays, schema=ARROW_SCHEMA)


def _cases(case: np.ndarray) -> np.ndarray:
    texts = [
        json.dumps(
            {
                "arch": _WORDS["arch"][n % 3],
                "family": _WORDS["family"][n % 8],
                "hidden_size": 512,
                "n_groups": 2 + 2 * (n % 4),
                "n_heads": 64,
                "o_lora_rank": 256 << n % 3,
                "padded_heads": 64,
                "padding_slots": 0,
                "position_family": "start",
                "preset": _WORDS["preset"][n % 3],
                "quant_group_size": 128,
                "rope_kind": "plain",
                "seed": n,
                "tokens": 5,
                "tp_rank": 0,
                "tp_size": 4,
                "variant": "fma_cos",
                "wo_a_dtype": "fp8",
            }
        )
        for n in range(int(case[-1]) + 1)
    ]
    return np.array(texts, dtype=object)[case]


def _maps(rng: np.random.Generator, failed: np.ndarray, passed: np.ndarray) -> np.ndarray:
    """A full map of shares and margins in each failed row, and one of margins over few tokens in a row of each Case."""
    out = np.full(len(failed), "", dtype=object)

    def some(tokens: int, share: bool) -> list[str]:
        tiles = rng.random((64, tokens, 16)).round(3)
        return [
            json.dumps({"rows": "token", "columns": "column", "shape": [tokens, 512], "share": shares, "max": largest})
            for shares, largest in zip((tiles if share else np.zeros(tiles.shape, np.int64)).tolist(), tiles.tolist())
        ]

    for rows, maps, count in ((passed, some(5, False), 1), (failed, some(16, True), 2)):
        texts = np.array([f'{{"maps": [{", ".join([one] * count)}]}}' for one in maps], dtype=object)
        out[rows] = texts[rng.integers(0, len(texts), int(rows.sum()))]
    return out


def _histograms(rng: np.random.Generator, having: np.ndarray) -> np.ndarray:
    out = np.full(len(having), "", dtype=object)
    counts = rng.integers(0, 10**5, (int(having.sum()), 3))
    out[having] = [f'{{"0": {a}, "1": {b}, "16384": {c}}}' for a, b, c in counts.tolist()]
    return out


def write_parts(table: pa.Table, folder: Path) -> None:
    """The rows as parts of ``PART`` rows, as a run leaves them."""
    for number, start in enumerate(range(0, len(table), PART)):
        pq.write_table(table.slice(start, PART), folder / f"rows-bench-{number:04d}.parquet")


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def figures(count: int, folder: Path) -> pd.DataFrame:
    """One line per figure: loading, tables, the page's time and size."""
    write_parts(rows(count), folder)
    _, loading = _timed(lambda: load(folder))
    _, joining = _timed(RowWriter(folder, "bench").close)
    df, loading_joined = _timed(lambda: load(folder))
    _, stages = _timed(lambda: per_arch_stage(df))
    _, worst = _timed(lambda: worst_cases(df))
    _, against = _timed(lambda: run_against_run(df, df))
    path, page = _timed(lambda: write_page(df, folder / "report.html"))
    note = f"{count:,} rows"
    lines = [
        row("load, parts of 1,000 rows", loading, "s", f"< {LOAD_SECONDS:g}", 1, note),
        row("parts joined in one file, as a run ends", joining, "s", "", 1, note),
        row("load, one file", loading_joined, "s", f"< {LOAD_SECONDS:g}", 1, note),
        row("table per arch and stage", stages, "s", "", 1, note),
        row("worst cases", worst, "s", "", 1, note),
        row("run against run", against, "s", "", 1, note),
        row("page", page, "s", f"< {PAGE_SECONDS:g}", 1, note),
        row("page, size", path.stat().st_size / 1e6, "MB", f"< {PAGE_MB:g}", 1, note),
    ]
    return pd.DataFrame(lines)


def main() -> int:
    """Print the table; 1 where a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reports", description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of the synthetic run")
    parser.add_argument("--out", type=Path, help="folder to keep the rows and the page in; it must be empty")
    arguments = parser.parse_args()
    if arguments.rows < 1:
        parser.error(f"--rows must be at least 1, got {arguments.rows}")
    if arguments.out is None:
        with tempfile.TemporaryDirectory() as folder:
            table = figures(arguments.rows, Path(folder))
    else:
        arguments.out.mkdir(parents=True, exist_ok=True)
        if any(arguments.out.iterdir()):
            parser.error(f"--out {arguments.out} is not empty")
        table = figures(arguments.rows, arguments.out)
    print(to_markdown(table))
    targets = table[table["target"] != ""]
    missed = targets[~(targets["value"] < targets["target"].str.removeprefix("< ").astype(float))]
    for name in missed["figure"]:
        print(f"missed: {name}", file=sys.stderr)
    return 1 if len(missed) else 0


if __name__ == "__main__":
    sys.exit(main())
