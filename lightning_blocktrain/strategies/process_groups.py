"""Process groups of one rank, by name, beside the default one, which stays uninitialised.

Owns the groups and the wait for them. Gloo on the CPU, NCCL on CUDA. Every operation is collective: all members call
the same ones in the same order. A group of one is no group: its operations return at once.
"""

import atexit
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_blocktrain.errors import TransportError, explain

SHORTEST_PAUSE_S = 5e-5
LONGEST_PAUSE_S = 5e-3
END_WAIT_S = 3

_left_behind: list[tuple[Any, Any]] = []
"""Operations that were given up, and their groups: to destroy one of gloo's waits for its operations."""


class ProcessGroups:
    """The groups that one rank is in.

    Args:
        store: Where the members of a group find each other; of one fit alone.
        rank: Of this process.
        device: Of the tensors: of a GPU, or the CPU.
        timeout_s: For one operation; a member whose process has ended is noticed at once.
        look_up: Called in every wait; what it raises ends it.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        device: torch.device,
        timeout_s: float,
        look_up: Callable[[], None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._device = device
        self._timeout_s = timeout_s
        self._look_up = look_up
        self._members: dict[str, tuple[int, ...]] = {}
        self._groups: dict[str, Any] = {}

    def open(self, name: str, ranks: Sequence[int]) -> None:
        """Open a group with all its members; others call it without effect, so that the order is the same everywhere.

        Raises:
            TransportError: If a member does not come.
        """
        if self._rank not in ranks:
            return
        self._members[name] = tuple(ranks)
        if len(ranks) > 1:
            store = PrefixStore(name, self._store)
            connect = partial(_group, store, ranks.index(self._rank), len(ranks), self._device, self._timeout_s)
            try:
                self._groups[name] = _in_thread(connect, self._look_up)
            except TransportError:
                raise
            except RuntimeError as exc:
                raise self._broken(name, exc) from exc

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def size(self, name: str) -> int:
        """Return how many members a group has."""
        return len(self._members[name])

    def all_gather(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Return every member's tensor in order of rank; all are contiguous, of one shape and dtype."""
        if name not in self._groups:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in self._members[name]]
        self._wait(name, lambda group: group.allgather([parts], [tensor]))
        return parts

    def broadcast(self, name: str, tensor: Tensor, root: int) -> None:
        """Overwrite every member's contiguous tensor with that of rank ``root``."""
        if name not in self._groups:
            return
        options = distributed.BroadcastOptions()
        options.rootRank = self._members[name].index(root)
        self._wait(name, lambda group: group.broadcast([tensor], options))

    def _wait(self, name: str, start: Callable[[Any], Any]) -> None:
        # Not work.wait() alone: it holds the main thread where no signal reaches it.
        pause_s = SHORTEST_PAUSE_S
        group = self._groups[name]
        try:
            work = start(group)
            while not work.is_completed():
                with _left_behind_on_error(work, group):
                    self._look_up()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            work.wait()
        except TransportError:
            raise
        except RuntimeError as exc:
            raise self._broken(name, exc) from exc

    def _broken(self, name: str, exc: Exception) -> TransportError:
        rule = f"all ranks of group {name!r} {list(self._members[name])[:20]} must take part"
        return TransportError(explain(rule, f"rank={self._rank}: {str(exc)[:200]}", "see the first rank to fail"))

    def close(self) -> None:
        """Give up all groups, any number of times; members that still wait in one get an error."""
        for group in self._groups.values():
            group.shutdown()
        self._groups = {}


def _in_thread(call: Callable[[], Any], look_up: Callable[[], None]) -> Any:
    """Return what ``call`` does, which may hold its thread for long; what ``look_up`` raises leaves it behind."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as exc:
            outcome.set_exception(exc)

    threading.Thread(target=run, name="blocktrain-groups", daemon=True).start()
    while wait([outcome], LONGEST_PAUSE_S).not_done:
        look_up()
    return outcome.result()


@contextmanager
def _left_behind_on_error(work: Any, group: Any) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if not _left_behind:
            atexit.register(_end_in_time)
        _left_behind.append((work, group))
        raise


def _end_in_time() -> None:
    """Let the system end a process that would wait for members of its groups while it is torn down."""
    if not all(work.is_completed() for work, _ in _left_behind):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(END_WAIT_S)


def _group(store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group: Any = distributed.ProcessGroupNCCL(store, rank, size, options)
        group.allreduce([torch.zeros(1, device=device)]).wait()  # NCCL connects only here
        return group
    return distributed.ProcessGroupGloo(store, rank, size, timeout)
