"""Bytes that mean nothing, to measure a line with: taken and thrown away, or made and sent.

Owns the limit. They count in no traffic and touch no round.
"""

import asyncio
import os

from aiohttp import web

from lightning_blocktrain.coordinator.bodies import Refusal

MAX_PROBE_BYTES = 2**23
PIECE_BYTES = 2**16
PROXY_HEADERS = ("Via", "Forwarded", "X-Forwarded-For")


async def take_probe(request: web.Request, stall_timeout_s: float) -> web.Response:
    """Take a body, forget it, and say how long it was and from which address it came.

    Raises:
        Refusal: If it has no length or is too long, before a byte of it is read.
        TimeoutError: If it makes no progress.
    """
    length = request.content_length
    if length is None or length > MAX_PROBE_BYTES:
        raise Refusal(413, "too_large", f"A probe needs a Content-Length of at most {MAX_PROBE_BYTES}.")
    num_bytes = 0
    async with asyncio.timeout(stall_timeout_s) as patience:
        async for piece in request.content.iter_any():
            num_bytes += len(piece)
            patience.reschedule(asyncio.get_running_loop().time() + stall_timeout_s)
    via_proxy = any(name in request.headers for name in PROXY_HEADERS)
    return web.json_response({"received_bytes": num_bytes, "address": request.remote, "via_proxy": via_proxy})


async def send_probe(request: web.Request, stall_timeout_s: float) -> web.StreamResponse:
    """Answer with ``?bytes`` random bytes, which nothing on the way can make shorter.

    Raises:
        Refusal: If that is no number, or too many.
        TimeoutError: If they make no progress.
    """
    text = request.query.get("bytes", "0")
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) > MAX_PROBE_BYTES:
        raise Refusal(400, "refused", f"bytes must be a number of at most {MAX_PROBE_BYTES}.")
    left_bytes, piece = int(text), os.urandom(PIECE_BYTES)
    headers = {
        "Content-Type": "application/octet-stream",
        "Content-Length": str(left_bytes),
        "Cache-Control": "no-store",
    }
    answer = web.StreamResponse(headers=headers)
    async with asyncio.timeout(stall_timeout_s) as patience:
        await answer.prepare(request)
        while left_bytes > 0:
            await answer.write(piece[:left_bytes])
            left_bytes -= PIECE_BYTES
            patience.reschedule(asyncio.get_running_loop().time() + stall_timeout_s)
        await answer.write_eof()
    return answer
