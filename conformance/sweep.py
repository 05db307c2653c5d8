"""Cases on a Ray cluster: shards of them as tasks, each of which leaves one Parquet part that all machines see.

Ray places the tasks, and runs those of a lost worker again. Rows are those of a run on one machine, since tasks run
Cases as such a run does; only the columns of time and threads differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from conformance.case import Case
from conformance.ray_cluster import import_ray
from conformance.runner import Judged, Run, Target
from conformance.shards import Done, Driver, Shard, describe, part_name, run_shard, shard_size, shards
from conformance.sweep_parts import Parts
from oproj.arch import get_arch
from oproj.engines import EngineUnavailable
from reports.store import RowWriter, next_part

_AT_ONCE = 64  # shards that are submitted at a time, at least; four for each core
_RETRIES = 3  # by Ray, of a task whose worker died
_SUBMISSIONS = 3  # of a shard that Ray has given up
_PATIENCE = 60.0  # seconds without a result, after which the nodes are looked at again
_GPU = "gpu"
_NO_IMPORT = "The remote function failed to import"  # how Ray's own RuntimeError begins


class ShardLost(RuntimeError):
    """The workers of a shard died again and again."""


@dataclass(frozen=True)
class Cluster:
    """Where to run: ``address`` of a Ray cluster, 'auto' for the one of this machine, 'local' for a new one here.

    resources: by arch, how much of the cluster's resource of that name a task of its Cases takes; 'gpu' stands for
    GPUs, of every task. parts: fsspec URL of a folder that all machines see; '' for the folder of the run.
    """

    address: str
    resources: Mapping[str, float] = field(default_factory=dict)
    parts: str = ""

    def needs(self, arch: str) -> dict[str, float]:
        """What a task of ``arch`` takes of its node, by Ray's names."""
        needs = {"CPU": 1.0}
        if arch in self.resources:
            needs[arch] = self.resources[arch]
        if _GPU in self.resources:
            needs["GPU"] = self.resources[_GPU]
        return needs


def parse_resources(text: str) -> dict[str, float]:
    """``sm90=1,gpu=1`` as amounts by arch, and of GPUs. Raises ``ValueError`` that says what is right."""
    amounts: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, sign, amount = part.partition("=")
        try:
            value = float(amount)
        except ValueError:
            value = 0.0
        if not sign or not 0 < value < float("inf"):
            raise ValueError(f"--resources {part!r} must be ARCH=AMOUNT with a positive amount, such as sm90=1")
        if value > 1 and value != int(value):
            raise ValueError(f"--resources {part!r}: Ray takes whole amounts above 1")
        key = name if name == _GPU else get_arch(name).name
        if key in amounts:
            raise ValueError(f"--resources names {key} twice")
        amounts[key] = value
    return amounts


def sweep(
    cases: Sequence[Case],
    cluster: Cluster,
    parts: Parts,
    target: Target,
    run: Run,
    *,
    timeout: float,
    size: int = 0,
    on_shard: Callable[[Done], object] = lambda done: None,
) -> None:
    """Run ``cases`` on ``cluster``, to which `connected` holds, and leave their rows in the folder of ``parts``.

    size: Cases of a shard, 0 for a good one. on_shard is told each shard that has ended. Parts are numbered behind
    those of ``run`` that are there. Raises ``EngineUnavailable`` where a package or a resource is missing,
    ``ValueError`` where the folder is not shared, `ShardLost`, and what a Case raised.
    """
    ray = import_ray()
    cores = check_nodes(ray, cluster, {case.arch for case in cases})
    waiting = shards(cases, size or shard_size(len(cases), cores), next_part(parts.folder, run.run_id))

    def start(shard: Shard) -> Any:
        arguments = (shard, parts.shared, target, run, timeout, Driver.here())
        return _submit(ray, cluster, run_shard, shard.arch, f"shard {shard.number} of {shard.arch}", arguments)

    with closing(_results(ray, cluster, waiting, start, max(_AT_ONCE, 4 * cores))) as results:
        for done in results:
            parts.accept(done.left, part_name(run, done.number))
            on_shard(done)
    with RowWriter(parts.folder, run.run_id):
        pass  # joins the parts where they are many


