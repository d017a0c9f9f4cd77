"""What a rank keeps of one entry of a run without a coordinator, and how that changes when a round closes.

Owns what a ledger owns elsewhere, for ranks that meet in every round: nobody is late, so time is in the reports only.
Every rank knows who was accepted in which entry; tensors it has only of those it trains.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_blocktrain.rounds import OuterSGD, Params, RoundReport, RoundRules, Verdict
from lightning_blocktrain.rounds.average import move_average
from lightning_blocktrain.rounds.history import History
from lightning_blocktrain.rounds.merge import all_finite, clip_params, delta_norm
from lightning_blocktrain.strategies.collective_merge import Gather, Header, judge, merge_gathered


@dataclass
class CollectiveEntry:
    """One entry, as one rank knows it.

    Args:
        name: ``block0``, ... or ``interface``.
        members: Ranks that train it, ascending; merges are in this order.
        rules: Of the run.
        outer: Of the run.
        closed_at: When the last round closed, seconds on the caller's clock.
        version: Rounds closed.
        accepted_tokens: Of all rounds.
        master: Of who trains it.
        average: What others read of it; of who trains it.
        buffers: Of the outer optimizer.
        report: Of the last round.
    """

    name: str
    members: tuple[int, ...]
    rules: RoundRules
    outer: OuterSGD
    closed_at: float
    version: int = 0
    accepted_tokens: int = 0
    master: Params | None = None
    average: Params = field(default_factory=dict)
    buffers: Params = field(default_factory=dict)
    report: RoundReport | None = None

    def __post_init__(self) -> None:
        self._history = History(self.rules)

    @property
    def lowest(self) -> int:
        """The rank from which others take its master."""
        return self.members[0]

    def verdicts(self, headers: Sequence[Header]) -> dict[int, Verdict]:
        """Return the verdict on every present member's update, by rank."""
        limit = self._history.outlier_limit
        return {rank: judge(headers[rank], limit) for rank in self.members if headers[rank].is_present}

    def merge(
        self, rank: int, params: Params, headers: Sequence[Header], verdicts: Mapping[int, Verdict], gather: Gather
    ) -> float:
        """Make the merge of a round the master; every member calls it.

        Args:
            rank: Of the caller, a member.
            params: Its replica, if it is present.
            headers: Of all ranks.
            verdicts: On the members.
            gather: Among the members.

        Returns:
            The length of the merged step; nan if nothing was merged, and the master is as before.
        """
        accepted = accepted_in(verdicts)
        if len(accepted) < self.rules.needed_replicas:
            return math.nan
        assert self.master is not None
        sent = self.master
        if rank in accepted:
            sent = clip_params(params, self.master, headers[rank].norm, self.rules.clip_norm)
        tokens = {self.members.index(member): headers[member].num_tokens for member in accepted}
        merged = merge_gathered(sent, self.master, tokens, self.rules, gather, len(self.members))
        master, buffers = self.outer.step(self.master, merged, self.buffers)
        # Finite replicas can still overflow in their sum or in the momentum.
        if not (all_finite(master) and all_finite(buffers)):
            return math.nan
        norm = delta_norm(merged, self.master)
        self.master, self.buffers = master, buffers
        return norm

    def move_average(self) -> None:
        """Make the new master a part of the running average that others read; a member calls it once per round."""
        decay, master = self.rules.average_decay, self.master
        assert master is not None
        self.average = move_average(self.average, master, self.version + 1, decay) if decay else master

    def close(self, headers: Sequence[Header], verdicts: Mapping[int, Verdict], norm: float, now: float) -> None:
        """Note that a round has closed.

        Args:
            headers: Of all ranks.
            verdicts: On the members.
            norm: Of the merged step; nan if nothing was merged, as far as this rank knows.
            now: Seconds on the caller's clock.
        """
        self.report = self._report(headers, verdicts, norm, now)
        accepted = accepted_in(verdicts)
        bases = [(rank, self.version) for rank in accepted]
        self._history.note_close(self.version, {}, bases, [headers[rank].norm for rank in accepted])
        self.accepted_tokens += self.report.accepted_tokens
        self.version, self.closed_at = self.version + 1, now

    def _report(
        self, headers: Sequence[Header], verdicts: Mapping[int, Verdict], norm: float, now: float
    ) -> RoundReport:
        accepted, given = accepted_in(verdicts), list(verdicts.values())
        is_merged = math.isfinite(norm)
        norms = [headers[rank].norm for rank in accepted]
        return RoundReport(
            entry=self.name,
            round_idx=self.version,
            version=self.version + 1,
            expected=tuple(verdicts),
            accepted=tuple(accepted),
            refused=tuple(rank for rank in verdicts if rank not in accepted),
            missing=(),
            counts={verdict: given.count(verdict) for verdict in given},
            merged=is_merged,
            note="" if is_merged else self._why_not_merged(len(accepted)),
            accepted_tokens=sum(headers[rank].num_tokens for rank in accepted) if is_merged else 0,
            accepted_steps=sum(headers[rank].num_steps for rank in accepted) if is_merged else 0,
            mean_delta_norm=math.fsum(norms) / len(norms) if norms else 0.0,
            merged_delta_norm=norm if is_merged else 0.0,
            opened_at=self.closed_at,
            closed_at=now,
        )

    def _why_not_merged(self, num_accepted: int) -> str:
        needed = self.rules.needed_replicas
        if num_accepted < needed:
            return f"nothing merged: {num_accepted} accepted, {needed} needed"
        return "nothing merged: the merged tensors overflow fp32"


def accepted_in(verdicts: Mapping[int, Verdict]) -> list[int]:
    """Return the accepted ranks, in order."""
    return [rank for rank, verdict in verdicts.items() if verdict is Verdict.ACCEPTED]
