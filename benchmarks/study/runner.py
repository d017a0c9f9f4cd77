"""Runs what a study lacks, each run in a process of its own that ends with this one.

Owns order, progress and processes; knows nothing of what a run does.
"""

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.pipeline_corpora import Corpus
from benchmarks.study.kinds import KINDS
from benchmarks.study.ledger import Ledger
from benchmarks.study.protocol import Run

Found = Callable[[Run, dict[str, Any]], None]


class RunError(RuntimeError):
    """A run that ended without a result."""


def train_apart(run: Run, corpus: Corpus, processes: set[subprocess.Popen[str]]) -> dict[str, Any]:
    """Do one run in a process of its own and return what it found, with its wall time and machine.

    Args:
        run: The run.
        corpus: Its corpus.
        processes: Those that run now; this one is among them while it does.

    Raises:
        RunError: If it ended without a result.
    """
    told = json.dumps({"run": asdict(run), "corpus": asdict(corpus)})
    environment = os.environ if KINDS[run.kind].is_timed else {**os.environ, "OMP_NUM_THREADS": "1"}
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "errors").open("w+") as errors:
        path = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.study.one_run", str(path)]
        # Its standard input stays open: when this process dies, however it does, the run sees the end and stops.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,  # no pipe: what a run has started may outlive it, and would keep one open
            text=True,
            env=environment,
            start_new_session=True,  # a group of its own: it ends with all that it has started
        )
        processes.add(process)
        try:
            assert process.stdin is not None
            process.stdin.write(told + "\n")
            process.stdin.flush()
            process.wait()
        finally:
            processes.discard(process)
            _end(process)
        if process.returncode or not path.exists():
            errors.seek(0)
            raise RunError(f"{title_of(run)} ended with exit code {process.returncode}:\n{errors.read()[-3000:]}")
        result: dict[str, Any] = json.loads(path.read_text())
    return result | {"wall_s": round(time.perf_counter() - began_s, 1), "machine": machine()}


def _end(process: "subprocess.Popen[str]") -> None:
    with suppress(ProcessLookupError):  # nothing is left of its group
        os.killpg(process.pid, signal.SIGKILL)
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.wait()


def machine() -> dict[str, Any]:
    """Return what a row says of where it was made."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"processor": platform.machine(), "cores": cores, "python": platform.python_version()}


def title_of(run: Run) -> str:
    """Return a run's name for people."""
    return f"{run.part}: {run.arm}, {run.corpus}, seed {run.seed}"


class Progress:
    """Says what has ended and how long the rest will take, from what runs of the same arm or part took.

    Args:
        runs: All that are to run.
        rows: Those that are there already: their seconds count.
        jobs: Runs at the same time.
    """

    def __init__(self, runs: Sequence[Run], rows: Sequence[dict[str, Any]], jobs: int) -> None:
        self._left, self._jobs, self._number, self._done = list(runs), jobs, len(runs), 0
        self._seconds = [(row["part"], row["arm"], row["wall_s"]) for row in rows if "wall_s" in row]

    def ended(self, run: Run, result: dict[str, Any]) -> str:
        """Note that a run has ended and return a line about it."""
        self._left.remove(run)
        self._done += 1
        self._seconds.append((run.part, run.arm, result["wall_s"]))
        measures = result["measures"]
        found = ", ".join(f"{name} {measures[name]:.4g}" for name in list(measures)[:2])
        return f"[{self._done}/{self._number}] {title_of(run)}: {found}; {result['wall_s']:.0f} s{self._rest()}"

    def _rest(self) -> str:
        if not self._left:
            return ""
        seconds = sum(self._expected(run) for run in self._left) / self._jobs
        return f"; about {seconds / 60:.0f} min left" if seconds >= 90 else f"; about {seconds:.0f} s left"

    def _expected(self, run: Run) -> float:
        for alike in ((run.part, run.arm), (run.part,), ()):
            seconds = [float(spent) for *names, spent in self._seconds if tuple(names[: len(alike)]) == alike]
            if seconds:
                return statistics.median(seconds)
        return 0.0


def run_missing(ledger: Ledger, runs: Sequence[Run], corpora: dict[str, Corpus], jobs: int, found: Found) -> list[str]:
    """Run what the ledger lacks and return what went wrong, one text per run that failed.

    Args:
        ledger: Takes the results.
        runs: All runs of the study, in order.
        corpora: By name.
        jobs: Runs at the same time; runs that are timed have the machine for themselves.
        found: Is told of every result.
    """
    missing = [run for run in runs if run not in ledger]
    progress = Progress(missing, ledger.rows(), jobs)
    print(f"{len(runs) - len(missing)} of {len(runs)} runs are there, {len(missing)} to do", flush=True)
    failures: list[str] = []
    processes: set[subprocess.Popen[str]] = set()
    lock = threading.Lock()

    def do(run: Run) -> None:
        try:
            result = train_apart(run, corpora[run.corpus], processes)
        except RunError as error:
            failures.append(str(error))
            print(f"FAILED {error}", file=sys.stderr, flush=True)
            return
        with lock:
            row = ledger.add(run, result)
            print(progress.ended(run, result), flush=True)
            found(run, row)

    timed = [run for run in missing if KINDS[run.kind].is_timed]
    others = [run for run in missing if not KINDS[run.kind].is_timed]
    for group, number in ((others, jobs), (timed, 1)):
        with ThreadPoolExecutor(number) as pool:
            waiting: set[Future[None]] = {pool.submit(do, run) for run in group}
            try:
                while waiting:
                    ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in ended:
                        future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(processes):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
    return failures
