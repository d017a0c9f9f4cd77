"""A whole study from the command line: runs, a kill, a resumption, a report; and what it refuses."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from benchmarks.pipeline_corpora import Corpus
from benchmarks.study import __main__ as study_main
from benchmarks.study.__main__ import adoptable, main, write_report
from benchmarks.study.corpora import corpora_of
from benchmarks.study.kinds import blocks, workers
from benchmarks.study.ledger import Ledger, rows_of
from benchmarks.study.protocol import Protocol, ProtocolError, Run, parse
from benchmarks.study.tracking import named_tables, tracker
from benchmarks.study.workers import _start, results_of

SHAPE = (
    "{num_layers: 2, width: 8, num_stages: 2, window_bytes: 16, batch_size: 2, tokens: %d, lr: 0.003, num_evals: 2,"
    " eval_batches: 1, switch_frac: 0.5, score_batches: 1}"
)
SPEED = (
    "{num_layers: 2, width: 8, num_stages: 2, window_bytes: 16, batch_size: 2, warmup_steps: 4, timed_steps: 2,"
    " memory_steps: 1, val_batches: 0}"
)
RECIPE = (
    "{steps: 4, num_layers: 2, num_blocks: 2, width: 8, num_heads: 1, window_bytes: 16, batch_size: 2, sync_every: 2,"
    " warmup_steps: 1, test_windows: 2, num_threads: 1}"
)
PROTOCOL = f"""
title: A small study
question: Does it run?
source: nobody
parts:
  quality:
    title: Quality
    kind: pipeline
    metric: bits
    control: bp
    arms: {{bp: {{strategy: null}}, rgc: {{strategy: {{method: rgc}}}}}}
    criteria: [{{contrast: [rgc, bp], rule: non_inferior, limit: 1}}]
    show: [gaps, curve_tokens]
    sizes:
      smoke: {{corpora: [python-docs], seeds: [1], options: {{shape: {SHAPE % 128}}}}}
      cpu: {{corpora: [python-docs], seeds: [1], options: {{shape: {SHAPE % 16_000_000}}}}}
  depth:
    title: Depth
    kind: blocks
    metric: ce
    control: causal
    arms: {{causal: {{}}, denoise: {{model: {{objective: denoise}}, strategy: {{}}}}}}
    show: [exits]
    sizes:
      smoke: {{corpora: [python-docs], seeds: [1], options: {{recipe: {RECIPE}}}}}
  speed:
    title: Speed
    kind: speed
    metric: tokens_per_s
    compare: ratio
    control: bp
    arms: {{bp: {{strategy: null}}, rgc: {{strategy: {{method: rgc}}}}}}
    sizes:
      smoke: {{corpora: [python-docs], seeds: [1], options: {{threads: 1, shape: {SPEED}}}}}
