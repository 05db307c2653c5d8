"""One short session per purpose and per GPU architecture; everything after `--` goes on to the command.

A session whose hardware or package is missing fails and says what is missing. `nox --no-venv -s sm90` runs in
the environment at hand instead of a fresh one: that is how to judge a DeepGEMM (or torch) of your own.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "typecheck", "tests", "conformance"]
nox.options.stop_on_first_error = True

CONFORMANCE = "out/conformance"
# CUDA compute capability, major -> the session for it
SESSION_OF_MAJOR = {"9": "sm90", "10": "sm100", "12": "sm120"}


def install(session: nox.Session, *arguments: str, pinned: bool = True) -> None:
    """Installs into the session's own environment; with --no-venv the user's environment is left as it is."""
    if session.virtualenv.is_sandboxed:
        session.install(*(("-c", "constraints.txt") if pinned else ()), *arguments)


def oproj(session: nox.Session, *arguments: str) -> None:
    """Runs this checkout's command line."""
    session.run("python", "-m", "conformance", *arguments)


def given(session: nox.Session, option: str) -> bool:
    """Whether the session's arguments have `option VALUE` or `option=VALUE`."""
    return any(argument.partition("=")[0] == option for argument in session.posargs)


def default(session: nox.Session, option: str, value: str) -> tuple[str, ...]:
    """`option value`, or nothing where the session's arguments choose it."""
    return () if given(session, option) else (option, value)


def results(session: nox.Session) -> list[str]:
    """The session's arguments, with the last conformance run in front where they name no folder."""
    arguments = list(session.posargs)
    if not arguments or arguments[0].startswith("-"):
        arguments.insert(0, CONFORMANCE)
    if not Path(arguments[0]).is_dir():
        session.error(f"no results in {arguments[0]}: run `nox -s conformance` first, or name a run's folder")
    return arguments


def visible_gpus() -> list[str]:
    """The compute capability ("9.0") of each NVIDIA GPU that the driver shows; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    return sorted(set(answer.stdout.split())) if answer.returncode == 0 else []


def gpu_sessions() -> list[str]:
    """The sessions that the GPUs of this machine can serve."""
    majors = {capability.partition(".")[0] for capability in visible_gpus()}
    return sorted(SESSION_OF_MAJOR[major] for major in majors & SESSION_OF_MAJOR.keys())


def require_gpu(session: nox.Session, *served: str) -> None:
    """Fails before anything is installed where no GPU of the wanted architectures is visible."""
    if not set(served) & set(gpu_sessions()):
        found = ", ".join(visible_gpus()) or "none (nvidia-smi shows no GPU)"
        session.error(f"needs an NVIDIA GPU of {' or '.join(served)}; compute capabilities found: {found}")


def on_gpu(session: nox.Session, arch: str) -> None:
    """Real DeepGEMM on a GPU of this architecture, the software engine beside it."""
    require_gpu(session, arch)
    install(session, "-e", ".[gpu]", pinned=False)
    out = default(session, "--out", f"out/{arch}")
    oproj(session, "run", "--arch", arch, "--engine", "deep_gemm", *out, *session.posargs)


@nox.session
def conformance(session: nox.Session) -> None:
    """Error tables of every architecture on the software engine, then of each GPU that is here."""
    install(session, "-e", ".")
    archs = default(session, "--arch", ",".join(SESSION_OF_MAJOR.values()))
    out = default(session, "--out", CONFORMANCE)
    oproj(session, "run", *archs, "--engine", "software", *out, *session.posargs)
    for name in gpu_sessions():
        session.notify(name, posargs=[])


@nox.session
def faults(session: nox.Session) -> None:
    """The kill matrix: every known fault must be caught on every architecture, every right variant must pass."""
    install(session, "-e", ".")
    oproj(session, "faults", *default(session, "--json", "out/faults.json"), *session.posargs)


@nox.session
def sm90(session: nox.Session) -> None:
    """Hopper: the real DeepGEMM against the software engine and float64; needs the GPU."""
    on_gpu(session, "sm90")


@nox.session
def sm100(session: nox.Session) -> None:
    """Blackwell data centre: the real DeepGEMM against the software engine and float64; needs the GPU."""
    on_gpu(session, "sm100")


@nox.session
def sm120(session: nox.Session) -> None:
    """Blackwell workstation: the real DeepGEMM against the software engine and float64; needs the GPU."""
    on_gpu(session, "sm120")


@nox.session
def tests(session: nox.Session) -> None:
    """Tests of this software itself; arguments go to pytest (`-- --hypothesis-profile nightly`)."""
    install(session, "-e", ".[dev]")
    # A file stays in one process: its fixtures and its compiled kernels are shared. More processes than files are none.
    spread = () if given(session, "-n") else ("-n", "auto", "--maxprocesses", "16", "--dist", "loadfile")
    session.run("python", "-m", "pytest", *spread, *session.posargs)


@nox.session
def independent(session: nox.Session) -> None:
    """A million sums of every row against PyPI's mmasim and exact integers, and a million blocks of codes."""
    install(session, "-e", ".[dev]")
    many = {"OPROJ_INDEPENDENT_SUMS": str(2**20), "OPROJ_INDEPENDENT_BLOCKS": str(10**6)}
    files = [f"tests/test_{name}.py" for name in ("mmasim", "bounds_many", "attainable")]
    session.run("python", "-m", "pytest", *files, *session.posargs, env=many)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and formatting (ruff), and who may import whom (import-linter)."""
    install(session, "ruff", "import-linter")
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")
    session.run("lint-imports")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Types of the four packages (mypy)."""
    install(session, "-e", ".[dev]")
    session.run("mypy", *session.posargs)


