"""The report of a study, from its protocol and rows alone: what is said, in order, before it is rendered.

Owns the sentences and tables; ``render`` turns them into Markdown and HTML, ``figures`` draws.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.study.figures import FIGURES
from benchmarks.study.judge import Comparison, Row, by_seed, compare, interval_text, summary, verdicts
from benchmarks.study.protocol import Part, Protocol
from benchmarks.study.statistics import t_interval


@dataclass(frozen=True)
class Heading:
    """A heading of level 1 to 3."""

    level: int
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph; ``is_strong`` for what must not be overlooked."""

    text: str
    is_strong: bool = False


@dataclass(frozen=True)
class Items:
    """A list of sentences."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Cells by row; the first column is text, the others are numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Picture:
    """A figure: the name of its file without suffix, and the SVG."""

    name: str
    caption: str
    svg: bytes


@dataclass(frozen=True)
class Folded:
    """Text as it is, folded away behind a title."""

    title: str
    text: str


Block = Heading | Text | Items | Table | Picture | Folded


def report(protocol: Protocol, rows: Sequence[Row], command: str) -> list[Block]:
    """Return the report.

    Args:
        protocol: Of the study.
        rows: Its finished runs, those of other protocols left out by their keys.
        command: What repeats it.
    """
    found = list(verdicts(rows, protocol))
    blocks: list[Block] = [
        Heading(1, f"{protocol.title} ({protocol.size})"),
        Text(summary(found), is_strong=True),
    ]
    missing = [run for run in protocol.runs() if run.key not in {row["key"] for row in rows}]
    if missing:
        blocks.append(Text(f"{len(missing)} of {len(protocol.runs())} runs are missing.", is_strong=True))
    order = {"not met": 0, "not shown": 1, "not run": 2, "met": 3}
    ordered = sorted(found, key=lambda one: order[one[1].found])
    if ordered:
        blocks.append(Items(tuple(f"{part.title}: {verdict.text}" for part, verdict in ordered)))
    blocks += [Text(protocol.question), Text(f"Published figures: {protocol.source}")]
    for part in protocol.parts:
        blocks += _part(part, rows)
    blocks += [Heading(2, "Limits"), Items(protocol.limits)] if protocol.limits else []
    blocks += [Heading(2, "How it was made"), *_making(protocol, rows, command)]
    return blocks


def _part(part: Part, rows: Sequence[Row]) -> Iterator[Block]:
    yield Heading(2, part.title)
    if part.note:
        yield Text(part.note)
    seeds = f"{len(part.seeds)} seed{'s' * (len(part.seeds) != 1)}"
    exploratory = "" if len(part.seeds) > 1 else "; exploratory: a single seed shows no spread"
    yield Text(f"Measure: {part.metric}; control: {part.control}; {seeds}, paired{exploratory}.")
    for corpus in part.corpora:
        if len(part.corpora) > 1:
            yield Heading(3, corpus)
        yield arm_table(part, rows, corpus)
        if contrasts := contrast_table(part, rows, corpus):
            yield contrasts
    for name in part.show:
        caption, draw = FIGURES[name]
        if svg := draw(rows, part):
            yield Picture(f"{part.name}_{name}", f"{part.title}: {caption.lower()}", svg)


def arm_table(part: Part, rows: Sequence[Row], corpus: str) -> Table:
    """Return every arm of a part on a corpus: its measure, beside its control's, and whatever else its runs told."""
    extra = [name for name in MEASURES if name != part.metric and _has(part, rows, corpus, name)]
    columns, cells_of = COMPARED[part.compare]
    body = []
    for arm in part.arms:
        values = by_seed(rows, part, arm, corpus)
        own = compare(rows, part, (arm, part.control), corpus) if arm != part.control else None
        cells = [arm, f"{len(values)}", _mean(list(values.values())), *cells_of(own)]
        if part.compare == "ratio":
            cells += decomposition(part, rows, arm, corpus)
        cells += [MEASURES[name][1](list(by_seed(rows, part, arm, corpus, name).values())) for name in extra]
        body.append((*cells, *([part.published.get(arm, "-")] if part.published else [])))
    titles = [text.format(control=part.control) for text in columns]
    titles += ["W", "P", "eta"] if part.compare == "ratio" else []
    titles += [MEASURES[name][0] for name in extra]
    return Table(("arm", "seeds", part.metric, *titles, *(["published"] if part.published else [])), tuple(body))


def decomposition(part: Part, rows: Sequence[Row], arm: str, corpus: str) -> list[str]:
    """Return what a pipeline's speed-up is made of: work saved, parallelism, orchestration.

    Geometric means over rounds, as the ratios of speeds are: they multiply to these.
    """
    step, work, largest = (by_seed(rows, part, arm, corpus, name) for name in ("step_s", "work_s", "largest_work_s"))
    control = by_seed(rows, part, part.control, corpus, "step_s")
    seeds = sorted(step.keys() & work.keys() & control.keys())
    if not seeds:
        return ["-"] * 3
    parts = [(control[s] / work[s], work[s] / largest[s], largest[s] / step[s]) for s in seeds]
    return [f"{statistics.geometric_mean(values):.3f}" for values in zip(*parts, strict=True)]


