"""The pytest face: `pytest --pyargs conformance --arch sm90 --implementation X`, one test for each Case.

`oproj.pytest_entry` loads this where a command line names the package; `-p conformance.pytest_plugin` does where pytest
loads no entry points. Every option has a long name, `--oproj-arch`, and the short one of `oproj run`, `--arch`, unless
another plugin or the project's own conftest has that.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from conformance import grid as grids
from conformance.families import FAMILIES
from conformance.grid import Grid
from conformance.isolation import CASE_TIMEOUT
from conformance.options import choice, target_of
from conformance.pytest_cases import CASES, JUDGE, CasesFile, Judge
from conformance.runner import Target
from conformance.strategies import PROFILES, ProfileCases
from conformance.terminal import integers, split
from oproj.arch import ARCHS
from oproj.config import PRESETS
from oproj.engines import ENGINES, EngineUnavailable

EXAMPLES = 60  # on each arch: within as many Cases of profile ci every known fault is caught (`oproj faults`)
HOME = Path(__file__).with_name("pytest_cases.py")  # whose name the node ids have
_OPTIONS: dict[str, dict[str, Any]] = {
    "arch": {"help": choice("Architectures", ARCHS, grids.ARCHS)},
    "implementation": {"default": "", "help": "What to judge: package.module:Mine, path/file.py:Mine, or entry point."},
    "engine": {"default": "auto", "help": f"Whose arithmetic, without --implementation: {', '.join(ENGINES)}."},
    "profile": {"default": "", "help": f"Cases that Hypothesis drew: {', '.join(PROFILES)}. Default: ci."},
    "examples": {"type": int, "help": f"Cases on each arch, by default {EXAMPLES}; of a grid, in each combination."},
    "preset": {"help": choice("Models", PRESETS, grids.PRESETS, "; takes a grid in place of the profile")},
    "tp": {"help": choice("Tensor-parallel sizes", (), grids.TP_SIZES, "; a grid")},
    "tokens": {"help": choice("Numbers of tokens", (), grids.TOKENS, "; a grid")},
    "family": {"help": choice("Input families", FAMILIES, (), "; a grid")},
    "seed": {"type": int, "default": 0, "help": "Added to the seed of every Case."},
    "case-timeout": {"type": float, "default": CASE_TIMEOUT, "help": "Seconds after which a Case has failed."},
}
_LISTS = ("arch", "preset", "tp", "tokens", "family")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Long names always, short ones where they are free."""
    group = parser.getgroup("conformance", "Cases of the FP8 attention output projection (pytest --pyargs conformance)")
    for name, settings in _OPTIONS.items():
        names = [f"--oproj-{name}"]
        if _is_free(parser, f"--{name}"):
            names.append(f"--{name}")
        more = {"action": "append"} if name in _LISTS else {}
        words = settings | {"help": settings["help"].replace("%", "%%")}
        group.addoption(*names, dest=_dest(name), metavar=name.upper(), **words, **more)


def _is_free(parser: pytest.Parser, option: str) -> bool:
    word = f"{option}=0"
    try:
        return word in parser.parse_known_and_unknown_args([word])[1]
    except (pytest.UsageError, SystemExit):  # an option of this name, which takes no such value
        return False


def _dest(name: str) -> str:
    return "oproj_" + name.replace("-", "_")


def _value(config: pytest.Config, name: str) -> Any:
    return config.getoption(_dest(name))


def cases_of(config: pytest.Config) -> Grid | ProfileCases:
    """The Cases that the options name; raises ``ValueError`` where they name none."""
    archs, examples = split(_value(config, "arch"), grids.ARCHS), _value(config, "examples")
    if examples is not None and examples < 1:
        raise ValueError(f"--examples {examples} must be at least 1")
    seed = _value(config, "seed")
    preset, tp, tokens, family = (_value(config, name) for name in ("preset", "tp", "tokens", "family"))
    profile = _value(config, "profile")
    if not (preset or tp or tokens or family):
        if not archs:
            raise ValueError("--arch is empty; name at least one architecture, or leave it out")
        return ProfileCases(profile or "ci", archs, examples or EXAMPLES, seed)
    if profile:
        raise ValueError(f"--profile {profile} draws presets, sizes and families itself; leave those options out")
    return Grid(
        archs=archs,
        presets=split(preset, grids.PRESETS),
        tp_sizes=integers(tp, grids.TP_SIZES, "tp"),
        tokens=integers(tokens, grids.TOKENS, "tokens"),
        many_tokens=0,
        families=split(family, tuple(FAMILIES)),
        examples=examples or 0,
        seed=seed,
    )


def _target(config: pytest.Config) -> Target:
    return target_of(_value(config, "engine"), _value(config, "implementation"))


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")  # of pytest-xdist; its controller has asked for hardware and names


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse options that name nothing and hardware that is missing, once and before any test."""
    # Last, since Hypothesis draws only after its own start; the processes of pytest-xdist still start behind this.
    config = session.config
    try:
        chosen, target = cases_of(config), _target(config)
        judge = Judge(target, _value(config, "case-timeout"))
        if not (_is_worker(config) or config.getoption("collectonly")):
            judge.check(chosen.archs)
    except EngineUnavailable as error:
        raise pytest.UsageError(f"missing: {error}") from error
    except (ValueError, TypeError) as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[CASES], config.stash[JUDGE] = chosen, judge


def pytest_report_header(config: pytest.Config) -> str:
    """What is judged, in the words of the options."""
    judged = _value(config, "implementation") or f"engine {_value(config, 'engine')}"
    return f"conformance: {judged} on {', '.join(split(_value(config, 'arch'), grids.ARCHS))}"


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Generator[None, Any, Any]:
    """Cases hang from one file of this package, whatever the project's python_files and python_functions are; pytest
    does not collect that file, or any other of the package, itself."""
    found = yield
    if file_path == HOME:
        return [CasesFile.from_parent(parent, path=file_path)]
    return [] if HOME.parent in file_path.parents else found


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """End the processes. Where every Case that ran was skipped, nothing was compared: that is no success."""
    judge = session.config.stash.get(JUDGE, None)
    if judge is not None:
        judge.close()
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    stats = reporter.stats if reporter is not None else {}
    if exitstatus == pytest.ExitCode.OK and stats.get("skipped") and not stats.get("passed"):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
