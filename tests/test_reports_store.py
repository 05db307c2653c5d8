"""Rows on disk: equal when read back, whole after a kill, and refused by name when they are something else."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports import NoRowsError, RowsError, RowWriter, from_rows, load, make_row, write_csv
from reports.columns import COLUMNS
from reports.store import remove_parts, remove_unfinished
from reports_rows import TEXT, frame, row, rows

ROOT = Path(__file__).parent.parent
FLOATS = [column.name for column in COLUMNS if column.dtype == "float64"]


@st.composite
def any_rows(draw):
    """Rows with any text and any float, infinite, subnormal and NaN included."""
    drawn = draw(rows(TEXT))
    return make_row(**{**drawn, "variant": draw(TEXT), **{name: draw(st.floats()) for name in FLOATS}})


def assert_same(a: pd.DataFrame, b: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(a, b, check_exact=True)
    for name in FLOATS:
        bits = [df[name].to_numpy().view(np.int64)[df[name].notna()] for df in (a, b)]
        assert np.array_equal(*bits), name


def append_each(writer, rows) -> None:
    """One row after another, so that each may end a part."""
    for one in rows:
        writer.append(one)


@given(drawn=st.lists(any_rows(), min_size=1, max_size=5), flush_every=st.integers(1, 3))
@settings(max_examples=40)
def test_parquet_and_csv_give_the_same_rows_back(tmp_path_factory, drawn, flush_every):
    folder = tmp_path_factory.mktemp("rows")
    with RowWriter(folder, "r1", flush_every) as writer:
        append_each(writer, drawn)
    df = from_rows(drawn)
    assert len(writer.paths) == -(-len(drawn) // flush_every)
    assert_same(load(folder), df)
    assert_same(load(write_csv(df, folder / "rows.csv")), df)


def test_a_csv_of_many_blocks_keeps_text_with_line_breaks(tmp_path):
    df = frame(*({"reason": f"{i}\n" * 200} for i in range(3000)))
    path = write_csv(df, tmp_path / "rows.csv")
    assert path.stat().st_size > 2**21
    assert_same(load(path), df)


def test_a_part_can_be_loaded_alone_and_parts_load_in_order(tmp_path):
    with RowWriter(tmp_path, "r1", 1) as writer:
        append_each(writer, (row(case_id=f"c{i}") for i in range(3)))
    assert [path.name for path in writer.paths] == [f"rows-r1-000{i}.parquet" for i in range(3)]
    assert list(load(tmp_path)["case_id"]) == ["c0", "c1", "c2"]
    assert list(load(writer.paths[1])["case_id"]) == ["c1"]


def many_parts(folder: Path, end: BaseException | None = None) -> None:
    """40 rows in 20 parts, joined where the run ends by itself."""
    with RowWriter(folder, "r1-0007", 2) as writer:
        append_each(writer, (row(run_id="r1-0007", case_id=f"c{i}") for i in range(40)))
        if end is not None:
            raise end


def test_a_run_of_many_parts_ends_as_one_file_with_the_same_rows(tmp_path):
    many_parts(tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.name == "rows-r1-0007-0000to0019.parquet"
    expected = from_rows(row(run_id="r1-0007", case_id=f"c{i}") for i in range(40))
    assert_same(load(tmp_path), expected)
    assert_same(load(path), expected)
    with RowWriter(tmp_path, "r1-0007") as writer:
        writer.append(row(run_id="r1-0007", case_id="after"))
    assert [path.name for path in writer.paths] == ["rows-r1-0007-0020.parquet"]
    assert list(load(tmp_path)["case_id"])[40:] == ["after"]


def test_an_interrupted_run_keeps_its_parts_and_is_joined_when_it_is_taken_up(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        many_parts(tmp_path, KeyboardInterrupt())
    assert len(list(tmp_path.iterdir())) == 20
    with RowWriter(tmp_path, "r1-0007") as writer:
        writer.append(row(run_id="r1-0007", case_id="after"))
    assert [path.name for path in tmp_path.iterdir()] == ["rows-r1-0007-0000to0020.parquet"]
    assert list(load(tmp_path)["case_id"]) == [*(f"c{i}" for i in range(40)), "after"]


def test_parts_that_a_kill_left_beside_their_joined_file_count_once(tmp_path, monkeypatch):
    with monkeypatch.context() as killed:
        killed.setattr(Path, "unlink", lambda path, **options: (_ for _ in ()).throw(SystemExit("killed")))
        with pytest.raises(SystemExit):
            many_parts(tmp_path)
    assert len(list(tmp_path.iterdir())) == 21
    assert list(load(tmp_path)["case_id"]) == [f"c{i}" for i in range(40)]
    with RowWriter(tmp_path, "r1-0007") as writer:
        writer.append(row(run_id="r1-0007", case_id="after"))
    assert len(load(tmp_path)) == 41
    with RowWriter(tmp_path, "other", 1) as writer:
        writer.append(row(run_id="other"))
    assert len(load(tmp_path)) == 42
    remove_parts(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_groups_come_in_the_order_people_expect_without_sorting(tmp_path):
    with RowWriter(tmp_path, "r1", 1) as writer:
        for arch in ("sm120", "sm90", "sm100"):
            writer.extend(row(arch=arch, stage=stage, oracle="bits") for stage in ("wo_b", "quantize", "mine", "wo_a"))
    df = load(tmp_path)
    groups = df.groupby(["arch", "stage"], observed=True)["compared"].sum()
    stages = ["quantize", "wo_a", "wo_b", "mine"]
    assert list(groups.index) == [(arch, stage) for arch in ("sm90", "sm100", "sm120") for stage in stages]
    assert list(df["stage"][:4]) == ["wo_b", "quantize", "mine", "wo_a"]


def test_a_run_that_is_opened_again_goes_on_and_overwrites_nothing(tmp_path):
    for i in range(3):
        with RowWriter(tmp_path, "r1") as writer:
            writer.append(row(case_id=f"c{i}"))
    with RowWriter(tmp_path, "r2") as writer:
        writer.append(row(run_id="r2", case_id="other"))
    assert list(load(tmp_path)["case_id"]) == ["c0", "c1", "c2", "other"]


@given(sizes=st.lists(st.integers(0, 7), max_size=8), flush_every=st.integers(1, 9))
@settings(max_examples=40)
def test_rows_that_belong_together_are_in_one_part(tmp_path_factory, sizes, flush_every):
    folder = tmp_path_factory.mktemp("rows")
    with RowWriter(folder, "r1", flush_every) as writer:
        for case, count in enumerate(sizes):
            writer.extend(row(case_id=f"c{case}") for _ in range(count))
    held = [list(load(path)["case_id"]) for path in writer.paths]
    assert [case for part in held for case in part] == [f"c{i}" for i, n in enumerate(sizes) for _ in range(n)]
    assert sum(len(set(part)) for part in held) == sum(n > 0 for n in sizes)
    assert all(len(part) >= flush_every for part in held[:-1])


def test_a_case_with_a_bad_row_leaves_none_of_its_rows(tmp_path):
    with RowWriter(tmp_path, "r1") as writer:
        writer.extend([row(case_id="c0"), row(case_id="c0")])
        with pytest.raises(ValueError, match="run_id must be 'r1'"):
            writer.extend([row(case_id="c1"), row(case_id="c1", run_id="r2")])
    assert list(load(tmp_path)["case_id"]) == ["c0", "c0"]


def test_leaving_the_writer_by_an_exception_keeps_the_rows(tmp_path):
    def interrupted():
        with RowWriter(tmp_path, "r1") as writer:
            writer.append(row())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(load(tmp_path)) == 1


def test_the_writer_refuses_foreign_rows_and_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="run_id must be"):
        RowWriter(tmp_path, "../r1")
    with pytest.raises(ValueError, match="flush_every must be at least 1, got 0"):
        RowWriter(tmp_path, "r1", 0)
    writer = RowWriter(tmp_path, "r1")
    with pytest.raises(ValueError, match="run_id must be 'r1' in this writer, got 'r2'"):
        writer.append(row(run_id="r2"))
    with pytest.raises(ValueError, match="missing row field"):
        writer.append({"arch": "sm90"})
    writer.close()
    with pytest.raises(ValueError, match="the writer of run 'r1' is closed"):
        writer.append(row())


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import pyarrow.parquet as pq
from reports_rows import row
from reports import RowWriter

whole = pq.write_table
written = []

def write_table(table, path, **options):
    if len(written) == 2:
        # The third part gets its first bytes, and then the process is gone.
        with open(path, "wb") as file:
            file.write(b"PAR1 half a part")
            file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    written.append(path)
    whole(table, path, **options)

pq.write_table = write_table
with RowWriter({folder!r}, "r1", flush_every=4) as writer:
    for i in range(100):
        writer.append(row(case_id=f"c{{i}}"))
"""