def contrast_table(part: Part, rows: Sequence[Row], corpus: str) -> Table | None:
    """Return the pairs beside the control that the protocol names; None if there are none."""
    body = []
    columns, cells_of = COMPARED[part.compare]
    for pair in part.contrasts:
        found = compare(rows, part, pair, corpus)
        shown = " / " if part.compare == "ratio" else " - "
        body.append((shown.join(pair), f"{len(found.values) if found else 0}", *cells_of(found)))
    titles = ("contrast", "pairs", *("difference" if "minus" in text else text for text in columns))
    return Table(tuple("ratio" if "{control}" in text else text for text in titles), tuple(body)) if body else None


def _gap_cells(found: Comparison | None) -> list[str]:
    if found is None:
        return ["-", "-", "-"]
    return [
        interval_text(found.difference, "+.4g"),
        interval_text(found.gap, "+.2f"),
        interval_text(found.gap_bootstrap, "+.2f"),
    ]


def _ratio_cells(found: Comparison | None) -> list[str]:
    return ["-" if found is None else interval_text(found.ratio, ".3f")]


COMPARED: dict[str, tuple[tuple[str, ...], Callable[[Comparison | None], list[str]]]] = {
    "difference": (("minus {control}", "%, 95 % t", "%, bootstrap"), _gap_cells),
    "ratio": (("/ {control}, 95 % t",), _ratio_cells),
}
"""Per way to compare: the titles of its columns, and what fills them."""


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "-"
    found = t_interval(values)
    if math.isnan(found.low):
        return f"{found.mean:.4g}"
    return f"{found.mean:.4g} +- {found.high - found.mean:.2g}"


def _plain(form: str, factor: float = 1.0) -> Any:
    return lambda values: format(statistics.mean(values) * factor, form) if values else "-"


MEASURES: dict[str, tuple[str, Any]] = {
    "bits": ("bits per token", _plain(".4f")),
    "prior_ce_k": ("block 0 alone", _plain(".3f")),
    "sweep_ce_k1": ("sweep, K=1", _plain(".3f")),
    "sweep_ce_k": ("sweep, K=16", _plain(".3f")),
    "composition_gain": ("composition gain", _plain("+.3f")),
    "leak_accuracy": ("leak", _plain(".3f")),
    "participation": ("in time", _plain(".0%")),
    "accepted_tokens": ("tokens merged", _plain(",.0f")),
    "sent_bytes": ("MB of updates", _plain(",.2f", 1e-6)),
    "prefix_bytes": ("MB of frozen blocks", _plain(",.2f", 1e-6)),
    "up_bytes": ("MB up the lines", _plain(",.2f", 1e-6)),
    "down_bytes": ("MB down", _plain(",.2f", 1e-6)),
    "flops": ("TFLOPs of training", _plain(".3g", 1e-12)),
    "peak_pss_mib": ("peak PSS, MiB", _plain(",.0f")),
    "closure_error": ("closure", _plain(".4f")),
    "foreign_cpu_frac": ("used by others", _plain(".1%")),
    "seconds": ("seconds", _plain(",.1f")),
}
"""Measures that a table shows beside the metric where a part's runs have them: title, and how they are written."""


def _has(part: Part, rows: Sequence[Row], corpus: str, name: str) -> bool:
    return any(by_seed(rows, part, arm, corpus, name) for arm in part.arms)


def _making(protocol: Protocol, rows: Sequence[Row], command: str) -> Iterator[Block]:
    machines = sorted({json.dumps(row["machine"], sort_keys=True) for row in rows if "machine" in row})
    hashes = sorted({(row["corpus"], row["corpus_sha256"][:12]) for row in rows})
    yield Items(
        (
            f"Command: {command}",
            f"Taken over from results that were there: {_taken_over(rows)}",
            f"Protocol {protocol.digest}, fixed before the first run; every row carries it.",
            f"Machine: {'; '.join(machines) or 'none yet'}",
            f"Corpora (SHA-256): {', '.join(' '.join(pair) for pair in hashes) or 'none yet'}",
            "Gaps are 100 (arm - control) / control per pair of one seed, which shares first weights and data order.",
            "Intervals are two-sided 95 % t-intervals over pairs; those of the bootstrap are too narrow for few pairs.",
        )
    )
    yield Folded("The protocol", json.dumps(_plain_protocol(protocol), indent=1))


def _taken_over(rows: Sequence[Row]) -> str:
    files = Counter(row["from"] for row in rows if "from" in row)
    return ", ".join(f"{number} runs from {file}" for file, number in sorted(files.items())) or "none"


def _plain_protocol(protocol: Protocol) -> dict[str, Any]:
    return {
        part.name: {
            "kind": part.kind,
            "arms": part.arms,
            "options": part.options,
            "corpora": part.corpora,
            "seeds": part.seeds,
            "criteria": [vars(criterion) for criterion in part.criteria],
        }
        for part in protocol.parts
    }
