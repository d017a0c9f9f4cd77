"""The pictures of a study's report, as SVG: one function a picture, in ``FIGURES``; None where the rows hold nothing.

Owns how things look; every number comes from the rows.
"""

import io
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.study.judge import Row, by_seed, compare
from benchmarks.study.protocol import Part

Picture = bytes | None


def curve_tokens(rows: Sequence[Row], part: Part) -> Picture:
    """Draw what is held out over the tokens of training, the mean of the seeds."""
    return _curves(rows, part, 0, "tokens")


def curve_time(rows: Sequence[Row], part: Part) -> Picture:
    """Draw the same over the seconds of computing on one core."""
    return _curves(rows, part, 1, "CPU seconds on one thread")


def gap_tokens(rows: Sequence[Row], part: Part) -> Picture:
    """Draw the gap to the control, in per cent, over the tokens: short budgets may favour a method."""

    def draw(axes: Any, corpus: str) -> bool:
        control = dict(_points(rows, part, part.control, corpus, 0))
        for idx, arm in enumerate(part.arms):
            points = [(t, v) for t, v in _points(rows, part, arm, corpus, 0) if t in control]
            if arm != part.control and len(points) > 1:
                gaps = [100 * (value - control[tokens]) / control[tokens] for tokens, value in points]
                axes.plot([tokens for tokens, _ in points], gaps, marker="o", ms=3, color=f"C{idx}", label=arm)
        axes.axhline(0, color="0.5", lw=0.8)
        return _label(axes, corpus, "tokens", f"gap to {part.control}, %")

    return _panels(part, draw)


def gaps(rows: Sequence[Row], part: Part) -> Picture:
    """Draw the gap of every pair of arms with its 95 % interval."""

    def draw(axes: Any, corpus: str) -> bool:
        found = [one for pair in part.pairs() if (one := compare(rows, part, pair, corpus))]
        for idx, one in enumerate(found):
            gap = one.gap
            axes.plot(one.gaps, [idx] * len(one.gaps), "|", color="0.6")
            if len(one.gaps) > 1:
                axes.plot([gap.low, gap.high], [idx, idx], color=f"C{idx}")
            axes.plot(gap.mean, idx, "o", color=f"C{idx}")
        axes.set_yticks(range(len(found)), [f"{one.arm} - {one.control}" for one in found])
        axes.invert_yaxis()
        axes.axvline(0, color="0.5", lw=0.8)
        axes.set_xlabel("gap, % (bars: 95 % t-interval; ticks: pairs)")
        axes.set_title(corpus)
        return bool(found)

    return _panels(part, draw)


def exits(rows: Sequence[Row], part: Part) -> Picture:
    """Draw the nats per byte at every exit: whether each block adds to those before it."""

    def draw(axes: Any, corpus: str) -> bool:
        for idx, arm in enumerate(part.arms):
            keys = {run.key for run in part.runs() if (run.arm, run.corpus) == (arm, corpus)}
            found = [row["exits"] for row in rows if row["key"] in keys and "exits" in row]
            if found:
                means = [statistics.mean(values) for values in zip(*found, strict=True)]
                axes.plot(range(1, len(means) + 1), means, marker="o", ms=4, color=f"C{idx}", label=arm)
        return _label(axes, corpus, "blocks before the exit", "nats per byte")

    return _panels(part, draw)


def frontier(rows: Sequence[Row], part: Part) -> Picture:
    """Draw speed beside memory, both as ratios to the control, paired."""

    def draw(axes: Any, corpus: str) -> bool:
        for idx, arm in enumerate(part.arms):
            speed = compare(rows, part, (arm, part.control), corpus, "tokens_per_s")
            memory = compare(rows, part, (arm, part.control), corpus, "peak_pss_mib")
            if speed and memory:
                axes.plot(memory.ratio.mean, speed.ratio.mean, "o", color=f"C{idx}", label=arm)
        axes.axhline(1, color="0.5", lw=0.8)
        axes.axvline(1, color="0.5", lw=0.8)
        return _label(axes, corpus, f"peak PSS / that of {part.control}", f"tokens per second / that of {part.control}")

    return _panels(part, draw)


