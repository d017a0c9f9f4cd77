"""The contract over HTTP: a worker's line to a coordinator anywhere, over outbound connections only.

Owns the retries, the time limits and the signs of life. Owns no byte format (``wire.py``).

A request that fails for a passing reason (no connection, a cut transfer, a coordinator that is restarting) is sent
again until ``reconnect_timeout_s`` have passed since its first failure. All requests can be repeated without harm. A
download that arrives damaged is tried ``DAMAGED_TRIES`` times. A transfer without progress for ``stall_timeout_s``
counts as cut.

Threads: calls come from one thread; transfers and signs of life run in the transport's own, so a worker that computes
is not taken for dead.
Memory: an upload holds two pieces beside the tensors; a download is received into the memory that its tensors are views
of, which grows with what has arrived and not with what was claimed.
"""

import asyncio
import json
import logging
import mmap
import ssl
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_random_exponential
from torch import Tensor
from typing_extensions import override

from lightning_blocktrain.errors import (
    CoordinatorUnreachableError,
    NotJoinedError,
    RequestRefusedError,
    RunEndedError,
    SupersededError,
    TransportError,
    WireError,
    explain,
)
from lightning_blocktrain.rounds import Receipt
from lightning_blocktrain.rounds.codecs import Codec
from lightning_blocktrain.transport.address import check_sendable, checked_url, is_loopback
from lightning_blocktrain.transport.base import (
    ERROR_CODES,
    Fetched,
    Submission,
    Transport,
    Welcome,
    WorkerFacts,
)
from lightning_blocktrain.transport.loop import LoopThread
from lightning_blocktrain.transport.messages import (
    pack_masters,
    pack_submission,
    receipt_of,
    unpack_fetched,
    welcome_of,
)
from lightning_blocktrain.transport.overlap import ahead, take_all
from lightning_blocktrain.transport.terms import RunTerms
from lightning_blocktrain.transport.versions import FRAME_TYPE, RUN_HEADER, WORKER_HEADER
from lightning_blocktrain.transport.wire import Outgoing, Piece, Receiver, read_frame

log = logging.getLogger(__name__)

T = TypeVar("T")

DAMAGED_TRIES = 4
MAX_ERROR_BYTES = 2**16
MAX_JSON_BYTES = 2**24
POLL_S = 20.0
"""Longest wait in one request; a longer one is asked again."""
LONGEST_PAUSE_S = 2.0
BEAT_TIMEOUT_S = 5.0


class _PassingError(Exception):
    """An answer that another try may better."""


