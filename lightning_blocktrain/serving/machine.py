"""How fast this machine is as a host of blocks: what ``serving.plan`` predicts from.

Owns the timings. They are those of a host at work: one that waits for others between two walks.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_blocktrain.models import DiffusionBlocks
from lightning_blocktrain.models.block_files import DTYPES, describe, entries_of
from lightning_blocktrain.models.generation import Sampling, Walk
from lightning_blocktrain.models.transformer import KeyValueCache, Layer
from lightning_blocktrain.serving.block_host import BlockHost
from lightning_blocktrain.serving.block_server import BlockServer
from lightning_blocktrain.serving.client import SweepClient
from lightning_blocktrain.serving.plan import DTYPE_BYTES, Machine, ServedShape
from lightning_blocktrain.transport.loop import LoopThread

MANY_BLOCKS = 4
"""Of the tiny model that tells what a block costs."""
PAUSE_S = 0.01
"""Of a host between two walks, while others compute: a core that was idle computes more slowly at first."""


@torch.inference_mode()
def measured_machine(width: int = 512, positions: int = 128, dtype: str = "fp32", repeats: int = 15) -> Machine:
    """Return how fast this machine is with the threads that torch has now; takes a few seconds.

    Args:
        width: Of the layers that are timed: those that are to be served, or 512.
        positions: Of a sweep.
        dtype: ``fp32`` or ``bf16``.
        repeats: Of every timing; the median counts.
    """
    torch_dtype = DTYPES[dtype]
    shape = ServedShape(width, 1, 1, dtype=dtype)
    # More layers than caches hold, so that weights are read from memory as they are in a host of many layers.
    num_layers = max(2, min(16, 2**28 // (shape.layer_parameters * DTYPE_BYTES[dtype])))
    heads = width // 64 if width % 128 == 0 else 1
    layers = [Layer(width, heads).to(torch_dtype) for _ in range(num_layers)]
    tiny = [Layer(32, 1).to(torch_dtype) for _ in range(num_layers)]

    def seconds(stack: list[Layer], context: int, length: int, size: int) -> float:
        hidden = torch.zeros(1, length, size, dtype=torch_dtype)
        caches = [KeyValueCache(context + length) for _ in stack]
        for layer, cache in zip(stack, caches, strict=True):
            layer(torch.zeros(1, context, size, dtype=torch_dtype), cache)

        def through() -> None:
            found = hidden
            for layer, cache in zip(stack, caches, strict=True):
                cache.rewind(context)
                found = layer(found, cache)

        return median_seconds(through, repeats) / len(stack)

    # Bytes one by one are decided after a context, of which the keys and values are kept: an output's, on average.
    context = max(1, positions // 2)
    layer_s = seconds(tiny, context, 1, 32)
    many, one = (
        # Where a layer is so small that its calls are all there is, what is left says nothing: a tenth, then.
        max(total - layer_s, total / 10)
        for total in (seconds(layers, 0, positions, width), seconds(layers, context, 1, width))
    )
    flops = 2 * positions * shape.layer_parameters + 2 * positions**2 * width
    reading = shape.layer_parameters * DTYPE_BYTES[dtype]
    walks = measured_walks(positions, layer_s, repeats)
    return Machine(flops / many, reading / one, layer_s, *walks)


def measured_walks(positions: int, layer_s: float, repeats: int) -> tuple[float, float, float]:
    """Return ``hop_s``, ``block_s`` and ``position_s``: of walks through hosts whose layers are tiny.

    Args:
        positions: Of the longer walks.
        layer_s: Of such a layer.
        repeats: Of every timing.
    """
    one, more = (_walk_seconds(num_blocks, 1, repeats) for num_blocks in (1, MANY_BLOCKS))
    longer = _walk_seconds(1, max(2, positions), repeats)
    block_s = max(0.0, (more - one) / (MANY_BLOCKS - 1) - layer_s)
    hop_s = max(0.0, (one - block_s - layer_s) / 2)
    return hop_s, block_s, max(0.0, longer - one) / (max(2, positions) - 1)


def _walk_seconds(num_blocks: int, positions: int, repeats: int) -> float:
    """Return the seconds of a walk through all blocks of a tiny model, served by this process."""
    window_bytes = max(2, positions)
    model: Any = DiffusionBlocks(num_blocks, num_blocks, 32, 1, window_bytes, objective="denoise_features", p_span=0.5)
    blocks = list(range(num_blocks))
    server = BlockServer(BlockHost(model.eval(), describe(model, entries_of(model)), blocks), "")
    loop = LoopThread("blocktrain-plan")
    loop.run(server.start)
    assert server.address is not None
    try:
        with SweepClient([server.address], "") as client, client.walker() as walker:
            walk = Walk(0, (0,) * positions, 0, positions, Sampling())
            return median_seconds(lambda: walker(walk), repeats)
    finally:
        loop.run(server.stop)
        loop.close()


def median_seconds(work: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of some runs, after one that is not timed, each after a pause as a host makes it."""
    work()
    times = []
    for _ in range(repeats):
        time.sleep(PAUSE_S)
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
