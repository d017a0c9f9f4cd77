"""How an update becomes dense tensors for the wire, and back: fp32, bf16, int8 and top-k.

Owns what the tensors of a message mean and the check of tensors that come from strangers. Refuses to own the bytes of
a frame, its header and its base version (those are the transport's), any verdict (those are the ledger's), and what a
lossy codec owes (that is ``feedback.py``).

``fp32`` sends parameters; the lossy codecs send ``delta = params - base``, so both ends need the same base, bit for
bit. A message has one tensor per part of an update's tensor, under the key ``part:name``, always on the CPU:

====== ============================================= ==================== =======================================
codec  parts, n values in a tensor                   bytes per value      largest error of a finite value
====== ============================================= ==================== =======================================
fp32   values, shape as the tensor                   4, or 2 if 16 bits   none
bf16   delta bf16, shape as the tensor               2                    2**-8 of the delta; 16-bit tensors none
int8   codes int8, scales fp32 (ceil(n / block),)    1 + 4 / block        half a scale, largest of its block / 254
topk   indices int32 (m,), entries fp32 (m,), m <= k at most 8 * top_frac what is not sent; k = ceil(top_frac * n)
====== ============================================= ==================== =======================================

In tensors of many values int8 with ``block=256`` takes .254 of the bytes of fp32, and top-k with ``top_frac=0.05`` at
most .1; k is rounded up, so a short tensor takes more. Added to the base, a delta is rounded once more, to the base's
dtype. Nothing is narrowed to fp16 on the wire: that ends at 65504.

Covered: in every codec, tensors that are not floating travel as they are; a zero delta leaves the base as it was; a
delta with a NaN or an infinity arrives non-finite (int8: with its whole block), so that the ledger refuses it.
Not covered: fp64 parameters travel as fp32 or as an fp32 delta; deltas at the very end of fp32's range, which bf16
and int8 may round to infinity; a message on another base of the same shapes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lightning_blocktrain.errors import explain
from lightning_blocktrain.rounds.merge import Params
from lightning_blocktrain.rounds.verdicts import shown

CodecName = Literal["fp32", "bf16", "int8", "topk"]

MIN_BLOCK = 16
MAX_BLOCK = 2**16
MAX_INDEXED = 2**31 - 1
"""Most values of a tensor whose indices fit int32."""

_LARGEST_CODE = 127
_NARROW = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, *_NARROW)
_OPTIONS = {"fp32": (), "bf16": (), "int8": ("block",), "topk": ("top_frac",)}


@dataclass(frozen=True, eq=False)
class Encoded:
    """One update in the form that is sent.

    Args:
        tensors: By ``part:name``; contiguous CPU tensors that share no memory with each other or with the update.
        meta: The codec and its options, as ``Codec.meta``.
    """

    tensors: dict[str, Tensor] = field(repr=False)
    meta: dict[str, str]


class _Form(NamedTuple):
    """What one part must look like; ``at_most`` lets a vector be shorter."""

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...]
    at_most: bool = False


@dataclass(frozen=True)
class Codec:
    """How the updates of a run travel; the same value at both ends.

    Args:
        name: ``fp32`` is exact; ``bf16``, ``int8`` and ``topk`` are lossy and want ``feedback.ErrorFeedback``.
        block: Values that share one scale of ``int8``, 16 to 65536.
        top_frac: Share of each tensor's values that ``topk`` sends, in (0, 1].
        spared: Names of tensors that travel as they are, as a module's buffers do; the strategies set it. No part of
            the meta: both ends have it from the terms of the run.

    Raises:
        ValueError: If the name is unknown or an option is out of range.
    """

    name: CodecName
    block: int = 256
    top_frac: float = 0.05
    spared: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "spared", tuple(self.spared))  # from JSON it is a list
        if self.name not in get_args(CodecName):
            got = f"name={shown(self.name)}"
            raise ValueError(explain("name must be a known codec", got, f"choose {', '.join(get_args(CodecName))}"))
        if type(self.block) is not int or not MIN_BLOCK <= self.block <= MAX_BLOCK:
            rule = f"block must be an int from {MIN_BLOCK} to {MAX_BLOCK}"
            raise ValueError(explain(rule, f"block={shown(self.block)}", "choose 256"))
        if type(self.top_frac) is not float or not 0.0 < self.top_frac <= 1.0:
            rule = "top_frac must be a float above 0 and at most 1"
            raise ValueError(explain(rule, f"top_frac={shown(self.top_frac)}", "choose 0.05"))

    @property
    def meta(self) -> dict[str, str]:
        """The codec as text, to negotiate it and to mark its messages; options of other codecs are left out."""
        return {"codec": self.name} | {option: repr(getattr(self, option)) for option in _OPTIONS[self.name]}

    @classmethod
    def from_meta(cls, meta: Mapping[str, str]) -> "Codec":
        """Return the codec that ``meta`` describes.

        Args:
            meta: What ``Codec.meta`` gave, as a peer sent it.

        Raises:
            ValueError: If the codec or an option is unknown, missing, out of range or not as ``meta`` writes it.
        """
        options: dict[str, Any] = {"name": meta.get("codec")}
        try:
            options |= {"block": int(meta["block"])} if "block" in meta else {}
            options |= {"top_frac": float(meta["top_frac"])} if "top_frac" in meta else {}
        except (TypeError, ValueError) as exc:
            raise ValueError(_meta_fault(meta)) from exc
        codec = cls(**options)
        if codec.meta != dict(meta):
            raise ValueError(_meta_fault(meta))
        return codec

    def max_bytes(self, base: Mapping[str, Tensor]) -> int:
        """Return the most ``wire_bytes`` of an update, known before it is made or received.

        ``topk`` sends less when values are zero, ``fp32`` when parameters have 16 bits; all else is exactly this.

        Args:
            base: Tensors by name.
        """
        layouts = (self._layout(name, start, by_value=False) for name, start in base.items())
        forms = [form for layout in layouts for form in layout.values()]
        return sum(math.prod(form.shape) * max(dtype.itemsize for dtype in form.dtypes) for form in forms)

    def encode(
        self, params: Mapping[str, Tensor], base: Mapping[str, Tensor], residual: Mapping[str, Tensor] | None = None
    ) -> Encoded:
        """Encode an update.

        Args:
            params: The tensors after the local steps, any device, stride and floating dtype; may be live parameters.
            base: What the steps started from, as the receiver has it: same names and shapes.
            residual: Added to the deltas of the floating tensors it names; those that travel by value ignore it.

        Returns:
            The message, in memory of its own.

        Raises:
            ValueError: If names, shapes or kinds of dtype differ, or a tensor is too large for int32 indices.
        """
        residual = {} if residual is None else residual
        _check_params(params, base)
        _check_residual(residual, base)
        tensors: dict[str, Tensor] = {}
        for name, start in base.items():
            parts = self._pack(name, params[name].detach(), start.detach(), residual.get(name))
            tensors |= {f"{part}:{name}": _owned(tensor) for part, tensor in parts.items()}
        return Encoded(tensors, self.meta)

    def decode(self, encoded: Encoded, base: Mapping[str, Tensor]) -> Params:
        """Return the parameters that a message stands for.

        Everything is checked before anything is allocated, and what is allocated is as large as the base. Values are
        free: a NaN passes.

        Args:
            encoded: The message; whatever it holds, the only error is ``ValueError``.
            base: The tensors of the version that the message names.

        Returns:
            Tensors with the base's names, shapes and devices. What travelled by value keeps the dtype it had and may
            be the message's own tensor; what travelled as a delta has the base's dtype.

        Raises:
            ValueError: If the message is another codec's, or a key, dtype, shape, size or index does not fit.
        """
        parts = self.parts_of(encoded, base)
        return {name: self._unpack(parts[name], start.detach()) for name, start in base.items()}

    def parts_of(self, encoded: Encoded, base: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Return the parts of a message by name, checked against the base; see ``decode``."""
        if not isinstance(encoded.tensors, Mapping) or encoded.meta != self.meta:
            got = f"meta={shown(str(encoded.meta))}, tensors={type(encoded.tensors).__name__}"
            raise ValueError(explain(f"the message must be of codec {self.meta}", got, "use the run's codec"))
        parts = {name: self._parts(encoded.tensors, name, start) for name, start in base.items()}
        num_known = sum(map(len, parts.values()))
        if len(encoded.tensors) != num_known:
            got = f"num_tensors={len(encoded.tensors)}, num_known={num_known}"
            raise ValueError(explain("the message must hold no other tensor", got, "send the entry's tensors"))
        return parts

    def _num_top(self, numel: int) -> int:
        if numel > MAX_INDEXED:
            rule = f"topk needs tensors of at most {MAX_INDEXED} values, since indices are int32"
            raise ValueError(explain(rule, f"num_values={numel}", "choose int8"))
        return min(numel, math.ceil(self.top_frac * numel))

    def _by_value(self, name: str, tensor: Tensor) -> bool:
        # A difference of two 16-bit floats needs more than 16 bits: sent as they are, they are smaller and exact.
        narrow = self.name == "bf16" and tensor.dtype in _NARROW
        return narrow or self._is_exact(name) or not tensor.is_floating_point()

    def _is_exact(self, name: str) -> bool:
        # Rounding could carry a running variance below zero.
        return self.name == "fp32" or name in self.spared

    def _layout(self, name: str, start: Tensor, by_value: bool) -> dict[str, _Form]:
        shape, numel = tuple(start.shape), start.numel()
        if not start.is_floating_point():
            return {"values": _Form((start.dtype,), shape)}
        if self._is_exact(name) or (self.name == "bf16" and by_value):
            return {"values": _Form(_FLOATS if self._is_exact(name) else _NARROW, shape)}
        if self.name == "bf16":
            return {"delta": _Form((torch.bfloat16,), shape)}
        if self.name == "int8":
            scales = _Form((torch.float32,), (math.ceil(numel / self.block),))
            return {"codes": _Form((torch.int8,), shape), "scales": scales}
        most = (self._num_top(numel),)
        return {"indices": _Form((torch.int32,), most, True), "entries": _Form((torch.float32,), most, True)}

    def _pack(self, name: str, tensor: Tensor, start: Tensor, residual: Tensor | None) -> dict[str, Tensor]:
        if self._by_value(name, tensor):
            other = tensor.is_floating_point() and tensor.dtype not in _FLOATS
            return {"values": tensor.to(torch.float32) if other else tensor}
        num_top = self._num_top(tensor.numel()) if self.name == "topk" else 0
        delta = difference(tensor, start)
        if residual is not None:
            delta = delta + residual.to(delta.device)
        if self.name == "bf16":
            return {"delta": delta.to(torch.bfloat16)}
        if self.name == "int8":
            codes, scales = quantize(delta, self.block)
            return {"codes": codes, "scales": scales}
        indices, entries = select_top(delta, num_top)
        return {"indices": indices, "entries": entries}

    def _parts(self, tensors: Mapping[str, Tensor], name: str, start: Tensor) -> dict[str, Tensor]:
        layout = self._layout(name, start, by_value=f"values:{name}" in tensors)
        for part, form in layout.items():
            _check_part(f"{part}:{name}", tensors.get(f"{part}:{name}"), form)
        parts = {part: tensors[f"{part}:{name}"] for part in layout}
        if "indices" in parts:
            _check_indices(name, parts["indices"], parts["entries"], start.numel())
        return parts

    def _unpack(self, parts: Mapping[str, Tensor], start: Tensor) -> Tensor:
        parts = {part: tensor.to(start.device) for part, tensor in parts.items()}
        if "values" in parts:
            return parts["values"]
        if self.name == "bf16":
            delta = parts["delta"].to(torch.float32)
        elif self.name == "int8":
            delta = dequantize(parts["codes"], parts["scales"], self.block)
        else:
            delta = spread(parts["indices"], parts["entries"], start.numel())
        wide = _wide(start.dtype)
        return (start.to(wide) + delta.view(start.shape)).to(start.dtype)


