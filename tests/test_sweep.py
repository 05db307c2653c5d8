"""Sweeps on a real Ray cluster of two nodes, one per architecture: the rows are those of one process, whatever dies."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import ray
from fsspec.registry import known_implementations
from hypothesis import given
from hypothesis import strategies as st
from ray.cluster_utils import Cluster as RayCluster
from typer.testing import CliRunner

import conformance.ray_cluster as ray_cluster
import conformance.resume as resume
import conformance.runner as runner
import conformance.sweep as sweeping
from conformance.case import Case
from conformance.cli import app
from conformance.grid import Grid
from conformance.runner import Run, Target, run_cases
from conformance.shards import Done, Driver, Shard, part_name, run_shard, shard_size, shards
from conformance.signals import Terminated, terminable
from conformance.sweep import Cluster, ShardLost, parse_resources, sweep
from conformance.sweep_parts import Parts, publish
from oproj.engines import EngineUnavailable
from planted import case
from reports.store import RowWriter, load, next_part

ROOT = Path(__file__).parents[1]
ARCHS = ("sm90", "sm100")
ASKED = ("--arch", "sm90,sm100", "--preset", "v4-flash", "--tp", "8", "--tokens", "2", "--examples", "4")
GRID = Grid(archs=ARCHS, presets=("v4-flash",), tp_sizes=(8,), tokens=(2,), many_tokens=0, examples=4)
TAGS = {"sm90": 1.0, "sm100": 1.0}
TARGET = Target("software")
RUN = Run("r1", "2026-01-31T12:00:00Z", "")
OF_THE_RUN = ["run_id", "time_utc", "git_revision", "seconds"]
SMALL = {"tp_size": 1, "tp_rank": 0, "tokens": 1, "n_groups": 1, "o_lora_rank": 512, "hidden_size": 128}
PROGRAM = """
from conformance import progress, resume, runner
from conformance.cli import main
progress.LogLines.__init__.__kwdefaults__["every"] = 0.0
resume.git_revision = runner.git_revision = lambda: ""
if __name__ == "__main__":
    main()
"""
KILLER = """
import os, signal
import conformance

