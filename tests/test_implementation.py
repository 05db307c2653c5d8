"""Which implementation a name means, and every way in which it means none."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.implementation import SoftwareImplementation, inherits, load_implementation
from conformance.runner import Target
from oproj.arch import get_arch
from oproj.engines import EngineUnavailable
from oproj.engines.software import SoftwareEngine

MINE = "import conformance\nclass Mine(conformance.SoftwareImplementation):\n"


def test_implementation_is_found_by_file_module_and_entry_point(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import conformance\nclass Mine(conformance.SoftwareImplementation): pass\n")
    assert load_implementation(f"{path}:Mine", "sm100").name == "Mine"
    assert load_implementation("conformance:SoftwareImplementation", "sm90").name == "software"
    assert inherits(load_implementation("conformance.implementation:SoftwareImplementation", "sm90"), "wo_a")
    path = tmp_path / "instance.py"
    path.write_text("import conformance\nmine = conformance.SoftwareImplementation('sm90')\n")
    assert load_implementation(f"{path}:mine", "sm90").arch is get_arch("sm90")
    with pytest.raises(ValueError, match="is for sm90, not for sm100"):
        load_implementation(f"{path}:mine", "sm100")


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("nowhere.py:Mine", ValueError, "'nowhere.py' does not exist"),
        ("no_such_package.at_all:Mine", ValueError, "'no_such_package.at_all' is not installed"),
        ("conformance:Mine", ValueError, "has no 'Mine'; it has .*SoftwareImplementation"),
        ("no-such-entry-point", ValueError, "'no-such-entry-point' is unknown"),
        ("conformance:Case", ValueError, "cannot be built for sm90: TypeError: .*missing"),
        ("conformance:judge", ValueError, "lacks name, arch, quantize"),
        ("..:Mine", ValueError, "module '..'"),
    ],
)
def test_name_that_leads_nowhere_is_refused(spec: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_implementation(spec, "sm90")


def test_implementation_that_lacks_a_package_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    for where in (tmp_path / "needs.py", "needs"):
        with pytest.raises(EngineUnavailable, match="a_package_that_nobody_has"):
            load_implementation(f"{where}:Mine", "sm90")


def test_target_builds_what_it_names() -> None:
    assert type(Target("software").build("sm90")) is SoftwareImplementation
    assert isinstance(SoftwareImplementation("sm90").engine, SoftwareEngine)
    with pytest.raises(ValueError, match="engine='fast' is unknown"):
        Target("fast").build("sm90")


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("def (", ValueError, "cannot be imported: SyntaxError"),
        ("import sys; sys.exit(0)", ValueError, "cannot be imported: SystemExit: 0"),
        (MINE + "    def __init__(self, arch): exit(0)", ValueError, "cannot be built for sm90: SystemExit: 0"),
        (MINE + "    def __init__(self, arch): self.missing", ValueError, "cannot be built for sm90: AttributeError"),
        (MINE + "    name = property(lambda self: 7, lambda self, name: None)", ValueError, "has name=7"),
        (MINE + "    reduction = 'ring'", ValueError, "has reduction='ring'; known: bf16, fp32"),
        (MINE + "    device = 'nonsense'", EngineUnavailable, "works on device='nonsense'"),
    ],
)
def test_file_that_ends_the_program_or_makes_nothing_usable_is_refused(
    tmp_path: Path, code: str, error: type[Exception], message: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"{code}\n")
    with pytest.raises(error, match=message):
        load_implementation(f"{path}:Mine", "sm90")


def test_interrupt_is_not_taken_for_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_implementation(f"{path}:Mine", "sm90")
