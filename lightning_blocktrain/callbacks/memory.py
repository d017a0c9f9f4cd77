"""Memory of a process tree, shared pages counted once, and its peak while something runs.

Owns the reading and the sampling thread. Refuses to add up RSS and call it memory: processes that share pages
would count them once each. PSS (proportional set size) divides a page by the number of its users, so its sum over
a tree is what the tree occupies; pages swapped out are not in it.

| measure | read from | sum over a tree |
|---|---|---|
| pss | ``/proc/PID/smaps_rollup`` (Linux), older kernels: psutil | right |
| uss | psutil (macOS, Windows) | too low by the pages shared |
| rss | psutil | too high by the pages shared |

psutil gives PSS without its split into anonymous, file and shared memory, and reading a process twice doubles the
cost of a sample, so the one file that holds both is read here.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import lightning as L
import psutil
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_blocktrain.errors import explain

Measure = Literal["pss", "uss", "rss"]

MEASURES: tuple[Measure, ...] = ("pss", "uss", "rss")
"""Best first; a tree is measured by the first that its root offers, never by two of them."""

MIB = 2**20
JOIN_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class TreeMemory:
    """Memory of a process and its descendants at one moment.

    Args:
        measure: What was summed.
        total_bytes: Sum over the processes, in bytes.
        anon_bytes: Share of heap, stacks and private copies; None where the split is unknown.
        file_bytes: Share of mapped files (libraries, memmaps); None where the split is unknown.
        shmem_bytes: Share of shared memory (tmpfs, shared anonymous mappings); None where the split is unknown.
        num_processes: Processes in the sum; those that vanished meanwhile are not.
        num_unreadable: Processes that the system refused to show, missing from the sum.
    """

    measure: Measure
    total_bytes: int
    anon_bytes: int | None
    file_bytes: int | None
    shmem_bytes: int | None
    num_processes: int
    num_unreadable: int


@dataclass(frozen=True)
class _Share:
    total_bytes: int
    anon_bytes: int | None = None
    file_bytes: int | None = None
    shmem_bytes: int | None = None


def tree_memory(pid: int, procfs: Path = Path("/proc")) -> TreeMemory:
    """Sum the memory of a process and all its descendants.

    Args:
        pid: Root of the tree.
        procfs: Where Linux shows its processes.

    Returns:
        The sum, in the best measure that the root process offers.

    Raises:
        ProcessLookupError: If no process has this id (any more).
        PermissionError: If the system does not show the root process in any measure.
    """
    try:
        root = psutil.Process(pid)
        descendants = root.children(recursive=True)
        measure, share = _read_best(root, procfs)
    except psutil.NoSuchProcess as exc:
        rule = "pid must belong to a running process"
        raise ProcessLookupError(explain(rule, f"pid={pid}", "pass the id of a live process")) from exc
    except psutil.AccessDenied as exc:
        rule = "pid must belong to a process that this user may inspect"
        raise PermissionError(explain(rule, f"pid={pid}", "measure one of your own processes")) from exc
    shares = [share]
    num_unreadable = 0
    for process in descendants:
        try:
            shares.append(_READ[measure](process, procfs))
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            num_unreadable += 1
    return TreeMemory(
        measure=measure,
        total_bytes=sum(share.total_bytes for share in shares),
        anon_bytes=_sum_known(share.anon_bytes for share in shares),
        file_bytes=_sum_known(share.file_bytes for share in shares),
        shmem_bytes=_sum_known(share.shmem_bytes for share in shares),
        num_processes=len(shares),
        num_unreadable=num_unreadable,
    )


def pause_s(cost_s: float, sample_every_s: float, max_duty: float) -> float:
    """Return the seconds to wait after a sample so that sampling takes at most ``max_duty`` of the time.

    Args:
        cost_s: Seconds the sample took.
        sample_every_s: Least wait, in seconds.
        max_duty: Largest share of the time spent sampling, in (0, 1].
    """
    return max(sample_every_s, cost_s * (1 - max_duty) / max_duty)


class MemoryMonitor(L.Callback):
    """Sample the memory of the process tree in a thread and log the newest value and the peak.

    As a callback it runs from ``setup`` to ``teardown`` (or the exception) in the process of global rank zero and
    covers what that process started: ranks that a cluster launched beside it are not in its tree. Outside
    Lightning use it as a context manager. Every start begins a new peak; samples are also taken at the start and
    at the stop. A peak between two samples is missed.

    Args:
        sample_every_s: Least wait between two samples, in seconds.
        max_duty: Largest share of the time spent sampling, in (0, 1].
        pid: Root of the tree; None measures the current process.

    Raises:
        ValueError: If ``sample_every_s`` is not above 0 or ``max_duty`` not in (0, 1].
    """

    def __init__(self, sample_every_s: float = 0.25, max_duty: float = 0.05, pid: int | None = None) -> None:
        if not 0 < sample_every_s < float("inf"):
            raise ValueError(
                explain(
                    "sample_every_s must be finite and above 0",
                    f"sample_every_s={sample_every_s}",
                    "choose for example 0.25",
                )
            )
        if not 0 < max_duty <= 1:
            raise ValueError(
                explain("max_duty must be above 0 and at most 1", f"max_duty={max_duty}", "choose for example 0.05")
            )
        self.sample_every_s = sample_every_s
        self.max_duty = max_duty
        self.pid = pid
        self.num_samples = 0
        self._newest: TreeMemory | None = None
        self._peak_bytes = 0
        self._pause_s = sample_every_s
        self._thread: threading.Thread | None = None
        self._stop_event: threading.Event | None = None
        self._warnings: set[str] = set()

    @property
    def measure(self) -> Measure | None:
        """What is measured; None before the first sample."""
        return self._newest.measure if self._newest else None

    @property
    def newest(self) -> TreeMemory | None:
        """The newest sample; None before the first."""
        return self._newest

    @property
    def peak_mib(self) -> float:
        """Largest simultaneous sum over the tree since the start, in MiB; nan before the first sample."""
        return self._peak_bytes / MIB if self._newest else float("nan")

    def start(self) -> None:
        """Take a sample, forget earlier peaks and start the thread; a running one is stopped first.

        Raises:
            ProcessLookupError: If ``pid`` is not running.
        """
        self.stop()
        self.num_samples, self._newest, self._peak_bytes = 0, None, 0
        self._sample()
        self._warn_once()
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self._stop_event,), name="memory-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Join the thread and take a last sample; without harm when nothing runs."""
        thread, self._thread = self._thread, None
        if thread is None or self._stop_event is None:
            return
        self._stop_event.set()
        thread.join(JOIN_TIMEOUT_S)
        self._stop_event = None
        with suppress(ProcessLookupError):
            self._sample()

    def values(self) -> dict[str, float]:
        """Return the newest sample and the peak by metric key, in MiB; empty before the first sample.

        Returns:
            ``memory/<measure>_mib``, ``memory/peak_<measure>_mib`` and, where the system tells them apart,
            ``memory/anon_mib``, ``memory/file_mib``, ``memory/shmem_mib`` of the newest sample.
        """
        newest = self._newest
        if newest is None:
            return {}
        split = {"anon": newest.anon_bytes, "file": newest.file_bytes, "shmem": newest.shmem_bytes}
        return {
            f"memory/peak_{newest.measure}_mib": self.peak_mib,
            f"memory/{newest.measure}_mib": newest.total_bytes / MIB,
            **{f"memory/{kind}_mib": share / MIB for kind, share in split.items() if share is not None},
        }

    def __enter__(self) -> Self:
        """Start sampling."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop sampling."""
        self.stop()

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Start sampling on global rank zero."""
        if trainer.is_global_zero:
            self.start()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the newest sample and the peak."""
        for name, value in self.values().items():
            pl_module.log(name, value, on_step=True, on_epoch=False)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop, and log the peak of the whole fit, the last validation included."""
        self.stop()
        if values := self.values():
            for logger in trainer.loggers:
                logger.log_metrics(values, step=max(0, trainer.global_step - 1))

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop."""
        self.stop()

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop."""
        self.stop()

    def _run(self, stop: threading.Event) -> None:
        # A tree whose root has ended has no more memory to measure: what was seen so far stands.
        with suppress(ProcessLookupError):
            while not stop.wait(self._pause_s):
                self._sample()

    def _sample(self) -> None:
        began_s = time.perf_counter()
        newest = tree_memory(os.getpid() if self.pid is None else self.pid)
        self._pause_s = pause_s(time.perf_counter() - began_s, self.sample_every_s, self.max_duty)
        self._newest = newest
        self._peak_bytes = max(self._peak_bytes, newest.total_bytes)
        self.num_samples += 1

    def _warn_once(self) -> None:
        newest = self._newest
        if newest is None:
            return
        texts = []
        if newest.measure != "pss":
            texts.append(
                f"PSS is not available here: MemoryMonitor measures {newest.measure.upper()} and logs it under"
                f" memory/peak_{newest.measure}_mib; do not compare it with PSS."
            )
        if newest.num_unreadable:
            texts.append("MemoryMonitor may not read some child processes; their memory is missing from its sums.")
        for text in texts:
            if text not in self._warnings:
                self._warnings.add(text)
                rank_zero_warn(text)


def _read_best(root: psutil.Process, procfs: Path) -> tuple[Measure, _Share]:
    for measure in MEASURES[:-1]:
        with suppress(AttributeError, psutil.AccessDenied):
            return measure, _READ[measure](root, procfs)
    return MEASURES[-1], _READ[MEASURES[-1]](root, procfs)


def _read_pss(process: psutil.Process, procfs: Path) -> _Share:
    try:
        text = (procfs / str(process.pid) / "smaps_rollup").read_text(encoding="ascii")
    except FileNotFoundError:  # no such process, kernel or system: psutil tells which
        return _Share(process.memory_full_info().pss)
    except ProcessLookupError as exc:
        raise psutil.NoSuchProcess(process.pid) from exc
    except PermissionError as exc:
        raise psutil.AccessDenied(process.pid) from exc
    lines = (line.partition(":") for line in text.splitlines()[1:])
    pss = {name: int(value.split()[0]) * 1024 for name, _, value in lines if name.startswith("Pss")}
    if "Pss" not in pss:  # a zombie has no pages left
        raise psutil.NoSuchProcess(process.pid)
    return _Share(pss["Pss"], pss.get("Pss_Anon"), pss.get("Pss_File"), pss.get("Pss_Shmem"))


def _read_uss(process: psutil.Process, procfs: Path) -> _Share:
    return _Share(process.memory_full_info().uss)


def _read_rss(process: psutil.Process, procfs: Path) -> _Share:
    return _Share(process.memory_info().rss)


_READ: dict[Measure, Callable[[psutil.Process, Path], _Share]] = {
    "pss": _read_pss,
    "uss": _read_uss,
    "rss": _read_rss,
}


def _sum_known(parts: Iterable[int | None]) -> int | None:
    known = list(parts)
    return None if not known or None in known else sum(part for part in known if part is not None)
