import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_blocktrain.data.corpora import NAMED_CORPORA, cut_points, resolve
from lightning_blocktrain.errors import CorpusError

CONTENT = bytes(range(250)) * 4


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "c.txt").write_bytes(CONTENT)
    (tmp_path / "other.txt").write_bytes(b"other")
    return tmp_path


def read(source, scratch):
    scratch.mkdir(exist_ok=True)
    splits = {split: b"".join(chunks) for split, chunks in source.read(scratch).items()}
    return [splits.get(split, b"") for split in ("train", "val", "test")]


def test_local_file_is_cut_into_train_val_test_in_this_order(corpus):
    parts = read(resolve(str(corpus / "c.txt"), val_fraction=0.2, test_fraction=0.1), corpus / "s")
    assert parts == [CONTENT[:700], CONTENT[700:900], CONTENT[900:]]


def test_local_file_default_fractions_are_five_percent(corpus):
    parts = read(resolve(str(corpus / "c.txt")), corpus / "s")
    assert [len(part) for part in parts] == [900, 50, 50]
    assert b"".join(parts) == CONTENT


@given(
    num_bytes=st.integers(0, 10**6),
    val_fraction=st.floats(0, 0.49),
    test_fraction=st.floats(0, 0.49),
)
def test_cut_points_keep_every_byte_in_one_split(num_bytes, val_fraction, test_fraction):
    train_end, val_end = cut_points(num_bytes, val_fraction, test_fraction)
    assert 0 <= train_end <= val_end <= num_bytes
    assert val_end - train_end == int(num_bytes * val_fraction)
    assert num_bytes - val_end == int(num_bytes * test_fraction)


def test_train_given_alone_is_cut_like_a_corpus(corpus):
    path = str(corpus / "c.txt")
    assert read(resolve(None, train=path), corpus / "s") == read(resolve(path), corpus / "s")


@pytest.mark.parametrize("pool", ["corpus", "train"])
def test_val_given_leaves_train_whole_and_test_empty(corpus, pool):
    source = resolve(**{"corpus": None, pool: str(corpus / "c.txt")}, val=str(corpus / "other.txt"))
    assert read(source, corpus / "s") == [CONTENT, b"other", b""]


def test_val_given_and_a_fraction_asked_for_cuts_test_only(corpus):
    source = resolve(str(corpus / "c.txt"), val=str(corpus / "other.txt"), test_fraction=0.1)
    assert read(source, corpus / "s") == [CONTENT[:900], b"other", CONTENT[900:]]


def test_all_three_given_are_taken_as_they_are(corpus):
    (corpus / "t.txt").write_bytes(b"t")
    files = {name: str(corpus / file) for name, file in (("train", "c.txt"), ("val", "other.txt"), ("test", "t.txt"))}
    assert read(resolve(None, **files), corpus / "s") == [CONTENT, b"other", b"t"]


def test_text_column_reaches_the_reader(corpus):
    (corpus / "c.jsonl").write_text(json.dumps({"body": "x"}) + "\n")
    source = resolve(str(corpus / "c.jsonl"), val_fraction=0, test_fraction=0, text_column="body")
    assert read(source, corpus / "s") == [b"x\n", b"", b""]


def key(corpus, **options):
    return resolve(str(corpus), **options).content_key()


def test_local_key_follows_content_and_rules_but_not_the_place(corpus):
    path = corpus / "c.txt"
    first = key(path)
    assert first == key(path)
    assert first != key(path, val_fraction=0.1)
    assert first != key(path, text_column="body")
    assert first != key(path, val=str(corpus / "other.txt"))
    path.rename(corpus / "moved.txt")
    assert first == key(corpus / "moved.txt")
    (corpus / "moved.txt").write_bytes(CONTENT + b"!")
    assert first != key(corpus / "moved.txt")


def test_local_key_follows_the_suffix_that_decides_the_reader(corpus):
    packed = gzip.compress(CONTENT)
    (corpus / "a.gz").write_bytes(packed)
    (corpus / "a.bin").write_bytes(packed)
    assert key(corpus / "a.gz") != key(corpus / "a.bin")


def test_local_name_has_no_directory(corpus):
    assert resolve(str(corpus / "c.txt")).name == "c.txt"
    assert resolve(str(corpus / "*.txt")).name == "c.txt and 1 more"


def test_nothing_given_is_the_embedded_corpus():
    assert resolve(None).name == "python-docs"


def test_named_corpora_have_names_and_distinct_keys_without_being_read():
    assert NAMED_CORPORA == ("python-docs", "wikitext-2", "wikitext-103", "enwik8", "tinystories")
    sources = [resolve(name) for name in NAMED_CORPORA]
    assert [source.name for source in sources] == list(NAMED_CORPORA)
    assert len({source.content_key() for source in sources}) == len(sources)


def test_corpus_neither_name_nor_path_lists_the_names():
    with pytest.raises(CorpusError, match=r"got corpus='wikitext2'; no such path was found.*wikitext-2, wikitext-103"):
        resolve("wikitext2")


def test_corpus_and_train_together_are_refused(corpus):
    with pytest.raises(CorpusError, match="corpus and train must not both be given"):
        resolve("python-docs", train=str(corpus / "c.txt"))


@pytest.mark.parametrize("option", [{"val": "x"}, {"test": "x"}, {"val_fraction": 0.1}, {"test_fraction": 0.0}])
def test_named_corpus_with_split_options_is_refused(option):
    with pytest.raises(CorpusError, match=r"named corpus brings its own splits.*" + next(iter(option))):
        resolve("python-docs", **option)


def test_split_with_files_and_a_fraction_is_refused(corpus):
    with pytest.raises(CorpusError, match="val and val_fraction must not both be given"):
        resolve(str(corpus / "c.txt"), val=str(corpus / "other.txt"), val_fraction=0.1)


def test_file_in_two_splits_is_refused(corpus):
    with pytest.raises(CorpusError, match=r"one split; got .*c\.txt in corpus and val"):
        resolve(str(corpus / "*.txt"), val=str(corpus / "c.txt"))


@pytest.mark.parametrize(
    ("val_fraction", "test_fraction", "rule"),
    [
        (-0.1, 0.0, "val_fraction must lie"),
        (0.0, 1.0, "test_fraction must lie"),
        (float("nan"), 0.0, "val_fraction must lie"),
        (0.5, 0.5, "must be below 1"),
    ],
)
def test_fractions_out_of_range_are_refused(corpus, val_fraction, test_fraction, rule):
    with pytest.raises(CorpusError, match=rule):
        resolve(str(corpus / "c.txt"), val_fraction=val_fraction, test_fraction=test_fraction)


@pytest.mark.parametrize("wrap", [str, Path, lambda path: [Path(path)]])
def test_resolve_takes_text_and_paths_alike(corpus, wrap):
    assert resolve(wrap(str(corpus / "c.txt"))).name == "c.txt"


@pytest.mark.parametrize("given", ["", [], 3, [3], [""]])
def test_resolve_refuses_what_is_no_path(given):
    with pytest.raises(CorpusError, match="corpus must be a name, a path or a list of paths"):
        resolve(given)
