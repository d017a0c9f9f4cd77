"""Walks over TCP against the same model in one process, hosts that die, and ends that do not fit together."""

import asyncio
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_blocktrain.models.block_files import describe, entries_of
from lightning_blocktrain.models.generation import Decision, Decoder, LocalWalker, Sampling, Walk, continuation
from lightning_blocktrain.models.loading import Model
from lightning_blocktrain.serving import block_server, fleet
from lightning_blocktrain.serving.block_host import BlockHost
from lightning_blocktrain.serving.block_server import HostLimits
from lightning_blocktrain.serving.client import SweepClient
from lightning_blocktrain.serving.fleet import Fleet, HostLostError, Patience, ServingError
from lightning_blocktrain.serving.process import server_tls
from tests.models.cases import CAUSAL, NOISY, T, causal, lively, noisy
from tests.serving.local import TOKEN, Running, all_forgotten, host_of, route_of, serving
from tests.transport.test_http import make_certificate

SHORT = Patience(connect_s=5.0, walk_s=20.0, redial_s=0.0)
CHOICES: list[dict[str, Any]] = [
    {},
    {"num_blocks": 2, "temperature": 0.0},
    {"chunk_bytes": 4, "sweeps": 2, "temperature": 0.7},
    {"chunk_bytes": T},
]


def client_of(servers: Sequence[Running], **options: Any) -> SweepClient:
    return SweepClient(route_of(servers), TOKEN, **{"patience": SHORT, **options})


@pytest.mark.parametrize("chained", [True, False], ids=["chained", "step by step"])
@pytest.mark.parametrize("case", [*CAUSAL, *NOISY, "mlp"], ids=str)
def test_bytes_over_tcp_are_those_of_one_process(case: Any, chained: bool) -> None:
    model = noisy("denoise", layer="mlp") if case == "mlp" else lively(*case)
    with serving(model, [0], [1], [2]) as servers, client_of(servers, chained=chained) as client:
        for choices in CHOICES:
            # Three windows long, so that windows restart.
            assert client.generate(b"hello", 3 * T, seed=3, **choices) == model.generate(
                b"hello", 3 * T, seed=3, **choices
            )
        assert all_forgotten(servers)


def test_probabilities_over_tcp_are_those_of_one_process_to_the_bit() -> None:
    model = noisy("denoise_features")
    with serving(model, [0], [1], [2]) as servers, client_of(servers) as client:
        over_tcp = list(client.stream(b"hello", 20, chunk_bytes=4, num_draws=3, seed=1))
    decoder = Decoder(LocalWalker(model, 3), T, Sampling(seed=1, num_draws=3))
    seen = list(continuation(decoder, b"hello", 20, 4, 1))
    assert over_tcp == seen
    assert all(0 < prob <= 1 for chunk in seen for prob in chunk.probs)


@pytest.mark.parametrize("cut", [([0, 1, 2],), ([0, 1], [2]), ([0, 2], [1]), ([2], [1], [0])], ids=str)
def test_hosts_may_hold_any_blocks_and_be_named_in_any_order(cut: tuple[list[int], ...]) -> None:
    model = noisy("denoise")
    with serving(model, *cut) as servers, client_of(servers) as client:
        assert client.generate(b"hello", 3 * T, seed=3) == model.generate(b"hello", 3 * T, seed=3)
        assert all(running.server.num_walks for running in servers)


def test_states_in_bf16_take_about_half_the_bytes() -> None:
    model = causal("features", width=64, window_bytes=64)
    received = {}
    for wire in ("fp32", "bf16"):
        with serving(model, [0], [1], [2]) as servers, client_of(servers, wire=wire, chained=False) as client:
            client.generate(bytes(range(64)), 1)
            received[wire] = client.traffic_bytes[1]
    assert received["bf16"] < 0.6 * received["fp32"]


class Dying:
    """Walks for a client; before the walk of a given number it has a host stop."""

    def __init__(self, walker: Callable[[Walk], Decision], at: int, stop: Callable[[], None]) -> None:
        self._walker = walker
        self._at = at
        self._stop = stop
        self._number = 0

    def __call__(self, walk: Walk) -> Decision:
        if self._number == self._at:
            self._stop()
        self._number += 1
        return self._walker(walk)


