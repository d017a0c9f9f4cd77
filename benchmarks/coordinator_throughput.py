"""How fast a coordinator takes updates on the loopback address, beside a plain aiohttp upload of the same bodies.

``python -m benchmarks.coordinator_throughput [--quick] [--pairs N] [--mb N] [--json FILE]``

One process uploads, another serves; both serve all arms:

* ``plain``: a POST of the whole message, in the pieces that ours has, to a server that reads and discards it.
* ``coordinator``: ``HttpTransport.submit`` from two workers of one block in turn. The second one closes the round: it
  is answered when both updates are hashed, checked and merged. The coordinator keeps no state.
* ``with state``: the same with a state folder, reported only: it writes every update and every merge to the disk.

A run of an arm is two uploads; runs of the arms are interleaved. The ratio is that of the throughputs.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import torch
from aiohttp import web
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.paired import run_paired
from lightning_blocktrain.coordinator.serve import ServeSettings, serving, settle_process
from lightning_blocktrain.coordinator.server import READ_BYTES
from lightning_blocktrain.errors import explain
from lightning_blocktrain.rounds import OuterSGD, RoundRules, Verdict
from lightning_blocktrain.transport import RunTerms, Submission, WorkerFacts
from lightning_blocktrain.transport.base import Sender
from lightning_blocktrain.transport.http import HttpTransport
from lightning_blocktrain.transport.loop import LoopThread
from lightning_blocktrain.transport.messages import pack_submission
from lightning_blocktrain.transport.wire import PIECE_BYTES

RUN, TOKEN, ENTRY = "throughput", "of-this-benchmark", "block0"
TARGET = 0.45
NUM_WORKERS = 2
ROOT = Path(__file__).parents[1]
WARMUP_RUNS = 2


# The process that serves


@asynccontextmanager
async def plain_server() -> AsyncIterator[str]:
    """Serve POSTs by reading and discarding their bodies; yields the URL."""

    async def discard(request: web.Request) -> web.Response:
        async for _ in request.content.iter_any():
            pass
        return web.Response()

    app = web.Application()
    app.router.add_post("/", discard)
    runner = web.AppRunner(app, access_log=None, auto_decompress=False, read_bufsize=READ_BYTES, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def serve_all(state_dir: Path) -> None:
    """Serve every arm until standard input ends; print the URLs."""
    async with AsyncExitStack() as stack:
        urls = {"plain": await stack.enter_async_context(plain_server())}
        for name, folder in (("coordinator", None), ("with state", state_dir)):
            urls[name] = (await stack.enter_async_context(serving(ServeSettings(RUN, TOKEN, state_dir=folder)))).url
        print(json.dumps(urls), flush=True)
        await asyncio.to_thread(sys.stdin.read)


@contextmanager
def server_process() -> Iterator[dict[str, str]]:
    """Run ``serve_all`` in a process of its own; yields the URLs by arm."""
    command = [sys.executable, "-m", "benchmarks.coordinator_throughput", "--serve"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait(30.0)


# The process that uploads


def block_of(num_bytes: int) -> dict[str, Tensor]:
    """Return parameters of about so many bytes, in the shapes of a block of four layers."""
    width = max(8, round((num_bytes / 4 / 4 / 12) ** 0.5))
    shapes = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    return {f"layers.{idx}.{name}": torch.randn(shape) for idx in range(4) for name, shape in shapes.items()}


def submission(version: int, tensors: dict[str, Tensor]) -> Submission:
    """Return an update of one step and one token."""
    return Submission(base_version=version, num_steps=1, num_tokens=1, tensors=tensors)


class CoordinatorArm:
    """Two workers of one block that submit in turn.

    Args:
        url: Of the coordinator.
        master: What the run begins with.
    """

    def __init__(self, url: str, master: dict[str, Tensor]) -> None:
        rules = RoundRules(deadline_s=600.0)
        terms = RunTerms(num_blocks=1, sync_every=1, rules=rules, outer=OuterSGD(), num_workers=NUM_WORKERS)
        self.lines = [HttpTransport(url, RUN, TOKEN) for _ in range(NUM_WORKERS)]
        self.lines[0].found(terms, {ENTRY: master})
        for worker_id, line in enumerate(self.lines):
            line.join(WorkerFacts(worker_id, 0))
        self._version = 0
        self._updates = [{name: tensor + torch.randn(()) for name, tensor in master.items()} for _ in self.lines]

    def run(self) -> float:
        """Let every worker submit once; return seconds per update."""
        start = time.perf_counter()
        for line, tensors in zip(self.lines, self._updates, strict=True):
            receipt = line.submit(ENTRY, submission(self._version, tensors))
            assert receipt.verdict is Verdict.ACCEPTED, receipt
        self._version += 1
        return (time.perf_counter() - start) / NUM_WORKERS

    def close(self) -> None:
        """Give the lines up."""
        for line in self.lines:
            line.close()


class PlainArm:
    """Uploads messages as plain bodies.

    Args:
        url: Of the plain server.
        message: The body.
    """

    def __init__(self, url: str, message: bytes) -> None:
        self._url = url
        self._message = memoryview(message)
        self._thread = LoopThread("plain-upload")
        self._session: aiohttp.ClientSession | None = None

    def run(self) -> float:
        """Upload as often as the other arms do; return seconds per upload."""
        start = time.perf_counter()
        for _ in range(NUM_WORKERS):
            self._thread.run(self._upload)
        return (time.perf_counter() - start) / NUM_WORKERS

    async def _upload(self) -> None:
        if self._session is None:
            self._session = aiohttp.ClientSession()

        async def pieces() -> AsyncIterator[memoryview]:
            for begin in range(0, len(self._message), PIECE_BYTES):
                yield self._message[begin : begin + PIECE_BYTES]

        headers = {"Content-Length": str(len(self._message))}
        async with self._session.post(self._url, data=pieces(), headers=headers) as answer:
            answer.raise_for_status()

    def close(self) -> None:
        """End the session and its thread."""

        async def end() -> None:
            if self._session is not None:
                await self._session.close()

        self._thread.close(end)


def measure(num_bytes: int, num_pairs: int) -> dict[str, Any]:
    """Return the pairs of plain and coordinator, and the runs with state between them."""
    torch.manual_seed(0)
    master = block_of(num_bytes)
    with server_process() as urls, ExitStack() as stack:
        ours, stored = (CoordinatorArm(urls[name], master) for name in ("coordinator", "with state"))
        message = _message_of(master)
        plain = PlainArm(urls["plain"], message)
        for arm in (ours, stored, plain):
            stack.callback(arm.close)
        stored_s: list[float] = []
        runs: list[Callable[[], float]] = [plain.run, ours.run, stored.run]
        for run in runs * WARMUP_RUNS:
            run()

        def ours_then_stored() -> float:
            seconds = ours.run()
            stored_s.append(stored.run())
            return seconds

        pairs = run_paired(plain.run, ours_then_stored, num_pairs)
    return {"message_bytes": len(message), "with_state_s": statistics.median(stored_s), **asdict(pairs)}


def _message_of(master: dict[str, Tensor]) -> bytes:
    outgoing = pack_submission(Sender(0, 0), submission(0, master))
    return b"".join(bytes(piece) for piece in outgoing.pieces())


def print_table(report: dict[str, Any]) -> None:
    """Print the throughputs."""
    message_mb = report["message_bytes"] / 1e6
    table = Table(title=f"uploads of {message_mb:.1f} MB on the loopback address, {report['num_pairs']} pairs")
    for column in ("arm", "ms per upload", "MB/s", "of plain"):
        table.add_column(column)
    rows = {"plain aiohttp": report["a_s"], "coordinator": report["b_s"], "with state": report["with_state_s"]}
    for name, seconds in rows.items():
        table.add_row(name, f"{1e3 * seconds:.1f}", f"{message_mb / seconds:.0f}", f"{report['a_s'] / seconds:.2f}")
    Console(width=100).print(table)
    interval = f"{report['low']:.2f} to {report['high']:.2f}"
    print(f"coordinator / plain {report['ratio']:.2f}, 95 % interval {interval}; target: at least {TARGET}")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and return the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small bodies and two pairs: shows that it runs")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of runs")
    parser.add_argument("--mb", type=float, default=53.0, help="megabytes of an update")
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        settle_process()
        with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
            asyncio.run(serve_all(Path(folder)))
        return {}
    if args.pairs < 1 or not 0 < args.mb <= 4096:
        got = f"pairs={args.pairs}, mb={args.mb}"
        parser.error(explain("pairs must be at least 1 and mb in (0, 4096]", got, "use the defaults"))
    megabytes, num_pairs = (2.0, 2) if args.quick else (args.mb, args.pairs)
    report = {
        "command": f"python -m benchmarks.coordinator_throughput --mb {megabytes:g} --pairs {num_pairs}",
        "target": TARGET,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "aiohttp": aiohttp.__version__,
        **measure(int(megabytes * 1e6), num_pairs),
    }
    print_table(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    main()
