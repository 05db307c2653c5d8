"""What pytest loads at its start, wherever this package is installed: only the question whether a run is the suite's.

`pytest --pyargs conformance` is. Every other run gets no option, no collector and no import of torch. It is here, and
not in `conformance`, because importing anything of that package loads all of it.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

PACKAGE, PLUGIN = "conformance", "conformance.pytest_plugin"
_FOLDER = Path(__file__).resolve().parents[1] / PACKAGE


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, object, object]:
    """Load the suite's plugin where the command line names the suite, after the project's own conftest files: where
    one of those has an option of the same name, it keeps it."""
    result = yield
    known = early_config.known_args_namespace
    if any(_names_the_suite(str(argument), known.pyargs) for argument in known.file_or_dir):
        early_config.pluginmanager.import_plugin(PLUGIN)
    return result


def _names_the_suite(argument: str, is_module: bool) -> bool:
    name = argument.partition("::")[0]
    if is_module and (name == PACKAGE or name.startswith(f"{PACKAGE}.")):
        return True
    try:
        path = Path(name).resolve()
    except (OSError, ValueError, RuntimeError):  # the value of some option: too long, or no path at all
        return False
    return path == _FOLDER or _FOLDER in path.parents
