"""Processes that start warm: forked from one that has imported torch and the package already.

Owns starting and ending them and their messages. Owns nothing of what they do: a role is a function of what it is told
and of a ``ChildPipe`` to send messages on. The fork server is Python's own and ends with this process.
"""

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver
from typing import Any, NamedTuple

Role = Callable[[Any, "ChildPipe"], None]

END_WAIT_S = 10.0


class Message(NamedTuple):
    """A message from a process.

    Args:
        name: Of the process.
        kind: Of the message; ``failed`` with a traceback when its role raised; ``ended`` with the exit code at its end.
        values: What it says.
        at: When, seconds on the monotonic clock, which all processes of a machine share.
    """

    name: str
    kind: str
    values: tuple[Any, ...]
    at: float


class ChildPipe:
    """A process's end of the pipe to the one that started it; any of its threads may send.

    Args:
        pipe: The connection.
    """

    def __init__(self, pipe: "connection.Connection[Any, Any]") -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def send(self, kind: str, *values: Any) -> None:
        """Send plain values; they are on their way even if this process is killed at once."""
        with self._lock:
            self._pipe.send((kind, values, time.monotonic()))

    def ask(self, *values: Any) -> Any:
        """Send, and wait for the answer."""
        self.send("asks", *values)
        return self._pipe.recv()


class WarmProcess:
    """A process of a fleet.

    Args:
        name: Of the process.
        process: Not started yet.
        pipe: To it.
    """

    def __init__(self, name: str, process: Any, pipe: "connection.Connection[Any, Any]") -> None:
        self.name = name
        self.process = process
        self.pipe: connection.Connection[Any, Any] | None = pipe

    def answer(self, value: Any = None) -> None:
        """Answer what it asked."""
        assert self.pipe is not None
        self.pipe.send(value)

    def kill(self) -> None:
        """Kill it; it cannot refuse."""
        self.process.kill()

    def receive(self) -> Iterator[Message]:
        """Yield what it has sent and, once it is over, how it ended."""
        while self.pipe is not None:
            try:
                if not self.pipe.poll():
                    return
                kind, values, at = self.pipe.recv()
            except (EOFError, OSError):
                self.process.join(END_WAIT_S)
                self.close()
                yield Message(self.name, "ended", (self.process.exitcode,), time.monotonic())
            else:
                yield Message(self.name, kind, values, at)

    def close(self) -> None:
        """Receive no more from it."""
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None


class WarmFleet:
    """Starts processes and receives their messages; a context manager that leaves none behind."""

    def __init__(self) -> None:
        self.processes: list[WarmProcess] = []

    def __enter__(self) -> "WarmFleet":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, name: str, role: Role, told: Any, cold: bool = False) -> WarmProcess:
        """Start a process.

        Args:
            name: Of the process, for people.
            role: What it does; a function of a module that is cheap to import.
            told: What it is told, picklable.
            cold: Start a new interpreter instead, which imports everything itself.
        """
        context = multiprocessing.get_context("spawn" if cold else "forkserver")
        ours, its = context.Pipe()
        process = context.Process(target=_play, args=(role, told, its), name=name, daemon=True)  # type: ignore[attr-defined]
        process.start()
        its.close()  # else the pipe would stay open at its end
        started = WarmProcess(name, process, ours)
        self.processes.append(started)
        return started

    def receive(self, timeout_s: float) -> list[Message]:
        """Return what was sent, and who has ended, as soon as there is any; empty if there is none in time."""
        living = [process for process in self.processes if process.pipe is not None]
        ready = connection.wait([process.pipe for process in living if process.pipe is not None], timeout_s)
        return [message for process in living if process.pipe in ready for message in process.receive()]

    def end(self) -> None:
        """Kill what still runs, and wait for its end; any number of times."""
        for process in self.processes:
            process.close()
            process.kill()
        for process in self.processes:
            process.process.join(END_WAIT_S)
            process.process.close()
        self.processes = []


def warm_up(modules: Sequence[str]) -> None:
    """Start the fork server, which imports ``modules`` meanwhile; the first process waits for that.

    Does nothing where a fork server runs already.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
    forkserver.ensure_running()


def _play(role: Role, told: Any, connected: "connection.Connection[Any, Any]") -> None:
    _end_with_parent()
    pipe = ChildPipe(connected)
    try:
        role(told, pipe)
    except BaseException:
        with suppress(OSError):
            pipe.send("failed", traceback.format_exc(limit=-4))
        os._exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