@pytest.mark.parametrize("chained", [True, False], ids=["chained", "step by step"])
@pytest.mark.parametrize("block_idx", [0, 1, 2])
@pytest.mark.parametrize("case", [("ByteTransformer", "features"), ("DiffusionBlocks", "denoise_features")], ids=str)
def test_a_text_moves_to_a_replica_when_a_host_dies_and_stays_the_same(
    case: tuple[str, str], block_idx: int, chained: bool
) -> None:
    model: Model = lively(*case, window_bytes=32)
    expected = model.generate(b"hello", 40, chunk_bytes=4, sweeps=2, seed=5)
    with serving(model, [0], [1], [2], [0], [1], [2]) as servers:
        with client_of(servers, chained=chained) as client, client.walker() as walker:
            twins = [servers[block_idx], servers[block_idx + 3]]

            def stop() -> None:
                [used] = [running for running in twins if running.host.num_sessions]
                used.stop()

            decoder = Decoder(Dying(walker, 9, stop), 32, Sampling(seed=5))
            text = list(b"hello")
            while len(text) < 45:
                text += decoder.decide(text, min(4, 45 - len(text)), 2).decided
            assert walker.num_moves >= 1
        assert bytes(text[5:]) == expected


@pytest.mark.parametrize("chained", [True, False], ids=["chained", "step by step"])
@pytest.mark.parametrize("block_idx", [0, 1, 2])
def test_without_a_replica_the_error_names_the_block(block_idx: int, chained: bool) -> None:
    model = causal("features")
    with serving(model, [0], [1], [2]) as servers, client_of(servers, chained=chained) as client:
        chunks = client.stream(b"hello", 40)
        next(chunks)
        servers[block_idx].stop()
        with pytest.raises(
            HostLostError, match=rf"Block {block_idx} is served by no host.*{servers[block_idx].address}"
        ):
            list(chunks)


def test_a_host_that_came_back_serves_again() -> None:
    model = causal("features")
    with serving(model, [0, 1, 2]) as [first], client_of([first]) as client:
        before = client.generate(b"hello", 9, seed=1)
        first.restart()
        assert client.generate(b"hello", 9, seed=1) == before


def test_a_text_that_moves_leaves_no_session_behind() -> None:
    model = causal("features")
    with serving(model, [0], [1], [2]) as servers, client_of(servers) as client:
        chunks = client.stream(b"hello", 20, seed=1)
        text = bytes(next(chunks).decided)
        servers[2].restart()
        text += b"".join(bytes(chunk.decided) for chunk in chunks)
        assert text == model.generate(b"hello", 20, seed=1)
        assert all_forgotten(servers)


def test_a_host_that_ends_the_connection_says_why() -> None:
    with serving(causal("features"), [0, 1, 2]) as servers, client_of(servers) as client:
        walker = client.walker()
        with pytest.raises(HostLostError, match=r"The inputs of a walk are 0 to 256"):
            walker(Walk(0, (300,), 0, 1, Sampling()))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the certificates are made with openssl")
def test_tls_from_client_to_host_and_from_host_to_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal("features")
    certificate, stranger = make_certificate(tmp_path, "right"), make_certificate(tmp_path, "wrong")
    tls = server_tls("127.0.0.1", certificate, None)
    with serving(model, [0], [1, 2], tls=tls) as servers:
        assert all(running.address.startswith("tls://127.0.0.1:") for running in servers)
        monkeypatch.setenv("BLOCKTRAIN_CAFILE", str(certificate))
        with client_of(servers) as client:
            assert client.generate(b"hello", 8, seed=1) == model.generate(b"hello", 8, seed=1)
        with pytest.raises(HostLostError):  # without TLS
            SweepClient(route_of(servers).replace("tls://", ""), TOKEN, patience=Patience(connect_s=5.0))
        monkeypatch.setenv("BLOCKTRAIN_CAFILE", str(stranger))
        with pytest.raises(HostLostError, match="CERTIFICATE_VERIFY_FAILED"):
            client_of(servers)


def test_listening_for_others_without_tls_warns() -> None:
    with pytest.warns(UserWarning, match=r"listens on 0\.0\.0\.0 without TLS"):
        assert server_tls("0.0.0.0", None, None) is None


def test_hosts_of_different_versions_are_refused() -> None:
    ours, others = causal("features"), causal("features")
    others.layers[2].mlp.up.bias.data += 1e-3
    with (
        serving(ours, [0], [1]) as first,
        serving(others, [2]) as second,
        pytest.raises(
            ServingError, match=r"same version of one model; got version: \w{16} at .*, \w{16} at .*; export"
        ),
    ):
        client_of([*first, *second])


def test_a_replica_that_comes_back_with_other_weights_is_left_out_and_the_others_go_on() -> None:
    ours, others = causal("features"), causal("features")
    others.layers[2].mlp.up.bias.data += 1e-3
    expected = ours.generate(b"hello", 12, seed=1)
    with serving(ours, [0, 1, 2], [0, 1, 2]) as servers, client_of(servers) as client:
        servers[1].restart(host_of(others, [0, 1, 2]))
        for _ in range(3):  # whichever of the two has its turn
            assert client.generate(b"hello", 12, seed=1) == expected
        servers[0].stop()
        with pytest.raises(HostLostError, match=r"Block 0 is served by no host.*it serves version \w{16}"):
            client.generate(b"hello", 12)


