"""Do hosts of blocks stand many clients for long? Errors, growth of memory, and sessions that stay behind.

``python -m benchmarks.serving_soak [--clients 64] [--seconds 600] [--json FILE]``

Three processes serve an untrained model, one block each. Every client is a thread with connections of its own that
asks for one text after the other: of different lengths, byte by byte or in chunks, one in ten given up in mid-stream.
What is expected of a text is computed here once, so a wrong byte is an error. Memory is the PSS of the hosts, by the
minute; growth is the last value minus the one after a third of the time. ``--batch 1`` keeps walks apart: only then
are the bits of a text, and with them its bytes, sure not to depend on who else asks.
"""

import argparse
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.serving_fleet import Hosts, hosts_of
from lightning_blocktrain import DiffusionBlocks
from lightning_blocktrain.models.loading import Model
from lightning_blocktrain.serving.client import SweepClient

PROMPT = b"The time has come, "
GIVEN_UP = 0.1


@dataclass
class Found:
    """What a run found.

    Args:
        texts: Texts that came whole.
        given_up: Texts that were left in mid-stream.
        errors: By message.
        pss_mib: Of the largest host, by sample.
        growth_mib: Of it over the last two thirds.
        num_bytes: Bytes decided in texts that came whole.
    """

    texts: int = 0
    given_up: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    pss_mib: list[float] = field(default_factory=list)
    growth_mib: float = 0.0
    num_bytes: int = 0


def kinds(model: Model) -> list[tuple[dict[str, Any], bytes]]:
    """Return the kinds of texts, each with what it must be."""
    asked = [
        {"num_bytes": num_bytes, "chunk_bytes": chunk_bytes, "seed": seed}
        for seed, (num_bytes, chunk_bytes) in enumerate([(12, 1), (24, 8), (48, 16), (30, 30)])
    ]
    return [(one, model.generate(PROMPT, **one)) for one in asked]


Texts = Sequence[tuple[dict[str, Any], bytes]]
LOCK = threading.Lock()


def use(client: SweepClient, texts: Texts, seed: int, until: float, found: Found) -> None:
    """Ask for texts until the time is over."""
    chance = random.Random(seed)
    while time.monotonic() < until:
        asked, expected = chance.choice(list(texts))
        try:
            with closing(client.stream(PROMPT, **asked)) as chunks:
                if chance.random() < GIVEN_UP:
                    next(chunks)
                    with LOCK:
                        found.given_up += 1
                    continue
                text = b"".join(bytes(chunk.decided) for chunk in chunks)
            with LOCK:
                found.texts += 1
                found.num_bytes += len(text)
                if text != expected:
                    found.errors["a text differs"] += 1
        except Exception as exc:  # counted, whatever it is
            with LOCK:
                found.errors[f"{type(exc).__name__}: {exc}"[:200]] += 1


def soak(hosts: Hosts, model: Model, num_clients: int, seconds: float) -> Found:
    """Have clients use hosts for some time."""
    texts, found, clients = kinds(model), Found(), [hosts.client() for _ in range(num_clients)]
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=use, args=(client, texts, seed, until, found)) for seed, client in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    pause_s = min(60.0, seconds / 6)
    while any(thread.is_alive() for thread in threads):
        threads[0].join(pause_s)
        found.pss_mib.append(max(hosts.pss_mib()))
        for thread in threads if time.monotonic() >= until else ():
            thread.join()
    for client in clients:
        client.close()
    found.growth_mib = found.pss_mib[-1] - found.pss_mib[len(found.pss_mib) // 3]
    return found


def main(argv: Sequence[str] | None = None) -> Found:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--batch", type=int, default=1, help="walks that a host runs at once")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = DiffusionBlocks(3, 3, 64, 2, 64, objective="denoise_features", p_span=0.5).eval()
    with torch.no_grad():
        model.readout.unembed.weight.normal_(std=0.4)
    with hosts_of(model, [[0], [1], [2]], batch=args.batch) as hosts:
        found = soak(hosts, model, args.clients, args.seconds)
    print(f"{args.clients} clients, {args.seconds:.0f} s: {found.texts} texts, {found.given_up} given up, ", end="")
    print(f"{sum(found.errors.values())} errors {dict(found.errors)}")
    print(f"PSS of the largest host, MiB: {', '.join(f'{mib:.0f}' for mib in found.pss_mib)}")
    print(f"growth over the last two thirds: {found.growth_mib:+.1f} MiB")
    if args.json:
        args.json.write_text(json.dumps({"clients": args.clients, "seconds": args.seconds, **asdict(found)}) + "\n")
    return found


if __name__ == "__main__":
    main()
