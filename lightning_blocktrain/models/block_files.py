"""A trained model as one file per block, and the part of a model that one host needs to run some of its blocks.

Owns the folder that ``blocktrain export`` writes::

    DIR/interface.safetensors     what all blocks read: readout, embeddings that several blocks use
    DIR/block0.safetensors ...    a block: its layers, and what is its own beside them (embedding, readout)
    DIR/manifest.json             written last: class, arguments, noise bands, digest of every file's tensors

A ``version`` names the weights: two hosts whose versions agree hold parts of one model, whether they read a folder or
the checkpoint that it was made from.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_blocktrain.errors import CheckpointMismatchError, explain
from lightning_blocktrain.models.loading import CLASSES, Model, arguments_of, read_checkpoint
from lightning_blocktrain.partition import as_layout, partition
from lightning_blocktrain.rounds import INTERFACE, block_entry

FORMAT = 1
MANIFEST = "manifest.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MAP_ALIGNMENT = 64
"""Kernels sum in another order where tensors are not aligned: data begin at a multiple of it in a file."""


@dataclass(frozen=True)
class Manifest:
    """What a folder of blocks, or a checkpoint, holds.

    Args:
        model_class: A key of ``CLASSES``.
        arguments: Of its constructor.
        num_blocks: B.
        digests: Of the tensors of every entry: ``block0`` .., ``interface``.
        block_sigma_edges: Of a model with noise, descending; else empty.
    """

    model_class: str
    arguments: dict[str, Any]
    num_blocks: int
    digests: dict[str, str]
    block_sigma_edges: tuple[float, ...] = ()

    @property
    def version(self) -> str:
        """Return the name of these weights: it differs where a weight or what it means does."""
        retunable = CLASSES[self.model_class].retunable
        arguments = sorted(item for item in self.arguments.items() if item[0] not in retunable)
        digests = sorted(self.digests.items())
        meaning = [self.model_class, arguments, self.num_blocks, self.block_sigma_edges, digests]
        return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()[:16]


def write_blocks(model: Model, folder: Path, dtype: str | None = None) -> Manifest:
    """Write a model as one file per block.

    Args:
        model: The model.
        folder: Made if it is not there; must hold no manifest. Files of blocks in it are replaced.
        dtype: A key of ``DTYPES``; None: as the weights are.

    Raises:
        ValueError: If the folder holds a model already or cannot be written.
    """
    if (folder / MANIFEST).exists():
        rule = "the folder must not hold an exported model yet"
        raise ValueError(explain(rule, str(folder), "remove it, or choose another folder"))
    if folder.exists() and not folder.is_dir():
        raise ValueError(explain("the blocks must be written to a folder", f"{folder}, a file", "choose another path"))
    entries = entries_of(model)
    if dtype is not None:
        entries = {name: cast(tensors, DTYPES[dtype]) for name, tensors in entries.items()}
    manifest = describe(model, entries)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, tensors in entries.items():
            _write_aligned(tensors, folder / f"{name}.safetensors")
        text = {"format": FORMAT, "version": manifest.version, **asdict(manifest)}
        partial = folder / f".{MANIFEST}.part"
        partial.write_text(json.dumps(text, indent=2) + "\n")
        partial.replace(folder / MANIFEST)
    except OSError as exc:
        rule = "the blocks must be written to a folder that can be made"
        raise ValueError(explain(rule, f"{folder} ({exc})", "choose another path")) from exc
    return manifest


def load_blocks(path: Path, blocks: Sequence[int] | None, dtype: str = "fp32") -> tuple[Model, Manifest]:
    """Return a model that holds some of its blocks and the interface; the others take no memory and cannot run.

    Weights whose type is the wanted one are mapped from the file.

    Args:
        path: A folder that ``write_blocks`` wrote, or a checkpoint.
        blocks: Their indices; None: all.
        dtype: A key of ``DTYPES``, of the weights and of the computation.

    Raises:
        CheckpointMismatchError: If there is no such model, or what is there is damaged.
        ValueError: If it has no such block.
    """
    manifest, stored = _open(path)
    blocks = range(manifest.num_blocks) if blocks is None else blocks
    wrong = [block_idx for block_idx in blocks if not 0 <= block_idx < manifest.num_blocks]
    if wrong or not blocks or len(set(blocks)) < len(blocks):
        rule = f"blocks must name blocks of the model, 0 to {manifest.num_blocks - 1}, each once"
        raise ValueError(explain(rule, f"blocks={list(blocks)}", "choose one or more of them"))
    try:
        with torch.device("meta"):
            model = CLASSES[manifest.model_class](**manifest.arguments)
        names = entry_names(model)
        if names.keys() != manifest.digests.keys():
            raise ValueError(f"entries {', '.join(sorted(manifest.digests))}")
    except (TypeError, ValueError) as exc:
        rule = "the manifest must describe a model of ours and all of its entries"
        raise CheckpointMismatchError(explain(rule, f"{path} ({exc})", "export the checkpoint again")) from exc
    tensors: dict[str, Tensor] = {}
    for name in (INTERFACE, *map(block_entry, blocks)):
        tensors |= cast(stored(name), DTYPES[dtype])
    wanted = {name for entry in (INTERFACE, *map(block_entry, blocks)) for name in names[entry]}
    misfit = sorted(wanted ^ tensors.keys())
    misfit += [n for n, p in model.named_parameters() if n in tensors and p.shape != tensors[n].shape]
    if misfit:
        rule = "the tensors must be those of the model that the manifest describes"
        raise CheckpointMismatchError(explain(rule, f"other names or shapes: {', '.join(misfit[:5])}", "export again"))
    model.load_state_dict(tensors, strict=False, assign=True)
    model._device = torch.device("cpu")  # Lightning's note of where a module is; moving one with absent tensors fails
    return model.requires_grad_(False).eval(), manifest


def entry_names(model: Model) -> dict[str, tuple[str, ...]]:
    """Return the names of a model's tensors by entry."""
    cut = partition(model, as_layout(model.configure_blocks()))
    return {block_entry(idx): own for idx, own in enumerate(cut.block_names)} | {INTERFACE: cut.interface_names}


