"""Hosts of ``benchmarks.serving``: one process per block, each behind a relay that makes its line long."""

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.relay import Line, Relay
from lightning_blocktrain.callbacks.memory import tree_memory
from lightning_blocktrain.models.block_files import write_blocks
from lightning_blocktrain.models.loading import Model
from lightning_blocktrain.serving.address import Address
from lightning_blocktrain.serving.client import SweepClient
from lightning_blocktrain.serving.fleet import Patience
from lightning_blocktrain.transport.address import TOKEN

PATIENCE = Patience(connect_s=30.0, walk_s=60.0, position_s=1.0)


@dataclass
class Hosts:
    """Processes that serve the blocks of one model.

    Args:
        token: They take.
        relays: In front of each.
        processes: Of each.
    """

    token: str
    relays: list[Relay] = field(default_factory=list)
    processes: list["subprocess.Popen[str]"] = field(default_factory=list)

    @property
    def moved_bytes(self) -> int:
        """Bytes that have passed all lines."""
        return sum(relay.traffic["up"] + relay.traffic["down"] for relay in self.relays)

    @property
    def route(self) -> list[Address]:
        """Where the hosts are reached, through the relays."""
        return [Address(*relay.address) for relay in self.relays]

    def shape(self, rtt_ms: float) -> None:
        """Make every line so long."""
        line = Line(latency_ms=rtt_ms / 2)
        for relay in self.relays:
            relay.shape(line, line)

    def client(self, chained: bool = True, relayed: bool = True) -> SweepClient:
        """Return a client of these hosts; one that is not relayed has lines as short as they are."""
        route = self.route if relayed else [Address(*relay.target) for relay in self.relays]
        return SweepClient(route, self.token, "fp32", chained, PATIENCE)

    def pss_mib(self) -> list[float]:
        """Return the PSS of every process now, in MiB."""
        return [tree_memory(process.pid).total_bytes / 2**20 for process in self.processes]


@contextmanager
def hosts_of(model: Model, cut: Sequence[Sequence[int]], batch: int = 16) -> Iterator[Hosts]:
    """Serve a model from processes inside the block.

    Args:
        model: The model.
        cut: The blocks of every process.
        batch: Walks that a host runs at once.
    """
    hosts = Hosts(secrets.token_urlsafe(16))
    environment = {**os.environ, TOKEN: hosts.token, "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "blocks"
        write_blocks(model, folder)
        for blocks in cut:
            named = ",".join(map(str, blocks))
            command = [sys.executable, "-m", "lightning_blocktrain.cli", "serve", str(folder), "--blocks", named]
            command += ["--listen", "127.0.0.1:0", "--batch", str(batch), "--threads", "1"]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
            )
            stack.callback(_end, process)
            hosts.processes.append(process)
        for process in hosts.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"a host has ended with exit code {process.wait()}; its address was expected")
            address = Address.parse(line.rsplit(" ", 1)[1].strip())
            hosts.relays.append(stack.enter_context(Relay((address.host, address.port))))
        yield hosts


def _end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
