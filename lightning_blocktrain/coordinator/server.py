"""A coordinator on HTTP: receives and sends messages in pieces, and lets one thread at a time come to the desk.

Owns the paths, the limits and the answers. Owns no decision about a round (``service.py``) and no byte format
(``transport/wire.py``).

=====================================  ==========================  ==============================================
request                                body                        answer
=====================================  ==========================  ==============================================
POST /v1/found                         frame                       {"founded": true, false or null}
POST /v1/join                          {"facts", "incarnation"}    a welcome
GET  /v1/entries/E?newer_than&wait_s                               frame, or 204 when there is no newer version
POST /v1/entries/E                     frame                       a receipt
POST /v1/beat, /v1/leave               {"worker_id", "incarnation"}  {}
POST /v1/dismiss                       {"worker_id"}               {"dismissed": true or false}
POST /v1/stop                          {"reason"}                  {}
POST /v1/probe, GET /v1/probe?bytes    bytes to time; none         {"received_bytes", "address", "via_proxy"}; bytes
GET  /status, /metrics                                             JSON, Prometheus' text
GET  /                                                             the page that shows /status
=====================================  ==========================  ==============================================

A fetch may name a codec in its query, as ``Codec.meta`` has it: ``codec``, ``block``.
Every request but that for the page carries ``Authorization: Bearer TOKEN`` and ``BlockTrain-Run: RUN`` (which /status
and /metrics may leave out). Every refusal is ``{"error": {"code", "message"}}``: 400 makes no sense, 401 token, 409
another run or another life of the worker, 410 the run is over, 413 too large, 429 too many wrong tokens, 503 stopping.

Covered: whoever has no token learns and changes nothing, and can guess ten tokens a minute and address; the token is
compared in constant time, and is in no log, status or answer; bodies are data (safetensors, JSON), checked for length
before they are received and for their digest before they are read; one update cannot move a block far where the run
sets ``clip_norm``, ``outlier_factor`` or ``merge="trimmed_mean"``, and no NaN gets in.
Not covered: whoever has the token reads all weights, can pose as any worker and can stop the run; poisoned updates are
bounded and not prevented; without TLS everything can be read and changed on the way; connections are not limited in
number, so that a flood has to be kept out before it comes here; the state folder is not encrypted.

Threads: the event loop receives and sends; one thread comes to the desk, so merging does not stop the transfers.
"""

import asyncio
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import ClientError, web

from lightning_blocktrain.coordinator.bodies import Bodies, Refusal, content_of, refused
from lightning_blocktrain.coordinator.desk import Desk
from lightning_blocktrain.coordinator.fields import codec_in_query, number_in_query, sender_in, sender_in_header
from lightning_blocktrain.coordinator.guard import FailedTokens
from lightning_blocktrain.coordinator.page import show_page
from lightning_blocktrain.coordinator.probe import send_probe, take_probe
from lightning_blocktrain.coordinator.status import prometheus_text
from lightning_blocktrain.errors import TransportError, WireError
from lightning_blocktrain.rounds import Receipt
from lightning_blocktrain.rounds.codecs import Codec
from lightning_blocktrain.transport.base import ERROR_CODES, Sender
from lightning_blocktrain.transport.messages import (
    facts_of,
    pack_fetched,
    receipt_json,
    unpack_masters,
    unpack_submission,
    welcome_json,
)
from lightning_blocktrain.transport.site import listen
from lightning_blocktrain.transport.versions import PROTOCOL, RUN_HEADER, package_version
from lightning_blocktrain.transport.wire import Outgoing, read_frame

log = logging.getLogger(__name__)

T = TypeVar("T")

