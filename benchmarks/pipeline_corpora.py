"""Corpora of ``benchmarks.pipeline_target``: how a text is cut into train, valid and test, before any run.

The last 5 % are test, the 5 % before them valid, the rest train: of the bytes of one text, or of whole stories.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_blocktrain.data.readers import expand, read_files

MARK = b"<|endoftext|>"
HELD_OUT_FRAC = 0.05


@dataclass(frozen=True)
class Corpus:
    """A corpus as ``ByteDataModule`` takes it.

    Args:
        name: What the tables call it.
        options: Keywords of ``ByteDataModule``.
    """

    name: str
    options: dict[str, str]


def cut_points(number: int) -> tuple[int, int]:
    """Return where valid and where test begins among ``number`` items."""
    held_out = round(HELD_OUT_FRAC * number)
    return number - 2 * held_out, number - held_out


def split_text(text: bytes) -> tuple[bytes, bytes, bytes]:
    """Cut a text into train, valid and test."""
    valid, test = cut_points(len(text))
    return text[:valid], text[valid:test], text[test:]


def split_stories(texts: Sequence[bytes]) -> tuple[bytes, bytes, bytes]:
    """Cut texts of stories into train, valid and test; a story stands once, and one that is cut off not at all."""
    stories: dict[bytes, None] = {}
    for text in texts:
        *whole, _ = text.split(MARK)
        stories.update((story.strip(), None) for story in whole if story.strip())
    kept = list(stories)
    valid, test = cut_points(len(kept))
    parts = (kept[:valid], kept[valid:test], kept[test:])
    return tuple(b"".join(story + b"\n" + MARK + b"\n" for story in part) for part in parts)  # type: ignore[return-value]


def write_corpus(name: str, parts: tuple[bytes, bytes, bytes], folder: Path) -> Corpus:
    """Write the three parts of a corpus into ``folder``."""
    files = {split: folder / f"{name}_{split}.txt" for split in ("train", "val", "test")}
    for file, part in zip(files.values(), parts, strict=True):
        file.write_bytes(part)
    return Corpus(name, {split: str(file) for split, file in files.items()})


def enwik8(path: str, folder: Path) -> Corpus:
    """Return a slice of enwik8 as a corpus; a packed file is unpacked."""
    return write_corpus("enwik8", split_text(_read(path)), folder)


def tinystories(paths: Sequence[str], folder: Path) -> Corpus:
    """Return files of TinyStories, with a mark after each story, as a corpus."""
    return write_corpus("tinystories", split_stories([_read(path) for path in paths]), folder)


def _read(path: str) -> bytes:
    return b"".join(read_files(expand(path, "corpus"), "text"))