def entries_of(model: Model) -> dict[str, dict[str, Tensor]]:
    """Return a model's tensors by entry and name."""
    state = model.state_dict()
    return {entry: {name: state[name] for name in own} for entry, own in entry_names(model).items()}


def describe(model: Model, entries: Mapping[str, Mapping[str, Tensor]]) -> Manifest:
    """Return the manifest of a model whose tensors are ``entries``."""
    edges = tuple(getattr(model, "block_sigma_edges", ()))
    digests = {name: digest(tensors) for name, tensors in entries.items()}
    return Manifest(type(model).__name__, model.arguments(), model.num_blocks, digests, edges)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors with their names, types and shapes."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


def cast(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return tensors with those of floating point in another type."""
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _write_aligned(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file whose data begin where a mapping of it is aligned."""
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    partial = path.parent / f".{path.name}.part"
    save_file(own, partial, {"padding": ""})
    missing = -_data_offset(partial) % MAP_ALIGNMENT
    if missing:
        save_file(own, partial, {"padding": " " * missing})
    umask = os.umask(0)
    os.umask(umask)
    partial.chmod(0o666 & ~umask)  # as any new file: whoever serves may be somebody else
    partial.replace(path)


def _data_offset(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _open(path: Path) -> tuple[Manifest, Any]:
    """Return a stored model's manifest, and a function from an entry to its tensors."""
    if not path.exists():
        rule = "the model must be a checkpoint or a folder that 'blocktrain export' wrote"
        raise CheckpointMismatchError(explain(rule, f"{path}, which is not there", "correct the path"))
    if path.is_dir():
        manifest = read_manifest(path)
        return manifest, lambda name: _mapped(path / f"{name}.safetensors", manifest.digests[name])
    checkpoint = read_checkpoint(path, mapped=True)
    kind, arguments = arguments_of(checkpoint, path)
    with torch.device("meta"):
        model = CLASSES[kind](**arguments)
    names, state = entry_names(model), checkpoint.get("state_dict", {})
    missing = [name for own in names.values() for name in own if name not in state]
    if missing:
        rule = "the weights must fit the model that the checkpoint describes"
        raise CheckpointMismatchError(explain(rule, f"{path} without {missing[0]}", "the file is damaged"))
    entries = {entry: {name: state[name] for name in own} for entry, own in names.items()}
    return describe(model, entries), entries.__getitem__


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder of blocks.

    Raises:
        CheckpointMismatchError: If it is none, or of another format.
    """
    fix = "pass a folder that 'blocktrain export' wrote, or a checkpoint"
    try:
        text = json.loads((folder / MANIFEST).read_text())
        if text.pop("format") != FORMAT or text["model_class"] not in CLASSES:
            raise ValueError("another format")
        version = text.pop("version")
        manifest = Manifest(**text | {"block_sigma_edges": tuple(text["block_sigma_edges"])})
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise CheckpointMismatchError(explain("the folder must hold an exported model", str(folder), fix)) from exc
    if version != manifest.version:
        rule = "the manifest must be as it was exported"
        raise CheckpointMismatchError(explain(rule, f"{folder}, version={version}", "export the checkpoint again"))
    return manifest


def _mapped(path: Path, wanted: str) -> dict[str, Tensor]:
    """Return the tensors of a file, mapped from it.

    Args:
        path: The file.
        wanted: Their digest.

    Raises:
        CheckpointMismatchError: If it is missing, damaged, or holds others.
    """
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as exc:
        rule = "an exported block must be a whole safetensors file"
        raise CheckpointMismatchError(explain(rule, f"{path} ({exc})", "export the checkpoint again")) from exc
    if digest(found) != wanted:
        rule = f"the tensors of {path.stem} must be those that were exported"
        raise CheckpointMismatchError(explain(rule, f"others in {path}", "export the checkpoint again"))
    return found