@nox.session
def report(session: nox.Session) -> None:
    """Tables and page of a finished run: `-- DIR [--html FILE] [--format md]`."""
    arguments = results(session)
    install(session, "-e", ".")
    oproj(session, "report", *arguments)


@nox.session
def gate(session: nox.Session) -> None:
    """Fails where a run is worse than the baseline, lacks rows, or compared nothing: `-- DIR`."""
    arguments = results(session)
    install(session, "-e", ".")
    oproj(session, "gate", *arguments)


@nox.session
def rebaseline(session: nox.Session) -> None:
    """Makes a run the new baseline: `-- [DIR] --reason "..."`."""
    arguments = results(session)
    if not given(session, "--reason"):
        session.error('a new baseline needs a reason: nox -s rebaseline -- --reason "..."')
    install(session, "-e", ".")
    oproj(session, "rebaseline", *arguments)


@nox.session
def exports(session: nox.Session) -> None:
    """FlashInfer-Bench definitions and workloads, valid against that package: `-- --out DIR`."""
    install(session, "-e", ".[dev]")
    # Its own requirements bring FlashInfer and CUDA; the data models need none of it.
    install(session, "--no-deps", "flashinfer-bench==0.1.2", pinned=False)
    install(session, "docstring-parser", "pydantic>=2")
    session.run("python", "-m", "pytest", "tests/test_exports.py")
    session.run("python", "-m", "conformance.exports", *default(session, "--out", "out/exports"), *session.posargs)


@nox.session
def record(session: nox.Session) -> None:
    """Golden vectors from the real DeepGEMM: `-- --out DIR`; needs a GPU."""
    require_gpu(session, *SESSION_OF_MAJOR.values())
    install(session, "-e", ".[gpu]", pinned=False)
    oproj(session, "record", *default(session, "--out", "out/golden"), *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """The performance figures of this machine, CPU or GPU."""
    if not Path("benchmarks/__main__.py").is_file():
        session.error("benchmarks/__main__.py is missing: this checkout has no benchmarks to run")
    on_a_gpu = bool(gpu_sessions())
    install(session, "-e", ".[gpu,bench]" if on_a_gpu else ".[bench]", pinned=not on_a_gpu)
    session.run("python", "-m", "benchmarks", *session.posargs)
