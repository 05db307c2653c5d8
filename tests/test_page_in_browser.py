"""The page in a real browser, headless: it opens without a message; filters, sorting and figures do what they say.

Needs chromium and its driver (Debian: `apt-get install chromium chromium-driver`). Without them the tests are skipped,
and fail where OPROJ_BROWSER=required is set, as in CI.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import time
from urllib.parse import urlsplit

import numpy as np
import pytest

from conformance.error_map import error_map
from reports import failing_cases, from_rows, per_arch_stage, write_page
from reports.aggregate import row_faults
from reports.columns import JUDGED
from reports.formatting import MARKS
from reports_rows import SKIPPED, row

REQUIRED = os.environ.get("OPROJ_BROWSER") == "required"
PLANTED = '<img src=x onerror="window.planted=1">'
FAMILIES = ("normal", "wide", PLANTED)
FAULTS = {
    "version": 1,
    "faults": [
        {"fault": PLANTED, "arch": "sm90", "killed": True, "checks": ["wo_a/bits"]},
        {"fault": "b", "arch": "sm90", "killed": False, "checks": []},
    ],
    "variants": [{"variant": "v", "arch": "sm90", "alarms": [PLANTED]}],
}
READY_SECONDS = 60


def missing(what):
    if REQUIRED:
        pytest.fail(f"OPROJ_BROWSER=required, but {what}")
    pytest.skip(f"{what}: Debian's packages are chromium and chromium-driver")


@pytest.fixture(scope="module")
def driver():
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    for name, path in programs.items():
        if path is None:
            missing(f"there is no {name} on this machine")
    try:
        from selenium import webdriver
    except ImportError:
        missing("the package selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = programs["chromium"]
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs["chromedriver"]))
    yield driver
    driver.quit()


def mapped(case, stage, oracle, bad):
    """The error map of a row: of failing ones, and of one that passes."""
    if stage != "wo_a" or not (bad or (case, oracle) == (3, "bound")):
        return ""
    return error_map(np.random.default_rng(case).random((case + 1, 4, 64)) * (1.5 if bad else 0.9), stage)


def some_rows():
    """90 rows: two archs, three stages, three oracles, a family with markup in it, every fifth Case with failures."""
    rng = np.random.default_rng(7)
    out = []
    for case in range(10):
        arch, family = ("sm90", "sm100")[case % 2], FAMILIES[case % 3]
        for stage in ("quantize", "wo_a", "o_proj"):
            for oracle in ("bits", "exact", "bound"):
                has_margin = oracle == "bound"
                bad = case % 5 == 0 and stage != "quantize" and oracle != "exact"
                margin = float(rng.integers(1, 1000)) / 1000 + (3.0 if bad else 0.0)
                margins = (margin, margin / 2, margin / 4) if has_margin else (math.nan,) * 3
                one = row(
                    **dict(zip(("margin_max", "margin_p999", "margin_p50"), margins)),
                    arch=arch,
                    stage=stage,
                    oracle=oracle,
                    family=family,
                    tp_size=(1, 8)[case % 2],
                    tokens=case + 1,
                    case_id=f"c{case}",
                    case=json.dumps({"seed": case, "n_heads": 64, "n_groups": 8, "o_lora_rank": 512, "it's": family}),
                    compared=int(rng.integers(1000, 9_000_000)),
                    mismatched=3 if bad else 0,
                    ulp_histogram=json.dumps({"0": int(rng.integers(1, 999)), "2": case}) if has_margin else "",
                    ulp_max=3.0 if has_margin else math.nan,
                    first_bad=json.dumps({"tensor": "z", "at": [case, 1, 7]}) if bad else "",
                    error_map=mapped(case, stage, oracle, bad),
                    verdict="fail" if bad else "pass",
                    reason=f"3 elements {PLANTED}" if bad else "",
                )
                out.append({**one, **SKIPPED} if (case, stage, oracle) == (1, "wo_a", "bits") else one)
    return out


@pytest.fixture(scope="module")
def df():
    return from_rows(some_rows())


@pytest.fixture(scope="module")
def page(driver, df, tmp_path_factory):
    """The page, open and ready, once for all tests; its messages and requests are kept."""
    path = write_page(df, tmp_path_factory.mktemp("page") / "report.html", faults=FAULTS)
    driver.set_window_size(1280, 900)
    opened(driver, path)
    messages, requests = driver.get_log("browser"), driver.get_log("performance")
    return path, messages, requests


@pytest.fixture(autouse=True)
def plain(page, driver):
    """Each test starts without filters."""
    driver.execute_script("document.getElementById('reset').click()")
    filtered(driver, {})


def opened(driver, path):
    driver.get(path.as_uri())
    until(driver, "return document.documentElement.dataset.ready")


def until(driver, script):
    """The script's value once it is true."""
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        value = driver.execute_script(script)
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"after {READY_SECONDS} s still not: {script}; console: {driver.get_log('browser')}")


