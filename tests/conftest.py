"""What every test shares: one thread, no network, no leak, and a tiny corpus to train on."""

import gc
import multiprocessing.resource_tracker
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

# Before any test imports the libraries that read them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"

import lightning as L
import psutil
import pytest
import torch
from hypothesis import settings

from lightning_blocktrain.data import ByteDataModule

torch.set_num_threads(1)

# The same examples every time, and no time limit on one: a busy machine is no fault.
settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")

END_WAIT_S = 10.0
"""How long what is already ending may take; only a test that leaks waits for it."""

SENTENCES = (b"the old fox ran home. ", b"a red hen sat down. ", b"we saw two cats at sea. ")


def living_children() -> set[psutil.Process]:
    """Return the child processes of this one, without Python's own resource tracker."""
    tracker = getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None)
    return {child for child in psutil.Process().children() if child.pid != tracker}


def living_threads() -> set[threading.Thread]:
    """Return the threads that would keep the interpreter alive."""
    return {thread for thread in threading.enumerate() if not thread.daemon}


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same global random state."""
    torch.manual_seed(1234)


@pytest.fixture(autouse=True)
def no_process_or_thread_is_left() -> Iterator[None]:
    """Fail a test that leaves a child process or a non-daemon thread behind."""
    children, threads = living_children(), living_threads()
    yield
    if not (living_children() <= children and living_threads() <= threads):
        gc.collect()  # loader processes end with the iterator that owns them
        psutil.wait_procs(living_children() - children, timeout=END_WAIT_S)
        for thread in living_threads() - threads:
            thread.join(END_WAIT_S)
    assert living_children() - children == set()
    assert living_threads() - threads == set()


@pytest.fixture
def tiny_corpus(tmp_path: Path) -> Path:
    """Return a file of 13 kB of three short sentences in a fixed pseudo-random order."""
    order = torch.randint(len(SENTENCES), (600,), generator=torch.Generator().manual_seed(0))
    path = tmp_path / "tiny.txt"
    path.write_bytes(b"".join(SENTENCES[idx] for idx in order.tolist()))
    return path


@pytest.fixture
def tiny_data(tiny_corpus: Path, tmp_path: Path) -> ByteDataModule:
    """Return windows of 16 bytes of the tiny corpus, 8 to a batch."""
    cache = str(tmp_path / "cache")
    return ByteDataModule(str(tiny_corpus), window_bytes=16, batch_size=8, cache_dir=cache)


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., L.Trainer]:
    """Return a function that makes a quiet CPU Trainer; keywords go to the Trainer."""

    def make(**options: object) -> L.Trainer:
        quiet = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        fixed = {"accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path}
        return L.Trainer(**{**fixed, **quiet, **options})  # type: ignore[arg-type]

    return make
