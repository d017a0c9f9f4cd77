"""Completions over HTTP, asked for with the client that the public uses, against the same model in one process."""

import gzip
import http.client
import json
import logging
import math
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from lightning_blocktrain.errors import PortInUseError
from lightning_blocktrain.models.generation import Decision, Decoder, LocalWalker, Sampling, continuation
from lightning_blocktrain.serving.block_host import Facts
from lightning_blocktrain.serving.client import SweepClient
from lightning_blocktrain.serving.completion_fields import CompletionLimits
from lightning_blocktrain.serving.completions import CompletionServer
from lightning_blocktrain.serving.fleet import Patience, ServingError
from lightning_blocktrain.transport.loop import LoopThread
from tests.models.cases import T, causal, noisy
from tests.serving.local import TOKEN as HOSTS_TOKEN
from tests.serving.local import Running, route_of, serving
from tests.transport.test_http import make_certificate

TOKEN = "another-token"
WAIT_S = 20.0
SHORT = Patience(connect_s=5.0, walk_s=20.0, redial_s=0.0)
FACTS = Facts("v", (0,), 1, "fp32", T, 0.5, True)


class Scripted:
    """Stands for a ``SweepClient``: every text is the same script.

    Each item of it waits for ``go``, one that is an event also for that.
    """

    def __init__(self, *script: bytes | Exception | threading.Event, facts: Facts = FACTS) -> None:
        self.facts = facts
        self.go, self.begun = threading.Event(), threading.Event()
        self.go.set()
        self.closed_in: list[str] = []
        """Names of the threads in which texts have been closed."""
        self._script = script

    def stream(self, prompt: bytes, num_bytes: int, **options: Any) -> Iterator[Decision]:
        try:
            for chunk in self._script:
                self.begun.set()
                assert self.go.wait(WAIT_S)
                if isinstance(chunk, threading.Event):
                    assert chunk.wait(WAIT_S)
                    continue
                if isinstance(chunk, Exception):
                    raise chunk
                yield Decision(tuple(chunk), (0.5,) * len(chunk))
        finally:
            self.closed_in.append(threading.current_thread().name)


class Completing:
    """A server of completions, and what its clients need."""

    def __init__(self, server: CompletionServer, servers: Sequence[Running] = ()) -> None:
        self.server = server
        self.servers = servers
        self.port = int(server.url.rpartition(":")[2])

    def openai(self, token: str = TOKEN) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=token, max_retries=0, timeout=WAIT_S)

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            given = {"Authorization": f"Bearer {TOKEN}"} if headers is None else headers
            connection.request(method, path, body, given)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def refused(self, *request: Any) -> tuple[int, dict[str, Any]]:
        """Return status and error of a request that is refused in the one form there is."""
        status, answer = self.ask(*request)
        assert answer.keys() == {"error"} and answer["error"].keys() == {"message", "type", "param", "code"}
        return status, answer["error"]

    def open(self, cut_bytes: int = 0, **fields: Any) -> socket.socket:
        """Send a request without its last bytes and return the connection, from which nothing has been read."""
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**15)
        raw.settimeout(WAIT_S)
        raw.connect(("127.0.0.1", self.port))
        body = body_of(**fields)
        lines = ["POST /v1/completions HTTP/1.1", "Host: a", f"Authorization: Bearer {TOKEN}"]
        raw.sendall(
            "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body[: len(body) - cut_bytes]
        )
        return raw


@contextmanager
def server_of(client: Any, token: str = TOKEN, **options: Any) -> Iterator[Completing]:
    thread = LoopThread("test-completions")
    server = CompletionServer(client, token, **options)
    try:
        thread.run(server.start)
        yield Completing(server)
    finally:
        thread.run(server.stop)
        thread.close(server.stop)


@contextmanager
def completing(model: Any, *blocks: Sequence[int], **options: Any) -> Iterator[Completing]:
    """Serve completions of a model whose blocks are served, [0] and [1, 2] if nothing is said."""
    with (
        serving(model, *(blocks or ([0], [1, 2]))) as servers,
        SweepClient(route_of(servers), HOSTS_TOKEN, patience=SHORT) as client,
        server_of(client, **options) as found,
    ):
        found.servers = servers
        yield found


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": "blocktrain", "prompt": "hello", **fields}).encode()


