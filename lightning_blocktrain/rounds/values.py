"""Whole masters in a codec's form: their values, encoded as a delta on a base of zeros.

Owns which codecs may carry a master, and the base. Owns no encoding (``codecs.py``).
"""

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_blocktrain.errors import explain
from lightning_blocktrain.rounds.codecs import Codec, Encoded
from lightning_blocktrain.rounds.merge import Params
from lightning_blocktrain.rounds.verdicts import shown

ValueCodec = Literal["bf16", "fp32", "int8"]
"""The codecs that can carry values and not only changes: ``topk`` would send most of them as zeros."""


def check_value_codec(name: str, codec: object) -> None:
    """Refuse what cannot carry whole values.

    Args:
        name: Of the argument, for the message.
        codec: The codec.

    Raises:
        ValueError: Naming it.
    """
    if not isinstance(codec, Codec) or codec.name not in get_args(ValueCodec):
        got = f"{name}={shown(codec.name if isinstance(codec, Codec) else codec)}"
        raise ValueError(explain(f"{name} must be a codec for whole values", got, "choose bf16, fp32 or int8"))


def as_value_codec(name: str, given: str | Codec) -> Codec:
    """Return the codec that is meant.

    Args:
        name: Of the argument, for the message.
        given: The codec, or its name.

    Raises:
        ValueError: If it is unknown, or cannot carry whole values.
    """
    codec = Codec(given) if given in get_args(ValueCodec) else given  # type: ignore[arg-type]
    check_value_codec(name, codec)
    assert isinstance(codec, Codec)
    return codec


def encode_values(codec: Codec, params: Mapping[str, Tensor]) -> Encoded:
    """Return tensors in the form of a codec, on the CPU and in memory of their own; their names are the caller's.

    Args:
        codec: One of ``ValueCodec``, with the names that travel as they are.
        params: By name; floating ones in fp32.
    """
    return codec.encode(params, zeros_like(params))


def decode_values(codec: Codec, encoded: Encoded, like: Mapping[str, Tensor]) -> Params:
    """Return what ``encode_values`` was given, up to the codec's error; floating tensors in fp32.

    What travels by value may be the message's own tensor.

    Args:
        codec: Of the message.
        encoded: The message.
        like: Tensors with the names, shapes and kinds of dtype that are expected, on the device that is wanted.

    Raises:
        ValueError: If the message does not fit.
    """
    return codec.decode(encoded, zeros_like(like))


def zeros_like(params: Mapping[str, Tensor]) -> Params:
    """Return zeros of the same shapes in the memory of one value each; floating ones in fp32."""
    return {
        name: torch.zeros(
            (), dtype=torch.float32 if tensor.is_floating_point() else tensor.dtype, device=tensor.device
        ).expand(tensor.shape)
        for name, tensor in params.items()
    }
