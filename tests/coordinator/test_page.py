"""The coordinator's page: what it is sent with, and what a browser makes of it."""

import base64
import hashlib
import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack
from html.parser import HTMLParser
from typing import Any

import pytest

from lightning_blocktrain.coordinator.desk import Desk
from lightning_blocktrain.coordinator.page import page, policy
from lightning_blocktrain.coordinator.server import CoordinatorServer, ServerLimits
from lightning_blocktrain.transport.base import WorkerFacts
from tests.coordinator.browser import Browser, Page, browser, needs_browser
from tests.coordinator.test_server import AUTH, Client, client_of, founded_desk, message_of
from tests.transport.lines import RUN, TOKEN, Clock, served

HOST = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>&amp;"


class Elements(HTMLParser):
    """Collects tags with their attributes, and the text inside style and script."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: dict[str, list[str]] = {"style": [], "script": []}
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.lasttag in self.inline and data.strip():
            self.inline[self.lasttag].append(data)


# As it is sent


def test_page_holds_everything_itself_and_nothing_that_its_policy_forbids() -> None:
    elements = Elements(page())
    for tag, attributes in elements.tags:
        assert not any(name == "style" or name.startswith("on") for name in attributes), tag
        assert all(attributes.get(name, "data:,") == "data:," for name in ("src", "href", "action")), tag
    assert "width=device-width" in str(elements.tags)
    [script] = elements.inline["script"]
    assert not [
        word for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(") if word in script
    ]


def test_policy_allows_exactly_the_inline_style_and_script() -> None:
    elements, rules = Elements(page()), dict(rule.split(" ", 1) for rule in policy(page()).split("; "))
    for tag in ("style", "script"):
        [content] = elements.inline[tag]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert "unsafe" not in policy(page())
    assert policy(page().replace("use strict", "use strict ")) != policy(page())


def test_page_is_given_without_a_token_and_tells_nothing_of_the_run() -> None:
    with client_of(founded_desk(), limits=ServerLimits(failed_tokens=1)) as client:
        client.ask("GET", "/status", None, {"Authorization": "Bearer wrong"})
        assert client.ask("GET", "/status")[0] == 429
        status, body = client.ask("GET", "/", None, {})
        assert (status, body.decode()) == (200, page())
        assert RUN not in body.decode() and TOKEN not in body.decode()
        assert client.ask("HEAD", "/", None, {}) == (200, b"")
        assert client.ask("POST", "/", b"x", {})[0] == 405


def test_page_is_sent_with_headers_that_keep_others_out() -> None:
    with client_of(founded_desk()) as client:
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=30)
        connection.request("GET", "/")
        answer = connection.getresponse()
        sent = dict(answer.getheaders())
        connection.close()
    assert sent["Content-Security-Policy"] == policy(page())
    assert sent["Content-Type"] == "text/html; charset=utf-8"
    assert (sent["Cache-Control"], sent["Referrer-Policy"]) == ("no-store", "no-referrer")
    assert (sent["X-Content-Type-Options"], sent["X-Frame-Options"]) == ("nosniff", "DENY")
    assert "Access-Control-Allow-Origin" not in sent


# In a browser


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


def running_desk(host: str = HOST, **terms: Any) -> Desk:
    desk = founded_desk(num_workers=2, **terms)
    desk.service.join(WorkerFacts(0, host=host), None, 0.0)
    desk.service.join(WorkerFacts(1, host="w" * 200), None, 0.0)
    return desk


def finish_a_round(server: CoordinatorServer, round_idx: int) -> None:
    for worker_id in range(2):
        body = message_of(worker_id, seed=worker_id, base=round_idx)
        assert Client(server).ask("POST", "/v1/entries/block0", body)[0] == 200


def at_token(server: CoordinatorServer) -> str:
    return f"{server.url}/#token={TOKEN}"


def status_of(server: CoordinatorServer) -> dict[str, Any]:
    return dict(json.loads(Client(server).ask("GET", "/status", None, AUTH)[1]))


SHOWN = "!document.getElementById('shown').hidden"


def note_has(text: str) -> str:
    return f"document.getElementById('note').textContent.includes({json.dumps(text)})"


@needs_browser
@pytest.mark.slow
def test_page_with_the_token_in_its_address_shows_the_run_and_hides_the_token(opened: Browser) -> None:
    with served(running_desk(), Clock()) as server, opened.page() as tab:
        tab.open(at_token(server))
        tab.until(SHOWN)
        shown = tab.text()
        assert f"Run {RUN}" in shown and "running" in shown and "block0" in shown and "waits for 0, 1" in shown
        assert tab.eval("location.href") == f"{server.url}/"
        assert tab.eval("sessionStorage.getItem('blocktrain-token')") == TOKEN
        assert tab.eval("localStorage.length + document.cookie.length") == 0
        assert TOKEN not in tab.eval("document.documentElement.outerHTML")
        assert not [url for url in tab.requested if TOKEN in url.partition("#")[0]]
        assert {url.partition("#")[0] for url in tab.requested} <= {f"{server.url}/", f"{server.url}/status", "data:,"}
        assert tab.complaints == []


@needs_browser
@pytest.mark.slow
def test_page_shows_markup_in_a_host_name_as_text(opened: Browser) -> None:
    with served(running_desk(), Clock()) as server, opened.page() as tab:
        tab.open(at_token(server))
        tab.until(SHOWN)
        assert HOST in tab.text("#workers")
        assert tab.eval("typeof window.hacked") == "undefined"
        assert tab.eval("document.querySelectorAll('#shown script, #shown img').length") == 0


@needs_browser
@pytest.mark.slow
def test_page_policy_stops_a_script_that_got_in_all_the_same(opened: Browser) -> None:
    with served(running_desk(), Clock()) as server, opened.page() as tab:
        tab.open(at_token(server))
        tab.until(SHOWN)
        tab.eval("void (document.getElementById('note').innerHTML = \"<img src=x onerror='window.hacked = 2'>\")")
        tab.eval(
            "void document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked = 3'}))"
        )
        blocked = "fetch('http://127.0.0.2:9/').then(() => 'sent', () => 'stopped')"
        assert tab.eval(blocked) == "stopped"
        assert tab.eval("typeof window.hacked") == "undefined"
        assert any("Content Security Policy" in complaint for complaint in tab.complaints)


def enter(tab: Page, token: str) -> None:
    tab.eval(f"void (document.getElementById('token').value = {json.dumps(token)})")
    tab.eval("document.querySelector('form button').click()")


@needs_browser
@pytest.mark.slow
def test_page_asks_for_the_token_and_tries_a_wrong_one_only_once(opened: Browser) -> None:
    with served(running_desk(), Clock()) as server, opened.page() as tab:
        tab.open(f"{server.url}/")
        tab.until(note_has("Enter the token"))
        assert f"{server.url}/status" not in tab.requested
        enter(tab, "wrong")
        tab.until(note_has("does not take this token"))
        assert tab.eval("document.getElementById('shown').hidden") is True
        enter(tab, "t\u00f6ken")
        tab.until(note_has("printable ASCII"))
        enter(tab, TOKEN)
        tab.until(SHOWN)
        assert tab.eval("document.getElementById('ask').hidden") is True
        assert status_of(server)["traffic"]["wrong_tokens"] == 1
        tab.open(f"{server.url}/")  # the tab remembers
        tab.until(SHOWN)


@needs_browser
@pytest.mark.slow
def test_page_follows_the_run_by_itself_to_its_end_and_beyond(opened: Browser) -> None:
    desk = running_desk(max_rounds=2)
    with opened.page() as tab:
        with served(desk, Clock()) as server:
            tab.open(at_token(server))
            tab.until(SHOWN)
            finish_a_round(server, 0)
            tab.until("document.getElementById('entries').innerText.includes('2 of 2 (100 %)')")
            finish_a_round(server, 1)
            tab.until(note_has("The run is over: all 2 rounds are closed"))
            assert tab.text("#phase") == "finished"
        tab.eval("poll()")
        tab.until(note_has("its coordinator has ended"))
        assert "block0" in tab.text("#entries")


@needs_browser
@pytest.mark.slow
def test_page_of_a_failed_run_says_why(opened: Browser) -> None:
    desk = running_desk()
    desk.service.stop("a <b>bold</b> reason", failed=True)
    with served(desk, Clock()) as server, opened.page() as tab:
        tab.open(at_token(server))
        tab.until(note_has("The run is over: a <b>bold</b> reason"))
        assert tab.text("#phase") == "failed"


@needs_browser
@pytest.mark.slow
def test_page_says_that_the_coordinator_is_silent_and_recovers(opened: Browser) -> None:
    desk = running_desk()
    with opened.page() as tab, ExitStack() as stack:
        server = stack.enter_context(served(desk, Clock()))
        tab.open(at_token(server))
        tab.until(SHOWN)
        stack.close()
        tab.until(note_has("No answer since"))
        assert "block0" in tab.text("#entries")
        port = int(server.url.rpartition(":")[2])
        stack.enter_context(served(running_desk(), Clock(), port=port))
        tab.until(note_has("Updated"))


@needs_browser
@pytest.mark.slow
def test_page_of_a_run_without_masters_is_readable(opened: Browser) -> None:
    with served(Desk(RUN, TOKEN), Clock()) as server, opened.page() as tab:
        tab.open(at_token(server))
        tab.until(SHOWN)
        assert "no masters yet" in tab.text()
        assert "Workers" not in tab.text()


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in colour.strip("rgb()").split(",")]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(tab: Page, selector: str) -> float:
    style = f"getComputedStyle(document.querySelector({json.dumps(selector)})).color"
    lights = sorted(luminance(tab.eval(code)) for code in (style, "getComputedStyle(document.body).backgroundColor"))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_a_phone_and_can_be_read_in_either_scheme(opened: Browser, scheme: str) -> None:
    desk = running_desk()
    with served(desk, Clock()) as server, opened.page(360, 800) as tab:
        tab.prefer(scheme)
        tab.open(at_token(server))
        tab.until(SHOWN)
        finish_a_round(server, 0)
        tab.until("document.getElementById('entries').innerText.includes('2 of 2 (100 %)')")
        assert tab.eval("innerWidth") == 360
        assert tab.eval("document.documentElement.scrollWidth") <= 360
        overflowing = "[...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > 360.5)"
        assert tab.eval(f"{overflowing}.map((e) => e.tagName + e.id)") == []
        assert (tab.eval("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)") == (
            scheme == "light"
        )
        # 4.5 is what WCAG asks of body text.
        assert all(
            contrast(tab, selector) >= 4.5 for selector in ("body", "#note", "#phase", "td", "dt", "#workers .good")
        )
