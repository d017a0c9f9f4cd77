"""What strangers may send to a host of blocks: nothing of it is run, allocated or kept, and the host goes on."""

import asyncio
import pickle
import select
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_blocktrain.errors import PortInUseError, WireError
from lightning_blocktrain.models.generation import Sampling, Walk
from lightning_blocktrain.serving import block_server
from lightning_blocktrain.serving.address import Address
from lightning_blocktrain.serving.block_host import BlockHost
from lightning_blocktrain.serving.block_server import BlockServer
from lightning_blocktrain.serving.client import SweepClient
from lightning_blocktrain.serving.errand import Errand, errand_message, errand_of
from lightning_blocktrain.serving.hello import PROTOCOL
from lightning_blocktrain.transport.wire import MAGIC, PREFIX, Frame, Outgoing, read_frame
from tests.models.cases import T, causal, noisy
from tests.serving.local import TOKEN, Running, host_of, serving

HELLO = {"kind": "hello", "protocol": PROTOCOL, "token": TOKEN, "client": "me"}


def message(header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> bytes:
    return b"".join(Outgoing(header, tensors or {}).pieces())


class Raw:
    """A plain socket to a host."""

    def __init__(self, running: Running) -> None:
        address = running.server.address
        assert address is not None
        self.sock = socket.create_connection((address.host, address.port), 20.0)
        self._file = self.sock.makefile("rb")

    def send(self, text: bytes) -> None:
        self.sock.sendall(text)

    def answer(self) -> Frame | None:
        """Return the next message; None where the connection has ended."""
        try:
            prefix = self._file.read(PREFIX.size)
            if not prefix:
                return None
            _, header_bytes, body_bytes = PREFIX.unpack(prefix)
            return read_frame(bytearray(prefix + self._file.read(header_bytes + body_bytes + 32)))
        except ConnectionResetError:
            return None

    def hello(self, **fields: Any) -> Frame | None:
        self.send(message({**HELLO, **fields}))
        return self.answer()


@contextmanager
def raw(running: Running) -> Iterator[Raw]:
    connection = Raw(running)
    try:
        yield connection
    finally:
        with suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)
        connection._file.close()
        connection.sock.close()


def kind_of(frame: Frame | None) -> str:
    assert frame is not None
    return str(frame.header["kind"])


def works(running: Running) -> bool:
    with SweepClient(running.address, TOKEN) as client:
        return len(client.generate(b"abc", 3)) == 3


def walk(**fields: Any) -> Errand:
    plain = {"start": 0, "inputs": (1, 2, 3), "position": 0, "num_read": 1, "sampling": Sampling()}
    errand = {"client": "me", "session": 1, "number": 1, "num_blocks": 3, "next_block": 0, "route": ()}
    walked = Walk(**{**plain, **{k: v for k, v in fields.items() if k in plain}})
    return Errand(**{**errand, **{k: v for k, v in fields.items() if k not in plain}}, walk=walked)


@pytest.mark.parametrize(
    "text",
    [
        pickle.dumps({"a": 1}),
        b"GET / HTTP/1.1\r\nHost: me\r\n\r\n",
        b"PK\x03\x04" + bytes(100),
        PREFIX.pack(MAGIC, 8, 2**40) + b"{}      ",
        PREFIX.pack(MAGIC, 2**31, 8),
        message({"kind": "walk"}),
        message({"kind": "hello", "protocol": PROTOCOL, "token": 3, "client": ""}),
        message({**HELLO, "client": "x" * 2**15}),
        message(HELLO)[:-1] + b"?",
    ],
    ids=["pickle", "http", "zip", "1 TB", "long header", "no hello", "token type", "long hello", "digest"],
)
def test_what_is_no_hello_ends_the_connection_and_nothing_else(text: bytes) -> None:
    with serving(causal("features"), [0, 1, 2]) as [running]:
        tracemalloc.start()
        with raw(running) as connection:
            connection.send(text)
            refusal = connection.answer()
            assert refusal is None or refusal.header["kind"] == "refused"
            assert connection.answer() is None
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**22
        assert works(running)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"token": "wrong"}, "unauthorised"),
        ({"protocol": PROTOCOL + 1}, "refused"),
        ({"token": ""}, "unauthorised"),
        ({"token": "\ud800"}, "unauthorised"),
    ],
)
def test_a_hello_that_does_not_fit_is_refused(fields: dict[str, Any], code: str) -> None:
    with serving(causal("features"), [0, 1, 2]) as [running], raw(running) as connection:
        refusal = connection.hello(**fields)
        assert refusal is not None and refusal.header["code"] == code
        assert TOKEN not in str(refusal.header)
        assert connection.answer() is None