class Killer(conformance.SoftwareImplementation):
    def wo_b(self, z, weights, *, config):
        try:
            os.close(os.open({marker!r}, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return super().wo_b(z, weights, config=config)
        os.kill(os.getppid(), signal.SIGKILL)
"""


class TwoNodes:
    """A Ray cluster of two nodes with one core each; this process stays connected, so that workers are kept."""

    def __init__(self) -> None:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        few = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
        self.cluster = RayCluster()
        self.nodes = {arch: self.cluster.add_node(**few, resources={arch: 1}) for arch in ARCHS}
        self.raylets = {arch: node.all_processes["raylet"][0].process.pid for arch, node in self.nodes.items()}
        self.address = str(self.cluster.address)
        ray.init(address=self.address, log_to_driver=False)

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with pytest.MonkeyPatch.context() as environment:
        for name in ("PYTHONPATH", "RAY_ADDRESS"):  # is put back with what the nodes need
            environment.delenv(name, raising=False)
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("RAY_AUTH_MODE", "disabled")  # leaves no token in the home of whoever runs the tests
        started = TwoNodes()
        try:
            yield started
        finally:
            started.close()
    assert wait_for(lambda: not any(map(alive, started.raylets.values()))), "Ray's processes are left behind"


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return list(GRID.cases())


@pytest.fixture(scope="module")
def one_process(cases: list[Case], tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    folder = tmp_path_factory.mktemp("one")
    with RowWriter(folder, "r1") as writer:
        for rows in run_cases(cases, TARGET, RUN):
            writer.extend(rows)
    return rows_of(folder)


@pytest.fixture
def no_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files may be edited while these tests run."""
    for module in (resume, runner):
        monkeypatch.setattr(module, "git_revision", lambda: "")


def rows_of(folder: Path) -> pd.DataFrame:
    """What a run says of each Case, in one order, without what is of the time and of the processes it ran in."""
    df = load(folder).drop(columns=OF_THE_RUN).sort_values(["case_id", "stage", "oracle"], ignore_index=True)
    return df.assign(versions=df["versions"].astype(object).str.replace(r'"threads": "\d+"', "", regex=True))


def same(folder: Path, whole: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(rows_of(folder), whole, check_categorical=False)


def swept(nodes: TwoNodes, folder: Path, cases: list[Case], *, target: Target = TARGET, **options: Any) -> None:
    parts = Parts(folder)
    parts.start(resumed=False)
    sweep(cases, Cluster(nodes.address, TAGS), parts, target, RUN, timeout=60.0, **options)


def oproj(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return bool(condition())


# On the cluster -----------------------------------------------------------------------------------------------------


def test_a_worker_killed_between_cases_loses_and_doubles_nothing_and_tasks_are_where_their_tag_is(
    nodes: TwoNodes, cases: list[Case], one_process: pd.DataFrame, tmp_path: Path
) -> None:
    order = [shard.arch for shard in shards(cases, 1)]
    done: list[Done] = []

    def kill_first(shard: Done) -> None:
        assert parent_of(shard.pid) == nodes.raylets[order[shard.number]]
        if not done:
            os.kill(shard.pid, signal.SIGKILL)
        done.append(shard)

    swept(nodes, tmp_path, cases, size=1, on_shard=kill_first)
    same(tmp_path, one_process)
    assert sorted(shard.number for shard in done) == list(range(len(cases)))
    killed, arch = done[0].pid, order[done[0].number]
    assert not alive(killed)
    assert any(shard.pid != killed for shard in done if order[shard.number] == arch), "another worker took over"


def test_a_worker_that_dies_within_a_case_loses_and_doubles_nothing(
    nodes: TwoNodes, cases: list[Case], one_process: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "killed"
    (tmp_path / "mine.py").write_text(KILLER.format(marker=str(marker)))
    monkeypatch.chdir(tmp_path)  # the workers were started elsewhere
    of_sm90 = [each for each in cases if each.arch == "sm90"][:2]
    target = Target(implementation="mine.py:Killer")
    swept(nodes, tmp_path / "run", of_sm90, target=target, size=2)
    assert marker.exists()
    found = load(tmp_path / "run")
    assert set(found["case_id"]) == {each.id for each in of_sm90} and set(found["verdict"]) <= {
        "pass",
        "not applicable",
    }
    assert not found.duplicated(["case_id", "stage", "oracle"]).any()
    expected = one_process[one_process["case_id"].isin(set(found["case_id"]))]
    shared = found.set_index(["case_id", "stage", "oracle"])["compared"].sort_index()
    ours = expected.set_index(["case_id", "stage", "oracle"])["compared"].sort_index()
    assert shared.index.astype(object).tolist() == ours.index.astype(object).tolist()


def test_whoever_stops_a_sweep_cancels_its_tasks_and_keeps_what_was_done(
    nodes: TwoNodes, cases: list[Case], tmp_path: Path
) -> None:
    done = []

    def stop(shard: Done) -> None:
        done.append(shard)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        swept(nodes, tmp_path, cases * 20, size=1, on_shard=stop)
    time.sleep(0.5)  # a part may be on its way
    before = set(tmp_path.iterdir())
    time.sleep(3)
    assert set(tmp_path.iterdir()) == before, "tasks were left running"
    assert [path.name for path in tmp_path.glob("*.parquet")] == [part_name(RUN, done[0].number)]


def test_a_terminated_sweep_goes_on_with_the_missing_cases_alone(
    nodes: TwoNodes, one_process: pd.DataFrame, tmp_path: Path, no_revision: None
) -> None:
    folder, program = tmp_path / "run", tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = (*ASKED, "--ray", nodes.address, "--resources", "sm90=1,sm100=1", "--out", str(folder))
    command = [sys.executable, str(program), "run", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = iter(process.stderr)
        assert any("1 of 8 Cases, 0 failed" in line for line in lines)
        process.terminate()
        said = " ".join(lines)
    assert process.returncode == 143, said
    assert re.search(rf"\d+ new rows in {folder} are valid", said) and f"--resume --out {folder} goes on" in said
    before = load(folder)
    assert 1 <= before["case_id"].nunique() < 8

    again = oproj("run", *options, "--resume")
    assert again.exit_code == 0, again.output
    same(folder, one_process)
    after = load(folder)
    pd.testing.assert_frame_equal(after.iloc[: len(before)], before, check_categorical=False)
    assert set(after["run_id"]) == set(before["run_id"]) and not list(folder.glob(".rows*"))


def test_parts_at_a_url_end_up_in_the_folder_and_another_driver_goes_on_behind_them(
    nodes: TwoNodes, one_process: pd.DataFrame, tmp_path: Path, no_revision: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    for name in (part_name(Run("old", "", ""), 3), f".{part_name(RUN, 0)}.abc.tmp"):
        (there / name).write_bytes(b"PAR1")
    options = (*ASKED, "--ray", nodes.address, "--parts", there.as_uri())
    first = oproj("run", *options, "--out", tmp_path / "first")
    assert first.exit_code == 0, first.output
    same(tmp_path / "first", one_process)
    same(there, one_process)
    assert not list(there.glob(".*"))

    lost = next(there.glob("*.parquet"))
    cases_lost = load(lost)["case_id"].unique()
    lost.unlink()
    ran: list[str] = []

    def counted(cases: Any, *arguments: Any, **rest: Any) -> None:
        ran.extend(each.id for each in cases)
        sweep(cases, *arguments, **rest)

    monkeypatch.setattr("conformance.sweep_command.sweep", counted)
    again = oproj("run", *options, "--out", tmp_path / "second", "--resume")
    assert again.exit_code == 0, again.output
    assert sorted(ran) == sorted(cases_lost)
    same(tmp_path / "second", one_process)
    same(there, one_process)


def test_what_a_cluster_cannot_do_is_said(nodes: TwoNodes, tmp_path: Path) -> None:
    options = ("run", *ASKED, "--examples", "1", "--out", tmp_path, "--ray", nodes.address)
    lacks = oproj(*options, "--resources", "sm90=2")
    assert lacks.exit_code == 3, lacks.output
    assert "no node of the Ray cluster has CPU 1 and sm90 2 for Cases of sm90; its nodes: CPU 1, sm" in lacks.stderr
    gpu = oproj(*options, "--resources", "gpu=1")
    assert gpu.exit_code == 3 and "has CPU 1 and GPU 1 for Cases of sm90" in gpu.stderr
    # The memory of a worker is not this process' memory, as a folder that is not shared is not this machine's.
    unshared = oproj(*options, "--parts", "memory://parts")
    assert unshared.exit_code == 2, unshared.output
    assert "a worker wrote a part to memory://parts, and it is not there for this machine" in unshared.stderr
    assert not list(tmp_path.glob("*.parquet"))


def test_a_worker_of_another_release_or_revision_is_refused(nodes: TwoNodes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a worker has oproj \S+ and the driver 0\.0; install one release"):
        run_shard(Shard(0, (case(**SMALL),)), str(tmp_path), TARGET, RUN, 60.0, Driver("0.0", ""))
    other = Run("r1", RUN.time_utc, "0ld")
    with pytest.raises(ValueError, match=r"a worker has git revision \S+ of oproj and the driver 0ld"):
        sweep([case(**SMALL)], Cluster(nodes.address), Parts(tmp_path), TARGET, other, timeout=60.0)


# Without it -----------------------------------------------------------------------------------------------------------


class DeadRay:
    """What `_results` calls of Ray, on a cluster where every worker dies."""

    exceptions = SimpleNamespace(RayError=ray.exceptions.RayError, RayTaskError=ray.exceptions.RayTaskError)

    def __init__(self) -> None:
        self.cancelled: list[int] = []

    def wait(self, running: list[int], **options: Any) -> tuple[list[int], list[int]]:
        return running[:1], running[1:]

    def get(self, reference: int) -> Any:
        raise ray.exceptions.WorkerCrashedError

    def cancel(self, reference: int, force: bool) -> None:
        assert force
        self.cancelled.append(reference)


def test_a_shard_whose_workers_always_die_ends_the_sweep_by_name() -> None:
    dead, started = DeadRay(), list[Shard]()

    def start(shard: Shard) -> int:
        started.append(shard)
        return len(started)

    waiting = shards([case(**SMALL, seed=seed) for seed in range(4)], 1)
    with pytest.raises(ShardLost, match=rf"^shard 0 lost its worker 12 times.*{case(**SMALL, seed=0).id}$"):
        list(sweeping._results(dead, Cluster("auto"), waiting, start, 2))
    assert [shard.number for shard in started].count(0) == 3
    assert len(dead.cancelled) == 1, "the other shard that was submitted"


def test_the_connection_ends_and_leaves_the_handler_of_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def init(**options: Any) -> None:
        calls.append(options["address"])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray sets one of its own

    fake = SimpleNamespace(init=init, is_initialized=lambda: False, shutdown=lambda: calls.append("shutdown"))
    monkeypatch.setattr(ray_cluster, "import_ray", lambda: fake)
    before = signal.getsignal(signal.SIGTERM)
    with ray_cluster.connected("local"):
        assert signal.getsignal(signal.SIGTERM) == before and calls == ["local"]
    assert calls == ["local", "shutdown"]


def test_of_the_processes_below_this_one_orphans_end() -> None:
    # a shell that ends at the end of its input, and a child that it does not wait for
    with subprocess.Popen(["sh", "-c", "sleep 60 & read end"], stdin=subprocess.PIPE) as shell:
        assert wait_for(lambda: len(set(ray_cluster._descendants()) - {shell.pid}) >= 1)
        with subprocess.Popen(["sleep", "60"]) as kept:
            started = ray_cluster._descendants()
            (orphan,) = (pid for pid in started if parent_of(pid) == shell.pid)
            shell.communicate()
            ray_cluster._end_orphans({**started, os.getppid(): "another moment"})
            assert wait_for(lambda: not alive(orphan)) and kept.poll() is None
            kept.kill()


def test_sigterm_stays_one_where_ray_makes_an_interrupt_of_it() -> None:
    with pytest.raises(Terminated), terminable():  # noqa: PT012  what Ray does
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt) as error, terminable():
        raise KeyboardInterrupt
    assert not isinstance(error.value, Terminated)


@given(st.lists(st.sampled_from(ARCHS), max_size=40), st.integers(1, 9), st.integers(0, 5))
def test_every_case_is_in_one_shard_of_its_arch(archs: list[str], size: int, first: int) -> None:
    cases = [case(**SMALL, arch=arch, seed=seed) for seed, arch in enumerate(archs)]
    made = list(shards(cases, size, first))
    assert sorted(each.seed for shard in made for each in shard.cases) == list(range(len(cases)))
    assert [shard.number for shard in made] == list(range(first, first + len(made)))
    for shard in made:
        assert {each.arch for each in shard.cases} == {shard.arch} and 1 <= len(shard.cases) <= size
    turns = [shard.arch for shard in made[: 2 * min(archs.count(arch) // size for arch in ARCHS)]]
    assert all(one != other for one, other in pairwise(turns)), "no arch waits for another"


@given(st.integers(0, 200_000), st.integers(1, 512))
def test_shards_are_small_and_enough_for_all_cores(cases: int, cores: int) -> None:
    size = shard_size(cases, cores)
    assert 1 <= size <= 32
    assert size == 1 or cases // size >= 4 * cores


def test_of_two_parts_for_one_shard_one_is_accepted(tmp_path: Path) -> None:
    source, folder, name = tmp_path / "x", tmp_path / "run", part_name(RUN, 7)
    source.write_text("one")
    first = publish(source, str(folder), name)
    source.write_text("two")
    second = publish(source, str(folder), name)
    parts = Parts(folder)
    parts.accept(first, name)
    assert [path.name for path in folder.glob("*.parquet")] == [name] and (folder / name).read_text() == "one"
    assert next_part(folder, "r1") == 8 and next_part(folder, "r2") == 0
    parts.start(resumed=True)
    assert [path.name for path in folder.iterdir()] == [name]
    with pytest.raises(ValueError, match="Not all of them see one folder: name one that they do with --out"):
        parts.accept(second, part_name(RUN, 8))


def test_parts_that_were_joined_are_not_fetched_again(tmp_path: Path) -> None:
    folder, there = tmp_path / "run", tmp_path / "there"
    for place, names in (
        (there, [part_name(RUN, number) for number in range(5)]),
        (folder, ["rows-r1-0001to0003.parquet"]),
    ):
        place.mkdir()
        for name in names:
            (place / name).write_bytes(b"PAR1")
    Parts(folder, str(there)).fetch()
    found = sorted(path.name for path in folder.iterdir())
    assert found == ["rows-r1-0000.parquet", "rows-r1-0001to0003.parquet", "rows-r1-0004.parquet"]


@pytest.mark.parametrize(
    ("text", "found"),
    [("", {}), ("sm90=1", {"sm90": 1.0}), (" sm90=0.5, gpu=2,", {"sm90": 0.5, "gpu": 2.0})],
)
def test_resources_are_read(text: str, found: dict[str, float]) -> None:
    assert parse_resources(text) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sm90", "'sm90' must be ARCH=AMOUNT with a positive amount"),
        ("sm90=x", "'sm90=x' must be"),
        ("sm90=0", "'sm90=0' must be"),
        ("sm90=-1", "'sm90=-1' must be"),
        ("sm90=nan", "'sm90=nan' must be"),
        ("sm90=inf", "'sm90=inf' must be"),
        ("sm90=1.5", "whole amounts above 1"),
        ("sm90=1,sm90=2", "names sm90 twice"),
        ("gpu=1,gpu=1", "names gpu twice"),
        ("sm91=1", "sm91"),
    ],
)
def test_bad_resources_are_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_resources(text)
    answer = oproj("run", "--ray", "auto", "--resources", text)
    assert answer.exit_code == 2 and says in answer.stderr


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--resources", "sm90=1"), 2, "name one with --ray ADDRESS"),
        (("--parts", "s3://x"), 2, "name one with --ray ADDRESS"),
        (("--ray", "auto", "--workers", "2"), 2, "--workers 2 are processes of this machine"),
        (("--ray", "auto", "--against", "x:Y"), 2, "exclude each other"),
        (("--ray", "ray://head:10001"), 2, "must be 'auto', 'local' or HOST:PORT"),
        (("--ray", "127.0.0.1:1"), 3, "--ray 127.0.0.1:1: no Ray cluster answers"),
    ],
)
def test_options_that_cannot_be_are_refused(options: tuple[str, ...], code: int, says: str) -> None:
    answer = oproj("run", *options)
    assert answer.exit_code == code and says in answer.stderr, answer.output


@pytest.mark.parametrize(
    ("url", "error", "says"),
    [
        ("nothing://x", ValueError, "--parts 'nothing://x' is no URL that fsspec knows"),
        ("absent://x", EngineUnavailable, "--parts absent://x: "),
    ],
)
def test_urls_that_fsspec_cannot_open_are_named(
    tmp_path: Path, url: str, error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"class": "absent_package.Files", "err": "Install absent_package"}
    monkeypatch.setitem(known_implementations, "absent", known)
    with pytest.raises(error, match=re.escape(says)):
        Parts(tmp_path, url).start(resumed=False)


def test_without_ray_all_works_but_sweeps() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from typer.testing import CliRunner; from conformance.cli import app\n"
        "answer = CliRunner().invoke(app, ['run', '--ray', 'auto'])\n"
        "print(answer.exit_code, answer.stderr)\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("3 --ray needs Ray, which is not installed: pip install 'oproj[ray]'")
