"""What a block reads of a batch, kept on disk, so that no frozen layer runs when the batch comes again.

Owns a folder of files, one per batch and prefix, and the hook that a module asks through. Owns no copy::

    FOLDER/PREFIX/BATCH.safetensors   PREFIX: digest of the copies that the features were made with; BATCH: of the batch

A file appears whole or not at all; a process that is killed leaves at most a temporary file, which ages and goes like
the others. Processes may share a folder: the same name always means the same values, and a file that another one has
deleted is a miss. A worker deletes what it had made with the prefix before; beyond ``max_bytes`` the oldest files go.

Covered: several processes, files that are cut or foreign (a miss). Not covered: features that depend on more than the
batch and the prefix, such as dropout in frozen layers or the global step; the size, which every process may exceed by a
sixteenth.
"""

import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_blocktrain.errors import explain
from lightning_blocktrain.partition import Partition
from lightning_blocktrain.protocols import SupportsFeatures
from lightning_blocktrain.strategies.frozen_blocks import FrozenBlocks

FeatureDtype = Literal["fp32", "bf16"]
Features = Tensor | tuple[Tensor, ...]

GIB = 2**30
HOOK = "block_features"
_SUFFIX = ".safetensors"
_RECOUNT_FRAC = 1 / 16


@dataclass(frozen=True)
class CacheSettings:
    """Where features are kept and how; the strategy's arguments, checked.

    Args:
        folder: None keeps nothing.
        max_gib: Largest size of the folder.
        dtype: Of the floating values on disk; features that have fewer bits are kept as they are.

    Raises:
        ValueError: If a value is out of range.
    """

    folder: str | Path | None = None
    max_gib: float = 4.0
    dtype: FeatureDtype = "bf16"

    def __post_init__(self) -> None:
        if not isinstance(self.max_gib, int | float) or not 0 < self.max_gib < float("inf"):
            rule = "prefix_cache_gib must be finite and above 0"
            raise ValueError(explain(rule, f"prefix_cache_gib={self.max_gib!r}", "give GiB"))
        if self.dtype not in get_args(FeatureDtype):
            got = f"prefix_cache_dtype={self.dtype!r}"
            raise ValueError(explain("prefix_cache_dtype must be 'fp32' or 'bf16'", got, "choose one"))


def make_cache(settings: CacheSettings, module: nn.Module, partition: Partition) -> "FeatureCache | None":
    """Return the cache of a fit, or None if none is wanted.

    Raises:
        MisconfigurationException: If the module has nothing to keep.
    """
    if settings.folder is None:
        return None
    has_hook, prefix = isinstance(module, SupportsFeatures), partition.layout.prefix
    if not has_hook or prefix != "frozen":
        rule = f"prefix_cache is for modules with prefix='frozen' and {HOOK}(batch, block_idx)"
        got = f"prefix={prefix!r}, {HOOK} {'there' if has_hook else 'missing'} in {type(module).__name__}"
        raise MisconfigurationException(explain(rule, got, "leave prefix_cache out, or add the hook"))
    return FeatureCache(Path(settings.folder), int(settings.max_gib * GIB), settings.dtype)


