"""What training stages concurrently is worth on this machine: speed, memory and quality beside backpropagation.

``python -m benchmarks.cpu_pipeline [--quick] [--methods ...] [--width D] [--pairs N] [--json FILE]``

Every round runs every arm once, in an order that alternates, and ratios are taken inside a round. ``limit`` is the
summed speed of one one-thread backpropagation process per core, all at the same time: what the machine gives when
nothing waits. A pipeline's speed is what comes out of its final stage. ``bp`` runs at its best
thread count and OpenMP wait policy, both swept first (``--quick`` takes all cores,
``--bp-threads`` a given number).

Speed and memory come from different steps of a run: memory is sampled after the timed ones. Bits per token are those
of the composed model after the run's steps, on held-out text; a run of a few steps says nothing about quality.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from benchmarks.paired import summarise

# Neither torch nor the package is imported here while arms run: what several processes map counts less in each.

METHODS: dict[str, dict[str, Any] | None] = {
    "bp": None,
    "bp_groups": {"method": "bp_groups"},
    "live": {"method": "live"},
    "broadcast_serial": {"method": "broadcast", "mode": "serial"},
    "broadcast": {"method": "broadcast"},
    "rgc_serial": {"method": "rgc", "mode": "serial"},
    "rgc": {"method": "rgc"},
    "broadcast_processes": {"method": "broadcast", "backend": "processes"},
    "rgc_processes": {"method": "rgc", "backend": "processes"},
    "bp_micro2": {"method": "bp", "micro_batches": 2},
    "rgc_micro2": {"method": "rgc", "micro_batches": 2},
    "rgc_depth": {"method": "rgc", "consensus_weights": "depth"},
    "rgc_final": {"method": "rgc", "consensus_weights": "final"},
    "rgc_next": {"method": "rgc", "credit": "next_stage"},
    "rgc_next_auto": {"method": "rgc", "credit": "next_stage", "stage_split": "auto"},
    "rgc_next_processes": {"method": "rgc", "credit": "next_stage", "backend": "processes"},
}
"""Per arm, the options of ``BoundedHorizonStrategy``; None: Lightning's default strategy."""

QUICK = ("bp", "bp_groups", "live", "broadcast", "rgc", "rgc_processes")
USUAL = (*QUICK, "broadcast_serial", "rgc_serial", "bp_micro2", "rgc_micro2")
PAPER = {"rgc": 1.382, "broadcast": 1.369}
"""Ratio to bp at width 256 on 31 cores, as published."""

IDLE_FRAC = 0.02
"""Largest share of the machine that others may use during a run that counts as idle."""


@dataclass(frozen=True)
class Shape:
    """What is trained, and for how long.

    Args:
        num_layers: Layers.
        width: Width.
        num_stages: S.
        window_bytes: Bytes per window.
        batch_size: Windows per step.
        warmup_steps: Steps before the timed ones.
        timed_steps: Timed steps.
        memory_steps: Steps after them, for memory.
        val_batches: Held-out batches.
        corpus: ``ByteDataModule``'s corpus, train and val.
        seed: Seed of weights and data order.
    """

    num_layers: int
    width: int
    num_stages: int
    window_bytes: int
    batch_size: int
    warmup_steps: int
    timed_steps: int
    memory_steps: int
    val_batches: int
    corpus: dict[str, str]
    seed: int

    def arm(self, name: str, threads: int) -> dict[str, Any]:
        """Return the arm called ``name`` as the runner takes it."""
        options = METHODS[name]
        staged = options is not None and options["method"] not in ("bp", "bp_groups")
        fields = {key: value for key, value in vars(self).items() if key != "num_stages"}
        strategy = {**options, "num_stages": self.num_stages} if options is not None and staged else options
        return {"name": name, "strategy": strategy, "threads": threads, **fields}


