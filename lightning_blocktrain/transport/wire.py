"""One message with tensors as bytes: a frame with a JSON header, a safetensors body and a SHA-256.

Owns the byte format and the checks on bytes that come from strangers. Owns no socket and no file name. Nothing here
unpickles, decompresses, or allocates by what a message claims: the claims are held against the limits first, and the
tensors that ``read_frame`` returns are views of the bytes that have arrived.

Byte map, integers little-endian::

    0                4   magic, "BTF1"
    4                4   header_bytes, a multiple of 8
    8                8   body_bytes
    16               header_bytes   JSON object, padded with spaces
    16+header_bytes  body_bytes     safetensors: u64 length, JSON header padded to 8, tensors without a gap
    ...              32  SHA-256 of everything before

Memory: writing holds one piece (and one tensor where that is not contiguous in CPU memory); receiving holds one piece
beside the file that it writes to; reading holds the two JSON headers.

Covered: cut, damaged, overlong and forged messages, tensors that overlap, leave a gap or claim what is not there,
names that could be paths. Not covered: who sent it (that is the token's business), and values of tensors.
"""

import hashlib
import json
import math
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from lightning_blocktrain.errors import WireError, explain
from lightning_blocktrain.rounds import INTERFACE
from lightning_blocktrain.transport.terms import RunTerms

MAGIC = b"BTF1"
PREFIX = struct.Struct("<4sIQ")
LENGTH = struct.Struct("<Q")
DIGEST_BYTES = 32
ALIGNMENT = 8
PIECE_BYTES = 2**20
"""Most bytes of a tensor that one piece holds."""
MAX_HEADER_BYTES = 2**20
MAX_TENSOR_HEADER_BYTES = 2**23
RESERVED_NAME = "__metadata__"
"""What safetensors keeps for itself."""
MAX_NAME_CHARS = 512
MAX_DIMS = 16

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Piece = bytes | memoryview


class Writable(Protocol):
    """Something to write pieces to, such as a binary file."""

    def write(self, piece: Piece, /) -> object:
        """Take one piece."""
        ...


@dataclass(frozen=True, eq=False)
class Frame:
    """A message: a JSON object and tensors by name."""

    header: dict[str, Any]
    tensors: dict[str, Tensor] = field(repr=False)


