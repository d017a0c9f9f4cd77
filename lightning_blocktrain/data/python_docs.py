"""The embedded corpus: English prose of the running Python's own documentation.

Owns which texts are taken (the reference topics of ``pydoc_data`` and the docstrings of the standard library's
source files), how they are cleaned, and which split each one belongs to. Reads source files as text: no module
of the standard library is imported for its docstring, and no network is used.

The text depends on the Python version (and on what the distribution ships), so numbers on it are comparable
only where the SHA-256 of the corpus agrees.
"""

import ast
import hashlib
import importlib
import inspect
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from lightning_blocktrain.data.cache import Chunks, Split
from lightning_blocktrain.errors import CorpusError, explain

MIN_BYTES = 200_000
"""Less text than this is no corpus: the installation lacks the sources."""

_NOT_LIBRARY = ("__pycache__", "dist-packages", "ensurepip", "lib-dynload", "site-packages")
_NO_ENGLISH = ("encodings", "idle_test", "lib2to3", "pydoc_data", "test", "tests", "turtledemo")
_EXCLUDED_DIRS = frozenset((*_NOT_LIBRARY, *_NO_ENGLISH))
_MIN_WORDS = 4
_MIN_LETTER_FRAC = 0.6
_NO_LETTERS = re.compile("[^A-Za-z ]+")


def source_files(stdlib: Path) -> list[tuple[str, Path]]:
    """Return ``(module name, path)`` of the standard library's source files, sorted by name.

    Args:
        stdlib: Directory of the pure Python library; one that does not exist has no files.
    """
    found = []
    for folder, subdirs, files in os.walk(stdlib):
        subdirs[:] = [name for name in subdirs if name not in _EXCLUDED_DIRS and not name.startswith("config-")]
        for name in files:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = Path(folder, name)
                parts = path.relative_to(stdlib).with_suffix("").parts
                found.append((".".join(part for part in parts if part != "__init__"), path))
    return sorted(found)


def reference_topics() -> dict[str, str]:
    """Return the language reference's topics by name; empty if this Python ships none."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError):
        return {}
    return {str(name): str(text) for name, text in topics.items()}


def docstrings(source: bytes) -> list[str]:
    """Return the docstrings of a source file in source order, cleaned of indentation.

    Args:
        source: Python source; one that does not parse has no docstrings.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escapes are not our user's business
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    return [text for node in _documented_nodes(tree) if (text := ast.get_docstring(node, clean=True))]


def _documented_nodes(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield what may carry a docstring below ``node``, in source order; statements only, which is fast."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        children = getattr(node, field, ())
        for child in children if isinstance(children, list) else ():
            yield from _documented_nodes(child)


def is_prose(paragraph: str) -> bool:
    """Return whether a paragraph reads as English: a few words, mostly letters, and no interpreter session."""
    letters = len(_NO_LETTERS.sub("", paragraph))
    wordy = len(paragraph.split()) >= _MIN_WORDS and letters >= _MIN_LETTER_FRAC * len(paragraph)
    return wordy and not paragraph.lstrip().startswith((">>>", "..."))


def unseen_prose(text: str, seen: set[bytes]) -> str:
    """Return the prose paragraphs of ``text`` that ``seen`` does not hold, and add them to it.

    Args:
        text: Paragraphs separated by blank lines.
        seen: Digests of the paragraphs taken so far, blind to white space; changed in place.
    """
    kept = []
    for paragraph in re.split(r"\n[ \t]*\n", text):
        digest = hashlib.sha256(" ".join(paragraph.split()).encode("utf-8", "surrogatepass")).digest()
        if digest not in seen and is_prose(paragraph):
            seen.add(digest)
            kept.append(paragraph.strip("\n"))
    return "\n\n".join(kept)


def split_of(name: str) -> Split:
    """Return the split of a module or topic: about 90 % train, 5 % val, 5 % test, by a hash of its name."""
    percentile = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100
    return "train" if percentile < 90 else "val" if percentile < 95 else "test"


def split_documents(documents: Iterable[tuple[str, Iterable[str]]]) -> dict[Split, list[bytes]]:
    """Sort documents into splits, each paragraph once in the whole corpus.

    Args:
        documents: ``(name, texts)`` in a fixed order; the first document with a paragraph keeps it.

    Returns:
        UTF-8 text per split, every kept text followed by a blank line.
    """
    seen: set[bytes] = set()
    splits: dict[Split, list[bytes]] = {"train": [], "val": [], "test": []}
    for name, texts in documents:
        kept = [prose for text in texts if (prose := unseen_prose(text, seen))]
        splits[split_of(name)] += [(prose + "\n\n").encode("utf-8", "surrogatepass") for prose in kept]
    return splits


def documents(stdlib: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield ``(name, texts)`` of every topic (named ``topic:...``) and then of every module, sorted by name."""
    for topic, text in sorted(reference_topics().items()):
        yield f"topic:{topic}", [inspect.cleandoc(text)]
    for module, path in source_files(stdlib):
        yield module, docstrings(path.read_bytes())


def stdlib_path() -> Path:
    """Return the directory of the running Python's pure Python library."""
    return Path(sysconfig.get_path("stdlib"))


def content_key(stdlib: Path) -> str:
    """Return a SHA-256 over everything ``python_docs_splits`` would read (hex), without parsing it."""
    digest = hashlib.sha256()
    for topic, text in sorted(reference_topics().items()):
        digest.update(f"{topic}\0{text}\0".encode("utf-8", "surrogatepass"))
    for module, path in source_files(stdlib):
        digest.update(module.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def python_docs_splits(stdlib: Path, min_bytes: int = MIN_BYTES) -> dict[Split, Chunks]:
    """Return the corpus of the running Python, split by module.

    Args:
        stdlib: Directory of the pure Python library.
        min_bytes: Fewest bytes, over all splits, that are accepted.

    Raises:
        CorpusError: Less than ``min_bytes`` of prose was found, or a split is empty.
    """
    splits = split_documents(documents(stdlib))
    num_bytes = sum(len(text) for texts in splits.values() for text in texts)
    if num_bytes < min_bytes or not all(splits.values()):
        raise CorpusError(
            explain(
                f'corpus "python-docs" needs at least {min_bytes} bytes of prose from the standard library',
                f"{num_bytes} bytes from {stdlib}",
                "install Python with its library sources, or pass a text file as corpus",
            )
        )
    return dict(splits)
