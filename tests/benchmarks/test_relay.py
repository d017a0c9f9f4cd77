import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from benchmarks.relay import Line, Relay, Tear, Way, address_of

WAIT_S = 20.0


class Ends:
    """A relay to a socket that this process listens on."""

    def __init__(self, relay: Relay, listener: socket.socket) -> None:
        self.relay, self.listener = relay, listener

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """Return both ends of a new connection through the relay."""
        near = socket.create_connection(self.relay.address, WAIT_S)
        far, _ = self.listener.accept()
        far.settimeout(WAIT_S)
        return near, far


@pytest.fixture
def ends() -> Iterator[Ends]:
    with socket.create_server(("127.0.0.1", 0)) as listener, Relay(listener.getsockname()) as relay:
        listener.settimeout(WAIT_S)
        yield Ends(relay, listener)


@contextmanager
def connected(ends: Ends) -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = ends.connect()
    with closing(near), closing(far):
        yield near, far


def received(end: socket.socket) -> tuple[bytes, bool]:
    """Return what an end receives until the connection is over, and whether that was a reset."""
    content = b""
    try:
        while piece := end.recv(2**16):
            content += piece
    except ConnectionError:
        return content, True
    return content, False


def exactly(end: socket.socket, num_bytes: int) -> bytes:
    content = b""
    while len(content) < num_bytes:
        piece = end.recv(num_bytes - len(content))
        assert piece
        content += piece
    return content


def test_relay_passes_everything_both_ways_and_half_closed_connections(ends: Ends) -> None:
    sent = bytes(range(256)) * 1000
    with connected(ends) as (near, far):
        near.sendall(sent)
        near.shutdown(socket.SHUT_WR)
        assert received(far) == (sent, False)
        far.sendall(b"answer")
        far.close()
        assert received(near) == (b"answer", False)
    assert ends.relay.traffic == {"up": len(sent), "down": 6, "connections": 1}


def test_relay_over_thin_and_long_lines_passes_everything() -> None:
    sent = bytes(200_000)
    line = Line(latency_ms=5.0, bytes_per_s=50e6)
    with socket.create_server(("127.0.0.1", 0)) as listener, Relay(listener.getsockname(), line, line) as relay:
        listener.settimeout(WAIT_S)
        with connected(Ends(relay, listener)) as (near, far):
            near.sendall(sent)
            near.shutdown(socket.SHUT_WR)
            assert received(far) == (sent, False)
            relay.shape(Line(), Line())
            far.sendall(b"answer")
            assert exactly(near, 6) == b"answer"


def test_way_pieces_leave_one_after_the_other_and_arrive_a_latency_later() -> None:
    way = Way(Line(latency_ms=250.0, bytes_per_s=1000.0))
    assert way.book(500, now=10.0) == (10.5, 10.75)
    assert way.book(500, now=10.25) == (11.0, 11.25)
    assert way.book(125, now=20.0) == (20.125, 20.375)
    assert Way(Line()).book(2**30, now=3.0) == (3.0, 3.0)


@pytest.mark.parametrize(("end", "was_reset"), [("reset", True), ("close", False)])
def test_cut_ends_what_is_open_and_takes_new_connections(ends: Ends, end: str, was_reset: bool) -> None:
    with connected(ends) as (near, far):
        near.sendall(b"open")
        exactly(far, 4)
        ends.relay.cut(end)  # type: ignore[arg-type]
        assert received(near) == (b"", was_reset)
        assert received(far) == (b"", was_reset)
    with connected(ends) as (near, far):
        near.sendall(b"again")
        assert exactly(far, 5) == b"again"


