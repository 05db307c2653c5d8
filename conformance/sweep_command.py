"""What `oproj run --ray` adds to a run: its options, the connection, and the Cases as a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer

from conformance.case import Case
from conformance.ray_cluster import connected
from conformance.runner import Run, Target
from conformance.shards import Done
from conformance.sweep import Cluster, ShardLost, parse_resources, sweep
from conformance.sweep_parts import Parts
from conformance.terminal import FAILED, stop

Ray = Annotated[
    str,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Run on a Ray cluster: 'auto' for the one of this machine, HOST:PORT, or 'local' for a new one here.",
    ),
]
Resources = Annotated[
    str,
    typer.Option(
        metavar="ARCH=AMOUNT,...",
        help="What a task takes of its node: sm90=1 is 1 of the resource sm90 for Cases of sm90, gpu=1 a GPU for all.",
    ),
]
PartsUrl = Annotated[
    str,
    typer.Option(
        "--parts",
        metavar="URL",
        help="Where the cluster's machines leave rows, as fsspec names it (s3://..., file://...); earlier rows there "
        "are replaced. By default --out, which all of them must see.",
    ),
]


def join_cluster(
    context: typer.Context, address: str, resources: str, parts: str, *, against: str, workers: int
) -> Cluster | None:
    """Connect to the cluster that the options name until ``context`` ends; None where they name none.

    Raises ``ValueError`` for options that exclude each other, and what `connected` raises.
    """
    if not address:
        for option, value in (("--resources", resources), ("--parts", parts)):
            if value:
                raise ValueError(f"{option} {value} says how to use a Ray cluster; name one with --ray ADDRESS")
        return None
    if against:
        raise ValueError(f"--ray {address} and --against {against} exclude each other")
    if workers:
        raise ValueError(f"--workers {workers} are processes of this machine; with --ray the cluster has its own")
    cluster = Cluster(address, parse_resources(resources), parts)
    context.with_resource(connected(address))
    return cluster


def fetch_parts(cluster: Cluster, folder: Path) -> None:
    """Before a stopped sweep goes on in ``folder``: what is under its URL and not there."""
    Parts(folder, cluster.parts).fetch()


def sweep_into(
    folder: Path,
    cases: Iterable[Case],
    cluster: Cluster,
    target: Target,
    run: Run,
    *,
    timeout: float,
    resumed: bool,
    on_case: Callable[[bool], object],
    on_rows: Callable[[int], object],
) -> None:
    """Run ``cases`` on ``cluster`` into ``folder``; on_case is told of each whether it failed, on_rows of new rows.

    Ends the program where a shard is lost for good. Raises what else `sweep` raises.
    """

    def advance(done: Done) -> None:
        on_rows(done.rows)
        for failed in done.failed:
            on_case(failed)

    parts = Parts(folder, cluster.parts)
    parts.start(resumed=resumed)
    try:
        sweep(list(cases), cluster, parts, target, run, timeout=timeout, on_shard=advance)
    except ShardLost as lost:
        stop(FAILED, f"{lost}. The rows of all other shards that have ended are in {folder}; --resume goes on")
