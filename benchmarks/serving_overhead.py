"""What serving costs where no distance is: TCP beside one process, the plan beside measurements, memory of a host."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from benchmarks.paired import run_paired
from benchmarks.serving_fleet import hosts_of
from lightning_blocktrain import DiffusionBlocks
from lightning_blocktrain.models.block_files import entries_of
from lightning_blocktrain.models.loading import Model
from lightning_blocktrain.rounds import INTERFACE
from lightning_blocktrain.serving.machine import measured_machine
from lightning_blocktrain.serving.plan import Network, ServedShape, plan


def overhead(
    repeats: int, width: int, num_layers: int, length: int, cut: Sequence[Sequence[int]], prompt_bytes: int
) -> dict[str, float]:
    """Return what serving costs without relays, untrained: beside one process (paired), beside the plan, in memory.

    Args:
        repeats: Pairs.
        width: D.
        num_layers: L, in three blocks.
        length: Bytes of the sweep.
        cut: The blocks of every host.
        prompt_bytes: Bytes before it.
    """
    torch.set_num_threads(1)
    heads = max(1, width // 64)
    model = DiffusionBlocks(num_layers, 3, width, heads, 2 * length, objective="denoise_features", p_span=0.5).eval()
    prompt = b"x" * prompt_bytes
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
    planned = plan(shape, machine, Network(), length, prompt_bytes)
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
