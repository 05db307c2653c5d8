"""The command line: what it prints and writes, and the exit code of each way a run can end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner, Result

import conformance.run_command as run_command
from conformance.case import Case
from conformance.cli import app
from conformance.grid import Grid
from conformance.runner import Run, Target, run_case
from conformance.strategies import profile_cases
from conformance.terminal import integers, split
from reports.store import RowWriter, load

QUICK = ["--preset", "v4-flash", "--tp", "8", "--tokens", "2", "--family", "exact"]


def oproj(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def text(result: Result) -> str:
    """Standard output and error as one line, since the terminal's width breaks lines anywhere."""
    return " ".join((result.output + result.stderr).split())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two architectures with everything that a run writes."""
    out = tmp_path_factory.mktemp("run")
    result = oproj("run", "--arch", "sm90,sm100", *QUICK, "--out", out)
    assert result.exit_code == 0, result.output
    assert "✓ pass" in result.output and "sm90" in result.output and "wo_b" in result.output
    assert f"rows of 2 Cases, tables and page in {out}" in text(result)
    return out


def test_run_writes_rows_tables_and_page(finished: Path) -> None:
    df = load(finished)
    assert set(df["arch"]) == {"sm90", "sm100"} and set(df["engine"]) == {"software"}
    assert len(load(finished / "rows.csv")) == len(df)
    assert "| quantize | bound |" in (finished / "tables.md").read_text(encoding="utf-8").replace("  ", " ")
    assert "<html" in (finished / "report.html").read_text(encoding="utf-8")


def test_rows_of_an_earlier_run_in_the_same_folder_are_replaced(tmp_path: Path) -> None:
    with RowWriter(tmp_path, "earlier") as writer:
        for row in run_case(
            Case("sm90", "v4-flash", 0, n_groups=1, o_lora_rank=128, hidden_size=128),
            Target("software"),
            Run.now("earlier"),
        ):
            writer.append(row)
    assert oproj("run", "--arch", "sm90", *QUICK, "--out", tmp_path).exit_code == 0
    df = load(tmp_path)
    assert "earlier" not in set(df["run_id"]) and set(df["tokens"]) == {2}


def test_failed_comparison_is_exit_1_with_a_line_to_paste(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import conformance\n"
        "class Mine(conformance.SoftwareImplementation):\n"
        "    def wo_b(self, z, weights, *, config):\n"
        "        y = super().wo_b(z, weights, config=config)\n"
        "        y[1, 5] = 0\n"
        "        return y\n"
    )
    result = oproj("run", "--arch", "sm90", *QUICK, "--implementation", f"{mine}:Mine", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "✗ FAIL" in result.output and "oproj replay '{" in result.output
    df = load(tmp_path / "out")
    bad = df[df["verdict"] == "fail"]
    assert set(bad["stage"]) == {"wo_b", "o_proj"} and set(bad["implementation"]) == {"Mine"}
    assert json.loads(bad["first_bad"].iloc[0])["at"] == [1, 5]

    line, case_id = bad["case"].iloc[0], bad["case_id"].iloc[0]
    again = oproj("replay", line, "--implementation", f"{mine}:Mine")
    assert again.exit_code == 1
    assert "wo_b bits: fail: 1 of" in text(again) and "y[1, 5]: got 0x0000" in text(again)
    by_id = oproj("replay", case_id, "--in", tmp_path / "out")
    assert by_id.exit_code == 1  # the rows name what they judged
    software = oproj("replay", case_id, "--in", tmp_path / "out", "--engine", "software")
    assert software.exit_code == 0 and "✓ pass" in software.output  # the software engine has no such fault


def test_nothing_compared_is_exit_4(tmp_path: Path) -> None:
    result = oproj("run", "--arch", "sm90", *QUICK[:4], "--tokens", "0", "--family", "exact", "--out", tmp_path)
    assert result.exit_code == 4
    assert "nothing compared" in result.output
    (tmp_path / "empty").mkdir()
    for command in (["report"], ["gate"], ["rebaseline", "--reason", "x"]):
        result = oproj(*command, tmp_path / "empty")
        assert result.exit_code == 4, command
        assert "nothing was recorded" in text(result)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, so nothing is missing")
def test_missing_hardware_is_exit_3_and_writes_nothing(tmp_path: Path) -> None:
    result = oproj("run", "--arch", "sm90", "--engine", "deep_gemm", "--out", tmp_path / "out")
    assert result.exit_code == 3
    assert "deep_gemm" in text(result)
    assert not (tmp_path / "out").exists()
    assert oproj("record", "--out", tmp_path / "golden").exit_code == 3


def test_missing_package_of_an_implementation_is_exit_3(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import a_package_that_nobody_has\n")
    result = oproj("run", "--arch", "sm90", "--implementation", f"{tmp_path / 'mine.py'}:Mine", "--out", tmp_path / "o")
    assert result.exit_code == 3 and "a_package_that_nobody_has" in text(result)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--arch", "sm80"], "'sm80' is unknown; known rows: sm90"),
        (["run", "--preset", "v5"], "'v5' is unknown; known presets: v4-flash"),
        (["run", "--family", "odd"], "'odd' is unknown; known families: normal"),
        (["run", "--engine", "fast"], "'fast' is unknown; known engines: auto"),
        (["run", "--tp", "3"], "tp=3 is impossible"),
        (["run", "--tp", "two"], "--tp takes whole numbers"),
        (["run", "--tokens", "-1"], "must not be negative"),
        (["run", "--tokens", ","], "tokens is empty"),
        (["run", "--seed", str(2**63)], "seed=9223372036854775808 must lie in 0 .. 2**62 - 1"),
        (["run", "--tokens", str(10**20)], "below 2**31"),
        (["run", "--examples", "-1"], "Invalid value"),
        (["run", "--implementation", "nowhere.py:Mine"], "'nowhere.py' does not exist"),
        (["run", "--implementation", "a:B", "--engine", "software"], "exclude each other"),
        (["run", "--archs", "sm90"], "No such option"),
        (["replay", "{}"], "missing case field(s): arch"),
        (["replay", '{"arch": 1'], "not JSON"),
        (["replay", "0123456789ab"], "say with --in DIR"),
        (["replay", "0123456789ab", "--in", "nowhere"], "nowhere: no such file"),
        (["report", "nowhere"], "nowhere: no such file"),
        (["gate", "nowhere"], "nowhere: no such file"),
        (["gate", "nowhere", "--arch", ","], "--arch is empty"),
        (["rebaseline", "nowhere", "--reason", "x"], "nowhere: no such file"),
        (["rebaseline", "nowhere"], "Missing option"),
        (["explode"], "No such command"),
    ],
)
def test_bad_input_is_exit_2_and_says_what_would_be_right(arguments: list[str], says: str) -> None:
    result = oproj(*arguments)
    assert result.exit_code == 2, result.output
    assert says in text(result).replace("│ ", "").replace(" │", "")


def test_comma_lists_and_repeated_options_are_one_list() -> None:
    assert split(["a,b", "c", "a"], ()) == ("a", "b", "c")
    assert split(None, ("x",)) == ("x",)
    assert integers(["1,2", "8"], (), "tp") == (1, 2, 8)
    grid = run_command._grid(["sm90,sm100", "sm120"], None, ["8"], ["0,3"], None, 1, 7, False)
    assert (grid.archs, grid.tp_sizes, grid.tokens, grid.many_tokens) == (("sm90", "sm100", "sm120"), (8,), (0, 3), 0)
    assert run_command._grid(None, None, None, None, None, 0, 0, False) == Grid(many_tokens=64)


def test_report_prints_each_format_and_writes_the_page(finished: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert "✓ pass" in oproj("report", finished, "--html", page).output
    assert "<html" in page.read_text(encoding="utf-8")
    assert oproj("report", finished, "--format", "md").output.startswith("| arch |")
    lines = oproj("report", finished, "--format", "csv").output.splitlines()
    assert lines[0].startswith("arch,stage,oracle") and len(lines) == 1 + 2 * 18
    assert oproj("report", finished, "--format", "xml").exit_code == 2


def test_gate_passes_its_own_baseline_and_fails_a_missing_row(finished: Path, tmp_path: Path) -> None:
    baselines = tmp_path / "baselines"
    empty = tmp_path / "none"
    empty.mkdir()
    without = oproj("gate", finished, "--baseline", empty)
    assert without.exit_code == 1 and "no baseline file sm90-software.csv" in text(without)

    made = oproj("rebaseline", finished, "--reason", "first", "--baseline", baselines)
    assert made.exit_code == 0 and {p.name for p in baselines.glob("*.csv")} == {
        "sm90-software.csv",
        "sm100-software.csv",
    }
    passed = oproj("gate", finished, "--baseline", baselines)
    assert passed.exit_code == 0 and "gate passed" in passed.output
    assert oproj("gate", finished, "--baseline", baselines, "--arch", "sm90,sm120").exit_code == 1

    df = load(finished)
    cut = tmp_path / "cut"
    with RowWriter(cut, "cut") as writer:
        for row in df[df["stage"] != "wo_b"].astype(object).to_dict("records"):
            writer.append({str(k): v for k, v in row.items()} | {"run_id": "cut"})
    failed = oproj("gate", cut, "--baseline", baselines)
    assert failed.exit_code == 1 and "wo_b bound" in text(failed) and "missing in the run" in text(failed)


def test_rebaseline_refuses_a_failed_run(finished: Path, tmp_path: Path) -> None:
    row = load(finished).astype(object).to_dict("records")[1]
    with RowWriter(tmp_path / "rows", "bad") as writer:
        writer.append({str(k): v for k, v in row.items()} | {"run_id": "bad", "verdict": "fail", "reason": "x"})
    result = oproj("rebaseline", tmp_path / "rows", "--reason", "x", "--baseline", tmp_path / "baselines")
    assert result.exit_code == 2 and "failed row" in text(result)
    assert not (tmp_path / "baselines").exists()


def test_interrupted_run_leaves_valid_rows_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = run_command.run_cases

    def stopped(*arguments: object, **options: object):  # type: ignore[no-untyped-def]
        yield next(real(*arguments, **options))  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(run_command, "run_cases", stopped)
    result = oproj("run", "--arch", "sm90,sm100", *QUICK, "--out", tmp_path)
    assert result.exit_code == 130
    assert re.search(r"stopped: 18 new rows in .* are valid", text(result))
    df = load(tmp_path)
    assert isinstance(df, pd.DataFrame) and df["case_id"].nunique() == 1


def test_replay_of_a_right_case_is_exit_0() -> None:
    case = Case("sm90", "v4-flash", 2, n_groups=1, o_lora_rank=512, hidden_size=128, family="exact")
    result = oproj("replay", case.to_json())
    assert result.exit_code == 0
    assert "quantize bits: not applicable: the software engine is the model itself" in text(result)


def test_env_says_what_is_installed() -> None:
    result = oproj("env")
    assert result.exit_code == 0
    assert f"torch {torch.__version__}" in text(result) and "DeepGEMM" in result.output


def test_many_cases_on_cpus_take_every_core_and_a_gpu_takes_one_process() -> None:
    class OnGpu:
        device = "cuda"

    assert run_command._processes(31, []) == 1
    assert run_command._processes(32, []) == min(run_command.thread_count(), 16)
    assert run_command._processes(32, [OnGpu()]) == 1  # type: ignore[list-item]


def test_folder_that_cannot_be_written_is_exit_2_and_named(finished: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for command in (
        ["run", "--arch", "sm90", *QUICK, "--out", file / "sub"],
        ["report", finished, "--html", file / "page.html"],
        ["report", finished, "--html", tmp_path],
        ["rebaseline", finished, "--reason", "x", "--baseline", file],
    ):
        result = oproj(*command)
        assert result.exit_code == 2, result.output
        assert str(file) in text(result) or f"{tmp_path}: Is a directory" in text(result)


def test_folder_with_foreign_parquet_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    for name in ("rows-2024.parquet", "rows-earlier-0000.parquet"):
        (tmp_path / name).write_bytes(b"kept")
    result = oproj("run", "--arch", "sm90", *QUICK, "--out", tmp_path)
    assert result.exit_code == 2 and "rows-2024.parquet: foreign file" in text(result)
    assert {path.name for path in tmp_path.iterdir()} == {"rows-2024.parquet", "rows-earlier-0000.parquet"}


def test_tables_of_an_earlier_run_do_not_outlive_a_stopped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_command, "run_cases", stopped)
    for name in ("rows.csv", "tables.md", "report.html", "notes.txt"):
        (tmp_path / name).touch()
    assert oproj("run", "--arch", "sm90", *QUICK, "--out", tmp_path).exit_code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("threads", ["abc", "0", "-1", "1.5"])
def test_bad_number_of_threads_is_exit_2(threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPROJ_THREADS", threads)
    result = oproj("run", "--arch", "sm90", *QUICK, "--out", tmp_path / "out")
    assert result.exit_code == 2 and f"OPROJ_THREADS='{threads}' must be a whole number" in text(result)
    assert not (tmp_path / "out").exists()


def test_implementation_that_exits_fails_the_run_or_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    body = "import conformance\nclass Mine(conformance.SoftwareImplementation):\n    def {}: exit(0)\n"
    for method, code in (("wo_a(self, *args, **options)", 1), ("__init__(self, arch)", 2)):
        mine.write_text(body.format(method))
        result = oproj("run", "--arch", "sm90", *QUICK, "--implementation", f"{mine}:Mine", "--out", tmp_path / "out")
        assert result.exit_code == code, result.output


def test_a_profile_runs_the_cases_that_hypothesis_drew(tmp_path: Path) -> None:
    result = oproj("run", "--profile", "ci", "--examples", "3", "--arch", "sm90,sm100", "--out", tmp_path / "run")
    assert result.exit_code == 0, text(result)
    ids = {case.id for arch in ("sm90", "sm100") for case in profile_cases("ci", arch, 3)}
    assert set(load(tmp_path / "run")["case_id"]) == ids
    refused = oproj("run", "--profile", "ci", "--tokens", "5")
    assert refused.exit_code == 2 and "--profile ci draws presets" in text(refused)
    assert oproj("run", "--profile", "daily").exit_code == 2


def test_faults_prints_who_kills_what_and_writes_json(tmp_path: Path) -> None:
    matrix = tmp_path / "kill.json"
    result = oproj("faults", "--arch", "sm90", "--fault", "k-tail-drop", "--json", matrix, "--workers", "1")
    assert result.exit_code == 0, text(result)
    (kill,) = json.loads(matrix.read_text())["faults"]
    assert kill["killed"] and kill["checks"] and kill["case_number"] >= 1
    assert oproj("faults", "--fault", "no-such-fault").exit_code == 2
    assert oproj("faults", "--arch", "sm91").exit_code == 2


def test_an_id_is_replayed_with_the_implementation_that_was_recorded(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from conformance import SoftwareImplementation\n"
        "class Mine(SoftwareImplementation):\n"
        "    def wo_b(self, z, weights, *, config):\n"
        "        return super().wo_b(z, weights, config=config) * 2\n"
    )
    folder = tmp_path / "run"
    given = ("--arch", "sm90", "--preset", "v4-flash", "--tp", "1", "--tokens", "1", "--examples", "1")
    assert oproj("run", *given, "--implementation", f"{mine}:Mine", "--out", folder).exit_code == 1
    rows = load(folder)
    assert set(rows["spec"]) == {f"{mine}:Mine"}
    again = oproj("replay", rows["case_id"].iloc[0], "--in", folder)
    assert again.exit_code == 1 and "note:" not in text(again)
    assert oproj("replay", rows["case_id"].iloc[0], "--in", folder, "--engine", "software").exit_code == 0
