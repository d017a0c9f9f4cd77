"""Is a method as good as backpropagation at 24 layers? One criterion, fixed beforehand, on two corpora.

``python -m benchmarks.pipeline_target --enwik8 FILE --tinystories FILE... [--methods M...] [--json FILE]``

1. The learning rate is that of ``--lrs`` with which ``bp`` does best on valid at a short budget (``--lr`` sets it).
   Both methods use it.
2. Every method of ``--methods`` runs once; the one with the least mean gap to ``bp`` on valid, over the corpora, goes
   on.
3. Three pilot pairs a corpus give the standard deviation of the relative gap on valid, and so the number of pairs for
   80 % power at a true gap of 0 and a margin of 1 %: at most 12, else the corpus is underpowered.
4. So many pairs of new seeds are scored on test: the method is non-inferior if the one-sided 95 % upper bound of the
   mean gap is at most 1 %. Beside it, equivalence within 0.005 bits per token (TOST), and the gap on valid after more
   and more tokens: short budgets favour local methods.

Both runs of a pair share first weights and data order. One JSON line a run; what the file holds already is not run
again, so the command can be interrupted and repeated, with one corpus a process too. Times of runs are CPU seconds.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.pipeline_corpora import Corpus, enwik8, tinystories
from benchmarks.pipeline_training import METHODS, Shape, train
from benchmarks.study.statistics import pairs_needed, tost, upper_bound

LR_SEED, PILOT_SEEDS, FIRST_SEED = 1, (11, 12, 13), 101
"""Seeds of the phases; no run of one phase serves another."""

MARGIN, BOUND_BITS, MAX_PAIRS = 1.0, 0.005, 12
"""Per cent of ``bp``'s bits, bits per token, and pairs."""

QUICK = Shape(4, 32, 2, 64, 8, 16_384, 3e-3, 4, 4, 0.5, score_batches=16)