def test_hosts_of_different_dtypes_are_told_so() -> None:
    model = causal("features")
    half = BlockHost(model, describe(model, entries_of(model)), [1, 2], "bf16")
    with (
        serving(model, [0]) as first,
        serving(half) as second,
        pytest.raises(ServingError, match=r"got dtype: bf16 at .*, fp32 at .*; start all hosts with"),
    ):
        client_of([*first, *second])


def test_a_text_goes_to_a_replica_that_has_room() -> None:
    model = causal("features")
    with serving(model, [0, 1, 2], [0, 1, 2], max_sessions=1) as servers, client_of(servers) as client:
        held = client.stream(b"hello", 9, seed=1)
        first = next(held)
        for seed in range(3):
            assert client.generate(b"a", 4, seed=seed) == model.generate(b"a", 4, seed=seed)
        rest = b"".join(bytes(chunk.decided) for chunk in held)
        assert bytes(first.decided) + rest == model.generate(b"hello", 9, seed=1)


@pytest.mark.parametrize("error", [ConnectionRefusedError("no"), ValueError("no"), UnicodeError("no")], ids=repr)
def test_hosts_that_do_not_reach_one_another_answer_the_client(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(*options: Any) -> Any:
        raise error

    monkeypatch.setattr(block_server, "open_link", refuse)
    model = causal("features")
    with serving(model, [0], [1], [2]) as servers, client_of(servers) as client, client.walker() as walker:
        decoder = Decoder(walker, T, Sampling(seed=3))
        text = b"".join(bytes(chunk.decided) for chunk in continuation(decoder, b"hello", 9, 1, 1))
        assert text == model.generate(b"hello", 9, seed=3)
        assert walker.num_moves == 1
    assert "is not reached: no. States of this text go through the client" in caplog.text


def test_a_host_that_is_full_does_not_end_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any) -> Any:
        raise AssertionError("step by step")

    monkeypatch.setattr(Fleet, "walk_step_by_step", never)
    model = causal("features")
    with serving(model, [0, 1, 2], [0, 1, 2], max_sessions=1) as servers, client_of(servers) as client:
        held = client.stream(b"hello", 9, seed=1)
        next(held)
        moves = []
        for seed in range(3):
            with client.walker() as walker:
                decoder = Decoder(walker, T, Sampling(seed=seed))
                text = b"".join(bytes(chunk.decided) for chunk in continuation(decoder, b"a", 4, 1, 1))
            assert text == model.generate(b"a", 4, seed=seed)
            moves.append(walker.num_moves)
        assert max(moves) > 0  # one came to the host that is full
        held.close()


def test_a_text_does_not_wait_for_a_host_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal("features")
    with serving(model, [0, 1, 2], [0, 1, 2]) as servers, client_of(servers) as client:
        servers[0].stop()
        assert client.generate(b"a", 4, seed=1) == model.generate(b"a", 4, seed=1)
        dialled = threading.Event()

        async def hang(*options: Any) -> Any:
            dialled.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(fleet, "open_link", hang)
        assert client.generate(b"a", 4, seed=2) == model.generate(b"a", 4, seed=2)
        assert dialled.wait(20.0)


def test_a_repetition_has_the_time_of_all_its_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    patience = Patience(walk_s=0.1, position_s=0.0)
    with serving(causal("features"), [0, 1, 2]) as [running], client_of([running], patience=patience) as client:
        run = running.host.run_together
        monkeypatch.setattr(running.host, "run_together", lambda errands: go.wait(20.0) and run(errands))
        walks = [Walk(start, (7,), start, 1, Sampling()) for start in range(3)]
        walker = client.walker()
        walker._kept = walks[:2]
        try:
            with pytest.raises(ServingError, match=r"No answer in 0\.3 s from blocks 0 to 2"):
                walker(walks[2])
        finally:
            go.set()


def test_hosts_that_disagree_keep_no_connection() -> None:
    limits = HostLimits(connections=1)
    one, other = causal("features"), lively("ByteTransformer", "features")
    with serving(one, [0, 1, 2], limits=limits) as first, serving(other, [0, 1, 2], limits=limits) as second:
        with pytest.raises(ServingError, match="the same version"):
            client_of([*first, *second])
        for running in (*first, *second):
            with client_of([running]) as client:
                assert len(client.generate(b"a", 2)) == 2


def test_a_missing_block_is_named_before_anything_is_sent() -> None:
    with serving(causal("features"), [0], [2]) as servers, client_of(servers) as client:
        assert len(client.generate(b"a", 3, num_blocks=1)) == 3
        with pytest.raises(HostLostError, match=r"Block 1 is served by no host that is reached: .* \[0\]; .* \[2\]"):
            client.generate(b"a", 3)


