"""What a request says outside its message: who sends it, and the fields of its query. Owns no path and no meaning."""

import re
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from lightning_blocktrain.coordinator.bodies import Refusal
from lightning_blocktrain.rounds.codecs import Codec
from lightning_blocktrain.transport.base import Sender
from lightning_blocktrain.transport.versions import WORKER_HEADER


def sender_in_header(request: web.Request) -> Sender | None:
    """Return who sends a request, if it says so in the one form there is."""
    matched = re.fullmatch(r"([0-9]{1,15})/([0-9]{1,15})", request.headers.get(WORKER_HEADER, ""))
    return None if matched is None else Sender(int(matched[1]), int(matched[2]))


def sender_in(values: Mapping[str, Any]) -> Sender:
    """Return who sends a JSON object, unchecked: the membership judges it."""
    return Sender(values.get("worker_id"), values.get("incarnation"))  # type: ignore[arg-type]


def codec_in_query(request: web.Request) -> Codec | None:
    """Return the codec in which an answer is wanted; None: in none.

    Raises:
        ValueError: If it is unknown, or an option of it is.
    """
    meta = {name: text for name, text in request.query.items() if name in ("codec", "block", "top_frac")}
    return Codec.from_meta(meta) if meta else None


def number_in_query(request: web.Request, name: str, default: float) -> float:
    """Return a number of the query.

    Raises:
        Refusal: If it is none, or too large to be one exactly.
    """
    try:
        value = float(request.query.get(name, default))
    except ValueError:
        value = float("nan")
    if not abs(value) < 2**53:
        raise Refusal(400, "refused", f"{name} must be a number.")
    return value