def test_a_writer_killed_inside_a_part_leaves_whole_parts_only(tmp_path):
    script = KILLED.format(tests=str(ROOT / "tests"), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(load(tmp_path)["case_id"]) == [f"c{i}" for i in range(8)]
    assert len(list(tmp_path.iterdir())) == 3
    (tmp_path / ".rows-of-mine.tmp").touch()
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".rows-of-mine.tmp", "rows-r1-0000.parquet", "rows-r1-0001.parquet",
    ]  # fmt: skip
    with RowWriter(tmp_path, "r1") as writer:
        writer.append(row(case_id="after"))
    assert list(load(tmp_path)["case_id"])[8:] == ["after"]


def test_a_failed_write_leaves_no_temporary_file_and_keeps_the_rows(tmp_path, monkeypatch):
    writer = RowWriter(tmp_path, "r1")
    writer.append(row())
    with monkeypatch.context() as broken:
        broken.setattr(pq, "write_table", lambda table, path, **options: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            writer.flush()
    assert list(tmp_path.iterdir()) == []
    writer.close()
    assert len(load(tmp_path)) == 1


def _truncated(folder: Path) -> Path:
    with RowWriter(folder, "r1", 1) as writer:
        append_each(writer, [row(), row()])
    path = writer.paths[1]
    path.write_bytes(path.read_bytes()[:-100])
    return path


def _renamed(folder: Path) -> Path:
    with RowWriter(folder, "r1") as writer:
        writer.append(row())
    return writer.paths[0].rename(folder / "part.parquet")


def _foreign_parquet(folder: Path) -> Path:
    pd.DataFrame({"a": [1]}).to_parquet(folder / "rows-x-0000.parquet")
    return folder / "rows-x-0000.parquet"


def _other_dtype(folder: Path) -> Path:
    frame({}).astype({"compared": "float64"}).to_parquet(folder / "rows-x-0000.parquet")
    return folder / "rows-x-0000.parquet"


def _other_text(folder: Path) -> Path:
    frame({}).to_parquet(folder / "rows-x-0000.parquet")
    return folder / "rows-x-0000.parquet"


@pytest.mark.parametrize(
    "plant, message",
    [
        (_truncated, "truncated or not a Parquet file"),
        (_renamed, "foreign file; parts are named rows-"),
        (_foreign_parquet, "missing column"),
        (_other_dtype, "column compared must be int64, it is float64"),
        (_other_text, "column time_utc is large_string; a row file has string"),
    ],
)
def test_a_bad_part_in_a_folder_is_named(tmp_path, plant, message):
    path = plant(tmp_path)
    with pytest.raises(RowsError, match=f"{re.escape(str(path))}: .*{message}"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("x.txt", b"rows", "foreign file"),
        ("x.parquet", b"rows", "truncated or not a Parquet file"),
        ("x.parquet", b"", "truncated or not a Parquet file"),
        ("x.csv", b"a,b\n1,2\n", r"missing column\(s\): schema_version"),
        ("x.csv", b"", "not a CSV file of rows"),
        ("x.csv", b"\xff\xfe\x00", "not a CSV file of rows"),
        ("x.csv", b"\x89PNG\r\n\x1a\n\xff,\xfe\n", "not a CSV file of rows"),
    ],
)
def test_a_foreign_file_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(RowsError, match=f"{re.escape(str(path))}: {message}"):
        load(path)


