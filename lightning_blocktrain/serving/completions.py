"""Completions over HTTP, in the form that public clients of language models speak, from blocks that are served.

Owns the paths, the limits and the answers. Owns no meaning of a field (``completion_fields.py``), no text
(``completion_text.py``), no thread (``completion_work.py``) and no traversal (``client.py``).

======================  ==========================  ================================================================
request                 body                        answer
======================  ==========================  ================================================================
POST /v1/completions    see ``completion_fields``   a text_completion; with stream, events that end in ``[DONE]``
GET  /v1/models                                     the one model
GET  /v1/models/NAME                                the model of that name
======================  ==========================  ================================================================

An answer also has ``seed``, of its first choice, and the version of the weights as ``system_fingerprint``. Every
refusal is ``{"error": {"message", "type", "param", "code"}}``: 400 a field, which ``param`` names; 401 token; 404 model
or path; 413 too long; 429 too many completions or wrong tokens; 503 a block is served by nobody, or the server stops.
What fails when events have been sent already is an event of that form, and no ``[DONE]`` follows.

Covered: whoever has no token learns nothing and uses nothing, and can guess ten tokens a minute and address; the token
is compared in constant time and is in no log or answer; bodies are bounded and never unpacked; a completion whose
client has gone ends with the chunk that is being decided.
Not covered: without TLS everything can be read on the way; an error may name the hosts of blocks; all who have the
token share the limits; connections are not limited in number.

Threads: the event loop receives and sends; each completion under way has a thread of a pool, which waits for the hosts.
"""

import asyncio
import hmac
import json
import logging
import secrets
import ssl
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from lightning_blocktrain.coordinator.guard import FailedTokens
from lightning_blocktrain.errors import TransportError, explain
from lightning_blocktrain.serving.client import SweepClient
from lightning_blocktrain.serving.completion_fields import Asked, CompletionLimits, asked_of
from lightning_blocktrain.serving.completion_text import Envelope, Piece, Transcript, joined, usage_of
from lightning_blocktrain.serving.completion_work import STOPPING, Job, Work
from lightning_blocktrain.serving.fleet import ServingError
from lightning_blocktrain.serving.link import reset
from lightning_blocktrain.transport.site import listen

log = logging.getLogger(__name__)

SEED_BITS = 32
"""Of a seed that is drawn: every client's numbers hold it exactly."""
EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
TYPES = {401: "authentication_error", 429: "rate_limit_error"}
"""Of errors by status; the others are ``invalid_request_error`` below 500 and ``server_error`` from there on."""


