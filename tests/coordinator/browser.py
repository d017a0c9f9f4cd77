"""A headless Chromium for tests, driven through its debugging protocol; tests skip where there is none."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lightning_blocktrain.transport.loop import LoopThread

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "chrome")
REASON = f"needs a browser: none of {', '.join(NAMES)} is installed"
PATIENCE_S = 60.0


def executable() -> str | None:
    """Return the path of a browser, or None."""
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


needs_browser = pytest.mark.skipif(executable() is None, reason=REASON)


class Browser:
    """One browser process and the connection to it."""

    def __init__(self, thread: LoopThread, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._thread = thread
        self._socket = socket
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._events: dict[str, list[dict[str, Any]]] = {}
        self._num_asked = 0

    async def read(self) -> None:
        """Hand out what the browser says until it says nothing more."""
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            else:
                self._events.setdefault(said.get("sessionId", ""), []).append(said)

    def ask(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""

        async def send() -> dict[str, Any]:
            self._num_asked += 1
            number = self._num_asked
            self._answers[number] = asyncio.get_running_loop().create_future()
            target = {"sessionId": session} if session else {}
            await self._socket.send_json({"id": number, "method": method, "params": parameters, **target})
            return await asyncio.wait_for(self._answers[number], PATIENCE_S)

        answer = self._thread.run(send)
        assert "error" not in answer, answer
        return dict(answer["result"])

    def events(self, session: str, *methods: str) -> list[dict[str, Any]]:
        """Return what a page has reported so far."""
        return [said["params"] for said in self._events.get(session, []) if said["method"] in methods]

    @contextmanager
    def page(self, width: int = 1000, height: int = 800) -> Iterator["Page"]:
        """Open an empty page in a storage of its own."""
        context = self.ask("Target.createBrowserContext")["browserContextId"]
        target = self.ask("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable", session)
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", session, **metrics)
        try:
            yield Page(self, session)
        finally:
            self.ask("Target.disposeBrowserContext", browserContextId=context)


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def open(self, url: str) -> None:
        """Load an address."""
        self._browser.ask("Page.navigate", self._session, url=url)

    def prefer(self, scheme: str) -> None:
        """Ask pages for ``dark`` or ``light`` colours."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._browser.ask("Emulation.setEmulatedMedia", self._session, features=features)

    def eval(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, a promise's when it is kept."""
        answer = self._browser.ask(
            "Runtime.evaluate", self._session, expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        look = f"let met = false; try {{ met = {condition}; }} catch {{}} met ? done(true) : setTimeout(look, 20);"
        self.eval(f"new Promise((done) => {{ const look = () => {{ {look} }}; look(); }})")

    def text(self, selector: str = "main") -> str:
        """Return the text that an element shows."""
        return str(self.eval(f"document.querySelector({json.dumps(selector)}).innerText"))

    @property
    def requested(self) -> list[str]:
        """The addresses that were asked for."""
        sent = self._browser.events(self._session, "Network.requestWillBeSent")
        return [event["request"]["url"] for event in sent]

    @property
    def complaints(self) -> list[str]:
        """Errors of scripts and violations of the page's policy."""
        thrown = self._browser.events(self._session, "Runtime.exceptionThrown")
        logged = [event["entry"] for event in self._browser.events(self._session, "Log.entryAdded")]
        found = [entry["text"] for entry in logged if entry["source"] in ("security", "javascript", "violation")]
        return found + [event["exceptionDetails"]["text"] for event in thrown]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser with a profile in ``folder``."""
    path = executable()
    assert path is not None
    command = [path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    thread = LoopThread("test-browser")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = next(line for line in process.stderr if "listening on ws://" in line)
            yield thread.run(lambda: _connect(thread, said.rpartition(" ")[2].strip()))
        finally:
            thread.close()
            process.kill()


async def _connect(thread: LoopThread, url: str) -> Browser:
    session = aiohttp.ClientSession()
    opened = Browser(thread, await session.ws_connect(url, max_msg_size=2**26))

    async def read() -> None:
        try:
            await opened.read()
        finally:
            await session.close()

    opened.reading = asyncio.create_task(read())  # type: ignore[attr-defined]  # a loop keeps no task alive
    return opened
