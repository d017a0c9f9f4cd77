import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_blocktrain.rounds import Params, Update
from lightning_blocktrain.rounds.codecs import Codec, Encoded, wire_bytes
from lightning_blocktrain.rounds.verdicts import form_fault

CODECS = [Codec("fp32"), Codec("bf16"), Codec("int8"), Codec("topk")]
by_name = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)

BASE: Params = {"w": torch.linspace(-1.0, 1.0, 40).view(8, 5), "n": torch.tensor(3), "e": torch.empty(0)}
PARAMS: Params = {"w": BASE["w"] * 1.5 + 0.1, "n": torch.tensor(4), "e": torch.empty(0)}


def update_of(params: Params) -> Update:
    return Update(
        run_id="run",
        token="s3cret",
        worker_id=0,
        incarnation=0,
        base_version=0,
        num_steps=1,
        num_tokens=1,
        params=params,
    )


def indices_of(*indices: int) -> Tensor:
    return torch.tensor(indices, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "key", "wrong"),
    [
        ("fp32", "values:w", torch.zeros(8, 1)),
        ("fp32", "values:w", torch.zeros(8, 5, dtype=torch.float64)),
        ("fp32", "values:w", torch.zeros(8, 5, device="meta")),
        ("fp32", "values:w", torch.zeros(8, 5).to_sparse()),
        ("fp32", "values:w", [1.0]),
        ("fp32", "values:n", torch.tensor(4, dtype=torch.int32)),
        ("fp32", "values:n", torch.tensor([4])),
        ("bf16", "delta:w", torch.zeros(8, 5, dtype=torch.float16)),
        ("bf16", "values:w", torch.zeros(8, 5)),
        ("bf16", "values:w", torch.zeros(8, 5, dtype=torch.bfloat16)),  # beside the delta
        ("int8", "codes:w", torch.zeros(8, 5, dtype=torch.uint8)),
        ("int8", "codes:w", torch.zeros(40, dtype=torch.int8)),
        ("int8", "scales:w", torch.ones(2)),
        ("int8", "scales:w", torch.ones(0)),
        ("int8", "scales:w", torch.ones(1, dtype=torch.bfloat16)),
        ("topk", "indices:w", indices_of(1)),
        ("topk", "indices:w", indices_of(1, 1)),
        ("topk", "indices:w", indices_of(2, 1)),
        ("topk", "indices:w", indices_of(-1, 1)),
        ("topk", "indices:w", indices_of(1, 40)),
        ("topk", "indices:w", indices_of(1, 2, 3)),
        ("topk", "indices:w", torch.tensor([1, 2])),
        ("topk", "entries:w", torch.ones(1, 2)),
        ("topk", "entries:e", torch.ones(1)),
        ("topk", "entries:w", torch.ones(2, dtype=torch.bfloat16)),
        ("topk", "values:other", torch.ones(2)),
        ("topk", 7, torch.ones(2)),
    ],
)
def test_decode_malformed_part_is_refused_by_name(name: Any, key: Any, wrong: Any) -> None:
    codec = Codec(name)
    encoded = codec.encode(PARAMS, BASE)
    with pytest.raises(ValueError, match=r"must .*; got .*; "):
        codec.decode(replace(encoded, tensors={**encoded.tensors, key: wrong}), BASE)


@by_name
def test_decode_without_any_one_part_is_refused(codec: Codec) -> None:
    encoded = codec.encode(PARAMS, BASE)
    for key in encoded.tensors:
        rest = {other: tensor for other, tensor in encoded.tensors.items() if other != key}
        with pytest.raises(ValueError, match="must be there as a dense tensor; got type=NoneType"):
            codec.decode(replace(encoded, tensors=rest), BASE)


@by_name
def test_decode_message_of_another_codec_is_refused(codec: Codec) -> None:
    encoded = codec.encode(PARAMS, BASE)
    for meta in ({}, {"codec": "gzip"}, codec.meta | {"level": "1"}, None):
        with pytest.raises(ValueError, match="the message must be of codec"):
            codec.decode(Encoded(encoded.tensors, meta), BASE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the message must be of codec"):
        codec.decode(Encoded([], codec.meta), BASE)  # type: ignore[arg-type]


def test_decode_huge_claim_is_refused_before_allocation() -> None:
    codec = Codec("topk")
    encoded = codec.encode(PARAMS, BASE)
    tensors = encoded.tensors | {"entries:w": torch.ones(1).expand(2**50), "indices:w": indices_of(0).expand(2**50)}
    with pytest.raises(ValueError, match="at most shape"):
        codec.decode(replace(encoded, tensors=tensors), BASE)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int32, torch.int64, torch.bool]


@st.composite
def strange_tensors(draw: st.DrawFn) -> Any:
    shape = draw(st.sampled_from([(), (0,), (1,), (2,), (8, 5), (40,), (5, 8), (0, 4)]))
    dtype = draw(st.sampled_from(DTYPES))
    values = draw(st.lists(st.integers(-100, 100), min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(values, dtype=torch.float64).view(shape).to(dtype)


STRANGE = st.one_of(strange_tensors(), st.none(), st.just("w"), st.just(torch.zeros(8, 5).to_sparse()))
KEYS = [f"{part}:{name}" for part in ("values", "delta", "codes", "scales", "indices", "entries") for name in BASE]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(CODECS),
    st.dictionaries(st.sampled_from([*KEYS, "w", ""]), STRANGE, max_size=4),
    st.sets(st.sampled_from(KEYS), max_size=1),
)
def test_decode_anything_either_fits_the_base_or_raises_valueerror(
    codec: Codec, changes: dict[str, Any], dropped: set[str]
) -> None:
    tensors = codec.encode(PARAMS, BASE).tensors | changes
    message = Encoded({key: tensor for key, tensor in tensors.items() if key not in dropped}, codec.meta)
    try:
        arrived = codec.decode(message, BASE)
    except ValueError as error:
        assert "; got " in str(error)
    else:
        assert form_fault(update_of(arrived), BASE) is None
        assert wire_bytes(message) <= codec.max_bytes(BASE)
