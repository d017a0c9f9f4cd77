"""Freed memory: given back when asked, and kept when asked."""

import ctypes
import subprocess
import sys

import psutil
import pytest

from lightning_blocktrain import heap

IS_GLIBC = hasattr(ctypes.CDLL(None), "malloc_trim") if sys.platform == "linux" else False
pytestmark = pytest.mark.skipif(not IS_GLIBC, reason="the C library is not glibc")

MIB = 2**20
FREE_ONE = """
import psutil, runpy, sys
heap = runpy.run_path(sys.argv[1])
if sys.argv[2] == "keep":
    heap["keep_heap"](2**26)
def rss():
    return psutil.Process().memory_info().rss
before = rss()
block = b"x" * 2**24
del block
print(rss() - before)
"""


def rss_bytes() -> int:
    return psutil.Process().memory_info().rss


def test_trim_heap_gives_back_what_lies_between_memory_in_use() -> None:
    kept = []
    for _ in range(400):
        freed = b"x" * 60_000  # short enough to come from the heap
        kept.append((freed, b"y" * 100))
    full = rss_bytes()
    kept = [(b"", small) for _, small in kept]
    del freed
    heap.trim_heap()
    assert full - rss_bytes() > 10 * MIB
    assert len(kept) == 400


@pytest.mark.parametrize(("mode", "keeps"), [("keep", True), ("leave", False)])
def test_keep_heap_holds_a_freed_block_for_the_next_one(mode: str, keeps: bool) -> None:
    command = [sys.executable, "-c", FREE_ONE, heap.__file__, mode]
    left = int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)
    assert (left > 14 * MIB) is keeps


def test_heap_settings_are_nothing_where_the_library_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: asked.append(name) or object())
    heap.trim_heap()
    heap.keep_heap(MIB)
    assert asked == [None, None]