def judged_on(cluster: Cluster, target: Target, archs: Iterable[str], timeout: float) -> dict[str, Judged]:
    """What ``target`` names by arch on machines of ``cluster``, whose hardware may be another than this one's.

    Raises what `judged_by` raises there, and ``EngineUnavailable`` where no node has the resources of an arch.
    """
    ray = import_ray()
    names = list(archs)
    check_nodes(ray, cluster, names)
    arguments = {name: (target, name, timeout, Driver.here()) for name in names}
    asked = {name: _submit(ray, cluster, describe, name, f"description of {name}", arguments[name]) for name in names}
    return {name: _answer(ray, reference) for name, reference in asked.items()}


def check_nodes(ray: Any, cluster: Cluster, archs: Iterable[str]) -> int:
    """The cores of the cluster. Raises ``EngineUnavailable`` where a task of one of ``archs`` would wait for ever."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for arch in archs:
        needs = cluster.needs(arch)
        if not any(all(node.get(name, 0.0) >= amount for name, amount in needs.items()) for node in nodes):
            wanted = " and ".join(f"{name} {amount:g}" for name, amount in needs.items())
            there = "; ".join(_resources_text(node) for node in nodes)
            raise EngineUnavailable(f"no node of the Ray cluster has {wanted} for Cases of {arch}; its nodes: {there}")
    return max(1, int(sum(node.get("CPU", 0.0) for node in nodes)))


def _resources_text(node: Mapping[str, float]) -> str:
    own = {name: amount for name, amount in sorted(node.items()) if ":" not in name and "memory" not in name}
    return ", ".join(f"{name} {amount:g}" for name, amount in own.items()) or "nothing"


def _results(
    ray: Any, cluster: Cluster, waiting: Iterator[Shard], start: Callable[[Shard], Any], at_once: int
) -> Generator[Done, None, None]:
    """Every shard as it ends; whoever leaves before the end cancels what runs. Raises as `sweep` does."""
    running: dict[Any, tuple[Shard, int]] = {}
    heard = time.monotonic()
    try:
        while True:
            for shard in islice(waiting, at_once - len(running)):
                running[start(shard)] = shard, 1
            if not running:
                return
            ready, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
            if not ready and time.monotonic() - heard > _PATIENCE:
                check_nodes(ray, cluster, {shard.arch for shard, _ in running.values()})
            for reference in ready:
                heard = time.monotonic()
                shard, submissions = running.pop(reference)
                try:
                    yield _answer(ray, reference)
                except ray.exceptions.RayError as error:
                    if submissions == _SUBMISSIONS:
                        raise _lost(shard, submissions * (_RETRIES + 1), error) from error
                    running[start(shard)] = shard, submissions + 1
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _submit(
    ray: Any, cluster: Cluster, work: Callable[..., Any], arch: str, name: str, arguments: tuple[Any, ...]
) -> Any:
    """``work`` of ``arguments`` as a task on a node that serves ``arch``; the reference to its answer."""
    needs = cluster.needs(arch)
    amounts = {"num_cpus": needs.pop("CPU"), "num_gpus": needs.pop("GPU", 0), "resources": needs}
    return ray.remote(work).options(**amounts, max_retries=_RETRIES, name=name).remote(*arguments)


def _answer(ray: Any, reference: Any) -> Any:
    """What a task returned. Raises what it raised, and Ray's own errors where its worker died."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ImportError) or str(cause).startswith(_NO_IMPORT):
            raise EngineUnavailable(
                f"a worker lacks a package, install oproj on all machines alike: {cause}"
            ) from error
        if not isinstance(cause, Exception):
            raise RuntimeError(str(error)) from error
        raise cause from error


def _lost(shard: Shard, times: int, error: Exception) -> ShardLost:
    ids = ", ".join(case.id for case in shard.cases)
    return ShardLost(
        f"shard {shard.number} lost its worker {times} times, the last by {type(error).__name__}; its Cases are {ids}"
    )
