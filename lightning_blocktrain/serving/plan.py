"""How much memory, how many bytes and how long: served blocks of a shape on given hosts, before anything is trained.

Pure arithmetic, for one request at a time; ``serving.machine`` measures how fast a host is.

A traversal of T new positions costs every host the larger of two times per layer, its FLOPs and the reading of its
weights, and every link half its RTT and its message's bytes. Plain decoding makes one traversal per byte with T = 1:
there the weights are read anew for every byte, and every byte waits for every link.
"""

from dataclasses import dataclass

from lightning_blocktrain.errors import explain
from lightning_blocktrain.models.transformer import VOCABULARY

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
GIVEN_LAYER_S, GIVEN_HOP_S = 1e-4, 1e-3
"""Assumed of a host that is described by its speeds alone: a dozen kernel launches a layer, and a walk's handling."""
MAX_WINDOW_BYTES = 2**20
MESSAGE_BYTES = 720
"""Of a walk's message beside its inputs and its state: header, names, digest."""
DECISION_BYTES = 5
"""Of a decided byte: itself and its probability."""


@dataclass(frozen=True)
class ServedShape:
    """What is served.

    Args:
        width: D.
        num_layers: L.
        num_blocks: B, a divisor of L; one host each.
        window_bytes: Longest window.
        dtype: Of the weights: ``fp32``, ``bf16`` or ``fp16``.
        wire: Of states between hosts: ``fp32`` or ``bf16``.
        denoises: Whether it is a DiffusionBlocks (``denoise_features``): the state then holds ``z`` too.

    Raises:
        ValueError: If a number is out of range.
    """

    width: int
    num_layers: int
    num_blocks: int
    window_bytes: int = 256
    dtype: str = "fp32"
    wire: str = "fp32"
    denoises: bool = True

    def __post_init__(self) -> None:
        numbers = {"width": self.width, "num_layers": self.num_layers, "num_blocks": self.num_blocks}
        if min(*numbers.values()) < 1 or not 1 <= self.window_bytes <= MAX_WINDOW_BYTES or self.width % 2:
            rule = (
                "num_layers and num_blocks must be at least 1, width an even number from 2 on, and window_bytes in "
                f"1 .. {MAX_WINDOW_BYTES}"
            )
            got = ", ".join(f"{name}={value}" for name, value in numbers.items())
            raise ValueError(explain(rule, f"{got}, window_bytes={self.window_bytes}", "correct them"))
        if self.num_layers % self.num_blocks:
            got = f"num_blocks={self.num_blocks}, num_layers={self.num_layers}"
            raise ValueError(explain("num_blocks must divide num_layers", got, "change one of them"))
        if self.dtype not in DTYPE_BYTES or self.wire not in ("fp32", "bf16"):
            rule = f"dtype must be one of {', '.join(DTYPE_BYTES)}, and wire fp32 or bf16"
            raise ValueError(explain(rule, f"dtype={self.dtype!r}, wire={self.wire!r}", "choose from these"))

    @property
    def layers_per_block(self) -> int:
        """L / B."""
        return self.num_layers // self.num_blocks

    @property
    def layer_parameters(self) -> int:
        """Of one layer: ``12 D^2 + 13 D``."""
        return 12 * self.width**2 + 13 * self.width

    @property
    def interface_parameters(self) -> int:
        """Of what stands beside the layers, all of it."""
        D = self.width
        readout, embedding = (VOCABULARY + 2) * D, (VOCABULARY + 1) * D
        if not self.denoises:
            return readout + embedding - D  # no row for unknown bytes
        noise = (32 * D + D) + (D * D + D)  # embedding of the noise level
        return readout + embedding + 2 * D + VOCABULARY * D + D * D + 2 * D + D + noise

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return self.num_layers * self.layer_parameters + self.interface_parameters

    def host_bytes(self, sessions: int = 1) -> int:
        """Return the bytes of weights and of keys and values on one host.

        Args:
            sessions: Texts at once.
        """
        weights = self.layers_per_block * self.layer_parameters + self.interface_parameters
        cached = sessions * self.layers_per_block * 2 * self.window_bytes * self.width
        return (weights + cached) * DTYPE_BYTES[self.dtype]

    def state_bytes(self, positions: int) -> int:
        """Return the bytes of a walk's message between two hosts."""
        tensors = 2 if self.denoises else 1
        return MESSAGE_BYTES + positions * (2 + tensors * self.width * DTYPE_BYTES[self.wire])

    def walk_bytes(self, positions: int, num_read: int) -> int:
        """Return the bytes that one traversal moves over all links."""
        ends = 2 * MESSAGE_BYTES + 2 * positions + DECISION_BYTES * num_read
        return (self.num_blocks - 1) * self.state_bytes(positions) + ends


