"""One self-contained HTML file: what is off, where, on which architecture, and how to run it again.

The file loads nothing, and its Content-Security-Policy keeps it so: Plotly draws the figures, DataTables (as itables
ships it) sorts and filters, and both are inside. Without scripts the tables, failing Cases and replay lines are
still there. Figures are rounded for people; the `title` of a cell has every digit.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from .against import CHANGES, arch_against_arch, changes_per_stage, engine_against_engine, run_against_run
from .aggregate import overall_verdict, row_faults, sort_rows
from .columns import JUDGED
from .files import write_text
from .formatting import MARKS, NOTES, REPLAY_NOTE, cell, label, replay_line, replay_of
from .heatmaps import error_maps, kill_heatmap
from .kill_matrix import kill_table, read_faults, variant_table
from .page_figures import Panel, distributions, failure_maps, first_bad_maps, heat_maps, margin_maps
from .page_tables import html_table, options, row_data
from .schema import validate
from .tables import (
    CHANGE_COLUMNS,
    STAGE_KEYS,
    TITLE,
    environment,
    evidence,
    failing_cases,
    not_judged,
    per_arch,
    stage_table,
)
from .ulps import ulp_histograms

MOST_ROWS = 2000
"""Rows in the big table: what a phone scrolls through, and what keeps the file small."""
MOST_CHANGES = 100
"""Rows in the table of what has changed since another run."""
FILTERS = ("arch", "stage", "oracle", "family", "verdict")
_STAGE_COLUMNS = (
    "arch", "stage", "oracle", "verdict", "margin_max", "mismatched", "compared", "cases", "not_judged",
    "within_1_ulp", "rms_rel_error", "signed_bias", "evidence",
)  # fmt: skip
_MORE_COLUMNS = (
    "arch", "stage", "oracle", "margin_max", "margin_p999", "rms_rel_error", "signed_bias", "calc_diff",
    "within_1_ulp", "ulp_max",
)  # fmt: skip


def write_page(
    df: pd.DataFrame,
    path: str | os.PathLike[str],
    title: str = TITLE,
    worst: int = 20,
    faults: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    against: pd.DataFrame | None = None,
) -> Path:
    """Write the page of the rows `df`, with at most `worst` failing Cases in full; returns the path.

    faults: the JSON of `oproj faults --json`, as a path or a dict, for the kill matrix. against: the rows of an earlier
    run, for what has changed since.

    Raises: RowsError where a frame is none of rows or `faults` is no such JSON, ValueError for a negative `worst`.
    """
    histograms = ulp_histograms(df, STAGE_KEYS) if len(validate(df)) else None
    stages = stage_table(df, histograms) if histograms is not None else None
    cases, failing = failing_cases(df, worst)
    figures = _Figures()
    verdict = overall_verdict(df)
    html = _template().render(
        title=title,
        verdict=MARKS[verdict],
        passed=verdict == "pass",
        findings=findings(df),
        notes=NOTES,
        replay_note=REPLAY_NOTE,
        summary=html_table(per_arch(df), "summary"),
        stages=_stages(stages),
        changes=None if against is None else _changes(against, df),
        against=_against(df),
        cases=[_case(case, figures) for case in cases],
        failing=failing,
        heat_maps=figures.add(heat_maps(df)),
        margin_maps=figures.add(margin_maps(df)),
        failure_maps=figures.add(failure_maps(df)),
        first_bad_maps=figures.add(first_bad_maps(df)),
        distributions=figures.add(distributions(df, histograms) if histograms is not None else []),
        kills=_kills(faults, figures),
        rows=_json(row_data(df, MOST_ROWS)),
        judged=int(df["verdict"].isin(JUDGED).sum()),
        most_rows=MOST_ROWS,
        filters={name: (label(name), choices) for name, choices in _filters(df).items()},
        not_judged=html_table(not_judged(df), "not_judged"),
        evidence=html_table(evidence(df), "evidence"),
        environment=environment(df),
        figures=_json(figures.drawn),
        scripts=_scripts(),
    )
    return write_text(path, html)


class _Figures:
    """Numbers the panels, and keeps what the page's script draws."""

    def __init__(self) -> None:
        self.drawn: dict[str, Any] = {}

    def add(self, panels: list[Panel]) -> list[dict[str, Any]]:
        """The panels as the template takes them."""
        return [self._one(panel) for panel in panels]

    def _one(self, panel: Panel) -> dict[str, Any]:
        name = f"figure{len(self.drawn)}"
        self.drawn[name] = panel.json()
        height = panel.figure.layout.height
        return {"id": name, "title": panel.title, "height": height, "of_json": json.dumps(panel.of)}