def wait_until(holds: Callable[[], bool]) -> None:
    """Return when other threads have brought a condition about."""
    end, turn = time.monotonic() + WAIT_S, threading.Event()
    while not holds():
        assert time.monotonic() < end
        turn.wait(0.002)


def wait_until_no_session_is_left(served: Completing) -> None:
    """Return when the hosts have heard that the sessions are over; nobody waits for an answer to that."""
    wait_until(lambda: [running.host.num_sessions for running in served.servers] == [0, 0])


def text_of(model: Any, prompt: str, num_bytes: int, **options: Any) -> str:
    return str(model.generate(prompt.encode(), num_bytes, **options).decode(errors="replace"))


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    dials = {name: fields.pop(name) for name in ("chunk_bytes", "sweeps", "num_draws", "num_blocks") if name in fields}
    return client.completions.create(**{"model": "blocktrain", "prompt": "hello", **fields}, extra_body=dials)


# What is written


@pytest.mark.parametrize(
    "dials",
    [
        {},
        {"temperature": 0.0, "num_blocks": 2},
        {"temperature": 0.7, "chunk_bytes": 4, "sweeps": 2, "num_draws": 3},
    ],
    ids=str,
)
def test_completion_is_what_generate_writes_whole_and_in_events(dials: dict[str, Any]) -> None:
    model = noisy("denoise")
    expected = text_of(model, "h\u00e9llo", 3 * T, seed=5, **dials)
    with completing(model) as served, served.openai() as client:
        fields = {"prompt": "h\u00e9llo", "max_tokens": 3 * T, "seed": 5, **dials}
        answer = ask(client, **fields)
        events = list(ask(client, **fields, stream=True, stream_options={"include_usage": True}))
        wait_until_no_session_is_left(served)
    (choice,) = answer.choices
    assert (choice.text, choice.index, choice.finish_reason, choice.logprobs) == (expected, 0, "length", None)
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 6,
        "completion_tokens": 3 * T,
        "total_tokens": 3 * T + 6,
    }
    *written, last, usage = events
    assert "".join(event.choices[0].text for event in [*written, last]) == expected
    assert len(written) > 2 and [event.choices[0].finish_reason for event in written] == [None] * len(written)
    assert last.choices[0].finish_reason == "length"
    assert (usage.choices, usage.usage) == ([], answer.usage)
    assert {event.id for event in events} == {usage.id} != {answer.id}
    assert answer.system_fingerprint == usage.system_fingerprint == served.servers[0].host.facts.version


def test_a_character_that_two_events_could_share_comes_whole() -> None:
    model = causal("features")
    # The first seed with which the model, which has learnt nothing, writes a character of several bytes.
    seed = next(seed for seed in range(100) if set(text_of(model, "hello", 16, seed=seed)) - {"\ufffd"} - ASCII)
    with completing(model) as served, served.openai() as client:
        events = list(ask(client, seed=seed, stream=True))
    assert "".join(event.choices[0].text for event in events) == text_of(model, "hello", 16, seed=seed)


ASCII = set(map(chr, range(128)))


def test_prompts_of_a_list_are_continued_in_order_each_from_a_seed_of_its_own() -> None:
    model = causal("residual")
    prompts = ["abc", "", "abc", "\u20ac"]
    expected = [text_of(model, prompt, 10, seed=7 + index) for index, prompt in enumerate(prompts)]
    assert expected[0] != expected[2]
    with completing(model) as served, served.openai() as client:
        answer = ask(client, prompt=prompts, max_tokens=10, seed=7)
        events = list(ask(client, prompt=prompts, max_tokens=10, seed=7, stream=True))
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 40)
    for index, text in enumerate(expected):
        assert "".join(event.choices[0].text for event in events if event.choices[0].index == index) == text


