import hashlib
import json
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_blocktrain.data.cache import default_cache_dir, ensure_entry, read_info, split_path
from lightning_blocktrain.errors import CorpusError

SPLITS = {"train": [b"abc", memoryview(b"def")], "val": [b"gh"], "test": [b"i"]}


def read_splits(scratch):
    return SPLITS


def never_read(scratch):
    raise AssertionError("the entry should have been used")


def test_entry_built_holds_the_split_bytes_their_sizes_and_digest(tmp_path):
    entry, info = ensure_entry(tmp_path, "key", "name", read_splits)
    assert [split_path(entry, s).read_bytes() for s in ("train", "val", "test")] == [b"abcdef", b"gh", b"i"]
    assert info.split_bytes == {"train": 6, "val": 2, "test": 1}
    assert info.sha256 == hashlib.sha256(b"abcdefghi").hexdigest()
    assert info.name == "name"


def test_entry_present_is_used_without_reading_again(tmp_path):
    _, first = ensure_entry(tmp_path, "key", "name", read_splits)
    _, second = ensure_entry(tmp_path, "key", "name", never_read)
    assert first == second


def test_entry_built_leaves_nothing_else_behind(tmp_path):
    ensure_entry(tmp_path, "key", "name", read_splits)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def cut_a_split(entry: Path) -> None:
    split_path(entry, "train").write_bytes(b"ab")


def remove_a_split(entry: Path) -> None:
    split_path(entry, "val").unlink()


def remove_meta(entry: Path) -> None:
    (entry / "meta.json").unlink()


def spoil_meta(entry: Path) -> None:
    (entry / "meta.json").write_text("{")


def age_meta(entry: Path) -> None:
    meta = json.loads((entry / "meta.json").read_text())
    (entry / "meta.json").write_text(json.dumps({**meta, "format": 0}))


@pytest.mark.parametrize("damage", [cut_a_split, remove_a_split, remove_meta, spoil_meta, age_meta])
def test_entry_damaged_is_rebuilt(tmp_path, damage):
    entry, info = ensure_entry(tmp_path, "key", "name", read_splits)
    damage(entry)
    assert read_info(entry, "name") is None
    assert ensure_entry(tmp_path, "key", "name", read_splits) == (entry, info)
    assert split_path(entry, "train").read_bytes() == b"abcdef"
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_entry_interrupted_while_reading_leaves_no_entry(tmp_path):
    def interrupted(scratch):
        def chunks():
            yield b"half"
            raise KeyboardInterrupt

        return {"train": chunks()}

    with pytest.raises(KeyboardInterrupt):
        ensure_entry(tmp_path, "key", "name", interrupted)
    assert list(tmp_path.iterdir()) == []


def test_entry_built_by_another_first_is_kept(tmp_path):
    def overtaken(scratch):
        ensure_entry(tmp_path, "key", "name", read_splits)
        return {"train": [b"abcdef"], "val": [b"gh"], "test": [b"i"]}

    _, info = ensure_entry(tmp_path, "key", "name", overtaken)
    assert info.split_bytes["train"] == 6
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def build_together(cache_dir, barrier, results):
    def meet_then_read(scratch):
        barrier.wait(timeout=200)  # both have found no entry
        return read_splits(scratch)

    results.put(ensure_entry(Path(cache_dir), "key", "name", meet_then_read)[1].sha256)


def test_entry_two_threads_at_once_both_succeed(tmp_path):
    barrier = threading.Barrier(2)

    def meet_then_read(scratch):
        barrier.wait(timeout=60)  # both have found no entry
        return read_splits(scratch)

    with ThreadPoolExecutor(2) as pool:
        builds = [pool.submit(ensure_entry, tmp_path, "key", "name", meet_then_read) for _ in range(2)]
    first, second = (build.result() for build in builds)
    assert first == second and first[1].sha256 == hashlib.sha256(b"abcdefghi").hexdigest()
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


@pytest.mark.slow  # two fresh interpreters import all of lightning
def test_entry_two_processes_at_once_both_succeed(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=build_together, args=(str(tmp_path), barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    digests = [results.get(timeout=250) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert digests == [hashlib.sha256(b"abcdefghi").hexdigest()] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_cache_dir_that_is_a_file_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CorpusError, match="cache_dir must be writable"):
        ensure_entry(tmp_path / "file", "key", "name", read_splits)


def test_default_cache_dir_follows_the_environment(monkeypatch):
    monkeypatch.setenv("BLOCKTRAIN_CACHE", "/somewhere/else")
    assert default_cache_dir() == Path("/somewhere/else")
    monkeypatch.delenv("BLOCKTRAIN_CACHE")
    assert default_cache_dir().name == "lightning_blocktrain"
