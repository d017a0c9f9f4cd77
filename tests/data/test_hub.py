import hashlib
import os
import socket
import subprocess
import sys

import datasets
import huggingface_hub.constants
import pytest

from lightning_blocktrain.data import hub
from lightning_blocktrain.errors import CorpusError

WIKI = {
    "train": " \n = Title = \n \n Some text with an <unk> word . \n",
    "validation": " \n = Other = \n",
    "test": " = Third = \n \n caf\u00e9 \n",
}


def load_parquet(tmp_path, columns):
    """Load rows through the same call that loads a corpus from the hub."""
    files = {}
    for split, table in columns.items():
        files[split] = str(tmp_path / f"{split}.parquet")
        datasets.Dataset.from_dict(table).to_parquet(files[split])
    return datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "hf"))


def joined(splits):
    return {split: b"".join(chunks) for split, chunks in splits.items()}


def published_rows(text):
    """Rows as the hub publishes WikiText: a line each, blank lines emptied."""
    return [line if line.strip() else "" for line in text.splitlines(keepends=True)]


def test_wikitext_rows_are_joined_to_the_bytes_of_the_original_files(tmp_path):
    dataset = load_parquet(tmp_path, {split: {"text": published_rows(text)} for split, text in WIKI.items()})
    splits = joined(hub.wikitext_splits(hub.dataset_rows(dataset)))
    names = {"train": "train", "val": "validation", "test": "test"}
    assert splits == {split: WIKI[name].encode() for split, name in names.items()}


def test_enwik8_is_cut_into_consecutive_bytes_not_characters(tmp_path):
    text = "caf\u00e9 " * 50
    dataset = load_parquet(tmp_path, {"train": {"text": [text]}})
    md5 = hashlib.md5(text.encode()).hexdigest()
    sizes = {"train": 200, "val": 77, "test": 23}
    splits = joined(hub.enwik8_splits(hub.dataset_rows(dataset), sizes, md5))
    whole = text.encode()
    assert splits == {"train": whole[:200], "val": whole[200:277], "test": whole[277:]}


def test_enwik8_standard_split_is_ninety_five_five_million():
    assert hub.ENWIK8_SPLIT_BYTES == {"train": 90_000_000, "val": 5_000_000, "test": 5_000_000}


@pytest.mark.parametrize("rows", [["abcdef"], ["abcdeF" * 2], []])
def test_enwik8_other_than_the_known_text_is_refused(rows):
    sizes = {"train": 8, "val": 2, "test": 2}
    with pytest.raises(CorpusError, match="enwik8 must have 12 bytes"):
        hub.enwik8_splits({"train": rows}, sizes, hashlib.md5(b"abcdef" * 2).hexdigest())


def test_tinystories_test_is_taken_from_the_end_of_train(tmp_path):
    dataset = load_parquet(
        tmp_path, {"train": {"text": ["one", "two", "three"]}, "validation": {"text": ["val\u00e9"]}}
    )
    splits = joined(hub.tinystories_splits(hub.dataset_rows(dataset)))
    assert splits == {
        "train": b"one\n<|endoftext|>\ntwo\n<|endoftext|>\n",
        "val": b"val\xc3\xa9\n<|endoftext|>\n",
        "test": b"three\n<|endoftext|>\n",
    }


def test_tinystories_with_nothing_left_for_train_is_refused():
    with pytest.raises(CorpusError, match="train=1, validation=1"):
        hub.tinystories_splits({"train": ["a"], "validation": ["b"]})


def test_text_column_behaves_as_the_list_of_its_texts():
    texts = [str(i) for i in range(2500)]
    column = hub.TextColumn(datasets.Dataset.from_dict({"text": texts}))
    assert list(column) == texts and len(column) == 2500
    assert list(column[:-3]) == texts[:-3] and list(column[2000:]) == texts[2000:]
    assert column[7] == "7"


def test_dataset_rows_missing_column_names_the_columns_that_exist(tmp_path):
    dataset = load_parquet(tmp_path, {"train": {"story": ["a"], "n": [1]}})
    with pytest.raises(CorpusError, match=r"'text' missing from split 'train'.*story, n"):
        hub.dataset_rows(dataset)


def test_load_passes_the_documented_identifiers_to_datasets(monkeypatch):
    calls = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: calls.append((args, kwargs)) or {})
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in hub.HUB_CORPORA:
        with pytest.raises(KeyError):  # the layout finds no splits in the empty dataset
            hub.load_hub_corpus(name)
    wikitext = {"revision": "b08601e04326c79dfdd32d625aee71d232d685c3"}
    assert calls == [
        (("Salesforce/wikitext", "wikitext-2-raw-v1"), wikitext),
        (("Salesforce/wikitext", "wikitext-103-raw-v1"), wikitext),
        (
            ("LTCB/enwik8",),
            {"revision": "refs/convert/parquet", "data_files": {"train": "enwik8-raw/train/*.parquet"}},
        ),
        (
            ("roneneldan/TinyStories", None),
            {"revision": "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"},
        ),
    ]


@pytest.fixture
def unused_tcp_port():
    with socket.socket() as bound:  # bound but not listening: a connection is refused at once
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_load_from_an_unreachable_hub_names_the_way_to_pass_a_local_file(monkeypatch, unused_tcp_port):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{unused_tcp_port}")
    with pytest.raises(CorpusError, match=r"'wikitext-2' must be loadable.*pass a local file instead") as caught:
        hub.load_hub_corpus("wikitext-2", timeout_s=2.0)
    assert "Connect" in type(caught.value.__cause__).__name__


@pytest.mark.slow  # a fresh interpreter imports all of lightning
def test_load_in_a_fresh_interpreter_reaches_for_the_hub(unused_tcp_port):
    code = "from lightning_blocktrain.data.hub import load_hub_corpus; load_hub_corpus('enwik8', timeout_s=2.0)"
    env = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{unused_tcp_port}", "HF_HUB_OFFLINE": "0"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    last = out.stderr.strip().splitlines()[-1]
    assert "CorpusError: corpus 'enwik8' must be loadable" in last and "Connect" in last


@pytest.mark.slow  # a fresh interpreter imports all of lightning
def test_import_of_the_data_layer_loads_neither_datasets_nor_pyarrow():
    code = (
        "import sys, lightning_blocktrain.data.hub, lightning_blocktrain.data.readers;"
        "print([m for m in ('datasets', 'pyarrow', 'huggingface_hub') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert out.stdout.strip() == "[]"