def test_choices_of_a_prompt_are_drawn_from_following_seeds() -> None:
    model = noisy("mse")
    with completing(model) as served, served.openai() as client:
        answer = ask(client, prompt=["abc", "de"], n=2, seed=3)
    texts = [choice.text for choice in answer.choices]
    assert texts == [
        text_of(model, prompt, 16, seed=3 + index) for index, prompt in enumerate(["abc", "abc", "de", "de"])
    ]
    assert texts[0] != texts[1]
    assert answer.usage.prompt_tokens == 5


def test_a_seed_that_is_not_given_is_drawn_and_told() -> None:
    model = causal("features")
    with completing(model) as served, served.openai() as client:
        first, second = ask(client), ask(client)
        again = ask(client, seed=first.seed)
        told = {event.seed for event in ask(client, seed=first.seed, stream=True)}
    assert first.seed != second.seed and first.choices[0].text != second.choices[0].text
    assert again.choices == first.choices and told == {first.seed}
    assert first.choices[0].text == text_of(model, "hello", 16, seed=first.seed)


@pytest.mark.parametrize("chunk_bytes", [1, 8])
def test_a_stop_ends_the_text_before_it(chunk_bytes: int) -> None:
    model = noisy("denoise")
    written = model.generate(b"hello", 64, seed=2, chunk_bytes=chunk_bytes)
    at = next(idx for idx in range(20, 64) if written[idx] < 128 and written.index(written[idx]) == idx)
    fields = {"max_tokens": 64, "seed": 2, "stop": [chr(written[at]), "no such text"], "chunk_bytes": chunk_bytes}
    with completing(model) as served, served.openai() as client:
        answer = ask(client, **fields)
        events = list(ask(client, **fields, stream=True))
        wait_until_no_session_is_left(served)
    expected = written[:at].decode(errors="replace")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
    assert answer.usage.completion_tokens == at
    assert "".join(event.choices[0].text for event in events) == expected
    assert [event.choices[0].finish_reason for event in events if event.choices[0].finish_reason] == ["stop"]


def test_logprobs_are_those_of_the_model_at_temperature_1() -> None:
    model = noisy("denoise_features")
    decoder = Decoder(LocalWalker(model, 3), T, Sampling(0.5, 4))
    decided = list(continuation(decoder, b"hello", 20, 4, 1))
    fields = {"max_tokens": 20, "seed": 4, "temperature": 0.5, "chunk_bytes": 4, "logprobs": 1}
    with completing(model) as served, served.openai() as client:
        found = ask(client, **fields).choices[0].logprobs
        events = [event.choices[0].logprobs for event in ask(client, **fields, stream=True)]
    written = [byte for decision in decided for byte in decision.decided]
    assert found.tokens == [chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}" for byte in written]
    assert found.token_logprobs == [math.log(prob) for decision in decided for prob in decision.probs]
    assert (found.text_offset[0], len(found.text_offset), found.top_logprobs) == (0, 20, None)
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for event in events for value in getattr(event, name)] == getattr(found, name)


def test_echo_begins_a_text_with_its_prompt() -> None:
    model = causal("features")
    expected = "h\u00e9" + text_of(model, "h\u00e9", 5, seed=1)
    with completing(model) as served, served.openai() as client:
        fields = {"prompt": "h\u00e9", "max_tokens": 5, "seed": 1, "echo": True}
        answer = ask(client, **fields)
        assert (answer.choices[0].text, answer.usage.completion_tokens) == (expected, 5)
        assert "".join(event.choices[0].text for event in ask(client, **fields, stream=True)) == expected
        assert ask(client, **{**fields, "max_tokens": 0}).choices[0].text == "h\u00e9"


def test_many_requests_at_once_are_all_answered_right() -> None:
    model = noisy("denoise")
    expected = [text_of(model, f"prompt {idx}", 12, seed=idx) for idx in range(8)]
    with (
        completing(model, limits=CompletionLimits(running=3)) as served,
        served.openai() as client,
        ThreadPoolExecutor(8) as pool,
    ):

        def text(idx: int) -> str:
            fields = {"prompt": f"prompt {idx}", "max_tokens": 12, "seed": idx}
            if idx % 2:
                return "".join(event.choices[0].text for event in ask(client, **fields, stream=True))
            return str(ask(client, **fields).choices[0].text)

        assert list(pool.map(text, range(8))) == expected
        wait_until_no_session_is_left(served)