@dataclass(frozen=True)
class Machine:
    """How fast a host computes.

    Args:
        flops_per_s: Of matrix products over many positions.
        bytes_per_s: Of weights that are read for one position.
        layer_s: Of a layer beside these: the calls of its operations.
        hop_s: Of every link without delay: to write, send, check and read a walk, and to hand it to a thread.
        block_s: Of a block beside its layers: to embed bytes and noise, and to read out.
        position_s: Of every position of a walk beside its layers: its random numbers, and the choice of a byte.
    """

    flops_per_s: float
    bytes_per_s: float
    layer_s: float
    hop_s: float
    block_s: float = 0.0
    position_s: float = 0.0

    def layer_seconds(self, shape: ServedShape, positions: int, context: int) -> float:
        """Return the seconds of one layer over new positions after a context."""
        attention = 4 * positions * (context + positions / 2) * shape.width
        flops = 2 * positions * shape.layer_parameters + attention
        reading = shape.layer_parameters * DTYPE_BYTES[shape.dtype]
        return self.layer_s + max(flops / self.flops_per_s, reading / self.bytes_per_s)


@dataclass(frozen=True)
class Network:
    """The links between client and hosts, all alike.

    Args:
        rtt_s: Of every link.
        bytes_per_s: Of every link.
    """

    rtt_s: float = 0.0
    bytes_per_s: float = float("inf")


@dataclass(frozen=True)
class Plan:
    """What to expect of a shape.

    Args:
        host_bytes: Weights, keys and values on each host.
        sweep_bytes: Moved by one sweep over the whole output.
        sweep_s: Of the output in one sweep, the prompt included.
        plain_s: Of the output byte by byte.
        plain_bytes: Moved by it.
    """

    host_bytes: int
    sweep_bytes: int
    sweep_s: float
    plain_s: float
    plain_bytes: int


def walk_seconds(
    shape: ServedShape, machine: Machine, network: Network, positions: int, num_read: int, context: int = 0
) -> float:
    """Return the seconds of one traversal, from the client through all hosts and back.

    Args:
        shape: What is served.
        machine: The hosts.
        network: The links.
        positions: New ones.
        num_read: Of them, those that decide a byte.
        context: Positions before them whose keys and values are there.
    """
    computing = shape.num_layers * machine.layer_seconds(shape, positions, context) + shape.num_blocks * machine.block_s
    # A block that denoises reads out at every level; others only at the exit.
    read = num_read + (shape.num_blocks - 1) * positions * shape.denoises
    computing += 2 * read * VOCABULARY * shape.width / machine.flops_per_s
    links = shape.num_blocks + 1
    moving = links * (network.rtt_s / 2 + machine.hop_s) + shape.walk_bytes(positions, num_read) / network.bytes_per_s
    return computing + positions * machine.position_s + moving


def plan(
    shape: ServedShape, machine: Machine, network: Network, output_bytes: int, prompt_bytes: int = 32, sessions: int = 1
) -> Plan:
    """Return what to expect of an output after a prompt, in one sweep and byte by byte.

    Raises:
        ValueError: If the output does not fit into the window.
    """
    positions = prompt_bytes + output_bytes - 1
    if min(output_bytes, prompt_bytes) < 1 or positions > shape.window_bytes:
        rule = "prompt and output must be at least a byte each, and fit into the window together"
        got = f"prompt_bytes={prompt_bytes}, output_bytes={output_bytes}, window_bytes={shape.window_bytes}"
        raise ValueError(explain(rule, got, "shorten them, or plan a longer window"))
    sweep_s = walk_seconds(shape, machine, network, positions, output_bytes)
    plain_s = walk_seconds(shape, machine, network, prompt_bytes, 1)
    plain_bytes = shape.walk_bytes(prompt_bytes, 1) + (output_bytes - 1) * shape.walk_bytes(1, 1)
    for idx in range(1, output_bytes):
        plain_s += walk_seconds(shape, machine, network, 1, 1, prompt_bytes + idx - 1)
    return Plan(shape.host_bytes(sessions), shape.walk_bytes(positions, output_bytes), sweep_s, plain_s, plain_bytes)
