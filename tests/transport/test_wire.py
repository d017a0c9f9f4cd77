import gzip
import hashlib
import io
import json
import pickle
import struct
from collections.abc import Mapping
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_blocktrain.errors import WireError
from lightning_blocktrain.transport import wire
from lightning_blocktrain.transport.wire import DTYPES, PREFIX, Frame, Outgoing, Receiver, read_frame

LIMIT = 10**7

MIXED: dict[str, Tensor] = {
    "layers.0.weight": torch.arange(12.0).reshape(3, 4),
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "half": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
    "wide": torch.tensor(1 / 3, dtype=torch.float64),
    "flags": torch.tensor([True, False, True]),
    "counter": torch.tensor(2**40),
    "empty": torch.zeros(0, 7),
}


def written(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    outgoing = Outgoing(header, tensors)
    data = b"".join(bytes(piece) for piece in outgoing.pieces())
    assert len(data) == outgoing.num_bytes
    return data


def received(data: bytes, step: int = 2**20, max_bytes: int = LIMIT) -> Frame:
    file = io.BytesIO()
    receiver = Receiver(file, max_bytes)
    for begin in range(0, len(data), step):
        receiver.take(data[begin : begin + step])
    receiver.finish()
    return read_frame(bytearray(file.getvalue()))


def forged(header: bytes, body: bytes) -> bytes:
    """Return a message with a right SHA-256 and any content."""
    header += b" " * (-len(header) % 8)
    data = PREFIX.pack(wire.MAGIC, len(header), len(body)) + header + body
    return data + hashlib.sha256(data).digest()


def forged_tensors(slots: Any, data: bytes = b"") -> bytes:
    text = slots if isinstance(slots, bytes) else json.dumps(slots).encode()
    text += b" " * (-len(text) % 8)
    return forged(b"{}", struct.pack("<Q", len(text)) + text + data)


def slot(shape: Any = (2,), dtype: Any = "F32", offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def assert_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert tensor.shape == right[name].shape
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, right[name]) if t.numel()]
        assert not raw or torch.equal(*raw)


@pytest.mark.parametrize("step", [1, 7, 2**20])
def test_scenario_24_mixed_dtypes_and_layouts_round_trip_bit_for_bit_in_pieces_of_any_size(step: int) -> None:
    frame = received(written({"a": [1, "x", None]}, MIXED), step)
    assert frame.header == {"a": [1, "x", None]}
    assert_same(frame.tensors, MIXED)


def test_body_is_what_the_safetensors_library_reads() -> None:
    data = written({"k": "v"}, MIXED)
    body = data[PREFIX.size + PREFIX.unpack(data[: PREFIX.size])[1] : -wire.DIGEST_BYTES]
    assert_same(safetensors.torch.load(body), MIXED)


def test_read_takes_what_the_safetensors_library_writes() -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in MIXED.items()}
    assert_same(received(forged(b"{}", safetensors.torch.save(contiguous))).tensors, MIXED)


def test_scenario_23_value_that_fp16_could_not_hold_arrives_as_it_is() -> None:
    assert received(written({}, {"w": torch.tensor([1e6])})).tensors["w"].item() == 1e6


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.zeros(2, 0, 3), torch.tensor(-0.0), torch.full((4,), 2.0)])
def test_scenario_25_empty_scalar_zero_and_constant_tensors_arrive_as_they_are(tensor: Tensor) -> None:
    assert_same(received(written({}, {"w": tensor})).tensors, {"w": tensor})


def test_read_tensors_are_writable_views_of_the_message() -> None:
    content = bytearray(written({}, {"w": torch.zeros(3)}))
    read_frame(content).tensors["w"].fill_(1.0)
    assert struct.pack("<f", 1.0) * 3 in content


