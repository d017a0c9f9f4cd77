"""Bodies of HTTP requests and answers, in pieces.

Owns the limits on what arrives and the place where it waits. Owns no path and no meaning.

Memory: an arriving message lies in memory up to ``SPOOL_BYTES`` and beyond that in an anonymous temporary file, which
ends with the last of its tensors: these are a private mapping of the file, and a ledger that accepts them keeps the
mapping. So the process allocates nothing for a long body but what a merge makes anew; the pages that it reads are the
system's to drop. What is sent are views of the masters.
"""

import asyncio
import json
import mmap
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any, cast

from aiohttp import web

from lightning_blocktrain.transport.overlap import ahead, take_all
from lightning_blocktrain.transport.versions import FRAME_TYPE
from lightning_blocktrain.transport.wire import Outgoing, Receiver

SPOOL_BYTES = 2**20
MAX_JSON_BYTES = 2**16


class Refusal(Exception):
    """An answer other than success, on its way to the client."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


def refused(status: int, code: str, message: str, retry_after_s: float | None = None) -> web.Response:
    """Return the one form of answer that a refused request gets."""
    headers = {} if retry_after_s is None else {"Retry-After": str(int(retry_after_s) + 1)}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response({"error": {"code": code, "message": message}}, status=status, headers=headers)


class Bodies:
    """Receives and sends for one server.

    Args:
        stall_timeout_s: A transfer without progress for so long raises ``TimeoutError``.
        spool_dir: Where long messages wait; None: the system's temporary folder.
        traffic: Counts ``received_bytes`` and ``sent_bytes``.
    """

    def __init__(self, stall_timeout_s: float, spool_dir: Path | None, traffic: Counter[str]) -> None:
        self._stall_s = stall_timeout_s
        self._spool_dir = None if spool_dir is None else str(spool_dir)
        self._traffic = traffic

    async def receive(self, request: web.Request, max_bytes: int) -> IO[bytes]:
        """Return the body as a whole, undamaged message in a spool, which the caller closes.

        Raises:
            Refusal: If it has no length or is too long, before a byte of it is read.
            WireError: If it is no message.
        """
        length = request.content_length
        if not length:  # nor may it be 0: an empty stream of aiohttp's yields empty chunks without end
            raise Refusal(400, "malformed", "A body needs a Content-Length above 0.")
        if length > max_bytes:
            raise Refusal(413, "too_large", f"The body has {length} bytes; at most {max_bytes} are taken here.")
        spool = cast(IO[bytes], tempfile.SpooledTemporaryFile(SPOOL_BYTES, dir=self._spool_dir))  # noqa: SIM115
        try:
            receiver = Receiver(spool, max_bytes)
            async with asyncio.timeout(self._stall_s) as patience:
                await take_all(self._arriving(request, patience), receiver.take_all)
            receiver.finish()
        except BaseException:
            spool.close()
            raise
        return spool

    async def _arriving(self, request: web.Request, patience: asyncio.Timeout) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        async for piece, _ in request.content.iter_chunks():
            self._traffic["received_bytes"] += len(piece)
            patience.reschedule(loop.time() + self._stall_s)
            yield piece

    async def receive_json(self, request: web.Request) -> dict[str, Any]:
        """Return the body as a JSON object.

        Raises:
            Refusal: If it is none, or too long.
        """
        text = b""
        async with asyncio.timeout(self._stall_s):
            async for piece in request.content.iter_any():
                text += piece
                if len(text) > MAX_JSON_BYTES:
                    raise Refusal(413, "too_large", f"The body may have at most {MAX_JSON_BYTES} bytes.")
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise Refusal(400, "malformed", "The body must be JSON.") from exc
        if not isinstance(values, dict):
            raise Refusal(400, "malformed", "The body must be a JSON object.")
        return values

    async def send(self, request: web.Request, outgoing: Outgoing) -> web.StreamResponse:
        """Answer with a message."""
        answer = web.StreamResponse(headers={"Content-Type": FRAME_TYPE, "Content-Length": str(outgoing.num_bytes)})
        async with asyncio.timeout(self._stall_s) as patience:
            await answer.prepare(request)
            async for piece in ahead(outgoing.pieces()):
                await answer.write(piece)
                self._traffic["sent_bytes"] += len(piece)
                patience.reschedule(asyncio.get_running_loop().time() + self._stall_s)
            await answer.write_eof()
        return answer


def content_of(spool: IO[bytes]) -> bytearray | mmap.mmap:
    """Return a spool's bytes, writable for torch: short ones copied, others as a private mapping of the file."""
    num_bytes = spool.seek(0, 2)
    spool.seek(0)
    if num_bytes <= SPOOL_BYTES:
        return bytearray(spool.read())
    spool.flush()
    return mmap.mmap(spool.fileno(), num_bytes, access=mmap.ACCESS_COPY)
