"""What a study has found stays, whatever ends it, and belongs to one protocol and its corpora."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.study.ledger import Ledger, rows_of
from benchmarks.study.protocol import Protocol, ProtocolError, parse
from tests.benchmarks.study.test_study_protocol import text_of

CORPORA = {"a": "f" * 64, "b": "e" * 64}


def protocol(**changes: Any) -> Protocol:
    return parse("p", "smoke", text_of(**changes))


def result(bits: float, corpus: str) -> dict[str, Any]:
    return {"measures": {"bits": bits}, "curve": [], "corpus_sha256": CORPORA[corpus], "wall_s": 1.0}


def filled(folder: Path, number: int) -> Protocol:
    told = protocol()
    ledger = Ledger(folder, told, CORPORA)
    for run in told.runs()[:number]:
        ledger.add(run, result(2.0, run.corpus))
    return told


def test_what_is_there_is_found_again(tmp_path: Path) -> None:
    told = filled(tmp_path, 3)
    again = Ledger(tmp_path, told, CORPORA)
    assert [run in again for run in told.runs()] == [True] * 3 + [False] * (len(told.runs()) - 3)
    rows = again.rows()
    assert {row["protocol"] for row in rows} == {told.digest}
    assert (rows[0]["arm"], rows[0]["seed"], rows[0]["measures"]) == ("bp", 1, {"bits": 2.0})


def test_a_line_that_a_kill_cut_off_is_run_again(tmp_path: Path) -> None:
    told = filled(tmp_path, 3)
    path = tmp_path / "results.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert len(rows_of(tmp_path)) == 2
    ledger = Ledger(tmp_path, told, CORPORA)
    ledger.add(told.runs()[2], result(2.0, "a"))
    assert path.read_bytes() == whole


def test_another_protocol_is_refused_and_forked(tmp_path: Path) -> None:
    filled(tmp_path / "old", 3)
    changed = protocol(criteria=[{"contrast": ["rgc", "bp"], "rule": "non_inferior", "limit": 2}])
    with pytest.raises(ProtocolError, match=rf"ends? with the protocol it began with; got {changed.digest}.*--fork"):
        Ledger(tmp_path / "old", changed, CORPORA)
    fork = Ledger(tmp_path / "new", changed, CORPORA)
    assert fork.adopt(rows_of(tmp_path / "old"), changed.runs(), CORPORA) == 3
    assert [row["protocol"] for row in rows_of(tmp_path / "new")] == [changed.digest] * 3
    assert fork.adopt(rows_of(tmp_path / "old"), changed.runs(), CORPORA) == 0
    longer = protocol(options={"shape": {"width": 9}})
    assert Ledger(tmp_path / "longer", longer, CORPORA).adopt(rows_of(tmp_path / "old"), longer.runs(), CORPORA) == 0


def test_runs_on_another_text_are_not_taken_over(tmp_path: Path) -> None:
    told = filled(tmp_path / "old", 3)
    others = CORPORA | {"a": "0" * 64}
    assert Ledger(tmp_path / "new", told, others).adopt(rows_of(tmp_path / "old"), told.runs(), others) == 0


def test_another_corpus_is_refused(tmp_path: Path) -> None:
    told = filled(tmp_path, 1)
    with pytest.raises(ProtocolError, match=r"another a .000000000000, and .* holds ffffffffffff"):
        Ledger(tmp_path, told, CORPORA | {"a": "0" * 64})


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text(json.dumps({"key": "x"}) + "\n")
    with pytest.raises(ProtocolError, match="must have study"):
        Ledger(tmp_path, protocol(), CORPORA)