def test_pieces_are_small_and_can_be_made_again() -> None:
    outgoing = Outgoing({}, {"w": torch.arange(2**19, dtype=torch.float64)})
    pieces = [bytes(piece) for piece in outgoing.pieces()]
    assert max(map(len, pieces)) == wire.PIECE_BYTES
    assert pieces == [bytes(piece) for piece in outgoing.pieces()]


SHAPES = st.lists(st.integers(0, 4), max_size=3)
NAMES = st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=20).filter(
    lambda name: not set(name) & set("/\\") and ".." not in name and name != "__metadata__"
)


@given(st.dictionaries(NAMES, st.tuples(st.sampled_from(list(DTYPES)), SHAPES, st.integers(0, 99)), max_size=5))
def test_round_trip_of_anything_is_bit_for_bit(spec: dict[str, tuple[str, list[int], int]]) -> None:
    tensors = {}
    for name, (dtype, shape, seed) in spec.items():
        raw = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))
        tensors[name] = (raw % 2 == 0) if dtype == "BOOL" else raw.to(DTYPES[dtype])
    assert_same(received(written({}, tensors), 11).tensors, tensors)


SMALL = written({"n": 1}, {"w": torch.arange(3.0), "n": torch.tensor(7)})


@given(st.integers(0, len(SMALL) - 1), st.integers(1, 255))
def test_any_changed_byte_is_noticed(position: int, change: int) -> None:
    data = bytearray(SMALL)
    data[position] ^= change
    with pytest.raises(WireError):
        received(bytes(data))


@given(st.integers(0, len(SMALL) - 1))
def test_scenario_06_cut_message_is_noticed(length: int) -> None:
    with pytest.raises(WireError, match=f"ends after {length} bytes"):
        received(SMALL[:length])


def test_message_that_goes_on_after_its_end_is_refused_before_it_is_stored() -> None:
    file = io.BytesIO()
    receiver = Receiver(file, LIMIT)
    receiver.take(SMALL)
    with pytest.raises(WireError, match="goes on after its end"):
        receiver.take(b"x")
    assert file.getvalue() == SMALL


@given(st.binary(max_size=400))
def test_scenario_39_random_bytes_are_refused_with_one_error(data: bytes) -> None:
    with pytest.raises(WireError):
        received(data)
    with pytest.raises(WireError):
        read_frame(bytearray(data))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
SLOTS = st.dictionaries(
    st.text(max_size=8),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from([*DTYPES, "F8_E4M3", "", 4]),
            "shape": st.lists(st.integers(-2, 5) | st.just(2**62), max_size=3),
            "data_offsets": st.lists(st.integers(-1, 24), min_size=1, max_size=3),
        }
    ),
    max_size=3,
)


@given(JSON | SLOTS, st.binary(max_size=24))
def test_scenario_39_tensor_headers_of_any_content_give_tensors_or_one_error(slots: Any, data: bytes) -> None:
    try:
        frame = received(forged_tensors(slots, data))
    except WireError:
        return
    assert sum(tensor.numel() * tensor.element_size() for tensor in frame.tensors.values()) == len(data)


@given(st.binary(max_size=80))
def test_scenario_39_bodies_of_any_content_give_tensors_or_one_error(body: bytes) -> None:
    try:
        assert received(forged(b"{}", body)).tensors == {}  # only an empty tensor header is likely to be found
    except WireError:
        return


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(pickle.dumps({"w": 1}), id="pickle"),
        pytest.param(gzip.compress(bytes(10**6)), id="zip bomb"),
        pytest.param(PREFIX.pack(b"BTF1", 8, 2**40), id="body of 1 TB"),
        pytest.param(PREFIX.pack(b"BTF1", 2**31, 0), id="header of 2 GB"),
        pytest.param(PREFIX.pack(b"BTF1", 8, 2**64 - 1), id="largest number"),
    ],
)
def test_scenario_39_hostile_message_is_refused_within_its_first_bytes(data: bytes) -> None:
    file = io.BytesIO()
    with pytest.raises(WireError):
        Receiver(file, LIMIT).take(data)
    assert file.getvalue() == b""