@pytest.mark.parametrize("token", ["", "another"])
def test_a_wrong_token_is_refused(token: str) -> None:
    with serving(causal("features"), [0, 1, 2]) as servers:
        with pytest.raises(HostLostError, match="does not take this token"):
            SweepClient(route_of(servers), token, patience=SHORT)
        assert servers[0].host.num_sessions == 0


def test_nobody_listens_there() -> None:
    with serving(causal("features"), [0]) as servers:
        route = route_of(servers)
    with pytest.raises(HostLostError, match=f"No host of the route is reached: {route}: .*Connect call failed"):
        SweepClient(route, TOKEN, patience=SHORT)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"prompt": "text"}, "prompt must be bytes.*prompt=str"),
        ({"num_bytes": -1}, "num_bytes=-1"),
        ({"num_blocks": 4}, r"in 1 \.\. 3; got num_blocks=4"),
        ({"chunk_bytes": T + 1}, f"chunk_bytes={T + 1}"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"num_draws": 2}, "num_draws above 1 needs a model with noise"),
        ({"num_draws": 65}, r"num_draws must be in 1 \.\. 64"),
        ({"seed": 2**63}, f"seed={2**63}"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": 10**400}, "temperature=1000"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"chunk_bytes": "a"}, "chunk_bytes='a'"),
        ({"sweeps": True}, "sweeps=True"),
        ({"num_bytes": 3.5}, "num_bytes=3.5"),
    ],
)
def test_wrong_arguments_are_refused_before_a_host_is_asked(choices: dict[str, Any], words: str) -> None:
    with serving(causal("features"), [0, 1, 2]) as servers, client_of(servers) as client:
        with pytest.raises(ValueError, match=words):
            client.generate(**{"prompt": b"a", "num_bytes": 3, **choices})
        assert servers[0].server.num_walks == 0


def test_a_long_output_restarts_its_window_as_one_process_does() -> None:
    model = causal("features", window_bytes=16)
    with serving(model, [0, 1], [2]) as servers, client_of(servers) as client:
        assert client.generate(b"x" * 50, 150, seed=2) == model.generate(b"x" * 50, 150, seed=2)


def test_a_client_that_leaves_in_mid_stream_frees_its_place() -> None:
    with serving(causal("features"), [0], [1, 2]) as servers:
        client = client_of(servers)
        chunks = client.stream(b"hello", 40)
        next(chunks)
        assert [running.host.num_sessions for running in servers] == [1, 1]
        client.close()  # as a process that dies does: nothing is said
        assert all_forgotten(servers)


def test_more_sessions_than_places_are_refused_and_a_free_place_is_used() -> None:
    model = causal("features")
    with serving(model, [0, 1, 2], max_sessions=1) as servers, client_of(servers) as client:
        first = client.stream(b"hello", 4, seed=1)
        begun = next(first)
        with pytest.raises(ServingError, match="All 1 sessions of the host are taken: add a replica, or raise"):
            client.generate(b"a", 1)
        rest = b"".join(bytes(chunk.decided) for chunk in first)
        assert bytes(begun.decided) + rest == model.generate(b"hello", 4, seed=1)
        assert len(client.generate(b"a", 1)) == 1


def test_a_host_that_does_not_answer_is_left_within_a_bounded_time() -> None:
    model = causal("features")
    patience = Patience(walk_s=0.3, position_s=0.0, redial_s=60.0, ping_s=2.0)
    with serving(model, [0, 1, 2], [0, 1, 2]) as servers, client_of(servers, patience=patience) as client:
        chunks = client.stream(b"hello", 20, seed=1)
        text = bytes(next(chunks).decided)
        [used] = [running for running in servers if running.host.num_sessions]
        with used.frozen():
            text += b"".join(bytes(chunk.decided) for chunk in chunks)
        assert text == model.generate(b"hello", 20, seed=1)


def test_limits_of_a_host() -> None:
    limits = HostLimits(connections=1)
    with serving(causal("features"), [0, 1, 2], limits=limits) as servers, client_of(servers) as client:
        with pytest.raises(HostLostError, match="All 1 connections are taken"):
            client_of(servers)
        assert len(client.generate(b"a", 2)) == 2


def test_texts_at_the_same_time_do_not_disturb_one_another() -> None:
    model = noisy("denoise_features")
    with serving(model, [0], [1], [2]) as servers, client_of(servers) as client:

        async def all_of_them() -> list[bytes]:
            return await asyncio.gather(
                *(asyncio.to_thread(client.generate, b"hello", 12, chunk_bytes=4, seed=seed) for seed in range(8))
            )

        found = asyncio.run(all_of_them())
    assert found == [model.generate(b"hello", 12, chunk_bytes=4, seed=seed) for seed in range(8)]
