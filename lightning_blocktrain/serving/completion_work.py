"""The choices of one request on their way: each in a thread of a pool, all heard of in one event loop.

Owns the hand-over from the threads, the end of a session in the thread that ran it, and how both are stopped. A choice
that is stopped ends with the chunk that is being decided: a walk that hosts have begun is waited for.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial

from lightning_blocktrain.models.generation import Decision
from lightning_blocktrain.serving.completion_text import Piece, Transcript
from lightning_blocktrain.serving.fleet import ServingError

STOPPING = "The server is stopping."

Job = tuple[Generator[Decision], Transcript]
"""The chunks of one choice, whose close ends its session, and the text that they become."""


class Work:
    """Runs the choices of one request; its methods belong to the event loop in which it is made.

    Args:
        jobs: The choices.
        threads: The pool.
        ended: Called in the event loop for each of them that leaves the pool, also where it never ran.
    """

    def __init__(self, jobs: Sequence[Job], threads: ThreadPoolExecutor, ended: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Queue[tuple[int, Piece | BaseException]] = asyncio.Queue()
        self._stopped = threading.Event()
        self._ended = ended
        self._futures: list[Future[Piece]] = []
        for index, (chunks, transcript) in enumerate(jobs):
            future = threads.submit(self._run, index, chunks, transcript)
            future.add_done_callback(partial(self._leave, index))
            self._futures.append(future)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield the pieces of all choices as they come, each with the index of its choice.

        Raises:
            Exception: What a choice failed with.
        """
        num_left = len(self._futures)
        while num_left:
            index, found = await self._told.get()
            if isinstance(found, BaseException):
                raise found
            num_left -= found.finish_reason is not None
            yield index, found

    def stop(self) -> None:
        """End what is under way, of which ``pieces`` raises ServingError; what is complete stays so."""
        self._stopped.set()
        for future in self._futures:
            future.cancel()

    def _leave(self, index: int, future: "Future[Piece]") -> None:
        """Hand the end of a choice to the event loop; called in whichever thread brought it about."""
        self._loop.call_soon_threadsafe(self._end, index, future)

    def _end(self, index: int, future: "Future[Piece]") -> None:
        """Tell of a choice that has left the pool: its session is over, and another one may come in its place."""
        self._ended()
        error = ServingError(STOPPING) if future.cancelled() else future.exception()
        self._told.put_nowait((index, error or future.result()))

    def _run(self, index: int, chunks: Generator[Decision], transcript: Transcript) -> Piece:
        """Tell of each piece of a choice but the last one, and return that; runs in a thread of the pool."""
        with closing(chunks):
            for decision in chunks:
                if self._stopped.is_set():
                    raise ServingError(STOPPING)
                piece = transcript.add(decision)
                if piece.finish_reason is not None:
                    return piece
                self._loop.call_soon_threadsafe(self._told.put_nowait, (index, piece))
        return transcript.end()
