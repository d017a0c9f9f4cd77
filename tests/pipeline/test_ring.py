import multiprocessing
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_blocktrain.pipeline.ring import (
    ALIGNMENT,
    RingWriter,
    StopFlag,
    make_ring,
    pack,
    payload_bytes,
)
from lightning_blocktrain.pipeline.worker import Stopped

CONTEXT = multiprocessing.get_context("forkserver")
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def ring(num_slots=2, slot_bytes=4096):
    stop = threading.Event()
    return *make_ring(CONTEXT, num_slots, slot_bytes, stop), stop


def passed(message, writer, reader):
    """Send a message through a ring."""
    assert writer.wait(10)
    writer.write(message)
    reader.wait()
    return reader.read()


@st.composite
def tensors(draw):
    """Tensors of every kind, contiguous or not, empty or scalar."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 20).to(dtype)
    form = draw(st.sampled_from(["plain", "transposed", "strided", "expanded"]))
    if form == "transposed" and len(shape) > 1:
        return tensor.transpose(0, -1)
    if form == "strided" and shape:
        return tensor[::2]
    return tensor.expand(3, *shape) if form == "expanded" else tensor


messages = st.recursive(
    st.one_of(tensors(), st.none(), st.integers(), st.text(max_size=5), st.floats(allow_nan=False)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


def same(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(ours, theirs)
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list | tuple):
        return type(ours) is type(theirs) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


@pytest.fixture(scope="module")
def shared_ring():
    writer, reader, _ = ring(slot_bytes=1 << 16)
    yield writer, reader
    writer.close()
    reader.close()


@settings(max_examples=50)
@given(message=messages)
def test_ring_gives_back_what_was_sent(shared_ring, message):
    assert same(passed(message, *shared_ring), message)


@settings(max_examples=50)
@given(message=messages)
def test_pack_keeps_values_in_one_piece_of_shared_memory(message):
    packed = pack(message)
    assert same(packed, message)
    found = leaves(packed)
    assert all(tensor.is_shared() for tensor in found)
    # One allocation: the pieces lie within it, each at a multiple of the alignment.
    places = [tensor.untyped_storage().data_ptr() for tensor in found if tensor.numel()]
    assert len(set(places)) <= 1
    assert all(t.storage_offset() * t.element_size() % ALIGNMENT == 0 for t in found)


def leaves(message):
    if isinstance(message, torch.Tensor):
        return [message]
    inner = message.values() if isinstance(message, dict) else message if isinstance(message, list | tuple) else []
    return [tensor for item in inner for tensor in leaves(item)]


@given(st.lists(tensors(), max_size=4))
def test_payload_is_aligned_and_holds_every_tensor(message):
    num_bytes = payload_bytes(message)
    assert num_bytes % ALIGNMENT == 0
    needed = sum(tensor.numel() * tensor.element_size() for tensor in message)
    assert needed <= num_bytes <= needed + ALIGNMENT * len(message)


def test_ring_copies_so_that_a_later_message_does_not_change_an_earlier_one():
    writer, reader, _ = ring(num_slots=1)
    first = passed(torch.zeros(4), writer, reader)
    passed(torch.ones(4), writer, reader)
    assert first.eq(0).all()


def test_ring_message_carries_no_graph():
    writer, reader, _ = ring()
    received = passed(torch.ones(3, requires_grad=True) * 2, writer, reader)
    assert not received.requires_grad


@pytest.mark.parametrize("slot_bytes", [1, 65, 100])
def test_ring_of_odd_slots_holds_wide_types_in_every_slot(slot_bytes):
    writer, reader, _ = ring(num_slots=3, slot_bytes=slot_bytes)
    for value in range(4):
        assert passed(torch.tensor([value], dtype=torch.float64), writer, reader).item() == value


def test_ring_full_refuses_another_until_one_is_read():
    writer, reader, _ = ring(num_slots=2)
    for value in (1, 2):
        assert writer.wait(0)
        writer.write(value)
    assert not writer.wait(0.0)
    assert not writer.wait(0.05)
    reader.wait()
    assert reader.read() == 1
    assert writer.wait(0)


def test_ring_message_that_does_not_fit_is_refused_before_anything_is_written():
    writer, reader, _ = ring(slot_bytes=128)
    assert writer.wait(0)
    with pytest.raises(ValueError, match=r"fit into a slot of the ring; got 192 bytes, slots of 128"):
        writer.write(torch.zeros(129, dtype=torch.uint8))
    writer.write("after")
    reader.wait()
    assert reader.read() == "after"


def test_ring_message_out_of_sequence_is_refused():
    stop = threading.Event()
    _, reader = make_ring(CONTEXT, 3, 64, stop)
    source, writing = CONTEXT.Pipe(duplex=False)
    reader._pipe.close()
    reader._pipe = source
    late = RingWriter(reader._slots, CONTEXT.Semaphore(3), writing, stop)
    for text in ("first", "lost", "third"):
        late.wait(0)
        late.write(text)
    reader.wait()
    assert reader.read() == "first"
    source.recv()  # somebody takes a message away
    with pytest.raises(RuntimeError, match="message 2 came out of a ring that owed message 1"):
        reader.read()


def test_ring_reader_ends_when_the_writer_is_gone():
    writer, reader, _ = ring()
    writer.close()
    reader.wait()
    with pytest.raises(Stopped):
        reader.read()


def test_ring_writer_ends_when_the_reader_is_gone():
    writer, reader, _ = ring()
    reader.close()
    assert writer.wait(0)
    with pytest.raises(Stopped):
        writer.write("nobody reads this")


def test_ring_stopped_ends_whoever_waits():
    writer, reader, stop = ring(num_slots=1)
    writer.wait(0)
    stop.set()
    with pytest.raises(Stopped):
        reader.wait()
    with pytest.raises(Stopped):
        writer.wait()


def test_ring_stopped_leaves_what_was_sent_unread():
    writer, reader, stop = ring()
    writer.wait(0)
    writer.write("too late")
    stop.set()
    with pytest.raises(Stopped):
        reader.wait()


def test_stop_flag_is_shared_by_what_is_built_from_its_memory():
    flag, other = StopFlag(), StopFlag()
    assert not flag.is_set()
    flag.set()
    assert flag.is_set()
    assert not other.is_set()