"""


@pytest.fixture
def protocol(tmp_path: Path) -> str:
    (tmp_path / "mine.yaml").write_text(PROTOCOL)
    return str(tmp_path / "mine.yaml")


@pytest.mark.slow
def test_a_study_runs_once_and_reports(protocol: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    assert main([protocol, "--out", str(folder), "--parts", "depth", "quality"]) == 0
    assert len(rows_of(folder)) == 4 and "2 of 6 runs are missing." in (folder / "report.md").read_text()
    assert main([protocol, "--out", str(folder)]) == 0
    rows = rows_of(folder)
    assert [(row["part"], row["arm"]) for row in rows] == [
        (part, arm)
        for part, arms in (("quality", ("bp", "rgc")), ("depth", ("causal", "denoise")), ("speed", ("bp", "rgc")))
        for arm in arms
    ]
    by_arm = {(row["part"], row["arm"]): row["measures"] for row in rows}
    assert 4 < by_arm["quality", "rgc"]["bits"] < 9 and by_arm["speed", "rgc"]["tokens_per_s"] > 0
    assert by_arm["depth", "denoise"].keys() >= {
        "ce",
        "sweep_ce_k",
        "prior_ce_k",
        "leak_accuracy",
        "sent_bytes",
        "flops",
    }
    assert by_arm["speed", "rgc"]["work_s"] > 0
    assert (folder / "figures" / "depth_exits.svg").exists()
    assert "A small study (smoke)" in (folder / "report.md").read_text()
    assert "<h1>A small study (smoke)</h1>" in (folder / "report.html").read_text()
    report = (folder / "report.md").read_bytes()
    capsys.readouterr()
    assert main([protocol, "--out", str(folder)]) == 0
    assert "6 of 6 runs are there, 0 to do" in capsys.readouterr().out
    assert main([protocol, "--out", str(folder), "--report"]) == 0
    assert (folder / "report.md").read_bytes() == report and rows_of(folder) == rows


def starts_a_run(process: "subprocess.Popen[str]") -> psutil.Process:
    """Return the first run of a study, once it trains."""
    study = psutil.Process(process.pid)
    while process.poll() is None:
        for child in study.children(recursive=True):
            if child.cpu_times().user > 1.0:  # past its imports, or far into them
                return child
    raise AssertionError("the study has ended")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_study_that_is_killed_leaves_no_run_behind(protocol: str, tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "benchmarks.study", protocol, "--size", "cpu", "--out", str(tmp_path / "out")]
    environment: dict[str, Any] = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True, env=environment) as process:
        run = starts_a_run(process)
        process.send_signal(number)
        process.wait(60.0)
        _, alive = psutil.wait_procs([run], timeout=60.0)
    assert not alive and rows_of(tmp_path / "out") == []
    assert process.returncode == (130 if number == signal.SIGINT else -number)


@pytest.mark.slow
def test_runs_and_report_are_tracked_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    told = parse("mine", "smoke", PROTOCOL)
    rows = [{**row, "machine": {}} for row in rows_of_runs(told)]
    blocks = write_report(told, rows, tmp_path, "x")
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log_run, log_report = tracker(told, "a-project", tmp_path)
    for run, row in zip(told.runs()[:2], rows, strict=False):
        log_run(run, row)
    log_report(blocks)
    tracked = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(tracked) == 3
    group = f"mine-smoke-{told.digest}".encode()
    assert all(group in path.read_bytes() for path in tracked)
    [report] = [path.read_bytes() for path in tracked if b"report.html" in path.read_bytes()]
    assert [name for name, _ in named_tables(blocks)] == ["Quality / 1", "Depth / 1", "Speed / 1"]
    assert all(f"{name}.table.json".encode() in report for name, _ in named_tables(blocks))


def rows_of_runs(told: Protocol) -> list[dict[str, Any]]:
    result = {
        "measures": {"bits": 2.0, "ce": 1.0},
        "curve": [[10, 1.0, 3.0], [20, 2.0, 2.0]],
        "corpus_sha256": "f" * 64,
    }
    return [{"key": run.key, **asdict(run), **result} for run in told.runs()]


def test_a_fork_takes_over_timed_runs_by_whole_rounds_only() -> None:
    told = parse("mine", "smoke", PROTOCOL)
    runs, rows = told.runs(), rows_of_runs(told)
    assert adoptable(told, runs, rows) == runs
    by_name = {(run.part, run.arm): run for run in runs}
    lacks = [row for row in rows if (row["part"], row["arm"]) not in (("speed", "bp"), ("quality", "bp"))]
    left = {(run.part, run.arm) for run in adoptable(told, runs, lacks)}
    assert by_name.keys() - left == {("speed", "bp"), ("speed", "rgc"), ("quality", "bp")}
    # The new study has half a round already: the other half was timed beside something else.
    missing = [run for run in runs if run is not by_name["speed", "bp"]]
    assert by_name["speed", "rgc"] not in adoptable(told, missing, rows)


def test_a_part_has_the_control_that_it_shares(protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = yaml.safe_load(PROTOCOL)
    told["parts"]["more"] = {**told["parts"]["quality"], "arms": {"bp": {"strategy": None}, "live": {}}, "criteria": []}
    Path(protocol).write_text(yaml.safe_dump(told, sort_keys=False))
    asked: list[str] = []

    def note(ledger: Ledger, runs: list[Run], *others: Any) -> list[str]:
        asked.extend(run.arm for run in runs)
        return []

    monkeypatch.setattr(study_main, "run_missing", note)
    assert main([protocol, "--out", str(tmp_path / "out"), "--parts", "more"]) == 0
    assert asked == ["bp", "live"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nothing"], "a study must be one of blocktrain, bounded-horizon or a YAML file; got 'nothing'"),
        (["bounded-horizon", "--size", "cpu"], "the study needs enwik8; got no files; add --corpus enwik8=FILE"),
        (["bounded-horizon", "--corpus", "wikipedia=x"], "must name files; got 'x' for wikipedia"),
        (["bounded-horizon", "--corpus", "enwik8"], "must be NAME=FILE"),
        (["bounded-horizon", "--parts", "speed", "wit"], "quality, order, snapshot_lag, stages, speed; got 'wit'"),
    ],
)
def test_what_cannot_be_studied_is_refused(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, "--out", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_corpora_take_the_files_that_they_need(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).write_bytes(bytes(100))
    files = ",".join(str(tmp_path / name) for name in ("one", "two", "three"))
    found = corpora_of(["wikitext", "python-docs"], [f"wikitext={files}"], tmp_path)
    assert found["python-docs"].options == {"corpus": "python-docs"}
    assert [Path(path).name for path in found["wikitext"].options.values()] == ["one", "two", "three"]
    with pytest.raises(ProtocolError, match="wikitext must have three files: train, val, test; got 1"):
        corpora_of(["wikitext"], [f"wikitext={tmp_path / 'one'}"], tmp_path)
    with pytest.raises(ProtocolError, match="must name a corpus of the study: wikitext; got enwik8"):
        corpora_of(["wikitext"], [f"enwik8={tmp_path / 'one'}"], tmp_path)


@pytest.mark.parametrize(
    "arm",
    [
        {},
        {"model": {"objective": "denoise"}, "strategy": {}},
        {"model": {"objective": "features", "exits": "own", "lookahead": 1}, "strategy": {"replicas": 2}},
    ],
    ids=["end to end", "denoise", "lookahead"],
)
def test_a_look_along_the_way_changes_no_training(arm: dict[str, Any]) -> None:
    recipe = {"steps": 8, "num_layers": 2, "num_blocks": 2, "width": 8, "num_heads": 1, "window_bytes": 16}
    recipe |= {"batch_size": 2, "sync_every": 2, "warmup_steps": 1, "test_windows": 4, "num_threads": 1}
    corpus = Corpus("python-docs", {"corpus": "python-docs"})
    looks: tuple[dict[str, Any], ...] = ({}, {"curve": {"points": 2, "batches": 1}})
    unseen, seen = (blocks({"recipe": recipe, **arm, **look}, corpus, 1) for look in looks)
    assert seen["exits"] == unseen["exits"]
    assert [tokens for tokens, _, _ in seen["curve"]] == [128, 256]
    (_, first_s, first), (_, last_s, last) = seen["curve"]
    assert last < first < 9.0 and 0 < first_s < last_s


@pytest.mark.slow
def test_workers_are_processes_whose_bytes_are_counted() -> None:
    recipe = {"steps": 8, "num_layers": 2, "num_blocks": 2, "width": 16, "num_heads": 1, "window_bytes": 16}
    recipe |= {"batch_size": 2, "sync_every": 2, "warmup_steps": 1, "test_windows": 4, "num_threads": 1}
    model = {"objective": "features", "exits": "own", "lookahead": 1}
    options = {"recipe": recipe, "model": model, "strategy": {"replicas": 1}}
    corpus = Corpus("python-docs", {"corpus": "python-docs"})
    simulated, apart = (workers({**options, **own}, corpus, 1) for own in ({}, {"latencies_ms": [0, 5]}))
    assert apart["corpus_sha256"] == simulated["corpus_sha256"]
    untrained = workers({**options, "recipe": {**recipe, "lr": 1e-9}}, corpus, 1)["measures"]["ce"]
    learned = untrained - simulated["measures"]["ce"]
    assert learned > 0.1 and untrained - apart["measures"]["ce"] > 0.8 * learned
    sent = simulated["measures"]["sent_bytes"]
    # A worker that is ahead may have sent the update of one round more than the four that there are.
    assert sent <= apart["measures"]["sent_bytes"] <= sent * 5 / 4
    assert apart["measures"]["up_bytes"] > apart["measures"]["sent_bytes"]
    assert apart["measures"]["down_bytes"] > apart["measures"]["sent_bytes"]  # masters come back, and frozen blocks
    assert apart["measures"]["prefix_bytes"] > 0


def test_a_worker_that_fails_ends_the_others() -> None:
    waits, fails, ends = "import signal; signal.pause()", "import sys; sys.exit(3)", "print('hello\\n{\"a\": 1}')"
    with ExitStack() as stack:
        workers = [_start(stack, ["-c", text], {}) for text in (waits, fails, ends)]
        with pytest.raises(RuntimeError, match="worker 1 ended with exit code 3"):
            results_of(workers)
        assert workers[0].returncode == -signal.SIGKILL
    with ExitStack() as stack:
        assert results_of([_start(stack, ["-c", ends], {}) for _ in range(2)]) == [{"a": 1}, {"a": 1}]