class Slot(NamedTuple):
    """Where a tensor lies in the data of a body."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def refuse_name(name: object) -> None:
    """Refuse a tensor name that cannot travel: empty, long, unprintable, or such that it could be taken for a path.

    Raises:
        WireError: Naming it.
    """
    fits = isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()
    if not isinstance(name, str) or not fits or "/" in name or "\\" in name or ".." in name or name == RESERVED_NAME:
        rule = (
            f"a tensor name must be printable, of 1 to {MAX_NAME_CHARS} characters, without / or \\ or .., "
            f"and not {RESERVED_NAME}"
        )
        raise WireError(explain(rule, f"name={name!r:.80}", "rename the submodule"))


def check_masters(
    terms: RunTerms, masters: Mapping[str, Mapping[str, Tensor]], serves: Collection[str] | None = None
) -> None:
    """Refuse masters that do not fit the terms of a run, or could not travel.

    Args:
        terms: Of the run.
        masters: Tensors by entry and name.
        serves: The entries of the coordinator that they are for; None: all.

    Raises:
        ValueError: If an entry is missing or unknown, or a tensor's name cannot travel.
    """
    if serves is not None:
        _check_part(terms, set(masters), set(serves))
    elif set(masters) != set(terms.entries(INTERFACE in masters)):
        rule = f"masters must hold block0 to block{terms.num_blocks - 1}, and at most interface beside them"
        raise ValueError(explain(rule, f"entries={sorted(masters)}", "name the entries with block_entry"))
    for tensors in masters.values():
        for name in tensors:
            refuse_name(name)


def _check_part(terms: RunTerms, entries: set[str], serves: set[str]) -> None:
    unknown = sorted(serves - set(terms.entries(True)))
    if unknown:
        rule = f"a coordinator must serve entries of the run, block0 to block{terms.num_blocks - 1} and interface"
        raise ValueError(explain(rule, f"serves={sorted(serves)}", f"leave {unknown} out"))
    if not entries or not serves - {INTERFACE} <= entries <= serves:  # a run may have no interface
        rule = f"masters must hold what this coordinator serves, {sorted(serves)}"
        raise ValueError(explain(rule, f"entries={sorted(entries)}", "name all coordinators of the run"))


# Writing


class Outgoing:
    """A message ready to be written, once or many times; its tensors must not change meanwhile.

    Args:
        header: A JSON object.
        tensors: Dense tensors by name, on any device.

    Raises:
        WireError: If a name or a dtype cannot travel, or the header is too long.
    """

    def __init__(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
        text = _padded(json.dumps(dict(header), separators=(",", ":"), allow_nan=False).encode())
        if len(text) > MAX_HEADER_BYTES:
            got = f"header_bytes={len(text)}"
            raise WireError(explain(f"a header must be at most {MAX_HEADER_BYTES} bytes", got, "send less beside it"))
        slots, num_data_bytes = _tensor_slots(self._ordered)
        body_head = LENGTH.pack(len(slots)) + slots
        body_bytes = len(body_head) + num_data_bytes
        self._head = PREFIX.pack(MAGIC, len(text), body_bytes) + text + body_head
        self.num_bytes = PREFIX.size + len(text) + body_bytes + DIGEST_BYTES
        """Length of the whole message."""

    def pieces(self) -> Iterator[Piece]:
        """Yield the message in pieces of at most ``PIECE_BYTES`` (the first, with the headers, may be longer)."""
        digest = hashlib.sha256(self._head)
        yield self._head
        for _, tensor in self._ordered:
            for piece in _tensor_pieces(tensor):
                digest.update(piece)
                yield piece
        yield digest.digest()


def _padded(text: bytes) -> bytes:
    return text + b" " * (-len(text) % ALIGNMENT)


def _tensor_slots(ordered: Iterable[tuple[str, Tensor]]) -> tuple[bytes, int]:
    slots: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        refuse_name(name)
        if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided or tensor.is_meta:
            got = f"name={name}, dtype={tensor.dtype}, layout={tensor.layout}"
            raise WireError(explain("tensors must be dense and of a common dtype", got, "leave that tensor out"))
        begin, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        slots[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = _padded(json.dumps(slots, separators=(",", ":")).encode())
    if len(text) > MAX_TENSOR_HEADER_BYTES:
        rule = f"the names and shapes must take at most {MAX_TENSOR_HEADER_BYTES} bytes"
        raise WireError(explain(rule, f"{len(text)} bytes for {len(slots)} tensors", "merge small tensors"))
    return text, end


def _tensor_pieces(tensor: Tensor) -> Iterator[memoryview]:
    if tensor.numel() == 0:
        return
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    view = memoryview(flat.numpy().data)
    for begin in range(0, len(view), PIECE_BYTES):
        yield view[begin : begin + PIECE_BYTES]


# Receiving


class Receiver:
    """Writes an arriving message to a file, and stops at the first byte that breaks a rule.

    Args:
        file: Takes the message, from its present position on.
        max_bytes: Longest message, whole.
    """

    def __init__(self, file: Writable, max_bytes: int) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self._digest = hashlib.sha256()
        self._prefix = b""
        self._end = b""
        self._total: int | None = None
        self.num_bytes = 0
        """Bytes taken so far."""

    def take_all(self, pieces: Iterable[Piece]) -> None:
        """Take the next pieces; see ``take``."""
        for piece in pieces:
            self.take(piece)

    def take(self, piece: Piece) -> None:
        """Take the next bytes, however they are cut.

        Raises:
            WireError: If they make the message too long or are no beginning of one.
        """
        if self._total is None:
            missing = PREFIX.size - len(self._prefix)
            self._prefix += bytes(piece[:missing])
            if len(self._prefix) < PREFIX.size:
                return
            self._total = claimed_bytes(self._prefix, self._max_bytes)
            piece = memoryview(piece)[missing:]
            self._store(self._prefix)
        self._store(piece)

    def _store(self, piece: Piece) -> None:
        assert self._total is not None
        begin, self.num_bytes = self.num_bytes, self.num_bytes + len(piece)
        if self.num_bytes > self._total:
            _refuse("the message goes on after its end")
        num_hashed = max(0, min(len(piece), self._total - DIGEST_BYTES - begin))
        self._digest.update(piece[:num_hashed])
        self._end += bytes(piece[num_hashed:])
        self._file.write(piece)

    def finish(self) -> None:
        """Check that the message is whole and undamaged.

        Raises:
            WireError: If it is not.
        """
        if self._total is None or self.num_bytes < self._total:
            _refuse(f"the message ends after {max(self.num_bytes, len(self._prefix))} bytes")
        if self._end != self._digest.digest():
            _refuse("the message does not match its SHA-256")


def claimed_bytes(prefix: bytes, max_bytes: int) -> int:
    """Return how long a message says it is.

    Raises:
        WireError: If it is longer than ``max_bytes``, or no message of ours.
    """
    magic, header_bytes, body_bytes = PREFIX.unpack(prefix)
    total = int(PREFIX.size + header_bytes + body_bytes + DIGEST_BYTES)
    if magic != MAGIC or header_bytes % ALIGNMENT:
        _refuse("the bytes are no message of this program")
    if header_bytes > MAX_HEADER_BYTES or total > max_bytes:
        _refuse(f"the message claims {total} bytes, {header_bytes} of them header; at most {max_bytes} are taken")
    return total


# Reading


def read_frame(buffer: bytearray | memoryview | Any) -> Frame:
    """Return the message that a received, checked file holds.

    Args:
        buffer: All its bytes, writable (a bytearray, or a mapping of the file with ``mmap.ACCESS_COPY``); the tensors
            are views of it and keep it alive.

    Raises:
        WireError: If it is no message, or its tensors do not fill its body exactly.
    """
    view = memoryview(buffer)
    if len(view) < PREFIX.size + DIGEST_BYTES:
        _refuse(f"a message has more than {len(view)} bytes")
    total = claimed_bytes(bytes(view[: PREFIX.size]), len(view))
    if total != len(view):
        _refuse(f"the message claims {total} bytes and has {len(view)}")
    header_end = PREFIX.size + PREFIX.unpack(view[: PREFIX.size])[1]
    header = _json_object(view[PREFIX.size : header_end], "the header")
    return Frame(header, _read_tensors(view[header_end : total - DIGEST_BYTES]))


def _read_tensors(body: memoryview) -> dict[str, Tensor]:
    if len(body) < LENGTH.size:
        _refuse("the body has no tensor header")
    (num_text_bytes,) = LENGTH.unpack(body[: LENGTH.size])
    data_begin = LENGTH.size + num_text_bytes
    if num_text_bytes > MAX_TENSOR_HEADER_BYTES or data_begin > len(body) or num_text_bytes % ALIGNMENT:
        _refuse(f"the tensor header claims {num_text_bytes} bytes")
    entries = _json_object(body[LENGTH.size : data_begin], "the tensor header")
    entries.pop(RESERVED_NAME, None)  # the format allows it; nothing of ours is in it
    slots = sorted((_slot(name, entry) for name, entry in entries.items()), key=lambda slot: (slot.begin, slot.end))
    data = body[data_begin:]
    ends = [0, *(slot.end for slot in slots)]
    if any(slot.begin != end for slot, end in zip(slots, ends, strict=False)) or ends[-1] != len(data):
        _refuse("the tensors must fill the body without gap or overlap")
    return {slot.name: _tensor_at(data, slot) for slot in slots}


def _slot(name: str, entry: object) -> Slot:
    refuse_name(name)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(f"the tensor {name} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = (entry[key] for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        _refuse(f"the tensor {name} has the dtype {dtype!r:.40}")
    if not (_are_sizes(shape) and _are_sizes(offsets)) or len(shape) > MAX_DIMS or len(offsets) != 2:
        _refuse(f"the tensor {name} has no valid shape and offsets")
    begin, end = offsets
    item_bytes = DTYPES[dtype].itemsize
    if end - begin != math.prod(shape) * item_bytes or begin % item_bytes:
        _refuse(f"the tensor {name} does not fit its place")
    return Slot(name, DTYPES[dtype], tuple(shape), begin, end)


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _tensor_at(data: memoryview, slot: Slot) -> Tensor:
    if slot.begin == slot.end:
        try:
            return torch.empty(slot.shape, dtype=slot.dtype)
        except RuntimeError as exc:  # a dimension of 0 beside ones whose product overflows
            raise WireError(f"Not a valid message: the tensor {slot.name} has an impossible shape.") from exc
    piece = data[slot.begin : slot.end]
    if slot.dtype == torch.bool:
        raw = torch.frombuffer(piece, dtype=torch.uint8)
        if int(raw.max()) > 1:  # torch's behaviour on such a tensor is undefined
            _refuse(f"the tensor {slot.name} holds bytes that are no booleans")
    return torch.frombuffer(piece, dtype=slot.dtype).reshape(slot.shape)


def _json_object(text: memoryview, what: str) -> dict[str, Any]:
    try:
        value = json.loads(bytes(text), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as exc:
        raise WireError(f"{what} is no JSON: {str(exc)[:80]}") from exc
    if not isinstance(value, dict):
        _refuse(f"{what} is no JSON object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        _refuse("a name occurs twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    _refuse(f"{name} is no JSON")


def _refuse(reason: str) -> NoReturn:
    raise WireError(f"Not a valid message: {reason}.")
