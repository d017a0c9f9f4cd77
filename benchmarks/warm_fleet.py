"""Processes that start warm: forked from one that has imported torch and the package already.

Owns starting, hearing and ending them. Owns nothing of what they do: a role is a function of what it is told and of a
``Mouth`` to speak with. The fork server is Python's own and ends with this process.
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

Role = Callable[[Any, "Mouth"], None]

END_WAIT_S = 10.0


class Heard(NamedTuple):
    """What was heard of a process.

    Args:
        name: Of the process.
        kind: What it said; ``failed`` with a traceback when its role raised; ``ended`` with the exit code at its end.
        values: What it said about that.
        at: When, seconds on the monotonic clock, which all processes of a machine share.
    """

    name: str
    kind: str
    values: tuple[Any, ...]
    at: float


class Mouth:
    """What a process speaks with; any of its threads may.

    Args:
        pipe: To the process that started it.
    """

    def __init__(self, pipe: "connection.Connection[Any, Any]") -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def say(self, kind: str, *values: Any) -> None:
        """Tell plain values; it is on its way even if this process is killed at once."""
        with self._lock:
            self._pipe.send((kind, values, time.monotonic()))

    def ask(self, *values: Any) -> Any:
        """Tell, and wait for the answer."""
        self.say("asks", *values)
        return self._pipe.recv()


class WarmProcess:
    """A process of a fleet.

    Args:
        name: Of the process.
        process: Not started yet.
        ear: Where it is heard.
    """

    def __init__(self, name: str, process: Any, ear: "connection.Connection[Any, Any]") -> None:
        self.name = name
        self.process = process
        self.ear: connection.Connection[Any, Any] | None = ear

    def answer(self, value: Any = None) -> None:
        """Answer what it asked."""
        assert self.ear is not None
        self.ear.send(value)

    def kill(self) -> None:
        """Kill it; it cannot refuse."""
        self.process.kill()

    def hear(self) -> Iterator[Heard]:
        """Yield what it has said and, once it is over, how it ended."""
        while self.ear is not None:
            try:
                if not self.ear.poll():
                    return
                kind, values, at = self.ear.recv()
            except (EOFError, OSError):
                self.process.join(END_WAIT_S)
                self.close()
                yield Heard(self.name, "ended", (self.process.exitcode,), time.monotonic())
            else:
                yield Heard(self.name, kind, values, at)

    def close(self) -> None:
        """Hear no more of it."""
        if self.ear is not None:
            self.ear.close()
            self.ear = None


class WarmFleet:
    """Starts processes and hears them; a context manager that leaves none behind."""

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
        ear, mouth = context.Pipe()
        process = context.Process(target=_play, args=(role, told, mouth), name=name, daemon=True)  # type: ignore[attr-defined]
        process.start()
        mouth.close()  # so that its end is heard
        started = WarmProcess(name, process, ear)
        self.processes.append(started)
        return started

    def hear(self, timeout_s: float) -> list[Heard]:
        """Return what was said, and who has ended, as soon as there is any; empty if there is none in time."""
        living = [process for process in self.processes if process.ear is not None]
        ready = connection.wait([process.ear for process in living if process.ear is not None], timeout_s)
        return [heard for process in living if process.ear in ready for heard in process.hear()]

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


def _play(role: Role, told: Any, pipe: "connection.Connection[Any, Any]") -> None:
    _end_with_parent()
    mouth = Mouth(pipe)
    try:
        role(told, mouth)
    except BaseException:
        with suppress(OSError):
            mouth.say("failed", traceback.format_exc(limit=-4))
        os._exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
