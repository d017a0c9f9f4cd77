"""What training rounds did: who was accepted, late, missing or refused, and how far each block moved.

Owns the row that a finished round becomes and the totals of a fit. Refuses to own the round protocol: it reads
the reports that a strategy offers (``ReportsRounds``) and decides nothing.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_blocktrain.rounds.verdicts import INTERFACE, RoundReport, Verdict

REFUSALS = tuple(verdict for verdict in Verdict if verdict not in (Verdict.ACCEPTED, Verdict.LATE))
"""Verdicts that turn an update away for good; ``accepted`` and ``late`` are counted apart."""

WORK = ("accepted_tokens", "worker_steps", "worker_tokens", "sent_bytes")
"""Counters of a strategy that are logged under ``blocktrain/``."""

PREFIX_WORK = ("prefix_bytes", "prefix_tokens", "prefix_s", "prefix_cache_hits")
"""The same of a strategy whose blocks read others (``CountsPrefix``): bytes of the frozen blocks that
the workers of this process have fetched, as encoded; layer-tokens, which are their target tokens, once for every call
of a frozen layer; seconds in frozen layers; batches whose features were found on disk."""


@runtime_checkable
class ReportsRounds(Protocol):
    """A strategy that trains in rounds and says what became of them; all counters only grow during a fit."""

    @property
    def num_rounds_closed(self) -> int:
        """Training rounds finished so far."""
        ...

    @property
    def round_reports(self) -> Sequence[RoundReport]:
        """The reports of the newest finished round, one per entry that closed."""
        ...

    @property
    def accepted_tokens(self) -> int:
        """Tokens of accepted block updates, summed over workers."""
        ...

    @property
    def worker_steps(self) -> int:
        """Inner optimizer steps, summed over workers."""
        ...

    @property
    def worker_tokens(self) -> int:
        """Tokens processed, accepted or not, summed over workers."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes of the updates that the workers of this process have sent, as encoded."""
        ...


@runtime_checkable
class CountsPrefix(Protocol):
    """A strategy that counts what frozen blocks cost; see ``PREFIX_WORK``."""

    @property
    def prefix_bytes(self) -> int:
        """Bytes of the frozen blocks that the workers of this process have fetched, as encoded."""
        ...

    @property
    def prefix_tokens(self) -> int:
        """Layer-tokens that ran through frozen layers."""
        ...

    @property
    def prefix_s(self) -> float:
        """Seconds in frozen layers."""
        ...

    @property
    def prefix_cache_hits(self) -> int:
        """Batches whose features were found on disk."""
        ...


def round_counts(reports: Iterable[RoundReport]) -> Counter[str]:
    """Count what became of the block updates of a round.

    Args:
        reports: Reports of block entries; the interface's are passed over.

    Returns:
        ``expected`` (workers waited for), ``heard`` (those of them that were accepted), ``accepted`` (with workers that
        joined in mid-round), ``stale`` (workers of whom late work was merged), ``late`` (lost), ``missing``, ``merged``
        (blocks that moved) and ``refused/<verdict>`` for each of ``REFUSALS``. Every key is present, so that a table
        keeps its columns.
    """
    names = ("expected", "heard", "accepted", "stale", "late", "missing", "merged", *(f"refused/{v}" for v in REFUSALS))
    counts: Counter[str] = Counter(dict.fromkeys(names, 0))
    for report in reports:
        if report.entry == INTERFACE:
            continue
        counts["expected"] += len(report.expected)
        counts["heard"] += len(set(report.accepted) & set(report.expected))
        counts["accepted"] += len(report.accepted)
        counts["stale"] += len(report.stale)
        counts["late"] += report.counts.get(Verdict.LATE, 0)
        counts["missing"] += len(report.missing)
        counts["merged"] += report.merged
        for verdict in REFUSALS:
            counts[f"refused/{verdict}"] += report.counts.get(verdict, 0)
    return counts


