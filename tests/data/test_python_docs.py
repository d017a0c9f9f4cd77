import sys
import types

import pytest

from lightning_blocktrain.data import python_docs
from lightning_blocktrain.data.cache import SPLITS, split_path
from lightning_blocktrain.errors import CorpusError

PROSE = "This paragraph number {} is long enough to be taken as English prose."


@pytest.fixture
def corpus(embedded):
    key = embedded.source.content_key()
    return {split: split_path(embedded.cache_dir / key, split).read_bytes() for split in SPLITS}


def test_corpus_of_this_python_is_about_two_megabytes_split_ninety_five_five(corpus):
    total = sum(map(len, corpus.values()))
    assert 1_000_000 < total < 4_000_000
    assert 0.8 < len(corpus["train"]) / total < 0.97
    assert min(len(corpus["val"]), len(corpus["test"])) > 20_000


def test_corpus_of_this_python_shares_no_paragraph_across_or_within_splits(corpus):
    paragraphs = [p for text in corpus.values() for p in text.decode("utf-8", "surrogatepass").split("\n\n")]
    digests = [" ".join(p.split()) for p in paragraphs if p.strip()]
    assert len(digests) == len(set(digests))


def test_corpus_of_this_python_reads_as_english(corpus):
    letters = sum(char.isalpha() or char.isspace() for char in corpus["train"].decode("utf-8", "replace"))
    assert letters / len(corpus["train"]) > 0.8


def test_documents_of_a_library_are_the_same_when_read_again():
    library = python_docs.stdlib_path() / "email"
    first, again = (python_docs.split_documents(python_docs.documents(library)) for _ in range(2))
    assert first == again
    assert sum(map(len, first["train"])) > 100_000


def test_reading_the_corpus_imports_no_documented_module():
    sys.modules.pop("antigravity", None)
    files = dict(python_docs.source_files(python_docs.stdlib_path()))
    assert "antigravity" in files
    python_docs.docstrings(files["antigravity"].read_bytes())
    assert "antigravity" not in sys.modules


def test_source_files_leave_out_tests_and_what_is_not_the_library(tmp_path):
    for name in ("json/__init__.py", "json/tool.py", "test/x.py", "site-packages/y.py", "_sysconfigdata_z.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert [name for name, _ in python_docs.source_files(tmp_path)] == ["json", "json.tool"]


def test_docstrings_are_those_of_module_classes_and_functions_without_indentation():
    source = b'''"""Module."""
class A:
    """Class.

    Indented.
    """
    async def f(self):
        "Function."
        x = """not one"""
'''
    assert python_docs.docstrings(source) == ["Module.", "Class.\n\nIndented.", "Function."]


@pytest.mark.parametrize("source", [b"def broken(:", b"\0"])
def test_docstrings_of_source_that_does_not_parse_are_none(source):
    assert python_docs.docstrings(source) == []


@pytest.mark.parametrize(
    ("paragraph", "expected"),
    [
        ("Return the number of items in the container.", True),
        (">>> return the number of items in the container", False),
        ("Return it.", False),
        ("+---+ | 1 | 2 | 3 | 4 | 5 | ====== ------", False),
        ("\u0434\u0430 " * 6, False),
    ],
)
def test_is_prose_keeps_english_only(paragraph, expected):
    assert python_docs.is_prose(paragraph) is expected


def test_split_documents_a_repeated_paragraph_stays_with_the_first_document():
    first, second = PROSE.format("one"), PROSE.format("two")
    splits = python_docs.split_documents(
        [("first", [f"{first}\n\n{second}"]), ("second", [f"  {first}\n", second.replace(" ", "\n", 1)])]
    )
    everything = b"".join(chunk for chunks in splits.values() for chunk in chunks).decode()
    assert everything == f"{first}\n\n{second}\n\n"


def test_split_documents_whole_module_goes_to_the_split_of_its_name():
    names = [f"module{i}" for i in range(400)]
    splits = python_docs.split_documents([(name, [PROSE.format(name), PROSE.format(name + "b")]) for name in names])
    for split, chunks in splits.items():
        assert len(chunks) == 2 * sum(python_docs.split_of(name) == split for name in names)
    assert 0.85 < len(splits["train"]) / 800 < 0.95


def test_content_key_follows_the_sources(tmp_path):
    (tmp_path / "a.py").write_text('"""One."""')
    first = python_docs.content_key(tmp_path)
    assert first == python_docs.content_key(tmp_path)
    (tmp_path / "a.py").write_text('"""Two."""')
    assert first != python_docs.content_key(tmp_path)


def test_documents_without_topics_are_the_modules_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert python_docs.reference_topics() == {}
    names = [name for name, _ in python_docs.documents(python_docs.stdlib_path() / "json")]
    assert names == ["", "decoder", "encoder", "scanner", "tool"]


def test_corpus_without_sources_is_made_of_topics(tmp_path):
    splits = python_docs.python_docs_splits(tmp_path / "absent")
    assert sum(len(chunk) for chunks in splits.values() for chunk in chunks) > python_docs.MIN_BYTES


def test_corpus_with_too_little_left_is_one_clear_error(monkeypatch, tmp_path):
    few = types.SimpleNamespace(topics={"only": PROSE.format("one")})
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", few)
    with pytest.raises(CorpusError, match=r"python-docs.*got \d+ bytes.*pass a text file"):
        python_docs.python_docs_splits(tmp_path)
