import bz2
import gzip
import json
import lzma
import zipfile

import datasets
import pytest

from lightning_blocktrain.data.readers import content_digest, expand, read_file, read_files
from lightning_blocktrain.errors import CorpusError

RAW = bytes(range(256)) * 40 + b"\r\n\xff\xfe end"


def read_all(file, column="text"):
    return b"".join(read_file(file, column))


@pytest.mark.parametrize("suffix", [".txt", ".bin", "", ".XZ", ".xz", ".gz", ".bz2"])
def test_read_file_any_bytes_come_back_unchanged(tmp_path, suffix):
    file = tmp_path / f"corpus{suffix}"
    pack = {".xz": lzma.compress, ".gz": gzip.compress, ".bz2": bz2.compress}.get(suffix.lower(), bytes)
    file.write_bytes(pack(RAW))
    assert read_all(file) == RAW


def test_read_file_zip_joins_members_sorted_with_nothing_between(tmp_path):
    with zipfile.ZipFile(tmp_path / "c.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("b.txt", b"second\xff")
        archive.writestr("a/x.txt", b"first")
        archive.writestr("empty/", b"")
    assert read_all(tmp_path / "c.zip") == b"firstsecond\xff"


@pytest.mark.parametrize(("suffix", "pack"), [(".jsonl", bytes), (".jsonl.xz", lzma.compress)])
def test_read_file_jsonl_rows_end_in_newline(tmp_path, suffix, pack):
    lines = [json.dumps({"id": 1, "body": "caf\u00e9"}), "", '{"body": "lone \\ud800"}']
    (tmp_path / f"c{suffix}").write_bytes(pack("\n".join(lines).encode()))
    assert read_all(tmp_path / f"c{suffix}", "body") == b"caf\xc3\xa9\nlone \xed\xa0\x80\n"


def test_read_file_parquet_rows_end_in_newline(tmp_path):
    datasets.Dataset.from_dict({"n": [1, 2], "text": ["one", "caf\u00e9"]}).to_parquet(tmp_path / "c.parquet")
    assert read_all(tmp_path / "c.parquet") == b"one\ncaf\xc3\xa9\n"


def test_read_file_parquet_binary_column_is_taken_as_it_is(tmp_path):
    datasets.Dataset.from_dict({"raw": [b"\xff\x00"]}).to_parquet(tmp_path / "c.parquet")
    assert read_all(tmp_path / "c.parquet", "raw") == b"\xff\x00\n"


def test_read_file_missing_column_names_the_columns_that_exist(tmp_path):
    datasets.Dataset.from_dict({"n": [1], "body": ["x"]}).to_parquet(tmp_path / "c.parquet")
    (tmp_path / "c.jsonl").write_text('{"n": 1, "body": "x"}\n')
    for name in ("c.parquet", "c.jsonl"):
        with pytest.raises(CorpusError, match=r"text_column='text'.*" + name) as caught:
            read_all(tmp_path / name)
        assert "body" in str(caught.value) and "n" in str(caught.value)


def test_read_file_row_that_is_no_text_is_refused_with_its_line(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"text": "x"}\n{"text": null}\n')
    with pytest.raises(CorpusError, match=r"NoneType in .*c\.jsonl, line 2"):
        read_all(tmp_path / "c.jsonl")


def test_read_file_broken_json_line_is_named(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"text": "x"}\n{"text": \n')
    with pytest.raises(CorpusError, match=r"c\.jsonl, line 2"):
        read_all(tmp_path / "c.jsonl")


def cut(packed):
    return packed[: len(packed) // 2]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("c.xz", cut(lzma.compress(RAW))),
        ("c.gz", cut(gzip.compress(RAW))),
        ("c.bz2", cut(bz2.compress(RAW))),
        ("c.xz", b"no archive at all"),
        ("c.gz", b"no archive at all"),
        ("c.bz2", b"no archive at all"),
        ("c.zip", b"no archive at all"),
        ("c.parquet", b"no archive at all"),
    ],
)
def test_read_file_damaged_archive_names_the_file(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=rf"readable to its end; got .*{name}"):
        read_all(tmp_path / name)


def test_read_file_zip_member_with_wrong_checksum_names_the_file(tmp_path):
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        archive.writestr("a.txt", b"unmistakable")
    spoiled = (tmp_path / "c.zip").read_bytes().replace(b"unmistakable", b"UNmistakable")
    (tmp_path / "c.zip").write_bytes(spoiled)
    with pytest.raises(CorpusError, match=r"c\.zip"):
        read_all(tmp_path / "c.zip")


@pytest.mark.parametrize("name", ["c.zst", "c.tar", "c.tar.gz", "c.parquet.xz", "c.zip.gz"])
def test_read_file_archive_we_cannot_read_is_refused_not_read_as_text(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CorpusError, match="unpack it first"):
        read_all(tmp_path / name)


@pytest.fixture
def tree(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden", ".git/config", "sub/.d.txt", "e.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def names(root, files):
    return [str(file.relative_to(root)) for file in files]


def test_expand_directory_is_recursive_sorted_and_skips_hidden(tree):
    assert names(tree, expand(str(tree), "corpus")) == ["a.txt", "b.txt", "e.md", "sub/c.txt"]


def test_expand_glob_is_sorted_and_skips_hidden(tree):
    assert names(tree, expand(f"{tree}/**/*.txt", "corpus")) == ["a.txt", "b.txt", "sub/c.txt"]
    assert names(tree, expand(f"{tree}/*", "corpus")) == ["a.txt", "b.txt", "e.md"]


def test_expand_list_keeps_its_order_and_counts_a_file_once(tree):
    files = expand([f"{tree}/e.md", f"{tree}/*.txt", f"{tree}/a.txt"], "corpus")
    assert names(tree, files) == ["e.md", "a.txt", "b.txt"]


def test_expand_file_with_glob_characters_in_its_name_is_that_file(tree):
    (tree / "a[1].txt").write_bytes(b"")
    assert names(tree, expand(f"{tree}/a[1].txt", "corpus")) == ["a[1].txt"]


@pytest.mark.parametrize("missing", ["nothing.txt", "*.nothing", "empty"])
def test_expand_nothing_found_names_the_argument_and_the_path(tree, missing):
    (tree / "empty").mkdir()
    with pytest.raises(CorpusError, match=r"val must name a file.*got val="):
        expand([f"{tree}/a.txt", f"{tree}/{missing}"], "val")


def test_read_files_joins_files_with_nothing_between(tree):
    assert b"".join(read_files(expand(str(tree), "corpus"), "text")) == b"a.txtb.txte.mdsub/c.txt"


def test_content_digest_follows_the_content_not_the_name(tmp_path):
    for name, content in (("a", b"x"), ("b", b"x"), ("c", b"y")):
        (tmp_path / name).write_bytes(content)
    same, again, other = (content_digest(tmp_path / name) for name in "abc")
    assert same == again != other