def test_guesses_of_the_token_are_limited() -> None:
    with serving(causal("features"), [0, 1, 2]) as [running]:
        codes = []
        for _ in range(12):
            with raw(running) as connection:
                refusal = connection.hello(token="guess")
                assert refusal is not None
                codes.append(refusal.header["code"])
        assert codes == ["unauthorised"] * 10 + ["busy"] * 2


def test_a_client_that_comes_again_takes_the_place_of_its_first_connection() -> None:
    with serving(causal("features"), [0, 1, 2]) as [running], raw(running) as first, raw(running) as second:
        welcome = first.hello()
        assert welcome is not None and welcome.header["facts"]["blocks"] == [0, 1, 2]
        first.send(message(*errand_message(walk())))
        assert kind_of(first.answer()) == "decided"
        assert kind_of(second.hello()) == "welcome"
        assert first.answer() is None
        assert running.host.num_sessions == 0
        second.send(message(*errand_message(walk())))
        assert kind_of(second.answer()) == "decided"


def test_a_client_that_goes_before_it_is_welcome_leaves_its_name_free() -> None:
    with serving(causal("features"), [0, 1, 2]) as [running]:
        for _ in range(10):
            with raw(running) as connection:
                connection.send(message(HELLO))
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with raw(running) as connection:
            assert kind_of(connection.hello()) == "welcome"


def test_a_stranger_who_sends_a_byte_now_and_then_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_server, "HELLO_TIMEOUT_S", 0.3)
    with serving(causal("features"), [0, 1, 2]) as [running], raw(running) as connection:
        text = message(HELLO)
        for idx in range(100):
            ended, _, _ = select.select([connection.sock], [], [], 0.05)
            if ended:
                break
            connection.send(text[idx : idx + 1])
        assert ended and connection.answer() is None


class Held:
    """Holds back the walks of a host until ``go`` is set."""

    def __init__(self, host: BlockHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.held = threading.Event(), threading.Event()
        run = host.run_together

        def wait_and_run(errands: Any) -> Any:
            self.held.set()
            assert self.go.wait(20.0)
            return run(errands)

        monkeypatch.setattr(host, "run_together", wait_and_run)


def test_a_session_that_is_over_is_not_brought_back_by_its_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(causal("features"), [0, 1, 2]) as [running], raw(running) as connection:
        held = Held(running.host, monkeypatch)
        connection.hello()

        def send(session: int) -> None:
            connection.send(message(*errand_message(walk(session=session))))

        def forget(session: int) -> None:
            connection.send(message({"kind": "forget", "client": "me", "session": session}))

        send(1)
        assert held.held.wait(20.0)
        send(2)  # waits for its turn, and its session ends meanwhile
        forget(2)
        forget(3)  # comes before the walk that another host passes on
        send(3)
        send(4)
        held.go.set()
        frames = [connection.answer(), connection.answer()]
        assert [frame.header["session"] for frame in frames if frame is not None] == [1, 4]
        assert running.host.num_sessions == 2


def test_walks_behind_a_host_that_is_not_reached_fail_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled, go = [], threading.Event()

    async def refuse(address: Address, *options: Any) -> Any:
        dialled.append(address)
        await asyncio.to_thread(go.wait, 20.0)
        raise ValueError("no such certificates")

    monkeypatch.setattr(block_server, "open_link", refuse)
    route = (Address("127.0.0.1", 9),)
    with serving(causal("features"), [0]) as [running], raw(running) as connection:
        connection.hello()
        for session in range(4):
            connection.send(message(*errand_message(walk(session=session, route=route))))
        running.wait_until(lambda: running.server.num_walks == 4)
        go.set()
        frames = [connection.answer() for _ in range(4)]
        assert [frame.header["code"] for frame in frames if frame is not None] == ["unreachable"] * 4
        assert all("no such certificates" in frame.header["message"] for frame in frames if frame is not None)
        assert len(dialled) == 1
        connection.send(message(*errand_message(walk(session=9, route=route))))
        again = connection.answer()
        assert again is not None and again.header["session"] == 9  # the next one is tried anew


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"next_block": 1}, "does not fit"),
        ({"next_block": 3}, "Block 3 of 3 is not served here"),
        ({"num_blocks": 4}, "Block 0 of 4 is not served here"),
        ({"start": 6}, "ends beyond the window"),
        ({"inputs": (1,) * (T + 1)}, "ends beyond the window"),
        ({"start": 2}, "keys and values of 2 positions are not here"),
        ({"sampling": Sampling(num_draws=2)}, "no noise to draw"),
        ({"inputs": (256,)}, "does not know unknown bytes"),
        ({"next_block": 1, "carried": {"0": torch.zeros(1, 3, 5)}}, "does not fit"),
        ({"next_block": 1, "carried": {"1": torch.zeros(1, 3, 16)}}, "does not fit"),
    ],
    ids=str,
)
def test_a_walk_that_makes_no_sense_is_answered_and_leaves_nothing(fields: dict[str, Any], words: str) -> None:
    with serving(causal("features", p_span=0.0), [0, 1, 2]) as [running], raw(running) as connection:
        connection.hello()
        connection.send(message(*errand_message(walk(**fields))))
        failure = connection.answer()
        assert failure is not None and failure.header["kind"] == "failed" and failure.header["number"] == 1
        assert words in failure.header["message"]
        assert running.host.num_sessions == 0
        assert works(running)


