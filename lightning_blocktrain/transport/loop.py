"""An event loop in a thread of its own, for synchronous code that uses an asynchronous client.

Owns the thread: it starts with the first call and ends with ``close``, which waits for it.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from lightning_blocktrain.errors import TransportError

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0


class LoopThread:
    """Runs coroutines for other threads.

    Args:
        name: Of the thread; it is a daemon, so that a forgotten transport does not keep a process alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine to its end and return what it gave; cancelled if the caller is interrupted.

        Args:
            make: Returns the coroutine; the coroutine bounds its own time.

        Raises:
            TransportError: If the thread is closed, before or meanwhile.
        """
        future = self.start(make)
        try:
            return future.result()
        except CancelledError as exc:
            raise TransportError("The transport was closed while a request was under way.") from exc
        except BaseException:
            future.cancel()
            raise

    def start(self, make: Callable[[], Coroutine[Any, Any, T]]) -> "Future[T]":
        """Begin to run a coroutine and return at once; ``close`` cancels it.

        Raises:
            TransportError: If the thread is closed.
        """
        loop = self._running()  # first: where that raises, no coroutine is made that nobody awaits
        return asyncio.run_coroutine_threadsafe(make(), loop)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise TransportError("The transport is closed.")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
                self._thread.start()
            return self._loop

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel what is under way, run ``last``, and end the thread; does nothing the second time.

        Args:
            last: Releases what belongs to the loop; None: nothing does.
        """
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(_end(last), loop).result(CLOSE_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(CLOSE_TIMEOUT_S)
        loop.close()


async def _end(last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    if last is not None:
        await last()
    await asyncio.get_running_loop().shutdown_asyncgens()