@pytest.mark.parametrize(
    "slots",
    [
        pytest.param({"w": slot([2**38], offsets=[0, 2**40])}, id="tensor of 1 TB"),
        pytest.param({"../../etc/passwd": slot()}, id="path"),
        pytest.param({"/root/w": slot()}, id="absolute path"),
        pytest.param({"a\\b": slot()}, id="backslash"),
        pytest.param({"a\x00b": slot()}, id="zero byte"),
        pytest.param({"": slot()}, id="no name"),
        pytest.param({"w" * 600: slot()}, id="long name"),
        pytest.param({"w": slot(dtype="F4")}, id="unknown dtype"),
        pytest.param({"w": slot([-2])}, id="negative size"),
        pytest.param({"w": slot([True, 2])}, id="bool as size"),
        pytest.param({"w": slot([2.0])}, id="float as size"),
        pytest.param({"w": slot([1] * 40 + [2])}, id="too many dimensions"),
        pytest.param({"w": slot([3])}, id="shape does not fit"),
        pytest.param({"w": slot([1], offsets=[4, 8])}, id="gap at the beginning"),
        pytest.param({"w": slot([1], offsets=[0, 4])}, id="gap at the end"),
        pytest.param({"v": slot(), "w": slot()}, id="overlap"),
        pytest.param({"v": slot([1], offsets=[0, 4]), "w": slot([1], "U8", [4, 5])}, id="short"),
        pytest.param({"w": slot(), "x": slot([2**62, 2**62, 0], "U8", [8, 8])}, id="impossible empty shape"),
        pytest.param({"w": {**slot(), "more": 1}}, id="unknown field"),
        pytest.param({"w": []}, id="no object"),
        pytest.param([1], id="no mapping"),
        pytest.param(b'{"w": 1, "w": 2}', id="name twice"),
        pytest.param(b"[" * 10**5, id="deep"),
        pytest.param(b'{"w": ' + b"9" * 10**5 + b"}", id="long number"),
        pytest.param(b"\xff\xfe", id="no text"),
    ],
)
def test_scenario_39_hostile_tensor_header_is_refused(slots: Any) -> None:
    with pytest.raises(WireError):
        received(forged_tensors(slots, struct.pack("<2f", 1.0, 2.0)))


def test_scenario_39_booleans_that_are_none_are_refused() -> None:
    with pytest.raises(WireError, match="no booleans"):
        received(forged_tensors({"w": slot([2], "BOOL", [0, 2])}, b"\x01\x02"))


@pytest.mark.parametrize("header", [b"[1]", b"{", b'{"a": NaN}', b'{"a": 1, "a": 2}', b"\xff", b"[" * 10**5])
def test_header_that_is_no_json_object_is_refused(header: bytes) -> None:
    with pytest.raises(WireError):
        received(forged(header, struct.pack("<Q", 8) + b"{}      "))


def test_message_longer_than_the_limit_is_refused() -> None:
    assert received(SMALL, max_bytes=len(SMALL)).header == {"n": 1}
    with pytest.raises(WireError, match=f"at most {len(SMALL) - 1} are taken"):
        received(SMALL, max_bytes=len(SMALL) - 1)


@pytest.mark.parametrize(
    "tensors",
    [
        {"a/b": torch.zeros(1)},
        {"": torch.zeros(1)},
        {"w": torch.zeros(1, dtype=torch.complex64)},
        {"w": torch.zeros(1, device="meta")},
        {"w": torch.zeros(2).to_sparse()},
    ],
)
def test_outgoing_what_cannot_travel_is_refused(tensors: dict[str, Tensor]) -> None:
    with pytest.raises(WireError):
        Outgoing({}, tensors)


def test_outgoing_header_without_end_is_refused() -> None:
    with pytest.raises(WireError, match="a header must be at most"):
        Outgoing({"a": "x" * wire.MAX_HEADER_BYTES}, {})