class Refused(Exception):
    """An answer other than success, on its way to the client."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"
        kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class CompletionServer:
    """Serves completions; ``start`` and ``stop`` belong to one event loop.

    Args:
        client: Of the model's blocks; used from ``start`` to ``stop``, and whoever made it closes it after that.
        token: What every request must carry as ``Authorization: Bearer TOKEN``; empty: nobody is asked.
        listen: Host and port; port 0 lets the system choose.
        tls: Makes it HTTPS.
        limits: What it takes.
        model: The name under which the model is asked for.
    """

    def __init__(
        self,
        client: SweepClient,
        token: str,
        listen: tuple[str, int] = ("127.0.0.1", 0),
        tls: ssl.SSLContext | None = None,
        limits: CompletionLimits | None = None,
        model: str = "blocktrain",
    ) -> None:
        self.limits = limits or CompletionLimits()
        self.url = ""
        self.model = model
        self._client = client
        self._token = token
        self._listen = listen
        self._tls = tls
        self._guard = FailedTokens(self.limits.failed_tokens)
        self._threads = ThreadPoolExecutor(self.limits.running, "blocktrain-completions")
        self._runner: web.AppRunner | None = None
        self._created = int(time.time())
        self._works: set[Work] = set()
        self._num_under_way = 0
        self._stopping = False

    @property
    def num_under_way(self) -> int:
        """Completions that are computed, or wait for it."""
        return self._num_under_way

    async def start(self) -> None:
        """Listen.

        Raises:
            PortInUseError: If the address is taken; the server is stopped then.
        """
        app = web.Application(middlewares=[self._answer_errors], client_max_size=self.limits.body_bytes)
        app.add_routes(
            [
                web.post("/v1/completions", self._complete),
                web.get("/v1/models", self._list_models),
                web.get("/v1/models/{name}", self._show_model),
            ]
        )
        # A handler is cancelled when its client goes, and ends its completions. Nothing unpacks a body unasked.
        self._runner = web.AppRunner(
            app, access_log=None, auto_decompress=False, handler_cancellation=True, shutdown_timeout=5.0
        )
        await self._runner.setup()
        try:
            self.url = await listen(self._runner, *self._listen, self._tls)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop listening, end what is under way with the chunk that is being decided, and end the threads."""
        self._stopping = True
        for work in list(self._works):
            work.stop()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        await asyncio.to_thread(self._threads.shutdown)

    # Requests

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            if self._token:
                self._check_token(request)
            answer: web.StreamResponse = await handler(request)
            return answer
        except Exception as exc:
            refused = self._refusal_of(exc, request)
            return web.json_response(refused.body, status=refused.status, headers=refused.headers)

    def _refusal_of(self, exc: Exception, request: web.Request) -> Refused:
        """Return how a client is told of an error."""
        if isinstance(exc, Refused):
            return exc
        if isinstance(exc, ServingError | TransportError):
            return Refused(503, "unavailable", str(exc), retry_after_s=1)
        if isinstance(exc, web.HTTPRequestEntityTooLarge):
            return Refused(413, "too_large", f"The body may have at most {self.limits.body_bytes} bytes.")
        if isinstance(exc, web.HTTPException):
            code = "not_found" if exc.status == 404 else "refused"
            return Refused(exc.status, code, f"{request.method} {request.path[:100]}: {exc.reason}")
        if isinstance(exc, TimeoutError):
            return Refused(408, "stalled", "The transfer made no progress.")
        log.error("%s %s failed", request.method, request.path, exc_info=exc)
        return Refused(500, "internal", "The server failed to answer; its log says why.")

    def _check_token(self, request: web.Request) -> None:
        address, now = request.remote or "", time.monotonic()
        wait_s = self._guard.wait_s(address, now)
        if wait_s > 0:
            message = "Too many wrong tokens from this address."
            raise Refused(429, "wrong_tokens", message, retry_after_s=int(wait_s) + 1)
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Refused(401, "no_token", "A request needs the header 'Authorization: Bearer TOKEN'.")
        # A header may hold bytes that are no text; they are half surrogates here.
        if not hmac.compare_digest(token.strip().encode(errors="surrogateescape"), self._token.encode()):
            self._guard.note(address, now)
            raise Refused(401, "wrong_token", "The server does not take this token.")

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [self._described()]})

    async def _show_model(self, request: web.Request) -> web.StreamResponse:
        self._check_model(request.match_info["name"])
        return web.json_response(self._described())

    def _described(self) -> dict[str, Any]:
        return {"id": self.model, "object": "model", "created": self._created, "owned_by": "blocktrain"}

    def _check_model(self, name: str) -> None:
        if name != self.model:
            rule = f"model must be {self.model!r}, the one that is served here"
            message = explain(rule, f"model={name!r:.60}", "ask for that one")
            raise Refused(404, "model_not_found", message, "model")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        if self._stopping:
            raise ServingError(STOPPING)
        seed = secrets.randbits(SEED_BITS)
        try:
            asked = asked_of(body, self.limits)
            self._check_model(asked.model)
            seed = seed if asked.seed is None else asked.seed
            jobs = [self._job(asked, prompt, seed + index) for index, prompt in enumerate(_prompt_of_each(asked))]
        except ValueError as exc:  # a message begins with the name of what is wrong
            raise Refused(400, "invalid_value", str(exc), str(exc).split(" ", 1)[0]) from exc
        if self._num_under_way + len(jobs) > self.limits.under_way:
            message = f"{self._num_under_way} completions are under way; at most {self.limits.under_way} may be."
            raise Refused(429, "busy", message, retry_after_s=1)
        name, version = f"cmpl-{secrets.token_hex(12)}", self._client.facts.version
        envelope = Envelope(name, int(time.time()), self.model, version, seed, asked.logprobs)
        self._num_under_way += len(jobs)
        work = Work(jobs, self._threads, self._leave)
        self._works.add(work)
        try:
            if asked.stream:
                return await self._stream(request, asked, envelope, work)
            return await _whole(asked, envelope, work)
        finally:
            self._works.discard(work)
            work.stop()

    def _leave(self) -> None:
        self._num_under_way -= 1

    def _job(self, asked: Asked, prompt: str, seed: int) -> Job:
        chunks = self._client.stream(
            prompt.encode(),
            asked.num_bytes,
            num_blocks=asked.num_blocks,
            chunk_bytes=asked.chunk_bytes,
            sweeps=asked.sweeps,
            num_draws=asked.num_draws,
            temperature=asked.temperature,
            seed=seed,
        )
        # Closing it is what tells the hosts that the session is over.
        return chunks, Transcript(asked.stops, prompt if asked.echo else "")

    async def _body(self, request: web.Request) -> dict[str, Any]:
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise Refused(400, "malformed", "A body must not be compressed.")
        async with asyncio.timeout(self.limits.stall_timeout_s):
            text = await request.read()
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise Refused(400, "malformed", f"The body must be JSON; {exc}.") from exc
        if not isinstance(values, dict):
            raise Refused(400, "malformed", "The body must be a JSON object.")
        return values

    async def _stream(self, request: web.Request, asked: Asked, envelope: Envelope, work: Work) -> web.StreamResponse:
        """Answer in events; what fails before the first one is raised, so that it has a status of its own."""
        answer = web.StreamResponse(headers=EVENTS)
        async for event in self._events(request, asked, envelope, work):
            text = event if isinstance(event, str) else json.dumps(event)
            try:
                async with asyncio.timeout(self.limits.stall_timeout_s):
                    if not answer.prepared:
                        await answer.prepare(request)
                    await answer.write(f"data: {text}\n\n".encode())
            except (ConnectionError, TimeoutError) as exc:
                log.debug("the client at %s takes no more events: %r", request.remote, exc)
                if request.transport is not None:
                    reset(request.transport)  # a close would wait until it has read all
                break
        return answer

    async def _events(
        self, request: web.Request, asked: Asked, envelope: Envelope, work: Work
    ) -> AsyncIterator[dict[str, Any] | str]:
        """Yield the events of an answer; the last one tells of an error where there is one after others."""
        num_bytes, begun = 0, False
        try:
            async for index, piece in work.pieces():
                num_bytes += len(piece.tokens)
                if piece.text or piece.finish_reason or (asked.logprobs and piece.tokens):
                    begun = True
                    yield envelope.answer([(index, piece)])
            if asked.include_usage:
                yield envelope.answer([], usage_of(asked.prompt_bytes, num_bytes))
            yield "[DONE]"
        except Exception as exc:
            if not begun:
                raise
            yield self._refusal_of(exc, request).body


async def _whole(asked: Asked, envelope: Envelope, work: Work) -> web.StreamResponse:
    """Answer when all choices are complete."""
    pieces: dict[int, list[Piece]] = {}
    async for index, piece in work.pieces():
        pieces.setdefault(index, []).append(piece)
    choices = [(index, joined(pieces[index])) for index in sorted(pieces)]
    num_bytes = sum(len(piece.tokens) for _, piece in choices)
    return web.json_response(envelope.answer(choices, usage_of(asked.prompt_bytes, num_bytes)))


def _prompt_of_each(asked: Asked) -> list[str]:
    """Return the prompt of every choice."""
    return [prompt for prompt in asked.prompts for _ in range(asked.num_choices)]