def filtered(driver, wanted):
    until(driver, f"return document.documentElement.dataset.filtered === {json.dumps(compact(wanted))}")


def choose(driver, **wanted):
    driver.execute_script(
        "for (const [name, value] of Object.entries(arguments[0])) {"
        "  const select = document.querySelector(`.filters select[name=${name}]`);"
        "  if (![...select.options].some((option) => option.value === value)) throw Error(`no option ${value}`);"
        "  select.value = value; select.dispatchEvent(new Event('change')); }",
        wanted,
    )
    expected = {name: wanted[name] for name in ("arch", "stage", "oracle", "family", "verdict") if name in wanted}
    until(driver, f"return document.documentElement.dataset.filtered === {json.dumps(compact(expected))}")


def compact(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def cells(driver, table, column):
    """The texts of a column of the shown rows of a table, by its name."""
    return driver.execute_script(
        "const table = document.getElementById(arguments[0]);"
        "const names = table.dataset.names ? JSON.parse(table.dataset.names)"
        "  : JSON.parse(document.getElementById('row-data').textContent).columns.map(([name]) => name);"
        "const i = names.indexOf(arguments[1]);"
        "return [...table.tBodies[0].rows].filter((row) => row.cells.length > 1)"
        "  .map((row) => row.cells[i].textContent)",
        table,
        column,
    )


def count_of_rows(driver):
    """How many rows the big table has under the filters, by what it says."""
    text = driver.execute_script("return document.querySelector('#every-row .dt-info').textContent")
    return int(re.search(r"of ([\d,]+) rows?", text)[1].replace(",", ""))


def figure(driver, title):
    """The traces that Plotly holds of the figure under a heading."""
    return driver.execute_script(
        "const panel = [...document.querySelectorAll('.panel')]"
        "  .find((one) => one.querySelector('h3').textContent === arguments[0]);"
        "return panel.querySelector('.plot').data.map(({ type, name, x, y, z, customdata, visible }) =>"
        "  ({ type, name, x, y, z, customdata, visible: visible ?? true }))",
        title,
    )


def test_it_opens_without_a_message_and_asks_the_network_for_nothing(page, driver):
    _, messages, requests = page
    assert [one["message"] for one in messages] == []
    events = [json.loads(one["message"])["message"] for one in requests]
    urls = [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]
    assert len(urls) >= 1
    assert {urlsplit(url).scheme for url in urls} <= {"file", "blob", "data"}
    assert sum(url.startswith("file:") for url in urls) == 1
    drawn = driver.execute_script(
        "return [...document.querySelectorAll('.plot')].map((one) => !one.offsetParent || !!one.data)"
    )
    assert len(drawn) > 10 and all(drawn)


def test_planted_markup_stays_text(driver):
    assert driver.execute_script("return window.planted") is None
    assert driver.execute_script("return document.querySelectorAll('img').length") == 0
    assert PLANTED in cells(driver, "rows", "family")
    assert PLANTED in cells(driver, "T_kills", "fault")


def test_heat_maps_hold_the_worst_margins_of_the_frame(driver, df):
    bound = df[df["verdict"].isin(JUDGED) & (df["oracle"] == "bound")].astype(
        {"stage": str, "family": str, "arch": str}
    )
    for arch, rows in bound.groupby("arch"):
        for title, pair in (("TP × tokens", ("tp_size", "tokens")), ("stage × family", ("stage", "family"))):
            (trace,) = figure(driver, f"{arch}: {title}")
            worst = rows.groupby(list(pair))["margin_max"].max()
            found = {
                (y, x): z for y, line in zip(trace["y"], trace["z"]) for x, z in zip(trace["x"], line) if z is not None
            }
            assert found == {tuple(map(str, key)): min(margin, 2.0) for key, margin in worst.items()}


def test_curves_and_bars_hold_the_counts_of_the_frame(driver, df):
    rows = df[df["verdict"].isin(JUDGED) & (df["oracle"] == "bound") & (df["stage"] == "wo_a")]
    for trace in figure(driver, "wo_a: margins, bound"):
        arch, which = trace["name"].split()
        if which == "max":
            margins = rows.loc[rows["arch"] == arch, "margin_max"]
            assert sum(trace["customdata"]) == len(margins) == 5
            assert trace["customdata"][-1] == (margins > 1).sum() == 1
    for trace in figure(driver, "wo_a: ULP, bound"):
        histograms = [json.loads(text) for text in rows.loc[rows["arch"] == trace["name"], "ulp_histogram"]]
        assert trace["x"] == ["0", "2–3"]
        assert trace["customdata"] == [sum(one.get(step, 0) for one in histograms) for step in ("0", "2")]


def test_error_maps_of_failing_cases_are_drawn(driver, df):
    recorded = df.loc[(df["case_id"] == "c0") & (df["oracle"] == "bound") & (df["stage"] == "wo_a"), "error_map"].iloc[
        0
    ]
    (trace,) = figure(driver, "wo_a bound: bad elements, group × rank")
    assert trace["z"] == json.loads(recorded)["maps"][0]["share"]


def test_a_map_of_margins_that_hold_is_drawn(driver, df):
    (recorded,) = df.loc[(df["case_id"] == "c3") & (df["error_map"] != ""), "error_map"]
    (trace,) = figure(driver, "sm100 wo_a, Case c3: group × rank")
    assert trace["z"] == json.loads(recorded)["maps"][0]["max"]


@pytest.mark.parametrize("name", ["arch", "stage", "oracle", "family", "verdict"])
def test_each_filter_leaves_the_rows_of_its_value(driver, df, name):
    judged = df[df["verdict"].isin(JUDGED)]
    assert count_of_rows(driver) == len(judged)
    for value in judged[name].astype(str).unique():
        shown = MARKS.get(value, value) if name == "verdict" else value
        choose(driver, **{name: shown})
        assert count_of_rows(driver) == (judged[name] == value).sum()
        assert set(cells(driver, "rows", name)) == {shown}
        driver.execute_script("document.getElementById('reset').click()")
    assert count_of_rows(driver) == len(judged)


def test_filters_act_together_and_on_tables_cases_and_figures(driver, df):
    choose(driver, arch="sm100", stage="wo_a")
    judged = df[df["verdict"].isin(JUDGED)]
    assert count_of_rows(driver) == ((judged["arch"] == "sm100") & (judged["stage"] == "wo_a")).sum()
    stages = per_arch_stage(df)
    here = stages[(stages["arch"] == "sm100") & (stages["stage"] == "wo_a")]
    assert cells(driver, "T_stages", "oracle") == list(here["oracle"])
    failing = df[(row_faults(df) != "") & (df["arch"] == "sm100") & (df["stage"] == "wo_a")]["case_id"].unique()
    shown = driver.execute_script(
        "return [...document.querySelectorAll('.case')].filter((one) => !one.hidden).map((one) => one.textContent)"
    )
    assert len(shown) == len(failing) == 1 and f"Case {failing[0]}" in shown[0]
    titles = driver.execute_script(
        "return [...document.querySelectorAll('.panel')].filter((one) => one.offsetParent)"
        "  .map((one) => one.firstElementChild.textContent)"
    )
    assert "sm100: TP × tokens" in titles and "sm90: TP × tokens" not in titles
    assert "wo_a: ULP, bound" in titles and "o_proj: ULP, bound" not in titles
    visible = {trace["name"]: trace["visible"] for trace in figure(driver, "wo_a: margins, bound")}
    assert (visible["sm100 max"], visible["sm90 max"]) == (True, False)
    assert (visible["sm100 median"], visible["sm90 median"]) == ("legendonly", False)
    driver.execute_script("document.getElementById('reset').click()")
    filtered(driver, {})
    visible = {trace["name"]: trace["visible"] for trace in figure(driver, "wo_a: margins, bound")}
    assert (visible["sm90 max"], visible["sm90 median"]) == (True, "legendonly")


def as_number(text):
    return -math.inf if text == "–" else float(text.replace(",", "").removesuffix(" %"))


@pytest.mark.parametrize("table, column", [("rows", "compared"), ("rows", "margin_max"), ("T_stages", "compared"),
                                           ("T_stages", "margin_max"), ("T_stages", "within_1_ulp")])  # fmt: skip
def test_a_click_on_a_heading_sorts_by_its_numbers(driver, table, column):
    def click():
        driver.execute_script(
            "const table = document.getElementById(arguments[0]);"
            "const names = table.dataset.names ? JSON.parse(table.dataset.names)"
            "  : JSON.parse(document.getElementById('row-data').textContent).columns.map(([name]) => name);"
            "const head = table.tHead.rows[0].cells[names.indexOf(arguments[1])];"
            "(head.querySelector('.dt-column-order') ?? head).click()",
            table,
            column,
        )
        time.sleep(0.1)
        return [as_number(text) for text in cells(driver, table, column)]

    upward, downward = click(), click()
    assert len({*upward, *downward}) > 1
    assert upward == sorted(upward)
    assert downward == sorted(downward, reverse=True) and downward[0] > upward[0]


def test_a_replay_line_is_copied_as_it_is(driver, df):
    cases, _ = failing_cases(df)
    expected = ["oproj", "replay", cases[0]["case"], "--engine", "software"]
    button = "document.querySelector('.case .copy')"
    driver.execute_script(f"{button}.click()")
    assert shlex.split(until(driver, f"return {button}.dataset.copied")) == expected
    ids = cells(driver, "rows", "case_id")
    button = "document.querySelector('#rows tbody .copy')"
    driver.execute_script(f"{button}.click()")
    copied = shlex.split(until(driver, f"return {button}.dataset.copied"))
    assert copied[2] == df.loc[df["case_id"] == ids[0], "case"].iloc[0]


def test_a_phone_scrolls_down_only(page, driver):
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        opened(driver, page[0])
        driver.execute_script("for (const fold of document.querySelectorAll('details')) fold.open = true")
        time.sleep(0.5)
        width, inner = driver.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert (width, inner) == (390, 390)
        wide = driver.execute_script(
            "return [...document.querySelectorAll('.plot svg')]"
            "  .filter((one) => one.getBoundingClientRect().right > 390).length"
        )
        assert wide == 0
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_it_prints_with_its_figures_inside_their_columns(driver):
    pdf = driver.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True, "printBackground": True})["data"]
    assert pdf.startswith("JVBER")  # %PDF
    assert driver.execute_script("return document.querySelector('#per-stage details').open")


