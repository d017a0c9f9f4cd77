"""What the exchange of updates costs in quality: codecs, and what becomes of work that is late.

``python -m benchmarks.exchange --corpus FILE --json FILE``

All arms train the same ``ByteTransformer`` from the same weights on the same batches, six simulated workers on three
blocks, and differ in one thing each: the codec of the updates, or what is done about deadlines under a network in
which 90, 42 or 10 % of the updates would be in time. Seconds are those of the simulated network. Each run appends one
JSON line to ``--json`` and is skipped when its line is there already, so a stopped benchmark goes on where it was.
"""

import argparse
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table

from lightning_blocktrain import BlockTrainStrategy, ByteDataModule, ByteTransformer, Codec, RoundMonitor
from lightning_blocktrain.demo.arms import mean_exit_nats, spaced_batches

CODECS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"codec": "bf16"},
    "int8": {"codec": "int8"},
    "topk 5 %": {"codec": Codec("topk", top_frac=0.05)},
}
POLICIES: dict[str, dict[str, Any]] = {
    "drop": {},
    "stale_weighted": {"late": "stale_weighted"},
    "until_deadline": {"local_steps": "until_deadline"},
    "adaptive": {"deadline_quantile": 0.9},
    "until_deadline, stale_weighted": {"local_steps": "until_deadline", "late": "stale_weighted"},
}
NETWORKS = ("mild", "wan", "harsh")


@dataclass(frozen=True)
class Shape:
    """Of the model and the run."""

    width: int = 64
    num_layers: int = 6
    window_bytes: int = 64
    batch_size: int = 8
    rounds: int = 50
    sync_every: int = 5
    test_windows: int = 256
    lr: float = 1e-3


QUICK = Shape(width=16, num_layers=3, window_bytes=32, batch_size=2, rounds=4, sync_every=2, test_windows=8)


def arms() -> dict[str, dict[str, Any]]:
    """Return the strategy's options of every arm by name; the first is the reference of the codecs."""
    codecs = {f"codec {name}": options for name, options in CODECS.items()}
    policies = {
        f"{network} {name}": {"network": network, **options}
        for network in NETWORKS
        for name, options in POLICIES.items()
    }
    return codecs | policies


def run(name: str, shape: Shape, data: ByteDataModule, seed: int) -> dict[str, Any]:
    """Train one arm with one seed and evaluate it on the validation split."""
    L.seed_everything(seed, verbose=False)
    module = ByteTransformer(
        num_layers=shape.num_layers,
        num_blocks=3,
        width=shape.width,
        num_heads=4,
        window_bytes=shape.window_bytes,
        lr=shape.lr,
    )
    strategy = BlockTrainStrategy(num_blocks=3, replicas=2, sync_every=shape.sync_every, **arms()[name])
    monitor, last = RoundMonitor(), LastClose()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=shape.rounds * shape.sync_every,
        callbacks=[monitor, last],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(module, datamodule=data)
    data.setup("fit")
    subset = spaced_batches(data.val_dataloader().dataset, shape.test_windows, 16)
    exits, num_bytes = mean_exit_nats(module.eval(), [subset[idx] for idx in range(len(subset))])
    totals = monitor.summary()
    return {
        "arm": name,
        "seed": seed,
        "shape": asdict(shape),
        "nats_per_byte": exits[-1],
        "bytes_evaluated": num_bytes,
        "virtual_s": last.virtual_s,
        "corpus_sha256": data.corpus_info.sha256,
        **{key: totals[key] for key in ("rounds", "participation", "stale", "late", "sent_bytes")},
        **{key: totals[key] for key in ("accepted_tokens", "worker_tokens", "worker_steps")},
    }


