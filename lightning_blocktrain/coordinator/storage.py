"""A coordinator's state on disk: whole after every write, whatever interrupts it.

Owns one folder, and keeps every other process out of it. Owns no tensor: what it is given it writes and forgets.

File map::

    lock                          held by the one process that writes; holds its pid
    manifest.json                 what is valid: run, terms, members, and per entry its file and ledger; written last
    <entry>-<version>.safetensors of an entry: master ("master:NAME"), its average ("average:NAME"), outer optimizer
                                  ("buffer:NAME")
    updates/<entry>-<version>-<worker>.frame   accepted in the round that is open, as received; with -<base> before
                                  the dot where the update is of an older version

A write goes to a temporary file, is synced, and takes its name at once. An entry's new file has a new name and the
manifest points to it afterwards, so an interruption at any point leaves the previous state. What no manifest points to
is removed when the folder is opened; of the entries' files the newest ``kept_versions`` stay.

Covered: a killed process, a lost machine, a full disk (the run stands still until there is room), two processes on one
folder, damaged files (refused by their SHA-256). Not covered: accepted updates of the open round after a power failure
(they are not synced: that round goes on without them), and file systems without rename or locks.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_blocktrain.errors import CheckpointMismatchError, StateError, WireError, explain
from lightning_blocktrain.rounds import RoundRules
from lightning_blocktrain.rounds.history import num_bases
from lightning_blocktrain.transport.terms import RunTerms, identity_differences
from lightning_blocktrain.transport.wire import PIECE_BYTES, Frame, Receiver, read_frame

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
OWN_NAMES = re.compile(
    r"(?P<entry>block[0-9]+|interface)-(?P<version>[0-9]+)(-(?P<worker>[0-9]+)(-[0-9]+)?\.frame|\.safetensors)(?P<temporary>\.tmp)?"
)
"""Only files that are called like this are ever removed."""
PLAIN_FIELDS = ("version", "norms", "merged_by", "arrivals", "answered", "counts")
"""What of a ledger's state goes into the manifest; its tensors go into the entry's file."""


@dataclass(frozen=True)
class StoredRun:
    """A run as it was stored.

    Args:
        run_id: Of the run.
        terms: Of the run.
        run: What ``CoordinatorService.run_state`` returned.
        entries: The ledgers' states by entry.
    """

    run_id: str
    terms: RunTerms
    run: dict[str, Any]
    entries: dict[str, dict[str, Any]]


class Storage:
    """The folder of one run. Not synchronised: the thread that calls the ledgers calls it.

    Args:
        folder: Made if missing.
        kept_versions: Newest versions of an entry whose files stay, for who reads them beside this process (see
            ``read_entry_file``); 1 or more.

    Raises:
        StateError: If another process has it, or its manifest is damaged.
    """

    def __init__(self, folder: Path | str, kept_versions: int = 1) -> None:
        self.folder = Path(folder)
        self._kept_versions = kept_versions
        self._updates = self.folder / "updates"
        self._updates.mkdir(parents=True, exist_ok=True)
        self._lock: IO[str] | None = _locked(self.folder / "lock")
        try:
            self._manifest = _read_manifest(self.folder / MANIFEST)
        except StateError:
            self.close()
            raise
        self._written: dict[str, dict[str, Any]] = {}
        self._keep_bases()
        self._remove_leftovers()
        (self.folder / f"{MANIFEST}.tmp").unlink(missing_ok=True)

    @property
    def is_empty(self) -> bool:
        """Whether no run is stored."""
        return not self._manifest

    def create(self, run_id: str, terms: RunTerms, run: dict[str, Any], entries: Mapping[str, dict[str, Any]]) -> None:
        """Store a run for the first time.

        Raises:
            StateError: If the folder holds a run already.
        """
        if self._manifest:
            got = f"folder={self.folder}, run_id={self._manifest['run_id']}"
            raise StateError(explain("a new run needs an empty folder", got, "choose another one"))
        described = {entry: self._write_entry(entry, state) for entry, state in entries.items()}
        manifest = {"format": FORMAT, "run_id": run_id, "terms": terms.to_json(), "run": run, "entries": described}
        self._write_manifest(manifest)

    def store(self, entry: str, state: dict[str, Any]) -> None:
        """Write an entry's file after a close; valid with the next ``store_run``."""
        self._written[entry] = self._write_entry(entry, state)

    def store_run(self, state: dict[str, Any]) -> None:
        """Write the manifest: what is not an entry's, and the entries as last stored; nothing before ``create``."""
        if self._manifest:
            self._write_manifest({**self._manifest, "run": state, "entries": self._manifest["entries"] | self._written})
            for entry in self._written:
                self._remove_leftovers(entry)
            self._written = {}

    def load(self, run_id: str) -> StoredRun:
        """Return the stored run.

        Args:
            run_id: Must be its own.

        Raises:
            CheckpointMismatchError: If it is another run; names both.
            StateError: If a file is missing or damaged.
        """
        manifest = self._manifest
        terms = RunTerms.from_json(manifest["terms"])
        differing = identity_differences({"run_id": run_id}, {"run_id": manifest["run_id"]})
        if differing:
            rule = f"{self.folder} must hold this run (here: asked for, there: stored)"
            raise CheckpointMismatchError(explain(rule, "; ".join(differing), "choose its folder, or an empty one"))
        entries = {entry: self._read_entry(entry, described) for entry, described in manifest["entries"].items()}
        for entry, state in entries.items():
            state["bases"] = self._bases_of(entry, state["version"], terms.rules)
        return StoredRun(manifest["run_id"], terms, manifest["run"], entries)

    def keep_update(self, entry: str, version: int, worker_id: int, base_version: int, message: IO[bytes]) -> None:
        """Keep an accepted update of the open round as it was received, until the round has closed.

        Args:
            entry: Of the update.
            version: Of the round that it counts in.
            worker_id: Who sent it.
            base_version: What it is based on.
            message: The message that it came in.
        """
        message.seek(0)
        of_base = "" if base_version == version else f"-{base_version}"

        def copy(path: Path) -> None:
            with path.open("wb") as file:
                shutil.copyfileobj(message, file, PIECE_BYTES)

        _write_whole(self._updates / f"{entry}-{version}-{worker_id}{of_base}.frame", copy, sync=False)

    def kept_updates(self, entry: str) -> Iterator[tuple[int, Frame]]:
        """Yield the accepted updates of an entry's open round with their workers; damaged ones are left out."""
        version = self._manifest["entries"][entry]["ledger"]["version"]
        for path in sorted(self._updates.glob(f"{entry}-{version}-*.frame")):
            try:
                yield int(path.stem.split("-")[2]), _read_message(path)
            except WireError as exc:
                log.warning("%s is left out: %s", path, exc)

    def close(self) -> None:
        """Let another process have the folder; any number of times."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _write_entry(self, entry: str, state: dict[str, Any]) -> dict[str, Any]:
        path = self._path_of(entry, state["version"])
        tensors = {f"master:{name}": tensor for name, tensor in state["master"].items()}
        tensors |= {f"buffer:{name}": tensor for name, tensor in state["buffers"].items()}
        tensors |= {f"average:{name}": tensor for name, tensor in state["average"].items()}
        contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        plain = {"names": list(state["master"]), "ledger": {name: state[name] for name in PLAIN_FIELDS}}
        metadata = {"entry": entry, **{name: json.dumps(value) for name, value in plain.items()}}
        _write_whole(path, lambda temporary: save_file(contiguous, temporary, metadata))
        return {"file": path.name, "num_bytes": path.stat().st_size, "sha256": _digest(path), **plain}

    def _read_entry(self, entry: str, described: dict[str, Any]) -> dict[str, Any]:
        path = self.folder / described["file"]
        if not path.is_file() or path.stat().st_size != described["num_bytes"] or _digest(path) != described["sha256"]:
            rule = f"{path} must be as the manifest describes it"
            raise StateError(explain(rule, f"another size or SHA-256, or no file, for entry={entry}", "use a backup"))
        return _ledger_state(entry, load_file(path), described["names"], described["ledger"])

    def _bases_of(self, entry: str, version: int, rules: RoundRules) -> list[tuple[int, dict[str, Tensor]]]:
        paths = {base: self._path_of(entry, base) for base in range(version - num_bases(rules), version)}
        return [(base, read_entry_file(path)["master"]) for base, path in paths.items() if path.exists()]

    def _path_of(self, entry: str, version: int) -> Path:
        return self.folder / f"{entry}-{version}.safetensors"

    def _write_manifest(self, manifest: dict[str, Any]) -> None:
        text = json.dumps(manifest, indent=1)
        _write_whole(self.folder / MANIFEST, lambda path: path.write_text(text))
        self._manifest = json.loads(text)  # what a restart would read
        self._keep_bases()

    def _keep_bases(self) -> None:
        if self._manifest:
            num_kept = 1 + num_bases(RunTerms.from_json(self._manifest["terms"]).rules)
            self._kept_versions = max(self._kept_versions, num_kept)

    def _remove_leftovers(self, only_entry: str | None = None) -> None:
        entries = self._manifest.get("entries", {})
        versions = {entry: described["ledger"]["version"] for entry, described in entries.items()}
        for path in [*self.folder.iterdir(), *self._updates.iterdir()]:
            name = OWN_NAMES.fullmatch(path.name)
            if name is None or only_entry not in (None, name["entry"]):
                continue  # somebody else's file, or another entry's
            kept_versions = self._kept_versions if name["worker"] is None else 1
            age = versions.get(name["entry"], -1) - int(name["version"])
            if name["temporary"] or not 0 <= age < kept_versions:
                path.unlink()


def read_entry_file(path: Path) -> dict[str, Any]:
    """Return the ledger's state that a file of a storage holds, without its manifest and its SHA-256.

    For another process on the same machine, where the storage keeps enough versions.

    Raises:
        FileNotFoundError: If the storage has removed it.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return _ledger_state(metadata["entry"], tensors, json.loads(metadata["names"]), json.loads(metadata["ledger"]))


