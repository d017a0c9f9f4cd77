"""The README's tables of results, drawn from ``benchmarks/results``.

``python -m benchmarks.readme`` writes them anew between ``<!-- table: NAME -->`` and ``<!-- end -->``; ``--check``
changes nothing and fails if one differs.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.composition_table import MAIN_COLUMNS, main_cells, markdown_table
from benchmarks.pipeline_target import FIRST_SEED, MARGIN, PILOT_SEEDS, gap
from benchmarks.study.judge import by_seed, compare, interval_text
from benchmarks.study.ledger import rows_of
from benchmarks.study.protocol import Protocol, load
from benchmarks.study.report import decomposition
from benchmarks.study.statistics import pairs_needed, t_interval, upper_bound
from lightning_blocktrain.demo.curves import write_whole

README = Path(__file__).parents[1] / "README.md"
RESULTS = Path(__file__).parent / "results"
STUDIES = RESULTS / "studies"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n)(?:(?!<!-- table).)*?(<!-- end -->)", re.DOTALL)


def composition() -> str:
    """Return the arms of ``benchmarks.composition`` beside their controls."""
    rows = [json.loads(line) for line in (RESULTS / "composition.jsonl").read_text().splitlines()]
    names = {row["arm"] for row in rows}
    order = [*(name for name in COMPOSITION if name in names), *sorted(names - set(COMPOSITION))]
    return markdown_table(MAIN_COLUMNS, [main_cells(rows, name) for name in order])


COMPOSITION = (
    *("causal_full", "causal_block", "ahead", "ahead rounds of 2", "ahead no average", "ahead shared"),
    *("ahead@flops", "ahead rounds of 2@flops", "ahead int8", "ahead every 4", "ahead every 16"),
    *("ahead 2 replicas", "ahead mild", "ahead wan", "ahead wan late"),
    *("features own", "residual own", "denoise_features", "denoise"),
)
"""Arms in the README's order; others follow by name."""


def serving() -> str:
    """Return the arms of ``benchmarks.serving`` at outputs of 128 bytes, or 64 where every byte takes a traversal."""
    found = json.loads((RESULTS / "serving.json").read_text())
    columns = ("arm", "bytes/s at RTT 0", "RTT 50 ms", "/ plain", "RTT 150 ms", "traversals per byte", "moved per byte")
    by_arm: dict[str, dict[float, dict[str, Any]]] = {}
    for row in sorted(found["rows"], key=lambda row: row["length"] == 128):
        if row["length"] <= 128 and "step by step" not in row["arm"]:
            by_arm.setdefault(row["arm"], {})[row["rtt_ms"]] = row
    plain = by_arm["plain"][50.0]["bytes_per_s"]
    body = []
    for arm, rows in by_arm.items():
        rates = [_rate(rows[rtt_ms]) for rtt_ms in (0.0, 50.0, 150.0)]
        ratio = f"{rows[50.0]['bytes_per_s'] / plain:.1f}"
        moved = [f"{rows[50.0]['traversals_per_byte']:.3f}", f"{rows[50.0]['moved_per_byte']:,.0f}"]
        body.append([arm, *rates[:2], ratio, rates[2], *moved, *_quality(rows[50.0]["quality"])])
    body.append(["real text", *[""] * 6, *_quality(found["real"]["128"])])
    return markdown_table((*columns, "bits", "4-grams", "words"), body)


def _rate(row: dict[str, Any]) -> str:
    one, all_of_them = row["bytes_per_s"], row["total_bytes_per_s"]
    return f"{one:,.1f}" + (f", {all_of_them:,.1f} in all" if row["arm"] == "batched" else "")


def _quality(quality: dict[str, float]) -> list[str]:
    return [f"{quality[name]:.2f}" for name in ("reference_bits", "distinct_frac", "word_frac")]


