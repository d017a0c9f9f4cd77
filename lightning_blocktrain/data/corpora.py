"""From what the user names to a corpus that can be read: named corpora, and local files with their splits.

Rules for local files. ``corpus`` (or ``train``) is the pool. A split with files of its own (``val``, ``test``) is
those files; a split without is cut off the end of the pool by its fraction: the last ``test_fraction`` of the
bytes is test, the ``val_fraction`` before it val, the rest train, each rounded down to whole bytes. A fraction
that is not given is 0.05, or 0 as soon as ``val`` or ``test`` names files: then train is exactly what was passed
and the split that was not named is empty. Named corpora bring their own splits, so that none of these apply.
"""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_blocktrain.data import python_docs, readers
from lightning_blocktrain.data.cache import Chunks, Split, SplitReader
from lightning_blocktrain.data.hub import HUB_CORPORA, read_hub_corpus
from lightning_blocktrain.errors import CorpusError, explain

Paths = str | Sequence[str]
Given = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""What a user may pass; inside this module paths are text."""
DEFAULT_FRACTION = 0.05
PYTHON_DOCS = "python-docs"
NAMED_CORPORA: tuple[str, ...] = (PYTHON_DOCS, *HUB_CORPORA)
"""The corpora known by name: the embedded one, then those of the hub."""

_RULES_VERSION = 1  # part of every key: raise it when the same input comes to mean other bytes


@dataclass(frozen=True)
class Source:
    """A corpus that can be read.

    Args:
        name: What reports call it.
        content_key: Returns the key of its cache entry; reads local files, asks no network.
        read: Returns the bytes of its splits.
    """

    name: str
    content_key: Callable[[], str]
    read: SplitReader


@dataclass(frozen=True)
class LocalFiles:
    """Local files of a corpus and how they are split.

    Args:
        pool: Files of train, and of the splits that are cut off its end.
        own: Files of the splits that have their own.
        fractions: Fraction of the pool for val and test; 0 for a split with its own files.
        text_column: Column to take from files with columns.
    """

    pool: tuple[Path, ...]
    own: Mapping[Split, tuple[Path, ...]]
    fractions: tuple[float, float]
    text_column: str


def resolve(
    corpus: Given | None,
    *,
    train: Given | None = None,
    val: Given | None = None,
    test: Given | None = None,
    val_fraction: float | None = None,
    test_fraction: float | None = None,
    text_column: str = "text",
) -> Source:
    """Return the source that the arguments name, without reading it.

    Args:
        corpus: Name of a named corpus, or local files; None is the embedded corpus unless ``train`` is given.
        train: Files of train, instead of ``corpus``.
        val: Files of val.
        test: Files of test.
        val_fraction: Fraction of the pool in [0, 1) for val; None is 0.05, or 0 if ``val`` or ``test`` is given.
        test_fraction: The same for test.
        text_column: Column of ``.jsonl`` and ``.parquet`` files.

    Raises:
        CorpusError: The arguments contradict each other, or name no file and no corpus.
    """
    named = {"corpus": corpus, "train": train, "val": val, "test": test}
    paths = {argument: _as_paths(argument, given) for argument, given in named.items()}
    if paths["corpus"] is not None and paths["train"] is not None:
        raise CorpusError(
            explain(
                "corpus and train must not both be given",
                f"corpus={corpus!r}, train={train!r}",
                "pass the training files as one of them",
            )
        )
    pool = paths["train"] or paths["corpus"] or PYTHON_DOCS
    if train is None and isinstance(pool, str) and pool in NAMED_CORPORA:
        given = {"val": val, "test": test, "val_fraction": val_fraction, "test_fraction": test_fraction}
        return _named_source(pool, {key: value for key, value in given.items() if value is not None})
    own = {"val": paths["val"], "test": paths["test"]}
    fractions = {"val": val_fraction, "test": test_fraction}
    return _local_source(pool, "corpus" if train is None else "train", own, fractions, text_column)


def _as_paths(argument: str, given: Given | None) -> str | list[str] | None:
    """Return names and paths as text.

    Raises:
        CorpusError: If there is none, or something that is not a path.
    """
    if given is None:
        return None
    try:
        paths = [os.fspath(given)] if isinstance(given, str | os.PathLike) else [os.fspath(path) for path in given]
    except TypeError:
        paths = []
    if not paths or not all(paths):
        rule = f"{argument} must be a name, a path or a list of paths"
        raise CorpusError(explain(rule, f"{argument}={given!r}", "name a corpus, a file, a glob or a directory"))
    return paths[0] if isinstance(given, str | os.PathLike) else paths


def _named_source(name: str, options: Mapping[str, object]) -> Source:
    """Return a named corpus.

    Args:
        name: Key of ``NAMED_CORPORA``.
        options: Split options that were given; none may be.
    """
    if options:
        raise CorpusError(
            explain(
                "a named corpus brings its own splits",
                ", ".join([f"corpus={name!r}", *(f"{key}={value!r}" for key, value in options.items())]),
                f"leave out {', '.join(options)}, or pass your own files as train=",
            )
        )
    if name == PYTHON_DOCS:
        return Source(name, _python_docs_key, _read_python_docs)
    spec = HUB_CORPORA[name]
    identity = [name, spec.repo, spec.config, spec.revision, spec.data_files]
    return Source(name, functools.partial(_hashed, identity), functools.partial(read_hub_corpus, name))


def _local_source(
    pool: Paths,
    argument: str,
    own: Mapping[str, Paths | None],
    fractions: Mapping[str, float | None],
    text_column: str,
) -> Source:
    """Return a corpus of local files; see ``resolve`` for the arguments."""
    explicit = any(paths is not None for paths in own.values())
    val_fraction, test_fraction = (
        _checked_fraction(split, own[split], fractions[split], explicit) for split in ("val", "test")
    )
    check_fractions(val_fraction, test_fraction)
    splits: tuple[Split, Split] = ("val", "test")
    files = LocalFiles(
        tuple(_pool_files(pool, argument)),
        {split: tuple(readers.expand(paths, split)) for split in splits if (paths := own[split]) is not None},
        (val_fraction, test_fraction),
        text_column,
    )
    _check_disjoint([(argument, files.pool), *files.own.items()])
    key = functools.partial(_local_key, files)
    return Source(_local_name(files.pool), key, functools.partial(_read_local, files))


def _pool_files(pool: Paths, argument: str) -> list[Path]:
    """Return the files of the pool; a lone word that is no path may be a misspelt named corpus."""
    try:
        return readers.expand(pool, argument)
    except CorpusError as exc:
        if argument == "corpus" and isinstance(pool, str):
            rule = "corpus must be a named corpus or an existing file, glob or directory"
            choices = f"no such path was found; choose one of {', '.join(NAMED_CORPORA)}, or check the path"
            raise CorpusError(explain(rule, f"corpus={pool!r}", choices)) from exc
        raise


def _checked_fraction(split: str, paths: Paths | None, fraction: float | None, explicit: bool) -> float:
    """Return the fraction of a split, its default applied; one beside files of its own is an error."""
    if paths is not None and fraction is not None:
        raise CorpusError(
            explain(
                f"{split} and {split}_fraction must not both be given",
                f"{split}={paths!r}, {split}_fraction={fraction}",
                f"leave out {split}_fraction",
            )
        )
    default = 0.0 if explicit else DEFAULT_FRACTION
    return default if fraction is None else fraction


def check_fractions(val_fraction: float, test_fraction: float) -> None:
    """Refuse fractions outside [0, 1) and those that leave nothing for train.

    Raises:
        CorpusError: A fraction or their sum is out of range (NaN included).
    """
    for name, value in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
        if not 0 <= value < 1:
            raise CorpusError(explain(f"{name} must lie in [0, 1)", f"{name}={value}", "choose such as 0.05"))
    if val_fraction + test_fraction >= 1:
        raise CorpusError(
            explain(
                "val_fraction + test_fraction must be below 1",
                f"val_fraction={val_fraction}, test_fraction={test_fraction}",
                "leave a part for train",
            )
        )


def _check_disjoint(files: Sequence[tuple[str, Sequence[Path]]]) -> None:
    """Refuse a file that stands in two splits."""
    owner: dict[Path, str] = {}
    for name, paths in files:
        for path in paths:
            first = owner.setdefault(path.resolve(), name)
            if first != name:
                problem = f"{path} in {first} and {name}"
                raise CorpusError(explain("a file must belong to one split", problem, "separate the files"))


def _local_name(pool: Sequence[Path]) -> str:
    """Return what reports call local files: the first file's name and the number of the others, no directory."""
    return pool[0].name + (f" and {len(pool) - 1} more" if len(pool) > 1 else "")


