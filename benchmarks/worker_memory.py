"""What a worker process holds in memory, measured, beside training the whole model in one process.

``python -m benchmarks.worker_memory [--quick] [--width 512] [--layers-per-block 4] [--num-blocks 3] [--json FILE]``

Every arm runs in processes of its own, with the same batch and window; a thread in each of them samples its PSS:

* ``block``: a causal model of the layers of one block under Lightning's default strategy. What it takes beside 16 bytes
  per parameter (weights, gradients, AdamW) is A: activations, and whatever a process needs to train at all.
* ``whole``: a causal model of all layers under Lightning's default strategy.
* ``workers``: a denoising model of all layers under ``blocktrain`` with one process per block.
* ``prefix``: a causal model of all layers under ``blocktrain``, whose blocks read the frozen blocks before them, and
  with ``--lookahead`` those after them; of it the worker counts that holds most of them.

The target of a worker that is not rank 0 is that its peak is above its base by at most 1.1 times
(16, or 16 + 4 + 4 with a lossy codec) bytes per parameter of its block and the interface, plus A. Base is what the
process has after imports and data set-up. 16 bytes are as above, 4 the base copy that a lossy codec needs, 4 the error
feedback. A worker on frozen blocks has beside them, per value, what the prefix codec says (2 in bf16), 4 more for
blocks after its own, and the values of one layer in fp32 while they are decoded. Rank 0 assembles the model and is
shown apart. PSS counts a page of a library in parts when processes share it, so it moves when another one ends; USS,
the pages that no other process has, is printed as a check.
"""

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import lightning as L
import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

import lightning_blocktrain.transport.http  # noqa: F401  # otherwise a worker would import it after its base
from lightning_blocktrain import BlockTrainStrategy, ByteTransformer, DiffusionBlocks
from lightning_blocktrain.errors import explain
from lightning_blocktrain.partition import Partition, as_layout, partition
from lightning_blocktrain.protocols import SupportsBlocks

ROOT = Path(__file__).parents[1]
MIB = 2**20
FACTOR = 1.1
TRAIN_BYTES, BASE_COPY_BYTES, FEEDBACK_BYTES = 16, 4, 4
"""Per parameter: weight, gradient and two moments; the copy that the round started from; what a codec owes."""
PREFIX_BYTES = {"bf16": 2.0, "int8": 1.0 + 4.0 / 256.0, "fp32": 4.0}
"""Per value of a frozen prefix, by codec."""
AHEAD_BYTES = 4
"""Per value of a block after the worker's own, beside: it is wide for as long as a step lasts."""
DECODED_BYTES = 8
"""Per value of the one layer that is being decoded."""
ARMS = ("block", "whole", "workers", "prefix")
OURS = ("workers", "prefix")
SIZES = ("width", "layers_per_block", "num_blocks", "num_heads", "window_bytes")
PASSED_ON = (*SIZES, "batch_size", "steps", "sync_every", "codec", "prefix_codec", "lookahead")
TIMEOUT_S = 3600.0


class PeakMemory:
    """Samples the memory of this process in a thread between ``__enter__`` and ``__exit__``.

    Args:
        sample_every_s: Wait between two samples, which take some milliseconds.
    """

    def __init__(self, sample_every_s: float = 0.004) -> None:
        self._process = psutil.Process()
        self._every_s = sample_every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak-memory", daemon=True)
        self.num_samples = 0
        self.base: dict[str, int] = {}
        self.peak: dict[str, int] = {}

    def __enter__(self) -> Self:
        """Take the base and start sampling."""
        gc.collect()
        self.base = self.sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop sampling."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self.sample()

    def sample(self) -> dict[str, int]:
        """Return what this process holds now, and remember the most."""
        info = self._process.memory_full_info()
        now = {"pss": info.pss, "uss": info.uss}
        self.peak = {name: max(value, self.peak.get(name, 0)) for name, value in now.items()}
        self.num_samples += 1
        return now


# One arm, in a process of its own


def make_module(arm: str, args: argparse.Namespace) -> L.LightningModule:
    """Return the model of an arm."""
    num_layers = args.layers_per_block * (1 if arm == "block" else args.num_blocks)
    if arm == "workers":
        return DiffusionBlocks(num_layers, args.num_blocks, args.width, args.num_heads, args.window_bytes)
    options = {"num_blocks": args.num_blocks, "lookahead": args.lookahead} if arm == "prefix" else {"num_blocks": 1}
    return ByteTransformer(num_layers, args.width, args.num_heads, args.window_bytes, **options)


def make_trainer(arm: str, args: argparse.Namespace) -> L.Trainer:
    """Return a silent Trainer on the CPU."""
    ours = BlockTrainStrategy(sync_every=args.sync_every, codec=args.codec, prefix_codec=args.prefix_codec)
    return L.Trainer(
        strategy=ours if arm in OURS else "auto",
        devices=args.num_blocks if arm in OURS else 1,
        accelerator="cpu",
        max_steps=args.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )


def run_arm(arm: str, args: argparse.Namespace) -> None:
    """Train one arm and write what this process took; as ``workers`` every rank comes through here."""
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rank = int(os.environ.get("LOCAL_RANK", 0))
    L.seed_everything(0, verbose=False)
    text = torch.randint(256, (args.steps * args.batch_size * args.num_blocks, args.window_bytes + 1))
    data = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=args.batch_size)
    trainer = make_trainer(arm, args)
    memory = PeakMemory()
    try:
        with memory:
            trainer.fit(make_module(arm, args), data)
    finally:  # a worker that rank 0 has started ends inside fit
        found = {"rank": rank, "base": memory.base, "peak": memory.peak, "num_samples": memory.num_samples}
        found["finished"] = trainer.global_step >= args.steps
        (args.out / f"{arm}-{rank}.json").write_text(json.dumps(found))


# All arms


def measure(args: argparse.Namespace, arms: Sequence[str] = ARMS) -> dict[str, list[dict[str, Any]]]:
    """Run the arms, one after the other unless it is only a trial; return what each process took, by arm."""
    with tempfile.TemporaryDirectory(prefix="worker-memory-") as folder:
        started: list[subprocess.Popen[bytes]] = []
        for arm in arms:
            started.append(subprocess.Popen(_command(arm, args, folder), cwd=ROOT, env=_environment()))
            if not args.quick:
                _await(started)
        _await(started)
        found = {arm: sorted(Path(folder).glob(f"{arm}-*.json")) for arm in arms}
        return {arm: [json.loads(path.read_text()) for path in paths] for arm, paths in found.items()}


def _command(arm: str, args: argparse.Namespace, folder: str) -> list[str]:
    options = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in PASSED_ON]
    return [sys.executable, "-m", "benchmarks.worker_memory", *options, f"--arm={arm}", f"--out={folder}"]


def _environment() -> dict[str, str]:
    # The buffers of a thread count, so every arm has as many as a worker.
    return {"OMP_NUM_THREADS": "1", **os.environ}


def _await(processes: list["subprocess.Popen[bytes]"]) -> None:
    try:
        codes = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise RuntimeError(explain("every arm must run to its end", f"exit codes={codes}", "see its traceback above"))