def test_models_are_listed_and_shown() -> None:
    with server_of(Scripted(), model="a/name") as served, served.openai() as client:
        (model,) = client.models.list().data
        assert (model.id, model.object, model.owned_by) == ("a/name", "model", "blocktrain")
        assert client.models.retrieve("a/name") == model
        with pytest.raises(openai.NotFoundError, match="model must be 'a/name'"):
            client.models.retrieve("other")


def test_events_are_of_the_form_that_clients_read() -> None:
    with server_of(Scripted(b"a", b"\xe2", b"\x82\xac")) as served, served.open(stream=True) as raw:
        answer = http.client.HTTPResponse(raw)
        answer.begin()
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2]]
    assert texts == ["a", "\u20ac", ""]  # what says nothing is not sent


def test_events_hold_the_logprobs_of_bytes_whose_character_is_not_complete() -> None:
    with server_of(Scripted(b"\xe2", b"\x82\xac")) as served, served.openai() as client:
        events = list(ask(client, logprobs=0, stream=True))
    tokens = [event.choices[0].logprobs.tokens for event in events]
    assert tokens == [["bytes:\\xe2"], ["bytes:\\x82", "bytes:\\xac"], []]
    assert [event.choices[0].text for event in events] == ["", "\u20ac", ""]


# What is refused


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": "many"}, "max_tokens", "max_tokens must be an integer in 0 .. 4096; got max_tokens='many'"),
        ({"prompt": [1, 2]}, "prompt", "prompt must be text"),
        ({"suffix": "x"}, "suffix", "suffix must be left out"),
        ({"temperature": -1}, "temperature", "temperature must be"),
        ({"unheard_of": 1}, "unheard_of", "unheard_of must be left out"),
        ({"n": 17}, "n", "n must be an integer in 1 .. 16"),
        # Those that only the model can refuse:
        ({"chunk_bytes": T + 1}, "chunk_bytes", f"window_bytes={T}"),
        ({"num_draws": 2}, "num_draws", "num_draws above 1 needs a model with noise"),
        ({"num_blocks": 4}, "num_blocks", "must be in 1 .. 3; got num_blocks=4"),
    ],
    ids=str,
)
def test_a_wrong_field_is_400_and_named(fields: dict[str, Any], param: str, words: str) -> None:
    with completing(causal("features"), [0, 1, 2]) as served:
        status, error = served.refused("POST", "/v1/completions", body_of(**fields))
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert words in error["message"]
        with served.openai() as client, pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="blocktrain", prompt="hello", extra_body=fields)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nowhere", None, 404),
        ("POST", "/v1/chat/completions", b"{}", 404),
        ("GET", "/v1/completions", None, 405),
        ("POST", "/v1/completions", None, 400),
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"[]", 400),
        ("POST", "/v1/completions", b"\xff", 400),
        ("POST", "/v1/completions", b"[" * 50_000, 400),
        ("POST", "/v1/completions", b"9" * 5000, 400),
        ("POST", "/v1/completions", body_of(model="other"), 404),
        ("POST", "/v1/completions", body_of(prompt="x" * 100_000), 413),
    ],
)
def test_a_request_that_makes_no_sense_gets_one_json_error(
    method: str, path: str, body: bytes | None, status: int
) -> None:
    with server_of(Scripted(b"ab"), limits=CompletionLimits(body_bytes=60_000)) as served:
        assert served.refused(method, path, body)[0] == status
        assert served.ask("POST", "/v1/completions", body_of())[1]["choices"][0]["text"] == "ab"


def test_an_unknown_model_is_404_and_named() -> None:
    with server_of(Scripted(b"ab")) as served, served.openai() as client:
        with pytest.raises(openai.NotFoundError) as caught:
            ask(client, model="gpt-2")
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
        assert "model must be 'blocktrain'" in caught.value.message and "got model='gpt-2'" in caught.value.message


def test_a_compressed_body_is_refused() -> None:
    with server_of(Scripted(b"ab")) as served:
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Encoding": "gzip"}
        status, error = served.refused("POST", "/v1/completions", gzip.compress(body_of()), headers)
        assert (status, error["message"]) == (400, "A body must not be compressed.")


