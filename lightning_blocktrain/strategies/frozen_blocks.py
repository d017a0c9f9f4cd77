"""The blocks around a worker's own, which its loss runs and does not train: kept encoded, lent while the worker acts.

Owns the copies, their versions, and the hooks that lend them to the module. Owns neither the moment when they are
fetched nor what carries them.

While a worker acts, a parameter of its prefix is NaN (``released``) outside the calls of its layer, so that one layer
at a time is wide. The stem is a layer like the others. Blocks after the worker's own (``lookahead``) are wide for as
long as it acts, since the backward pass reads them too. Buffers are lent as copies for as long, since batch norm writes
to them.

Bytes per value: 2 in bf16, 1 + 4 / 256 in int8, 4 in fp32; 8 more for those of one layer of the prefix while they are
decoded, of which 4 stay while it runs; 4 more for the blocks after the worker's own.

Covered: layers that are called many times, raise, call each other, are compiled, or whose submodules are called on
their own. Not covered: code that reads a parameter of the prefix without calling its module; it reads NaN.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lightning_blocktrain.partition import Partition
from lightning_blocktrain.rounds.codecs import Codec, Encoded
from lightning_blocktrain.rounds.values import decode_values, encode_values, zeros_like
from lightning_blocktrain.strategies.released import nothing_like


@dataclass
class FrozenWork:
    """What the forward passes of frozen layers have cost.

    Args:
        layer_tokens: Target tokens of the batches, once for every call of a frozen layer; stem and heads are none.
        seconds: In frozen layers, stem and heads, decoding of the prefix included; on an accelerator, until their work
            is queued.
        num_hits: Batches of which no frozen layer had to run, since their features were on disk.
    """

    layer_tokens: int = 0
    seconds: float = 0.0
    num_hits: int = 0


@dataclass(eq=False)
class _Copy:
    """A block as it was fetched: per tensor, a message of its own."""

    version: int
    codec: Codec
    messages: dict[str, Encoded] = field(repr=False)

    @cached_property
    def digest(self) -> str:
        found = hashlib.blake2b(repr(self.codec.meta).encode(), digest_size=16)
        for message in self.messages.values():
            for key, part in message.tensors.items():
                found.update(f"{key} {tuple(part.shape)} {part.dtype}".encode())
                found.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()


@dataclass(eq=False)
class _Part:
    """A layer, or a module inside it: what its calls need, and how many are under way."""

    block_idx: int
    names: tuple[str, ...]
    is_layer: bool
    num_running: int = 0


class FrozenBlocks:
    """Copies of the blocks before and after a worker's own, in encoded form.

    Args:
        partition: Of the module.
        tensors: Its trained tensors by name.
        blocks: Which blocks some worker of this process reads.
    """

    def __init__(self, partition: Partition, tensors: Mapping[str, Tensor], blocks: Collection[int]) -> None:
        self._partition = partition
        self.work = FrozenWork()
        """What was done so far; whoever counts it may replace it."""
        self.batch_tokens = 0
        """Target tokens of the batch that is being trained on."""
        self._blocks = {b: {n: tensors[n] for n in partition.block_names[b] if n in tensors} for b in sorted(blocks)}
        self._tensors = {name: tensor for block in self._blocks.values() for name, tensor in block.items()}
        self._copies: dict[int, _Copy] = {}
        self._before: Collection[int] = ()
        self._after: Collection[int] = ()
        self._wide: Counter[str] = Counter()
        self._began_at = 0.0
        self._num_running = 0
        self._parts: list[_Part] = []
        self._handles: list[Any] = []
        for block_idx in self._blocks:
            for layer in partition.blocks[block_idx]:
                self._watch(layer, block_idx, any(layer is known for known in partition.layout.layers))

    def _watch(self, layer: nn.Module, block_idx: int, counts: bool) -> None:
        names = {id(tensor): name for name, tensor in self._blocks[block_idx].items()}
        for module in parts_of(layer):
            inside = tuple(names[id(p)] for p in module.parameters() if id(p) in names)
            part = _Part(block_idx, inside, counts and module is layer)
            before, after = self._hooks(part)
            if is_compiled(module):
                before, after = map(torch.compiler.disable, (before, after))
            self._parts.append(part)
            self._handles.append(module.register_forward_pre_hook(before))
            self._handles.append(module.register_forward_hook(after, always_call=True))

    def _hooks(self, part: _Part) -> tuple[Any, Any]:
        def before(module: nn.Module, args: Any) -> None:
            if part.block_idx in self._before or part.block_idx in self._after:
                self._enter(part)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if part.num_running:  # a hook before ours may have raised
                self._leave(part)

        return before, after

    def remove(self) -> None:
        """Take the hooks off the layers; any number of times."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # Copies

    @property
    def versions(self) -> dict[int, int]:
        """Version of each block that there is a copy of."""
        return {block_idx: copy.version for block_idx, copy in self._copies.items()}

    @property
    def mem_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(map(self.bytes_of, self._copies))

    def bytes_of(self, block_idx: int) -> int:
        """Return the bytes of a block's copy."""
        messages = self._copies[block_idx].messages.values()
        return sum(part.numel() * part.element_size() for message in messages for part in message.tensors.values())

    def digest(self, block_idx: int) -> str:
        """Return a digest of the copies of the blocks before a block, and of which block that is."""
        copies = "".join(self._copies[idx].digest for idx in range(block_idx))
        return hashlib.blake2b(f"{block_idx} {copies}".encode(), digest_size=16).hexdigest()

    def take(self, block_idx: int, version: int, codec: Codec, message: Encoded) -> None:
        """Read a newer version of a block from now on; while no worker acts.

        Args:
            block_idx: Of the block.
            version: Of the message.
            codec: Of the message, with the names that travel as they are.
            message: What ``encode_values`` gave, not to be written to later; without a tensor, the block is as before.

        Raises:
            ValueError: If the message does not fit the block.
        """
        if not message.tensors and block_idx in self._copies:
            self._copies[block_idx].version = version
            return
        block = self._blocks[block_idx]
        parts = codec.parts_of(message, zeros_like(block))
        messages = {
            name: Encoded({f"{part}:{name}": t.to(block[name].device) for part, t in found.items()}, codec.meta)
            for name, found in parts.items()
        }
        self._copies[block_idx] = _Copy(version, codec, messages)

    def take_values(self, block_idx: int, version: int, codec: Codec, values: Mapping[str, Tensor]) -> None:
        """Read a newer version of a block, as it would have come from a coordinator.

        Args:
            block_idx: Of the block.
            version: Of the values.
            codec: How they would have travelled.
            values: By name, floating tensors in fp32.
        """
        self.take(block_idx, version, codec, encode_values(codec, values))

    def state_dict(self) -> dict[str, Any]:
        """Return the copies; tensors, dicts, lists, str and int only."""
        return {str(block_idx): _state_of(copy) for block_idx, copy in self._copies.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the copies that ``state_dict`` returned, of the blocks that are read here.

        Raises:
            ValueError: If they do not fit.
        """
        for key, kept in state.items():
            if int(key) in self._blocks:
                codec = replace(Codec.from_meta(kept["codec"]), spared=tuple(kept["spared"]))
                self.take(int(key), kept["version"], codec, Encoded(dict(kept["tensors"]), codec.meta))

    # Lending

    @contextmanager
    def lent(self, block_idx: int) -> Iterator[None]:
        """Lend what block ``block_idx`` reads to the module; whoever calls it puts the module's own tensors back."""
        before, after = self._partition.blocks_before(block_idx), self._partition.blocks_after(block_idx)
        buffers = {}
        try:
            for idx in (*before, *after):
                for name, tensor in self._blocks[idx].items():
                    if not isinstance(tensor, nn.Parameter):
                        buffers[name] = tensor.data
                        tensor.data = self._decoded(idx, name, copy=True)
                    elif idx in after:
                        tensor.data = self._decoded(idx, name, copy=True)  # what a step writes there ends with it
                        self._wide[name] += 1
                    else:
                        tensor.data = nothing_like(tensor)
            self._before, self._after = before, after
            yield
        finally:
            self._before = self._after = ()
            self._num_running = 0
            for part in self._parts:
                part.num_running = 0
            for name in self._wide:
                self._tensors[name].data = nothing_like(self._tensors[name])
            self._wide.clear()
            for name, data in buffers.items():
                self._tensors[name].data = data

    def _enter(self, part: _Part) -> None:
        if not self._num_running:
            self._began_at = time.perf_counter()
        if part.is_layer:
            self.work.layer_tokens += self.batch_tokens
        for name in part.names:
            if not self._wide[name]:
                self._tensors[name].data = self._decoded(part.block_idx, name)
            self._wide[name] += 1
        part.num_running += 1
        self._num_running += 1

    def _leave(self, part: _Part) -> None:
        part.num_running -= 1
        self._num_running -= 1
        for name in part.names:
            self._wide[name] -= 1
            if not self._wide[name]:
                del self._wide[name]
                self._tensors[name].data = nothing_like(self._tensors[name])
        if not self._num_running:
            self.work.seconds += time.perf_counter() - self._began_at

    def _decoded(self, block_idx: int, name: str, copy: bool = False) -> Tensor:
        kept, tensor = self._copies[block_idx], self._tensors[name]
        return decode_values(kept.codec, kept.messages[name], {name: tensor})[name].to(tensor.dtype, copy=copy)


def parts_of(layer: nn.Module) -> list[nn.Module]:
    """Return a layer and its submodules; a compiled layer alone, since hooks inside it would compile it again."""
    return [layer] if is_compiled(layer) else list(layer.modules())


def is_compiled(module: nn.Module) -> bool:
    """Tell whether a module was wrapped by ``torch.compile`` or compiled in place."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _state_of(copy: _Copy) -> dict[str, Any]:
    tensors = {key: tensor for message in copy.messages.values() for key, tensor in message.tensors.items()}
    spared = [name for name in copy.codec.spared if name in copy.messages]
    return {"version": copy.version, "codec": copy.codec.meta, "spared": spared, "tensors": tensors}
