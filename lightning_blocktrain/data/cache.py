"""The store of prepared corpora: one directory per content key, written atomically.

Layout of ``<cache_dir>/<key>/``: ``train.u8``, ``val.u8``, ``test.u8`` (the raw bytes of each split, no header)
and ``meta.json``, written last. A directory is built under a temporary name beside its place and renamed, so a
key either names a complete corpus or nothing; two processes that build the same key both succeed, and the
second uses what the first has put there. Owns no knowledge of where the bytes come from.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from lightning_blocktrain.errors import CorpusError, explain

Split: TypeAlias = Literal["train", "val", "test"]
Chunks: TypeAlias = Iterable[bytes | memoryview]
SplitReader: TypeAlias = Callable[[Path], Mapping[Split, Chunks]]
"""Reads a corpus: given an empty scratch directory, returns the bytes of each split in pieces."""

SPLITS: tuple[Split, ...] = ("train", "val", "test")
FORMAT_VERSION = 1
_META = "meta.json"
_PUBLISH_TRIES = 5


@dataclass(frozen=True)
class CorpusInfo:
    """What was loaded, for reports.

    Args:
        name: Name of a named corpus, or file names of a local one.
        sha256: SHA-256 (hex) of the bytes of train, val and test one after the other, nothing between.
        split_bytes: Number of bytes of each split.
    """

    name: str
    sha256: str
    split_bytes: dict[str, int]


def default_cache_dir() -> Path:
    """Return ``$BLOCKTRAIN_CACHE``, or ``~/.cache/lightning_blocktrain`` if it is not set."""
    configured = os.environ.get("BLOCKTRAIN_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "lightning_blocktrain"


def split_path(entry: Path, split: Split) -> Path:
    """Return the file of one split in a cache entry."""
    return entry / f"{split}.u8"


def read_info(entry: Path, name: str) -> CorpusInfo | None:
    """Return what a cache entry holds, or None if it is absent, incomplete or damaged.

    Args:
        entry: Directory of the entry.
        name: Name to report; entries are found by content and know no names.
    """
    try:
        meta = json.loads((entry / _META).read_text(encoding="utf-8"))
        sizes: dict[str, int] = {split: split_path(entry, split).stat().st_size for split in SPLITS}
        complete = meta["format"] == FORMAT_VERSION and meta["split_bytes"] == sizes
        return CorpusInfo(name, str(meta["sha256"]), sizes) if complete else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def ensure_entry(cache_dir: Path, key: str, name: str, read: SplitReader) -> tuple[Path, CorpusInfo]:
    """Return the cache entry of a key, building it first if it is absent or damaged.

    Safe to call from several processes at once.

    Args:
        cache_dir: Directory of all entries; created if needed.
        key: Name of the entry, unique to its content.
        name: Name of the corpus, for messages and reports.
        read: Called only if the entry must be built.

    Returns:
        Directory of the entry and what it holds.

    Raises:
        CorpusError: The directory cannot be written, or ``read`` raised it.
    """
    entry = cache_dir / key
    if info := read_info(entry, name):
        return entry, info
    with _scratch_dir(cache_dir, key) as scratch:
        built = scratch / "entry"
        built.mkdir()
        _write_entry(built, read, scratch)
        _publish(built, entry, scratch)
    info = read_info(entry, name)
    if info is None:
        raise CorpusError(
            explain("a cache entry must stay complete once built", f"entry={entry}", "stop what changes it")
        )
    return entry, info


@contextlib.contextmanager
def _scratch_dir(cache_dir: Path, key: str) -> Iterator[Path]:
    """Create a temporary directory in ``cache_dir`` (same file system, so renames are atomic); remove it after."""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{key[:16]}-", dir=cache_dir))
    except OSError as exc:
        raise CorpusError(
            explain(
                "cache_dir must be writable",
                f"cache_dir={str(cache_dir)!r} ({exc})",
                "choose another cache_dir or set BLOCKTRAIN_CACHE",
            )
        ) from exc
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_entry(built: Path, read: SplitReader, scratch: Path) -> None:
    """Write all files of an entry; the splits are streamed, ``meta.json`` comes last."""
    chunks = read(scratch)
    digest = hashlib.sha256()
    sizes = {}
    for split in SPLITS:
        with split_path(built, split).open("wb") as file:
            for chunk in chunks.get(split, ()):
                file.write(chunk)
                digest.update(chunk)
            sizes[split] = file.tell()
    meta = {"format": FORMAT_VERSION, "sha256": digest.hexdigest(), "split_bytes": sizes}
    (built / _META).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")


def _publish(built: Path, entry: Path, scratch: Path) -> None:
    """Rename a built entry into its place; a complete one that is already there wins, a damaged one goes.

    Raises:
        OSError: Something that is not an entry stands in its place and cannot be moved.
    """
    for attempt in range(_PUBLISH_TRIES):
        try:
            built.rename(entry)
            return
        except OSError:
            if read_info(entry, ""):
                return
            if attempt == _PUBLISH_TRIES - 1:
                raise
            # Fails if another process has moved it away in the meantime: then our next rename succeeds.
            with contextlib.suppress(OSError):
                entry.rename(scratch / f"damaged-{attempt}")
