"""What the rows of ``composition`` say: gaps to the controls, gains over a block's own depth, and whether targets hold.

Owns statistics and tables. Nothing is judged by hand: every sentence is computed from the rows.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table
from scipy.stats import bootstrap

from benchmarks.paired import half_width
from lightning_blocktrain.demo.recipe import Recipe
from lightning_blocktrain.metrics import bits_per_token

COUNTS = 0.08
"""Nats by which L layers must beat ``L_b`` layers, end to end, for a size to count."""
NEAR, SHARE = 0.02, 0.6
"""Targets at equal tokens: nats behind L layers, and share of the way from ``L_b`` to L."""
MILD, WAN = 0.02, 0.10
"""Targets at equal rounds: nats lost against ``lockstep``."""
KEEPS_Z = 0.03
"""Nats that replacing ``z`` by noise must cost, or the objective can do without."""

Row = Mapping[str, Any]
BySeed = dict[int, float]


def final_ce(row: Row, split: str = "test") -> float:
    """Return the nats per byte of the whole model."""
    return float(row[split]["exits"][-1])


def by_seed(rows: Iterable[Row], arm: str, split: str = "test") -> BySeed:
    """Return an arm's cross entropy by seed."""
    return {row["seed"]: final_ce(row, split) for row in rows if row["arm"] == arm}


def paired(one: BySeed, other: BySeed) -> list[float]:
    """Return ``one - other`` of the seeds that both have."""
    return [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]