def test_a_csv_with_a_word_for_a_number_is_named(tmp_path):
    path = write_csv(frame({"tokens": 77}), tmp_path / "rows.csv")
    path.write_text(path.read_text().replace("77,", "many,"))
    with pytest.raises(RowsError, match=r"rows\.csv: not a CSV file of rows: .*many"):
        load(path)


def test_a_csv_without_a_figure_is_refused_not_read_as_zero(tmp_path):
    path = write_csv(frame({"tokens": 77}), tmp_path / "rows.csv")
    path.write_text(path.read_text().replace("77,", ",", 1))
    with pytest.raises(RowsError, match=r"rows\.csv: column tokens must be int64"):
        load(path)


def test_nothing_found_is_named(tmp_path):
    with pytest.raises(RowsError, match=f"{re.escape(str(tmp_path / 'x'))}: no such file or folder"):
        load(tmp_path / "x")
    with pytest.raises(NoRowsError, match=f"{re.escape(str(tmp_path))}: holds no rows-"):
        load(tmp_path)
    with pytest.raises(NoRowsError, match=r"rows\.csv: holds no rows"):
        load(write_csv(from_rows([]), tmp_path / "rows.csv"))


def test_what_the_tables_write_beside_the_parts_does_not_disturb_a_folder(tmp_path):
    with RowWriter(tmp_path, "r1") as writer:
        writer.append(row())
    write_csv(load(tmp_path), tmp_path / "rows.csv")
    (tmp_path / "report.md").write_text("# report\n")
    assert len(load(tmp_path)) == 1
