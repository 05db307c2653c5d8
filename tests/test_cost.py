"""The cost model: more work costs more, costs add up, damaged files are refused; an estimate only tells."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from benchmarks.cost import fit
from conformance import cost_calibration, estimate, run_command, sweep_command
from conformance.case import Case
from conformance.cli import app
from conformance.cost import FEATURES, PATH, CostModel, features, load_model
from conformance.cost_calibration import Measured, calibrate, calibration_case, measure
from conformance.estimate import duration, lines, outlook
from conformance.grid import Grid
from conformance.runner import Judged
from conformance.strategies import ProfileCases, cases, profile_cases
from conformance.sweep import Cluster
from oproj.arch import ARCHS

MODEL = load_model()
_JUDGED = Judged("software", "software", "cpu", "{}")


@st.composite
def grown(draw: st.DrawFn) -> tuple[Case, Case]:
    """A Case and one that is larger in one size and equal in all others."""
    case = draw(cases())
    name, step = draw(
        st.sampled_from([("tokens", 1), ("n_groups", case.tp_size), ("o_lora_rank", 512), ("hidden_size", 128)])
    )
    more = getattr(case, name) + step * draw(st.integers(1, 4))
    changes = {name: more, "n_heads": 0, "padded_heads": 0}
    try:
        return case, dataclasses.replace(case, **changes)
    except ValueError:
        assume(False)
        raise


@settings(max_examples=200, deadline=None)
@given(grown())
def test_more_tokens_groups_rank_or_columns_never_cost_less(pair: tuple[Case, Case]) -> None:
    small, large = pair
    assert MODEL.case_seconds(small) <= MODEL.case_seconds(large)
    assert MODEL.case_bytes(small) <= MODEL.case_bytes(large)
    less, more = features(small), features(large)
    assert all(less[name] <= more[name] for name in FEATURES) and less != more


def test_every_arch_has_coefficients_that_grow_with_tokens_groups_and_k() -> None:
    """K of wo_b is groups times rank; K of wo_a is the same for every model."""
    assert MODEL.seconds.keys() == ARCHS.keys()
    for arch in ARCHS:
        base = {"tokens": 5, "n_groups": 2, "o_lora_rank": 512, "hidden_size": 256}
        for name, more in {"tokens": 65, "n_groups": 8, "o_lora_rank": 1024}.items():
            small, large = Case(arch, "v4-flash", **base), Case(arch, "v4-flash", **base | {name: more})  # type: ignore[arg-type]
            assert MODEL.case_seconds(large) > 1.2 * MODEL.case_seconds(small), (arch, name)


def test_tensor_parallel_ranks_share_the_work() -> None:
    def seconds(tp: int) -> float:
        return MODEL.case_seconds(Case("sm90", "v4-pro", 5, tp_size=tp))

    assert seconds(1) > seconds(2) > seconds(4) > seconds(8)


@settings(max_examples=50, deadline=None)
@given(st.lists(cases(), max_size=6), st.lists(cases(), max_size=6))
def test_processor_time_adds_up_over_cases(some: list[Case], others: list[Case]) -> None:
    both = MODEL.estimate(some + others, 1)
    apart = [MODEL.estimate(part, 1) for part in (some, others)]
    assert both.total_seconds == pytest.approx(sum(each.total_seconds for each in apart))
    assert sum(both.cases.values()) == len(some) + len(others)
    assert both.process_bytes == max(each.process_bytes for each in apart)


@settings(max_examples=50, deadline=None)
@given(st.lists(cases(), min_size=1, max_size=6), st.floats(0.01, 100))
def test_a_slower_machine_takes_longer_in_proportion(listed: list[Case], slower: float) -> None:
    here, there = MODEL.estimate(listed, 3, slower=slower), MODEL.estimate(listed, 3)
    assert here.total_seconds == pytest.approx(slower * there.total_seconds)
    assert here.wall_seconds == pytest.approx(slower * there.wall_seconds)
    assert here.gpu_seconds == pytest.approx(there.gpu_seconds)  # its host is not this machine


@settings(max_examples=50, deadline=None)
@given(st.lists(cases(), min_size=1, max_size=40), st.integers(1, 100))
def test_more_cores_never_take_longer_and_never_beat_the_work(listed: list[Case], cores: int) -> None:
    on, on_more = MODEL.estimate(listed, cores), MODEL.estimate(listed, cores + 1)
    assert on_more.wall_seconds <= on.wall_seconds
    assert on.wall_seconds >= on.total_seconds / cores
    assert on.wall_seconds >= max(map(MODEL.case_seconds, listed)) + MODEL.overhead.start


def test_a_sample_stands_for_the_whole_by_arch() -> None:
    listed = [*profile_cases("ci", "sm90", 10), *profile_cases("ci", "sm100", 5)]
    sample = MODEL.estimate(listed, 1)
    whole = MODEL.estimate(listed, 1, counts={"sm90": 1000, "sm100": 50})
    assert whole.processor_seconds["sm90"] == pytest.approx(100 * sample.processor_seconds["sm90"])
    assert whole.processor_seconds["sm100"] == pytest.approx(10 * sample.processor_seconds["sm100"])
    assert whole.cases == {"sm90": 1000, "sm100": 50}
    assert whole.process_bytes == sample.process_bytes and whole.gather_bytes > sample.gather_bytes
    with pytest.raises(ValueError, match="must name the archs of the cases: sm90, sm100"):
        MODEL.estimate(listed, 1, counts={"sm90": 1000})


def test_nothing_to_run_costs_nothing() -> None:
    empty = MODEL.estimate([], 4)
    assert (empty.total_seconds, empty.wall_seconds, empty.gpu_seconds) == (0, 0, 0)
    assert (empty.process_bytes, empty.gather_bytes) == (0, 0)
    nothing = outlook(Grid(archs=["sm90"], tokens=[1], examples=1), 2, finished=_all_ids())
    assert lines(nothing) == ["0 Cases: nothing to run"]


def _all_ids() -> frozenset[str]:
    return frozenset(case.id for case in Grid(archs=["sm90"], tokens=[1], examples=1).cases())


def test_the_outlook_of_a_profile_is_that_of_all_its_cases() -> None:
    plan = ProfileCases("nightly", ("sm90",), 2400)
    told = outlook(plan, 2, slower=1.0).estimate
    assert told.cases == {"sm90": 2400}
    exact = MODEL.estimate(plan.cases(), 2, drawn=True)
    assert told.total_seconds == pytest.approx(exact.total_seconds, rel=0.05)
    assert told.wall_seconds == pytest.approx(exact.wall_seconds, rel=0.05)


@pytest.mark.parametrize("arguments, message", [
    ({"cores": 0}, "cores=0 must be at least 1"),
    ({"cores": 1, "slower": 0.0}, "slower=0.0 must be a positive number"),
    ({"cores": 1, "slower": float("nan")}, "slower=nan must be a positive number"),
])  # fmt: skip
def test_impossible_machines_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MODEL.estimate([], **arguments)  # type: ignore[arg-type]


def test_an_arch_that_was_not_measured_is_named() -> None:
    other = dataclasses.replace(
        MODEL, seconds={"sm100": MODEL.seconds["sm100"]}, calibration={"sm100": MODEL.calibration["sm100"]}
    )
    with pytest.raises(ValueError, match="arch='sm90' has no measured cost; measured: sm100"):
        other.case_seconds(calibration_case("sm90"))
    with pytest.raises(ValueError, match="arch='sm90' has no measured cost; measured: sm100"):
        calibrate(other, ["sm100", "sm90"], 1)


# The file


def test_the_model_survives_json() -> None:
    assert CostModel.from_json(MODEL.to_json()) == MODEL
    assert MODEL.to_json() == PATH.read_text(encoding="utf-8")


def _damaged(*path: str, value: object) -> str:
    values = json.loads(MODEL.to_json())
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(values)


@pytest.mark.parametrize("text, message", [
    ("{", "coefficients are not JSON"),
    ("[]", "must be an object of seconds, bytes"),
    ("{}", "must be an object of seconds, bytes"),
    (_damaged("more", value=1), "found: .*more"),
    (_damaged("seconds", value=[1]), r"seconds=\[1\] must be an object"),
    (_damaged("seconds", "sm90", value={"case": 1.0}), r"seconds\['sm90'\]=.* must have a coefficient for each"),
    (_damaged("seconds", "sm90", "case", value=-1.0), "case=-1.0 must be a number of at least 0"),
    (_damaged("seconds", "sm90", "case", value="1"), "case='1' must be a number"),
    (_damaged("seconds", "sm90", "case", value=float("nan")), "case=nan must be a number"),
    (_damaged("seconds", "sm90", value=dict.fromkeys(FEATURES, 0)), "is all zero"),
    (_damaged("seconds", value={}), "the archs of both must be the same"),
    (_damaged("bytes", "table", value=float("inf")), "table=inf must be a number"),
    (_damaged("calibration", "sm90", value=True), "calibration: sm90=True must be a number"),
    (_damaged("overhead", value={"start": 1.0}), "overhead must be an object of start, draw"),
    (_damaged("gpu", "wall_seconds", value=-1.0), "gpu: wall_seconds=-1.0"),
])  # fmt: skip
def test_wrong_coefficients_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"cost.json: .*{message}"):
        load_model(path)


# The speed of this machine


@pytest.mark.parametrize("slower", [0.25, 1.0, 3.0])
def test_calibration_is_the_ratio_to_the_machine_of_the_fit(slower: float) -> None:
    def measured(listed: Iterable[Case], workers: int) -> list[Measured]:
        assert workers == 2
        found = [Measured(case, slower * MODEL.calibration[case.arch], 1.0) for case in listed]
        found[0] = dataclasses.replace(found[0], seconds=1e3)  # a hiccup does not count
        return found

    assert calibrate(MODEL, ["sm90", "sm100"], 2, measured) == pytest.approx(slower)


def test_a_measured_case_tells_its_processor_time_and_peak_memory() -> None:
    small = measure(Case("sm90", "v4-flash", 1, hidden_size=128, n_groups=1, o_lora_rank=128))
    large = measure(Case("sm90", "v4-flash", 5, hidden_size=1024, n_groups=4, o_lora_rank=512))
    assert 0 < small.seconds < large.seconds
    assert 50e6 < small.bytes < large.bytes < 20e9


def test_the_fit_finds_coefficients_back_and_keeps_the_sum() -> None:
    listed = profile_cases("ci", "sm90", 200)
    exact = [MODEL.case_seconds(case) for case in listed]
    refitted = dataclasses.replace(MODEL, seconds=MODEL.seconds | {"sm90": fit(listed, exact)})
    assert [refitted.case_seconds(case) for case in listed] == pytest.approx(exact, rel=0.01)
    noisy = [seconds * (0.8 if number % 2 else 1.3) for number, seconds in enumerate(exact)]
    found = fit(listed, noisy)
    assert min(found.values()) >= 0
    refitted = dataclasses.replace(MODEL, seconds=MODEL.seconds | {"sm90": found})
    assert sum(map(refitted.case_seconds, listed)) == pytest.approx(sum(noisy), rel=1e-6)


@pytest.mark.parametrize("seconds, text", [(0.05, "0.05 s"), (119, "119 s"), (180, "3 min"), (36_000, "10.0 h")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# The command


def oproj(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["run", *arguments])


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterable[None]:
    """Running a Case fails the test, and so does a file in the working folder."""

    def fail(*arguments: object, **keywords: object) -> None:
        raise AssertionError("a Case was run")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_command, "run_cases", fail)
    monkeypatch.setattr(cost_calibration, "run_case", fail)
    monkeypatch.setattr(estimate, "calibrate", lambda model, archs, workers: 1.0)
    yield
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("nothing_runs")
def test_estimate_tells_and_runs_nothing() -> None:
    told = oproj("--arch", "sm90,sm100", "--profile", "nightly", "--examples", "100", "--estimate", "--cores", "64")
    assert told.exit_code == 0, told.output
    assert "sm90: 100 Cases, " in told.output and "all: 200 Cases, " in told.output
    assert "on 64 free cores, a process each: " in told.output and " MiB a process" in told.output
    assert "sm90 on one NVIDIA H200" in told.output and "a rough figure" in told.output


@pytest.mark.usefixtures("nothing_runs")
def test_estimate_takes_the_workers_of_the_run() -> None:
    assert "on 3 free cores" in oproj("--arch", "sm100", "--tokens", "1", "--estimate", "--workers", "3").output
    assert "H200" not in oproj("--arch", "sm100", "--tokens", "1", "--estimate", "--workers", "3").output


@pytest.mark.usefixtures("nothing_runs")
def test_estimate_takes_the_cores_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_command, "join_cluster", lambda *arguments, **options: Cluster("auto"))
    monkeypatch.setattr(run_command, "judged_on", lambda cluster, target, archs, timeout: dict.fromkeys(archs, _JUDGED))
    monkeypatch.setattr(run_command, "import_ray", lambda: None)
    monkeypatch.setattr(run_command, "check_nodes", lambda ray, cluster, archs: 12)
    arguments = ["--arch", "sm90", "--tokens", "1", "--ray", "auto", "--estimate"]
    assert "on 12 free cores" in oproj(*arguments).output
    assert "on 5 free cores" in oproj(*arguments, "--cores", "5").output


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("arguments, message", [
    (["--cores", "4"], "--cores is of --estimate"),
    (["--estimate", "--against", "software"], "--estimate is of a run that judges: without --against"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(arguments: list[str], message: str) -> None:
    told = oproj("--arch", "sm90", "--tokens", "1", *arguments)
    assert told.exit_code == 2 and message in told.output + told.stderr