def decoded(codec: Codec, tensors: Mapping[str, Tensor], meta: Mapping[str, str], base: Mapping[str, Tensor]) -> Params:
    """Return what a message of a peer stands for.

    Raises:
        ValueError: If it is not of this codec, or does not fit the base.
    """
    return codec.decode(Encoded(dict(tensors), dict(meta)), base)


def wire_bytes(encoded: Encoded) -> int:
    """Return the bytes of a message's tensors; names, shapes and the frame around them come on top."""
    return sum(tensor.numel() * tensor.element_size() for tensor in encoded.tensors.values())


def quantize(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Round values to int8 by blocks of the flattened tensor, symmetrically and to nearest, ties to even.

    Args:
        values: fp32, any shape.
        block: Values per scale; the last block may be shorter.

    Returns:
        Codes in [-127, 127], int8, shape of ``values``; scales, fp32, (ceil(n / block),): the largest magnitude of the
        block / 127, at least 2**-126. A block that holds a NaN or an infinity has a non-finite scale.
    """
    flat = values.reshape(-1)
    padding = -flat.numel() % block
    blocks = torch.nn.functional.pad(flat, (0, padding)).view(-1, block)  # (ceil(n / block), block)
    # The floor keeps a block of zeros or subnormals from a division by zero; what it rounds away is below half a scale.
    scales = (blocks.abs().amax(dim=1) / _LARGEST_CODE).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (blocks / scales[:, None]).round_().nan_to_num_(nan=0.0).clamp_(-_LARGEST_CODE, _LARGEST_CODE)
    return codes.to(torch.int8).view(-1)[: flat.numel()].reshape(values.shape), scales


def dequantize(codes: Tensor, scales: Tensor, block: int) -> Tensor:
    """Return ``code * scale``, fp32, shape of ``codes``; a non-finite scale makes its whole block non-finite.

    Args:
        codes: int8, any shape.
        scales: fp32, (ceil(n / block),).
        block: Values per scale.
    """
    per_value = scales.repeat_interleave(block)[: codes.numel()]  # (n,)
    return codes.to(torch.float32) * per_value.view(codes.shape)


def select_top(values: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Choose the values of largest magnitude, without zeros; a NaN counts as the largest.

    Args:
        values: fp32, any shape.
        num_top: At most how many, 0 to n.

    Returns:
        Indices into the flattened tensor, int32, ascending, (m,); the values there, fp32, (m,).
    """
    flat = values.reshape(-1)
    indices = flat.abs().topk(num_top, sorted=False).indices.sort().values
    indices = indices[flat[indices] != 0.0]
    return indices.to(torch.int32), flat[indices]


def spread(indices: Tensor, entries: Tensor, numel: int) -> Tensor:
    """Return a vector of zeros, fp32, (numel,), with ``entries`` at ``indices``, which are distinct."""
    flat = torch.zeros(numel, dtype=torch.float32, device=entries.device)
    flat[indices.long()] = entries
    return flat


def difference(tensor: Tensor, start: Tensor) -> Tensor:
    """Return ``tensor - start`` in fp32 on the device of ``start``, whatever the two dtypes; fp64 is rounded last."""
    wide = _wide(start.dtype)
    return (tensor.to(device=start.device, dtype=wide) - start.to(wide)).to(torch.float32)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _owned(tensor: Tensor) -> Tensor:
    # Frames refuse strided and shared tensors, and the caller goes on training the parameters.
    return tensor.to(device="cpu", copy=True, memory_format=torch.contiguous_format)


def _meta_fault(meta: Mapping[str, str]) -> str:
    known = ", ".join(f"{name} {list(options)}" for name, options in _OPTIONS.items())
    rule = "codec and its own options must be given as text, and nothing else"
    return explain(rule, f"meta={shown(str(dict(meta)))}", f"choose one of {known}, as Codec.meta writes it")


def _check_params(params: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> None:
    if params.keys() != base.keys():
        extra, missing = sorted(params.keys() - base.keys()), sorted(base.keys() - params.keys())
        got = f"only in params={extra[:3]}, only in base={missing[:3]}"
        raise ValueError(explain("params must have the names of base", got, "encode one whole entry"))
    for name, start in base.items():
        tensor = params[name]
        floating = tensor.is_floating_point() and start.is_floating_point()
        if tensor.shape != start.shape or not (floating or tensor.dtype == start.dtype):
            got = f"name={name}, params={_described(tensor)}, base={_described(start)}"
            raise ValueError(explain("params must have the shapes and kinds of dtype of base", got, "fetch the base"))


def _check_residual(residual: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> None:
    for name, tensor in residual.items():
        if name not in base or tensor.shape != base[name].shape:
            got = f"name={name}, residual={_described(tensor)}"
            raise ValueError(explain("residual must fit base", got, "reset the error feedback"))


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _check_part(key: str, tensor: object, form: _Form) -> None:
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        rule, got = f"{key} must be there as a dense tensor", f"type={type(tensor).__name__}"
        raise ValueError(explain(rule, got, "send every part of the codec"))
    shape = tuple(tensor.shape)
    fits = shape == form.shape or (form.at_most and len(shape) == 1 and shape[0] <= form.shape[0])
    if not fits or tensor.dtype not in form.dtypes:
        dtypes = " or ".join(str(dtype) for dtype in form.dtypes)
        rule = f"{key} must have {'at most ' if form.at_most else ''}shape {form.shape} and dtype {dtypes}"
        raise ValueError(explain(rule, f"tensor={_described(tensor)}", "encode with the run's codec and this base"))


def _check_indices(name: str, indices: Tensor, entries: Tensor, numel: int) -> None:
    num_indices = indices.numel()
    fits = num_indices == entries.numel()
    if fits and num_indices > 0:
        ascending = bool((indices[1:] > indices[:-1]).all())  # also says that none comes twice
        fits = ascending and int(indices[0]) >= 0 and int(indices[-1]) < numel
    if not fits:
        rule = f"indices:{name} must ascend within {numel} values and be as many as the entries"
        got = f"num_indices={num_indices}, num_entries={entries.numel()}, or an index out of order or range"
        raise ValueError(explain(rule, got, "encode with the run's codec and this base"))
