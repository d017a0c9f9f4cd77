"""Named corpora of the Hugging Face hub, read through ``datasets``: which files, which splits, how rows are joined.

==============  =========================================================================================
corpus          source, splits and the rule that joins its rows
==============  =========================================================================================
wikitext-2      ``Salesforce/wikitext``, configuration ``wikitext-2-raw-v1``; train, validation, test as
                published. A row is a line with its newline; the blank lines of the original files, a space
                and a newline, were turned into empty rows and are turned back, so that the bytes are those
                of ``wiki.*.raw``.
wikitext-103    The same with ``wikitext-103-raw-v1``.
enwik8          ``LTCB/enwik8``: its loading script no longer loads, so its parquet conversion (revision
                ``refs/convert/parquet``, ``enwik8-raw/train/*.parquet``: one row with the whole text). The
                bytes 0-90M train, 90M-95M val, 95M-100M test. Size and MD5 of the whole are checked.
tinystories     ``roneneldan/TinyStories``; val is the published validation split. There is no published
                test split: the last stories of train, as many as validation has, are test and are taken
                out of train. Each story is followed by a line ``<|endoftext|>``.
==============  =========================================================================================

Text is UTF-8. Revisions are pinned to a commit where the source is not a moving conversion. Loading asks the hub
first, with a timeout, whether it is there: an unreachable hub is an error within seconds. ``HF_HUB_OFFLINE=1``
skips the question and uses what ``datasets`` has downloaded before.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from lightning_blocktrain.data.cache import Chunks, Split
from lightning_blocktrain.errors import CorpusError, explain

ENWIK8_SPLIT_BYTES: dict[Split, int] = {"train": 90_000_000, "val": 5_000_000, "test": 5_000_000}
ENWIK8_MD5 = "a1fa5ffddb56f4953e226637dabbb36a"
STORY_END = b"\n<|endoftext|>\n"
PROBE_TIMEOUT_S = 10.0
TEXT = "text"
_ROWS_PER_READ = 1000

Rows = Mapping[str, Sequence[str]]
"""Texts of each published split, by its name on the hub."""


@dataclass(frozen=True)
class HubCorpus:
    """Where a corpus lies on the hub and how its rows become bytes.

    Args:
        repo: Identifier of the dataset.
        config: Name of its configuration; None for its only one.
        revision: Commit or branch.
        data_files: Pattern of the files of its train split where the repository declares no splits.
        layout: Turns the rows into the bytes of each split.
    """

    repo: str
    config: str | None
    revision: str
    data_files: str | None
    layout: Callable[[Rows], Mapping[Split, Chunks]]


class TextColumn(Sequence[str]):
    """The ``text`` column of a ``datasets.Dataset`` as a sequence of strings that is read in small batches.

    Args:
        dataset: Any dataset with random access.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> "TextColumn": ...
    def __getitem__(self, index: int | slice) -> "str | TextColumn":
        if isinstance(index, slice):
            return TextColumn(self.dataset.select(range(*index.indices(len(self)))))
        return str(self.dataset[index][TEXT])

    def __iter__(self) -> Iterator[str]:
        for rows in self.dataset.iter(batch_size=_ROWS_PER_READ):
            yield from rows[TEXT]


def wikitext_bytes(rows: Iterable[str]) -> Iterator[bytes]:
    """Yield the bytes of a WikiText file: rows as they are, an empty row as the blank line it was."""
    for row in rows:
        yield row.encode() if row else b" \n"


def wikitext_splits(rows: Rows) -> dict[Split, Chunks]:
    """Return the three splits of WikiText, byte for byte those of ``wiki.{train,valid,test}.raw``."""
    names: dict[Split, str] = {"train": "train", "val": "validation", "test": "test"}
    return {split: wikitext_bytes(rows[name]) for split, name in names.items()}


def enwik8_splits(
    rows: Rows, split_bytes: Mapping[Split, int] = ENWIK8_SPLIT_BYTES, md5: str = ENWIK8_MD5
) -> dict[Split, Chunks]:
    """Return the standard cut of enwik8: the first 90M bytes, the next 5M, the last 5M.

    Args:
        rows: One row with the whole text under ``train``.
        split_bytes: Bytes of train, val and test, in this order.
        md5: MD5 (hex) the whole must have.

    Raises:
        CorpusError: Size or MD5 of the whole differ: a conversion has changed the text.
    """
    text = b"".join(row.encode() for row in rows["train"])
    found = hashlib.md5(text, usedforsecurity=False).hexdigest()
    if len(text) != sum(split_bytes.values()) or found != md5:
        raise CorpusError(
            explain(
                f"enwik8 must have {sum(split_bytes.values())} bytes with MD5 {md5}",
                f"{len(text)} bytes with MD5 {found}",
                "pass the original file as corpus, with val_fraction=0.05 and test_fraction=0.05",
            )
        )
    splits: dict[Split, Chunks] = {}
    start = 0
    for split, num_bytes in split_bytes.items():
        splits[split] = [memoryview(text)[start : start + num_bytes]]
        start += num_bytes
    return splits