def _hashed(identity: object) -> str:
    """Return the key of what ``identity`` (JSON) describes, under the present rules."""
    return hashlib.sha256(json.dumps([_RULES_VERSION, identity]).encode()).hexdigest()


def _python_docs_key() -> str:
    return _hashed([PYTHON_DOCS, python_docs.content_key(python_docs.stdlib_path())])


def _read_python_docs(scratch: Path) -> Mapping[Split, Chunks]:
    del scratch
    return python_docs.python_docs_splits(python_docs.stdlib_path())


def _local_key(files: LocalFiles) -> str:
    """Return the key of local files: contents and suffixes in order, the split rule and the column."""
    roles: list[tuple[str, Sequence[Path]]] = [("pool", files.pool), *sorted(files.own.items())]
    contents = [
        [role, ["".join(path.suffixes[-2:]).lower() + readers.content_digest(path).hex() for path in paths]]
        for role, paths in roles
    ]
    return _hashed([contents, files.fractions, files.text_column])


def _read_local(files: LocalFiles, scratch: Path) -> Mapping[Split, Chunks]:
    """Return the bytes of local files; a pool that is cut is first written to ``scratch``, not held in memory."""
    splits: dict[Split, Chunks] = {
        split: readers.read_files(paths, files.text_column) for split, paths in files.own.items()
    }
    pool = readers.read_files(files.pool, files.text_column)
    if not any(files.fractions):
        return {"train": pool, **splits}
    whole = scratch / "pool.u8"
    with whole.open("wb") as file:
        for chunk in pool:
            file.write(chunk)
    return {**cut_splits(whole, *files.fractions), **splits}