WRONG: list[tuple[dict[str, Any], dict[str, Tensor]]] = [
    ({"session": -1}, {}),
    ({"number": True}, {}),
    ({"start": 1.5}, {}),
    ({"seed": 2**63}, {}),
    ({"temperature": "hot"}, {}),
    ({"temperature": -1.0}, {}),
    ({"temperature": 10**400}, {}),
    ({"num_draws": 0}, {}),
    ({"num_draws": 65}, {}),
    ({"num_read": 4}, {}),
    ({"num_blocks": 0}, {}),
    ({"client": ""}, {}),
    ({"wire": "int4"}, {}),
    ({"route": ["no address"]}, {}),
    ({"route": [3]}, {}),
    ({}, {"inputs": torch.zeros(3)}),
    ({}, {"inputs": torch.full((3,), 257, dtype=torch.int16)}),
    ({}, {"inputs": torch.full((3,), -1, dtype=torch.int16)}),
    ({}, {"inputs": torch.zeros(0, dtype=torch.int16)}),
    ({}, {"state.0": torch.zeros(3, 16)}),
    ({}, {"state.0": torch.zeros(2, 3, 16)}),
]


@pytest.mark.parametrize(("fields", "tensors"), WRONG, ids=str)
def test_a_malformed_walk_ends_the_connection(fields: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    header, right = errand_message(walk())
    with pytest.raises(WireError):
        errand_of(Frame({**header, **fields}, {**right, **tensors}))
    with serving(causal("features"), [0, 1, 2]) as [running], raw(running) as connection:
        connection.hello()
        connection.send(message({**header, **fields}, {**right, **tensors}))
        refusal = connection.answer()
        assert refusal is not None and refusal.header["code"] == "malformed"
        assert running.server.num_walks == 0
        assert works(running)


def test_a_tensor_name_that_could_be_a_path_is_refused() -> None:
    text = message(*errand_message(walk())).replace(b'"inputs"', b'"../puts')
    with serving(causal("features"), [0, 1, 2]) as [running], raw(running) as connection:
        connection.hello()
        connection.send(text)
        refusal = connection.answer()
        assert refusal is not None and refusal.header["code"] == "malformed"
        assert works(running)


def test_a_walk_longer_than_any_state_is_refused_before_it_is_taken() -> None:
    with serving(noisy("denoise"), [0, 1, 2]) as [running], raw(running) as connection:
        connection.hello()
        connection.send(struct.pack("<4sIQ", MAGIC, 8, running.host.max_state_bytes + 2**17))
        refusal = connection.answer()
        assert refusal is not None and "at most" in refusal.header["message"]
        assert connection.answer() is None


def test_errands_survive_the_wire() -> None:
    errand = walk(
        route=(Address("::1", 29500, True), Address("host", 1)),
        next_block=1,
        carried={"z": torch.randn(2, 3, 4)},
        sampling=Sampling(0.7, 5, 2),
        start=7,
        position=9,
        inputs=(0, 256, 255),
        wire="fp32",
    )
    found = errand_of(Frame(*errand_message(errand)))
    assert torch.equal(found.carried.pop("z"), errand.carried.pop("z"))
    assert found == errand


def test_a_port_in_use_is_named() -> None:
    with serving(causal("features"), [0]) as [running]:
        address = running.server.address
        assert address is not None
        second = BlockServer(host_of(causal("features"), [0]), TOKEN, (address.host, address.port))

        async def start() -> None:
            await second.start()

        with pytest.raises(PortInUseError, match=f"must be free; got host=127.0.0.1, port={address.port}"):
            running.run(start)
        running.run(second.stop)


@pytest.mark.parametrize(
    "text", ["host", "host:0", "host:65536", ":80", "a b:80", "::1:80", "http://h:80", "h:80/x", ""]
)
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be host:port or tls://host:port; got address="):
        Address.parse(text)


@pytest.mark.parametrize("text", ["10.0.0.7:29500", "tls://[::1]:443", "[fe80::1]:80", "tls://name.example:1"])
def test_an_address_is_written_as_it_is_read(text: str) -> None:
    assert str(Address.parse(text)) == text