def test_a_body_that_does_not_go_on_is_given_up() -> None:
    limits = CompletionLimits(stall_timeout_s=0.1)
    with server_of(Scripted(b"ab"), limits=limits) as served, served.open(cut_bytes=10) as raw:
        answer = http.client.HTTPResponse(raw)
        answer.begin()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (408, "stalled")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": TOKEN},
        {"Authorization": "Bearer "},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer \u00e9\u00ff"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/nowhere"])
def test_a_request_without_the_token_is_401_everywhere(path: str, headers: dict[str, str]) -> None:
    with server_of(Scripted()) as served:
        status, error = served.refused("GET", path, None, headers)
        assert (status, error["type"]) == (401, "authentication_error")
        assert TOKEN not in error["message"] and "wrong" not in error["message"]


def test_a_wrong_token_writes_nothing_and_too_many_have_to_wait() -> None:
    scripted = Scripted(b"ab")
    with server_of(scripted, limits=CompletionLimits(failed_tokens=2)) as served:
        with served.openai("wrong") as stranger:
            for error in (openai.AuthenticationError, openai.AuthenticationError, openai.RateLimitError):
                with pytest.raises(error):
                    ask(stranger)
        with served.openai() as client, pytest.raises(openai.RateLimitError, match="Too many wrong tokens"):
            ask(client)
    assert not scripted.begun.is_set()


def test_an_empty_token_asks_nobody() -> None:
    with server_of(Scripted(b"ab"), token="") as served:
        assert served.ask("POST", "/v1/completions", body_of(), {})[0] == 200
        with served.openai("any") as client:
            assert ask(client).choices[0].text == "ab"


def test_no_log_record_holds_the_token(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with server_of(Scripted(RuntimeError("broken"))) as served:
        assert served.refused("GET", "/v1/models", None, {"Authorization": "Bearer wrong-guess"})[0] == 401
        assert served.refused("POST", "/v1/completions", body_of())[0] == 500
    assert "broken" in caplog.text
    assert TOKEN not in caplog.text and "wrong-guess" not in caplog.text


# Limits and losses


def test_too_many_completions_under_way_are_429_until_one_has_ended() -> None:
    scripted = Scripted(b"ab")
    scripted.go.clear()
    limits = CompletionLimits(running=1, under_way=3, choices=2)
    with server_of(scripted, limits=limits) as served, served.openai() as client, ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, client, n=2)
        wait_until(lambda: served.server.num_under_way == 2)
        with pytest.raises(openai.RateLimitError, match="2 completions are under way; at most 3 may be") as caught:
            ask(client, n=2)
        assert caught.value.response.headers["Retry-After"] == "1"
        scripted.go.set()
        assert [choice.text for choice in first.result(WAIT_S).choices] == ["ab", "ab"]
        # Its place is free when it is answered, not some time after that.
        for _ in range(20):
            assert len(ask(client, n=2).choices) == 2
    assert set(scripted.closed_in) == {"blocktrain-completions_0"}


def test_blocks_that_nobody_serves_are_503() -> None:
    model = causal("features")
    with completing(model) as served, served.openai() as client:
        served.servers[1].stop()
        for stream in (False, True):  # also before the first event
            with pytest.raises(openai.InternalServerError, match="Block 1 is served by no host") as caught:
                ask(client, stream=stream)
            assert caught.value.status_code == 503 and caught.value.body["type"] == "server_error"
        served.servers[1].restart()
        assert ask(client, seed=1).choices[0].text == text_of(model, "hello", 16, seed=1)
        assert served.server.num_under_way == 0


def test_what_fails_after_the_first_event_ends_them_with_an_error() -> None:
    with server_of(Scripted(b"ab", ServingError("Block 1 is lost."))) as served, served.openai() as client:
        events = iter(ask(client, stream=True))
        assert next(events).choices[0].text == "ab"
        with pytest.raises(openai.APIError, match=r"Block 1 is lost\.") as caught:
            next(events)
        assert caught.value.body["code"] == "unavailable"
        with served.open(stream=True) as raw:
            answer = http.client.HTTPResponse(raw)
            answer.begin()
            assert b"[DONE]" not in answer.read()