class HttpTransport(Transport):
    """A worker's line to a coordinator over HTTP or HTTPS.

    Args:
        url: ``http://host:port`` or ``https://host:port``, as the coordinator printed it.
        run_id: The run to take part in; None, to watch whatever run there is: ``status`` only.
        token: Its secret; in no message or representation.
        cafile: PEM file of the authority that signed the coordinator's certificate; None: the system's.
        reconnect_timeout_s: How long a request is tried again after its first failure, finite.
        stall_timeout_s: A transfer without progress for so long counts as cut, finite.
        max_body_bytes: Longest message taken from the coordinator.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        url: str,
        run_id: str | None,
        token: str,
        *,
        cafile: Path | str | None = None,
        reconnect_timeout_s: float = 120.0,
        stall_timeout_s: float = 60.0,
        max_body_bytes: int = 2**36,
    ) -> None:
        self.url = checked_url(url)
        for name, value in (("run_id", run_id), ("token", token)):
            if value is not None:
                check_sendable(name, value, "use the one that the coordinator printed")
        for name, seconds in (("reconnect_timeout_s", reconnect_timeout_s), ("stall_timeout_s", stall_timeout_s)):
            if not 0 < seconds < float("inf"):
                raise ValueError(explain(f"{name} must be finite and above 0", f"{name}={seconds}", "give seconds"))
        self._headers = {"Authorization": f"Bearer {token}"}
        if run_id is not None:
            self._headers[RUN_HEADER] = run_id
        tls = ssl.create_default_context(cafile=cafile) if self.url.startswith("https:") else None
        # A redirection could carry token and weights elsewhere.
        self._fixed: dict[str, Any] = {"ssl": tls or True, "allow_redirects": False}
        self._reconnect_s = reconnect_timeout_s
        self._stall_s = stall_timeout_s
        self._max_body_bytes = max_body_bytes
        self._thread = LoopThread("blocktrain-http")
        self._session: aiohttp.ClientSession | None = None
        self._beats: asyncio.Task[None] | None = None
        self._welcome: Welcome | None = None
        self._expected: dict[tuple[str, bool], Future[Fetched | None]] = {}
        if tls is None and not is_loopback(urlsplit(self.url).hostname or ""):
            warnings.warn(f"{self.url} is plain HTTP: token and weights travel readable. Use https.", stacklevel=2)

    # The contract

    @override
    def found(self, terms: RunTerms, masters: Mapping[str, Mapping[str, Tensor]]) -> bool:
        answer = self._ask_frame("/v1/found", pack_masters(terms, None))
        if answer["founded"] is None:
            answer = self._ask_frame("/v1/found", pack_masters(terms, masters))
        return bool(answer["founded"])

    @override
    def join(self, facts: WorkerFacts, incarnation: int | None = None) -> Welcome:
        body = {"facts": {**vars(facts), "identity": dict(facts.identity)}, "incarnation": incarnation}
        self._welcome = welcome_of(self._ask("/v1/join", body))
        welcome = self._welcome
        self._thread.run(lambda: self._begin_beats(welcome))
        return welcome

    @override
    def fetch(
        self,
        entry: str,
        newer_than: int = -1,
        timeout_s: float = 20.0,
        codec: Codec | None = None,
        average: bool = False,
    ) -> Fetched | None:
        if not 0 <= timeout_s < float("inf"):
            raise ValueError(explain("timeout_s must be finite", f"timeout_s={timeout_s}", "give seconds, 0 or more"))
        ends_at = time.monotonic() + timeout_s
        if codec is None and (entry, average) in self._expected:
            fetched = self._take_expected(entry, average, newer_than, timeout_s)
            if fetched is not None or (entry, average) in self._expected:
                return fetched
        while True:
            left_s = max(0.0, ends_at - time.monotonic())
            wait_s = min(left_s, POLL_S)
            fetched = self._run(f"fetch {entry}", partial(self._download, entry, newer_than, wait_s, codec, average))
            if fetched is not None or left_s <= wait_s:
                return fetched

    @override
    def expect(self, entry: str, newer_than: int, average: bool = False) -> None:
        if (entry, average) not in self._expected:
            attempt = partial(self._download, entry, newer_than, POLL_S, None, average)
            self._expected[entry, average] = self._thread.start(lambda: self._try_again(f"fetch {entry}", attempt))

    def _take_expected(self, entry: str, average: bool, newer_than: int, timeout_s: float) -> Fetched | None:
        try:
            fetched = self._expected[entry, average].result(timeout_s)
        except TimeoutError:
            return None  # still under way
        except (TransportError, CancelledError):
            fetched = None  # whoever asks again hears of it
        del self._expected[entry, average]
        return fetched if fetched is not None and fetched.version > newer_than else None

    @override
    def submit(self, entry: str, submission: Submission) -> Receipt:
        if self._welcome is None:
            raise NotJoinedError("A worker must join before it submits.")
        outgoing = pack_submission(self._welcome.sender, submission)
        return receipt_of(self._ask_frame(f"/v1/entries/{quote(entry, safe='')}", outgoing))

    @override
    def leave(self) -> None:
        if self._welcome is not None:
            self._thread.run(self._end_beats)
            self._ask("/v1/leave", vars(self._welcome.sender))

    @override
    def dismiss(self, worker_id: int) -> bool:
        return bool(self._ask("/v1/dismiss", {"worker_id": worker_id})["dismissed"])

    @override
    def stop(self, reason: str) -> None:
        self._ask("/v1/stop", {"reason": reason})

    @override
    def status(self) -> dict[str, Any]:
        return dict(self._run("status", lambda: self._exchange("GET", "/status")))

    @override
    def close(self) -> None:
        self._thread.close(self._close_session)

    # One request

    def _ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return dict(self._run(path, lambda: self._exchange("POST", path, json=dict(body))))

    def _ask_frame(self, path: str, outgoing: Outgoing) -> dict[str, Any]:
        return dict(self._run(path, lambda: self._upload(path, outgoing)))

    async def _exchange(self, method: str, path: str, **body: Any) -> Any:
        async with (
            asyncio.timeout(self._stall_s),
            self._opened().request(method, self.url + path, **self._fixed, **body) as answer,
        ):
            await _refuse_bad(answer)
            return await _json_of(answer)

    async def _upload(self, path: str, outgoing: Outgoing) -> Any:
        loop = asyncio.get_running_loop()
        headers = {"Content-Length": str(outgoing.num_bytes), "Content-Type": FRAME_TYPE}
        async with asyncio.timeout(self._stall_s) as patience:

            async def pieces() -> AsyncIterator[Piece]:
                async for piece in ahead(outgoing.pieces()):
                    yield piece
                    patience.reschedule(loop.time() + self._stall_s)

            request = self._opened().post(self.url + path, data=pieces(), headers=headers, **self._fixed)
            async with request as answer:
                await _refuse_bad(answer)
                return await _json_of(answer)

    async def _download(
        self, entry: str, newer_than: int, wait_s: float, codec: Codec | None = None, average: bool = False
    ) -> Fetched | None:
        loop = asyncio.get_running_loop()
        query = {"newer_than": str(newer_than), "wait_s": f"{wait_s:.3f}", **({} if codec is None else codec.meta)}
        if average:
            query["average"] = "1"
        headers = {}
        if self._welcome is not None:
            headers[WORKER_HEADER] = f"{self._welcome.worker_id}/{self._welcome.incarnation}"
        path = f"/v1/entries/{quote(entry, safe='')}"
        async with asyncio.timeout(wait_s + self._stall_s) as patience:
            request = self._opened().get(self.url + path, params=query, headers=headers, **self._fixed)
            async with request as answer:
                await _refuse_bad(answer)
                if answer.status == 204:
                    return None
                answered_at = loop.time()
                num_bytes = answer.content_length or 0
                if not 0 < num_bytes <= self._max_body_bytes:
                    raise WireError(f"The answer has {num_bytes} bytes; at most {self._max_body_bytes} are taken.")
                memory = mmap.mmap(-1, num_bytes)  # a page of it is there when something is written to it
                receiver = Receiver(memory, num_bytes)

                async def pieces() -> AsyncIterator[bytes]:
                    async for piece, _ in answer.content.iter_chunks():
                        patience.reschedule(loop.time() + self._stall_s)
                        yield piece

                await take_all(pieces(), receiver.take_all)
                receiver.finish()
                return _passed(unpack_fetched(read_frame(memory)), loop.time() - answered_at)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Each request bounds its own time, by progress. A compressed answer is none of ours.
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(
                headers=self._headers, timeout=timeout, auto_decompress=False, read_bufsize=2**18
            )
        return self._session

    async def _close_session(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # Trying again

    def _run(self, what: str, attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return self._thread.run(lambda: self._try_again(what, attempt))

    async def _try_again(self, what: str, attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
        failed_at: list[float] = []

        async def once() -> T:  # tenacity only awaits what is declared like this
            return await attempt()

        def is_over(state: RetryCallState) -> bool:
            failed_at.append(time.monotonic())
            return failed_at[-1] - failed_at[0] >= self._reconnect_s or _too_often_damaged(state)

        retrying = AsyncRetrying(
            stop=is_over,
            wait=wait_random_exponential(multiplier=0.1, max=LONGEST_PAUSE_S),
            retry=retry_if_exception(_is_passing),
            before_sleep=lambda state: log.info("%s: %s; trying again", what, _cause(state)),
            reraise=True,
        )
        try:
            return await retrying(once)
        except (aiohttp.ClientError, OSError, WireError, _PassingError) as exc:
            waited_s = time.monotonic() - failed_at[0] if failed_at else 0.0
            cause = f"{type(exc).__name__}: {exc}"[:200]
            got = f"{what} failed {max(1, len(failed_at))} times in {waited_s:.1f} s, at last with {cause}"
            fix = "check the address and that the coordinator runs"
            raise CoordinatorUnreachableError(explain(f"{self.url} must answer", got, fix)) from exc

    # Signs of life

    async def _begin_beats(self, welcome: Welcome) -> None:
        await self._end_beats()
        self._beats = asyncio.create_task(self._beat(welcome))

    async def _end_beats(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
            with suppress(asyncio.CancelledError):
                await self._beats
            self._beats = None

    async def _beat(self, welcome: Welcome) -> None:
        while True:
            await asyncio.sleep(welcome.terms.beat_every_s)
            try:
                async with asyncio.timeout(BEAT_TIMEOUT_S):
                    await self._exchange("POST", "/v1/beat", json=vars(welcome.sender))
            except (SupersededError, RunEndedError, NotJoinedError) as exc:
                log.info("no more signs of life: %s", exc)
                return
            except (aiohttp.ClientError, OSError, TransportError, _PassingError) as exc:
                log.debug("a sign of life was lost: %r", exc)


def _passed(fetched: Fetched, seconds: float) -> Fetched:
    left_s = fetched.closes_in_s
    return fetched if left_s is None else replace(fetched, closes_in_s=left_s - seconds)


async def _refuse_bad(answer: aiohttp.ClientResponse) -> None:
    if answer.status in (200, 204):
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise RequestRefusedError("The answer is compressed; a proxy must not touch it.")
        return
    text = (await answer.content.read(MAX_ERROR_BYTES)).decode(errors="replace")
    code, message = _error_of(text)
    if answer.status in (408, 429) or answer.status >= 500 or code == "malformed":
        raise _PassingError(f"{answer.status}: {message}")
    raise ERROR_CODES.get(code, RequestRefusedError)(f"{message} (HTTP {answer.status})")


async def _json_of(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    values = await read_object(answer)
    if values is None:
        raise RequestRefusedError(f"The answer of {answer.url.path} is none of a BlockTrain coordinator.")
    return values


async def read_object(answer: aiohttp.ClientResponse) -> dict[str, Any] | None:
    """Return the JSON object that an answer is, of ``MAX_JSON_BYTES`` at most; None: it is none."""
    text = await answer.content.read(MAX_JSON_BYTES)
    while not answer.content.at_eof() and len(text) < MAX_JSON_BYTES:
        text += await answer.content.read(MAX_JSON_BYTES - len(text))
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _error_of(text: str) -> tuple[str, str]:
    try:
        error = json.loads(text)["error"]
        return str(error["code"]), str(error["message"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return "", "no answer of a BlockTrain coordinator"


def _is_passing(exc: BaseException) -> bool:
    if isinstance(exc, aiohttp.ClientSSLError):
        return False  # a certificate does not get better
    return isinstance(exc, aiohttp.ClientError | OSError | WireError | _PassingError)


def _too_often_damaged(state: RetryCallState) -> bool:
    failed = state.outcome.exception() if state.outcome is not None else None
    return isinstance(failed, WireError) and state.attempt_number >= DAMAGED_TRIES


def _cause(state: RetryCallState) -> str:
    return repr(state.outcome.exception())[:200] if state.outcome is not None else ""