class Runs:
    """The runs of a file: those that it holds, and those that are added.

    Args:
        path: One JSON object a line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._rows = {_key(row): row for row in map(json.loads, lines)}

    def get(self, corpus: Corpus, method: str, seed: int, shape: Shape, with_test: bool = False) -> dict[str, Any]:
        """Return the row of a run, from the file or from training now."""
        key = _key({**asdict(shape), "corpus": corpus.name, "method": method, "seed": seed})
        if key not in self._rows:
            print(f"{corpus.name} {method} seed {seed}, {shape.tokens:,} tokens, lr {shape.lr:g}", file=sys.stderr)
            row = train(corpus, method, seed, shape, with_test)
            print(f"  {row['valid']:.4f} bits per token on valid, {row['cpu_s']:.0f} CPU s", file=sys.stderr)
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            self._rows[key] = row
        found: dict[str, Any] = self._rows[key]
        return found


def _key(row: dict[str, Any]) -> str:
    names = [*Shape.__dataclass_fields__, "corpus", "method", "seed"]
    return json.dumps([row[name] for name in names])


def gap(method: float, bp: float) -> float:
    """Return the relative gap in per cent."""
    return 100 * (method - bp) / bp


@dataclass(frozen=True)
class Verdict:
    """What the pairs of one corpus say.

    Args:
        corpus: The corpus.
        method: The method.
        pilot_sd: Standard deviation of the gap in the pilot, in per cent.
        needed: Pairs for 80 % power; above ``MAX_PAIRS``: underpowered.
        gaps: Gap of each pair on test, in per cent.
        bits: Difference of each pair on test, in bits per token.
        curve: Tokens, and the mean gap on valid after them.
    """

    corpus: str
    method: str
    pilot_sd: float
    needed: int
    gaps: tuple[float, ...]
    bits: tuple[float, ...]
    curve: tuple[tuple[int, float], ...]

    @property
    def underpowered(self) -> bool:
        """Whether fewer pairs were run than the power asks for."""
        return self.needed > len(self.gaps)

    @property
    def passed(self) -> bool:
        """Whether non-inferiority is shown."""
        return upper_bound(self.gaps) <= MARGIN

    def lines(self) -> list[str]:
        """Return the verdict, the most important line first."""
        power = f"UNDERPOWERED ({self.needed} pairs needed), " if self.underpowered else ""
        found = "non-inferior" if self.passed else "non-inferiority NOT shown"
        test = tost(self.bits, BOUND_BITS)
        same = "equivalent" if test.equivalent else "not shown equivalent"
        differs = "shown different" if test.different else "not shown different"
        return [
            f"{self.corpus}, {self.method}: {power}{found}: mean gap {statistics.mean(self.gaps):+.3f} %, upper bound "
            f"{upper_bound(self.gaps):.3f} % (margin {MARGIN:g} %), {len(self.gaps)} pairs on test",
            f"  {test.mean:+.4f} bits per token (95 % {test.low:+.4f} to {test.high:+.4f}): {same} within "
            f"{BOUND_BITS:g} (p={test.p:.3f}), {differs}",
            f"  pilot sd {self.pilot_sd:.3f} %: {self.needed} pairs for 80 % power at a true gap of 0",
        ]


def choose_lr(runs: Runs, corpora: Sequence[Corpus], shape: Shape, lrs: Sequence[float], tokens: int) -> float:
    """Return the rate with which ``bp`` has the least mean bits on valid, over the corpora, at a short budget."""
    short = replace(shape, tokens=tokens)
    bits = {
        lr: statistics.mean(runs.get(c, "bp", LR_SEED, replace(short, lr=lr))["valid"] for c in corpora) for lr in lrs
    }
    print("lr: " + ", ".join(f"{lr:g}: {mean:.4f}" for lr, mean in bits.items()) + " bits per token on valid")
    return min(bits, key=bits.__getitem__)


def choose_method(runs: Runs, corpora: Sequence[Corpus], shape: Shape, methods: Sequence[str]) -> str:
    """Return the method with the least mean gap on valid, over the corpora, from the first pilot seed."""
    if len(methods) == 1:
        return methods[0]
    seed = PILOT_SEEDS[0]
    gaps = {
        method: statistics.mean(
            gap(runs.get(c, method, seed, shape)["valid"], runs.get(c, "bp", seed, shape)["valid"]) for c in corpora
        )
        for method in methods
    }
    table = Table(title=f"one pilot seed, {shape.tokens:,} tokens")
    table.add_column("method")
    table.add_column("gap on valid, %", justify="right")
    for method, mean in gaps.items():
        table.add_row(method, f"{mean:+.3f}")
    Console(width=100).print(table)
    return min(gaps, key=gaps.__getitem__)


def judge(runs: Runs, corpus: Corpus, shape: Shape, method: str, most: int) -> Verdict:
    """Run the pilot and the confirmation of one corpus.

    Args:
        runs: The file.
        corpus: The corpus.
        shape: What is trained.
        method: The method.
        most: Most pairs of the confirmation.
    """
    pilot = [
        gap(runs.get(corpus, method, seed, shape)["valid"], runs.get(corpus, "bp", seed, shape)["valid"])
        for seed in PILOT_SEEDS
    ]
    sd = statistics.stdev(pilot)
    needed = pairs_needed(sd, MARGIN)
    pairs = [
        tuple(runs.get(corpus, name, seed, shape, with_test=True) for name in (method, "bp"))
        for seed in range(FIRST_SEED, FIRST_SEED + min(needed, most))
    ]
    curves = [
        [gap(ours[1], theirs[1]) for ours, theirs in zip(one["curve"], bp["curve"], strict=True)] for one, bp in pairs
    ]
    tokens = [point[0] for point in pairs[0][0]["curve"]]
    return Verdict(
        corpus.name,
        method,
        sd,
        needed,
        tuple(gap(one["test"], bp["test"]) for one, bp in pairs),
        tuple(one["test"] - bp["test"] for one, bp in pairs),
        tuple(zip(tokens, map(statistics.mean, zip(*curves, strict=True)), strict=True)),
    )


def print_curve(verdict: Verdict) -> None:
    """Print the gap against the tokens."""
    table = Table(title=f"{verdict.corpus}, {verdict.method}: gap to bp on valid")
    table.add_column("tokens", justify="right")
    table.add_column("gap, %", justify="right")
    for tokens, mean in verdict.curve:
        table.add_row(f"{tokens:,}", f"{mean:+.3f}")
    Console(width=100).print(table)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model on the embedded corpus: under 90 s, shows that it runs")
    add("--enwik8", help="a slice of enwik8, plain or packed")
    add("--tinystories", nargs="+", help=f"files of stories, each followed by {'<|endoftext|>'}")
    add("--methods", nargs="+", choices=[name for name in METHODS if name != "bp"], default=["rgc_final"])
    add("--tokens", type=int, default=1_048_576, help="of a run; fixed before the first")
    add("--lr", type=float, default=None, help="learning rate of both methods instead of a choice")
    add("--lrs", nargs="+", type=float, default=[1.5e-3, 3e-3, 6e-3])
    add("--lr-tokens", type=int, default=131_072, help="of a run that serves the choice of the rate")
    add("--num-layers", type=int, default=24)
    add("--width", type=int, default=128)
    add("--num-stages", type=int, default=4)
    add("--window-bytes", type=int, default=128)
    add("--batch-size", type=int, default=8)
    add("--num-evals", type=int, default=8, help="evaluations of a run on valid")
    add("--eval-batches", type=int, default=32, help="batches of each but the last")
    add("--switch-frac", type=float, default=0.5, help="local share of the steps of methods that end in bp")
    add("--until", choices=["lr", "method", "verdict"], default="verdict", help="the last phase to run")
    add("--json", type=Path, default=Path("pipeline_target.jsonl"), help="file of runs, continued if it exists")
    args = parser.parse_args(argv)
    if not (args.quick or args.enwik8 or args.tinystories):
        parser.error("a corpus must be given; got none; use --enwik8, --tinystories or --quick")
    step_tokens = args.batch_size * args.window_bytes
    if not args.quick and (args.tokens % step_tokens or args.lr_tokens % step_tokens):
        parser.error(
            "tokens and lr_tokens must be multiples of batch_size * window_bytes; "
            f"got {args.tokens}, {args.lr_tokens}, {step_tokens}; use for example {step_tokens * 1024}"
        )
    return args


def corpora_of(args: argparse.Namespace, folder: Path) -> list[Corpus]:
    """Return the corpora that the options name, cut into files in ``folder``."""
    if args.quick:
        return [Corpus("python-docs", {"corpus": "python-docs"})]
    corpora = [enwik8(args.enwik8, folder)] if args.enwik8 else []
    return corpora + ([tinystories(args.tinystories, folder)] if args.tinystories else [])


def shape_of(args: argparse.Namespace) -> Shape:
    """Return what the options ask to train; the learning rate may still be chosen."""
    if args.quick:
        return replace(QUICK, lr=args.lr or QUICK.lr)
    return Shape(
        num_layers=args.num_layers,
        width=args.width,
        num_stages=args.num_stages,
        window_bytes=args.window_bytes,
        batch_size=args.batch_size,
        tokens=args.tokens,
        lr=args.lr or args.lrs[0],
        num_evals=args.num_evals,
        eval_batches=args.eval_batches,
        switch_frac=args.switch_frac,
    )


def main(argv: Sequence[str] | None = None) -> list[Verdict]:
    """Run the phases, print what they found and return the verdicts."""
    args = parse(argv)
    runs, shape = Runs(args.json), shape_of(args)
    with tempfile.TemporaryDirectory() as folder:
        corpora = corpora_of(args, Path(folder))
        if args.lr is None:
            lr_tokens = shape.tokens // 4 if args.quick else args.lr_tokens
            shape = replace(shape, lr=choose_lr(runs, corpora, shape, args.lrs, lr_tokens))
        if args.until == "lr":
            return []
        method = choose_method(runs, corpora, shape, args.methods)
        if args.until == "method":
            return []
        verdicts = [judge(runs, corpus, shape, method, 3 if args.quick else MAX_PAIRS) for corpus in corpora]
    for verdict in verdicts:
        print("\n".join(verdict.lines()))
        print_curve(verdict)
    return verdicts


if __name__ == "__main__":
    main()
