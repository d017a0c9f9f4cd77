"""One-sweep serving beside what one would really run: bytes per second, bytes moved, and quality in the same row.

``python -m benchmarks.serving --models DIR [--train FILE --val FILE] [--json FILE] [--rtts ...] [--lengths ...]``

Three processes serve a model, one block each, behind relays: every link (client to host, host to host, host to client)
has the given RTT, half of it each way; bandwidth is that of the machine. The models are those of
``benchmarks.serving_models``.

=============  =====================================================================================================
arm            one traversal of the blocks decides
=============  =====================================================================================================
plain          one byte (causal; keys and values cached on the hosts): the baseline
batched        one byte of each of ``REQUESTS`` requests at the same time
draft small    what a one-layer model at the client guessed right, and one byte; the same text as plain
draft exit     the same with the exit after the first block, at the client
draft sweep    the same with chunks of a sweep model at the client
sweep          the whole output, or as much as the window takes
sweep x 4      the same, four times over: each reads the bytes of the one before
chunks         ``CHUNK`` bytes
chunks x 2     the same, twice over
step by step   as plain or sweep, but every host answers the client, which sends the state on
=============  =====================================================================================================

A rate is the median over ``--repeats`` runs, interleaved with those of the other arms. Arms that decide few bytes per
traversal are timed over ``--timed-bytes`` bytes at most (the row says how many): their rate does not depend on the
length. Quality is that of ``--prompts`` outputs, which do not depend on the hosts.
"""

import argparse
import json
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.paired import run_paired
from benchmarks.serving_fleet import Hosts, hosts_of
from benchmarks.serving_models import FULL, QUICK, add_corpus, corpus_of, models_of
from benchmarks.serving_quality import Quality, judge, vocabulary_of
from lightning_blocktrain import ByteDataModule, DiffusionBlocks
from lightning_blocktrain.models.block_files import entries_of
from lightning_blocktrain.models.generation import (
    Decision,
    Decoder,
    Draft,
    LocalWalker,
    Sampling,
    checked_continuation,
)
from lightning_blocktrain.models.loading import Model
from lightning_blocktrain.rounds import INTERFACE
from lightning_blocktrain.serving.client import SweepClient
from lightning_blocktrain.serving.machine import measured_machine
from lightning_blocktrain.serving.plan import Network, ServedShape, plan

CUT = ([0], [1], [2])
"""The blocks of every host."""
REQUESTS = 8
CHUNK = 16
NUM_GUESSES = 8
PROMPT_BYTES = 32
WORDS_BYTES = 2_000_000
"""Real text of which the words are taken that count as words."""


@dataclass(frozen=True)
class Arm:
    """One way to generate.

    Args:
        model: The served one.
        chunk_bytes: Bytes decided per sweep; 0: the whole output.
        sweeps: Sweeps per chunk.
        draft: The model that guesses, at the client.
        requests: At the same time.
        is_lossless: Whether its text is that of ``plain``.
        chained: Whether walks go from host to host; False: every state comes to the client, which sends it on.
    """

    model: str
    chunk_bytes: int = 1
    sweeps: int = 1
    draft: str | None = None
    requests: int = 1
    is_lossless: bool = False
    chained: bool = True

    def chunk_of(self, length: int, window_bytes: int) -> int:
        """Return the bytes per sweep of an output: a prompt has to fit into the window too."""
        return self.chunk_bytes or min(length, window_bytes - PROMPT_BYTES)


ARMS = {
    "plain": Arm("causal", is_lossless=True),
    "plain step by step": Arm("causal", is_lossless=True, chained=False),
    "batched": Arm("causal", requests=REQUESTS, is_lossless=True),
    "draft small": Arm("causal", draft="small", is_lossless=True),
    "draft exit": Arm("causal", draft="exit", is_lossless=True),
    "draft sweep": Arm("causal", draft="sweep", is_lossless=True),
    "sweep": Arm("sweep", 0),
    "sweep step by step": Arm("sweep", 0, chained=False),
    "sweep x 4": Arm("sweep", 0, 4),
    "chunks": Arm("sweep", CHUNK),
    "chunks x 2": Arm("sweep", CHUNK, 2),
}
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