def findings(df: pd.DataFrame) -> list[str]:
    """A sentence per arch: what is off first, or how much was compared."""
    fails = df[["arch", "stage", "oracle", "case_id", "compared", "verdict"]].assign(fails=row_faults(df) != "")
    said = []
    for arch in sort_rows(df[["arch"]].drop_duplicates().astype(object), ["arch"])["arch"]:
        of_arch = fails[fails["arch"] == arch]
        failed = of_arch[of_arch["fails"]]
        judged = of_arch[of_arch["verdict"].isin(JUDGED)]
        cases = of_arch["case_id"].nunique()
        if len(failed):
            places = sort_rows(failed[["stage", "oracle"]].drop_duplicates().astype(object), ["stage", "oracle"])
            stage = places["stage"].iloc[0]
            oracles = ", ".join(places.loc[places["stage"] == stage, "oracle"])
            count = failed["case_id"].nunique()
            said.append(
                f"{arch}: {count:,} of {cases:,} Cases fail; the first stage that is off is {stage} ({oracles})."
            )
        else:
            compared = judged["compared"].sum()
            said.append(f"{arch}: none of {cases:,} Cases fails; {compared:,} elements compared.")
    return said


def _stages(table: pd.DataFrame | None) -> dict[str, Markup | None] | None:
    if table is None:
        return None
    several = [name for name in ("engine", "implementation") if table[name].nunique() > 1]
    main = [*_STAGE_COLUMNS, *several]
    if not (table["not_judged"] > 0).any():
        main.remove("not_judged")
    more = [*_MORE_COLUMNS, *several]
    return {"main": html_table(table, "stages", main), "more": html_table(table, "metrics", more)}


def _against(df: pd.DataFrame) -> list[tuple[str, Markup | None]]:
    """Architectures, engines and implementations side by side, where there are several."""
    figures = ("verdict", "margin_max", "signed_bias")
    tables = []
    if df["arch"].nunique() > 1:
        tables.append(("Architecture against architecture", html_table(arch_against_arch(df, figures), "archs")))
    for by in ("engine", "implementation"):
        if df[by].nunique() > 1:
            table = html_table(engine_against_engine(df, figures, by), f"{by}s")
            tables.append((f"{by.capitalize()} against {by}, Cases that all have judged", table))
    return [(name, table) for name, table in tables if table is not None]


def _changes(before: pd.DataFrame, df: pd.DataFrame) -> dict[str, Any]:
    """What became of the rows of an earlier run: a sentence, a table per stage, and the rows that ask for attention."""
    joined = run_against_run(before, df)
    counts = joined["change"].value_counts()
    changed = joined[joined["change"] != "equal"]
    runs = ", ".join(sorted(before["run_id"].unique()))
    return {
        "said": f"From run {runs} (a) to this one (b): "
        + (", ".join(f"{counts[word]:,} {word}" for word in CHANGES if word in counts) or "nothing was judged")
        + ".",
        "stages": html_table(changes_per_stage(joined), "changes"),
        "rows": html_table(changed.head(MOST_CHANGES), "changed", CHANGE_COLUMNS),
        "shown": min(len(changed), MOST_CHANGES),
        "changed": len(changed),
    }


