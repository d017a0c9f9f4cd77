r"""Local files as byte streams: which files a path means, and how the suffix decides what is read.

=================================  =========================================================================
suffix                             bytes
=================================  =========================================================================
``.xz`` ``.gz`` ``.bz2``           the decompressed bytes
``.zip``                           the bytes of all members, sorted by name, nothing between them
``.jsonl`` (``.jsonl.xz`` ...)     the text column of each line as UTF-8, each row followed by a newline
``.parquet``                       the text (or binary) column of each row, each row followed by a newline
``.zst`` ``.7z`` ``.tar`` ...      refused: unpack first
anything else                      the file as it is
=================================  =========================================================================

JSON text is encoded with ``surrogatepass``: a lone surrogate (an escape such as ``\ud800``) becomes its three
bytes instead of an error. Nothing is decoded that need not be.
"""

import bz2
import glob
import gzip
import hashlib
import io
import json
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from lightning_blocktrain.errors import CorpusError, explain

CHUNK_BYTES = 1 << 20
_OPENERS: dict[str, Callable[[Path], io.BufferedIOBase]] = {
    ".xz": lzma.LZMAFile,
    ".gz": gzip.GzipFile,
    ".bz2": bz2.BZ2File,
}
_REFUSED_SUFFIXES = frozenset((".zst", ".7z", ".rar", ".tar", ".tgz", ".tbz2", ".txz", ".lz4"))
_ARCHIVE_ERRORS = (lzma.LZMAError, zlib.error, zipfile.BadZipFile, EOFError, OSError, RuntimeError)
_GLOB_CHARS = frozenset("*?[")


def expand(paths: str | Sequence[str], argument: str) -> list[Path]:
    """Return the files that a path, a glob, a directory or a list of them means.

    A directory means all files below it, sorted by path; a glob all files it matches, sorted; hidden files and
    directories are skipped by both. The items of a list keep their order; a file named twice counts once.

    Args:
        paths: Path, glob pattern (``**`` crosses directories) or directory, or several; ``~`` is expanded.
        argument: Name of the user's argument, for messages.

    Raises:
        CorpusError: An item means no file.
    """
    files: dict[Path, None] = {}
    for item in [paths] if isinstance(paths, str) else paths:
        matched = _expand_one(Path(item).expanduser())
        if not matched:
            raise CorpusError(
                explain(
                    f"{argument} must name a file, or a glob or directory with files in it",
                    f"{argument}={item!r}",
                    "check the path (hidden files are skipped)",
                )
            )
        files.update(dict.fromkeys(matched))
    return list(files)


def _expand_one(path: Path) -> list[Path]:
    """Return the files of one path, directory or glob pattern, sorted; empty if there are none."""
    if path.is_file():
        return [path]
    if path.is_dir():
        found = (file for file in path.rglob("*") if file.is_file())
        return sorted(file for file in found if not _is_hidden(file.relative_to(path)))
    if _GLOB_CHARS.isdisjoint(str(path)):
        return []
    matched = glob.glob(str(path), recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
    return sorted(Path(name) for name in matched if Path(name).is_file())


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def content_digest(file: Path) -> bytes:
    """Return the SHA-256 of a file as it lies on the disk, compressed or not, read in pieces."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def read_files(files: Sequence[Path], text_column: str) -> Iterator[bytes]:
    """Yield the bytes of files one after the other, with nothing between them.

    Args:
        files: Files in order.
        text_column: Column to take from ``.jsonl`` and ``.parquet`` files.

    Raises:
        CorpusError: An archive cannot be read, or a column is missing; the message names the file.
    """
    for file in files:
        yield from read_file(file, text_column)


def read_file(file: Path, text_column: str) -> Iterator[bytes]:
    """Yield the bytes of one file in pieces; see the table of the module for what its suffix means.

    Raises:
        CorpusError: The file cannot be read, or its column is missing.
    """
    suffix = file.suffix.lower()
    inner = Path(file.stem).suffix.lower() if suffix in _OPENERS else suffix
    if suffix in _REFUSED_SUFFIXES or (inner != suffix and inner in {".parquet", ".zip", *_REFUSED_SUFFIXES}):
        raise CorpusError(
            explain("a corpus file must be text or an archive that can be read", f"{file}", "unpack it first")
        )
    try:
        if suffix == ".zip":
            yield from _zip_bytes(file)
        elif suffix == ".parquet":
            yield from _parquet_rows(file, text_column)
        else:
            with _OPENERS.get(suffix, _open_plain)(file) as stream:
                yield from _jsonl_rows(stream, file, text_column) if inner == ".jsonl" else _pieces(stream)
    except _ARCHIVE_ERRORS as exc:
        raise _unreadable(str(file), exc) from exc


def _open_plain(file: Path) -> io.BufferedIOBase:
    return file.open("rb")


def _unreadable(where: str, exc: Exception) -> CorpusError:
    """Return the error about a file that could not be read to its end."""
    problem = f"{where} ({type(exc).__name__}: {exc})"
    return CorpusError(explain("a corpus file must be readable to its end", problem, "replace or remove it"))


def _pieces(stream: io.BufferedIOBase | IO[bytes]) -> Iterator[bytes]:
    while piece := stream.read(CHUNK_BYTES):
        yield piece


def _zip_bytes(file: Path) -> Iterator[bytes]:
    """Yield the bytes of all members of a zip archive, sorted by name."""
    with zipfile.ZipFile(file) as archive:
        for name in sorted(member.filename for member in archive.infolist() if not member.is_dir()):
            with archive.open(name) as stream:
                yield from _pieces(stream)


def _jsonl_rows(stream: io.BufferedIOBase, file: Path, text_column: str) -> Iterator[bytes]:
    """Yield the text column of a JSON lines stream row by row; blank lines are no rows."""
    for line_idx, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        where = f"{file}, line {line_idx}"
        try:
            row = json.loads(line)
        except ValueError as exc:
            raise _unreadable(where, exc) from exc
        columns = sorted(row) if isinstance(row, dict) else []
        if text_column not in columns:
            raise missing_column(where, text_column, columns)
        yield encode_row(row[text_column], where, text_column)


def _parquet_rows(file: Path, text_column: str) -> Iterator[bytes]:
    """Yield the text column of a parquet file row by row."""
    from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]  # slow to import, rarely needed

    try:
        with parquet.ParquetFile(file) as table:
            columns = table.schema_arrow.names
            if text_column not in columns:
                raise missing_column(str(file), text_column, columns)
            for batch in table.iter_batches(columns=[text_column]):
                for value in batch.column(0).to_pylist():
                    yield encode_row(value, str(file), text_column)
    except ArrowException as exc:
        raise _unreadable(str(file), exc) from exc


def encode_row(value: Any, where: str, text_column: str) -> bytes:
    """Return a row's text (or bytes) followed by a newline.

    Raises:
        CorpusError: The value is neither text nor bytes.
    """
    if isinstance(value, bytes):
        return value + b"\n"
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass") + b"\n"
    raise CorpusError(
        explain(
            f"text_column {text_column!r} must hold text in every row",
            f"{type(value).__name__} in {where}",
            "remove that row or choose another text_column",
        )
    )


def missing_column(where: str, text_column: str, columns: Sequence[str]) -> CorpusError:
    """Return the error about a file that lacks the text column, naming the columns it has."""
    return CorpusError(
        explain(
            "text_column must be a column of the file",
            f"text_column={text_column!r} for {where}",
            f"choose one of {', '.join(columns) or 'none: the file has no columns'}",
        )
    )
