"""The README's tables are those of the results, and of nothing else."""

import json
from pathlib import Path

import pytest

from benchmarks import readme
from benchmarks.study.ledger import HEAD, rows_of
from benchmarks.study.protocol import load
from benchmarks.study.render import markdown
from benchmarks.study.report import report


def test_the_tables_agree_with_the_results() -> None:
    text = readme.README.read_text(encoding="utf-8")
    assert [f"<!-- table: {name} -->" in text for name in readme.TABLES] == [True] * len(readme.TABLES)
    assert readme.main(["--check"]) == 0


def test_a_figure_that_was_changed_is_found_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = readme.README.read_text(encoding="utf-8")
    changed = tmp_path / "README.md"
    changed.write_text(there.replace("| real text |", "| real texts |"), encoding="utf-8")
    monkeypatch.setattr(readme, "README", changed)
    assert readme.main(["--check"]) == 1
    assert "run python -m benchmarks.readme" in capsys.readouterr().err
    assert readme.main([]) == 0
    assert changed.read_text(encoding="utf-8") == there


@pytest.mark.parametrize("folder", sorted(readme.STUDIES.iterdir()), ids=lambda folder: folder.name)
def test_the_reports_of_studies_are_those_of_their_rows(folder: Path) -> None:
    protocol, rows = load(folder.name, "cpu"), rows_of(folder)
    assert json.loads((folder / HEAD).read_text())["protocol"] == protocol.digest
    assert {row["key"] for row in rows} <= {run.key for run in protocol.runs()}
    said = (folder / "report.md").read_text(encoding="utf-8")
    [command] = [line.removeprefix("* Command: ") for line in said.splitlines() if line.startswith("* Command: ")]
    assert markdown(report(protocol, rows, command)) == said


def test_what_stands_around_a_table_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "TABLES", {"one": lambda: "ONE", "two": lambda: "TWO"})
    empty = "a\n<!-- table: one -->\n<!-- end -->\nb\n<!-- table: two -->\nold\n\nolder\n<!-- end -->\nc"
    assert (
        readme.drawn(empty) == "a\n<!-- table: one -->\nONE\n<!-- end -->\nb\n<!-- table: two -->\nTWO\n<!-- end -->\nc"
    )
    assert readme.drawn(readme.drawn(empty)) == readme.drawn(empty)
    with pytest.raises(KeyError, match="three"):
        readme.drawn("<!-- table: three -->\n<!-- end -->")