def _case(case: dict[str, Any], figures: _Figures) -> dict[str, Any]:
    shown = [_failure(record) for record in case["failures"]]
    of = {name: list(dict.fromkeys(row[name] for row in case["failures"])) for name in ("stage", "oracle")}
    of |= {"arch": [case["arch"]], "family": [case["family"]], "verdict": [MARKS["fail"]]}
    return {
        **case,
        "failures": shown,
        "maps": figures.add(_maps(case["failures"])),
        "of_json": json.dumps(of),
        "replay": replay_line(**replay_of(case)),
    }


def _failure(record: dict[str, Any]) -> dict[str, Any]:
    said = [record["reason"] or record["fault"]]
    if record["reason"] and record["fault"] != "the comparison failed":
        said.insert(0, record["fault"])
    elif record["first_bad"] and not record["reason"]:
        said.append(f"first bad {record['first_bad']}")
    margin = "" if math.isnan(record["margin_max"]) else cell("margin_max", record)
    return {**record, "margin": margin, "said": ": ".join(said)}


def _maps(failures: list[dict[str, Any]]) -> list[Panel]:
    """The error maps of the first stage that is off, of the bound oracle where it has some: these have margins too."""
    having = [record for record in failures if record["error_map"]]
    if not having:
        return []
    of_first = [record for record in having if record["stage"] == having[0]["stage"]]
    record = next((one for one in of_first if one["oracle"] == "bound"), of_first[0])
    where = f"{record['stage']} {record['oracle']}"
    return [
        Panel(f"{where}: bad elements, {one.layout.yaxis.title.text} × {one.layout.xaxis.title.text}", one)
        for one in error_maps(record["error_map"])
    ]


def _kills(source: str | os.PathLike[str] | Mapping[str, Any] | None, figures: _Figures) -> dict[str, Any] | None:
    if source is None:
        return None
    faults = read_faults(source)
    table, alarms = kill_table(faults), variant_table(faults)
    survivors = int((table["verdict"] == "fail").sum())
    of = {"arch": sorted({str(one["arch"]) for one in faults["faults"]})}
    return {
        "said": f"{len(table) - survivors} of {len(table)} faults caught on every architecture they were tried on; "
        f"{len(alarms)} false alarms on {len({str(one['variant']) for one in faults['variants']})} right variants.",
        "panel": figures.add([Panel("fault × check", kill_heatmap(faults["faults"]), of)]) if len(table) else [],
        "table": html_table(table, "kills"),
        "alarms": html_table(alarms, "alarms"),
    }


def _filters(df: pd.DataFrame) -> dict[str, list[str]]:
    found = options(df, FILTERS)
    for name in ("arch", "stage", "oracle"):
        found[name] = list(sort_rows(pd.DataFrame({name: found[name]}, dtype=object), [name])[name])
    found["verdict"] = [MARKS.get(word, word) for word in found["verdict"]]
    return found


def _json(value: object) -> Markup:
    """JSON inside a script element: nothing in it ends the element or starts a comment."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _scripts() -> dict[str, Markup]:
    """The libraries and the page's own script and style, as they stand inside the page."""
    tables = resources.files("itables") / "html"
    own = resources.files("reports") / "templates"
    texts = {
        "plotly": get_plotlyjs(),
        "tables": (tables / "dt_bundle.js").read_text(encoding="utf-8"),
        "tables_css": (tables / "dt_bundle.css").read_text(encoding="utf-8"),
        "page": (own / "page.js").read_text(encoding="utf-8"),
        "page_css": (own / "page.css").read_text(encoding="utf-8"),
    }
    for name, text in texts.items():
        if ("</style" if name.endswith("css") else "</script") in text.lower():
            raise RuntimeError(f"the text of {name} would end its element early")
    # HTML reads this mark inside a script; JavaScript reads the escape in its strings as the same.
    return {name: Markup(text.replace("<!--", "\\x3c!--")) for name, text in texts.items()}


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2")
