"""The page loads nothing, and says what the rows say; what its scripts do is seen in `test_page_in_browser.py`."""

from __future__ import annotations

import math
import re
import shlex
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports import RowsError, failing_cases, from_rows, per_arch, per_arch_stage, write_page
from reports.aggregate import row_faults
from reports_rows import TEXT, frame, passing_rows, row, rows

SCRIPT = "<script>alert(1)</script>"
LOADING = {"src", "srcset", "poster", "data", "action", "background", "formaction", "xlink:href"}


class Page(HTMLParser):
    """Tags, attributes, and the text of each element by its tag."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.texts, self.cells = [], [], {}, []
        self._open = []
        self.feed(html)
        self.close()
        policies = [
            value for tag, name, value in self.attributes if (tag, name) == ("meta", "content") and "-src" in value
        ]
        self.policies = [
            (words[0], words[1:]) for text in policies for words in [one.split() for one in text.split(";")]
        ]

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.texts.setdefault(tag, []).append("")
        if tag == "td":
            self.cells.append((dict(attrs).get("class", ""), len(self.texts[tag]) - 1))
        if tag not in ("meta", "link", "br", "img"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        for tag in self._open:
            self.texts[tag][-1] += data

    def classed(self, word):
        """The texts of the cells with a class."""
        return [self.texts["td"][index] for classes, index in self.cells if word in classes.split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("page")


def page_of(df, folder):
    return Page(write_page(df, folder / "page.html").read_text(encoding="utf-8"))


def assert_loads_nothing(page):
    assert not {"img", "iframe", "object", "embed", "base", "form", "svg"} & set(page.tags)
    assert page.tags.count("script") == 5
    assert page.tags.count("link") == 1
    policy = dict(page.policies)
    assert policy["default-src"] == ["'none'"]
    assert "connect-src" not in policy and not any(
        "http" in source or "*" in source for _, s in page.policies for source in s
    )
    for tag, name, value in page.attributes:
        assert name not in LOADING, (tag, name, value)
        assert not name.startswith("on"), (tag, name, value)
        assert name != "href" or value.startswith("#") or value == "data:,"
    for style in page.texts["style"]:
        assert not re.search(r"url\((?![\"']?data:)|@import", style)


@given(drawn=st.lists(rows(st.just(SCRIPT) | TEXT), min_size=1, max_size=5))
@settings(max_examples=3)
def test_the_page_loads_nothing_and_no_text_can_add_an_element(folder, drawn):
    page = page_of(from_rows(drawn), folder)
    assert_loads_nothing(page)
    plain = page_of(from_rows({**one, "family": "f", "reason": "r", "case": "{}"} for one in drawn), folder)
    # Reasons of one text make one line where different texts made several, so rows may differ; kinds may not.
    assert set(page.tags) == set(plain.tags)


def test_planted_markup_is_shown_as_text(folder):
    names = ("family", "implementation", "preset", "arch", "stage", "reason", "variant", "git_revision")
    df = frame({**dict.fromkeys(names, SCRIPT), "verdict": "fail", "first_bad": f'"{SCRIPT}"'})
    path = write_page(df, folder / "page.html", title=SCRIPT)
    html = path.read_text(encoding="utf-8")
    assert SCRIPT not in html
    page = Page(html)
    assert_loads_nothing(page)
    assert page.texts["title"] == [SCRIPT]
    assert SCRIPT in page.texts["td"]


@given(drawn=st.lists(rows(TEXT), min_size=1, max_size=5))
@settings(max_examples=3)
def test_failing_cases_have_replay_lines_that_a_shell_reads_back(folder, drawn):
    df = from_rows(drawn)
    page = page_of(df, folder)
    cases, _ = failing_cases(df, 20)
    lines = [shlex.split(line) for line in page.texts.get("code", [])]
    assert lines == [["oproj", "replay", case["case"], "--engine", case["engine"]] for case in cases]
    assert len(lines) == (row_faults(df) != "").sum()  # each row drawn is a Case of its own


@given(drawn=st.lists(passing_rows(), min_size=1, max_size=5))
@settings(max_examples=3)
def test_every_figure_is_there_rounded_and_in_full(folder, drawn):
    df = from_rows(drawn)
    page = page_of(df, folder)
    titles = {value for _, name, value in page.attributes if name == "title"}
    shown = set(page.texts["td"])
    for table in (per_arch(df), per_arch_stage(df)):
        for margin in table["margin_max"]:
            assert f"{margin:.3g}" in shown
            assert repr(margin) in titles or repr(margin) in shown
        assert {f"{count:,}" for count in table["compared"]} <= shown
    assert page.classed("bad") == []


def test_a_failing_cell_differs_by_word_or_mark_and_class(folder):
    bad = page_of(frame({}, {"margin_max": math.nan}), folder).classed("bad")
    # In the summary, in the table of stages, and the margin among all metrics.
    assert bad == ["✗ FAIL", "NaN"] * 2 + ["NaN"]
    bad = page_of(frame({}, {"margin_max": 1.75, "mismatched": 3, "verdict": "fail"}), folder).classed("bad")
    assert bad == ["✗ FAIL", "1.75", "3"] * 2 + ["1.75"]
    bad = page_of(frame({"verdict": "skipped", "reason": "no GPU", "compared": 0}), folder).classed("bad")
    assert bad == ["✗ nothing compared"] * 2


@pytest.mark.parametrize(
    "changes, verdict",
    [
        ({}, "✓ pass"),
        ({"verdict": "fail"}, "✗ FAIL"),
        ({"verdict": "not applicable", "reason": "judged by itself"}, "✗ nothing compared"),
    ],
)
def test_the_page_opens_with_the_verdict(folder, changes, verdict):
    page = page_of(frame(changes), folder)
    assert page.texts["p"][0] == verdict
    assert page.texts["h1"] == ["FP8 output projection: error against float64"]


def test_the_page_says_what_made_the_rows_and_what_was_not_judged(folder):
    page = page_of(frame({}, {"verdict": "skipped", "reason": "no such GPU here"}), folder)
    assert dict(zip(page.texts["dt"], page.texts["dd"]))["torch"] == "2.13.0"
    assert "no such GPU here" in page.texts["td"]
    assert "measured" in page.texts["td"]


def test_the_same_rows_make_the_same_file(folder):
    paths = [write_page(frame({}, {"arch": "sm100"}), folder / name) for name in ("a.html", "b.html")]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_frame_without_rows_makes_a_page_that_did_not_pass(folder):
    page = page_of(from_rows([]), folder)
    assert page.texts["p"][0] == "✗ nothing compared"


def test_a_broken_frame_makes_no_page(folder):
    with pytest.raises(RowsError, match="missing column"):
        write_page(from_rows([row()]).drop(columns="arch"), folder / "none.html")
    assert not (folder / "none.html").exists()