class LastClose(L.Callback):
    """Keeps the simulated time at which the last round of a block closed."""

    virtual_s = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Look at the newest reports."""
        strategy = trainer.strategy
        assert isinstance(strategy, BlockTrainStrategy)
        self.virtual_s = max((report.closed_at for report in strategy.round_reports), default=self.virtual_s)


def print_tables(rows: Sequence[dict[str, Any]]) -> None:
    """Print one table for the codecs and one for the deadlines, means over seeds."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["arm"], []).append(row)
    codecs = Table("codec", "seeds", "nats/byte", "minus fp32", "bytes sent", "of fp32", title="codecs, lockstep")
    for name in (f"codec {name}" for name in CODECS):
        if name in groups:
            codecs.add_row(*_codec_cells(name, groups))
    names = ("network", "policy", "seeds", "nats/byte", "minus drop", "in time", "merged tokens", "steps", "sim. s")
    policies = Table(*names, title="deadlines: means over seeds; gaps paired by seed")
    for network in NETWORKS:
        for policy in POLICIES:
            if f"{network} {policy}" in groups:
                policies.add_row(*_policy_cells(network, policy, groups))
    for table in (codecs, policies):
        Console(width=130).print(table)


def _codec_cells(name: str, groups: dict[str, list[dict[str, Any]]]) -> list[str]:
    sent, exact = mean(groups[name], "sent_bytes"), mean(groups.get("codec fp32", []), "sent_bytes")
    gap = paired_gap(groups[name], groups.get("codec fp32", []))
    nats = mean(groups[name], "nats_per_byte")
    return [name, str(len(groups[name])), f"{nats:.4f}", f"{gap:+.4f}", f"{sent:,.0f}", f"{sent / exact:.3f}"]


def _policy_cells(network: str, policy: str, groups: dict[str, list[dict[str, Any]]]) -> list[str]:
    rows = groups[f"{network} {policy}"]
    gap = paired_gap(rows, groups.get(f"{network} drop", []))
    merged = mean(rows, "accepted_tokens") / mean(rows, "worker_tokens")
    return [
        network,
        policy,
        str(len(rows)),
        f"{mean(rows, 'nats_per_byte'):.4f}",
        f"{gap:+.4f}",
        f"{mean(rows, 'participation'):.2f}",
        f"{merged:.2f} of {mean(rows, 'worker_tokens'):,.0f}",
        f"{mean(rows, 'worker_steps'):,.0f}",
        f"{mean(rows, 'virtual_s'):,.0f}",
    ]


def mean(rows: Sequence[dict[str, Any]], key: str) -> float:
    """Return the mean of a field; nan without rows."""
    return sum(row[key] for row in rows) / len(rows) if rows else float("nan")


def paired_gap(rows: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> float:
    """Return the mean difference in nats per byte over the seeds that both have; nan without any."""
    by_seed = {row["seed"]: row["nats_per_byte"] for row in reference}
    gaps = [row["nats_per_byte"] - by_seed[row["seed"]] for row in rows if row["seed"] in by_seed]
    return sum(gaps) / len(gaps) if gaps else float("nan")


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", default="python-docs", help="a named corpus or a file; its end is held out")
    parser.add_argument("--arms", nargs="+", default=list(arms()), choices=list(arms()), metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--json", type=Path, help="append one line per run; what is there is not run again")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, to see that it works")
    args = parser.parse_args(argv)
    shape = QUICK if args.quick else Shape()
    warnings.filterwarnings("ignore", message=".*(does not have many workers|val_check_interval).*")
    torch.set_num_threads(1)
    data = ByteDataModule(args.corpus, window_bytes=shape.window_bytes, batch_size=shape.batch_size)
    data.setup("fit")
    rows = _stored(args.json, shape, data.corpus_info.sha256)
    done = {(row["arm"], row["seed"]) for row in rows}
    for seed in args.seeds:
        for name in args.arms:
            if (name, seed) not in done:
                rows.append(run(name, shape, data, seed))
                if args.json is not None:
                    with args.json.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    print_tables([row for row in rows if row["seed"] in args.seeds])


def _stored(path: Path | None, shape: Shape, sha256: str) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if row["shape"] == asdict(shape) and row["corpus_sha256"] == sha256]


if __name__ == "__main__":
    main()
