"""How Lightning runs a fit in a process of a run of several, and what all but rank 0 do without.

Owns the list of what is left to rank 0. A user's own callbacks stay: as under other strategies of several processes
they ask ``trainer.is_global_zero`` before they write.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from inspect import signature
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
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_only
from typing_extensions import override

from lightning_blocktrain.strategies.launcher import count_fit
from lightning_blocktrain.strategies.passed_fits import note_fit, noted_fits, pass_over, take_results
from lightning_blocktrain.strategies.place import Place

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
    trainer.loggers = [SilentLogger(trainer.default_root_dir)] if trainer.loggers else []
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


def _from_checkpoint(
    path: str | None, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a fit with the checkpoint that rank 0 resumes from: ``last`` is another one elsewhere."""
    bound = signature(function).bind(*args, **kwargs)
    bound.arguments["ckpt_path"] = path
    return bound.args, bound.kwargs


def _chosen_checkpoint(trainer: L.Trainer, function: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    """Return the checkpoint that a fit is about to resume from, as Lightning resolves ``last`` and ``hpc``."""
    given = signature(function).bind(*args, **kwargs).arguments.get("ckpt_path")
    path = trainer._checkpoint_connector._select_ckpt_path(
        TrainerFn.FITTING, given, model_provided=True, model_connected=trainer.lightning_module is not None
    )
    return str(path) if path else None


class SilentLogger(DummyLogger):
    """Logs nothing; callbacks find a folder that exists when they ask for ``trainer.log_dir``.

    Args:
        folder: Of the Trainer.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    @property
    @override
    def save_dir(self) -> str:
        return self._folder


class MemberLauncher(_Launcher):
    """Runs a Trainer's functions in one process of a run; every fit has a member of its own.

    A process that rank 0 has started passes over the fits before its own, and ends with it: what the script does
    afterwards is rank 0's. What the script does between two fits may use the paths of the first one's checkpoints, and
    no other result of it. In a job of torchrun or SLURM every process runs the whole script, and has the same model and
    the same paths after each fit.

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
        if self._place.passes_over:
            return pass_over(trainer, [])
        child, fit_idx = self._place.child, count_fit()
        if child is not None and fit_idx < child.fit_idx:
            passed = child.more.get("passed", [])
            return pass_over(trainer, passed[fit_idx] if fit_idx < len(passed) else [])
        checkpoints = trainer.checkpoint_callbacks
        if self._place.num_workers is None:
            silence(trainer)
        self.member = self._make_member(fit_idx)
        if child is not None and "ckpt_path" in child.more:
            args, kwargs = _from_checkpoint(child.more["ckpt_path"], function, *args, **kwargs)
        elif self.member.job is not None:
            choose = partial(_chosen_checkpoint, trainer, function, *args, **kwargs)
            path = self.member.job.agreed_checkpoint(trainer, choose)
            args, kwargs = _from_checkpoint(path, function, *args, **kwargs)
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
        if self._place.num_workers is not None:
            note_fit(trainer)
        if self.member.job is not None:
            self._share_results(trainer, self.member, checkpoints)
        return result

    def _share_results(self, trainer: L.Trainer, member: "Member", checkpoints: list[Checkpoint]) -> None:
        """Let ``ckpt_path="best"`` mean the same on every rank of a job, whose script goes on after the fit."""
        assert member.job is not None
        if member.leads:
            member.job.tell_results(noted_fits()[-1])
            return
        take_results(checkpoints, member.job.told_results(member.look_up))
        trainer.callbacks.extend(checkpoints)  # type: ignore[attr-defined]

    @override
    def kill(self, signum: int) -> None:
        """Pass a signal on to the processes that this one has started."""
        if self.member is not None:
            self.member.signal_workers(signum)