def report_of(found: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements held against the target; bytes unless the name says otherwise.

    Raises:
        RuntimeError: If a process has not taken all steps, so that its memory says nothing.
    """
    _check_finished(found, args.num_blocks)
    above = {arm: [_above(process) for process in processes] for arm, processes in found.items()}
    parts, sizes = _parts_of(make_module("workers", args), args.num_blocks)
    worker_params = _num_trained(parts, sizes, args.num_blocks - 1)
    extra, per_param = _extra_bytes(found, args), _bytes_per_param(args)
    rank_zero, *workers = sorted(above["workers"], key=lambda process: process["rank"])
    most = max(process["pss"] for process in workers)
    limit = FACTOR * (per_param * worker_params + extra)
    return {
        "params_of_block_and_interface": worker_params,
        "params_of_all": sum(sizes.values()),
        "bytes_per_param": per_param,
        "a_bytes": extra,
        "limit_bytes": limit,
        "worker_bytes": most,
        "within": most <= limit,
        "whole_bytes": above["whole"][0]["pss"],
        "whole_over_worker": above["whole"][0]["pss"] / most,
        "rank_zero_bytes": rank_zero["pss"],
        "on_prefix": report_on_prefix(found, args),
        "above_base": above,
        "processes": found,
    }


def _parts_of(module: L.LightningModule, num_blocks: int) -> tuple[Partition, dict[str, int]]:
    """Return how the module is cut, and the sizes of its parameters by name."""
    assert isinstance(module, SupportsBlocks)
    parts = partition(module, as_layout(module.configure_blocks()), num_blocks)
    return parts, {name: parameter.numel() for name, parameter in module.named_parameters()}


def _num_trained(parts: Partition, sizes: Mapping[str, int], block_idx: int) -> int:
    return sum(sizes.get(name, 0) for name in (*parts.block_names[block_idx], *parts.interface_names))


def _extra_bytes(found: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> int:
    """Return A."""
    block_params = sum(parameter.numel() for parameter in make_module("block", args).parameters())
    return int(_above(found["block"][0])["pss"]) - TRAIN_BYTES * block_params


def _bytes_per_param(args: argparse.Namespace) -> int:
    return TRAIN_BYTES + (BASE_COPY_BYTES + FEEDBACK_BYTES if args.codec != "fp32" else 0)


def report_on_prefix(found: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> dict[str, Any]:
    """Return what the worker takes that reads most of frozen blocks, and what it may take; arms block and prefix.

    Rank 0, which assembles the model, is none of them.

    Raises:
        RuntimeError: If a process has not taken all steps, so that its memory says nothing.
    """
    _check_finished({arm: found[arm] for arm in ("block", "prefix")}, args.num_blocks)
    parts, sizes = _parts_of(make_module("prefix", args), args.num_blocks)
    layer_params = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
    block_params = [sum(sizes.get(name, 0) for name in names) for names in parts.block_names]

    def read(blocks: Iterable[int]) -> int:
        return sum(block_params[block_idx] for block_idx in blocks)

    def frozen_bytes(block_idx: int) -> float:
        ahead = AHEAD_BYTES * read(parts.blocks_after(block_idx))
        return PREFIX_BYTES[args.prefix_codec] * read(parts.read_by(block_idx)) + ahead

    reader = max(range(1, args.num_blocks), key=frozen_bytes)
    params = _num_trained(parts, sizes, reader)
    [taken] = [_above(process)["pss"] for process in found["prefix"] if process["rank"] == reader]
    formula = _bytes_per_param(args) * params + frozen_bytes(reader)
    limit = formula + DECODED_BYTES * layer_params + FACTOR * _extra_bytes(found, args)
    return {
        "params_of_block_and_interface": params,
        "rank": reader,
        "params_of_prefix": read(parts.blocks_before(reader)),
        "params_of_lookahead": read(parts.blocks_after(reader)),
        "formula_bytes": formula,
        "worker_bytes": taken,
        "left_over_bytes": taken - formula,
        "limit_bytes": limit,
        "within": taken <= limit,
    }


def _check_finished(found: dict[str, list[dict[str, Any]]], num_blocks: int) -> None:
    for arm in found:
        ranks = sorted(process["rank"] for process in found[arm] if process["finished"])
        wanted = list(range(num_blocks if arm in OURS else 1))
        if ranks != wanted:
            got = f"arm={arm}, ranks that have={ranks} of {wanted}"
            raise RuntimeError(explain("every process must take all steps", got, "see its traceback above"))


def _above(process: dict[str, Any]) -> dict[str, Any]:
    return {"rank": process["rank"], **{n: process["peak"][n] - process["base"][n] for n in ("pss", "uss")}}


def print_table(report: dict[str, Any]) -> None:
    """Print what each process took above its base."""
    table = Table(title="peak above base, MiB")
    for column in ("process", "PSS", "USS", "base PSS"):
        table.add_column(column)
    names = {"block": "causal, one block's layers, default", "whole": "causal, all layers, default"}
    for arm, processes in report["above_base"].items():
        for above, process in zip(processes, report["processes"][arm], strict=True):
            shape = "on frozen blocks" if arm == "prefix" else "denoising"
            role = ", assembles" if above["rank"] == 0 else ""
            name = names.get(arm, f"blocktrain, {shape}, rank {above['rank']}{role}")
            numbers = above["pss"], above["uss"], process["base"]["pss"]
            table.add_row(name, *(f"{number / MIB:.1f}" for number in numbers))
    Console(width=100).print(table)
    per_param, params = report["bytes_per_param"], report["params_of_block_and_interface"]
    print(
        f"worker {report['worker_bytes'] / MIB:.1f} MiB; limit {report['limit_bytes'] / MIB:.1f} = {FACTOR} *"
        f" ({per_param} B * {params:,} + A {report['a_bytes'] / MIB:.1f} MiB);"
        f" whole model / worker {report['whole_over_worker']:.2f}"
    )
    found = report["on_prefix"]
    print(
        f"rank {found['rank']} on frozen blocks {found['worker_bytes'] / MIB:.1f} MiB; formula"
        f" {found['formula_bytes'] / MIB:.1f} = {per_param} B * {found['params_of_block_and_interface']:,} + prefix of"
        f" {found['params_of_prefix']:,} + lookahead of {found['params_of_lookahead']:,};"
        f" left over {found['left_over_bytes'] / MIB:.1f}; limit {found['limit_bytes'] / MIB:.1f}"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; ``--quick`` sets the sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny, all arms at once: shows that it runs")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers-per-block", type=int, default=4)
    parser.add_argument("--num-blocks", type=int, default=3, help="also the number of processes, 2 or more")
    parser.add_argument("--num-heads", type=int, default=8)
    parser.add_argument("--window-bytes", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--sync-every", type=int, default=2)
    parser.add_argument("--codec", default="fp32", help="fp32, bf16, int8 or topk")
    parser.add_argument("--prefix-codec", default="bf16", choices=sorted(PREFIX_BYTES))
    parser.add_argument("--lookahead", type=int, default=0, help="of the causal model")
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.quick:
        args.width, args.layers_per_block, args.num_heads = 32, 1, 2
        args.num_blocks, args.window_bytes, args.batch_size, args.steps = 2, 16, 2, 4
    if args.num_blocks < 2:
        parser.error(explain("num_blocks must be at least 2", f"num_blocks={args.num_blocks}", "one is no cut"))
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run every arm, print the table and return the report."""
    args = parse(argv)
    if args.arm:
        run_arm(args.arm, args)
        return {}
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "arm", "out")}
    report = {"settings": settings, "torch": torch.__version__, **report_of(measure(args), args)}
    print_table(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    main()
