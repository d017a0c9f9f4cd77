from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_blocktrain.pipeline.batches import num_samples, split_batch


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Record:
    x: torch.Tensor
    name: str


def make(kind, size):
    x, y = torch.arange(size * 3).view(size, 3), torch.arange(size)
    return {
        "tensor": x,
        "dict": {"x": x, "y": y},
        "tuple": (x, y),
        "named": Pair(x, y),
        "nested": {"a": [x, {"b": y}]},
        "scalar": {"x": x, "weight": torch.tensor(2.0), "name": "corpus"},
        "record": Record(x, "corpus"),
    }[kind]


def tensors(batch):
    """Return the tensors of a batch, in order."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Record):
        return [batch.x]
    inner = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else []
    return [tensor for item in inner for tensor in tensors(item)]


KINDS = ["tensor", "dict", "tuple", "named", "nested", "scalar", "record"]


@given(st.sampled_from(KINDS), st.integers(1, 9), st.integers(1, 12))
def test_split_parts_concatenate_to_the_batch_and_shares_sum_to_one(kind, size, num_parts):
    batch = make(kind, size)
    parts = split_batch(batch, num_parts)
    assert len(parts) == min(num_parts, size)
    assert sum(share for _, share in parts) == pytest.approx(1)
    assert all(type(part) is type(batch) for part, _ in parts)
    whole = tensors(batch)
    for idx, tensor in enumerate(whole):
        pieces = [tensors(part)[idx] for part, _ in parts]
        assert torch.equal(torch.cat(pieces), tensor) if tensor.dim() else all(torch.equal(p, tensor) for p in pieces)
    sizes = [len(tensors(part)[0]) for part, _ in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert [share for _, share in parts] == [part_size / size for part_size in sizes]


def test_split_into_one_is_the_batch_itself():
    batch = {"x": torch.zeros(3), "y": torch.zeros(2)}
    ((part, share),) = split_batch(batch, 1)
    assert part is batch
    assert share == 1


@pytest.mark.parametrize("num_parts", [1, 3])
def test_split_of_an_empty_batch_is_the_batch(num_parts):
    batch = {"x": torch.zeros(0, 4)}
    ((part, share),) = split_batch(batch, num_parts)
    assert part is batch
    assert share == 1


def test_split_keeps_text_and_scalars_whole():
    parts = split_batch(make("scalar", 4), 2)
    assert [part["name"] for part, _ in parts] == ["corpus", "corpus"]
    assert [float(part["weight"]) for part, _ in parts] == [2.0, 2.0]


def test_samples_of_a_batch_without_tensors_are_one():
    assert num_samples({"text": ["a", "b"], "weight": torch.tensor(1.0)}) == 1


def test_samples_that_disagree_are_refused_with_their_sizes():
    with pytest.raises(ValueError, match=r"one first dimension; got sizes \[2, 3\]; use micro_batches=1"):
        split_batch({"x": torch.zeros(3, 1), "y": torch.zeros(2)}, 2)
