"""Where the stages of a pipeline spend their time, and how old the readout was that they learnt through.

Owns the window, the totals of a fit and the names. Refuses to measure: the stages keep their own accounts, and the
strategy that runs them offers what they reported (``ReportsStages``).

What the time covers: a stage's life from its start to the end of the fit, without validation. Waiting for the driver
(the data, other callbacks, the saving of a checkpoint) is ``wait_in``; what a stage does between its newest report and
a restart of the pipeline is not seen. ``closure_error`` is what no part holds: the wait for the interpreter's lock
between two parts, and for stages that take turns in the Trainer's own thread everything that others do meanwhile.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, replace
from math import nan
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_blocktrain.errors import explain
from lightning_blocktrain.pipeline.account import PARTS, TimeAccount, decompose
from lightning_blocktrain.pipeline.base import FinishedBatch
from lightning_blocktrain.pipeline.settings import PipelineSettings


@runtime_checkable
class ReportsStages(Protocol):
    """A strategy whose stages learn at the same time, and say what they do with it."""

    @property
    def settings(self) -> PipelineSettings:
        """The options of the pipeline."""
        ...

    @property
    def accounts(self) -> Sequence[TimeAccount]:
        """The newest time account of each stage; empty before the first batch, from zero again after a restart."""
        ...

    @property
    def finished_batches(self) -> Sequence[FinishedBatch]:
        """The batches that the newest training step found finished."""
        ...

    def drain(self) -> None:
        """Wait until all stages have done and reported everything that was ordered."""
        ...


class AccountSums:
    """The accounts of all stages added up, over restarts of the pipeline and without its pauses.

    They begin anew where the number of stages changes.
    """

    def __init__(self) -> None:
        self.totals: tuple[TimeAccount, ...] = ()
        self._newest: tuple[TimeAccount, ...] = ()

    def count(self, accounts: Sequence[TimeAccount]) -> None:
        """Add what happened since the last call of ``count`` or ``skip``."""
        if not accounts:
            return
        zeros = (TimeAccount(),) * len(accounts)
        if len(self._newest) not in (0, len(accounts)):
            self.totals, self._newest = (), ()
        before = self._newest or zeros
        if any(_fell(old, new) for old, new in zip(before, accounts, strict=True)):
            before = zeros
        # x + (new - old), with the one operator that accounts have.
        stages = zip(self.totals or zeros, before, accounts, strict=True)
        self.totals = tuple(total - (old - new) for total, old, new in stages)
        self._newest = tuple(accounts)

    def skip(self, accounts: Sequence[TimeAccount]) -> None:
        """Leave out what happened since the last call of ``count`` or ``skip``."""
        self._newest = tuple(accounts)

    def since(self, earlier: Sequence[TimeAccount]) -> tuple[TimeAccount, ...]:
        """Return what was counted since the totals were ``earlier``; empty, or of other stages: since the start."""
        if len(earlier) != len(self.totals):
            earlier = (TimeAccount(),) * len(self.totals)
        return tuple(total - old for total, old in zip(self.totals, earlier, strict=True))


def _fell(old: TimeAccount, new: TimeAccount) -> bool:
    return any(later < sooner for sooner, later in zip(astuple(old), astuple(new), strict=True))


def time_row(spent: Sequence[TimeAccount], num_threads: int) -> dict[str, float]:
    """Return where the time went, by metric key.

    Args:
        spent: What each stage did in the time in question, at least one step.
        num_threads: Threads of each stage; 1: its CPU seconds are its work, else the time on the clock is.
    """
    row = {}
    for stage_idx, account in enumerate(spent):
        for part in PARTS:
            row[f"pipeline/{part}_frac/stage{stage_idx}"] = getattr(account, f"{part}_s") / account.wall_s
        row[f"pipeline/work_s/stage{stage_idx}"] = account.work_s(num_threads)
    row["pipeline/closure_error"] = max(abs(account.closure_error) for account in spent)
    work_s = [account.work_s(num_threads) for account in spent]
    row["pipeline/parallelism"] = decompose(nan, nan, work_s).parallelism if max(work_s) > 0 else nan
    return row


def lag_row(lags: Sequence[Counter[int]]) -> dict[str, float]:
    """Return the mean and the largest lag of each stage, by metric key.

    Args:
        lags: Per stage, how many batches had each lag; at least one batch.
    """
    row: dict[str, float] = {}
    for stage_idx, histogram in enumerate(lags):
        row[f"pipeline/lag/stage{stage_idx}"] = sum(lag * num for lag, num in histogram.items()) / histogram.total()
        row[f"pipeline/lag_max/stage{stage_idx}"] = max(histogram)
    return row


class LagCounts:
    """How old the readout was in every batch and stage: all of them, and those since the last row.

    The counts begin anew where the number of stages changes.
    """

    def __init__(self) -> None:
        self.all: list[Counter[int]] = []
        self.window: list[Counter[int]] = []
        self._newest: tuple[FinishedBatch, ...] = ()

    def add(self, batches: Sequence[FinishedBatch]) -> None:
        """Count the batches that the previous call had not been given."""
        fresh = [batch for batch in batches if not any(batch is old for old in self._newest)]
        self._newest = tuple(batches)  # the strategy goes on with its list
        for batch in fresh:
            if len(self.all) not in (0, len(batch.stages)):
                self.all, self.window = [], []
            for counts in (self.all, self.window):
                counts.extend(Counter() for _ in batch.stages[len(counts) :])
                for report in batch.stages:
                    counts[report.stage_idx][report.lag] += 1

    def next_window(self) -> None:
        """Begin a new window."""
        self.window = []


class PipelineMonitor(L.Callback):
    """Log where the time of each stage goes and how old the readout was that it learnt through.

    A row covers the steps since the previous row, as far as the stages have reported them; where one has reported
    none, the next row covers them too. Rows have the step axis of ``self.log``; the newest values are in
    ``trainer.callback_metrics`` too. Under a strategy without stages it warns once and does nothing.

    Args:
        log_every_n_steps: Optimizer steps from row to row, at least 1; None: the Trainer's ``log_every_n_steps``.

    Raises:
        ValueError: If ``log_every_n_steps`` is below 1.
    """

    def __init__(self, log_every_n_steps: int | None = None) -> None:
        if log_every_n_steps is not None and log_every_n_steps < 1:
            rule, got = "log_every_n_steps must be at least 1", f"log_every_n_steps={log_every_n_steps}"
            raise ValueError(explain(rule, got, "use 1 or more, or None for the Trainer's"))
        self.log_every_n_steps = log_every_n_steps
        self._source: ReportsStages | None = None
        self._settings: PipelineSettings | None = None
        self._global_step = 0
        self._sums, self._lags = AccountSums(), LagCounts()
        self._at_last_row: tuple[TimeAccount, ...] = ()

    def summary(self) -> dict[str, Any]:
        """Return the values of the whole newest fit, its fill and its end included; empty without stages.

        Returns:
            The metric keys of a row; ``num_batches`` and ``num_steps`` that the times cover (the fewest of any stage;
            a part of a batch counts as one); ``lag_histogram``: per stage, ``{lag: batches}`` with ascending lags.
        """
        row = self._row(self._sums.totals, self._lags.all)
        if not row:
            return {}
        return {
            **row,
            "num_batches": min(account.num_batches for account in self._sums.totals),
            "num_steps": min(account.num_steps for account in self._sums.totals),
            "lag_histogram": tuple(dict(sorted(histogram.items())) for histogram in self._lags.all),
        }

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Let go of the strategy of a fit that failed."""
        self._source = None

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the stages and start the totals anew."""
        strategy = trainer.strategy
        self._sums, self._lags, self._at_last_row = AccountSums(), LagCounts(), ()
        self._global_step = trainer.global_step
        self._source = strategy if isinstance(strategy, ReportsStages) else None
        if self._source is None:
            rank_zero_warn(f"PipelineMonitor has nothing to report: {type(strategy).__name__} has no stages.")
        else:
            self._settings = self._source.settings

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the stages' reports and, if it is this step's turn, log a row."""
        if self._source is None:
            return
        self._count(self._source)
        every = self.log_every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        stepped = trainer.global_step > self._global_step
        self._global_step = trainer.global_step
        if stepped and every and trainer.global_step % every == 0:
            self._log(trainer, pl_module)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count what the stages do until they stand still for the validation."""
        if self._source is not None:
            self._source.drain()
            self._sums.count(self._source.accounts)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the validation out of the stages' time: they report again, with nothing to do before."""
        if self._source is not None:
            self._source.drain()
            self._sums.skip(self._source.accounts)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count what the stages do until the end."""
        if self._source is not None:
            self._source.drain()
            self._count(self._source)

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the batches that the strategy found finished in its own ``on_train_end``."""
        if self._source is not None:
            self._lags.add(self._source.finished_batches)
            self._source = None

    def _count(self, source: ReportsStages) -> None:
        self._sums.count(source.accounts)
        self._lags.add(source.finished_batches)

    def _row(self, spent: Sequence[TimeAccount], lags: Sequence[Counter[int]]) -> dict[str, float]:
        """Return a row; empty if some stage has reported no step."""
        if not lags or not spent or min(account.num_steps for account in spent) < 1:
            return {}
        assert self._settings is not None
        return time_row(spent, _team(self._settings, len(spent))) | lag_row(lags)

    def _log(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        row = self._row(self._sums.since(self._at_last_row), self._lags.window)
        if not row:
            return
        self._at_last_row = self._sums.totals
        self._lags.next_window()
        for logger in trainer.loggers:
            logger.log_metrics(row, step=max(0, trainer.global_step - 1))
        for name, value in row.items():
            # The loggers have the row already, at steps of this callback's own choice.
            exact = torch.tensor(value, dtype=torch.float64)
            pl_module.log(name, exact, on_step=True, on_epoch=False, logger=False)


def _team(settings: PipelineSettings, num_stages: int) -> int:
    """Return the threads of a stage as ``TimeAccount.work_s`` takes them; 0 where its CPU seconds are not its work."""
    if settings.method == "bp_groups":
        return 0  # the driver keeps the account, and the groups' threads do the work
    cap = replace(settings, threads_per_stage=None).num_threads(num_stages)  # asked so, it does not warn again
    return min(settings.threads_per_stage or cap, cap)