GROUNDS = """
  const ground = (one) => {
    const colour = getComputedStyle(one).backgroundColor;
    return colour !== "rgba(0, 0, 0, 0)" || !one.parentElement ? colour : ground(one.parentElement);
  };
  return [...new Set([...document.querySelectorAll("th, td, code, h3, select, input, .dt-paging-button, .dt-info")]
    .map((one) => `${getComputedStyle(one).color} on ${ground(one)}`))];
"""


def luminance(colour):
    """Relative luminance of WCAG 2 of "rgb(r, g, b)"."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def assert_readable(driver):
    for pair in driver.execute_script(GROUNDS):
        low, high = sorted(luminance(colour) for colour in pair.split(" on "))
        assert (high + 0.05) / (low + 0.05) >= 4.5, pair


def test_light_paper_is_readable(driver):
    assert_readable(driver)


def test_dark_paper_has_light_ink(page, driver):
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        opened(driver, page[0])
        ink = driver.execute_script(
            "return [document.querySelector('.plot .xtick text').style.fill, getComputedStyle(document.body).color]"
        )
        assert ink[0] == ink[1] == "rgb(227, 232, 239)"
        assert_readable(driver)
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_without_scripts_tables_and_replay_lines_are_there(page, driver, df):
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        driver.get(page[0].as_uri())
        text = driver.find_element("tag name", "body").text
        assert "✗ FAIL" in text and "This table needs scripts" in text
        assert len(driver.find_elements("css selector", "#T_stages tbody tr")) == len(per_arch_stage(df))
        assert len(driver.find_elements("css selector", ".case code")) == failing_cases(df)[1]
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
        opened(driver, page[0])
