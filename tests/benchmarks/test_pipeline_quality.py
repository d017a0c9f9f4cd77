import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pipeline_quality


class FakeRunner:
    """Answers with bits that depend on the method, and remembers what it ran."""

    ran: list[tuple[str, int]] = []

    def __enter__(self) -> "FakeRunner":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def run(self, arms: list[dict[str, Any]]) -> list[dict[str, Any]]:
        [arm] = arms
        FakeRunner.ran.append((arm["name"], arm["seed"]))
        steps = arm["warmup_steps"] + arm["timed_steps"] + arm["memory_steps"]
        bits = {"bp": 2.0, "rgc": 2.1, "live": 2.2}[arm["name"]] + arm["seed"]
        return [{"num_steps": steps, "bits_per_token": bits}]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pipeline_quality, "Runner", FakeRunner)
    FakeRunner.ran = []
    return tmp_path / "rows.jsonl"


def run(file: Path, *options: str) -> list[dict[str, Any]]:
    return pipeline_quality.main(["--json", str(file), "--steps", "5", *options])


def test_rows_pair_every_method_with_bp_of_its_seed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(file, "--methods", "rgc", "--seeds", "0", "1")
    assert [(row["method"], row["seed"]) for row in rows] == [("bp", 0), ("rgc", 0), ("bp", 1), ("rgc", 1)]
    assert all(row["num_steps"] == 5 and row["tokens"] == 5 * 16 * 128 for row in rows)
    line = next(line for line in capsys.readouterr().out.splitlines() if "rgc" in line)
    assert "+0.1000" in line and "+4.17" in line  # the mean of 5 % and 3.33 %


def test_run_that_is_continued_trains_only_what_is_missing(file: Path) -> None:
    run(file, "--methods", "rgc")
    run(file, "--methods", "rgc", "live")
    assert FakeRunner.ran == [("bp", 0), ("rgc", 0), ("live", 0)]
    assert len(file.read_text().splitlines()) == 3


def test_rows_hold_the_names_of_files_and_not_their_places(file: Path) -> None:
    rows = run(file, "--methods", "bp", "--train", "/some/where/a.txt", "--val", "/some/where/b.txt")
    assert rows[0]["corpus"] == {"train": "a.txt", "val": "b.txt"}
    assert "where" not in json.dumps(rows)


@pytest.mark.parametrize("wrong", [["--train", "a.txt"], ["--steps", "1"], ["--methods", "x"]])
def test_wrong_options_are_refused_before_anything_runs(file: Path, wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        pipeline_quality.main(["--json", str(file), *wrong])
    assert FakeRunner.ran == []