def _ledger_state(
    entry: str, tensors: Mapping[str, Tensor], names: list[str], plain: Mapping[str, Any]
) -> dict[str, Any]:
    master = {name: tensors[f"master:{name}"] for name in names}
    buffers, average = (
        {name: tensors[f"{kind}:{name}"] for name in names if f"{kind}:{name}" in tensors}
        for kind in ("buffer", "average")
    )
    return {"entry": entry, "master": master, "buffers": buffers, "average": average, "accepted": [], **plain}


def _locked(path: Path) -> IO[str]:
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        file.seek(0)
        got = f"folder={path.parent}, pid={file.read().strip()}"
        file.close()
        raise StateError(
            explain("only one coordinator may use a state folder", got, "stop it, or choose another")
        ) from exc
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        manifest = json.loads(path.read_text())
        found = manifest["format"]
    except (ValueError, KeyError, TypeError) as exc:
        raise StateError(explain(f"{path} must be a manifest", repr(exc)[:100], "use a backup")) from exc
    if found != FORMAT:
        raise StateError(
            explain(f"{path} must have format {FORMAT}", f"format={found}", "use the version that wrote it")
        )
    return dict(manifest)


def _write_whole(path: Path, write: Callable[[Path], object], sync: bool = True) -> None:
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    if sync:
        _sync(temporary)
    temporary.replace(path)
    if sync:
        _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Nowhere:
    """Takes what a receiver passes on where only its check is wanted."""

    def write(self, piece: object, /) -> None:
        """Forget the piece."""


def _read_message(path: Path) -> Frame:
    content = bytearray(path.read_bytes())
    receiver = Receiver(_Nowhere(), len(content))
    receiver.take(memoryview(content))
    receiver.finish()
    return read_frame(content)
