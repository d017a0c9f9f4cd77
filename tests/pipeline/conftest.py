"""The fork server that all process pipelines of one file share, and the check that a pipeline leaves nothing behind."""

import gc
import multiprocessing
import multiprocessing.forkserver
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_blocktrain.pipeline.base import Pipeline
from tests.pipeline.tiny import Gate, Tiny, name_semaphores, open_backend, shared_memory, stage_threads


@pytest.fixture(scope="module")
def fork_server() -> Iterator[None]:
    """Keep one fork server for a file: a pipeline stops one that it started, and each costs seconds to start."""
    server = multiprocessing.forkserver._forkserver
    server.set_forkserver_preload(["lightning_blocktrain.pipeline.preload", "tests.pipeline.tiny"])
    server.ensure_running()
    yield
    server._stop()


@pytest.fixture(scope="module", autouse=True)
def named_semaphores() -> Iterator[None]:
    """Name the semaphores of this process after it, so that a test can tell whose are left."""
    config = multiprocessing.current_process()._config
    before = config["semprefix"]
    name_semaphores()
    yield
    config["semprefix"] = before


@pytest.fixture
def launch(fork_server: None) -> Iterator[Callable[..., Pipeline]]:
    """Return ``open_backend``; what it opened is closed after the test, and must then have left nothing."""
    before = shared_memory()
    opened: list[Pipeline] = []

    def start(backend: str, module: Tiny, **options: Any) -> Pipeline:
        opened.append(open_backend(backend, module, **options))
        return opened[-1]

    yield start
    for pipeline in opened:
        pipeline.close()
    assert stage_threads() == []
    assert [child.name for child in multiprocessing.active_children() if child.name.startswith("stage-")] == []
    if not shared_memory() <= before:
        opened.clear()  # with the errors that it raised, whose frames hold the gates of the test
        del pipeline
        gc.collect()
    assert shared_memory() <= before


@pytest.fixture
def make_gate() -> Callable[[str], Gate]:
    """Return a function that makes a gate for a backend."""

    def make(backend: str) -> Gate:
        if backend.startswith("processes"):
            return Gate(multiprocessing.get_context("forkserver").Event())
        return Gate(threading.Event())

    return make
