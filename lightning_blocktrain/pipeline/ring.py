"""A ring of preallocated shared tensors between one process that writes and one that reads.

A message is a header, which travels through a pipe, and tensors, which lie in one slot of shared memory. No tensor is
pickled, unless it hides in an object of the user's own class.

Memory map: ``num_slots`` cells of ``slot_bytes`` bytes; in a cell the tensors of one message lie one after the other,
each at a multiple of 64 bytes.

| state of a slot | who may touch it | how it changes |
|---|---|---|
| free | the writer | ``free`` semaphore taken: being written |
| being written | the writer | header sent: full |
| full | the reader | tensors copied out, ``free`` released: free |

Covered: a full ring (the writer waits), a reader or writer that dies (end of file on the pipe), a lost or repeated
message (sequence numbers), a message that does not fit (refused before anything is written). Not covered: several
writers or readers, machines that do not share memory.
"""

import math
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_blocktrain.errors import explain
from lightning_blocktrain.pipeline.base import POLL_S
from lightning_blocktrain.pipeline.worker import Stopped

ALIGNMENT = 64


@dataclass(frozen=True)
class Cell:
    """Where a tensor lies in a slot.

    Args:
        offset: Its first byte.
        dtype: Its type.
        shape: Its shape.
    """

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def _aligned(num_bytes: int) -> int:
    return math.ceil(num_bytes / ALIGNMENT) * ALIGNMENT


def shared_bytes(*shape: int) -> Tensor:
    """Return uninitialised shared memory, uint8, of a shape."""
    return torch.empty(shape, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call,no-any-return]


def payload_bytes(message: Any) -> int:
    """Return the bytes of shared memory that the tensors of ``message`` take."""
    sizes: list[int] = []
    apply_to_collection(
        message, Tensor, lambda t: sizes.append(_aligned(t.numel() * t.element_size())), allow_frozen=True
    )
    return sum(sizes)


def pack(message: Any) -> Any:
    """Return ``message`` with its tensors copied into one piece of shared memory, which travels as one descriptor."""
    arena = shared_bytes(max(ALIGNMENT, payload_bytes(message)))
    return apply_to_collection(_store(message, arena), Cell, lambda cell: _view(arena, cell), allow_frozen=True)


def make_ring(context: Any, num_slots: int, slot_bytes: int, stop: Any) -> tuple["RingWriter", "RingReader"]:
    """Allocate a ring and return its two ends.

    Args:
        context: The multiprocessing context.
        num_slots: Messages it holds.
        slot_bytes: Bytes of the largest message.
        stop: Has ``is_set()``, true when the pipeline is taken down.
    """
    slots = shared_bytes(num_slots, max(ALIGNMENT, _aligned(slot_bytes)))
    reader, writer = context.Pipe(duplex=False)
    free = context.Semaphore(num_slots)
    return RingWriter(slots, free, writer, stop), RingReader(slots, free, reader, stop)


class RingWriter:
    """The writing end.

    Args:
        slots: Shared memory, uint8, (num_slots, slot_bytes).
        free: Semaphore of free slots.
        pipe: Takes the headers.
        stop: Has ``is_set()``, true when the pipeline is taken down.
    """

    def __init__(self, slots: Tensor, free: Any, pipe: Connection, stop: Any) -> None:
        self._slots, self._free, self._pipe, self._stop = slots, free, pipe, stop
        self._num_sent = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest message."""
        return self._slots.shape[1]

    def close(self) -> None:
        """Close this process's copy of the end."""
        self._pipe.close()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Take a free slot; return False after ``timeout_s`` without one (None: never).

        Raises:
            Stopped: If the pipeline is taken down meanwhile.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._free.acquire(timeout=min(POLL_S, max(0.0, deadline - time.monotonic()))):
            if self._stop.is_set():
                raise Stopped
            if time.monotonic() >= deadline:
                return False
        return True

    def write(self, message: Any) -> None:
        """Copy a message into the slot that ``wait`` took, and send it off.

        Raises:
            ValueError: If its tensors do not fit.
            Stopped: If the reader is gone.
        """
        needed = payload_bytes(message)
        if needed > self.slot_bytes:
            rule = "a message must fit into a slot of the ring"
            raise ValueError(explain(rule, f"{needed} bytes, slots of {self.slot_bytes}", "make the ring for it"))
        header = _store(message, self._slots[self._num_sent % len(self._slots)])
        try:
            self._pipe.send((self._num_sent, header))
        except OSError as exc:
            raise Stopped from exc
        self._num_sent += 1


class RingReader:
    """The reading end.

    Args:
        slots: Shared memory, uint8, (num_slots, slot_bytes).
        free: Semaphore of free slots.
        pipe: Gives the headers.
        stop: Has ``is_set()``, true when the pipeline is taken down.
    """

    def __init__(self, slots: Tensor, free: Any, pipe: Connection, stop: Any) -> None:
        self._slots, self._free, self._pipe, self._stop = slots, free, pipe, stop
        self._num_received = 0

    def close(self) -> None:
        """Close this process's copy of the end."""
        self._pipe.close()

    def wait(self) -> None:
        """Wait for a message.

        Raises:
            Stopped: If the pipeline is taken down meanwhile.
        """
        while not self._stop.is_set():
            if self._pipe.poll(POLL_S):
                return
        raise Stopped

    def read(self) -> Any:
        """Return the message that ``wait`` saw, its tensors copied out, and free its slot.

        Raises:
            Stopped: If the writer is gone.
            RuntimeError: If it is not the message after the last one.
        """
        try:
            number, header = self._pipe.recv()
        except (EOFError, OSError) as exc:
            raise Stopped from exc
        if number != self._num_received:
            raise RuntimeError(f"message {number} came out of a ring that owed message {self._num_received}")
        slot = self._slots[number % len(self._slots)]
        message = apply_to_collection(header, Cell, lambda cell: _view(slot, cell).clone(), allow_frozen=True)
        self._num_received += 1
        self._free.release()
        return message


class StopFlag:
    """True when the pipeline is taken down, or the driver's process is gone.

    A byte without a lock: a stage that is killed while it looks can hold nothing that the driver waits for.
    """

    def __init__(self) -> None:
        self._flag: Tensor = pack(torch.zeros(1, dtype=torch.uint8))

    def set(self) -> None:
        """Ask every stage to end."""
        self._flag.fill_(1)

    def is_set(self) -> bool:
        """Return whether to give up waiting."""
        parent = multiprocessing.parent_process()
        return bool(self._flag) or (parent is not None and not parent.is_alive())


def _store(message: Any, memory: Tensor) -> Any:
    """Copy the tensors of ``message`` into ``memory``, uint8; return it with their places instead of them."""
    offset = 0

    def store(tensor: Tensor) -> Cell:
        nonlocal offset
        cell = Cell(offset, tensor.dtype, tuple(tensor.shape))
        _view(memory, cell).copy_(tensor.detach())
        offset += _aligned(tensor.numel() * tensor.element_size())
        return cell

    return apply_to_collection(message, Tensor, store, allow_frozen=True)


def _view(slot: Tensor, cell: Cell) -> Tensor:
    num_bytes = math.prod(cell.shape) * torch.empty((), dtype=cell.dtype).element_size()
    return slot[cell.offset : cell.offset + num_bytes].view(cell.dtype).view(cell.shape)