class Bench:
    """Models, hosts and prompts.

    Args:
        models: By name.
        hosts: By name of the served model.
        prompts: Bytes of held-out text.
    """

    def __init__(self, models: dict[str, Model], hosts: dict[str, Hosts], prompts: Sequence[bytes]) -> None:
        self.models = models | {"exit": models["causal"].at_exit(1)}
        self.hosts = hosts
        self.prompts = prompts

    def local_text(self, arm: Arm, prompt: bytes, length: int, seed: int) -> bytes:
        """Return what an arm writes, computed here."""
        model = self.models[arm.model]
        chunk = arm.chunk_of(length, model.window_bytes)
        return model.generate(prompt, length, chunk_bytes=chunk, sweeps=arm.sweeps, seed=seed)

    def chunks(self, arm: Arm, client: SweepClient, length: int, timed: int, seed: int) -> Iterator[Decision]:
        """Yield what hosts decide."""
        prompt = self.prompts[seed % len(self.prompts)]
        if arm.draft is None:
            chunk = arm.chunk_of(length, client.facts.window_bytes)
            return client.stream(prompt, timed, chunk_bytes=chunk, sweeps=arm.sweeps, seed=seed)
        draft = self.models[arm.draft]
        by = {"draft_chunk_bytes": NUM_GUESSES, "draft_sweeps": 2} if arm.draft == "sweep" else {}
        return client.stream_checked(prompt, timed, draft, num_guesses=NUM_GUESSES, seed=seed, **by)

    def timed(self, arm: Arm, client: SweepClient, length: int, timed: int, seed: int) -> tuple[float, int]:
        """Return the seconds of one output, and how often hosts decided something."""
        begin = time.perf_counter()
        found = [len(decision.decided) for decision in self.chunks(arm, client, length, timed, seed)]
        assert sum(found) == timed
        return time.perf_counter() - begin, len(found) * min(arm.sweeps, max(found))