def round_row(reports: Sequence[RoundReport]) -> dict[str, float]:
    """Return the ``rounds/`` values of one finished round (all but ``rounds/round``).

    Args:
        reports: One report per entry that closed.

    Returns:
        The values, by metric key. Counts and participation are those of block updates; the interface, which
        travels with them, is told apart under ``rounds/interface/``.
    """
    counts = round_counts(reports)
    row: dict[str, float] = {"rounds/participation": _ratio(counts.pop("heard"), counts.pop("expected"))}
    row |= {f"rounds/{name}": count for name, count in counts.items()}
    for report in reports:
        row[f"rounds/delta_norm/{report.entry}"] = report.mean_delta_norm
        row[f"rounds/merged_delta_norm/{report.entry}"] = report.merged_delta_norm
        if report.entry == INTERFACE:
            not_accepted = sum(number for verdict, number in report.counts.items() if verdict != Verdict.ACCEPTED)
            row["rounds/interface/participation"] = report.participation
            row["rounds/interface/not_accepted"] = not_accepted
    return row


class RoundMonitor(L.Callback):
    """Log every finished round once, and keep the totals of the fit.

    Rows go to the loggers as they happen, whatever ``log_every_n_steps`` is, on the same step axis as
    ``self.log``; the newest values are in ``trainer.callback_metrics`` too. Under a strategy that does not train
    in rounds it warns once and does nothing.
    """

    def __init__(self) -> None:
        self._source: ReportsRounds | None = None
        self._num_rounds_start = 0
        self._num_rounds_seen = 0
        self._num_reported = 0
        self._totals: Counter[str] = Counter()
        self._work: dict[str, float] = {}

    def summary(self) -> dict[str, float]:
        """Return the totals of the newest fit; empty if it did not train in rounds.

        Returns:
            ``rounds`` (finished), ``rounds_reported`` (those whose report was seen; less than ``rounds`` only if
            several finished within one step), the sums of the counts over the reported rounds, their
            ``participation``, and the strategy's counters of ``WORK`` and ``PREFIX_WORK``.
        """
        if not self._work:
            return {}
        return {
            "rounds": self._num_rounds_seen - self._num_rounds_start,
            "rounds_reported": self._num_reported,
            "participation": _ratio(self._totals["heard"], self._totals["expected"]),
            **self._totals,
            **self._work,
        }

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the strategy's counters and start the totals anew."""
        strategy = trainer.strategy
        self._totals, self._work, self._num_reported = Counter(), {}, 0
        self._source = strategy if isinstance(strategy, ReportsRounds) else None
        if self._source is None:
            rank_zero_warn(f"RoundMonitor has nothing to report: {type(strategy).__name__} does not train in rounds.")
        else:
            self._num_rounds_start = self._num_rounds_seen = self._source.num_rounds_closed

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the round that finished in this step, if one did."""
        for name, value in self._next_row(trainer).items():
            # float64 because token counts outgrow float32; the loggers have the exact numbers already.
            exact = torch.tensor(value, dtype=torch.float64)
            pl_module.log(name, exact, on_step=True, on_epoch=False, logger=False)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log a last round that closed after the last batch."""
        self._next_row(trainer)

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log a last round that the strategy closed in its own ``on_train_end`` or ``teardown``."""
        self._next_row(trainer)
        self._source = None

    def _next_row(self, trainer: L.Trainer) -> dict[str, float]:
        source = self._source
        if source is None:
            return {}
        names = (*WORK, *(PREFIX_WORK if isinstance(source, CountsPrefix) else ()))
        self._work = {name: getattr(source, name) for name in names}
        if source.num_rounds_closed == self._num_rounds_seen:
            return {}
        self._num_rounds_seen = source.num_rounds_closed
        self._num_reported += 1
        reports = source.round_reports
        self._totals.update(round_counts(reports))
        row = {
            "rounds/round": self._num_rounds_seen,
            **round_row(reports),
            **{f"blocktrain/{name}": value for name, value in self._work.items()},
        }
        for logger in trainer.loggers:
            logger.log_metrics(row, step=max(0, trainer.global_step - 1))
        return row


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else float("nan")