class Runner:
    """A process that runs arms; a context manager.

    Args:
        wait_policy: ``OMP_WAIT_POLICY`` of all its arms; empty: the library's default.
    """

    def __init__(self, wait_policy: str = "") -> None:
        environment = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS",)}
        if wait_policy:
            environment["OMP_WAIT_POLICY"] = wait_policy
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.pipeline_arms"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )

    def run(self, arms: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run arms at the same time and return their records.

        Raises:
            RuntimeError: If one failed.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        names = ", ".join(arm["name"] for arm in arms)
        print(f"running {names}", file=sys.stderr, flush=True)
        self._process.stdin.write(json.dumps(arms) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        records: list[dict[str, Any]] = json.loads(line) if line else [{"name": names, "error": "its process ended"}]
        for record in records:
            if "error" in record:
                self._errors.seek(0)
                raise RuntimeError(f"arm {record['name']}: {record['error']}\n{self._errors.read()[-2000:]}")
        return records

    def __enter__(self) -> Self:
        """Return the runner."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process, and with it an arm that still runs."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        if kind is not None:
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()


def best_of_bp(shape: Shape, cores: int) -> dict[str, Any]:
    """Sweep thread counts and wait policies of plain backpropagation; return the fastest and all of them."""
    swept = []
    for policy in ("", "passive"):
        with Runner(policy) as runner:
            for threads in sorted({1, cores // 2 or 1, cores}):
                [record] = runner.run([shape.arm("bp", threads)])
                swept.append({"wait_policy": policy, "threads": threads, "tokens_per_s": record["tokens_per_s"]})
    return {**max(swept, key=lambda run: float(run["tokens_per_s"])), "swept": swept}


def limit_record(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the summed speed of processes that ran at the same time."""
    own = sum(record["cpu_frac"] for record in records)
    return {
        "name": "limit",
        "tokens_per_s": sum(record["tokens_per_s"] for record in records),
        "foreign_cpu_frac": max(0.0, max(record["busy_frac"] for record in records) - own),
    }


def measure(shape: Shape, methods: Sequence[str], num_rounds: int, bp: dict[str, Any], cores: int) -> list[list[Any]]:
    """Run every arm once a round, and the limit; return the records of each round."""
    rounds = []
    with Runner() as runner, Runner(bp["wait_policy"]) if bp["wait_policy"] else runner as bp_runner:
        for round_idx in range(num_rounds):
            records = []
            order = [*methods, "limit"]
            for name in order if round_idx % 2 == 0 else order[::-1]:
                if name == "limit":
                    alone = {**shape.arm("bp", 1), "memory_steps": 0, "val_batches": 0}
                    processes = [{**alone, "name": f"limit{idx}"} for idx in range(cores)]
                    records.append(limit_record(runner.run(processes)))
                elif name == "bp":
                    records += bp_runner.run([shape.arm("bp", bp["threads"])])
                else:
                    records += runner.run([shape.arm(name, cores)])
            rounds.append(records)
    return rounds


def summary(rounds: Sequence[Sequence[dict[str, Any]]], shape: Shape, bp_threads: int, cores: int) -> dict[str, Any]:
    """Return per method the medians over the rounds, ratios inside rounds, and the decomposition of the async ones."""
    by_name = {name: [_named(records, name) for records in rounds] for name in [r["name"] for r in rounds[0]]}
    return {
        name: _method_summary(name, records, by_name["bp"], by_name["limit"], shape, bp_threads, cores)
        for name, records in by_name.items()
        if name != "limit"
    }


def _named(records: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(record for record in records if record["name"] == name)


def _method_summary(
    name: str,
    records: Sequence[dict[str, Any]],
    bp: Sequence[dict[str, Any]],
    limit: Sequence[dict[str, Any]],
    shape: Shape,
    bp_threads: int,
    cores: int,
) -> dict[str, Any]:
    from lightning_blocktrain.pipeline.account import decompose  # after the runs, see above

    def median(key: str) -> float | None:
        values = [record[key] for record in records if record[key] is not None]
        return statistics.median(values) if values else None

    options = METHODS[name] or {}
    together = options.get("method") in ("rgc", "broadcast") and options.get("mode") != "serial"
    threads = (
        bp_threads if name == "bp" else shape.num_stages * max(1, cores // shape.num_stages) if together else cores
    )
    pairs = [(mine["tokens_per_s"], other["tokens_per_s"]) for mine, other in zip(records, bp, strict=True)]
    ratio = summarise(pairs)
    result = {
        "tokens_per_s": median("tokens_per_s"),
        "ratio_vs_bp": ratio.ratio,
        "ratio_low": ratio.low if len(pairs) > 1 else None,
        "ratio_high": ratio.high if len(pairs) > 1 else None,
        "threads": threads,
        "ratio_per_thread": ratio.ratio / (threads / bp_threads),
        "fraction_of_limit": statistics.median(
            mine["tokens_per_s"] / most["tokens_per_s"] for mine, most in zip(records, limit, strict=True)
        ),
        "cpu_s_per_step": median("cpu_s_per_step"),
        "peak_pss_mib": median("peak_pss_mib"),
        "pss_ratio_vs_bp": None,
        "bits_per_token": median("bits_per_token"),
        "num_steps": records[0]["num_steps"],
        "idle": all(record["foreign_cpu_frac"] < IDLE_FRAC for record in records),
        "foreign_cpu_frac": max(record["foreign_cpu_frac"] for record in records),
    }
    if result["peak_pss_mib"] is not None:
        result["pss_ratio_vs_bp"] = statistics.median(
            mine["peak_pss_mib"] / other["peak_pss_mib"] for mine, other in zip(records, bp, strict=True)
        )
    if together:
        parts = [
            decompose(other["step_s"], mine["step_s"], mine["work_s"]) for mine, other in zip(records, bp, strict=True)
        ]
        result["work"] = statistics.median(part.work for part in parts)
        result["parallelism"] = statistics.median(part.parallelism for part in parts)
        result["orchestration"] = statistics.median(part.orchestration for part in parts)
        result["closure_error"] = max(record["closure_error"] for record in records)
    return result


COLUMNS = {
    "tokens/s": ("tokens_per_s", "{:,.0f}"),
    "/ bp": ("ratio_vs_bp", "{:.3f}"),
    "per thread": ("ratio_per_thread", "{:.3f}"),
    "/ limit": ("fraction_of_limit", "{:.3f}"),
    "CPU s/step": ("cpu_s_per_step", "{:.3f}"),
    "PSS MiB": ("peak_pss_mib", "{:,.0f}"),
    "PSS / bp": ("pss_ratio_vs_bp", "{:.2f}"),
    "bits/token": ("bits_per_token", "{:.3f}"),
    "W": ("work", "{:.3f}"),
    "P": ("parallelism", "{:.2f}"),
    "eta": ("orchestration", "{:.3f}"),
    "closure": ("closure_error", "{:.4f}"),
}


def print_table(report: dict[str, Any]) -> None:
    """Print the methods, one a row."""
    title = " ".join(f"{key}={report['shape'][key]}" for key in ("num_layers", "width", "num_stages", "batch_size"))
    idle = "idle" if report["idle"] else "NOT idle: do not quote these times"
    table = Table(title=f"{title}, {report['cores']} cores, {report['rounds']} rounds, machine {idle}")
    table.add_column("method")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for name, row in report["methods"].items():
        cells = [form.format(row[key]) if row.get(key) is not None else "-" for key, form in COLUMNS.values()]
        if row["ratio_low"] is not None:
            cells[1] += f" ({row['ratio_low']:.2f}-{row['ratio_high']:.2f})"
        table.add_row(name, *cells)
    Console(width=170).print(table)
    if report["bp"]["swept"]:
        print("bp by threads and wait policy:", report["bp"]["swept"])


def parse(argv: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Return the parser and the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="a small model, one round, no sweep: under 90 s, shows that it runs")
    add("--methods", nargs="+", choices=METHODS, default=None, help="arms beside bp and the limit")
    add("--num-layers", type=int, default=24)
    add("--width", type=int, default=128)
    add("--num-stages", type=int, default=4)
    add("--window-bytes", type=int, default=128)
    add("--batch-size", type=int, default=16)
    add("--pairs", type=int, default=5, help="rounds")
    add("--steps", type=int, default=12, help="timed steps of a run")
    add("--warmup", type=int, default=None, help="steps before them; default: 3 per stage")
    add("--bp-threads", type=int, default=None, help="threads of bp instead of a sweep")
    add("--seed", type=int, default=0, help="of weights and data order")
    add("--corpus", default="python-docs", help="a corpus of ByteDataModule")
    add("--train", default=None, help="training text instead of the corpus")
    add("--val", default=None, help="held-out text, with --train")
    add("--val-batches", type=int, default=8)
    add("--json", type=Path, help="write the report here")
    return parser, parser.parse_args(argv)


def shape_of(args: argparse.Namespace) -> Shape:
    """Return what the options ask to train."""
    corpus = {"train": args.train, "val": args.val} if args.train else {"corpus": args.corpus}
    quick = args.quick
    return Shape(
        num_layers=8 if quick else args.num_layers,
        width=64 if quick else args.width,
        num_stages=4 if quick else args.num_stages,
        window_bytes=args.window_bytes,
        batch_size=8 if quick else args.batch_size,
        warmup_steps=args.warmup or 3 * args.num_stages,
        timed_steps=20 if quick else args.steps,
        memory_steps=12 if quick else 2,
        val_batches=args.val_batches,
        corpus=corpus,
        seed=args.seed,
    )


def command_of(argv: Sequence[str]) -> str:
    """Return the command that repeats the run, without the places of files on this machine."""
    shown = [Path(word).name if "/" in word else word for word in argv]
    return " ".join(["python -m benchmarks.cpu_pipeline", *shown])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the arms, print the table and return the report."""
    parser, args = parse(argv)
    if bool(args.train) != bool(args.val):
        parser.error("--train and --val must be given together; give both, or neither and --corpus")
    if min(args.pairs, args.steps, args.num_stages) < 1 or args.num_layers % args.num_stages:
        parser.error(
            "pairs, steps and num_stages must be at least 1, and num_stages divide num_layers; "
            f"got {args.pairs}, {args.steps}, {args.num_stages}, num_layers={args.num_layers}; use 5, 12, 4 and 24"
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shape = shape_of(args)
    methods = list(dict.fromkeys(["bp", *(args.methods or (QUICK if args.quick else USUAL))]))
    fixed = cores if args.quick and not args.bp_threads else args.bp_threads
    bp = {"wait_policy": "", "threads": fixed, "swept": []} if fixed else best_of_bp(shape, cores)
    rounds = measure(shape, methods, 1 if args.quick else args.pairs, bp, cores)
    by_method = summary(rounds, shape, bp["threads"], cores)
    report = {
        "command": command_of(sys.argv[1:] if argv is None else argv),
        "shape": vars(shape),
        "cores": cores,
        "rounds": len(rounds),
        "idle": all(record["foreign_cpu_frac"] < IDLE_FRAC for records in rounds for record in records),
        "bp": bp,
        "limit_tokens_per_s": statistics.median(_named(records, "limit")["tokens_per_s"] for records in rounds),
        "methods": by_method,
        "paper": PAPER,
        "runs": rounds,
    }
    print_table(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    main()