def rgc() -> str:
    """Return what the pairs of ``benchmarks.pipeline_target`` say so far, on test."""
    rows = [json.loads(line) for line in (RESULTS / "pipeline_target.jsonl").read_text().splitlines()]
    columns = (
        "corpus",
        "pairs on test",
        "needed",
        "bp, bits",
        "rgc (final), bits",
        "gap, % (95 %)",
        "upper bound, %",
        "verdict",
    )
    return markdown_table(columns, [_verdict(rows, corpus) for corpus in dict.fromkeys(row["corpus"] for row in rows)])


def _verdict(rows: list[dict[str, Any]], corpus: str) -> list[str]:
    long = [row for row in rows if row["corpus"] == corpus and row["tokens"] == TOKENS]
    by_method = {name: {row["seed"]: row for row in long if row["method"] == name} for name in ("bp", METHOD)}
    bp, ours = by_method["bp"], by_method[METHOD]
    pilot = [gap(ours[seed]["valid"], bp[seed]["valid"]) for seed in PILOT_SEEDS]
    needed = pairs_needed(statistics.stdev(pilot), MARGIN)
    seeds = [seed for seed in sorted(bp.keys() & ours.keys()) if seed >= FIRST_SEED]
    if len(seeds) < 2:
        return [corpus, f"{len(seeds)}", f"{needed}", *["-"] * 4, "not settled: too few pairs"]
    gaps = [gap(ours[seed]["test"], bp[seed]["test"]) for seed in seeds]
    bits = [f"{statistics.mean(runs[seed]['test'] for seed in seeds):.4f}" for runs in (bp, ours)]
    high, mean = upper_bound(gaps), t_interval(gaps)
    shown = "non-inferior" if high <= MARGIN else "non-inferiority not shown"
    verdict = shown if len(seeds) >= needed else f"underpowered; {shown} so far"
    interval = f"{mean.mean:+.2f} ({mean.low:+.2f} to {mean.high:+.2f})"
    return [corpus, f"{len(seeds)}", f"{needed}", *bits, interval, f"{high:+.2f}", verdict]


TOKENS, METHOD = 1_048_576, "rgc_final"
"""Of the runs that the verdict is about."""


def speeds() -> str:
    """Return the methods of the study ``bounded-horizon`` beside backpropagation in speed and memory."""
    protocol, rows = study("bounded-horizon")
    [part] = [part for part in protocol.parts if part.name == "speed"]
    [corpus] = part.corpora
    columns = ("method", "tokens/s", "/ bp (95 %)", "/ limit (95 %)", "PSS / bp", "W, P, eta", "the paper's")
    body = []
    for arm in part.arms:
        found = [compare(rows, part, (arm, other), corpus) for other in (part.control, "limit")]
        ratios = ["-" if one is None or arm == one.control else interval_text(one.ratio, ".3f") for one in found]
        memory = compare(rows, part, (arm, part.control), corpus, "peak_pss_mib")
        parts = ", ".join(decomposition(part, rows, arm, corpus))
        cells = [f"{statistics.mean(by_seed(rows, part, arm, corpus).values()):,.0f}", *ratios]
        cells += [f"{memory.ratio.mean:.2f}" if memory else "-", parts if "-" not in parts else "-"]
        body.append([arm, *cells, part.published.get(arm, "-")])
    return markdown_table(columns, body)


def study(name: str) -> tuple[Protocol, list[dict[str, Any]]]:
    """Return the ``cpu`` size of a study, and its rows."""
    return load(name, "cpu"), rows_of(STUDIES / name)


TABLES: dict[str, Callable[[], str]] = {"composition": composition, "serving": serving, "rgc": rgc, "speed": speeds}
"""Per name, what draws the table."""


def drawn(text: str) -> str:
    """Return a text with its marked tables drawn anew.

    Raises:
        KeyError: If a mark names no table.
    """
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables, or check them; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table differs")
    args = parser.parse_args(argv)
    there = README.read_text(encoding="utf-8")
    fresh = drawn(there)
    if args.check and fresh != there:
        print("README.md differs from benchmarks/results: run python -m benchmarks.readme", file=sys.stderr)
        return 1
    if fresh != there:
        write_whole(README, fresh.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