class FeatureCache:
    """Features by batch and prefix, in a folder.

    Args:
        folder: Made if it is missing.
        max_bytes: Largest size of all files in it.
        dtype: See ``CacheSettings``.
    """

    def __init__(self, folder: Path, max_bytes: int, dtype: FeatureDtype = "bf16") -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._dtype = dtype
        self._num_uncounted = max_bytes  # what is there already has not been counted
        self._newest: dict[int, str] = {}

    @contextmanager
    def serving(self, module: nn.Module, frozen: FrozenBlocks, reader_idx: int) -> Iterator[None]:
        """Let the module's ``block_features`` look on disk first, for block ``reader_idx``; inside ``frozen.lent``."""
        own = vars(module).get(HOOK)
        compute = cast(SupportsFeatures, module).block_features

        def block_features(batch: Any, block_idx: int) -> Features:
            if block_idx != reader_idx or block_idx == 0:
                return compute(batch, block_idx)
            digest = frozen.digest(block_idx)
            found, is_hit = self.features(batch, digest, block_idx, lambda: compute(batch, block_idx))
            frozen.work.num_hits += is_hit
            return found

        setattr(module, HOOK, block_features)
        try:
            yield
        finally:
            delattr(module, HOOK)
            if own is not None:
                setattr(module, HOOK, own)

    def features(
        self, batch: Any, prefix: str, block_idx: int, compute: Callable[[], Features]
    ) -> tuple[Features, bool]:
        """Return the features of a batch, and whether they were on disk; else they are computed and kept.

        Args:
            batch: Any collection with tensors; without one, nothing is kept.
            prefix: Digest of what they are made with.
            block_idx: The block that reads them; what it has kept of another prefix is deleted.
            compute: Makes them.
        """
        self._forget_older(prefix, block_idx)
        digest, device = digest_of(batch)
        if device is None:
            return compute(), False
        path = self._folder / prefix / f"{digest}{_SUFFIX}"
        found = self._load(path, device)
        if found is not None:
            return found, True
        made = compute()
        self._store(path, made)
        return made, False

    def _forget_older(self, prefix: str, block_idx: int) -> None:
        older = self._newest.get(block_idx, prefix)
        self._newest[block_idx] = prefix
        if older != prefix:
            shutil.rmtree(self._folder / older, ignore_errors=True)

    def _load(self, path: Path, device: torch.device) -> Features | None:
        try:
            with safe_open(path, framework="pt") as file:
                dtypes = file.metadata()
                # Copied: a kernel may sum in another order where a tensor does not begin at a whole vector of memory.
                tensors = tuple(
                    file.get_tensor(str(idx)).to(device, getattr(torch, dtypes[str(idx)]), copy=True)
                    for idx in range(len(dtypes) - 1)
                )
        except (OSError, SafetensorError, KeyError, TypeError, AttributeError):
            return None  # not there, or damaged: it is made again, and replaced
        return tensors[0] if dtypes["form"] == "tensor" else tensors

    def _store(self, path: Path, made: Features) -> None:
        tensors = (made,) if isinstance(made, Tensor) else made
        dtypes = {str(idx): str(tensor.dtype).removeprefix("torch.") for idx, tensor in enumerate(tensors)}
        kept = {str(idx): self._narrowed(tensor) for idx, tensor in enumerate(tensors)}
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
        if num_bytes > self._max_bytes:
            return
        self._make_room(num_bytes)
        temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
        with suppress(OSError):  # a full disk, or a folder that another process has just deleted
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                save_file(kept, temporary, {**dtypes, "form": "tensor" if isinstance(made, Tensor) else "tuple"})
                temporary.replace(path)
            except SafetensorError as exc:
                raise OSError(str(exc)) from exc
            finally:
                temporary.unlink(missing_ok=True)

    def _narrowed(self, tensor: Tensor) -> Tensor:
        narrows = self._dtype == "bf16" and tensor.dtype in (torch.float32, torch.float64)
        values = tensor.detach().to("cpu", torch.bfloat16 if narrows else tensor.dtype)
        return values.contiguous() if values.untyped_storage().nbytes() == values.nbytes else values.clone()

    def _make_room(self, num_bytes: int) -> None:
        self._num_uncounted += num_bytes
        if self._num_uncounted < _RECOUNT_FRAC * self._max_bytes:
            return
        files = sorted(_files_in(self._folder))  # oldest first
        total = num_bytes + sum(size for _, size, _ in files)
        limit = (1 - _RECOUNT_FRAC) * self._max_bytes
        for _, size, path in files:
            if total <= limit:
                break
            with suppress(OSError):
                path.unlink()
            total -= size
        self._num_uncounted = 0


def digest_of(batch: Any) -> tuple[str, torch.device | None]:
    """Return a digest of a batch and of the precision that is computed in, and the device; None: it has no tensor.

    Args:
        batch: Any collection of tensors and plain values.
    """
    digest, devices = hashlib.blake2b(digest_size=16), list[torch.device]()

    def take(value: Any) -> None:
        if isinstance(value, Tensor):
            devices.append(value.device)
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(repr(value).encode())

    apply_to_collection(batch, (Tensor, str, int, float, bool), take)
    for kind in {device.type for device in devices}:
        digest.update(f"{torch.is_autocast_enabled(kind)} {torch.get_autocast_dtype(kind)}".encode())
    return digest.hexdigest(), devices[0] if devices else None


def _files_in(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield time of change, size and path of what is kept."""
    for root, _, names in os.walk(folder):
        for path in (Path(root) / name for name in names if name.endswith((_SUFFIX, ".tmp"))):
            with suppress(OSError):  # another process may have deleted it
                found = path.stat()
                yield found.st_mtime_ns, found.st_size, path
