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
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from benchmarks.serving_fleet import Hosts, hosts_of
from benchmarks.serving_models import FULL, QUICK, add_corpus, corpus_of, models_of
from benchmarks.serving_overhead import overhead
from benchmarks.serving_quality import Quality, judge, vocabulary_of
from benchmarks.serving_report import REAL, Row, lines_of, table_of, without_nan
from lightning_blocktrain import ByteDataModule
from lightning_blocktrain.models.generation import (
    Decision,
    Decoder,
    Draft,
    LocalWalker,
    Sampling,
    checked_continuation,
)
from lightning_blocktrain.models.loading import Model
from lightning_blocktrain.serving.client import SweepClient

T = TypeVar("T")

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
        draft_by: Bytes that it decides per sweep, and its sweeps.
        requests: At the same time.
        is_lossless: Whether its text is that of ``plain``.
        chained: Whether walks go from host to host; False: every state comes to the client, which sends it on.
    """

    model: str
    chunk_bytes: int = 1
    sweeps: int = 1
    draft: str | None = None
    draft_by: tuple[int, int] = (1, 1)
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
    "draft sweep": Arm("causal", draft="sweep", draft_by=(NUM_GUESSES, 2), is_lossless=True),
    "sweep": Arm("sweep", 0),
    "sweep step by step": Arm("sweep", 0, chained=False),
    "sweep x 4": Arm("sweep", 0, 4),
    "chunks": Arm("sweep", CHUNK),
    "chunks x 2": Arm("sweep", CHUNK, 2),
}


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
        chunk_bytes, sweeps = arm.draft_by
        return client.stream_checked(
            prompt,
            timed,
            self.models[arm.draft],
            num_guesses=NUM_GUESSES,
            draft_chunk_bytes=chunk_bytes,
            draft_sweeps=sweeps,
            seed=seed,
        )

    def timed(self, arm: Arm, client: SweepClient, length: int, timed: int, seed: int) -> tuple[float, int]:
        """Return the seconds of one output, and how often hosts decided something."""
        begin = time.perf_counter()
        found = [len(decision.decided) for decision in self.chunks(arm, client, length, timed, seed)]
        assert sum(found) == timed
        return time.perf_counter() - begin, len(found) * min(arm.sweeps, max(found))


def at_the_same_time(works: Sequence[Callable[[], T]]) -> list[T]:
    """Run some functions in threads and return what they return."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(work) for work in works]]


def measure(
    bench: Bench, name: str, rtt_ms: float, length: int, timed_bytes: int, repeats: int, quality: Quality
) -> Row:
    """Time an arm at one RTT and length; return it with the quality of its outputs."""
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
    rate, total = statistics.median(rates), statistics.median(totals)
    return Row(name, rtt_ms, length, timed, rate, total, statistics.mean(walks), moved, quality)


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
        model, draft = bench.models[arm.model], bench.models[arm.draft]
        walks = 0
        for seed, prompt in enumerate(bench.prompts):
            sampling = Sampling(seed=seed)
            decoder = Decoder(LocalWalker(model, model.num_blocks), model.window_bytes, sampling)
            guesses = Draft(Decoder(LocalWalker(draft, draft.num_blocks), draft.window_bytes, sampling), *arm.draft_by)
            walks += len(list(checked_continuation(decoder, guesses, prompt, num_bytes, NUM_GUESSES)))
        found[name] = len(bench.prompts) * num_bytes / walks
    return found


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
            own = quality[name, length]
            rows.append(measure(bench, name, rtt_ms, length, args.timed_bytes, args.repeats, own))
        accepted = accepted_per_traversal(bench, max(args.lengths[0], 16))
    real = {length: quality[REAL, length] for length in args.lengths}
    shapes: list[tuple[int, int, int, int, Sequence[Sequence[int]]]] = []
    shapes += [(1, 32, 3, 32, [[0, 1, 2]])] if args.quick else [(7, 512, 12, 128, CUT), (7, 256, 6, 64, CUT)]
    tcp = [overhead(*one, PROMPT_BYTES) for one in shapes]
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
