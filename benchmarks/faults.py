"""What a run of processes survives: kills, tears, delays and partitions, each at a worker and round or at a byte.

``python -m benchmarks.faults [--quick] [--only NAME ...] [--repeats N] [--json FILE]``

A real coordinator and real workers over HTTP, B=3 blocks, each scenario a run of its own, on one warm fleet: processes
are forked from one that has imported everything. The model is tiny and its steps are made to last (see
``fault_plan.Shape``): times here say what the protocol waits for, not how fast anything computes. The undisturbed run
that the weights are compared with is trained in lockstep by the simulator, in one process.

Prints a table and writes one record per run. The exit code is 1 if an expectation is not met.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fault_plan import Shape
from benchmarks.fault_records import Record, compare, failed_record, median_round_s, record_of
from benchmarks.fault_scenarios import ALL, Scenario
from benchmarks.fault_stage import Stage, StageError, simulated
from benchmarks.warm_fleet import warm_up

# Neither torch nor the package is imported here: this process starts at once, while the fork server imports them.

WARM = ("benchmarks.fault_roles", "benchmarks.fault_records")
"""What the fork server imports."""
QUIET_LOAD = 1.0
"""Load average per core before a run up to which its times are judged."""
BY_NAME = {scenario.name: scenario for scenario in ALL}


class Harness:
    """Runs scenarios and remembers what later ones are compared with.

    Args:
        judges_times: Whether what lasts too long is an expectation that is not met, where the machine is quiet enough
            to tell. The times are recorded in any case.
    """

    def __init__(self, judges_times: bool = False) -> None:
        self._judges_times = judges_times
        self.records: list[Record] = []
        self._references: dict[Any, dict[str, str]] = {}
        self._baselines: dict[str, dict[str, float]] = {}

    def run(self, scenario: Scenario, repeat_idx: int = 0) -> Record:
        """Run a scenario and return its record, after what it is compared with. Whatever goes wrong is a record too."""
        self._run_before(scenario, repeat_idx)
        began_at, load = time.monotonic(), os.getloadavg()[0] / num_cores()
        print(f"{scenario.name} ...", end=" ", file=sys.stderr, flush=True)
        try:
            record = self._record(scenario, self._judges_times and load <= QUIET_LOAD)
            record = compare(record, self.records, scenario.same_as)
        except Exception as exc:
            known = isinstance(exc, StageError)
            record = failed_record(scenario, str(exc) if known else traceback.format_exc(limit=-4))
            self._baselines.setdefault(scenario.name, {})  # not tried again for every scenario
        record |= {"repeat_idx": repeat_idx, "wall_s": time.monotonic() - began_at, "load_per_core": load}
        self.records.append(record)
        outcome = "as expected" if record["met"] else "; ".join(record["unmet"])
        print(f"{outcome} ({record['wall_s']:.1f} s)", file=sys.stderr, flush=True)
        return record

    def _run_before(self, scenario: Scenario, repeat_idx: int) -> None:
        """Run what a scenario is compared with if it has not been; where times are, beside every repeat."""
        is_paired = scenario.expected.max_ratio is not None
        if scenario.baseline != scenario.name and (is_paired or scenario.baseline not in self._baselines):
            self.run(BY_NAME[scenario.baseline], repeat_idx if is_paired else 0)
        if scenario.same_as is not None and all(record["name"] != scenario.same_as for record in self.records):
            self.run(BY_NAME[scenario.same_as])

    def _record(self, scenario: Scenario, judges_times: bool) -> Record:
        reference = self._reference(scenario.shape)
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            with Stage(scenario.shape, Path(folder)) as stage:
                scenario.script(stage)
            left = sorted(path.name for path in stage.spool_dir.iterdir())
        if scenario.baseline == scenario.name:
            self._baselines[scenario.name] = median_round_s(stage.story)
        record = record_of(scenario, stage.story, reference, self._baseline(scenario), judges_times)
        if left:
            record |= {"met": False, "unmet": [*record["unmet"], f"temporary files are left: {left}"]}
        return record

    def _reference(self, shape: Shape) -> dict[str, str]:
        key = (shape.num_blocks, shape.replicas, shape.num_rounds, shape.sync_every, shape.width)
        if key not in self._references:
            self._references[key] = simulated(shape)
        return self._references[key]

    def _baseline(self, scenario: Scenario) -> dict[str, float] | None:
        steps = (scenario.shape.step_s, scenario.shape.width)
        of = BY_NAME[scenario.baseline].shape
        return self._baselines.get(scenario.baseline) if steps == (of.step_s, of.width) else None


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


COLUMNS = {
    "survived": ("survived", "{}"),
    "rounds": ("rounds", "{}"),
    "rounds\nlost": ("rounds_lost", "{}"),
    "updates\nlost": ("updates_lost", "{}"),
    "recovery\ns": ("recovery_s", "{:.2f}"),
    "affected\nround s": ("affected_round_s", "{:.2f}"),
    "median\nround s": ("median_round_s", "{:.3f}"),
    "worst\nother": ("worst_other_ratio", "{:.2f}"),
    "weights\nequal": ("weights_equal", "{}"),
    "replicas\nequal": ("replicas_bit_identical", "{}"),
    "as\nexpected": ("met", "{}"),
}


def print_table(records: Sequence[Record]) -> None:
    """Print the records, one a row."""
    from rich.console import Console  # here, for every process that is forked reads this file once more
    from rich.table import Table

    noisy = sum(record["load_per_core"] > QUIET_LOAD for record in records)
    title = f"{sum(record['met'] for record in records)} of {len(records)} runs as expected"
    table = Table(title=title + (f"; {noisy} on a busy machine: do not quote their times" if noisy else ""))
    table.add_column("scenario")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for record in records:
        cells = [form.format(record[key]) if record[key] is not None else "-" for key, form in COLUMNS.values()]
        cells[8] += "" if record["expected_equal"] is record["weights_equal"] else " (!)"
        table.add_row(record["name"], *cells)
    Console(width=150).print(table)


def chosen(quick: bool, only: Sequence[str] | None) -> list[Scenario]:
    """Return the scenarios to run, in order."""
    if only:
        return [scenario for scenario in ALL if scenario.name in only]
    return [scenario for scenario in ALL if scenario.is_quick or not quick]


def names_in(text: str) -> list[str]:
    """Return the names of scenarios that ``text`` lists, separated by commas.

    Raises:
        argparse.ArgumentTypeError: If there is no such scenario.
    """
    names = [name for name in text.split(",") if name]
    unknown = sorted(set(names) - BY_NAME.keys())
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"no such scenario: {unknown or text!r}; choose from {', '.join(BY_NAME)}")
    return names


def run(argv: Sequence[str] | None = None) -> list[Record]:
    """Run the scenarios, print the table and return the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out what takes long, and judge no times")
    parser.add_argument("--only", nargs="+", type=names_in, help="names of scenarios, separated by commas or spaces")
    parser.add_argument("--repeats", type=int, default=1, help="runs of every scenario")
    parser.add_argument("--json", type=Path, help="write the records here, anew after every run")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1; got {args.repeats}; leave it out for 1")
    only = [name for names in args.only or [] for name in names]
    warm_up(WARM)
    harness = Harness(judges_times=not args.quick)
    for scenario in chosen(args.quick, only):
        for repeat_idx in range(args.repeats):
            harness.run(scenario, repeat_idx)
            if args.json:
                args.json.write_text(json.dumps(harness.records, indent=1))
    print_table(harness.records)
    return harness.records


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scenarios and return the exit code."""
    return int(not all(record["met"] for record in run(argv)))


if __name__ == "__main__":
    sys.exit(main())
