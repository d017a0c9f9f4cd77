"""Run a study: what its protocol fixed before the first run, then a report.

``python -m benchmarks.study NAME --size smoke|cpu|paper --out DIR [--corpus NAME=FILE[,FILE...]]``

A study goes on where it was stopped: what ``DIR`` holds is not run again, and another protocol or corpus is refused.
``--fork OLD`` begins a new study that takes over the runs of another which both ask for; ``--report`` runs nothing.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.study.corpora import corpora_of, sha256_of
from benchmarks.study.kinds import KINDS
from benchmarks.study.ledger import Ledger, rows_of
from benchmarks.study.protocol import SIZES, Protocol, ProtocolError, Run, load, names
from benchmarks.study.render import markdown, page
from benchmarks.study.report import Block, Picture, report
from benchmarks.study.reuse import reused
from benchmarks.study.runner import run_missing
from lightning_blocktrain.demo.curves import write_whole


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("name", help=f"{', '.join(names())}, or a YAML file")
    add("--size", choices=SIZES, default="smoke", help="smoke: minutes; cpu: hours on two cores; paper: as published")
    add("--out", type=Path, required=True, help="folder of the study, continued if it exists")
    add("--corpus", action="append", default=[], help="files of a corpus, NAME=FILE[,FILE...]; once per corpus")
    add("--parts", nargs="+", metavar="PART", help="run what is missing of these now; the others stay as they are")
    add("--jobs", type=int, default=1, help="runs at the same time, a thread each; timed runs are always alone")
    add("--fork", type=Path, help="take over the runs of this study that the new protocol asks for too")
    add(
        "--reuse",
        type=Path,
        nargs="+",
        default=[],
        help="rows of benchmarks.composition or pipeline_target to take over",
    )
    add("--report", action="store_true", help="write the report of what is there; run nothing")
    add("--wandb", metavar="PROJECT", help="log every run and the report to Weights & Biases")
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1; got {args.jobs}; 1 is right beside timed runs")
    return args


def write_report(protocol: Protocol, rows: Sequence[dict[str, Any]], folder: Path, command: str) -> list[Block]:
    """Write ``report.md``, ``report.html`` and ``figures/``; return what they say."""
    blocks = report(protocol, rows, command)
    figures = folder / "figures"
    figures.mkdir(exist_ok=True)
    for block in blocks:
        if isinstance(block, Picture):
            write_whole(figures / f"{block.name}.svg", block.svg)
    write_whole(folder / "report.md", markdown(blocks).encode())
    write_whole(folder / "report.html", page(protocol.title, blocks).encode())
    return blocks


def command_of(args: argparse.Namespace) -> str:
    """Return the command that repeats a study, without the places of files on this machine."""
    corpora = [f" --corpus {text.partition('=')[0]}={_file_names(text)}" for text in args.corpus]
    return f"python -m benchmarks.study {Path(args.name).name} --size {args.size} --out DIR{''.join(corpora)}"


def _file_names(text: str) -> str:
    return ",".join(Path(file).name for file in text.partition("=")[2].split(","))


def study(args: argparse.Namespace, parts: Path) -> int:
    """Run what is missing and write the report; return the exit code."""
    protocol = load(args.name, args.size)
    runs = protocol.runs()
    if strange := set(args.parts or ()) - {part.name for part in protocol.parts}:
        known = ", ".join(part.name for part in protocol.parts)
        raise ProtocolError(f"--parts must name parts of the study: {known}; got {strange.pop()!r}; correct it")
    if args.report:
        rows = [row for row in rows_of(args.out) if row["key"] in {run.key for run in runs}]
        write_report(protocol, rows, args.out, command_of(args))
        return 0
    corpora = corpora_of(protocol.corpora, args.corpus, parts)
    hashes = {name: sha256_of(corpus) for name, corpus in corpora.items()}
    ledger = Ledger(args.out, protocol, hashes)
    if args.fork is not None:
        rows = rows_of(args.fork)
        missing = [run for run in runs if run not in ledger]
        print(f"{ledger.adopt(rows, adoptable(protocol, missing, rows), hashes)} runs taken over from {args.fork}")
    for path in args.reuse:
        taken = [ledger.add(run, row) for run, row in reused([r for r in runs if r not in ledger], path, hashes)]
        print(f"{len(taken)} runs taken over from {path.name}")
    log_run: Callable[[Run, dict[str, Any]], None] = lambda run, row: None  # noqa: E731
    log_report: Callable[[Sequence[Block]], None] = lambda blocks: None  # noqa: E731
    if args.wandb:
        from benchmarks.study.tracking import tracker

        log_run, log_report = tracker(protocol, args.wandb, args.out)
    asked = {run.key for part in protocol.parts if part.name in (args.parts or [part.name]) for run in part.runs()}
    wanted = [run for run in runs if run.key in asked]  # a control that several parts share belongs to each of them
    failures = run_missing(ledger, wanted, corpora, args.jobs, log_run)
    log_report(write_report(protocol, ledger.rows(), args.out, command_of(args)))
    print(f"{args.out / 'report.md'}, {args.out / 'report.html'}")
    return 1 if failures else 0


def adoptable(protocol: Protocol, missing: Sequence[Run], rows: Sequence[dict[str, Any]]) -> list[Run]:
    """Return the runs that may come from another study: timed ones in whole rounds, whose arms ran side by side."""
    free = {run.key for run in missing} & {row["key"] for row in rows}
    torn: set[str] = set()
    for part in protocol.parts:
        if KINDS[part.kind].is_timed:
            rounds: dict[tuple[str, int], set[str]] = {}
            for run in part.runs():
                rounds.setdefault((run.corpus, run.seed), set()).add(run.key)
            torn.update(*(keys for keys in rounds.values() if not keys <= free))
    return [run for run in missing if run.key in free - torn]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study from the command line and return the exit code."""
    args = parse(argv)
    try:
        with tempfile.TemporaryDirectory() as parts:
            return study(args, Path(parts))
    except ProtocolError as error:
        print(f"benchmarks.study: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("benchmarks.study: stopped; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