def story_bytes(stories: Iterable[str]) -> Iterator[bytes]:
    """Yield stories, each followed by the line that ends a story."""
    for story in stories:
        yield story.encode() + STORY_END


def tinystories_splits(rows: Rows) -> dict[Split, Chunks]:
    """Return TinyStories: val as published, test as many stories from the end of train, train the rest."""
    train, validation = rows["train"], rows["validation"]
    num_train = len(train) - len(validation)
    if num_train <= 0:
        raise CorpusError(
            explain(
                "tinystories must have more train than validation stories",
                f"train={len(train)}, validation={len(validation)}",
                "download it again",
            )
        )
    return {
        "train": story_bytes(train[:num_train]),
        "val": story_bytes(validation),
        "test": story_bytes(train[num_train:]),
    }


_WIKITEXT_REVISION = "b08601e04326c79dfdd32d625aee71d232d685c3"
HUB_CORPORA: dict[str, HubCorpus] = {
    "wikitext-2": HubCorpus("Salesforce/wikitext", "wikitext-2-raw-v1", _WIKITEXT_REVISION, None, wikitext_splits),
    "wikitext-103": HubCorpus("Salesforce/wikitext", "wikitext-103-raw-v1", _WIKITEXT_REVISION, None, wikitext_splits),
    "enwik8": HubCorpus("LTCB/enwik8", None, "refs/convert/parquet", "enwik8-raw/train/*.parquet", enwik8_splits),
    "tinystories": HubCorpus(
        "roneneldan/TinyStories", None, "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64", None, tinystories_splits
    ),
}


def dataset_rows(dataset: Mapping[str, Any]) -> dict[str, TextColumn]:
    """Return the text column of each split of a ``datasets.DatasetDict``.

    Raises:
        CorpusError: A split lacks the column.
    """
    for split, table in dataset.items():
        if TEXT not in table.column_names:
            raise CorpusError(
                explain(
                    "a hub corpus must have its text column",
                    f"column {TEXT!r} missing from split {split!r}",
                    f"the dataset has changed: it has {', '.join(table.column_names)}",
                )
            )
    return {str(split): TextColumn(table) for split, table in dataset.items()}


def load_hub_corpus(name: str, timeout_s: float = PROBE_TIMEOUT_S) -> Mapping[Split, Chunks]:
    """Load a named corpus from the hub, or from what ``datasets`` has cached when ``HF_HUB_OFFLINE`` is set.

    Args:
        name: Key of ``HUB_CORPORA``.
        timeout_s: Seconds the hub has to answer the first question.

    Raises:
        CorpusError: The hub cannot be reached, or the dataset cannot be loaded.
    """
    corpus = HUB_CORPORA[name]
    try:
        _probe(corpus, timeout_s)
        dataset = _load(corpus)
    except Exception as exc:  # the libraries below raise many unrelated types
        raise CorpusError(
            explain(
                f"corpus {name!r} must be loadable from the Hugging Face hub ({corpus.repo})",
                f"{type(exc).__name__}: {exc}",
                "pass a local file instead (corpus='path/to/file', or train=, val= and test=), "
                "or set HF_HUB_OFFLINE=1 if datasets has downloaded it before",
            )
        ) from exc
    return corpus.layout(dataset_rows(dataset))


def _probe(corpus: HubCorpus, timeout_s: float) -> None:
    """Ask the hub for the dataset once, so that an unreachable hub is no long series of retries."""
    from huggingface_hub import HfApi, constants  # slow to import, needed only here

    if not constants.HF_HUB_OFFLINE:
        HfApi().dataset_info(corpus.repo, revision=corpus.revision, timeout=timeout_s)


def _load(corpus: HubCorpus) -> Any:
    """Call ``datasets.load_dataset`` for all splits of a corpus."""
    import datasets  # slow to import, needed only here

    load = functools.partial(datasets.load_dataset, corpus.repo, revision=corpus.revision)
    if corpus.data_files is not None:
        return load(data_files={"train": corpus.data_files})
    return load(corpus.config)


def read_hub_corpus(name: str, scratch: Path) -> Mapping[Split, Chunks]:
    """Load a named corpus as a reader of the cache wants it; ``scratch`` is not needed."""
    del scratch
    return load_hub_corpus(name)
