"""Reports: what is said first, what a table holds, and a page that needs nothing else."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.study.__main__ import write_report
from benchmarks.study.protocol import FIGURES, Run, parse
from benchmarks.study.render import markdown, page
from benchmarks.study.report import Folded, Heading, Items, Picture, Table, Text, report
from tests.benchmarks.study.test_study_ledger import CORPORA, protocol
from tests.benchmarks.study.test_study_protocol import text_of
from tests.coordinator.browser import browser, needs_browser

BITS = {"bp": 2.0, "rgc": 2.01, "live": 2.2}
MACHINE = {"cores": 2, "processor": "x"}


def rows_of(told: Any, **measures: Any) -> list[dict[str, Any]]:
    """Return a row for every run, worse with every seed, with a curve and exits."""
    rows = []
    for run in told.runs():
        bits = BITS[run.arm] + 0.001 * run.seed * (run.arm != "bp")
        given = {name: value(run) for name, value in measures.items()}
        row = {"key": run.key, "arm": run.arm, "corpus": run.corpus, "seed": run.seed, "machine": MACHINE}
        row |= {"measures": {"bits": bits, **given}, "corpus_sha256": CORPORA[run.corpus], "exits": [bits + 1, bits]}
        rows.append({**row, "curve": [[100, 1.0, bits + 1], [200, 2.0, bits]]})
    return rows


def tables_of(blocks: list[Any]) -> list[Table]:
    return [block for block in blocks if isinstance(block, Table)]


def test_failures_stand_first() -> None:
    told = protocol(criteria=[{"contrast": [arm, "bp"], "rule": "non_inferior", "limit": 1} for arm in ("rgc", "live")])
    blocks = report(told, rows_of(told), "make it so")
    assert blocks[:2] == [Heading(1, "T (smoke)"), Text("Of 4 criteria: 2 not met, 2 met.", is_strong=True)]
    said = next(block for block in blocks if isinstance(block, Items))
    assert [item.rpartition(": ")[2] for item in said.items] == ["not met.", "not met.", "met.", "met."]
    assert "live beside bp, a" in said.items[0] and "rgc beside bp, a" in said.items[2]


def test_runs_that_are_missing_are_counted() -> None:
    told = protocol()
    blocks = report(told, rows_of(told)[:5], "x")
    assert blocks[2] == Text("7 of 12 runs are missing.", is_strong=True)
    assert not any(isinstance(block, Text) and "missing" in block.text for block in report(told, rows_of(told), "x"))


def test_tables_hold_means_gaps_and_what_was_published() -> None:
    told = protocol(published={"rgc": "2.5"})
    first, contrasts, *_ = tables_of(report(told, rows_of(told, seconds=lambda run: 3.0), "x"))
    assert first.columns[:6] == ("arm", "seeds", "bits", "minus bp", "%, 95 % t", "%, bootstrap")
    assert first.columns[6:] == ("seconds", "published")
    bp, rgc, _ = first.rows
    assert bp == ("bp", "2", "2 +- 0", "-", "-", "-", "3.0", "-")
    # Differences .011 and .012: their mean, and 12.706 sd / sqrt(2) around it.
    assert rgc[:4] == ("rgc", "2", "2.011 +- 0.0064", "+0.0115 (+0.005147 to +0.01785)")
    assert rgc[4] == "+0.57 (+0.26 to +0.89)" and rgc[-1] == "2.5"
    assert contrasts.rows[0][:2] == ("rgc - live", "2")


def test_speeds_are_compared_as_ratios_with_what_they_are_made_of() -> None:
    told = protocol(compare="ratio", metric="tokens_per_s", kind="speed")

    def step_s(run: Run) -> float:
        return {"bp": 6.0, "rgc": 2.0 if run.seed == 1 else 8.0, "live": 7.5}[run.arm]

    rows = rows_of(
        told,
        tokens_per_s=lambda run: 600 / step_s(run),
        step_s=step_s,
        work_s=lambda run: 4.0 if run.seed == 1 else 16.0,
        largest_work_s=lambda run: 1.0 if run.seed == 1 else 4.0,
    )
    table = tables_of(report(told, rows, "x"))[0]
    assert table.columns[3:7] == ("/ bp, 95 % t", "W", "P", "eta")
    rgc = dict(zip(table.columns, table.rows[1], strict=True))
    assert rgc["/ bp, 95 % t"].startswith("1.500 (")
    assert (rgc["W"], rgc["P"], rgc["eta"]) == ("0.750", "4.000", "0.500")  # their product is the ratio


def test_a_single_seed_is_called_exploratory() -> None:
    told = parse("p", "cpu", text_of())
    said = [block.text for block in report(told, rows_of(told), "x") if isinstance(block, Text)]
    assert any("exploratory: a single seed shows no spread" in text for text in said)


def test_every_figure_is_drawn_from_rows_and_left_out_without() -> None:
    told = protocol(show=list(FIGURES))
    more = {
        name: lambda run: 1.0 + run.seed for name in ("participation", "sent_bytes", "tokens_per_s", "peak_pss_mib")
    }
    pictures = [block for block in report(told, rows_of(told, **more), "x") if isinstance(block, Picture)]
    assert [picture.name for picture in pictures] == [f"one_{name}" for name in FIGURES]
    for picture in pictures:
        assert picture.svg.startswith(b"<?xml") and b"rgc" in picture.svg
    again = [block for block in report(told, rows_of(told, **more), "x") if isinstance(block, Picture)]
    assert [picture.svg for picture in again] == [picture.svg for picture in pictures]
    assert not any(isinstance(block, Picture) for block in report(told, [], "x"))


def test_markdown_has_as_many_cells_in_every_line_of_a_table() -> None:
    told = protocol(show=["gaps"])
    text = markdown(report(told, rows_of(told), "x"))
    assert "![A part: gaps with their intervals](figures/one_gaps.svg)" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines if "bp" in line and "contrast" not in line}) == 1


def test_a_page_escapes_and_asks_nobody() -> None:
    blocks = [
        Heading(1, "a < b"),
        Text("<script>"),
        Folded("more", "</pre>"),
        Items(("&",)),
        Table(("x",), (("<td>",),)),
    ]
    text = page("T", [*blocks, Picture("p", '"quoted"', b"<svg/>")])
    assert (
        "<script" not in text and "&lt;script&gt;" in text and "&lt;/pre&gt;" in text and "&quot;quoted&quot;" in text
    )
    assert not re.search(r"""(src|href)="(?!data:)""", text) and "http" not in text


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [1200, 400])
def test_a_browser_shows_the_page_without_a_request(tmp_path: Path, width: int) -> None:
    told = protocol(show=list(FIGURES), published={"rgc": "as long a text as there is in any table " * 3})
    write_report(told, rows_of(told), tmp_path, "x")
    with browser(tmp_path / "profile") as opened, opened.page(width) as shown:
        url = (tmp_path / "report.html").as_uri()
        shown.open(url)
        shown.until("document.readyState === 'complete'")
        assert shown.eval("document.querySelector('h1').innerText") == "T (smoke)"
        assert shown.eval("document.documentElement.scrollWidth <= window.innerWidth")
        assert shown.eval("[...document.images].length > 0 && [...document.images].every((i) => i.naturalWidth > 0)")
        assert {address for address in shown.requested if not address.startswith("data:")} == {url}
        assert shown.complaints == []


def test_what_was_taken_over_is_counted() -> None:
    told = protocol()
    rows = [{**row, **({"from": "old.jsonl"} if row["seed"] == 1 else {})} for row in rows_of(told)]
    said = " ".join(item for block in report(told, rows, "x") if isinstance(block, Items) for item in block.items)
    number = sum(row["seed"] == 1 for row in rows)
    assert number and f"Taken over from results that were there: {number} runs from old.jsonl" in said