def at_the_same_time(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run some functions in threads and return what they return."""
    results: list[Any] = [None] * len(works)

    def run(idx: int) -> None:
        results[idx] = works[idx]()

    threads = [threading.Thread(target=run, args=(idx,)) for idx in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def measure(
    bench: Bench, name: str, rtt_ms: float, length: int, timed_bytes: int, repeats: int
) -> tuple[float, float, int, float, float]:
    """Return bytes per second of a request and in total, bytes timed, traversals and bytes moved per byte."""
    arm = ARMS[name]
    hosts = bench.hosts[arm.model]
    hosts.shape(rtt_ms)
    few = arm.chunk_bytes == 1
    timed = min(length, timed_bytes) if few else length
    rates, totals, walks = [], [], []
    with ExitStack() as stack:
        clients = [stack.enter_context(hosts.client(chained=arm.chained)) for _ in range(arm.requests)]
        at_the_same_time([partial(client.generate, b"a", 1) for client in clients])
        before = hosts.moved_bytes
        for repeat in range(repeats):
            seeds = [repeat * arm.requests + idx for idx in range(arm.requests)]
            works = [
                partial(bench.timed, arm, client, length, timed, seed)
                for client, seed in zip(clients, seeds, strict=True)
            ]
            begin = time.perf_counter()
            found = at_the_same_time(works)
            totals.append(arm.requests * timed / (time.perf_counter() - begin))
            rates.append(statistics.median(timed / seconds for seconds, _ in found))
            walks.append(statistics.mean(number for _, number in found) / timed)
        moved = (hosts.moved_bytes - before) / (repeats * arm.requests * timed)
    return statistics.median(rates), statistics.median(totals), timed, statistics.mean(walks), moved


def qualities(bench: Bench, arms: Sequence[str], lengths: Sequence[int], held_out: bytes) -> dict[Any, Quality]:
    """Return the quality of every arm's outputs by arm and length, and that of real text."""
    vocabulary, reference = vocabulary_of(held_out), bench.models["reference"]
    found: dict[Any, Quality] = {}
    for length in lengths:
        by_setting: dict[Arm, Quality] = {}
        for name in arms:
            arm = ARMS["plain"] if ARMS[name].is_lossless else replace(ARMS[name], chained=True)
            if arm not in by_setting:
                outputs = [bench.local_text(arm, prompt, length, seed) for seed, prompt in enumerate(bench.prompts)]
                by_setting[arm] = judge(bench.prompts, outputs, reference, vocabulary)
            found[name, length] = by_setting[arm]
        real = [held_out[held_out.index(prompt) + PROMPT_BYTES :][:length] for prompt in bench.prompts]
        found[REAL, length] = judge(bench.prompts, real, reference, vocabulary)
    return found


def accepted_per_traversal(bench: Bench, num_bytes: int) -> dict[str, float]:
    """Return the bytes that a traversal decides with each draft; the hosts make no difference."""
    found = {}
    for name, arm in ARMS.items():
        if arm.draft is None:
            continue
        model, draft, by = bench.models[arm.model], bench.models[arm.draft], (1, 1)
        if arm.draft == "sweep":
            by = (NUM_GUESSES, 2)
        walks = 0
        for seed, prompt in enumerate(bench.prompts):
            sampling = Sampling(seed=seed)
            decoder = Decoder(LocalWalker(model, model.num_blocks), model.window_bytes, sampling)
            guesses = Draft(Decoder(LocalWalker(draft, draft.num_blocks), draft.window_bytes, sampling), *by)
            walks += len(list(checked_continuation(decoder, guesses, prompt, num_bytes, NUM_GUESSES)))
        found[name] = len(bench.prompts) * num_bytes / walks
    return found


def overhead(repeats: int, width: int, num_layers: int, length: int, cut: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return what serving costs without relays, untrained: beside one process (paired), beside the plan, in memory.

    Args:
        repeats: Pairs.
        width: D.
        num_layers: L, in three blocks.
        length: Bytes of the sweep.
        cut: The blocks of every host.
    """
    torch.set_num_threads(1)
    heads = max(1, width // 64)
    model = DiffusionBlocks(num_layers, 3, width, heads, 2 * length, objective="denoise_features", p_span=0.5).eval()
    prompt = b"x" * PROMPT_BYTES
    with hosts_of(model, cut) as hosts, hosts.client(relayed=False) as client:

        def seconds(generate: Callable[..., bytes], chunk_bytes: int) -> float:
            begin = time.perf_counter()
            generate(prompt, length, chunk_bytes=chunk_bytes)
            return time.perf_counter() - begin

        for generate in (client.generate, model.generate):
            seconds(generate, length)
        found = run_paired(lambda: seconds(client.generate, length), lambda: seconds(model.generate, length), repeats)
        machine = measured_machine(width, length)
        plain_s = min(seconds(client.generate, 1) for _ in range(2))
        pss_mib = max(hosts.pss_mib())
    shape = ServedShape(width, num_layers, 3, 2 * length)
    planned = plan(shape, machine, Network(), length, PROMPT_BYTES)
    own_mib = max(sum(t.numel() * t.element_size() for t in own.values()) / 2**20 for own in _entries(model))
    return {"width": width, "num_layers": num_layers, "length": length, **asdict(found)} | {
        "plain_s": plain_s,
        "planned_over_measured_sweep": planned.sweep_s / found.a_s,
        "planned_over_measured_plain": planned.plain_s / plain_s,
        "pss_mib": pss_mib,
        "block_and_interface_mib": own_mib,
    }


def _entries(model: Model) -> list[dict[str, torch.Tensor]]:
    entries = entries_of(model)
    return [own | entries[INTERFACE] for name, own in entries.items() if name != INTERFACE]


def table_of(rows: Sequence[Row], real: dict[int, Quality]) -> Table:
    """Return the rows, each rate beside that of ``plain`` at the same RTT."""
    plain = {row.rtt_ms: row.bytes_per_s for row in rows if row.arm == "plain"}
    table = Table(title="bytes per second of one request, three hosts")
    for title in (
        "RTT ms",
        "bytes",
        "arm",
        "bytes/s",
        "/ plain",
        "total",
        "traversals",
        "moved",
        "bits",
        "4-grams",
        "words",
    ):
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
        yield f"  ratio {tcp['ratio']:.3f} (95 % {tcp['low']:.3f} to {tcp['high']:.3f}, {tcp['num_pairs']} pairs)"
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


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_corpus(parser)
    add = parser.add_argument
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    add("--rtts", type=float, nargs="+", default=[0, 10, 50, 150], help="of every link, in ms")
    add("--lengths", type=int, nargs="+", default=[64, 128, 512])
    add("--prompts", type=int, default=16, help="outputs by which quality is judged")
    add("--timed-bytes", type=int, default=48, help="of arms with few bytes per traversal")
    add("--repeats", type=int, default=3)
    add("--json", type=Path, help="file for all numbers")
    args = parser.parse_args(argv)
    if args.quick:
        args.rtts, args.lengths, args.prompts, args.timed_bytes, args.repeats = [0.0, 5.0], [24], 2, 8, 1
        args.arms = ["plain", "batched", "draft exit", "sweep", "chunks"]
    return args


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure everything that the options ask for."""
    torch.set_num_threads(1)
    shape, corpus = (QUICK if args.quick else FULL), corpus_of(args)
    drafts = {arm.draft for arm in ARMS.values() if arm.draft not in (None, "exit")}
    needed = {"causal", "reference", *filter(None, drafts), *(ARMS[name].model for name in args.arms)}
    models = models_of(needed, args.models or folder, shape, corpus)
    data = ByteDataModule(window_bytes=shape.window_bytes, batch_size=1, **corpus)  # type: ignore[arg-type]
    data.setup("validate")
    windows = data.val_dataloader().dataset
    held_out = b"".join(bytes(windows[idx][0][0].tolist()) for idx in range(min(len(windows), WORDS_BYTES // 256)))
    step = max(PROMPT_BYTES, (len(held_out) - max(args.lengths) - PROMPT_BYTES) // args.prompts)
    prompts = [held_out[idx * step : idx * step + PROMPT_BYTES] for idx in range(args.prompts)]
    served = sorted({ARMS[name].model for name in args.arms})
    with ExitStack() as stack:
        hosts = {name: stack.enter_context(hosts_of(models[name], CUT)) for name in served}
        bench = Bench(models, hosts, prompts)
        quality = qualities(bench, args.arms, args.lengths, held_out)
        rows = []
        for rtt_ms, length, name in product(args.rtts, args.lengths, args.arms):
            if ARMS[name].chunk_bytes == 1 and length != args.lengths[0]:
                continue  # its rate does not depend on the length
            numbers = measure(bench, name, rtt_ms, length, args.timed_bytes, args.repeats)
            rate, total, timed, walks, moved = numbers
            rows.append(Row(name, rtt_ms, length, timed, rate, total, walks, moved, quality[name, length]))
        accepted = accepted_per_traversal(bench, max(args.lengths[0], 16))
    real = {length: quality[REAL, length] for length in args.lengths}
    shapes = [(1, 32, 3, 32, [[0, 1, 2]])] if args.quick else [(7, 512, 12, 128, CUT), (7, 256, 6, 64, CUT)]
    tcp = [overhead(*one) for one in shapes]
    return {"rows": rows, "real": real, "accepted_per_traversal": accepted, "overhead": tcp}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print and write."""
    args = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = run(args, Path(folder))
    console = Console(width=150)
    console.print(table_of(found["rows"], found["real"]))
    for line in lines_of(found):
        console.print(line, highlight=False)
    if args.json:
        plain = found | {
            "rows": [asdict(row) for row in found["rows"]],
            "real": {length: asdict(quality) for length, quality in found["real"].items()},
        }
        args.json.write_text(json.dumps(without_nan(plain), indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