def cut_points(num_bytes: int, val_fraction: float, test_fraction: float) -> tuple[int, int]:
    """Return where train ends and val begins, and where val ends and test begins.

    Args:
        num_bytes: Bytes of the whole.
        val_fraction: Fraction of the whole for val, in [0, 1).
        test_fraction: Fraction of the whole for test, in [0, 1).
    """
    val_end = num_bytes - int(num_bytes * test_fraction)
    return val_end - int(num_bytes * val_fraction), val_end


def cut_splits(whole: Path, val_fraction: float, test_fraction: float) -> dict[Split, Chunks]:
    """Return a file cut into train, val and test from its front to its end, read in pieces."""
    num_bytes = whole.stat().st_size
    train_end, val_end = cut_points(num_bytes, val_fraction, test_fraction)
    bounds: dict[Split, tuple[int, int]] = {
        "train": (0, train_end),
        "val": (train_end, val_end),
        "test": (val_end, num_bytes),
    }
    return {split: _range_pieces(whole, *bound) for split, bound in bounds.items()}


def _range_pieces(whole: Path, start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes ``start`` to ``end`` of a file in pieces."""
    with whole.open("rb") as file:
        file.seek(start)
        while start < end and (piece := file.read(min(readers.CHUNK_BYTES, end - start))):
            start += len(piece)
            yield piece
