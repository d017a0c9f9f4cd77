"""Runs in processes of their own: order, failures, progress, and nothing left behind."""

import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pipeline_corpora import Corpus
from benchmarks.study import runner
from benchmarks.study.kinds import KINDS, Kind
from benchmarks.study.ledger import Ledger
from benchmarks.study.protocol import Run, parse
from benchmarks.study.runner import Progress, RunError, run_missing, train_apart
from tests.benchmarks.study.test_study_ledger import CORPORA, protocol, result
from tests.benchmarks.study.test_study_protocol import text_of

FILES = {name: Corpus(name, {}) for name in CORPORA}


class FakeRuns:
    """Takes the place of processes; keeps who ran beside whom."""

    def __init__(self, failing: str = "") -> None:
        self.began: list[tuple[str, int]] = []
        self.beside: list[set[str]] = []
        self._running: list[str] = []
        self._failing = failing
        self._lock = threading.Lock()
        self.gate: threading.Barrier | None = None

    def __call__(self, run: Run, corpus: Corpus, processes: set[Any]) -> dict[str, Any]:
        with self._lock:
            self.began.append((run.arm, run.seed))
            self._running.append(run.kind)
            self.beside.append(set(self._running))
        if self.gate is not None and not KINDS[run.kind].is_timed:
            self.gate.wait(20.0)
        with self._lock:
            self._running.remove(run.kind)
        if run.arm == self._failing:
            raise RunError(f"{run.arm} fell over")
        return result(2.0, run.corpus)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    made = FakeRuns()
    monkeypatch.setattr(runner, "train_apart", made)
    return made


def test_what_is_missing_runs_in_order_and_is_told(
    fake: FakeRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = protocol()
    runs = told.runs()
    ledger = Ledger(tmp_path, told, CORPORA)
    ledger.add(runs[1], result(2.0, "a"))
    found: list[str] = []
    assert run_missing(ledger, runs, FILES, 1, lambda run, row: found.append(row["key"])) == []
    assert fake.began == [(run.arm, run.seed) for run in runs if run is not runs[1]]
    assert found == [run.key for run in runs if run is not runs[1]]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 of 12 runs are there, 11 to do"
    assert lines[1].startswith("[1/11] one: bp, a, seed 1: bits 2; 1 s; about 10 s left")
    assert lines[-1].startswith("[11/11]") and "left" not in lines[-1]
    assert run_missing(ledger, runs, FILES, 1, lambda run, row: found.append(row["key"])) == []
    assert len(found) == 11


def test_one_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "train_apart", FakeRuns("rgc"))
    told = protocol()
    ledger = Ledger(tmp_path, told, CORPORA)
    failures = run_missing(ledger, told.runs(), FILES, 1, lambda run, row: None)
    assert failures == ["rgc fell over"] * 4
    assert {row["arm"] for row in ledger.rows()} == {"bp", "live"} and len(ledger.rows()) == 8
    assert "FAILED rgc fell over" in capsys.readouterr().err


def test_timed_runs_have_the_machine_for_themselves(
    fake: FakeRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "speed", Kind(KINDS["speed"].work, is_timed=True))
    timed = parse("p", "smoke", text_of(kind="speed")).runs()
    told = parse("p", "smoke", text_of())
    fake.gate = threading.Barrier(2)  # two at a time, or nothing goes on
    ledger = Ledger(tmp_path, told, CORPORA)
    assert run_missing(ledger, [*timed[:3], *told.runs()], FILES, 2, lambda run, row: None) == []
    assert fake.beside[-3:] == [{"speed"}] * 3 and all(kinds == {"pipeline"} for kinds in fake.beside[:-3])


def test_the_time_left_is_that_of_runs_alike() -> None:
    runs = protocol().runs()
    spent = [{"part": "one", "arm": arm, "wall_s": seconds} for arm, seconds in (("bp", 60.0), ("rgc", 600.0))]
    progress = Progress(runs, spent, jobs=2)
    # Left: 3 of bp at 60 s, 4 of rgc at 600 s, 4 of live, of which nothing is known, at the median of the part.
    line = progress.ended(runs[0], {**result(2.0, "a"), "wall_s": 60.0})
    assert line.endswith("about 24 min left")


def test_a_run_that_dies_says_why() -> None:
    run = Run("one", "pipeline", "bp", "a", 1, {"shape": {"nonsense": 1}})
    processes: set[subprocess.Popen[str]] = set()
    with pytest.raises(RunError, match=r"one: bp, a, seed 1 ended with exit code 1:[\s\S]*nonsense"):
        train_apart(run, Corpus("a", {"corpus": "python-docs"}), processes)
    assert not processes