def participation(rows: Sequence[Row], part: Part) -> Picture:
    """Draw the measure over the share of updates that came in time."""
    return _scatter(rows, part, "participation", "share of updates in time", log=False)


def traffic(rows: Sequence[Row], part: Part) -> Picture:
    """Draw the measure over the bytes that workers sent."""
    return _scatter(rows, part, "sent_bytes", "bytes sent by all workers", log=True)


def _scatter(rows: Sequence[Row], part: Part, metric: str, label: str, log: bool) -> Picture:
    def draw(axes: Any, corpus: str) -> bool:
        for idx, arm in enumerate(part.arms):
            across = by_seed(rows, part, arm, corpus, metric)
            values = by_seed(rows, part, arm, corpus)
            seeds = across.keys() & values.keys()
            if seeds:
                axes.plot([across[s] for s in seeds], [values[s] for s in seeds], "o", color=f"C{idx}", label=arm)
        if log:
            axes.set_xscale("log")
        return _label(axes, corpus, label, part.metric)

    return _panels(part, draw)


def _curves(rows: Sequence[Row], part: Part, column: int, label: str) -> Picture:
    def draw(axes: Any, corpus: str) -> bool:
        for idx, arm in enumerate(part.arms):
            points = list(_points(rows, part, arm, corpus, column))
            if len(points) > 1:
                axes.plot(*zip(*points, strict=True), marker="o", ms=3, color=f"C{idx}", label=arm)
        return _label(axes, corpus, label, "bits per token, held out")

    return _panels(part, draw)


def _points(rows: Sequence[Row], part: Part, arm: str, corpus: str, column: int) -> Iterator[tuple[float, float]]:
    """Yield the points of an arm's curve, means over its seeds."""
    keys = {run.key for run in part.runs() if (run.arm, run.corpus) == (arm, corpus)}
    curves = [row["curve"] for row in rows if row["key"] in keys]
    for points in zip(*curves, strict=False):
        yield statistics.mean(p[column] for p in points), statistics.mean(p[2] for p in points)


def _label(axes: Any, title: str, x: str, y: str) -> bool:
    """Name a panel's axes; return whether an arm was drawn in it."""
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    drawn = bool(axes.get_legend_handles_labels()[0])
    if drawn:
        axes.legend(fontsize=8)
    return drawn


def _panels(part: Part, draw: Callable[[Any, str], bool]) -> Picture:
    """Return one panel a corpus, below one another; None if all are empty."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6 * len(part.corpora)), layout="constrained")
    panels = figure.subplots(len(part.corpora), squeeze=False)
    drawn = [draw(axes, corpus) for axes, corpus in zip(panels[:, 0], part.corpora, strict=True)]
    if not any(drawn):
        return None
    image = io.BytesIO()
    # The same rows make the same bytes: no date, no random names.
    with matplotlib.rc_context({"svg.hashsalt": part.name, "svg.fonttype": "none"}):
        figure.savefig(image, format="svg", metadata={"Date": None})
    return image.getvalue()


FIGURES: dict[str, tuple[str, Callable[[Sequence[Row], Part], Picture]]] = {
    "curve_tokens": ("Held-out bits per token over tokens", curve_tokens),
    "curve_time": ("Held-out bits per token over computing time", curve_time),
    "gap_tokens": ("Gap to the control over tokens", gap_tokens),
    "gaps": ("Gaps with their intervals", gaps),
    "exits": ("Block by block", exits),
    "frontier": ("Speed beside memory", frontier),
    "participation": ("Quality over participation", participation),
    "traffic": ("Quality over traffic", traffic),
}
"""Per name: a caption, and what draws it."""
