"""The coordinator's page for people: one HTML file that asks ``/status`` with the token and shows the answer.

Owns the headers that it is sent with. It holds nothing of a run, so that it is given to whoever asks; the token stays
in the browser's tab: from a form or the fragment of the address, which no browser sends.

The policy allows the one style and the one script that the file holds, by their hash, and requests to this coordinator:
text that gets into the page by mistake cannot run, load or send anything.
"""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from aiohttp import web

NAME = "page.html"


@cache
def page() -> str:
    """Return the page."""
    return files(__package__).joinpath(NAME).read_text(encoding="utf-8")


def policy(html: str) -> str:
    """Return the content security policy of a page with inline styles and scripts.

    Args:
        html: The page as it is sent; every character of a style and a script counts.
    """
    styles, scripts = (_hashes(html, tag) for tag in ("style", "script"))
    rules = {
        "default-src": "'none'",
        "script-src": scripts,
        "style-src": styles,
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hashes(html: str, tag: str) -> str:
    contents = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (hashlib.sha256(content.encode()).digest() for content in contents)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


@cache
def headers() -> dict[str, str]:
    """Return the headers of the page."""
    return {
        "Content-Security-Policy": policy(page()),
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }


async def show_page(request: web.Request) -> web.Response:
    """Answer with the page."""
    return web.Response(text=page(), content_type="text/html", headers=headers())
