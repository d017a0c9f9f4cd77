"""How Lightning runs a fit in a process of a run of several, and what all but rank 0 do without.

Owns the list of what is left to rank 0. A user's own callbacks stay: as under other strategies of several processes
they ask ``trainer.is_global_zero`` before they write.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.callbacks import (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    ThroughputMonitor,
)
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_only
from typing_extensions import override

from lightning_blocktrain.strategies.launcher import Place, count_fit

if TYPE_CHECKING:
    from lightning_blocktrain.strategies.member import Member

LEFT_TO_RANK_ZERO = (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    ThroughputMonitor,
)
OUR_CALLBACKS = "lightning_blocktrain.callbacks"


def silence(trainer: L.Trainer) -> None:
    """Take loggers, checkpoints, progress bar, monitors and profiler from a Trainer."""
    trainer.loggers = [DummyLogger()] if trainer.loggers else []
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [kept for kept in callbacks if not _is_left_to_rank_zero(kept)]
    trainer.profiler = PassThroughProfiler()  # type: ignore[attr-defined]


def _is_left_to_rank_zero(callback: L.Callback) -> bool:
    return isinstance(callback, LEFT_TO_RANK_ZERO) or type(callback).__module__.startswith(OUR_CALLBACKS)


@contextmanager
def without_validation(trainer: L.Trainer) -> Iterator[None]:
    """Let a fit train only."""
    kept = trainer.limit_val_batches, trainer.num_sanity_val_steps
    trainer.limit_val_batches, trainer.num_sanity_val_steps = 0, 0
    try:
        yield
    finally:
        trainer.limit_val_batches, trainer.num_sanity_val_steps = kept


class MemberLauncher(_Launcher):
    """Runs a Trainer's functions in one process of a run; every fit has a member of its own.

    A process that rank 0 has started passes over the fits before its own, and ends with it: what the script does
    afterwards is rank 0's. What the script does between two fits must work without the results of the first.

    Args:
        place: Of this process.
        make_member: Makes the member of a fit, given its index in the script.
    """

    def __init__(self, place: Place, make_member: "Callable[[int], Member]") -> None:
        rank_zero_only.rank = place.global_rank  # type: ignore[attr-defined]
        self.member: Member | None = None
        """The member of the newest fit."""
        self._place = place
        self._make_member = make_member

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return False

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        """Call ``function``; around a fit, make its member and close it, whatever happens."""
        assert trainer is not None
        if trainer.state.fn != TrainerFn.FITTING:
            return function(*args, **kwargs)
        child, fit_idx = self._place.child, count_fit()
        if child is not None and fit_idx < child.fit_idx:
            trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None
            return None
        if self._place.num_workers is None:
            silence(trainer)
        self.member = self._make_member(fit_idx)
        try:
            with nullcontext() if self._place.num_workers is not None else without_validation(trainer):
                result = function(*args, **kwargs)
        except SIGTERMException as exc:
            # Lightning's would exit with 0: rank 0 has to see that this worker has not come to its end.
            raise SystemExit(128 + signal.SIGTERM) from exc
        finally:
            self.member.close()
        if child is not None:
            raise SystemExit(0)
        return result

    @override
    def kill(self, signum: int) -> None:
        """Pass a signal on to the processes that this one has started."""
        if self.member is not None:
            self.member.signal_workers(signum)
