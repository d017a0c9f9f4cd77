"""The rows of ``benchmarks.serving``, and how they are shown."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.serving_quality import Quality

REAL = "real text"
TITLES = ("RTT ms", "bytes", "arm", "bytes/s", "/ plain", "total", "traversals", "moved", "bits", "4-grams", "words")


@dataclass(frozen=True)
class Row:
    """One arm at one RTT and length.

    Args:
        arm: A key of ``ARMS``.
        rtt_ms: Of every link.
        length: Bytes of the output.
        timed_bytes: Bytes of an output over which it was timed.
        bytes_per_s: Of one request.
        total_bytes_per_s: Of all requests at the same time.
        traversals_per_byte: Walks through all blocks.
        moved_per_byte: Bytes over all links per byte of output, prompt included.
        quality: Of its outputs of this length.
    """

    arm: str
    rtt_ms: float
    length: int
    timed_bytes: int
    bytes_per_s: float
    total_bytes_per_s: float
    traversals_per_byte: float
    moved_per_byte: float
    quality: Quality


def table_of(rows: Sequence[Row], real: dict[int, Quality]) -> Table:
    """Return the rows, each rate beside that of ``plain`` at the same RTT."""
    plain = {row.rtt_ms: row.bytes_per_s for row in rows if row.arm == "plain"}
    table = Table(title="bytes per second of one request, three hosts")
    for title in TITLES:
        table.add_column(title, justify="left" if title == "arm" else "right")
    for row in rows:
        base = plain.get(row.rtt_ms)
        table.add_row(
            f"{row.rtt_ms:g}",
            f"{row.length}",
            row.arm,
            f"{row.bytes_per_s:.1f}",
            f"{row.bytes_per_s / base:.1f}" if base else "-",
            f"{row.total_bytes_per_s:.1f}",
            f"{row.traversals_per_byte:.3f}",
            f"{row.moved_per_byte:,.0f}",
            *_quality_cells(row.quality),
        )
    for length, quality in real.items():
        table.add_row("-", f"{length}", REAL, "-", "-", "-", "-", "-", *_quality_cells(quality))
    return table


def lines_of(found: dict[str, Any]) -> Iterator[str]:
    """Yield what stands below the table."""
    yield "bits: per byte of the output under the reference model; 4-grams: share of different ones in an output;"
    yield "words: share of whole words that real text has; traversals, moved: walks and bytes over all links, per byte"
    for name, number in found["accepted_per_traversal"].items():
        yield f"{name}: {number:.2f} bytes decided per traversal"
    for tcp in found["overhead"]:
        shape = (
            f"no relay, untrained, width {tcp['width']}, {tcp['num_layers']} layers, {tcp['length']} bytes in one sweep"
        )
        yield f"{shape}: {tcp['a_s']:.3f} s over TCP, {tcp['b_s']:.3f} s in one process"
        interval = "" if math.isnan(tcp["low"]) else f"95 % {tcp['low']:.3f} to {tcp['high']:.3f}, "
        yield f"  ratio {tcp['ratio']:.3f} ({interval}{tcp['num_pairs']} pairs)"
        planned = f"sweep {tcp['planned_over_measured_sweep']:.2f}, plain {tcp['planned_over_measured_plain']:.2f}"
        yield f"  planned / measured time: {planned}"
        weights = f"its block and interface {tcp['block_and_interface_mib']:.1f} MiB"
        yield f"  PSS of a host {tcp['pss_mib']:.0f} MiB, {weights}"


def without_nan(value: Any) -> Any:
    """Return a value as JSON knows it: no number that is none."""
    if isinstance(value, dict):
        return {name: without_nan(own) for name, own in value.items()}
    if isinstance(value, list):
        return [without_nan(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _quality_cells(quality: Quality) -> list[str]:
    return [f"{quality.reference_bits:.2f}", f"{quality.distinct_frac:.2f}", f"{quality.word_frac:.2f}"]