def test_an_error_of_one_choice_ends_the_others() -> None:
    scripted = Scripted(b"a", RuntimeError("broken"))
    with server_of(scripted) as served, served.openai() as client:
        with pytest.raises(openai.InternalServerError, match="its log says why"):
            ask(client, n=5)
        wait_until(lambda: served.server.num_under_way == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_sessions(stream: bool) -> None:
    with completing(noisy("denoise")) as served:
        with served.open(max_tokens=4096, stream=stream, n=2):
            wait_until(lambda: [running.host.num_sessions for running in served.servers] == [2, 2])
        wait_until_no_session_is_left(served)
        wait_until(lambda: served.server.num_under_way == 0)
        assert served.servers[0].server.num_walks < 2 * 4096  # they have not come to their end


def test_a_stream_that_is_closed_ends_in_the_thread_that_writes_it() -> None:
    on = threading.Event()
    scripted = Scripted(b"ab", on, *[b"ab"] * 4096)
    with server_of(scripted) as served, served.openai() as client:
        stream = ask(client, stream=True, max_tokens=4096)
        assert next(iter(stream)).choices[0].text == "ab"
        stream.close()
        on.set()
        wait_until(lambda: bool(scripted.closed_in))
    assert scripted.closed_in == ["blocktrain-completions_0"]


def test_a_completion_that_waits_is_dropped_when_its_client_goes() -> None:
    scripted = Scripted(b"ab")
    scripted.go.clear()
    with server_of(scripted, limits=CompletionLimits(running=1)) as served:
        with served.open():
            assert scripted.begun.wait(WAIT_S)
            with served.open():
                wait_until(lambda: served.server.num_under_way == 2)
            wait_until(lambda: served.server.num_under_way == 1)
        scripted.go.set()
        wait_until(lambda: served.server.num_under_way == 0)
    assert len(scripted.closed_in) == 1


def test_a_client_that_reads_nothing_is_given_up() -> None:
    scripted = Scripted(*[b"ab"] * 40_000)  # more than the system holds for the two ends
    with server_of(scripted, limits=CompletionLimits(stall_timeout_s=0.1)) as served, served.open(stream=True):
        assert scripted.begun.wait(WAIT_S)
        wait_until(lambda: served.server.num_under_way == 0)
        # Not kept until the client has read all: what the client sees of it is the system's affair.
        runner = served.server._runner
        assert runner is not None and runner.server is not None
        wait_until(lambda: not runner.server.connections)
    assert scripted.closed_in == ["blocktrain-completions_0"]


# Start and stop


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(PortInUseError, match=f"got host=127.0.0.1, port={port}"),
            server_of(Scripted(), listen=("127.0.0.1", port)),
        ):
            pass


def test_stop_ends_what_is_under_way_and_gives_the_port_back() -> None:
    on = threading.Event()
    scripted = Scripted(b"ab", on, *[b"ab"] * 4096)
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        with server_of(scripted, limits=CompletionLimits(running=1)) as served:
            client = stack.enter_context(served.openai())
            events = iter(ask(client, stream=True))
            next(events)
            waiting = pool.submit(ask, client)
            wait_until(lambda: served.server.num_under_way == 2)
            pool.submit(lambda: (waiting.exception(WAIT_S), on.set()))
        with pytest.raises(openai.APIError, match=r"The server is stopping\."):
            list(events)
        error = waiting.exception(WAIT_S)
        assert isinstance(error, openai.InternalServerError) and error.status_code == 503
    with socket.create_server(("127.0.0.1", served.port)):
        pass
    assert "blocktrain-completions_0" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the certificate is made with openssl")
def test_tls_is_spoken(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path, "right")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with server_of(Scripted(b"ab"), tls=context) as served:
        assert served.server.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=str(certificate))
        with (
            openai.DefaultHttpxClient(verify=trusting) as trusted,
            openai.OpenAI(base_url=f"{served.server.url}/v1", api_key=TOKEN, http_client=trusted) as client,
        ):
            assert ask(client).choices[0].text == "ab"