READ_BYTES = 2**18
MAX_WAIT_S = 30.0
"""Longest wait for a newer version in one request."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.001, 1.0
MAX_FOUND_BYTES = 2**36
"""Longest message with first masters that is taken."""
PAGE = "/"
STATUS_OF_CODE = {"unauthorised": 401, "refused": 400, "ended": 410, "failed": 410}
"""All other codes are conflicts, 409."""
CODE_OF_ERROR = {error: code for code, error in ERROR_CODES.items()}


@dataclass(frozen=True)
class ServerLimits:
    """What a server takes.

    Args:
        stall_timeout_s: A transfer that makes no progress for so long is given up.
        failed_tokens: Wrong tokens per address and minute that are answered.
    """

    stall_timeout_s: float = 60.0
    failed_tokens: int = 10


class CoordinatorServer:
    """Serves one desk. ``start`` and ``stop`` belong to one event loop; ``stop`` may come any number of times.

    Args:
        desk: Used by this server's own thread from ``start`` to ``stop``, which closes it.
        host: Address to listen on.
        port: 0 lets the system choose.
        tls: Makes it HTTPS.
        limits: What it takes.
        spool_dir: Where bodies wait that do not fit into memory; None: the system's temporary folder.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        desk: Desk,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        limits: ServerLimits | None = None,
        spool_dir: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.desk = desk
        self.clock = clock
        self.limits = limits or ServerLimits()
        self.traffic: Counter[str] = Counter()
        self.url = ""
        self._address = (host, port)
        self._tls = tls
        self._bodies = Bodies(self.limits.stall_timeout_s, spool_dir, self.traffic)
        self._guard = FailedTokens(self.limits.failed_tokens)
        self._thread = ThreadPoolExecutor(1, "blocktrain-desk")
        self._runner: web.AppRunner | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._wake = asyncio.Event()
        self._planned = self._due = float("inf")
        self._news = desk.news
        self._stopping = False

    @property
    def phase(self) -> str:
        """Where the run stands, as of the last visit to the desk; ``empty`` before it begins."""
        return str(self._news[0])

    async def start(self) -> None:
        """Listen.

        Raises:
            PortInUseError: If the address is taken; the server is stopped then.
        """
        app = web.Application(middlewares=[self._answer_errors])
        app.add_routes(
            [
                web.post("/v1/found", self._found),
                web.post("/v1/join", self._join),
                web.get("/v1/entries/{entry}", self._fetch),
                web.post("/v1/entries/{entry}", self._submit),
                web.post("/v1/beat", self._beat),
                web.post("/v1/leave", self._leave),
                web.post("/v1/dismiss", self._dismiss),
                web.post("/v1/stop", self._stop_run),
                web.post("/v1/probe", partial(take_probe, stall_timeout_s=self.limits.stall_timeout_s)),
                web.get("/v1/probe", partial(send_probe, stall_timeout_s=self.limits.stall_timeout_s)),
                web.get(PAGE, show_page),
                web.get("/status", self._status),
                web.get("/metrics", self._metrics),
            ]
        )
        # A compressed body is refused; unpacking one unasked would let a small request grow without limit.
        self._runner = web.AppRunner(
            app, access_log=None, auto_decompress=False, read_bufsize=READ_BYTES, shutdown_timeout=5.0
        )
        await self._runner.setup()
        try:
            self.url = await listen(self._runner, *self._address, self._tls)
        except BaseException:
            await self.stop()
            raise
        self._ticker = asyncio.create_task(self._tick())

    async def stop(self) -> None:
        """Answer what is under way, stop listening and close the desk."""
        self._stopping = True
        self._announce()
        if self._ticker is not None:
            self._ticker.cancel()
            with suppress(asyncio.CancelledError):
                await self._ticker
            self._ticker = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        await asyncio.to_thread(self._thread.shutdown)
        self.desk.close()

    async def wait_for_end(self, linger_s: float) -> None:
        """Wait until the run has ended and its workers have left, or ``linger_s`` have passed since its end."""
        while self.phase not in ("finished", "stopped", "failed"):
            await self._changed.wait()
        ended_at = self.clock()
        while await self._at_desk(lambda now: self.desk.awaits_workers(now - ended_at, linger_s)):
            await asyncio.sleep(0.1)

    # The desk's thread, and who waits for it

    async def _at_desk(self, ask: Callable[[float], T]) -> T:
        """Run ``ask(now)`` in the desk's thread; wake whom its outcome concerns."""
        loop = asyncio.get_running_loop()

        def visit() -> tuple[T | BaseException, Any, float | None]:
            try:
                outcome: T | BaseException = ask(self.clock())
            except Exception as exc:  # handed to the caller, below, in its own thread
                outcome = exc
            return outcome, self.desk.news, self.desk.next_event()

        outcome, news, due = await loop.run_in_executor(self._thread, visit)
        self._due = float("inf") if due is None else due
        if news != self._news:
            self._news = news
            self._announce()
        if self._due < self._planned:
            self._wake.set()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _tick(self) -> None:
        while True:
            try:
                await self._at_desk(self.desk.advance)
            except Exception:
                log.exception("the rounds could not be advanced; trying again")
            # No await from here to the wait: who comes to the desk meanwhile finds the plan, and wakes.
            self._wake.clear()
            self._planned = self._due
            pause_s = min(MAX_PAUSE_S, max(MIN_PAUSE_S, self._due - self.clock()))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), pause_s)

    # Requests

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            if request.path != PAGE:  # it holds nothing of the run
                self._admit(request)
            answer: web.StreamResponse = await handler(request)
            return answer
        except Refusal as exc:
            return refused(exc.status, exc.code, str(exc), exc.retry_after_s)
        except TransportError as exc:
            code = CODE_OF_ERROR.get(type(exc), "refused")
            return refused(STATUS_OF_CODE.get(code, 409), code, str(exc))
        except web.HTTPException as exc:
            return refused(exc.status, "refused", f"{request.method} {request.path[:100]}: {exc.reason}")
        except WireError as exc:
            return refused(400, "malformed", str(exc))
        except ValueError as exc:
            return refused(400, "refused", str(exc))
        except TimeoutError:
            return refused(408, "busy", "The transfer made no progress.")
        except (ConnectionError, ClientError) as exc:  # nobody reads this
            log.info("%s %s from %s was cut: %r", request.method, request.path, request.remote, exc)
            return refused(400, "malformed", "The body ended early.")
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return refused(500, "internal", "The coordinator failed to answer; its log says why.")

    def _admit(self, request: web.Request) -> None:
        self.traffic["requests"] += 1
        address = request.remote or ""
        wait_s = self._guard.wait_s(address, self.clock())
        if wait_s > 0:
            raise Refusal(429, "busy", "Too many wrong tokens from this address.", wait_s)
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Refusal(401, "unauthorised", "A request needs the header 'Authorization: Bearer TOKEN'.")
        try:
            self.desk.check_token(token.strip())
        except TransportError:
            self._guard.note(address, self.clock())
            self.traffic["wrong_tokens"] += 1
            raise
        run_id = request.headers.get(RUN_HEADER)
        if run_id is not None or request.path.startswith("/v1/"):
            self.desk.check_run(run_id or "")
        if self._stopping:
            raise Refusal(503, "busy", "The coordinator is stopping.", 1.0)
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise Refusal(400, "malformed", "A body must not be compressed.")

    async def _found(self, request: web.Request) -> web.StreamResponse:
        with await self._bodies.receive(request, MAX_FOUND_BYTES) as spool:

            def ask(now: float) -> bool | None:
                terms, masters = unpack_masters(read_frame(content_of(spool)))
                return self.desk.found(terms, masters, now)

            return web.json_response({"founded": await self._at_desk(ask)})

    async def _join(self, request: web.Request) -> web.StreamResponse:
        values = await self._bodies.receive_json(request)
        facts, incarnation = facts_of(values.get("facts", {})), values.get("incarnation")
        welcome = await self._at_desk(lambda now: self.desk.service.join(facts, incarnation, now, beats=True))
        return web.json_response(welcome_json(welcome))

    async def _submit(self, request: web.Request) -> web.StreamResponse:
        entry = request.match_info["entry"]
        max_bytes = await self._at_desk(lambda now: self.desk.max_update_bytes(entry))
        with await self._bodies.receive(request, max_bytes) as spool:

            def ask(now: float) -> Receipt:
                sender, submission = unpack_submission(read_frame(content_of(spool)))
                return self.desk.submit(entry, sender, submission, now, spool)

            return web.json_response(receipt_json(await self._at_desk(ask)))

    async def _fetch(self, request: web.Request) -> web.StreamResponse:
        entry, sender = request.match_info["entry"], sender_in_header(request)
        newer_than, wait_s = number_in_query(request, "newer_than", -1.0), number_in_query(request, "wait_s", 0.0)
        codec, average = codec_in_query(request), bool(number_in_query(request, "average", 0.0))
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + min(max(wait_s, 0.0), MAX_WAIT_S)
        while True:
            changed = self._changed
            ask = partial(self._newer, entry, int(newer_than), sender, codec, average)
            outgoing = await self._at_desk(ask)
            if outgoing is not None:
                if codec is not None:
                    self.traffic["prefix_bytes"] += outgoing.num_bytes
                return await self._bodies.send(request, outgoing)
            left_s = ends_at - loop.time()
            if left_s <= 0 or self._stopping:
                return web.Response(status=204)
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left_s)

    def _newer(
        self, entry: str, newer_than: int, sender: Sender | None, codec: Codec | None, average: bool, now: float
    ) -> Outgoing | None:
        service = self.desk.service
        found = service.fetch(entry, newer_than, now, sender, codec, average)
        if found is None:
            return None
        return pack_fetched(found.version, dict(found.tensors), service.closes_in_s(sender, now), found.meta)

    async def _beat(self, request: web.Request) -> web.StreamResponse:
        sender = sender_in(await self._bodies.receive_json(request))
        await self._at_desk(lambda now: self.desk.service.beat(sender, now))
        return web.json_response({})

    async def _leave(self, request: web.Request) -> web.StreamResponse:
        sender = sender_in(await self._bodies.receive_json(request))
        await self._at_desk(lambda now: self.desk.service.leave(sender, now))
        return web.json_response({})

    async def _dismiss(self, request: web.Request) -> web.StreamResponse:
        worker_id = (await self._bodies.receive_json(request)).get("worker_id")
        dismissed = await self._at_desk(lambda now: self.desk.service.dismiss(worker_id, now))
        return web.json_response({"dismissed": dismissed})

    async def _stop_run(self, request: web.Request) -> web.StreamResponse:
        reason = str((await self._bodies.receive_json(request)).get("reason", ""))[:200]
        await self._at_desk(lambda now: self.desk.stop(reason))
        return web.json_response({})

    async def _status(self, request: web.Request) -> web.StreamResponse:
        status = await self._at_desk(self.desk.status)
        about = {"package": package_version(), "protocol": PROTOCOL, "unix_time_s": time.time()}
        return web.json_response({**status, "traffic": dict(self.traffic), **about})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        status = await self._at_desk(self.desk.status)
        return web.Response(text=prometheus_text(status, self.traffic), content_type="text/plain")