@pytest.mark.parametrize(("action", "was_reset"), [("reset", True), ("close", False)])
def test_armed_tear_lets_exactly_its_bytes_pass_and_happens_once(ends: Ends, action: str, was_reset: bool) -> None:
    with connected(ends) as (near, far):
        near.sendall(b"x" * 100)
        exactly(far, 100)
        tear = ends.relay.arm("up", 1000, action=action)  # type: ignore[arg-type]
        near.sendall(b"y" * 5000)
        assert tear.happened.wait(WAIT_S)
        content, reset = received(far)
        assert (len(content), reset) == (1000, was_reset)
    with connected(ends) as (near, far):
        near.sendall(b"z" * 5000)
        assert exactly(far, 5000) == b"z" * 5000


def test_armed_tear_of_answers_waits_for_the_connection_that_asked_enough(ends: Ends) -> None:
    tear = ends.relay.arm("down", 0, other_bytes=1000)
    with connected(ends) as (small, small_far), connected(ends) as (large, large_far):
        small.sendall(b"s" * 999)
        exactly(small_far, 999)
        small_far.sendall(b"answer")
        assert exactly(small, 6) == b"answer"
        assert not tear.happened.is_set()
        large.sendall(b"l" * 1000)
        exactly(large_far, 1000)
        large_far.sendall(b"answer")
        assert received(large) == (b"", True)
        assert tear.happened.is_set()


def test_held_connection_ends_when_its_sender_gives_up_and_others_pass(ends: Ends) -> None:
    tear = ends.relay.arm("up", 10, action="hold")
    with connected(ends) as (near, far), connected(ends) as (other, other_far):
        near.sendall(b"h" * 5_000)
        assert tear.happened.wait(WAIT_S)
        other.sendall(b"passes")
        assert exactly(other_far, 6) == b"passes"
        near.close()
        assert received(far) == (b"h" * 10, True)


def test_blackhole_lets_nothing_pass_until_it_is_healed(ends: Ends) -> None:
    with connected(ends) as (near, far):
        ends.relay.blackhole()
        near.sendall(b"held")
        with socket.create_connection(ends.relay.address, WAIT_S) as late:
            late.sendall(b"late")
            for _ in range(20):  # each is a turn of the relay's loop, in which it would pass what has come
                ends.relay.shape(Line(), Line())
            far.setblocking(False)
            with pytest.raises(BlockingIOError):
                far.recv(1)
            assert ends.relay.traffic["up"] == 0
            far.settimeout(WAIT_S)
            ends.relay.heal()
            assert exactly(far, 4) == b"held"
            late_far, _ = ends.listener.accept()
            with closing(late_far):
                late_far.settimeout(WAIT_S)
                assert exactly(late_far, 4) == b"late"


def test_relay_to_nobody_resets_who_connects() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = listener.getsockname()
    with Relay(target) as relay, pytest.raises(ConnectionResetError):  # as early as in the call that connects
        socket.create_connection(relay.address, WAIT_S).recv(1)


def test_relay_on_a_port_in_use_is_an_error_and_leaves_nothing(ends: Ends) -> None:
    other = Relay(("127.0.0.1", 1), port=ends.relay.address[1])
    with pytest.raises(OSError, match="in use"):
        other.open()
    other.close()


def test_tear_counts_bytes_of_each_connection_on_its_own() -> None:
    tear = Tear("up", num_bytes=10, other_bytes=0, action="reset")
    assert [tear.room(1, "up", 6), tear.room(2, "up", 6), tear.room(1, "down", 50)] == [6, 6, 50]
    assert [tear.room(1, "up", 6), tear.room(2, "up", 4), tear.room(2, "up", 1)] == [4, 4, 0]


@pytest.mark.parametrize("wrong", [{"latency_ms": -1.0}, {"latency_ms": float("inf")}, {"bytes_per_s": 0.0}])
def test_line_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="latency_ms must be finite"):
        Line(**wrong)


def test_address_of_reads_urls_and_pairs() -> None:
    assert address_of("http://127.0.0.1:80/") == address_of("127.0.0.1:80") == ("127.0.0.1", 80)
    assert address_of("[::1]:80") == ("::1", 80)
    for wrong in ("localhost", ":80", "host:port"):
        with pytest.raises(ValueError, match="must be HOST:PORT"):
            address_of(wrong)