def share_of_way(shallow: BySeed, arm: BySeed, deep: BySeed) -> tuple[float, float, float]:
    """Return how far an arm is on the way from the shallow model to the deep one, and its 95 % bootstrap interval.

    The ratio of the mean gains; seeds are drawn again together. nan without enough of them.
    """
    seeds = sorted(shallow.keys() & arm.keys() & deep.keys())
    gains = [(shallow[seed] - arm[seed], shallow[seed] - deep[seed]) for seed in seeds]
    if not gains:
        return (float("nan"),) * 3
    made, whole = map(np.array, zip(*gains, strict=True))
    share = float(made.mean() / whole.mean())
    if len(seeds) < 3:
        return share, float("nan"), float("nan")

    def ratio(made: Any, whole: Any, axis: int = -1) -> Any:
        return made.mean(axis) / whole.mean(axis)

    interval = bootstrap(
        (made, whole), ratio, paired=True, vectorized=True, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return share, float(interval.low), float(interval.high)


def tables(rows: Sequence[Row], recipe: Recipe, markdown: bool = False) -> Iterator[Any]:
    """Yield the tables and the sentences, as rich tables or as Markdown."""
    title = (
        f"{recipe.tokens_per_block:,} tokens per block or control, L={recipe.num_layers}, B={recipe.num_blocks}, "
        f"d={recipe.width}, T={recipe.window_bytes}: nats per byte, means over seeds +- half the 95 % t-interval"
    )
    names = sorted(dict.fromkeys(row["arm"] for row in rows), key=lambda name: not name.startswith("causal"))
    for heading, columns, cells in (
        (title, MAIN_COLUMNS, main_cells),
        ("sweeps of the objectives with noise", SWEEP_COLUMNS, sweep_cells),
    ):
        body = [made for name in names if (made := cells(rows, name))]
        if body:
            yield markdown_table(columns, body) if markdown else rich_table(heading, columns, body)
    yield "\n".join(verdicts(rows))


MAIN_COLUMNS = (
    "arm",
    "seeds",
    "val",
    "test",
    "bits/byte",
    "gap to causal L",
    "gap to causal L_b",
    "share of the way",
    "exits, test",
    "FLOPs / causal L",
)


def main_cells(rows: Sequence[Row], name: str) -> list[str]:
    """Return an arm's row of the main table."""
    group = [row for row in rows if row["arm"] == name]
    full, block = by_seed(rows, "causal_full"), by_seed(rows, "causal_block")
    mine, exits = by_seed(rows, name), zip(*(row["test"]["exits"] for row in group), strict=True)
    share, low, high = share_of_way(block, mine, full)
    flops = [row["training_flops"] for row in rows if row["arm"] == "causal_full"]
    return [
        name,
        str(len(group)),
        spread([final_ce(row, "val") for row in group]),
        spread(list(mine.values())),
        f"{bits_per_token(statistics.mean(mine.values()), 1):.3f}",
        gap(paired(mine, full), full),
        gap(paired(mine, block), block),
        "-"
        if share != share or name.startswith("causal")
        else f"{share:.2f}" + (f" ({low:.2f} to {high:.2f})" if low == low else ""),
        " ".join(f"{statistics.mean(values):.3f}" for values in exits),
        f"{group[0]['training_flops'] / flops[0]:.2f}" if flops else "-",
    ]


SWEEP_COLUMNS = (
    "arm",
    "K=1",
    "K=16",
    "prior K=16",
    "gain",
    "z noise",
    "z noise costs",
    "no z",
    "span",
    "leak",
    "local_ce",
)


def sweep_cells(rows: Sequence[Row], name: str) -> list[str]:
    """Return an arm's row of the table of sweeps; empty for an arm without."""
    sweeps = [row["test"]["sweep"] for row in rows if row["arm"] == name and "sweep" in row["test"]]
    if not sweeps:
        return []

    def mean(key: str) -> float:
        return float(statistics.mean(sweep[key] for sweep in sweeps))

    local = " ".join(f"{statistics.mean(v):.2f}" for v in zip(*(s["local_ce"] for s in sweeps), strict=True))
    return [
        name,
        *(f"{mean(key):.3f}" for key in ("sweep_ce_k1", "sweep_ce_k", "prior_ce_k")),
        f"{mean('composition_gain'):+.3f}",
        f"{mean('z_noise_ce'):.3f}",
        f"{mean('z_noise_ce') - mean('sweep_ce_k'):+.3f}",
        *(f"{mean(key):.3f}" for key in ("no_z_ce", "span_ce", "leak_accuracy")),
        local,
    ]


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what the rows say of the targets, on test, one sentence each."""
    full, block = by_seed(rows, "causal_full"), by_seed(rows, "causal_block")
    gains = paired(block, full)
    if not gains:
        yield "No target can be judged: causal_full and causal_block are needed with the same seeds."
        return
    counts = statistics.mean(gains) >= COUNTS
    yield (
        f"This size {'counts' if counts else 'does not count'}: causal L is {statistics.mean(gains):.3f} nats better "
        f"than causal L_b ({COUNTS} asked, seeds: {len(gains)})."
    )
    for name in dict.fromkeys(row["arm"] for row in rows):
        mine = by_seed(rows, name)
        behind = paired(mine, full)
        if name.startswith("causal") or not behind:
            continue
        share, low, _ = share_of_way(block, mine, full)
        met = statistics.mean(behind) <= NEAR and share >= SHARE and not low <= 0
        yield (
            f"{name}: {statistics.mean(behind):+.3f} nats to causal L (at most {NEAR} asked), {share:.2f} of the way "
            f"({SHARE} asked): {'met' if met else 'missed'}."
        )
    lockstep = by_seed(rows, "ahead 2 replicas")
    for network, most in (("mild", MILD), ("wan", WAN)):
        lost = paired(by_seed(rows, f"ahead {network}"), lockstep)
        if lost:
            met = statistics.mean(lost) <= most
            tokens = [
                statistics.mean(row["tokens_per_block"] for row in rows if row["arm"] == arm)
                for arm in (f"ahead {network}", "ahead 2 replicas")
            ]
            yield (
                f"{network}: {statistics.mean(lost):+.3f} nats to lockstep at equal rounds (at most {most}), with "
                f"{tokens[0] / tokens[1]:.0%} of its tokens accepted: {_met(met)}."
            )
    for name in dict.fromkeys(row["arm"] for row in rows if "sweep" in row["test"]):
        sweeps = [row["test"]["sweep"] for row in rows if row["arm"] == name]
        cost = statistics.mean(sweep["z_noise_ce"] - sweep["sweep_ce_k"] for sweep in sweeps)
        verdict = _met(cost >= KEEPS_Z)
        yield f"{name}: replacing z by noise costs {cost:+.3f} nats (at least {KEEPS_Z} asked to keep z): {verdict}."


def _met(holds: bool) -> str:
    return "met" if holds else "missed"


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Return the mean, and half its interval where there is more than one seed."""
    mean = format(statistics.mean(values), form)
    return mean if len(values) < 2 else f"{mean} +- {half_width(values):.3f}"


def gap(differences: Sequence[float], control: BySeed) -> str:
    """Return the mean difference to a control, absolute and relative; a dash for none."""
    if not differences or not any(differences):
        return "-"
    relative = statistics.mean(differences) / statistics.mean(control.values())
    return f"{spread(differences, '+.3f')} ({relative:+.1%})"


def rich_table(title: str, columns: Sequence[str], body: Sequence[Sequence[str]]) -> Table:
    """Return a table for a terminal."""
    table = Table(*columns, title=title)
    for cells in body:
        table.add_row(*cells)
    return table


def markdown_table(columns: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table for a README."""
    lines = [columns, ["---"] * len(columns), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
